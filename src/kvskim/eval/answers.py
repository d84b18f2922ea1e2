"""Answers of a model to samples under every method and setting: one prefill with full attention per sample, then each policy decodes from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any, Protocol

import torch

from kvskim.errors import KvskimError
from kvskim.eval.generation import greedy
from kvskim.eval.methods import FULL, Calibrations, Method, PromptPolicies, Setting
from kvskim.eval.model import EvalModel
from kvskim.eval.policy import CACHE_ELEMENT_BYTES, Policy
from kvskim.eval.sample import PromptFormat, Question, Sample
from kvskim.eval.side_by_side import go_side_by_side, greedy_side_by_side
from kvskim.eval.together import goes_together, greedy_together
from kvskim.layout import PAGE_TOKENS, ceil_div

ALL_PAGES = "all"
"""Label of the only setting of full attention."""
STARTS = ("answer", "question")
Log = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """One answer. ``pages``: mean pages attended; ``share``: of the pages there; ``bytes``: read for one (layer, query, kv head). Drafts that were
    thrown away are counted in these means like tokens that were kept."""

    method: str
    setting: str
    text: str
    pages: float
    share: float
    bytes: float


@dataclass(frozen=True)
class Scored:
    """An answer with its score and what it answers."""

    task: str
    context_tokens: int
    sample: int
    question: int
    prompt_tokens: int
    score: float
    answer: Answer

    def as_dict(self) -> dict[str, Any]:
        row = asdict(self)
        return {**{k: v for k, v in row.items() if k != "answer"}, **row["answer"]}


def scored_of(row: Mapping[str, Any]) -> Scored:
    """The inverse of `Scored.as_dict`."""
    answer = Answer(**{field.name: row[field.name] for field in fields(Answer)})
    return Scored(**{field.name: row[field.name] for field in fields(Scored) if field.name != "answer"}, answer=answer)


class Answerer(Protocol):
    """Anything that answers the questions of a sample."""

    def answers(self, sample: Sample) -> Iterator[tuple[int, Question, int, Answer]]:
        """Index of the question, the question, tokens of its prompt, and an answer to it; for every question, method and setting."""
        ...


class ModelAnswerer:
    """Answers by a model.

    Args:
        model: a loaded model.
        prompts: how samples become token ids.
        methods: `FULL` among them or not; its answers serve the others as drafts either way.
        settings: rules and budgets.
        calibrations: parameters of selectors.
        sparse_from: ``answer``: the whole prompt is read with full attention, as engines do, and its last token is the first that is decoded sparsely;
            ``question``: only the context is, and the question is decoded sparsely too: what a policy keeps can't depend on the question.
        limit: most tokens of an answer where a question allows more; 0: as the question says.
    """

    def __init__(
        self, model: EvalModel, prompts: PromptFormat, methods: Sequence[Method], settings: Sequence[Setting], calibrations: Calibrations,
        sparse_from: str = "answer", limit: int = 0,
    ) -> None:
        if sparse_from not in STARTS:
            raise KvskimError(f"--sparse-from is {sparse_from!r}; it must be answer or question")
        self.model, self.prompts, self.methods, self.settings, self.calibrations = model, prompts, methods, settings, calibrations
        self.sparse_from, self.limit = sparse_from, limit
        self.stop = stop_tokens(model)

    def answers(self, sample: Sample) -> Iterator[tuple[int, Question, int, Answer]]:
        model = self.model
        if self.calibrations.needs_text(self.methods):
            self.calibrations.read_text(self.methods)
        before, tails = self.prompts.split(sample)
        room = max(len(tail) + q.limit for tail, q in zip(tails, sample.questions)) + PAGE_TOKENS
        model.reserve(len(before) + room)
        model.prefill(torch.tensor(before), query_stride=max(8, len(before) // 4096))
        self.calibrations.new_prompt()
        captured, places, observed = model.captured, model.captured_positions, model.observed
        for index, (question, tail) in enumerate(zip(sample.questions, tails)):
            prompt = torch.tensor(before + tail)
            model.captured, model.captured_positions = {layer: list(parts) for layer, parts in captured.items()}, list(places)
            model.observed = dict(observed)
            model.extend(prompt, len(before), len(prompt) - 1)
            if self.sparse_from == "question":
                # What policies look at ends with the context.
                model.captured, model.captured_positions, model.observed = captured, places, observed
            for answer in self._of_question(question, prompt, len(before)):
                yield index, question, len(prompt), answer

    def _of_question(self, question: Question, prompt: torch.Tensor, context: int) -> Iterator[Answer]:
        model = self.model
        prefix = len(prompt) - 1 if self.sparse_from == "answer" else context
        limit = min(question.limit, self.limit or question.limit)

        def settled(tokens: list[int]) -> bool:
            return question.settled(self._text(tokens))

        full = greedy(model, prompt, None, limit, self.stop, settled=settled)
        drafts = [full]
        if any(method.name == FULL for method in self.methods):
            pages = float(ceil_div(len(prompt), PAGE_TOKENS))
            size = 2 * PAGE_TOKENS * model.head_dim * CACHE_ELEMENT_BYTES
            yield Answer(FULL, ALL_PAGES, self._text(full), pages, 1.0, pages * size)
        together: list[tuple[Method, Setting, Policy]] = []
        every = PromptPolicies(model, prefix, self.calibrations).each(self.methods, self.settings)
        for method, group in groupby(every, lambda found: found[0]):
            found = list(group)
            policies = [policy for _, _, policy in found]
            if goes_together(policies[0]):
                together += found
                continue
            if go_side_by_side(policies, prefix):
                answers = greedy_side_by_side(model, prompt, prefix, policies, limit, self.stop, drafts, settled)
                drafts += [tokens for number, tokens in enumerate(answers) if tokens not in drafts and tokens not in answers[:number]]
            else:
                answers = [self._alone(prompt, prefix, policy, limit, drafts, settled) for policy in policies]
            for (_, setting, policy), tokens in zip(found, answers):
                yield self._answer(method, setting, policy, tokens)
        if together:
            answers = greedy_together(model, prompt, prefix, [policy for _, _, policy in together], limit, self.stop, settled)
            for (method, setting, policy), tokens in zip(together, answers):
                yield self._answer(method, setting, policy, tokens)

    def _alone(
        self, prompt: torch.Tensor, prefix: int, policy: Policy, limit: int, drafts: list[list[int]], settled: Callable[[list[int]], bool]
    ) -> list[int]:
        """The answer under one policy, which is a draft for those after it."""
        if prefix < len(prompt) - 1:
            self.model.decode(prompt, prefix, len(prompt) - 1, policy)
        tokens = greedy(self.model, prompt, policy, limit, self.stop, drafts, settled)
        if tokens not in drafts:
            drafts.append(tokens)
        return tokens

    def _answer(self, method: Method, setting: Setting, policy: Policy, tokens: list[int]) -> Answer:
        statistics = policy.statistics
        size = statistics.mean_bytes(self.model.head_dim)
        return Answer(method.label, setting.label, self._text(tokens), statistics.mean_pages, statistics.share, size)

    def _text(self, tokens: list[int]) -> str:
        return str(self.model.tokenizer.decode(tokens, skip_special_tokens=True))


def stop_tokens(model: EvalModel) -> set[int]:
    """Tokens that end an answer: those of the generation settings, of the configuration, and of the tokenizer."""
    return named_stop_tokens(getattr(model.model, "generation_config", None), model.config, model.tokenizer)


def named_stop_tokens(*sources: Any) -> set[int]:
    """The end-of-text tokens that these objects name, in ``eos_token_id``."""
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found |= set(value) if isinstance(value, (list, tuple)) else set() if value is None else {int(value)}
    return found


def score_samples(samples: Iterable[Sample], answerer: Answerer, log: Log = print) -> list[Scored]:
    """Every answer to every question, scored. One line of progress for each sample."""
    out: list[Scored] = []
    numbers: dict[tuple[str, int], int] = {}
    for sample in samples:
        key = (sample.task, sample.context_tokens)
        number = numbers[key] = numbers.get(key, -1) + 1
        rows = score_sample(sample, number, answerer)
        out += rows
        log(progress(rows))
    return out


def score_sample(sample: Sample, number: int, answerer: Answerer) -> list[Scored]:
    """Every answer to every question of a sample, which is the ``number``-th of its task and length."""
    return [
        Scored(sample.task, sample.context_tokens, number, index, tokens, question.score(answer.text), answer)
        for index, question, tokens, answer in answerer.answers(sample)
    ]


def progress(rows: list[Scored]) -> str:
    """One line about the answers to a sample."""
    shown = ", ".join(f"{method} {setting} {100 * mean:.0f}" for (method, setting), mean in _means(rows).items())
    return f"{rows[0].task} {rows[0].context_tokens or rows[0].prompt_tokens} tokens, sample {rows[0].sample}: {shown}"


def _means(rows: list[Scored]) -> dict[tuple[str, str], float]:
    scores: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        scores.setdefault((row.answer.method, row.answer.setting), []).append(row.score)
    return {key: sum(values) / len(values) for key, values in scores.items()}
