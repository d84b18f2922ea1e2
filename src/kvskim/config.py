"""Where the settings of kvskim are read from: the only reader of the environment in the package.

Sources, later wins: defaults, a predecessor's variable, `KVSKIM_CONFIG`, arguments. The settings are in `kvskim.config_model`; everything
that other modules need of both is importable from here. The reference for users is docs/configuration.md, made from these two modules.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvskim.config_errors import DEFAULT_ORIGIN, ConfigError, show
from kvskim.config_legacy import PREDECESSOR_VARIABLES, assignment, translate
from kvskim.config_model import RULE_SETTINGS, SELECTOR_NAMES, SELECTOR_OPTIONS, TIER_SETTINGS, SelectorName, SelectorOption, SkimConfig
from kvskim.config_sources import check_mapping, read_settings

__all__ = [
    "ENVIRONMENT_VARIABLES",
    "RULE_SETTINGS",
    "SELECTOR_NAMES",
    "SELECTOR_OPTIONS",
    "ConfigError",
    "LoadedConfig",
    "SelectorName",
    "SelectorOption",
    "SkimConfig",
    "cache_directory",
    "configured_by",
    "is_disabled",
    "load_config",
    "nvcc_path",
]

ENVIRONMENT_VARIABLES: Mapping[str, str] = {
    "KVSKIM_CONFIG": "The configuration: the path of a JSON or YAML file, or an inline JSON object. Switches the vLLM plugin on.",
    "KVSKIM_DISABLE": "`1`, `true` or `yes` switches kvskim off; `0`, `false` or `no` leaves it on. Anything else is an error.",
    "KVSKIM_CACHE_DIR": "Directory of calibrations and built kernels. Default: `kvskim` in `XDG_CACHE_HOME`, else `~/.cache/kvskim`.",
    "KVSKIM_NVCC": "Path of the CUDA compiler. Default: `bin/nvcc` in `CUDA_HOME`, else `nvcc` on `PATH`.",
}


@dataclass(frozen=True)
class LoadedConfig:
    """The effective configuration and how it came about.

    Attributes:
        config: the configuration.
        origins: for every setting, where its value came from: "default", "arguments", or the variable with "inline" or the path.
        warnings: lines that the host should log once.
    """

    config: SkimConfig
    origins: dict[str, str]
    warnings: list[str]


def load_config(arguments: Mapping[str, Any] | None = None) -> LoadedConfig:
    """Merge all sources, later wins: defaults, a predecessor's variable, `KVSKIM_CONFIG`, arguments.

    Arguments that choose another rule, selector or variant than `KVSKIM_CONFIG` also drop the settings of it that belong to the choice they
    replace, with a warning for each. With `KVSKIM_CONFIG` set, a predecessor's variable is ignored, with a warning.

    Args:
        arguments: settings by name; None as a value means not given, so that absent command-line options can be handed on.

    Raises:
        ConfigError: a source can't be read, or the merged configuration is not valid; the message says which source a value came from.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    warnings: list[str] = []
    text = _variable("KVSKIM_CONFIG")
    predecessors = [name for name in PREDECESSOR_VARIABLES if name in os.environ]
    if text is not None:
        merged, where = read_settings(text, name="KVSKIM_CONFIG")
        origins = dict.fromkeys(merged, where)
        warnings.extend(_ignored_predecessors(predecessors))
    elif predecessors:
        merged, origins = _read_predecessor(predecessors)
        _build(merged, origins)
        warnings.append(f"{predecessors[0]} belongs to a package that kvskim succeeds; the equivalent is {assignment(merged)}")
    given = {} if arguments is None else check_mapping(arguments, where="the arguments")
    given = {name: value for name, value in given.items() if value is not None}
    for name in _superseded(merged, given):
        if merged[name] is not None:
            dropped = f"{name}={show(merged[name])} (from {origins[name]})"
            warnings.append(f"{dropped} is dropped, because the arguments replace what it belongs to")
        del merged[name], origins[name]
    merged.update(given)
    origins.update(dict.fromkeys(given, "arguments"))
    config = _build(merged, origins)
    return LoadedConfig(config, {name: origins.get(name, DEFAULT_ORIGIN) for name in SkimConfig.model_fields}, warnings)


def _build(settings: Mapping[str, Any], origins: Mapping[str, str]) -> SkimConfig:
    try:
        return SkimConfig(**settings)
    except ConfigError as error:
        raise ConfigError.of(error.problems, origins) from None


def _superseded(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> list[str]:
    """Names in `earlier` that belong to a choice which `later` replaces by another."""

    def replaced(name: str) -> bool:
        default = SkimConfig.model_fields[name].default
        return name in later and later[name] != earlier.get(name, default)

    names: set[str] = set()
    if replaced("rule"):
        names.update(name for name, rules in RULE_SETTINGS.items() if later["rule"] not in rules)
        if later["rule"] != "budget" and earlier.get("combine") != "softmax":
            names.add("combine")
    if "budget" in later:
        names.add("budget_pages")
    if "budget_pages" in later:
        names.add("budget")
    if replaced("selector"):
        names.add("selector_options")
    if later.get("variant") == "fast":
        names.update(TIER_SETTINGS)
    return [name for name in earlier if name in names and name not in later]


def _read_predecessor(names: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} are both set: keep one, or set KVSKIM_CONFIG instead")
    text = _variable(names[0])
    assert text is not None
    settings, where = read_settings(text, name=names[0])
    translated, keys = translate(settings, name=names[0])
    return translated, {setting: f"{where}, key {key}" for setting, key in keys.items()}


def _ignored_predecessors(names: list[str]) -> list[str]:
    """One line for all variables that `KVSKIM_CONFIG` overrules; what is ignored can't be an error."""
    if not names:
        return []
    parts = []
    for name in names:
        try:
            translated, origins = _read_predecessor([name])
            _build(translated, origins)
            parts.append(f"the equivalent of {name} is {assignment(translated)}")
        except ConfigError as error:
            parts.append(f"{name} could not be used anyway: {error}")
    verb = "are" if len(names) > 1 else "is"
    return [f"{' and '.join(names)} {verb} ignored, because KVSKIM_CONFIG is set ({'; '.join(parts)})"]


def _variable(name: str) -> str | None:
    text = os.environ.get(name)
    if text is not None and not text.strip():
        raise ConfigError(f"{name}={text!r} is empty: give it a value, or unset it")
    return text


def configured_by() -> str | None:
    """The environment variable that configures kvskim: `KVSKIM_CONFIG`, else a predecessor's, else None."""
    return next((name for name in ("KVSKIM_CONFIG", *PREDECESSOR_VARIABLES) if name in os.environ), None)


def publish(name: str, value: str) -> None:
    """Set an environment variable for the processes that this one starts: vLLM's workers read their configuration from it."""
    os.environ[name] = value


def see_one_gpu(index: int) -> None:
    """Let this process, before it uses a GPU, see only the ``index``-th of the GPUs that it sees now."""
    seen = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[index] if seen else str(index)


def share_with_ray() -> None:
    """Let vLLM give kvskim's variables to workers that Ray starts: they inherit the environment of Ray, not of this process.

    Not `KVSKIM_NVCC`, of which each host has its own.
    """
    name = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
    given = [word.strip() for word in os.environ.get(name, "").split(",") if word.strip()]
    ours = [variable for variable in (*ENVIRONMENT_VARIABLES, *PREDECESSOR_VARIABLES) if variable in os.environ and variable != "KVSKIM_NVCC"]
    os.environ[name] = ",".join(dict.fromkeys([*given, *ours]))


def is_disabled() -> bool:
    """Whether `KVSKIM_DISABLE` switches kvskim off; raises `ConfigError` on a value that is neither yes nor no."""
    text = os.environ.get("KVSKIM_DISABLE")
    if text is None:
        return False
    word = text.strip().lower()
    if word in ("1", "true", "yes"):
        return True
    if word in ("0", "false", "no"):
        return False
    raise ConfigError(f"KVSKIM_DISABLE={show(text)} must be 1, true or yes (kvskim is off), or 0, false or no (kvskim is on)")


def cache_directory() -> Path:
    """Directory of calibrations and built kernels, not created here.

    `KVSKIM_CACHE_DIR`, else kvskim in `XDG_CACHE_HOME`, else ~/.cache/kvskim. Raises `ConfigError` where there is no home directory.
    """
    own = _variable("KVSKIM_CACHE_DIR")
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own is not None:
            return Path(own).expanduser()
        # The XDG specification: a relative path is invalid and must be ignored.
        return (Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache") / "kvskim"
    except RuntimeError:
        raise ConfigError("KVSKIM_CACHE_DIR must be set, because this user has no home directory to keep a cache in") from None


def nvcc_path() -> Path | None:
    """The CUDA compiler: `KVSKIM_NVCC`, else bin/nvcc in `CUDA_HOME`, else nvcc on `PATH`, else None.

    Raises:
        ConfigError: `KVSKIM_NVCC` names something that is not an executable file.
    """
    own = _variable("KVSKIM_NVCC")
    if own is not None:
        path = Path(own).expanduser()
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise ConfigError(f"KVSKIM_NVCC={show(own)} is not an executable file: give the path of nvcc, or unset it")
        return path
    home = os.environ.get("CUDA_HOME")
    if home and os.access(Path(home) / "bin" / "nvcc", os.X_OK):
        return Path(home) / "bin" / "nvcc"
    found = shutil.which("nvcc")
    return Path(found) if found else None
