"""Scores of a benchmark that was read: one table over all its tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from kvskim.eval.answers import Answerer, Scored, score_samples
from kvskim.eval.sample import Sample
from kvskim.eval.score_table import markdown, numbers, table


def run_benchmark(
    samples: Sequence[Sample], answerer: Answerer, *, heads: int, log: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> tuple[dict[str, Any], str]:
    """Scores of all answers and the table as one JSON-able dict, and the table as Markdown.

    Args:
        samples: task by task.
        answerer: usually a `ModelAnswerer`.
        heads: sparse layers times kv heads, for the bytes of a step.
        save: given the result so far after every task, so that a long run that is stopped has not been for nothing.
    """
    start = time.perf_counter()
    rows: list[Scored] = []
    for _, of_task in groupby(samples, lambda sample: sample.task):
        rows += score_samples(of_task, answerer, log)
        cells = table(rows, heads)
        result = dict(table=numbers(cells), answers=[row.as_dict() for row in rows], seconds=round(time.perf_counter() - start, 1))
        save(result)
    return result, markdown(cells)
