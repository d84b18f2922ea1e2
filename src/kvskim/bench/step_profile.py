"""From the kernels that a profiler recorded during some decode steps to microseconds of a step that add up.

Kernels overlap: a programmatic dependent launch starts while the kernel before it still runs, and copies run on streams of their own. Every moment
is counted once, for the kernel that started first of those that run. So the times of all kernels and the idle time add up to the time of the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvskim.bench.kernel_groups import GROUPS, UNKNOWN, kernel_group

MARKER = "spin_kernel"
"""In the name of the kernel that marks where a step begins, of `torch.cuda._sleep`."""
LONG_GAP_US = 5.0
"""A gap of at least this is no launch latency: the GPU waits for the host."""
_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Interval:
    """One kernel, copy or memset on the GPU; ``start`` and ``end`` in microseconds."""

    name: str
    start: float
    end: float
    category: str = "kernel"

    @property
    def is_marker(self) -> bool:
        return self.category == "kernel" and MARKER in self.name


def intervals_of(trace: dict[str, Any]) -> list[Interval]:
    """What ran on the GPU in a trace of `torch.profiler.profile.export_chrome_trace`."""
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in _CATEGORIES)
    return [Interval(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["cat"]) for event in events]


@dataclass(frozen=True)
class Share:
    """An interval and the microseconds of it that are counted for it."""

    interval: Interval
    us: float


@dataclass(frozen=True)
class Gap:
    """A time in which nothing runs: its microseconds, and the names of what ended last and what starts next (empty: nothing)."""

    us: float
    before: str
    after: str


def shares(intervals: Iterable[Interval], first: float, last: float) -> tuple[list[Share], list[Gap]]:
    """What each interval has of the time from ``first`` to ``last``, and the gaps in which none runs; all of them add up to ``last - first``."""
    found, gaps = [], []
    reached, latest = first, ""
    for interval in sorted(intervals, key=lambda interval: (interval.start, interval.end)):
        if interval.end <= first or interval.start >= last:
            continue
        if interval.start > reached:
            gaps.append(Gap(interval.start - reached, latest, interval.name))
            reached = interval.start
        end = min(interval.end, last)
        found.append(Share(interval, max(0.0, end - reached)))
        if end > reached:
            reached, latest = end, interval.name
    if last > reached:
        gaps.append(Gap(last - reached, latest, ""))
    return found, gaps


def step_profile(intervals: Sequence[Interval], dropped: int) -> dict[str, Any]:
    """Where the time of a step goes, mean of the steps between the markers.

    Args:
        intervals: of the whole recording. A marker stands at the start of each step, and one at the end of the last.
        dropped: so many steps at the start are left out, in which the engine got over the start of the profiler.

    Returns:
        ``steps`` that were taken; ``step_us``, the time of one, which is the sum of ``busy_us``, ``gaps_us`` (idle, in gaps shorter than `LONG_GAP_US`)
        and ``waits_us`` (idle, in longer ones); ``groups``: name, ``us`` and ``launches`` of a step; ``kernels``: the same of each kernel,
        with its group, the most expensive first; ``gaps``: what was idle ``before`` and ``after`` which kernels, ``us`` of a step and how many, the
        most expensive first.

    Raises:
        ValueError: the recording holds no step.
    """
    markers = sorted((i for i in intervals if i.is_marker), key=lambda i: i.start)[dropped:]
    steps = len(markers) - 1
    if steps < 1:
        raise ValueError(f"the profiler recorded {len(intervals)} kernels and {len(markers)} steps after the first {dropped}, so there is none to look at")
    found, gaps = shares(intervals, markers[0].end, markers[-1].start)
    kernels: dict[tuple[str, str], list[float]] = {}
    for share in found:
        if not share.interval.is_marker:
            total = kernels.setdefault((share.interval.name, kernel_group(share.interval.name, share.interval.category)), [0.0, 0])
            total[0] += share.us
            total[1] += share.interval.start >= markers[0].end
    rows: list[dict[str, Any]] = [dict(name=name, group=group, us=us / steps, launches=count / steps) for (name, group), (us, count) in kernels.items()]
    rows.sort(key=lambda row: -row["us"])
    grouped: dict[str, dict[str, Any]] = {group: dict(group=group, us=0.0, launches=0.0) for group in GROUPS}
    for row in rows:
        for figure in ("us", "launches"):
            grouped[row["group"]][figure] += row[figure]
    busy = sum(row["us"] for row in rows)
    waits = sum(gap.us for gap in gaps if gap.us >= LONG_GAP_US) / steps
    short = sum(gap.us for gap in gaps if gap.us < LONG_GAP_US) / steps
    groups = [group for group in grouped.values() if group["launches"]]
    return dict(
        steps=steps, step_us=busy + waits + short, busy_us=busy, gaps_us=short, waits_us=waits, groups=groups, kernels=rows, gaps=_between(gaps, steps),
    )


def _between(gaps: Iterable[Gap], steps: int) -> list[dict[str, Any]]:
    """Gaps between the same two kernels as one row, per step; an empty name is the start or the end of a step."""
    found: dict[tuple[str, str], list[float]] = {}
    for gap in gaps:
        before, after = ("" if MARKER in name else name for name in (gap.before, gap.after))
        total = found.setdefault((before, after), [0.0, 0])
        total[0] += gap.us
        total[1] += 1
    rows = [dict(before=before, after=after, us=us / steps, count=count / steps) for (before, after), (us, count) in found.items()]
    return sorted(rows, key=lambda row: -float(row["us"]))


def unknown_kernels(profile: dict[str, Any]) -> list[str]:
    """Names of the kernels that no group knows."""
    return [row["name"] for row in profile["kernels"] if row["group"] == UNKNOWN]
