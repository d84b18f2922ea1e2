"""Time GPU work: CUDA graphs over rotating buffers that do not fit the L2 cache, events, medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Launch = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch: the median of the repetitions, the fastest and the slowest."""

    median: float
    low: float
    high: float


def _events(run: Launch) -> float:
    """Microseconds between two events around ``run``."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def _summary(samples: list[float], launches: int) -> Timing:
    per_launch = [s / launches for s in samples]
    return Timing(statistics.median(per_launch), min(per_launch), max(per_launch))


def time_graph(launches: Sequence[Launch], repetitions: int = 9, smallest_us: float = 400.0) -> Timing:
    """Time of one launch when the launches run back to back in one CUDA graph, each on its own buffers.

    Args:
        launches: the same work on different buffers, together larger than the L2 cache.
        repetitions: timed replays; the median is reported.
        smallest_us: the launches are repeated in the graph until one replay is about this long.
    """
    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(warmup)
    torch.cuda.synchronize()

    def record(rounds: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for launch in launches:
                    launch()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    graph = record(1)
    once = min(_events(graph.replay) for _ in range(3))
    rounds = max(1, min(64, round(smallest_us / max(once, 1.0))))
    if rounds > 1:
        graph = record(rounds)
    samples = [_events(graph.replay) for _ in range(repetitions)]
    return _summary(samples, rounds * len(launches))


def time_eager(launches: Sequence[Launch], repetitions: int = 5) -> Timing:
    """Time of one launch from Python, without a graph; what a prefill or an eager engine pays."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()

    def run() -> None:
        for launch in launches:
            launch()

    return _summary([_events(run) for _ in range(repetitions)], len(launches))


def copy_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes per second that a device-to-device copy moves, reads and writes counted: the yardstick of every bandwidth figure."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()

    def run() -> None:
        for _ in range(8):
            target.copy_(source)

    best = min(_events(run) for _ in range(5))
    return 2 * nbytes * 8 / (best * 1e-6)
