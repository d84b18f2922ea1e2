"""Texts and questions for evaluation, made of what ships with Python: the language reference (prose) and the standard library (code)."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from typing import Any

from kvskim.demo.text import docstring_text

_ADJECTIVES = (
    "amber", "brave", "calm", "dusty", "eager", "fancy", "gentle", "hollow", "icy", "jolly",
    "keen", "lunar", "misty", "noble", "olive", "proud", "quiet", "rusty", "silver", "tidy",
)
_NOUNS = (
    "anchor", "badger", "candle", "dragon", "engine", "falcon", "garden", "harbor", "island",
    "jacket", "kettle", "ladder", "magnet", "needle", "orchid", "pencil", "quarry",
)
_PEOPLE = ["Maria Lopez", "John Becker", "Aisha Khan", "Peter Novak", "Lena Fischer", "Tom Harris", "Yuki Tanaka", "Omar Said", "Ines Costa", "Paul Dubois"]
_FACTS = (
    "The phone extension of {person} is", "The password for the {adjective} {noun} is", "The invoice number of the {adjective} {noun} company is",
    "The locker code of {person} is", "The population of {adjective} {noun} village is", "The serial number of the {noun} machine is",
    "The postal code of {adjective} {noun} town is", "The salary of {person} in dollars is", "The licence plate of {person} is",
    "The height of the {adjective} {noun} mountain in feet is", "The flight number to {adjective} {noun} is", "The account number of {person} is",
)


def prose() -> str:
    """The Python language reference as text (about 600,000 characters); docstrings where a distribution left it out."""
    try:
        from pydoc_data.topics import topics  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return docstring_text()
    return "\n\n".join(text for _, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])))


def code() -> str:
    """Modules of the standard library."""
    import argparse
    import inspect as inspect_module
    import subprocess
    import typing

    return "\n".join(inspect.getsource(module) for module in (argparse, typing, inspect_module, subprocess))


def other_text() -> str:
    """Text for calibration that shares nothing with `prose` and `code`."""
    import logging
    import tarfile
    import zipfile

    modules = "\n".join(inspect.getsource(m)[:60_000] for m in (tarfile, logging, zipfile))
    notes = "\n\n".join(inspect.getdoc(m) or "" for m in (random, logging, tarfile, inspect))
    return notes + "\n" + modules


def token_ids(tokenizer: Any, text: str, count: int, skip: int = 2000) -> list[int]:
    """The first ``count`` tokens of ``text`` from character ``skip`` on, with the model's begin-of-text token."""
    ids = tokenizer(text[skip : skip + 10 * count], add_special_tokens=False).input_ids
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    ids = (start + ids)[:count]
    if len(ids) < count:
        raise ValueError(f"the text gives only {len(ids)} tokens; {count} are needed: use a longer text")
    return ids


@dataclass(frozen=True)
class Question:
    """A prompt to be completed, and the right completion."""

    prompt: str
    answer: str


def planted_facts(tokenizer: Any, count: int, seed: int, filler: str | None = None) -> tuple[list[int], list[Question]]:
    """A context of about ``count`` tokens with twelve facts of different kinds planted at random depths, and the questions about them."""
    rng = random.Random(seed)
    people = _PEOPLE * 2
    rng.shuffle(people)
    questions = []
    for i, template in enumerate(_FACTS):
        prompt = template.format(person=people[i], adjective=rng.choice(_ADJECTIVES).title(), noun=rng.choice(_NOUNS).title())
        questions.append(Question(prompt, f" {rng.randrange(10_000, 99_999)}"))
    source = filler if filler is not None else prose()
    offset = 20_000 + 30_000 * (seed % 6)
    lines = [line + "\n" for line in source[offset:].split("\n") if len(line) > 20]
    facts = [tokenizer(f"{q.prompt}{q.answer}.\n", add_special_tokens=False).input_ids for q in questions]
    room = count - sum(map(len, facts)) - 4
    fill: list[list[int]] = []
    used = 0
    for line in lines:
        ids = tokenizer(line, add_special_tokens=False).input_ids
        if used + len(ids) > room:
            break
        fill.append(ids)
        used += len(ids)
    slots = sorted(rng.sample(range(2, len(fill) - 6), len(facts)))
    ids = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    for i, line_ids in enumerate(fill):
        if i in slots:
            ids += facts[slots.index(i)]
        ids += line_ids
    return ids, questions
