"""From scored answers to a table: methods by settings, with confidence intervals, as numbers, Markdown and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvskim.eval.answers import ALL_PAGES, Scored
from kvskim.eval.methods import FULL
from kvskim.eval.statistics import Interval, strata_interval


@dataclass(frozen=True)
class Cell:
    """Mean score of one method under one setting, 0 to 1: mean of task means. ``difference``: to full attention, paired by question; None without it.

    ``bytes_per_step``: read in one decode step by all sparse layers and kv heads, records and the like counted.
    """

    method: str
    setting: str
    score: Interval
    difference: Interval | None
    tasks: dict[str, float]
    pages: float
    share: float
    bytes_per_step: float


def table(rows: Sequence[Scored], heads: int) -> list[Cell]:
    """Cells of all methods and settings, in the order in which they first come.

    rows: of one context length. heads: sparse layers times kv heads, for the bytes of a step.
    """
    groups: dict[tuple[str, str], list[Scored]] = {}
    for row in rows:
        groups.setdefault((row.answer.method, row.answer.setting), []).append(row)
    full = {_place(row): row.score for row in groups.get((FULL, ALL_PAGES), [])}
    cells = []
    for (method, setting), found in groups.items():
        by_task: dict[str, dict[int, list[Scored]]] = {}
        for row in found:
            by_task.setdefault(row.task, {}).setdefault(row.sample, []).append(row)
        # Questions about one context are not independent: a sample counts once, with its mean.
        scores = [[_mean([r.score for r in sample]) for sample in samples.values()] for samples in by_task.values()]
        differences = [[_mean([r.score - full[_place(r)] for r in sample]) for sample in samples.values()] for samples in by_task.values()] if full else None
        cells.append(Cell(
            method, setting, strata_interval(scores), None if differences is None else strata_interval(differences),
            {task: _mean(values) for task, values in zip(by_task, scores)}, _mean([r.answer.pages for r in found]), _mean([r.answer.share for r in found]),
            heads * _mean([r.answer.bytes for r in found]),
        ))
    return cells


def _place(row: Scored) -> tuple[str, int, int]:
    return row.task, row.sample, row.question


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def numbers(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The cells as they are written to JSON."""
    return [
        dict(
            method=c.method, setting=c.setting, score=c.score.as_dict(), difference=None if c.difference is None else c.difference.as_dict(), tasks=c.tasks,
            pages=c.pages, share=c.share, bytes_per_step=c.bytes_per_step,
        )
        for c in cells
    ]


def cells_of(rows: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """The inverse of `numbers`."""
    return [
        Cell(**{**row, "score": Interval(**row["score"]), "difference": None if row["difference"] is None else Interval(**row["difference"])})
        for row in rows
    ]


def markdown(cells: Sequence[Cell]) -> str:
    """Two tables: mean score by method and setting with its interval, and the score of every task."""
    means = means_markdown(cells)
    return means + ("\n" if means else "") + tasks_markdown(cells)


def means_markdown(cells: Sequence[Cell]) -> str:
    """Mean score with its interval, methods by settings; nothing where there is only full attention."""
    settings = list(dict.fromkeys(c.setting for c in cells if c.method != FULL))
    methods = list(dict.fromkeys(c.method for c in cells))
    found = {(c.method, c.setting): c for c in cells}
    if not settings:
        return ""
    out = ["| method | " + " | ".join(settings) + " |", "|---|" + "---|" * len(settings)]
    for method in methods:
        if method == FULL:
            cell = found[FULL, ALL_PAGES]
            out.append(f"| {FULL} | " + " | ".join([cell.score.text(scale=100)] * len(settings)) + " |")
        else:
            out.append(f"| {method} | " + " | ".join(_text(found.get((method, setting))) for setting in settings) + " |")
    return "\n".join(out) + "\n"


def tasks_markdown(cells: Sequence[Cell]) -> str:
    """One row for each cell: the score of every task, the mean, its difference to full attention, and what was read."""
    tasks = list(dict.fromkeys(task for c in cells for task in c.tasks))
    out = [
        "| method | setting | " + " | ".join(tasks) + " | mean | difference to full | pages | share | KiB per step |",
        "|---|---|" + "---|" * (len(tasks) + 5),
    ]
    for c in cells:
        values = " | ".join(f"{100 * c.tasks[task]:.1f}" if task in c.tasks else "" for task in tasks)
        difference = "" if c.difference is None or c.method == FULL else c.difference.text(scale=100)
        out.append(
            f"| {c.method} | {c.setting} | {values} | {100 * c.score.mean:.1f} | {difference} | {c.pages:.1f} | {c.share:.1%} | {c.bytes_per_step / 1024:.0f} |"
        )
    return "\n".join(out) + "\n"


def _text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    # A rule without a fixed budget is only comparable with its pages beside it.
    pages = "" if cell.setting.endswith("tokens") else f" ({cell.pages:.1f} pages)"
    return cell.score.text(scale=100) + pages
