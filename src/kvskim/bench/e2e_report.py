"""The figures of `kvskim bench e2e` side by side: speed-up, roofline of the step; merging of results; JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvskim.bench.e2e_plan import DENSE, KVSKIM, Job
from kvskim.bench.e2e_run import Run
from kvskim.config import SkimConfig
from kvskim.errors import KvskimError
from kvskim.layout import PAGE_TOKENS, ceil_div

FORMAT = "kvskim-bench-e2e-1"


# ---------------------------------------------------------------------- roofline
def step_bytes(engine: Mapping[str, Any], batch: int, context: int, attended: int = 0) -> int | None:
    """Bytes that one decode step has to read: weights, then for each layer K and V, or all records and the K and V of the attended pages.

    Args:
        engine: facts of `kvskim.bench.e2e_probe.engine_facts`.
        batch: requests.
        context: tokens of each.
        attended: pages attended in sparse layers, summed over layers, requests and kv heads.

    Returns:
        bytes; None for a model with experts, of which a step reads a part that depends on the tokens.
    """
    if engine["expert_bytes"]:
        return None
    total = int(engine["weight_bytes"])
    sparse_heads = sparse_bytes = 0
    for layer in engine["layers"]:
        token_bytes = (1 if layer["latent"] else 2) * layer["head_size"] * layer["element_bytes"]
        if layer["record_bytes"] is None:
            length = context if layer["window"] is None else min(context, layer["window"])
            total += batch * length * layer["kv_heads"] * token_bytes
        else:
            total += batch * ceil_div(context, PAGE_TOKENS) * layer["kv_heads"] * layer["record_bytes"]
            sparse_heads += layer["kv_heads"]
            sparse_bytes += layer["kv_heads"] * PAGE_TOKENS * token_bytes
    return total + (attended * sparse_bytes // sparse_heads if sparse_heads else 0)


def floor_ms(run: Run, job: Job, value: Mapping[str, Any]) -> float | None:
    """Milliseconds that the bytes of a decode step take at the measured copy bandwidth."""
    if run.engine is None:
        return None
    nbytes = step_bytes(run.engine, job.batch, job.context, int(value.get("activity", {}).get("attended", 0)))
    return None if nbytes is None else nbytes / run.machine["copy_bandwidth"] * 1e3


# ---------------------------------------------------------------------- rows
@dataclass(frozen=True)
class Row:
    """One measurement on both sides. ``dense`` and ``kvskim``: the figures of each, None where there are none. Times in milliseconds."""

    model: str
    weights: str
    selector: str
    job: Job
    dense: dict[str, Any] | None = None
    kvskim: dict[str, Any] | None = None
    dense_floor_ms: float | None = None
    kvskim_floor_ms: float | None = None
    dense_error: str = ""
    kvskim_error: str = ""

    @property
    def measure(self) -> str:
        """The figure that is compared."""
        return {"decode": "tpot_ms", "ttft": "ttft_ms", "load": "output_tokens_s", "profile": "step_us"}[self.job.kind]

    def of(self, side: str, name: str | None = None) -> float | None:
        """A figure of a side; None where there is none."""
        value = self.dense if side == DENSE else self.kvskim
        return None if value is None else value.get(name or self.measure)

    @property
    def speedup(self) -> float | None:
        """How much faster kvskim is: of times dense / kvskim, of tokens per second kvskim / dense."""
        dense, kvskim = self.of(DENSE), self.of(KVSKIM)
        if not dense or not kvskim:
            return None
        return kvskim / dense if self.job.kind == "load" else dense / kvskim

    @property
    def roofline_speedup(self) -> float | None:
        """The speed-up if both sides took the time of their bytes and no more."""
        return self.dense_floor_ms / self.kvskim_floor_ms if self.dense_floor_ms and self.kvskim_floor_ms else None

    @property
    def pages(self) -> float | None:
        """Pages attended, mean over layers, requests and kv heads."""
        seen = (self.kvskim or {}).get("activity")
        return seen["attended"] / seen["count"] if seen and seen["count"] else None

    @property
    def covered(self) -> float | None:
        """Estimated attention mass of the attended pages, mean over the same."""
        seen = (self.kvskim or {}).get("activity")
        return seen["covered"] / seen["count"] if seen and seen["count"] else None


def rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each job of each kvskim run beside the dense run of the same model, and for each dense job that no kvskim run has."""
    found: list[Row] = []
    dense_runs = {(run.model, run.weights): run for run in runs if run.side == DENSE}
    taken: set[tuple[str, str, str]] = set()
    for run in runs:
        if run.side == DENSE:
            continue
        other = dense_runs.get((run.model, run.weights))
        beside = {} if other is None else {Job(**entry["job"]).key: entry for entry in other.jobs}
        for entry in run.jobs:
            job = Job(**entry["job"])
            taken.add((run.model, run.weights, job.key))
            found.append(_row(run.model, run.weights, label(run.settings), job, other, beside.get(job.key), run, entry))
    for run in runs:
        for entry in run.jobs if run.side == DENSE else ():
            job = Job(**entry["job"])
            if (run.model, run.weights, job.key) not in taken:
                found.append(_row(run.model, run.weights, "", job, run, entry, None, None))
    return found


def _row(
    model: str, weights: str, selector: str, job: Job, dense_run: Run | None, dense: Mapping[str, Any] | None, run: Run | None, entry: Mapping[str, Any] | None
) -> Row:
    def figures(of: Run | None, found: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, float | None, str]:
        if of is None or found is None:
            return None, None, ""
        value = found["value"]
        return value, floor_ms(of, job, value) if value is not None and job.kind == "decode" else None, found["error"]

    dense_value, dense_floor, dense_error = figures(dense_run, dense)
    value, floor, error = figures(run, entry)
    return Row(model, weights, selector, job, dense_value, value, dense_floor, floor, dense_error, error)


def label(settings: Mapping[str, Any] | None) -> str:
    """Selector and rule in a few words: "sketch, budget: 128 pages"."""
    if settings is None:
        return ""
    from kvskim.engines.vllm.report import rule_text

    config = SkimConfig(**settings)
    plain = SkimConfig(selector=config.selector).selector_options
    options = [f" {name} {value}" for name, value in config.selector_options.items() if plain.get(name) != value]
    return f"{config.selector}{''.join(options)}, {rule_text(config.rule_parameters())}"


# ---------------------------------------------------------------------- files
def as_json(runs: Sequence[Run], command: str) -> dict[str, Any]:
    """The contents of a result file: the runs, and the rows that follow from them."""
    table = []
    for row in rows(runs):
        derived = dict(speedup=row.speedup, roofline_speedup=row.roofline_speedup, pages=row.pages, covered=row.covered)
        table.append({**asdict(row), **derived})
    return dict(format=FORMAT, command=command, runs=[asdict(run) for run in runs], rows=table)


def read_results(path: Path, option: str) -> list[Run]:
    """The runs of a result file; raises KvskimError, naming ``option``, where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KvskimError(f"{option} {path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise KvskimError(f"{option} {path} can't be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise KvskimError(f"{option} {path} is not a result of `kvskim bench e2e --json`")
    try:
        return [Run(**run) for run in content["runs"]]
    except (KeyError, TypeError) as error:
        raise KvskimError(f"{option} {path} is damaged ({error}): measure again") from None


def merge(runs: Iterable[Run]) -> list[Run]:
    """Runs of the same side, model and configuration become one; where both have a job, the later one counts.

    Raises:
        KvskimError: they are from different GPUs, so that their times say nothing about each other.
    """
    merged: dict[str, Run] = {}
    gpus = set()
    for run in runs:
        gpus.add(run.machine["gpu"])
        if len(gpus) > 1:
            raise KvskimError(f"the results are from different GPUs ({', '.join(sorted(gpus))}): merge those of one kind")
        key = json.dumps([run.side, run.model, run.weights, run.settings], sort_keys=True)
        earlier = merged.get(key)
        if earlier is None:
            merged[key] = run
            continue
        later = {Job(**entry["job"]).key for entry in run.jobs}
        kept = [entry for entry in earlier.jobs if Job(**entry["job"]).key not in later]
        source = run if run.engine is not None else earlier
        merged[key] = Run(
            run.side, run.model, run.weights, run.settings, source.machine, source.arguments, source.engine, run.error, [*kept, *run.jobs]
        )
    return list(merged.values())
