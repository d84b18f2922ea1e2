"""`kvskim eval`: what a selector and a rule cost in quality."""

from __future__ import annotations

import datetime
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="Measure quality.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `selectors` a sub-command while it is the only one."""


@app.command()
def selectors(
    model: Annotated[str, typer.Argument(help="Hugging Face model directory or .gguf file; 'demo' is the model of `kvskim demo`.")] = "demo",
    tokens: Annotated[int, typer.Option(help="Length of the prose and code texts.")] = 8192,
    decoded: Annotated[int, typer.Option(help="Tokens at their end that are decoded sparsely.")] = 128,
    budgets: Annotated[str, typer.Option(help="Comma list of page budgets, sink and window counted.")] = "8,16,32",
    tau: Annotated[float, typer.Option(help="Threshold of the threshold rule.")] = 0.007,
    needle_tokens: Annotated[int, typer.Option(help="Length of the contexts with planted facts.")] = 6144,
    seeds: Annotated[int, typer.Option(help="Number of such contexts, 12 questions each.")] = 2,
    only: Annotated[str, typer.Option(help="Comma list of rows to run, as the table names them; empty: all.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")] = None,
) -> None:
    """KL divergence, recall gap and planted facts answered, for every selector and rule, on a real model."""
    from kvskim.demo.model import demo_model_file
    from kvskim.eval.model import load
    from kvskim.eval.selectors_report import markdown, run_table, write

    console = Console(stderr=True)
    path = demo_model_file() if model == "demo" else Path(model)
    if not path.exists():
        console.print(f"[red]There is no model at {model}: give a Hugging Face model directory, a .gguf file, or 'demo'.[/red]")
        raise typer.Exit(2)
    try:
        pages = [int(b) for b in budgets.split(",")]
    except ValueError:
        console.print(f"[red]--budgets is {budgets!r}; it must be a comma list of whole numbers, e.g. 8,16,32.[/red]")
        raise typer.Exit(2) from None
    loaded = load(str(path.parent), device, gguf_file=path.name) if path.is_file() else load(str(path), device)
    result = run_table(
        loaded, tokens=tokens, decoded=decoded, budgets=pages, tau=tau, needle_tokens=needle_tokens, seeds=seeds,
        only=[name.strip() for name in only.split(",") if name.strip()], log=lambda line: console.print(line, highlight=False, soft_wrap=True),
    )
    command = "kvskim " + shlex.join(sys.argv[1:])
    write(result, json_path, markdown_path, command, datetime.date.today().isoformat())
    print(markdown(result))
