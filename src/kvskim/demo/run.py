"""`kvskim demo`: one model, one long document, the same questions with full attention and with kvskim, side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvskim.config import SkimConfig
from kvskim.demo.model import MODEL_NAME, check_positions, load_model, require_packages
from kvskim.demo.session import Session
from kvskim.demo.text import FACTS, Document, Fact, build_document, tokenize
from kvskim.engines.transformers import LayerStatistics, StepTrace, enable
from kvskim.errors import KvskimError

CONTINUATION = 64
"""Tokens of text after the document on which next-token predictions are compared."""
ANSWER_LIMIT = 32
LEAST_CONTEXT = 512
_ROLES = ("<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")


@dataclass
class DemoResult:
    """What the demo measured.

    answers: (question, answer with full attention, answer with kvskim). full_right, kvskim_right: planted facts answered rightly.
    agreement: share of equal next-token predictions on the continuation. covered_mass: exact mean attention mass of the attended pages there.
    statistics: of all kvskim decode steps; steps: how many those were. prompt_tokens: length of the document with its frame.
    """

    answers: list[tuple[str, str, str]] = field(default_factory=list)
    facts: int = 0
    full_right: int = 0
    kvskim_right: int = 0
    agreement: float = 1.0
    compared_tokens: int = 0
    covered_mass: float = 1.0
    statistics: LayerStatistics = field(default_factory=LayerStatistics)
    prompt_tokens: int = 0
    seconds: float = 0.0
    steps: int = 0


class _Coverage:
    """Mean exact coverage over everything observed."""

    def __init__(self) -> None:
        self.total, self.terms = 0.0, 0

    def __call__(self, trace: StepTrace) -> None:
        for row in trace.rows:
            if row.exact is not None:
                self.total += float(row.exact.sum())
                self.terms += row.exact.numel()

    @property
    def mean(self) -> float:
        return self.total / self.terms if self.terms else 1.0


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress


def _clean(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def _prepare(tokenizer: Any, context: int, text: str | None, questions: list[str]) -> tuple[Document, list[int], tuple[Fact, ...]]:
    """The document without its continuation, the continuation, and the questions."""
    whole = build_document(tokenizer, context + CONTINUATION, text, FACTS)
    if len(whole.ids) < LEAST_CONTEXT:
        raise KvskimError(f"the text has {len(whole.ids)} tokens; the demo needs at least {LEAST_CONTEXT}: give a longer one")
    document = Document(whole.ids[:-CONTINUATION], whole.facts, whole.places)
    asked = tuple(Fact("", question, "") for question in questions) if questions else whole.facts
    return document, whole.ids[-CONTINUATION:], asked


def run_demo(
    config: SkimConfig, *, context: int = 4096, text: str | None = None, questions: list[str] | None = None, console: Console | None = None
) -> DemoResult:
    """Run the demo and print it.

    Args:
        config: settings of kvskim.
        context: tokens of the document, at least 512; with the questions at most the 8192 that the model was made for.
        text: a text of the user's own instead of the built-in document with planted facts.
        questions: asked instead of those about the planted facts.

    Raises:
        KvskimError: the model is not installed, or the text is too short or too long for it.
    """
    console = console or Console()
    require_packages("transformers", "gguf", "accelerate")
    if context < LEAST_CONTEXT:
        raise KvskimError(f"context is {context}; it must be at least {LEAST_CONTEXT} tokens")
    begun = time.perf_counter()
    torch.set_num_threads(min(os.cpu_count() or 1, torch.get_num_threads()))
    with console.status(f"Loading {MODEL_NAME} (a GGUF file; about 20 s)"):
        model, tokenizer = load_model()
    document, continuation, asked = _prepare(tokenizer, context, text, questions or [])
    head, tail = tokenize(tokenizer, _ROLES[0]), tokenize(tokenizer, _ROLES[1])
    longest = max(CONTINUATION, ANSWER_LIMIT + len(tail) + max(len(tokenize(tokenizer, f"\n\n{fact.question}")) for fact in asked))
    check_positions(model, len(head) + len(document.ids) + longest, "--context")
    stop = {tokenizer.eos_token_id, *tail[:1]}
    host = enable(model, config)
    session = Session(model)
    result = DemoResult(prompt_tokens=len(head) + len(document.ids), facts=sum(bool(fact.answer) for fact in asked))

    with _bar(console) as progress:
        task = progress.add_task("Reading the document", total=result.prompt_tokens)
        session.prefill(head + document.ids, lambda tokens: progress.advance(task, tokens))
        if any(layer.dense_reason is None and not layer.calibrated and layer.selector.needs_calibration for layer in host.layers()):
            task = progress.add_task("Fitting the record basis on it", total=len(host.layers()))
            host.fit_calibration([session.cache], progress=lambda name: progress.advance(task))

        def ask(label: str) -> list[str]:
            task = progress.add_task(label, total=len(asked))
            answers = []
            for fact in asked:
                prompt = tokenize(tokenizer, f"\n\n{fact.question}") + tail
                answers.append(_clean(tokenizer, session.answer(prompt, stop, ANSWER_LIMIT)))
                session.go_back(result.prompt_tokens)
                progress.advance(task)
            return answers

        model.set_attn_implementation("sdpa")
        full = ask("Answering with full attention")
        expected = session.feed(continuation, keep=len(continuation))
        session.go_back(result.prompt_tokens)
        model.set_attn_implementation("kvskim")
        host.reset_statistics()
        sparse = ask("Answering with kvskim")
        coverage = _Coverage()
        host.observe(coverage, exact=True)
        task = progress.add_task("Comparing next-token predictions", total=len(continuation))
        actual = session.step_logits(continuation, lambda: progress.advance(task))

    result.answers = [(fact.question, one, other) for fact, one, other in zip(asked, full, sparse)]
    result.full_right = sum(bool(fact.answer) and fact.answer in one for fact, one in zip(asked, full))
    result.kvskim_right = sum(bool(fact.answer) and fact.answer in other for fact, other in zip(asked, sparse))
    result.agreement = float((actual.argmax(-1) == expected.argmax(-1)).float().mean())
    result.compared_tokens, result.covered_mass, result.statistics = len(continuation), coverage.mean, host.statistics()
    result.steps = result.statistics.rows // max(1, sum(layer.dense_reason is None for layer in host.layers()))
    result.seconds = time.perf_counter() - begun
    _print(console, config, result, asked)
    return result


def _print(console: Console, config: SkimConfig, result: DemoResult, asked: tuple[Fact, ...]) -> None:
    table = Table(title=f"{MODEL_NAME}, a document of {result.prompt_tokens} tokens", title_justify="left")
    table.add_column("Question", ratio=2)
    table.add_column("Full attention", ratio=2)
    table.add_column(f"kvskim ({config.selector}, {config.rule})", ratio=2)
    for fact, (question, full, sparse) in zip(asked, result.answers):
        table.add_row(question, *(_marked(answer, fact) for answer in (full, sparse)))
    console.print(table)

    statistics = result.statistics
    summary = Table(title="Per decode step, mean over layers, heads and steps", title_justify="left")
    summary.add_column("")
    summary.add_column("Full attention", justify="right")
    summary.add_column("kvskim", justify="right")
    pages = statistics.pages_total / max(1, statistics.heads)
    summary.add_row("pages attended", f"{pages:.0f} (100%)", f"{pages * statistics.attended_share:.1f} ({statistics.attended_share:.1%})")
    per_step = [total / max(1, result.steps) for total in (statistics.dense_bytes, statistics.bytes_read)]
    summary.add_row("bytes read (records, K and V)", f"{_size(per_step[0])} (100%)", f"{_size(per_step[1])} ({per_step[1] / max(1, per_step[0]):.1%})")
    summary.add_row("attention mass covered (exact)", "100%", f"{result.covered_mass:.1%}")
    agreed = round(result.agreement * result.compared_tokens)
    summary.add_row("top-1 agreement on following text", "", f"{agreed} of {result.compared_tokens} ({result.agreement:.1%})")
    if result.facts:
        summary.add_row("planted facts answered", f"{result.full_right} of {result.facts}", f"{result.kvskim_right} of {result.facts}")
    console.print(summary)
    console.print(f"Took {result.seconds:.0f} s. Keys and values are float32 here; the plain torch path shows what is read, not speed.", style="dim")


def _marked(answer: str, fact: Fact) -> str:
    from rich.markup import escape

    text = escape(answer or "(nothing)")
    if not fact.answer:
        return text
    return f"[green]{text}[/green]" if fact.answer in answer else f"[red]{text}[/red]"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
