"""Variable tracking: a value is given to a variable and handed on from one to the next; which variables hold it? (RULER, multi-hop tracing)"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from kvskim.eval.ruler import haystack, words
from kvskim.eval.sample import Question, Sample
from kvskim.eval.text_metrics import string_match_all

ANSWER_TOKENS = 30


@dataclass(frozen=True)
class VariableTracking:
    """``hops``: how often the value is handed on. ``chains``: values that are handed on; one of them is asked for."""

    chains: int = 1
    hops: int = 4

    def make(self, random_: random.Random, units: int, context_tokens: int) -> Sample:
        """A sample with ``units`` remarks between the assignments, which come in their order."""
        value, names, assignments = self._chains(random_)
        body = "\n".join(self._between(random_, haystack.noise(units), assignments))
        sample_value, sample_names, sample_assignments = self._chains(random_)
        example = "\n".join(haystack.hidden(random_, haystack.noise(2), sample_assignments[0], keep_order=True))
        question, prefix = self._ask(value, len(names))
        sample_question, sample_prefix = self._ask(sample_value, len(sample_names))
        rule = "Variables get values in the text below, directly or from another variable. Keep track of who holds what."
        context = f"{rule}\n\n{example}\n\n{sample_question}\n{sample_prefix} {', '.join(sample_names)}.\n\n{rule}\n\n{body}\n\n"
        return Sample("", context, (Question(question, tuple(names), string_match_all, ANSWER_TOKENS, prefix),), context_tokens)

    def _chains(self, random_: random.Random) -> tuple[str, list[str], list[list[str]]]:
        """Value and variables of the chain that is asked for, and the assignments of every chain, that one first."""
        names = words.variable_names(random_, self.chains * (self.hops + 1))
        values = [str(value) for value in random_.sample(range(10_000, 100_000), self.chains)]
        assignments = []
        for chain, value in enumerate(values):
            of_chain = names[chain * (self.hops + 1) : (chain + 1) * (self.hops + 1)]
            assignments.append([f"VAR {of_chain[0]} = {value}"] + [f"VAR {b} = VAR {a}" for a, b in pairwise(of_chain)])
        return values[0], names[: self.hops + 1], assignments

    @staticmethod
    def _between(random_: random.Random, units: list[str], assignments: list[list[str]]) -> list[str]:
        lines = units
        for chain in assignments:
            lines = haystack.hidden(random_, lines, chain, keep_order=True)
        return lines

    @staticmethod
    def _ask(value: str, count: int) -> tuple[str, str]:
        question = f"Which variables hold the value {value} at the end? There are {count}."
        return question, f"The {count} variables that hold the value {value} are"
