"""The picture of `kvskim bench e2e`: speed-up over context, one line for each batch size, the roofline beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvskim.bench.e2e_plan import tokens_text
from kvskim.bench.e2e_report import Row, rows
from kvskim.bench.e2e_run import Run
from kvskim.errors import KvskimError


def require_matplotlib() -> None:
    """Refuse, before any work, where no picture can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise KvskimError("a plot needs matplotlib: pip install 'kvskim[plot]', or write --json now and draw it elsewhere with `kvskim bench plot`")


def draw(runs: Sequence[Run], output: Path, selector: str | None = None) -> None:
    """Write a PNG with one panel for each model: dense time per token divided by kvskim's.

    Args:
        selector: leave the runs of other selectors out.

    Raises:
        KvskimError: no case has figures of both sides, the selector is in none, or the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if selector is not None:
        present = sorted({str(run.settings["selector"]) for run in runs if run.settings})
        if selector not in present:
            raise KvskimError(f"--selector is {selector!r}; the results have {', '.join(present) or 'none'}: give one of these")
        runs = [run for run in runs if not run.settings or run.settings["selector"] == selector]
    found = [row for row in rows(runs) if row.job.kind == "decode" and row.speedup is not None]
    if not found:
        raise KvskimError("no decode case has figures of dense and of kvskim, so there is nothing to plot")
    models = list(dict.fromkeys(row.model for row in found))
    figure = Figure(figsize=(7.5 * len(models), 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, len(models), squeeze=False)[0]
    for axis, model in zip(panels, models):
        _panel(axis, model, [row for row in found if row.model == model])
    machine = runs[0].machine
    figure.suptitle(f"Decode in vLLM with kvskim, dense = 1 ({machine['gpu']}); dotted: roofline of the bytes")
    try:
        figure.savefig(output, dpi=110, format="png")
    except OSError as error:
        raise KvskimError(f"{output} can't be written ({error.strerror})") from error


def lines(found: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each line of a panel, by context."""
    several = len({row.selector for row in found}) > 1
    grouped: dict[str, list[Row]] = {}
    for row in sorted(found, key=lambda row: (row.selector, row.job.batch, row.job.context)):
        name = f"batch {row.job.batch}" + (f", {row.selector}" if several else "")
        grouped.setdefault(name, []).append(row)
    return grouped


def _panel(axis: Any, model: str, found: Sequence[Row]) -> None:
    for number, (name, points) in enumerate(lines(found).items()):
        colour = f"C{number % 10}"
        axis.plot([p.job.context for p in points], [p.speedup for p in points], marker="o", color=colour, label=name)
        limits = [p for p in points if p.roofline_speedup is not None]
        axis.plot([p.job.context for p in limits], [p.roofline_speedup for p in limits], marker=".", linestyle=":", color=colour)
    contexts = sorted({row.job.context for row in found})
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [tokens_text(context) for context in contexts])
    axis.minorticks_off()
    selectors = sorted({row.selector for row in found})
    axis.set(title=f"{model}{f' ({selectors[0]})' if len(selectors) == 1 else ''}", xlabel="context, tokens", ylabel="speed-up of a decode step")
    axis.set_ylim(bottom=0)
    axis.legend()
