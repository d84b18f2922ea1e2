"""Training documents: long texts in the form of the RULER tasks of `kvskim eval ruler`, with many questions at the end of each.

Wording and the way prompts become tokens are those of `kvskim.eval.ruler` and `kvskim.eval.sample`, so that a model trained on these documents reads in
an evaluation exactly what it has learnt: the prompt up to the beginning of the answer in the same tokens. What is asked comes from seeds of its own.
Documents of one seed are the same on every machine with the same Python (texts of its library are part of the background).
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kvskim.demo.text import tokenize
from kvskim.errors import KvskimError
from kvskim.eval.ruler import haystack, make_samples, words
from kvskim.eval.ruler.facts import GeneratedQuestions
from kvskim.eval.ruler.retrieval import NeedleTask, RecallTask
from kvskim.eval.ruler.tasks import fitting_units
from kvskim.eval.ruler.tracing import VariableTracking
from kvskim.eval.sample import PromptFormat, Question, Sample

NOTHING, LANGUAGE, ANSWER, FIRST_ANSWER, END = range(5)
"""Roles of a token: not learnt; text; part of an answer; part of the answer to the first question, the only one of an evaluation; end of an answer."""
LANGUAGE_TOKENS = 1 / 32
"""Share of the context's tokens that are learnt as text, so that the model does not forget to write."""
HELD_OUT_SEED = 1_000_003
"""Seed of the samples that are measured during the training. `kvskim eval ruler` counts its seeds from `--first-seed`, 0 unless it is given."""
TOKENS_PER_QUESTION = 256
MOST_QUESTIONS = 48
NEEDLE_TASKS = tuple(f"niah_{name}" for name in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery"))


@dataclass(frozen=True)
class Document:
    """A context and turns of (question, answer). ``separator``: what stands between the turns where they are one message; None: messages of a chat."""

    context: str
    turns: tuple[tuple[Question, str], ...]
    separator: str | None = None


@dataclass(frozen=True)
class Encoded:
    """Token ids of a document and the role of each token."""

    ids: list[int]
    roles: list[int]


class Encoder:
    """Turns documents into tokens as `PromptFormat` does with samples, and goes on with the answer and further turns of the chat.

    Raises:
        KvskimError: the tokenizer has no chat template, no end-of-text token, or a template that does not end an answer with it.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.eos_token:
            raise KvskimError("the tokenizer of this model has no end-of-text token: this recipe is for SmolLM2-135M-Instruct")
        self.tokenizer, self.prompts = tokenizer, PromptFormat(tokenizer, "on")
        marks = ["\u241f1\u241f", "\u241f2\u241f", "\u241f3\u241f"]
        roles = ("user", "assistant", "user")
        chat = tokenizer.apply_chat_template(
            [{"role": role, "content": mark} for role, mark in zip(roles, marks)], add_generation_prompt=True, tokenize=False
        )
        between, self.after_question = chat.partition(marks[1])[2].split(marks[2])
        if not between.startswith(tokenizer.eos_token):
            raise KvskimError(
                f"the chat template of this model does not end an answer with its end-of-text token {tokenizer.eos_token!r}: this recipe is for "
                "SmolLM2-135M-Instruct, whose eos_token in tokenizer_config.json is '<|im_end|>'"
            )
        self.end = int(tokenizer.eos_token_id)
        self.before_question = between[len(tokenizer.eos_token) :]

    def encode(self, document: Document, random_: random.Random | None = None) -> Encoded:
        """Tokens and roles. ``random_`` draws the tokens that are learnt as text; None: none."""
        first = document.turns[0][0]
        before, after = self.prompts.parts(Sample("", document.context, (first,)), first)
        ids, roles = before + after, [NOTHING] * (len(before) + len(after))
        if random_ is not None:
            for place in random_.sample(range(1, len(before)), int(len(before) * LANGUAGE_TOKENS)):
                roles[place] = LANGUAGE
        for number, (question, answer) in enumerate(document.turns):
            if number:
                separator = document.separator
                asked = f"{self.before_question}{question.text}{self.after_question}" if separator is None else separator
                asked_ids = tokenize(self.tokenizer, asked + question.answer_prefix)
                ids += asked_ids
                roles += [NOTHING] * len(asked_ids)
            answer_ids = tokenize(self.tokenizer, answer)
            ids += answer_ids
            roles += [ANSWER if number else FIRST_ANSWER] * len(answer_ids)
            if document.separator is None or number == len(document.turns) - 1:
                ids.append(self.end)
                roles.append(END)
        return Encoded(ids, roles)


def listed(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def needle_answer(values: Sequence[str]) -> str:
    return f" {listed(values)}."


@cache
def _library_lines() -> tuple[str, ...]:
    """Lines of the modules of Python's library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return tuple(line[:300] for line in text.split("\n") if line.strip())


def _background(kind: str, random_: random.Random, units: int) -> tuple[list[str], str]:
    """Units of a background and what stands between them."""
    if kind == "noise":
        return haystack.noise(units), "\n"
    if kind == "prose":
        return haystack.prose_sentences(random_, units), " "
    lines = _library_lines()
    start = random_.randrange(len(lines))
    return [lines[(start + i) % len(lines)] for i in range(units)], "\n"


Maker = Callable[[random.Random, int, int], Document]
"""Makes a document of a generator, units (more make it longer) and the most questions."""


def needles(background: str, value: str = "number", uuid_keys: bool = False) -> Maker:
    """Documents of the retrieval tasks: questions for one key, for a key with several values, and for several keys.

    background: ``noise``, ``prose``, ``code``, or ``needles``, other facts of the same form.
    """
    task = NeedleTask("needles", value=value, uuid_keys=uuid_keys)  # type: ignore[arg-type]
    fresh = words.number_value if value == "number" else words.uuid_value

    def make(random_: random.Random, units: int, questions: int) -> Document:
        if value == "uuid":
            questions = max(1, questions // (3 if uuid_keys else 2))
        groups = []
        while (asked := sum(len(g) for g in groups)) < questions:
            # Several keys in one question, or one key with several values, each in a fifth of the questions.
            kind = random_.random()
            count = random_.randint(2, 4)
            groups.append([1] * min(count, questions - asked) if kind < 0.2 else [count] if kind < 0.4 and questions - asked >= count else [1])
        others = random_.randrange(questions + 1) if background != "needles" else units
        named = sum(map(len, groups))
        total = named + others
        keys = [words.uuid_value(random_) for _ in range(total)] if uuid_keys else words.key_phrases(random_, total)
        pairs = [[(keys.pop(), [fresh(random_) for _ in range(values)]) for values in group] for group in groups]
        facts = [task.fact(key, one) for group in pairs for key, values in group for one in values]
        rest = [task.fact(key, fresh(random_)) for key in keys]
        units_of_text, separator = ([], "\n") if background == "needles" else _background(background, random_, units)
        context = task.introduced(separator.join(haystack.hidden(random_, units_of_text, facts + rest)))
        turns = []
        for group in pairs:
            # The values of one key come in the order of the text.
            values = [one for _, several in group for one in sorted(several, key=context.index)]
            turns.append((task.ask([key for key, _ in group], values), needle_answer(values)))
        return Document(context, tuple(turns))

    return make


def tracing(random_: random.Random, units: int, questions: int) -> Document:
    """Documents of variable tracking: every chain is asked for."""
    task = VariableTracking(chains=random_.randint(1, min(6, questions + 1)))
    sample = task.make(random_, units, 0)
    question = sample.questions[0]
    asked = re.findall(r"value (\d+)", question.text)[0]
    text = sample.context[sample.context.index(question.text.split(asked)[0]) :]
    holders: dict[str, list[str]] = {}
    chain_of: dict[str, str] = {}
    for name, value, source in re.findall(r"VAR (\w+) = (?:(\d+)|VAR (\w+))", text):
        chain_of[name] = value or chain_of[source]
        holders.setdefault(chain_of[name], []).append(name)
    order = [asked, *(value for value in holders if value != asked)]
    turns = tuple(
        (Question(question.text.replace(asked, value), tuple(holders[value]), question.metric, question.limit, question.answer_prefix.replace(asked, value)),
         f" {', '.join(holders[value])}.") for value in order
    )  # fmt: skip
    return Document(sample.context, turns)


def facts_of_companies(hops: int) -> Maker:
    """Documents of the two question-answering tasks."""

    def make(random_: random.Random, units: int, questions: int) -> Document:
        sample = GeneratedQuestions(hops).make(random_, units, 0)
        question = sample.questions[0]
        companies = {c: (seat, p) for c, seat, p in re.findall(r"The company (\w+) makes [^.]*in the town of (\w+)\. .*? by (\w+ \w+)\.", sample.context)}
        birthplaces = dict(re.findall(r"(\w+ \w+) was born in the town of (\w+)", sample.context))
        asked = next(name for name in re.findall(r"\w+", question.text) if name in companies)
        others = random_.sample(list(companies), min(len(companies), questions))
        turns = []
        for name in [asked, *(other for other in others if other != asked)]:
            seat, person = companies[name]
            answer = seat if hops == 1 else birthplaces[person]
            turns.append((Question(question.text.replace(asked, name), (answer,), question.metric, question.limit, question.answer_prefix), f" {answer}"))
        return Document(sample.context, tuple(turns))

    return make


def recall(random_: random.Random, units: int, questions: int) -> Document:
    """Documents of associative recall; all questions in one message."""
    sample = RecallTask(questions).make(random_, units, 0)
    return Document(sample.context, tuple((question, f" {question.references[0]}") for question in sample.questions), separator="\n")


MIXTURE: tuple[tuple[float, Maker], ...] = (
    (0.20, needles("needles")), (0.16, needles("needles", "uuid", uuid_keys=True)), (0.20, needles("prose")), (0.12, needles("prose", "uuid")),
    (0.10, needles("code")), (0.06, needles("noise")), (0.05, tracing), (0.04, facts_of_companies(1)), (0.03, facts_of_companies(2)), (0.04, recall),
)  # fmt: skip
"""Shares of the kinds of documents."""


def make_document(encoder: Encoder, length: int, name: str) -> Encoded:
    """The document called ``name``, of 80% to 100% of ``length`` tokens; shorter ones where the questions leave no room for a context."""
    random_ = random.Random(f"long-smollm/{name}")
    maker = random_.choices([maker for _, maker in MIXTURE], [share for share, _ in MIXTURE])[0]
    target = int(length * random_.uniform(0.8, 1.0))
    most = max(1, min(MOST_QUESTIONS, target // TOKENS_PER_QUESTION))
    # Few questions in every fifth document: an evaluation has one.
    questions = random_.randint(1, min(4, most)) if random_.random() < 0.2 else random_.randint((most + 1) // 2, most)
    state = random_.getstate()

    def make(units: int) -> Document:
        random_.setstate(state)
        return maker(random_, units, questions)

    while True:
        units = fitting_units(lambda units: len(encoder.encode(make(units)).ids), target, max(2, target // 24))
        if units is not None:
            return encoder.encode(make(units), random_)
        if questions == 1:
            raise KvskimError(f"a document of {length} tokens has no room for a question and its context: use --longest 1024 or more")
        questions = (questions + 1) // 2


def stack(encoded: Sequence[Encoded], length: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and roles uint8, both ``[documents, length]``; what follows a document is filled with the end-of-text token, which is not learnt."""
    ids = np.full((len(encoded), length), end, dtype=np.int32)
    roles = np.full((len(encoded), length), NOTHING, dtype=np.uint8)
    for row, one in enumerate(encoded):
        ids[row, : len(one.ids)] = one.ids
        roles[row, : len(one.ids)] = one.roles
    return ids, roles


def make_batch(encoder: Encoder, seed: int, number: int, length: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Batch ``number`` of a seed: about ``tokens`` tokens in documents of at most ``length``."""
    count = max(1, tokens // length)
    return stack([make_document(encoder, length, f"{seed}/{number}/{row}/{length}") for row in range(count)], length, encoder.end)


def held_out(encoder: Encoder, task: str, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of a retrieval task as `kvskim eval ruler` makes them, one question each, with the right answer."""
    encoded = []
    for sample in make_samples(task, length, count, encoder.prompts, HELD_OUT_SEED):
        question = sample.questions[0]
        values = question.references if task == "niah_multiquery" else sorted(question.references, key=sample.context.index)
        encoded.append(encoder.encode(Document(sample.context, ((question, needle_answer(values)),))))
    return stack(encoded, length, encoder.end)
