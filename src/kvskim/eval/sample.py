"""Questions about long contexts, as every benchmark here states them, and the token ids that a model reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvskim.demo.text import tokenize
from kvskim.errors import KvskimError
from kvskim.eval.text_metrics import NEVER_FALLING, Metric

CHAT_MODES = ("auto", "on", "off")
_MARK = "\u241fquestion\u241f"
"""Stands between context and question while a chat template is applied, to find the place again."""


@dataclass(frozen=True)
class Question:
    """``text``: what follows the context. ``answer_prefix``: how the answer begins, given to the model. ``limit``: most tokens of an answer."""

    text: str
    references: tuple[str, ...]
    metric: Metric
    limit: int
    answer_prefix: str = ""

    def score(self, prediction: str) -> float:
        """From 0 to 1."""
        return float(self.metric(prediction, self.references))

    def settled(self, prediction: str) -> bool:
        """Whether no continuation of ``prediction`` can change its score."""
        return self.metric in NEVER_FALLING and self.score(prediction) >= 1.0


@dataclass(frozen=True)
class Sample:
    """A context and one or more questions about it, each asked for itself."""

    task: str
    context: str
    questions: tuple[Question, ...]
    context_tokens: int = 0
    """Length that the sample was made for; 0 where a data set gives its length."""
    plain: bool = False
    """Never in a chat template: examples or code to go on with."""


class PromptFormat:
    """Turns samples into token ids.

    Args:
        tokenizer: of the model.
        chat: ``on`` uses the tokenizer's chat template, ``auto`` where it has one, ``off`` never.
        longest: tokens of prompt and answer that the model has room for; a longer context loses its middle, as LongBench does. None: no limit.

    Raises:
        KvskimError: there is no chat template to use, or no such mode.
    """

    def __init__(self, tokenizer: Any, chat: str = "auto", longest: int | None = None) -> None:
        if chat not in CHAT_MODES:
            raise KvskimError(f"--chat is {chat!r}; it must be auto, on or off")
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat == "on" and not has_template:
            raise KvskimError("--chat is on, but the tokenizer of this model has no chat template: use --chat off")
        self.tokenizer, self.longest = tokenizer, longest
        self.chat = has_template and chat != "off"

    def parts(self, sample: Sample, question: Question) -> tuple[list[int], list[int]]:
        """Token ids of what comes before the question, and of the rest. They are read one after the other, so they are cut there for every method."""
        answer_prefix = question.answer_prefix
        if self.chat and not sample.plain:
            message = [{"role": "user", "content": sample.context + _MARK + question.text}]
            text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            head, mark, tail = text.partition(_MARK)
            if not mark:
                raise KvskimError("the chat template of this model changes the text it is given: use --chat off")
            start: list[int] = []
        else:
            head, tail = sample.context, question.text
            # Without a turn of its own, the answer begins on the line after the question.
            answer_prefix = f"\n{answer_prefix}" if tail and answer_prefix else answer_prefix
            start = [self.tokenizer.bos_token_id] if getattr(self.tokenizer, "bos_token_id", None) is not None else []
        before, after = start + tokenize(self.tokenizer, head), tokenize(self.tokenizer, tail + answer_prefix)
        if not after:
            raise KvskimError(f"a question of the task {sample.task} has no words: there is nothing to answer")
        return self._shortened(sample.task, before, len(after), question.limit), after

    def split(self, sample: Sample) -> tuple[list[int], list[list[int]]]:
        """Token ids of what comes before all questions of a sample, and of the rest for each of them; see `parts`."""
        split = [self.parts(sample, question) for question in sample.questions]
        # A longer question may have cost the context some of its middle; the shortest context is then the one for all.
        return min((before for before, _ in split), key=len), [after for _, after in split]

    def check_room(self, samples: Iterable[Sample]) -> None:
        """Refuse, before any of them is read, samples whose question and answer alone leave no room for a context; raises KvskimError."""
        for sample in samples:
            for question in sample.questions:
                self.parts(replace(sample, context=""), question)

    def length(self, sample: Sample) -> int:
        """Tokens of the longest prompt of a sample together with its answer."""
        return max(sum(map(len, self.parts(sample, q))) + q.limit for q in sample.questions)

    def _shortened(self, task: str, before: list[int], question: int, answer: int) -> list[int]:
        if self.longest is None or len(before) + question + answer <= self.longest:
            return before
        room = self.longest - question - answer
        if room < 2:
            raise KvskimError(
                f"in the task {task} a question of {question} tokens and an answer of up to {answer} leave no room for a context in the {self.longest} tokens "
                "of this model: use a model for longer contexts, lower --limit, or leave the task out with --tasks"
            )
        return before[: room - room // 2] + before[len(before) - room // 2 :]


def check_tasks(asked: Sequence[str], known: Sequence[str], option: str = "--tasks") -> list[str]:
    """The tasks asked for, all if none; raises KvskimError that names an unknown one."""
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise KvskimError(f"{option} names {', '.join(map(repr, unknown))}; the tasks are {', '.join(known)}")
    return list(dict.fromkeys(asked)) or list(known)
