"""Scores of a benchmark that was read: one table over all its tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvskim.eval.answers import Answerer, score_samples
from kvskim.eval.sample import Sample
from kvskim.eval.score_table import markdown, numbers, table


def run_benchmark(samples: Sequence[Sample], answerer: Answerer, *, heads: int, log: Callable[[str], None] = print) -> tuple[dict[str, Any], str]:
    """Scores of all answers and the table as one JSON-able dict, and the table as Markdown.

    heads: sparse layers times kv heads, for the bytes of a step.
    """
    start = time.perf_counter()
    rows = score_samples(samples, answerer, log)
    cells = table(rows, heads)
    return dict(table=numbers(cells), answers=[row.as_dict() for row in rows], seconds=round(time.perf_counter() - start, 1)), markdown(cells)
