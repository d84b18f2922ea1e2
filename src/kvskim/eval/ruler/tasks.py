"""The tasks by name, and samples of a wanted length."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Protocol

from kvskim.errors import KvskimError
from kvskim.eval.ruler.counting import CommonWords, FrequentWords
from kvskim.eval.ruler.facts import GeneratedQuestions
from kvskim.eval.ruler.retrieval import NeedleTask, RecallTask
from kvskim.eval.ruler.tracing import VariableTracking
from kvskim.eval.sample import PromptFormat, Sample

SHORTEST, LONGEST = 512, 1 << 20
"""Context lengths in tokens that samples can have."""
FULL_ENOUGH = 0.99
"""Share of a context that a sample fills."""
FIRST_GUESS = 64
"""Units of a sample that are tried first."""


class Task(Protocol):
    """Makes samples that are the longer the more ``units`` they have."""

    def make(self, random_: random.Random, units: int, context_tokens: int) -> Sample: ...


TASKS: dict[str, Task] = {
    "niah_single_1": NeedleTask("noise"),
    "niah_single_2": NeedleTask("prose"),
    "niah_single_3": NeedleTask("prose", value="uuid"),
    "niah_multikey_1": NeedleTask("prose", keys=4),
    "niah_multikey_2": NeedleTask("needles"),
    "niah_multikey_3": NeedleTask("needles", value="uuid", uuid_keys=True),
    "niah_multivalue": NeedleTask("prose", values=4),
    "niah_multiquery": NeedleTask("prose", queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": GeneratedQuestions(hops=1),
    "qa_2": GeneratedQuestions(hops=2),
    "kv_recall": RecallTask(),
}
RULER_TASKS = tuple(name for name in TASKS if name != "kv_recall")
"""The thirteen tasks that the mean of RULER is over."""


def _random(task: str, context_tokens: int, seed: int, index: int) -> random.Random:
    return random.Random(f"{task}/{context_tokens}/{seed}/{index}")


def fitting_units(length: Callable[[int], int], limit: int, guess: int) -> int | None:
    """About the most units with ``length(units) <= limit``: a length of at least 99% of the limit, or within half a percent of the most units.

    length: grows with the units, almost in proportion. guess: where to begin; a good one saves making long samples. None where one unit is too long.
    """
    low, base = 1, length(1)
    if base > limit:
        return None
    high: int | None = None
    reached, halve, units = 0, False, max(2, guess)
    while True:
        size = length(units)
        width = None if high is None else high - low
        if size <= limit:
            low, base = units, size
        else:
            high, reached = units, size
        if base >= FULL_ENOUGH * limit or (high is not None and high - low <= max(1, low // 200)):
            return low
        if high is None:
            units = max(low + 1, int(low * limit / base))
        else:
            # By proportion; by halves where that did not shorten the range much.
            halve = not halve and width is not None and high - low > width // 2
            part = 0.5 if halve else (limit - base) / max(1, reached - base)
            units = min(max(low + int((high - low) * part), low + 1), high - 1)


def make_samples(name: str, context_tokens: int, count: int, prompts: PromptFormat, seed: int = 0, first: int = 0) -> Iterator[Sample]:
    """Samples of a task that fill a context of ``context_tokens`` tokens, prompt and answer counted, without going beyond it.

    Args:
        name: of `TASKS`.
        count: number of samples. Sample ``i`` of a seed is the same for any count.
        prompts: measures in the model's own tokens, its chat template included.
        first: index of the first sample.

    Raises:
        KvskimError: the context is too short for the task, or out of range.
    """
    if not SHORTEST <= context_tokens <= LONGEST:
        raise KvskimError(f"--contexts has {context_tokens}; a context has {SHORTEST} to {LONGEST} tokens")
    for index in range(first, first + count):

        def make(units: int, index: int = index) -> Sample:
            return TASKS[name].make(_random(name, context_tokens, seed, index), units, context_tokens)

        def length(units: int, make: Callable[[int], Sample] = make) -> int:
            return prompts.length(make(units))

        # Each sample begins with the same guess, so that it does not depend on those before it.
        units = fitting_units(length, context_tokens, FIRST_GUESS)
        if units is None:
            raise KvskimError(
                f"the task {name} needs at least {length(1)} tokens with this model, more than the context of {context_tokens}: use a longer one"
            )
        sample = make(units)
        yield Sample(name, sample.context, sample.questions, context_tokens)
