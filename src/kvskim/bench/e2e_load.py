"""Continuous batching under load: requests arrive, their prompts are computed while others decode, and every token is timed where a client sees it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvskim.bench.e2e_plan import Job

SEED = 0


@dataclass(frozen=True)
class Arrival:
    """A request: ``second`` it arrives in, counted from the start (0 in a closed loop), and how many tokens it puts out."""

    second: float
    output: int


def arrivals(job: Job, seed: int = SEED) -> list[Arrival]:
    """The requests of a load job, the same for both sides: output lengths uniform between the bounds, arrivals a Poisson process where a rate is given."""
    draw = random.Random(seed)
    second, found = 0.0, []
    for _ in range(job.requests):
        second += draw.expovariate(job.rate) if job.rate else 0.0
        found.append(Arrival(second, draw.randint(job.shortest, job.longest)))
    return found


@dataclass
class Trace:
    """One request as its client saw it: seconds of arrival and of the outputs, and tokens in each output."""

    arrival: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def drive(engine: Any, job: Job, submit: Callable[[int, int], str], clock: Callable[[], float] = time.perf_counter) -> list[Trace]:
    """Run all requests of a load job through an engine, step by step.

    Args:
        engine: of vLLM, with ``step`` and ``has_unfinished_requests``; outputs carry the new tokens only.
        job: what to run. Without a rate a request is added whenever fewer than ``job.batch`` are in flight.
        submit: adds request number i with so many output tokens to the engine, and returns its name; names are all of one length.
        clock: seconds.
    """
    waiting = list(enumerate(arrivals(job)))[::-1]
    traces: dict[str, Trace] = {}
    live = 0
    start = clock()
    while waiting or live:
        while waiting and (clock() - start >= waiting[-1][1].second if job.rate else live < job.batch):
            index, arrival = waiting.pop()
            # A request that is late in being added, because a step was under way, has waited since it was due.
            since = start + arrival.second if job.rate else clock()
            traces[submit(index, arrival.output)] = Trace(since)
            live += 1
        if not live:
            time.sleep(max(0.0, start + waiting[-1][1].second - clock()))
            continue
        for output in engine.step():
            now = clock()
            new = sum(len(completion.token_ids) for completion in output.outputs)
            if new:
                # Some versions append a suffix to the name.
                trace = traces[output.request_id[: len(next(iter(traces)))]]
                trace.times.append(now)
                trace.tokens.append(new)
            live -= bool(output.finished)
    return list(traces.values())


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(job: Job, traces: Sequence[Trace]) -> dict[str, float]:
    """Figures of a load job: tokens per second, inter-token latency and time to first token in milliseconds, most requests that decoded at a time."""
    silent = sum(not trace.times for trace in traces)
    if silent or not traces:
        raise RuntimeError(f"{silent} of {len(traces)} requests gave no token")
    seconds = max(trace.times[-1] for trace in traces) - min(trace.arrival for trace in traces)
    outputs = sum(sum(trace.tokens) for trace in traces)
    gaps = [(b - a) * 1e3 for trace in traces for a, b in zip(trace.times, trace.times[1:])]
    first = [(trace.times[0] - trace.arrival) * 1e3 for trace in traces]
    result = dict(
        seconds=seconds, output_tokens=outputs, output_tokens_s=outputs / seconds, total_tokens_s=(outputs + len(traces) * job.context) / seconds,
        ttft_p50_ms=percentile(first, 0.5), ttft_p99_ms=percentile(first, 0.99), most_decoding=most_at_once([(t.times[0], t.times[-1]) for t in traces]),
    )
    if gaps:
        result.update(itl_p50_ms=percentile(gaps, 0.5), itl_p99_ms=percentile(gaps, 0.99))
    return result


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Most spans that cover one moment, their ends included."""
    # Sorting is stable: of what happens at one moment, starts come before ends.
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans], key=lambda event: event[0])
    most = current = 0
    for _, change in events:
        current += change
        most = max(most, current)
    return most
