"""`kvskim eval ruler`: tasks by context lengths, for all methods and settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvskim.eval.answers import Answerer, ModelAnswerer, Scored, progress, score_sample, scored_of
from kvskim.eval.methods import FULL, Calibrations, Method, Setting
from kvskim.eval.model import load_named
from kvskim.eval.plots import Point, plot_over_bytes
from kvskim.eval.ruler.tasks import make_samples
from kvskim.eval.sample import PromptFormat
from kvskim.eval.score_table import cells_of, markdown, numbers, table

SAVE_SECONDS = 20.0
"""Time between two calls of ``save``."""


@dataclass(frozen=True)
class Job:
    """One sample: the ``index``-th of its task, context and seed, the ``number``-th of its task and context over all seeds."""

    task: str
    context: int
    seed: int
    index: int
    number: int


def jobs_of(tasks: Sequence[str], contexts: Sequence[int], samples: int, seeds: Sequence[int]) -> Iterator[Job]:
    """All samples, in the order in which they are answered: the first of every task and context before the second of any, so that a run that is
    stopped has about equally many of each."""
    for index in range(samples):
        for position, seed in enumerate(seeds):
            for context in contexts:
                for task in tasks:
                    yield Job(task, context, seed, index, position * samples + index)


def answer_job(answerer: Answerer, prompts: PromptFormat, job: Job) -> list[Scored]:
    """Make a sample and answer it."""
    (sample,) = make_samples(job.task, job.context, 1, prompts, job.seed, job.index)
    return score_sample(sample, job.number, answerer)


def run_ruler(
    answered: Callable[[Iterable[Job], Callable[[], bool]], Iterable[tuple[Job, list[Scored]]]], *, tasks: Sequence[str], contexts: Sequence[int],
    samples: int, seeds: Sequence[int], heads: int, time_limit: float = 0.0, log: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> tuple[dict[str, Any], str]:
    """Scores of all answers and a table for each context, as one JSON-able dict, and the tables as Markdown.

    Args:
        answered: gives jobs and their answers, as long as the function that it is handed says true: `in_turn`, or worker processes.
        tasks: of `TASKS`.
        contexts: lengths in tokens.
        samples: for each task, context and seed.
        seeds: of the generators.
        heads: sparse layers times kv heads, for the bytes of a step.
        time_limit: seconds after which no sample is begun; 0: no limit.
        save: given the answers so far every `SAVE_SECONDS`, so that a long run that is stopped has not been for nothing (`with_tables`).
    """
    start = saved = time.perf_counter()
    result: dict[str, Any] = dict(
        tasks=list(tasks), contexts=list(contexts), samples=samples, seeds=list(seeds), time_limit=time_limit, heads=heads, answers=[],
    )

    def keep_going() -> bool:
        return not time_limit or time.perf_counter() - start < time_limit

    for _, rows in answered(jobs_of(tasks, contexts, samples, seeds), keep_going):
        result["answers"] += [row.as_dict() for row in rows]
        log(progress(rows))
        if time.perf_counter() - saved > SAVE_SECONDS:
            save({**result, "seconds": round(time.perf_counter() - start, 1)})
            saved = time.perf_counter()
    result["seconds"] = round(time.perf_counter() - start, 1)
    result = with_tables(result)
    save(result)
    return result, page(result)


def in_turn(answerer: Answerer, prompts: PromptFormat) -> Callable[[Iterable[Job], Callable[[], bool]], Iterator[tuple[Job, list[Scored]]]]:
    """The ``answered`` of `run_ruler` in this process, one sample after the other."""

    def answered(jobs: Iterable[Job], keep_going: Callable[[], bool]) -> Iterator[tuple[Job, list[Scored]]]:
        for job in jobs:
            if not keep_going():
                return
            yield job, answer_job(answerer, prompts, job)

    return answered


def worker(
    device: str, model: str, dtype: str, chat: str, methods: Sequence[Method], settings: Sequence[Setting], calibration: str, fitted: Any, sparse_from: str,
    limit: int,
) -> Callable[[Job], list[Scored]]:
    """The ``make`` of a worker process (`kvskim.eval.workers.Setup`)."""
    loaded = load_named(model, device, dtype)
    prompts = PromptFormat(loaded.tokenizer, chat)
    answerer = ModelAnswerer(loaded, prompts, methods, settings, Calibrations(loaded, calibration, fitted), sparse_from, limit)
    return lambda job: answer_job(answerer, prompts, job)


def with_tables(result: Mapping[str, Any]) -> dict[str, Any]:
    """``result`` with ``counts``, samples of each task by context, and ``tables``, made of its answers: also of those of a run that was stopped."""
    rows = sorted(map(scored_of, result["answers"]), key=lambda row: (row.context_tokens, result["tasks"].index(row.task), row.sample, row.question))
    counts: dict[str, dict[str, int]] = {}
    tables: dict[str, Any] = {}
    for context in result["contexts"]:
        found = [row for row in rows if row.context_tokens == context]
        if found:
            tables[str(context)] = numbers(table(found, result["heads"]))
            counts[str(context)] = {task: len({row.sample for row in found if row.task == task}) for task in result["tasks"]}
    return {**result, "counts": counts, "tables": tables}


def engine_note(result: Mapping[str, Any]) -> str:
    """What has to be known of answers that an engine gave; empty for those of transformers."""
    if "engine" not in result:
        return ""
    return (
        f"Answers by {result['engine']}: prompts are read with full attention, so the first token of an answer is of full attention, as in serving. Pages, "
        "share and bytes are means over the decode steps of prompts that were answered together."
    )


def page(result: Mapping[str, Any]) -> str:
    """The tables of all contexts as Markdown."""
    note = engine_note(result)
    return (f"{note}\n\n" if note else "") + "\n".join(
        f"## {context} tokens\n\n{counted(result['counts'][context])}\n\n{markdown(cells_of(rows))}" for context, rows in result["tables"].items()
    )


def counted(counts: Mapping[str, int]) -> str:
    """How many samples a table rests on, in one sentence; a second where a run was stopped before it had one of every task."""
    least, most = min(counts.values()), max(counts.values())
    text = f"{sum(counts.values())} samples, {least if least == most else f'{least} to {most}'} of each task, the same for every method and setting."
    missing = [task for task, count in counts.items() if not count]
    return f"{text} Means are without {', '.join(missing)}, of which there is none." if missing else text


def plot(result: Mapping[str, Any], output: Path, title: str) -> None:
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
