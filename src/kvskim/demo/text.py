"""Documents to read: a long real text with facts planted in it.

The text is the language reference that ships with Python (``pydoc_data.topics``, the source of ``help('execmodel')``), read where it
is installed; where a distribution left it out, docstrings of the standard library take its place.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOPICS = ("execmodel", "debugger", "objects", "import", "customization", "attribute-access", "try", "with", "compound", "specialnames", "types")
DOCSTRING_MODULES = ("pickletools", "doctest", "argparse", "decimal", "subprocess", "logging", "inspect", "typing", "datetime", "collections")
CODE_MODULES = ("argparse", "tarfile", "typing", "zipfile", "inspect", "subprocess")


@dataclass(frozen=True)
class Fact:
    """A sentence planted in the document, a question about it, and the word a right answer contains."""

    statement: str
    question: str
    answer: str


FACTS = (
    Fact("The population of Misty Harbor village is 65380.", "What is the population of Misty Harbor village?", "65380"),
    Fact("The account number of Greta Lind is 90417.", "What is the account number of Greta Lind?", "90417"),
    Fact("The flight number of the airplane to Calm Island is 58602.", "What is the flight number of the airplane to Calm Island?", "58602"),
    Fact("The salary of Omar Said is 71938.", "What is the salary of Omar Said?", "71938"),
    Fact("The postal code of Walnut Valley is 36157.", "What is the postal code of Walnut Valley?", "36157"),
    Fact("The password for the silver falcon is 70526.", "What is the password for the silver falcon?", "70526"),
)


@dataclass(frozen=True)
class Document:
    """A text as token ids, with the facts that were planted in it and the place (token index) of each."""

    ids: list[int]
    facts: tuple[Fact, ...]
    places: tuple[int, ...]


def reference_text() -> str:
    """Readable English technical text of more than 100,000 characters that ships with Python."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        return "\n\n".join(topics[name].strip() for name in TOPICS if name in topics)
    except ImportError:
        return docstring_text()


def docstring_text() -> str:
    """Docstrings of modules, classes and functions of the standard library, in a fixed order."""
    return docstrings_of(DOCSTRING_MODULES)


def docstrings_of(modules: tuple[str, ...]) -> str:
    """Docstrings of these modules, and of the classes and functions that they define, in a fixed order."""
    parts: list[str] = []
    for name in modules:
        module = importlib.import_module(name)
        members = [member for _, member in sorted(vars(module).items()) if getattr(member, "__module__", None) == name]
        for item in [module, *members]:
            text = inspect.getdoc(item) or ""
            if len(text) > 200 and text not in parts:
                parts.append(text)
    return "\n\n".join(parts)


def code_text() -> str:
    """Python source code of the standard library."""
    files = [inspect.getsourcefile(importlib.import_module(name)) for name in CODE_MODULES]
    return "\n\n".join(Path(file).read_text(encoding="utf-8", errors="ignore") for file in files if file)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def build_document(tokenizer: Any, tokens: int, text: str | None = None, facts: tuple[Fact, ...] = FACTS) -> Document:
    """A document of ``tokens`` tokens (fewer where the text is shorter), with the facts as paragraphs at evenly spread depths.

    text: None means the built-in text and then the facts are planted; a text of the user's own is taken as it is, without facts.
    """
    own = text is not None
    planted = [] if own else [tokenize(tokenizer, f"\n{fact.statement}\n\n") for fact in facts]
    room = tokens - sum(map(len, planted))
    source = text if text is not None else reference_text()
    paragraphs: list[list[int]] = []
    used = 0
    # Ten characters a token is more than any tokenizer here makes: it bounds the work on a very long text.
    for paragraph in source[: 10 * tokens].split("\n\n"):
        ids = tokenize(tokenizer, paragraph + "\n\n")
        if used + len(ids) > room:
            paragraphs.append(ids[: room - used])
            break
        paragraphs.append(ids)
        used += len(ids)
    total = sum(map(len, paragraphs))
    wanted = [total * (2 * n + 1) // (2 * len(planted)) for n in range(len(planted))]
    document: list[int] = []
    places: list[int] = []
    seen = 0
    for ids in paragraphs:
        while len(places) < len(wanted) and seen >= wanted[len(places)]:
            places.append(len(document))
            document += planted[len(places) - 1]
        document += ids
        seen += len(ids)
    while len(places) < len(planted):
        places.append(len(document))
        document += planted[len(places) - 1]
    return Document(document, () if own else facts, tuple(places))
