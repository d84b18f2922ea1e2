"""`kvskim eval ruler`: tasks by context lengths, for all methods and settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvskim.eval.answers import Answerer, Scored, score_samples
from kvskim.eval.methods import FULL
from kvskim.eval.plots import Point, plot_over_bytes
from kvskim.eval.ruler.tasks import make_samples
from kvskim.eval.sample import PromptFormat
from kvskim.eval.score_table import markdown, numbers, table


def run_ruler(
    answerer: Answerer, prompts: PromptFormat, *, tasks: Sequence[str], contexts: Sequence[int], samples: int, seeds: Sequence[int], heads: int,
    log: Callable[[str], None] = print, save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> tuple[dict[str, Any], str]:
    """Scores of all answers and a table for each context, as one JSON-able dict, and the tables as Markdown.

    Args:
        answerer: usually a `ModelAnswerer`.
        prompts: measures the samples.
        tasks: of `TASKS`.
        contexts: lengths in tokens.
        samples: for each task, context and seed.
        seeds: of the generators.
        heads: sparse layers times kv heads.
        save: given the result so far after every task, so that a long run that is stopped has not been for nothing.
    """
    start = time.perf_counter()
    result: dict[str, Any] = dict(tasks=list(tasks), contexts=list(contexts), samples=samples, seeds=list(seeds), tables={}, answers=[])
    pages = []
    for context in contexts:
        rows: list[Scored] = []
        for task in tasks:
            made = (sample for seed in seeds for sample in make_samples(task, context, samples, prompts, seed))
            fresh = score_samples(made, answerer, log)
            rows += fresh
            cells = table(rows, heads)
            result["tables"][str(context)] = numbers(cells)
            result["answers"] += [row.as_dict() for row in fresh]
            save(result)
        pages.append(f"## {context} tokens\n\n{markdown(cells)}")
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result, "\n".join(pages)


def plot(result: dict[str, Any], output: Path, title: str) -> None:
    """Mean score over bytes read per step, for the longest context of the result."""
    context = max(result["tables"], key=int)
    lines: dict[str, list[Point]] = {}
    level = None
    for cell in result["tables"][context]:
        score = cell["score"]
        if cell["method"] == FULL:
            level = 100 * score["mean"]
        else:
            lines.setdefault(cell["method"], []).append(Point(cell["bytes_per_step"] / 1024, *(100 * score[k] for k in ("mean", "low", "high"))))
    plot_over_bytes(lines, level, output, title=f"{title}, {context} tokens", label="mean score, %")
