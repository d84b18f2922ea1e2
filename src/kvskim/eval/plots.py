"""Plots of an evaluation: a quality over the bytes that a decode step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvskim.errors import KvskimError


@dataclass(frozen=True)
class Point:
    """``kib``: read per decode step. ``value`` with its confidence interval."""

    kib: float
    value: float
    low: float
    high: float


def plot_over_bytes(lines: Mapping[str, Sequence[Point]], level: float | None, output: Path, *, title: str, label: str, log: bool = False) -> None:
    """Write a PNG with one line per method.

    Args:
        lines: points of each method.
        level: value of full attention, drawn across; None: not drawn.
        output: file to write.
        title: above the plot.
        label: of the value.
        log: logarithmic value axis.

    Raises:
        KvskimError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    markers = "osD^v<>PX*hd"
    for i, (name, points) in enumerate(lines.items()):
        ordered = sorted(points, key=lambda point: point.kib)
        values = [point.value for point in ordered]
        below = [max(0.0, point.value - point.low) for point in ordered]
        above = [max(0.0, point.high - point.value) for point in ordered]
        x = [point.kib for point in ordered]
        axes.errorbar(x, values, yerr=[below, above], label=name, marker=markers[i % len(markers)], markersize=5, capsize=2, linewidth=1.2, elinewidth=0.6)
    if level is not None:
        axes.axhline(level, color="black", linestyle="--", linewidth=1, label="full attention")
    axes.set_xscale("log")
    if log:
        axes.set_yscale("log")
    axes.set(title=title, xlabel="KiB read per decode step (keys, values and records of all sparse layers)", ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(output, dpi=120, format="png")
    except OSError as error:
        raise KvskimError(f"--plot {output} can't be written ({error.strerror})") from error
