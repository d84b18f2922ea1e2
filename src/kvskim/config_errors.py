"""Configuration errors: one sentence that names the field, the value given, where it came from, and what is allowed."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_ORIGIN = "default"

_SHORTENER = reprlib.Repr()
_SHORTENER.maxstring = _SHORTENER.maxother = _SHORTENER.maxlong = 120
_SHORTENER.maxlist = _SHORTENER.maxtuple = _SHORTENER.maxdict = 12


def show(value: object) -> str:
    """A value as one line of text, shortened where it is very long."""
    return " ".join(_SHORTENER.repr(value).split())


def one_of(names: Sequence[object]) -> str:
    """`a, b or c`."""
    texts = [str(name) for name in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: `text` continues the sentence that starts with `field=value`."""

    field: str
    value: Any
    text: str

    def sentence(self, origins: Mapping[str, str]) -> str:
        """The whole sentence; `origins` maps a field to where its value came from."""
        origin = origins.get(self.field.split(".")[0], DEFAULT_ORIGIN)
        source = "" if origin == DEFAULT_ORIGIN else f" (from {origin})"
        return f"{self.field}={show(self.value)}{source} {self.text}"


class ProblemsError(ValueError):
    """Carries problems out of a pydantic validator; always converted into a `ConfigError` before a caller sees it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.sentence({}) for problem in problems))
        self.problems = tuple(problems)


class ConfigError(ValueError):
    """A configuration that can't be used. The message is one sentence (several problems are joined by '; ').

    Attributes:
        problems: the problems with single fields, where the error is of that kind; otherwise empty.
    """

    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, problems: Sequence[Problem], origins: Mapping[str, str] | None = None) -> ConfigError:
        """The error that reports `problems`; `origins` maps fields to where their values came from."""
        error = cls("; ".join(problem.sentence(origins or {}) for problem in problems))
        error.problems = tuple(problems)
        return error
