"""Counters of what kvskim does, under Prometheus names. Without the package prometheus-client they count nothing.

They are ordinary metrics of prometheus-client, so they appear wherever the process that counts is scraped: in its default registry, or, with
``PROMETHEUS_MULTIPROC_DIR`` set for all processes, in the files from which a server such as vLLM's collects the numbers of its workers (docs/vllm.md,
section "Metrics"). Pages and mass are counters of sampled steps: divide one rate by another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

# name without prefix: (labels, meaning)
COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "sparse_steps": ((), "Steps with at least one row that was decoded sparsely."),
    "decode_rows": ((), "Rows with one query token, which go through score, select and attend; rows that only fill a captured graph included."),
    "dense_rows": (
        ("reason",),
        "Rows with full attention in layers that can be sparse: several_query_tokens (prefill, speculation), not_calibrated (all pages selected until then).",
    ),
    "attended_pages": ((), "Pages attended in sampled decode steps, summed over layers, rows and kv heads."),
    "pages": ((), "Pages there were in the same steps, summed over the same."),
    "covered_mass": ((), "Estimated attention mass of the attended pages in the same steps, summed over layers, rows and kv heads."),
    "heads": ((), "How many (layer, row, kv head) the same steps had: covered_mass divided by it is the mean."),
    "full_heads": ((), "How many of them attended every page, because the request is short, the layer not calibrated, or the rule asked for all."),
    "tier_pages": ((), "Variants mem-v and mem-kv: pages in host memory that decode steps selected, summed over layers, rows and kv heads."),
    "tier_missing_pages": ((), "Different pages among them that were not in the hot cache, and came from host memory."),
    "tier_homeless_pages": ((), "Those among the missing that found no room in the hot cache: they are read from host memory by each row that selects them."),
    "tier_bytes": ((), "Bytes of the missing pages."),
    "unsupported": (("reason",), "Layers that keep full attention because kvskim can't make them sparse and on_unsupported is dense."),
}


@dataclass(frozen=True)
class Sample:
    """Sums over layers, rows and kv heads of one decode step; see `COUNTERS`."""

    attended_pages: float
    pages: float
    covered_mass: float
    heads: float
    full_heads: float


class _Unread:
    """In the place of a metric where prometheus-client is not installed."""

    def labels(self, **labels: str) -> _Unread:
        return self

    def inc(self, amount: float = 1) -> None:
        pass

    def set(self, value: float) -> None:
        pass


class SkimMetrics:
    """The metrics of one process.

    Args:
        registry: of prometheus-client; None: the default registry.
    """

    def __init__(self, registry: Any = None) -> None:
        self._counters: dict[str, Any] = dict.fromkeys(COUNTERS, _Unread())
        self._calibrated: Any = _Unread()
        try:
            from prometheus_client import REGISTRY, Counter, Gauge
        except ImportError:
            return
        registry = REGISTRY if registry is None else registry
        self._counters = {name: Counter(f"kvskim_{name}", meaning, labels, registry=registry) for name, (labels, meaning) in COUNTERS.items()}
        self._calibrated = Gauge(
            "kvskim_calibrated", "1 once all layers have their calibration or need none; of several workers, the least.", registry=registry,
            multiprocess_mode="livemin",
        )

    def step(self, decode_rows: int, other_rows: int, calibrated: bool) -> None:
        """Count one step of an engine: numbers the host has anyway."""
        if decode_rows:
            self._counters["decode_rows"].inc(decode_rows)
            if calibrated:
                self._counters["sparse_steps"].inc()
            else:
                self._counters["dense_rows"].labels(reason="not_calibrated").inc(decode_rows)
        if other_rows:
            self._counters["dense_rows"].labels(reason="several_query_tokens").inc(other_rows)

    def sampled(self, sample: Sample) -> None:
        """Add a sampled decode step."""
        for name, value in vars(sample).items():
            self._counters[name].inc(value)

    def fetched(self, selected: float, missing: float, homeless: float, nbytes: float) -> None:
        """Add what decode steps took from values in host memory since the last time; see `COUNTERS`."""
        for name, value in (("tier_pages", selected), ("tier_missing_pages", missing), ("tier_homeless_pages", homeless), ("tier_bytes", nbytes)):
            self._counters[name].inc(value)

    def unsupported(self, reason: str) -> None:
        """Count one layer that keeps full attention although kvskim was asked for. What follows a colon in ``reason`` is advice, and left out."""
        self._counters["unsupported"].labels(reason=reason.split(": ")[0]).inc()

    def calibrated(self, ready: bool) -> None:
        self._calibrated.set(int(ready))


@cache
def metrics() -> SkimMetrics:
    """Those of this process, in the default registry; all engines of a process share them."""
    return SkimMetrics()
