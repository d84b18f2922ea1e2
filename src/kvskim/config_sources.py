"""Text to settings: inline JSON, JSON and YAML files, and `KEY=VALUE` words. Reads files, never the environment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvskim.config_errors import ConfigError, show


class _StrictLoader(yaml.SafeLoader):
    """YAML without arbitrary objects, and without keys given twice (of which YAML would silently keep the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping; raises `yaml.YAMLError` when a key occurs twice."""
        # Before the merge key `<<` is resolved: overriding a merged key is what merging is for.
        _refuse_repeated(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        return super().construct_mapping(node, deep=deep)


def _refuse_repeated(keys: Iterable[Any]) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise yaml.YAMLError(f"key {show(key)} is given twice")
        seen.add(key)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated(key for key, _ in pairs)
    return dict(pairs)


def parse_text(text: str, *, as_json: bool, where: str) -> Any:
    """What a JSON or YAML text says; raises `ConfigError`, naming `where`, when it can't be parsed or gives a key twice."""
    try:
        if as_json:
            return json.loads(text, object_pairs_hook=_unique_pairs)
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        language = "JSON" if as_json else "YAML"
        raise ConfigError(f"{where} is not valid {language}: {' '.join(str(error).split())}") from None


def read_settings(text: str, *, name: str) -> tuple[dict[str, Any], str]:
    """Settings out of the value of a variable or an option.

    Args:
        text: a JSON object (starts with a brace), or the path of a JSON or YAML file (`~` is the home directory).
        name: what the user calls the source, for messages: `KVSKIM_CONFIG`.

    Returns:
        The settings, and a short description of where they came from.

    Raises:
        ConfigError: the file does not exist or can't be read, the text can't be parsed, or it is not a mapping with text keys.
    """
    stripped = text.strip()
    shown = f"{name}={show(stripped)}"
    if stripped[:1] in ("{", "["):
        return check_mapping(parse_text(stripped, as_json=True, where=shown), where=shown), f"{name}, inline"

    try:
        path = Path(stripped).expanduser()
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{shown}: the file {path.absolute()} does not exist; give the path of a JSON or YAML file, or an inline JSON object in braces"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{shown} is a directory; give the path of a JSON or YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{shown} is not a UTF-8 text file; give the path of a JSON or YAML file") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{shown} can't be read ({reason}); give the path of a readable JSON or YAML file") from None
    parsed = parse_text(content, as_json=path.suffix.lower() == ".json", where=shown)
    return check_mapping(parsed, where=shown), f"{name}, {path}"


def check_mapping(value: Any, *, where: str) -> dict[str, Any]:
    """`value` as a dict with text keys; raises `ConfigError`, naming `where`, when it is anything else."""
    if not isinstance(value, Mapping):
        held = "nothing" if value is None else show(value)
        raise ConfigError(f"{where} holds {held}, but a mapping of setting names to values is needed, such as tau: 0.005")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{where} has the key {show(key)}, but the name of a setting must be text")
    return dict(value)


def parse_assignments(words: Iterable[str]) -> dict[str, Any]:
    """Settings out of command-line words `KEY=VALUE`; `selector_options.rank=4` sets one option of the selector.

    Values are JSON where they parse as JSON (numbers, lists, objects, true, null), else YAML, so `rule=budget` needs no quotes.
    Raises `ConfigError` on a word without `=`, a repeated key, a value that is neither, and no value at all.
    """
    settings: dict[str, Any] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise ConfigError(f"{show(word)} is not a setting: write KEY=VALUE, such as tau=0.005")
        if not text.strip():
            raise ConfigError(f"{show(word)} gives {key} no value: write one after the equals sign, or leave {key} out")
        value = _parse_value(text, where=word)
        target, name = settings, key
        if key.startswith("selector_options."):
            target, name = settings.setdefault("selector_options", {}), key.partition(".")[2]
        if not isinstance(target, dict) or name in target:
            raise ConfigError(f"{show(word)} sets {key} a second time: give it once")
        target[name] = value
    return settings


def _parse_value(text: str, *, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError):
        return parse_text(text, as_json=False, where=where)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not a valid value: {error}") from None
