"""`kvskim inspect`: a picture of which pages every layer and head attends, and of the attention mass that they cover."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvskim.config import SkimConfig
from kvskim.demo.model import MODEL_NAME, check_positions, load_model, require_packages
from kvskim.demo.session import Session
from kvskim.demo.text import build_document
from kvskim.engines.transformers import StepTrace, enable
from kvskim.errors import KvskimError

WORST_HEADS = 8
TIMELINES = 3


@dataclass
class Recording:
    """Decode steps as they were observed.

    attended: per layer, one bool ``[H, pages]`` array per step (the number of pages grows). covered: per layer, float ``[steps, H]``:
    exact attention mass of the attended pages.
    """

    attended: dict[int, list[NDArray[np.bool_]]] = field(default_factory=dict)
    covered: dict[int, list[NDArray[np.float32]]] = field(default_factory=dict)

    def __call__(self, trace: StepTrace) -> None:
        row = trace.rows[0]
        exact = row.exact if row.exact is not None else row.covered
        self.attended.setdefault(trace.layer, []).append(row.pages.cpu().numpy())
        self.covered.setdefault(trace.layer, []).append(exact.float().cpu().numpy())

    @property
    def layers(self) -> list[int]:
        return sorted(self.attended)

    def timeline(self, layer: int, head: int) -> NDArray[np.float32]:
        """``[pages, steps]``: 1 attended, 0 not, NaN where the page did not exist yet."""
        steps = self.attended[layer]
        image = np.full((max(step.shape[1] for step in steps), len(steps)), np.nan, dtype=np.float32)
        for index, step in enumerate(steps):
            image[: step.shape[1], index] = step[head]
        return image

    def frequency(self) -> tuple[NDArray[np.float32], list[tuple[int, int]]]:
        """``[layers x heads, pages]``: share of the steps in which each page was attended, and the (layer, head) of every row."""
        names = [(layer, head) for layer in self.layers for head in range(self.attended[layer][0].shape[0])]
        return np.stack([np.nanmean(self.timeline(layer, head), axis=1) for layer, head in names]), names

    def mean_cover(self) -> NDArray[np.float32]:
        """``[layers, H]``: mean covered mass."""
        return np.stack([np.mean(self.covered[layer], axis=0) for layer in self.layers])

    def worst_heads(self, count: int = WORST_HEADS) -> list[tuple[int, int, float]]:
        """(layer, head, mean covered mass), least first."""
        cover = self.mean_cover()
        order = np.argsort(cover, axis=None, kind="stable")[:count]
        return [(self.layers[index // cover.shape[1]], int(index % cover.shape[1]), float(cover.flat[index])) for index in order]


def run_inspect(
    config: SkimConfig, output: Path, *, model: str | None = None, context: int = 2048, steps: int = 48, text: str | None = None,
    device: str = "cpu", console: Console | None = None,
) -> Recording:
    """Prefill a text, decode the tokens that follow it, write the picture.

    Args:
        config: settings of kvskim.
        output: PNG file to write.
        model: see `load_model`.
        context: tokens prefilled. steps: tokens decoded after them.
        text: the user's, or None for the built-in document.

    Raises:
        KvskimError: matplotlib or the model is missing, no layer is sparse, the text is too short, or the picture can't be written.
    """
    console = console or Console()
    require_packages("transformers", "matplotlib")
    if context < 64 or steps < 1:
        raise KvskimError(f"--context is {context} and --steps is {steps}; they must be at least 64 and 1")
    with console.status("Loading the model"):
        loaded, tokenizer = load_model(model, device=device)
    ids = build_document(tokenizer, context + steps, text).ids
    if len(ids) < 64 + steps:
        raise KvskimError(f"the text has {len(ids)} tokens; with --steps {steps} at least {64 + steps} are needed")
    check_positions(loaded, len(ids), "--context")
    host = enable(loaded, config)
    if not any(layer.dense_reason is None for layer in host.layers()):
        raise KvskimError("every layer of this model keeps full attention, so there is nothing to draw: change dense_layers, or take another model")
    session, recording = Session(loaded), Recording()
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("Reading the text", total=len(ids) - steps)
        session.prefill(ids[:-steps], lambda tokens: progress.advance(task, tokens))
        if any(layer.dense_reason is None and not layer.calibrated and layer.selector.needs_calibration for layer in host.layers()):
            task = progress.add_task("Fitting the basis", total=len(host.layers()))
            host.fit_calibration([session.cache], progress=lambda name: progress.advance(task))
        host.reset_statistics()
        host.observe(recording, exact=True)
        task = progress.add_task("Decoding", total=steps)
        session.step_logits(ids[-steps:], lambda: progress.advance(task))
    name = Path(model).name if model else MODEL_NAME
    draw(recording, output, f"{name}: {len(ids) - steps} tokens read, {steps} decode steps, {config.selector}, rule {config.rule}")
    statistics = host.statistics()
    console.print(f"Wrote {output}: {statistics.attended_share:.1%} of the pages attended, {recording.mean_cover().mean():.1%} of the mass covered.")
    worst = ", ".join(f"layer {layer} head {head} ({cover:.0%})" for layer, head, cover in recording.worst_heads())
    console.print(f"Least covered kv heads: {worst}.")
    for entry in host.report():
        if not entry.sparse:
            console.print(f"{entry.name} keeps full attention: {entry.reason}", style="dim")
    return recording


def draw(recording: Recording, output: Path, title: str) -> None:
    """Write the picture: pages over heads, covered mass over layers and heads, the worst heads, and three heads over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    frequency, names = recording.frequency()
    cover, worst = recording.mean_cover(), recording.worst_heads()
    steps = len(recording.attended[recording.layers[0]])
    figure = Figure(figsize=(16, 11), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14)
    panes: Any = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    top, bottom = panes
    left, middle, right = top.subplots(1, 3, width_ratios=[2.4, 0.8, 0.9])

    image = left.imshow(frequency, aspect="auto", interpolation="nearest", cmap="magma", vmin=0, vmax=1)
    heads = cover.shape[1]
    stride = max(1, len(recording.layers) // 15)
    left.set_yticks([heads * n for n in range(0, len(recording.layers), stride)], [str(recording.layers[n]) for n in range(0, len(recording.layers), stride)])
    left.set(title="How often each page was attended", xlabel="page (16 tokens), oldest left", ylabel=f"layer ({heads} kv heads each)")
    figure.colorbar(image, ax=left, label="share of decode steps", fraction=0.03)

    low = min(0.8, float(cover.min()))
    image = middle.imshow(cover, aspect="auto", interpolation="nearest", cmap="viridis", vmin=low, vmax=1)
    middle.set(title="Attention mass covered", xlabel="kv head", ylabel="layer", xticks=range(heads))
    middle.set_yticks(range(0, len(recording.layers), stride), [str(recording.layers[n]) for n in range(0, len(recording.layers), stride)])
    for layer, head, _ in worst:
        middle.plot(head, recording.layers.index(layer), marker="x", color="red", markersize=7)
    figure.colorbar(image, ax=middle, label="mean over steps", fraction=0.06)

    right.barh([f"layer {layer} head {head}" for layer, head, _ in worst][::-1], [value for *_, value in worst][::-1], color="tab:red")
    right.axvline(float(cover.mean()), color="black", linestyle="--")
    right.set(title="Least covered heads (red crosses)", xlabel=f"mass covered (dashed: mean of all heads, {cover.mean():.1%})", xlim=(0, 1))

    panels: Any = bottom.subplots(1, TIMELINES, squeeze=False)[0]
    for axis, (label, layer, head) in zip(panels, _timeline_choice(recording, frequency, names)):
        axis.imshow(recording.timeline(layer, head), aspect="auto", interpolation="nearest", cmap="Greys", vmin=0, vmax=1, origin="lower")
        axis.set(title=f"{label}: layer {layer} head {head}", xlabel=f"decode step (of {steps})", ylabel="page (black: attended)")
    try:
        figure.savefig(output, dpi=110, format="png")
    except OSError as error:
        raise KvskimError(f"--output {output} can't be written ({error.strerror})") from error


def _timeline_choice(recording: Recording, frequency: NDArray[np.float32], names: list[tuple[int, int]]) -> list[tuple[str, int, int]]:
    """Three telling heads: the least covered one, the one that attends most, and the one whose choice changes most."""
    layer, head, _ = recording.worst_heads(1)[0]
    widest = names[int(np.argmax(frequency.mean(axis=1)))]
    restless = names[int(np.argmax((frequency * (1 - frequency)).mean(axis=1)))]
    return [("Least covered", layer, head), ("Attends most", *widest), ("Changes most", *restless)]
