"""Needles in a haystack: facts "the secret number of KEY is VALUE" in a long text, asked for by key (RULER, section 3, retrieval tasks)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from kvskim.eval.ruler import haystack, words
from kvskim.eval.sample import Question, Sample
from kvskim.eval.text_metrics import string_match_all

ANSWER_TOKENS = 128


@dataclass(frozen=True)
class NeedleTask:
    """Haystack: a repeated remark, prose, or needles with other keys. ``keys``: facts with other keys, the one asked for counted, in the text;
    ``values``: facts with the key asked for; ``queries``: keys asked for."""

    haystack: Literal["noise", "prose", "needles"]
    value: Literal["number", "uuid"] = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1
    uuid_keys: bool = False

    def make(self, random_: random.Random, units: int, context_tokens: int) -> Sample:
        """A sample with ``units`` sentences or other needles in its haystack."""
        fresh = words.number_value if self.value == "number" else words.uuid_value
        named = max(self.keys, self.queries)
        others = units if self.haystack == "needles" else 0
        total = named + others
        keys = [words.uuid_value(random_) for _ in range(total)] if self.uuid_keys else words.key_phrases(random_, total)
        asked, rest = keys[: self.queries], keys[self.queries :]
        references, facts = [], []
        for key in asked:
            for _ in range(self.values):
                references.append(fresh(random_))
                facts.append(self.fact(key, references[-1]))
        facts += [self.fact(key, fresh(random_)) for key in rest[: named - self.queries]]
        if self.haystack == "needles":
            background = [self.fact(key, fresh(random_)) for key in rest[named - self.queries :]]
        else:
            background = haystack.noise(units) if self.haystack == "noise" else haystack.prose_sentences(random_, units)
        separator = "\n" if self.haystack != "prose" else " "
        body = separator.join(haystack.hidden(random_, background, facts))
        return Sample("", self.introduced(body), (self.ask(asked, references),), context_tokens)

    def fact(self, key: str, value: str) -> str:
        """The sentence that tells the value of a key."""
        return f"The secret {self.value} of {key} is {value}."

    def introduced(self, body: str) -> str:
        """The context: what the text is about, and the text."""
        return f"The text below mentions secret {self.value}s. Read it with care and keep them in mind: you will be asked about them.\n\n{body}\n\n"

    def ask(self, keys: list[str], references: list[str]) -> Question:
        """The question for all values of ``keys``, which are ``references``."""
        kind = f"{self.value}s" if len(references) > 1 else self.value
        names = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
        verb = "are" if len(references) > 1 else "is"
        text = f"Which secret {kind} of {names} does the text mention? Give {'all of them' if len(references) > 1 else 'it'}."
        prefix = f"The secret {kind} of {names} mentioned in the text {verb}"
        return Question(text, tuple(references), string_match_all, ANSWER_TOKENS, prefix)


@dataclass(frozen=True)
class RecallTask:
    """Associative recall: a list of key and value pairs, then keys again, each asked for by itself (Arora et al. 2023, arXiv 2312.04927)."""

    questions: int = 4

    def make(self, random_: random.Random, units: int, context_tokens: int) -> Sample:
        """A sample with ``units`` pairs."""
        pairs = max(units, self.questions)
        keys = words.key_phrases(random_, pairs)
        values = [str(random_.randrange(1000, 10_000)) for _ in keys]
        lines = "".join(f"{key}: {value}\n" for key, value in zip(keys, values))
        asked = random_.sample(range(pairs), self.questions)
        context = f"A list of names with a number each:\n{lines}\nThe same numbers again, for some of the names:\n"
        return Sample("", context, tuple(Question("", (values[i],), string_match_all, 8, f"{keys[i]}:") for i in asked), context_tokens)
