"""Configurations written for the two packages that kvskim succeeds: one table that maps their keys to ours."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvskim.config_errors import ConfigError, one_of, show

PREDECESSOR_VARIABLES: tuple[str, ...] = ("LOCKS_CONFIG", "AMASS_CONFIG")


@dataclass(frozen=True)
class PredecessorKey:
    """How one key of a predecessor becomes a setting of `SkimConfig`.

    Attributes:
        setting: our setting; `selector_options.rank` is an option of the selector.
        values: pairs (their value, our value); empty where the value is taken as it is.
        rule: the rule that the key implies, if any.
        scores: the values of their key `score` that the key applies to; empty for all.
    """

    setting: str
    values: tuple[tuple[str | bool, str], ...] = ()
    rule: str | None = None
    scores: tuple[str, ...] = ()


PREDECESSOR_KEYS: Mapping[str, PredecessorKey] = {
    "variant": PredecessorKey("variant"),
    "coverage": PredecessorKey("coverage", rule="coverage"),
    "budget": PredecessorKey("budget", rule="budget"),
    "budget_pages": PredecessorKey("budget_pages", rule="budget"),
    "sink_pages": PredecessorKey("sink_pages"),
    "window_pages": PredecessorKey("window_pages"),
    "score": PredecessorKey(
        "selector",
        values=(("rki4", "rki4"), ("r8", "r8"), ("quad", "quad"), ("clse", "clse"), ("quest", "minmax"), ("mean", "mean")),
    ),
    "r8_rank": PredecessorKey("selector_options.rank", scores=("r8", "rki4")),
    "quad_combine": PredecessorKey("combine", values=(("softmax", "softmax"), ("soft", "softmax"), ("nrm", "peak"), ("max", "max"))),
    "use_cuda": PredecessorKey("kernels", values=((True, "auto"), (False, "triton"))),
}


def translate(settings: Mapping[str, Any], *, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings of a predecessor in our words.

    Args:
        settings: their keys and values; a value of None counts as not given, as it did there.
        name: the variable they came from, for messages.

    Returns:
        Our settings (only those that follow from a given key), and for each of them the key of theirs that it came from.

    Raises:
        ConfigError: an unknown key, a value that has no counterpart, or keys that contradict each other.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    unknown = [key for key in settings if key not in PREDECESSOR_KEYS]
    if unknown:
        shown = ", ".join(f"{key}={show(settings[key])}" for key in unknown)
        raise ConfigError(f"{name} has {shown}, which kvskim can't translate; the keys it understands are {', '.join(PREDECESSOR_KEYS)}")

    translated: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in given.items():
        entry = PREDECESSOR_KEYS[key]
        if entry.scores and given.get("score") not in entry.scores:
            raise ConfigError(
                f"{name} has {key}={show(value)}, which applies to score {one_of(entry.scores)} only, "
                f"but score is {show(given.get('score', 'not given'))}: set score, or remove {key}"
            )
        ours = _translate_value(key, value, entry, name=name)
        if entry.setting.startswith("selector_options."):
            setting = "selector_options"
            ours = {entry.setting.partition(".")[2]: ours}
        else:
            setting = entry.setting
        translated[setting] = ours
        keys[setting] = key
        if entry.rule is not None:
            if translated.get("rule", entry.rule) != entry.rule:
                first = f"{keys['rule']}={show(given[keys['rule']])}"
                raise ConfigError(f"{name} has both {first} and {key}={show(value)}, which exclude each other: keep one")
            translated["rule"] = entry.rule
            keys["rule"] = key
    return translated, keys


def _translate_value(key: str, value: Any, entry: PredecessorKey, *, name: str) -> Any:
    if not entry.values:
        return value
    for theirs, ours in entry.values:
        # The types are compared too, because 1 == True in Python.
        if type(theirs) is type(value) and theirs == value:
            return ours
    allowed = one_of([json.dumps(theirs) if isinstance(theirs, bool) else theirs for theirs, _ in entry.values])
    raise ConfigError(f"{name} has {key}={show(value)}, but {key} must be {allowed}")


def assignment(translated: Mapping[str, Any]) -> str:
    """The shell assignment of `KVSKIM_CONFIG` that says the same as translated settings."""
    return f"KVSKIM_CONFIG={shlex.quote(json.dumps(translated))}"
