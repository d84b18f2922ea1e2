"""Word counts over a whole text: the ten words that are common, and the three most frequent coded words (RULER, aggregation tasks)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvskim.eval.ruler import words
from kvskim.eval.sample import Question, Sample
from kvskim.eval.text_metrics import string_match_all

COMMON_ANSWER_TOKENS = 120
FREQUENT_ANSWER_TOKENS = 50
EXAMPLE_FROM = 2048
"""Context tokens from which on there is room for an example."""


@dataclass(frozen=True)
class CommonWords:
    """A shuffled list in which ``common`` words come often and all others seldom.

    As in the paper, how often is fixed, and the list grows by more seldom words: 30 and 3 times, or 10 and 1 below 4096 tokens, 4 and 1 below 1024, where
    300 words have no room.
    """

    common: int = 10

    def make(self, random_: random.Random, units: int, context_tokens: int) -> Sample:
        """A sample with ``units`` seldom words."""
        often, seldom = (30, 3) if context_tokens >= 4096 else (10, 1) if context_tokens >= 1024 else (4, 1)
        chosen = words.plain_words(random_, self.common + units)
        frequent, rest = chosen[: self.common], chosen[self.common :]
        example = ""
        if context_tokens >= EXAMPLE_FROM:
            shown = words.plain_words(random_, self.common + 5)
            example = self._list(random_, shown[: self.common] * 3 + shown[self.common :])
            example += f"{self._question()}\n{self._prefix()} {self._numbered(shown[: self.common])}\n\n"
        context = example + self._list(random_, frequent * often + rest * seldom)
        question = Question(self._question(), tuple(frequent), string_match_all, COMMON_ANSWER_TOKENS, self._prefix())
        return Sample("", context, (question,), context_tokens)

    @staticmethod
    def _numbered(items: list[str]) -> str:
        return " ".join(f"{i}. {word}" for i, word in enumerate(items, 1))

    def _list(self, random_: random.Random, items: list[str]) -> str:
        random_.shuffle(items)
        return f"Here is a numbered list of words. Some of them come often. Remember those.\n{self._numbered(items)}\n\n"

    def _question(self) -> str:
        return f"Which {self.common} words come most often in the list?"

    def _prefix(self) -> str:
        return f"The {self.common} words that come most often are:"


@dataclass(frozen=True)
class FrequentWords:
    """Words without meaning whose frequency falls as ``rank ** -alpha`` (a Zeta distribution). The first rank is a row of dots, which nobody asks for."""

    alpha: float = 2.0
    asked: int = 3

    def make(self, random_: random.Random, units: int, context_tokens: int) -> Sample:
        """A sample with ``units`` words."""
        ranks = max(20, units // 20)
        total = sum(rank**-self.alpha for rank in range(1, ranks + 1))
        counts = [max(1, round(units * rank**-self.alpha / total)) for rank in range(1, ranks + 1)]
        # The three that are asked for, and the next one, must differ at any length.
        for rank in range(self.asked, 0, -1):
            counts[rank] = max(counts[rank], counts[rank + 1] + 1)
        coded = [name.lower() for name in words.made_up_names(random_, ranks - 1)]
        listed = ["..."] * counts[0] + [word for word, count in zip(coded, counts[1:]) for _ in range(count)]
        random_.shuffle(listed)
        context = "The text below is in a code of words without meaning. Count how often each of them comes; the dots do not count.\n\n"
        context += " ".join(listed) + "\n\n"
        question = Question(
            f"Which {self.asked} words come most often in the coded text?", tuple(coded[: self.asked]), string_match_all, FREQUENT_ANSWER_TOKENS,
            f"The {self.asked} words that come most often in the coded text, apart from the dots, are:",
        )
        return Sample("", context, (question,), context_tokens)
