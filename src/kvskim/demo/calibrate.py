"""`kvskim calibrate`: prefill texts, fit the record basis of every layer that can be sparse, write the file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvskim.calibration_store import write_stored
from kvskim.config import SkimConfig
from kvskim.demo.calibration_text import calibration_ids
from kvskim.demo.model import check_positions, load_model
from kvskim.demo.session import Session
from kvskim.engines.transformers import enable
from kvskim.errors import KvskimError

LEAST_TOKENS = 512


def run_calibrate(
    config: SkimConfig, output: Path | None, *, model: str | None, tokens: int = 8192, text: str | None = None, device: str = "cpu",
    keep: bool = False, console: Console | None = None,
) -> None:
    """Fit and save a calibration.

    Args:
        config: selector ``sketch`` with its options; `calibration` is not read.
        output: file to write, or None.
        keep: also keep it in the cache directory, where ``calibration: auto`` finds it, in the place of an earlier one.
        model: see `load_model`.
        tokens: of text, all samples together.
        text: the user's, or None for the built-in ones, see `kvskim.demo.calibration_text`.

    Raises:
        KvskimError: the model can't be loaded, or there is too little text.
    """
    console = console or Console()
    if tokens < LEAST_TOKENS:
        raise KvskimError(f"--tokens is {tokens}; it must be at least {LEAST_TOKENS}")
    with console.status("Loading the model"):
        loaded, tokenizer = load_model(model, device=device)
    samples = calibration_ids(tokenizer, tokens, text)
    if sum(map(len, samples)) < LEAST_TOKENS:
        raise KvskimError(f"the text has {sum(map(len, samples))} tokens; a calibration needs at least {LEAST_TOKENS}: give a longer one")
    check_positions(loaded, max(map(len, samples)), "--tokens")
    host = enable(loaded, config)
    for layer in host.layers():
        # A kept calibration would leave nothing to fit on.
        layer.capture = True
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    sessions = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("Reading text", total=sum(map(len, samples)))
        for ids in samples:
            session = Session(loaded)
            session.prefill(ids, lambda count: progress.advance(task, count))
            sessions.append(session)
        fitting = progress.add_task("Fitting layers", total=sum(layer.dense_reason is None for layer in host.layers()))
        calibration = host.fit_calibration([session.cache for session in sessions], progress=lambda name: progress.advance(fitting))
    written = []
    if output is not None:
        calibration.save(output)
        written.append(output)
    if keep:
        written.append(write_stored(calibration))
    for path in written:
        console.print(f"Wrote {path}: {len(calibration.layers)} layers of {calibration.model}, {path.stat().st_size / 2**20:.1f} MiB.")
    if output is not None:
        console.print(f"Use it with the setting calibration={output}", style="dim")
    if keep:
        console.print("The setting calibration=auto, the default, takes the kept one from now on", style="dim")
