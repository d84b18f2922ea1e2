"""`kvskim eval`: what a selector and a rule cost in quality."""

from __future__ import annotations

import datetime
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvskim.cli_files import writable
from kvskim.errors import KvskimError

app = typer.Typer(help="Measure quality.", no_args_is_help=True)

LEAST_PREFIX = 128
"""Tokens before the decoded ones: fewer leave nothing to choose from."""
LEAST_NEEDLE_TOKENS = 1024
"""Fewer have no room for twelve planted facts."""


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
    from kvskim.demo.model import demo_model_file, reading_model, require_packages, usable_device
    from kvskim.eval.model import load
    from kvskim.eval.selector_table import known_candidates
    from kvskim.eval.selectors_report import markdown, run_table, write

    console = Console(stderr=True)
    require_packages("transformers")
    usable_device(device)
    pages = _page_budgets(budgets)
    if not 0 < tau <= 1:
        raise KvskimError(f"--tau is {tau}; it must be greater than 0 and at most 1")
    for option, value, least in (
        ("--decoded", decoded, 1), ("--tokens", tokens, decoded + LEAST_PREFIX), ("--needle-tokens", needle_tokens, LEAST_NEEDLE_TOKENS), ("--seeds", seeds, 1),
    ):
        if value < least:
            raise KvskimError(f"{option} is {value}; it must be at least {least}")
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [candidate.name for candidate in known_candidates()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KvskimError(f"--only names {', '.join(map(repr, unknown))}; the rows are {', '.join(known)}")
    for option, target in (("--json", json_path), ("--markdown", markdown_path)):
        if target is not None:
            writable(target, option)
    path = demo_model_file() if model == "demo" else Path(model)
    if not path.exists():
        raise KvskimError(f"there is no model at {model}: give a Hugging Face model directory, a .gguf file, or 'demo'")
    with reading_model(model):
        loaded = load(str(path.parent), device, gguf_file=path.name) if path.is_file() else load(str(path), device)
    result = run_table(
        loaded, tokens=tokens, decoded=decoded, budgets=pages, tau=tau, needle_tokens=needle_tokens, seeds=seeds,
        only=names, log=lambda line: console.print(line, highlight=False, soft_wrap=True),
    )
    command = "kvskim " + shlex.join(sys.argv[1:])
    write(result, json_path, markdown_path, command, datetime.date.today().isoformat())
    print(markdown(result))


def _page_budgets(text: str) -> list[int]:
    """Budgets of a comma list; each must have room for sink, window and one page more."""
    try:
        pages = [int(word) for word in text.split(",")]
    except ValueError:
        pages = []
    if not pages or min(pages) < 3:
        raise KvskimError(f"--budgets is {text!r}; it must be a comma list of whole numbers, at least 3 each, such as 8,16,32")
    return pages
