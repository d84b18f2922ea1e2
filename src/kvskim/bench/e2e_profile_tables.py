"""Tables of where the time of a decode step goes: groups of kernels that add up to the time per token, and the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvskim.bench.e2e_plan import DENSE, KVSKIM, SIDES
from kvskim.bench.e2e_report import Row
from kvskim.bench.e2e_text import Table, text
from kvskim.bench.kernel_groups import GROUPS, short_name
from kvskim.bench.step_profile import LONG_GAP_US, unknown_kernels

LEAST_SHARE = 0.0005
"""Of a step: kernels that take less are left out of the tables; the JSON has them all."""


def profile_tables(found: Sequence[Row], *, kernels: bool) -> list[Table]:
    """For each profiled case its groups, then the kernels that no group knows, then on request all kernels.

    Args:
        found: rows of all kinds; profiles are set beside the time per token that was measured without a profiler.
        kernels: also a table of the kernels, and one of what is idle between which.
    """
    measured = {_place(row, side): row.of(side) for row in found if row.job.kind == "decode" for side in SIDES if row.of(side) is not None}
    made = []
    for row in found:
        if row.job.kind == "profile":
            made.append(_group_table(row, [measured.get(_place(row, side)) for side in SIDES]))
            made.append(_unknown_table(row))
            made += [_kernel_table(row), _gap_table(row)] if kernels else []
    return [table for table in made if table.cells]


def _place(row: Row, side: str) -> tuple[Any, ...]:
    """The same for all figures of one engine on one shape."""
    return side, row.model, row.weights, "" if side == DENSE else row.selector, row.job.batch, row.job.context


def _title(row: Row) -> str:
    shape = row.job.title.removeprefix("profile of ")
    return f"{row.model}, {shape}{f', {row.selector}' if row.selector else ''}"


def _group_table(row: Row, tpot_ms: Sequence[float | None]) -> Table:
    columns = ("microseconds of a step", "dense", "launches", "kvskim", "launches")
    profiles = [row.dense, row.kvskim]
    errors = [row.dense_error, row.kvskim_error]

    def line(name: str, values: Sequence[float | None], launches: Sequence[float | None] = (None, None)) -> tuple[str, ...]:
        return (name, text(values[0], 1), text(launches[0], 1), text(values[1], 1), text(launches[1], 1))

    def figures(key: str) -> list[float | None]:
        return [None if profile is None else float(profile[key]) for profile in profiles]

    cells = []
    if any(errors):
        cells.append(("failed", *(cell for error in errors for cell in (f"failed: {error}" if error else "", ""))))
    by_name: list[dict[str, Any]] = [{} if profile is None else {group["group"]: group for group in profile["groups"]} for profile in profiles]
    for name in GROUPS:
        groups = [side.get(name) for side in by_name]
        if any(groups):
            cells.append(line(name, [g and g["us"] for g in groups], [g and g["launches"] for g in groups]))
    if any(profile is not None for profile in profiles):
        cells.append(line(f"idle between kernels, gaps under {LONG_GAP_US:g} us", figures("gaps_us")))
        cells.append(line("idle, longer gaps (the GPU waits for the host)", figures("waits_us")))
        cells.append(line("sum: the step under the profiler", figures("step_us")))
    tpot = [None if value is None else 1e3 * value for value in tpot_ms]
    if any(value is not None for value in tpot):
        cost = [a - float(b["step_us"]) if a is not None and b is not None else None for a, b in zip(tpot, profiles)]
        cells.append(line("measured without the profiler minus that", cost))
        cells.append(line("sum: time per token as measured", tpot))
    return Table(f"Where a step's time goes: {_title(row)}", columns, cells)


def _profiles(row: Row) -> list[tuple[str, dict[str, Any]]]:
    return [(side, profile) for side, profile in ((DENSE, row.dense), (KVSKIM, row.kvskim)) if profile is not None]


def _unknown_table(row: Row) -> Table:
    cells = [(side, short_name(name)) for side, profile in _profiles(row) for name in unknown_kernels(profile)]
    return Table(f"Kernels that no group knows: {_title(row)}", ("engine", "kernel"), cells)


def _kernel_table(row: Row) -> Table:
    cells = []
    for side, profile in _profiles(row):
        for name in GROUPS:
            for kernel in profile["kernels"]:
                if kernel["group"] == name and kernel["us"] >= LEAST_SHARE * profile["step_us"]:
                    cells.append((side, name, short_name(kernel["name"]), text(kernel["us"], 1), text(kernel["launches"], 1)))
    return Table(f"Kernels: {_title(row)}", ("engine", "group", "kernel", "microseconds of a step", "launches"), cells)


def _gap_table(row: Row) -> Table:
    cells = []
    for side, profile in _profiles(row):
        # Results of an earlier format say nothing of it.
        for gap in profile.get("gaps", ()):
            if gap["us"] >= LEAST_SHARE * profile["step_us"]:
                cells.append((side, short_name(gap["before"]), short_name(gap["after"]), text(gap["us"], 1), text(gap["count"], 1)))
    return Table(f"Idle between kernels: {_title(row)}", ("engine", "after", "before", "microseconds of a step", "times"), cells)
