"""How much attention mass the pages hold that each selector chooses on latent rows, on a CPU; docs/benchmarks/latent-fidelity.md shows the result.

    python benchmarks/latent_fidelity/latent_fidelity.py --json latent-fidelity.json

Two problems: `planted_rows` (rows of 576 channels of a random layer) and `joined_heads` (the attention of a trained model, written as latent attention).
`--only planted` needs no model. About 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from joined_heads import layers_of_text, other_text_fits
from planted_rows import DIM, PlantedRows
from torch import Tensor

from kvskim.calibration import LayerCalibration
from kvskim.layout import PAGE_TOKENS
from kvskim.rules.parameters import DEFAULT_WINDOW_PAGES
from kvskim.selectors import get_selector

SELECTORS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("oracle", {}), ("sketch", {}), ("sketch", {"record_bytes": 384}), ("rki4", {}), ("r8", {}), ("minmax", {}), ("mean", {}),
)
BUDGETS = (16, 32, 64, 128)
"""Pages, first and newest ones counted."""
PLANTED = ((1024, 16), (1024, 128), (4096, 16))
"""Pages and query heads: 16 are those of DeepSeek-V2-Lite, 128 of DeepSeek-V2 and V3."""
SEEDS = 3
MODEL_TOKENS = 8192


class Problem(Protocol):
    """Complete pages ``[P, 1, 16, D]``, scaled queries behind them ``[N, 1, G, D]``, and what the sketch is fitted on."""

    pages: Tensor
    queries: Tensor

    def calibration(self, record_bytes: int) -> LayerCalibration: ...


def label(name: str, options: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{value} B" if key == "record_bytes" else f"{key} {value}" for key, value in options.items())])


def covered(problem: Problem, name: str, budgets: Sequence[int] = BUDGETS, **options: Any) -> list[float]:
    """Mean exact mass, of the group mean over all heads, of as many pages as each of ``budgets`` says, by a selector's estimates.

    The first page and the newest ones are in every choice, as in an engine.
    """
    pages, queries = problem.pages, problem.queries
    dim = pages.shape[-1]
    mass = (queries[:, 0] @ pages.flatten(0, 2).T).softmax(-1).unflatten(-1, (-1, PAGE_TOKENS)).sum(-1).mean(1)  # [N, P]
    if name == "oracle":
        estimate = mass.clone()
    else:
        selector = get_selector(name, **options)
        width = selector.record_bytes(dim)
        tables = selector.tables(1, dim, problem.calibration(width if name == "sketch" else 256))
        scores = selector.score(queries, selector.encode(pages, tables), tables)[:, 0]  # [N, P, G]
        estimate = scores.softmax(1).mean(-1)
    estimate[:, 0] = estimate[:, len(pages) - DEFAULT_WINDOW_PAGES :] = torch.inf
    best = mass.gather(1, estimate.argsort(dim=1, descending=True, stable=True)).cumsum(1)
    return [float(best[:, budget - 1].mean()) for budget in budgets]


def measure(problems: Iterable[Problem], budgets: Sequence[int] = BUDGETS) -> dict[str, list[float]]:
    """Means of `covered` over problems, by selector."""
    found: dict[str, list[list[float]]] = {}
    for problem in problems:
        # Most selectors want the same one.
        problem.calibration = functools.cache(problem.calibration)
        for name, options in SELECTORS:
            found.setdefault(label(name, options), []).append(covered(problem, name, budgets, **options))
    return {name: [statistics.fmean(column) for column in zip(*rows)] for name, rows in found.items()}


log = functools.partial(print, flush=True)


def planted() -> list[dict[str, Any]]:
    results = []
    for pages, heads in PLANTED:
        rows = [measure([PlantedRows(pages, heads, seed=seed)]) for seed in range(SEEDS)]
        results.append(dict(title=f"{pages * PAGE_TOKENS} tokens, {heads} heads", dim=DIM, budgets=BUDGETS, covered=means(rows), each=rows))
        log(results[-1]["title"], results[-1]["covered"])
    return results


def means(runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    return {name: [statistics.fmean(column) for column in zip(*(run[name] for run in runs))] for name in runs[0]}


def joined(source: str, tokens: int) -> list[dict[str, Any]]:
    from kvskim.eval.model import load_named
    from kvskim.eval.texts import code, prose, token_ids

    model = load_named(source)
    dim = 2 * model.num_kv_heads * model.head_dim
    texts = {"prose": token_ids(model.tokenizer, prose(), tokens), "code": token_ids(model.tokenizer, code(), tokens)}
    fits = other_text_fits(model, tokens)
    found: dict[str, list[dict[str, list[float]]]] = {"the text itself": [], "other text": []}
    for name, ids in texts.items():
        pairs = list(layers_of_text(model, ids, fits))
        for rows, problems in zip(found.values(), zip(*pairs)):
            rows.append(measure(problems))
            log(name, rows[-1])
    return [
        dict(title=f"{tokens} tokens, {model.num_heads} heads, calibrated on {about}", dim=dim, budgets=BUDGETS, covered=means(rows), each=rows)
        for about, rows in found.items()
    ]


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """One row per selector; columns are the problems and budgets. Cells: the oracle's mass, and for the others how much less theirs is, in points."""
    dim = results[0]["dim"]
    cells = " | ".join(f"{result['title']}: {' / '.join(map(str, result['budgets']))} pages" for result in results)
    lines = [f"| selector | bytes per page | share of the rows | {cells} |", "|---|---|---|" + "---|" * len(results)]
    for name, options in SELECTORS:
        width = get_selector(name, **options).record_bytes(dim)
        row = [label(name, options), str(width), f"{width / (PAGE_TOKENS * dim * 2):.1%}"]
        if name == "oracle":
            row[1:] = ["-", "-"]
        for result in results:
            best, own = result["covered"]["oracle"], result["covered"][label(name, options)]
            numbers = [f"{100 * b:.1f}%" for b in best] if name == "oracle" else [f"{100 * (o - b):+.2f}" for b, o in zip(best, own)]
            row.append(" / ".join(numbers))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("planted", "joined"), help="one of the two problems")
    parser.add_argument("--model", default="demo", help="for joined: a Hugging Face folder, a .gguf file, or demo (default)")
    parser.add_argument("--tokens", type=int, default=MODEL_TOKENS, help=f"for joined: length of the texts (default {MODEL_TOKENS})")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = dict(
        command="python " + shlex.join(sys.argv), date=datetime.date.today().isoformat(), torch=torch.__version__, machine=platform.machine(), seeds=SEEDS
    )
    if arguments.only != "joined":
        result["planted"] = planted()
    if arguments.only != "planted":
        result["joined"] = joined(arguments.model, arguments.tokens)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for kind in ("planted", "joined"):
        if kind in result:
            print(table(result[kind]))


if __name__ == "__main__":
    main()
