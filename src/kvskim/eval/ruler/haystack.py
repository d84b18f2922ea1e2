"""Background text that facts are hidden in: a repeated remark, prose, or other facts of the same form."""

from __future__ import annotations

import random
import re
from functools import cache

from kvskim.eval.texts import prose

NOISE = "The kettle is on the stove. The lamp is lit. The door is closed. Now we wait. Somebody walks by, and walks back again."


@cache
def _sentences() -> tuple[str, ...]:
    text = re.sub(r"\s+", " ", prose())
    return tuple(sentence for sentence in re.split(r"(?<=[.!?]) ", text) if 20 < len(sentence) < 400)


def noise(units: int) -> list[str]:
    """The same remark ``units`` times."""
    return [NOISE] * units


def prose_sentences(random_: random.Random, units: int) -> list[str]:
    """``units`` sentences of prose in their order, from a random place on; the text starts again at its end."""
    sentences = _sentences()
    start = random_.randrange(len(sentences))
    return [sentences[(start + i) % len(sentences)] for i in range(units)]


def hidden(random_: random.Random, background_units: list[str], facts: list[str], keep_order: bool = False) -> list[str]:
    """The facts at random places between the units, each place equally likely.

    keep_order: the facts come in the order in which they are given.
    """
    places = sorted(random_.randrange(len(background_units) + 1) for _ in facts)
    ordered = list(facts)
    if not keep_order:
        random_.shuffle(ordered)
    out: list[str] = []
    previous = 0
    for place, fact in zip(places, ordered):
        out += background_units[previous:place]
        out.append(fact)
        previous = place
    return out + background_units[previous:]
