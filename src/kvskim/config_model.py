"""The settings of kvskim: names, defaults, what is allowed, and what contradicts what. `kvskim.config` reads and merges their sources."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from kvskim.config_errors import ConfigError, Problem, ProblemsError, one_of
from kvskim.config_sources import check_mapping, parse_text
from kvskim.rules.parameters import DEFAULT_COVERAGE, DEFAULT_MIN_PAGES, DEFAULT_TAU, DEFAULT_WINDOW_PAGES, CombineName, RuleName, RuleParameters

VariantName = Literal["fast", "mem-v", "mem-kv"]
SelectorName = Literal["sketch", "rki4", "r8", "clse", "quad", "minmax", "mean", "oracle"]
KernelsName = Literal["auto", "cuda", "triton", "torch"]
UnsupportedName = Literal["refuse", "dense"]

SELECTOR_NAMES: tuple[SelectorName, ...] = get_args(SelectorName)


@dataclass(frozen=True)
class SelectorOption:
    """One option of a selector: its default, every value it takes, and what it means."""

    default: int | bool
    allowed: tuple[int | bool, ...]
    meaning: str

    def allowed_text(self) -> str:
        """The allowed values as text: `2, 4, 6 or 8`, `1 to 16`, `false or true`."""
        numbers = [int(value) for value in self.allowed]
        if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{numbers[0]} to {numbers[-1]}"
        return one_of([str(value).lower() for value in self.allowed])

    def accepts(self, value: object) -> bool:
        """Whether `value` is allowed; types count, so that True is not 1 and 2.0 is not 2."""
        return any(type(value) is type(allowed) and value == allowed for allowed in self.allowed)


SELECTOR_OPTIONS: Mapping[SelectorName, Mapping[str, SelectorOption]] = {
    "sketch": {
        "record_bytes": SelectorOption(256, (128, 192, 256, 384), "bytes per page and kv head"),
        "page_frame": SelectorOption(False, (False, True), "undo the rotary rotation of the page's centre before coding"),
    },
    "rki4": {"rank": SelectorOption(8, (2, 4, 6, 8), "principal directions kept per page")},
    "r8": {"rank": SelectorOption(8, tuple(range(1, 17)), "principal directions kept per page")},
    # Even, so that the 4-bit coordinates of a token fill whole bytes.
    "clse": {"rank": SelectorOption(2, tuple(range(2, 17, 2)), "principal directions kept per page")},
    "quad": {
        "rank": SelectorOption(2, (1, 2, 4), "principal directions kept per page"),
        "bits": SelectorOption(4, (4, 8), "bits per channel of a direction"),
    },
    "minmax": {"bits": SelectorOption(16, (4, 16), "bits per channel of the smallest and of the largest key")},
    "mean": {},
    "oracle": {},
}

# The rules under which a setting has an effect; given under another rule it is refused, never accepted and ignored.
RULE_SETTINGS: Mapping[str, tuple[RuleName, ...]] = {
    "tau": ("threshold",),
    "budget": ("budget",),
    "budget_pages": ("budget",),
    "coverage": ("coverage",),
    "min_pages": ("threshold", "coverage"),
    "max_pages": ("threshold", "coverage"),
}
TIER_SETTINGS = ("host_memory_gib", "hot_cache_gib")

# Pages are indexed by int32 on the device.
_LARGEST_COUNT = 2**31 - 1
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_FRACTION = "must be a number greater than 0 and at most 1"


def _setting(meaning: str, must_be: str = "", *, default: Any, **limits: Any) -> Any:
    return Field(default=default, description=meaning, json_schema_extra={"must_be": must_be}, **limits)


def _pages(meaning: str, smallest: int, *, default: int | None) -> Any:
    either = "null or a whole number" if default is None else "a whole number"
    return _setting(meaning, f"must be {either}, at least {smallest}", default=default, ge=smallest, le=_LARGEST_COUNT)


def _fraction(meaning: str, *, default: float | None) -> Any:
    must_be = _FRACTION if default is not None else _FRACTION.replace("must be", "must be null or")
    return _setting(meaning, must_be, default=default, gt=0, le=1)


def _gibibytes(meaning: str) -> Any:
    return _setting(meaning, "must be null or a number of GiB greater than 0", default=None, gt=0)


class SkimConfig(BaseModel):
    """All settings of kvskim, immutable and validated. `SkimConfig()` is the recommended configuration.

    Types are strict: "8" is not a number, True is not 1, NaN and infinities are refused. Unknown settings are refused, and so are settings
    that the chosen rule, selector or variant would ignore. A calibration file is not opened here: its reader checks it.

    Raises:
        ConfigError: one sentence that names each wrong setting, its value, and what is allowed or how to fix it.

    Example:
        >>> SkimConfig(rule="budget", budget_pages=64).rule_parameters().budget_pages
        64
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    variant: VariantName = _setting(
        "Where keys and values live: `fast` keeps both in GPU memory, `mem-v` keeps values in host memory, `mem-kv` keeps both there (vLLM 0.24).",
        default="fast",
    )
    selector: SelectorName = _setting("Record format of a page.", default="sketch")
    selector_options: dict[str, Any] = _setting(
        "Options of the selector; see the table of options.", "must be a mapping of option names to values", default={}
    )
    rule: RuleName = _setting(
        "How scores become a selection: pages with a mass of at least `tau`, a fixed number or share of pages, or the fewest pages that "
        "reach `coverage`.",
        default="threshold",
    )
    tau: float = _fraction(
        "Rule `threshold`: smallest estimated share of the attention mass of a page that is attended.", default=DEFAULT_TAU
    )
    budget: float | None = _fraction(
        "Rule `budget`: share of the request's pages that is attended, sink and window pages included. Excludes `budget_pages`.",
        default=None,
    )
    budget_pages: int | None = _setting(
        "Rule `budget`: pages attended, sink and window pages included. At least `sink_pages` + `window_pages` + 1. Excludes `budget`.",
        "must be null or a whole number, at least sink_pages + window_pages + 1",
        default=None,
        le=_LARGEST_COUNT,
    )
    coverage: float | None = _fraction(
        f"Rule `coverage`: share of the attention mass that the attended pages must reach; {DEFAULT_COVERAGE} where the rule is `coverage` "
        "and nothing is given.",
        default=None,
    )
    min_pages: int = _pages(
        "Rules `threshold` and `coverage`: fewest pages attended besides sink and window pages; a request with no more than that attends all.",
        0,
        default=DEFAULT_MIN_PAGES,
    )
    max_pages: int | None = _pages(
        "Rules `threshold` and `coverage`: most pages attended besides sink and window pages; null for no limit.", 1, default=None
    )
    sink_pages: int = _pages("Pages at the start of a request that are always attended.", 0, default=1)
    window_pages: int = _pages(
        "Pages at the end of a request that are always attended, the open page among them. With 1, decode steps in vLLM wait for the records of the "
        "pages that they complete; with more, those are made beside attention.",
        1,
        default=DEFAULT_WINDOW_PAGES,
    )
    full_pages: Annotated[int, Field(ge=0, le=_LARGEST_COUNT)] | Literal["auto"] = _setting(
        "Requests of at most so many pages attend all of them. `auto`: in vLLM an estimate of the length up to which that costs no more time than "
        "choosing, which depends on the batch size; 0 elsewhere.",
        "must be auto or a whole number, at least 0",
        default="auto",
    )
    combine: CombineName = _setting(
        "How the query heads of one kv head are combined: mean of their mass (`softmax`), sum of their mass relative to each head's peak "
        "(`peak`), or highest score (`max`). `peak` and `max` need rule `budget`.",
        default="softmax",
    )
    calibration: str = _setting(
        "`auto`, or the path of a file of `kvskim calibrate`. `auto` takes a cached one for this model, else fits on the first prompts.",
        "must be auto or the path of a calibration file",
        default="auto",
        min_length=1,
    )
    kernels: KernelsName = _setting(
        "Implementation of the four operations; `auto` takes the fastest that the machine supports.", default="auto"
    )
    dense_layers: Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...] = _setting(
        "Layers that keep full attention: a list of layer indices, or a number n for the first n layers.",
        "must be a list of layer indices (whole numbers, at least 0), or one whole number for that many first layers",
        default=(),
    )
    on_unsupported: UnsupportedName = _setting(
        "A layer or model that kvskim can't make sparse: `refuse` stops with an error, `dense` keeps full attention and says so.",
        default="refuse",
    )
    host_memory_gib: float | None = _gibibytes(
        "Variants `mem-v` and `mem-kv`: most host memory for keys and values of each worker; null: as much as the blocks of the GPU need, and "
        "no more than there is."
    )
    hot_cache_gib: float | None = _gibibytes(
        "Variants `mem-v` and `mem-kv`: GPU memory for recently used pages of the host tier; null: of the memory for the KV cache 1.2% with `mem-v`, half "
        "with `mem-kv`."
    )

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError.of(_problems_of(error, settings)) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> SkimConfig:
        """`SkimConfig(**obj)`; raises `ConfigError`, not pydantic's error, where `obj` is not a mapping of settings."""
        return obj if isinstance(obj, cls) else cls(**check_mapping(obj, where="the configuration"))

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> SkimConfig:
        """The configuration out of the JSON text that `model_dump_json` writes; raises `ConfigError`."""
        text = json_data if isinstance(json_data, str) else bytes(json_data).decode("utf-8", errors="replace")
        where = "the configuration"
        return cls(**check_mapping(parse_text(text, as_json=True, where=where), where=where))

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Defaults that depend on other settings, and the types that a caller or JSON may use for ours."""
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        if filled.get("rule") == "coverage" and filled.get("coverage") is None:
            filled["coverage"] = DEFAULT_COVERAGE
        if isinstance(filled.get("calibration"), Path):
            filled["calibration"] = str(filled["calibration"])
        if isinstance(filled.get("dense_layers"), list):
            filled["dense_layers"] = tuple(filled["dense_layers"])
        selector, options = filled.get("selector", SELECTOR_NAMES[0]), filled.get("selector_options", {})
        if selector in SELECTOR_NAMES and isinstance(options, Mapping):
            filled["selector_options"] = {**_default_options(selector), **options}
        return filled

    @model_validator(mode="after")
    def _check(self) -> SkimConfig:
        """What no single setting can tell: settings that contradict each other or would be ignored."""
        problems = [*_option_problems(self), *_rule_problems(self), *_tier_problems(self)]
        if problems:
            raise ProblemsError(problems)
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out settings that the rule does not use, so that what is written can be read again."""
        dumped: dict[str, Any] = handler(self)
        return {name: value for name, value in dumped.items() if self.rule in RULE_SETTINGS.get(name, (self.rule,))}

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def is_dense(self, layer_index: int) -> bool:
        """Whether the layer of this index (0 is the first) keeps full attention."""
        if isinstance(self.dense_layers, int):
            return layer_index < self.dense_layers
        return layer_index in self.dense_layers

    def rule_parameters(self) -> RuleParameters:
        """What the operation `select` needs of this configuration."""
        return RuleParameters(
            rule=self.rule,
            tau=self.tau,
            budget_pages=self.budget_pages,
            budget_fraction=self.budget,
            coverage=self.coverage,
            min_pages=self.min_pages,
            max_pages=self.max_pages,
            combine=self.combine,
            full_pages=0 if self.full_pages == "auto" else self.full_pages,
        )


def _default_options(selector: SelectorName) -> dict[str, int | bool]:
    return {name: option.default for name, option in SELECTOR_OPTIONS[selector].items()}


def _option_problems(config: SkimConfig) -> list[Problem]:
    options = SELECTOR_OPTIONS[config.selector]
    problems = []
    for name, value in config.selector_options.items():
        field = f"selector_options.{name}"
        if name not in options:
            takes = f"allowed is {one_of(list(options))}" if options else "it has none"
            problems.append(Problem(field, value, f"is not an option of selector {config.selector!r}: {takes}"))
        elif not options[name].accepts(value):
            allowed = options[name].allowed_text()
            problems.append(Problem(field, value, f"is not allowed with selector {config.selector!r}: it must be {allowed}"))
    if config.selector == "oracle" and config.calibration != "auto":
        problems.append(Problem("calibration", config.calibration, "has no use with selector 'oracle', which keeps no records: remove it"))
    return problems


def _rule_problems(config: SkimConfig) -> list[Problem]:
    problems = []
    for name, rules in RULE_SETTINGS.items():
        value = getattr(config, name)
        if name in config.model_fields_set and value is not None and config.rule not in rules:
            needs = one_of([repr(rule) for rule in rules])
            problems.append(Problem(name, value, f"needs rule {needs}, but rule is {config.rule!r}: set rule to {needs}, or remove {name}"))
    if config.combine != "softmax" and config.rule != "budget":
        text = f"needs rule 'budget', but rule is {config.rule!r}: set rule to 'budget', or combine to 'softmax'"
        problems.append(Problem("combine", config.combine, text))
    if config.rule in RULE_SETTINGS["max_pages"] and config.max_pages is not None and config.max_pages < config.min_pages:
        text = f"is less than min_pages={config.min_pages}: raise max_pages or lower min_pages"
        problems.append(Problem("max_pages", config.max_pages, text))
    if config.rule == "budget":
        problems.extend(_budget_problems(config))
    return problems


def _budget_problems(config: SkimConfig) -> list[Problem]:
    share, pages = config.budget, config.budget_pages
    if share is None and pages is None:
        return [Problem("rule", config.rule, "needs a budget: give budget (a share of the pages) or budget_pages (a number of pages)")]
    if share is not None and pages is not None:
        return [Problem("budget", share, f"and budget_pages={pages} exclude each other: keep one")]
    smallest = config.sink_pages + config.window_pages + 1
    if pages is not None and pages < smallest:
        forced = f"sink_pages={config.sink_pages} and window_pages={config.window_pages}"
        return [Problem("budget_pages", pages, f"must be at least {smallest}, because it includes {forced}")]
    return []


def _tier_problems(config: SkimConfig) -> list[Problem]:
    if config.variant != "fast":
        return []
    text = "needs variant 'mem-v' or 'mem-kv', but variant is 'fast': set variant, or remove {}"
    return [Problem(name, getattr(config, name), text.format(name)) for name in TIER_SETTINGS if getattr(config, name) is not None]


def _problems_of(error: ValidationError, given: Mapping[str, Any]) -> list[Problem]:
    """pydantic's errors as problems, one for each setting."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        raised = detail.get("ctx", {}).get("error")
        if isinstance(raised, ProblemsError):
            # The value as it was given, not as pydantic converted it: 2, not 2.0.
            problems.update({found.field: replace(found, value=given.get(found.field, found.value)) for found in raised.problems})
            continue
        name = str(detail["loc"][0]) if detail["loc"] else "configuration"
        value = given.get(name)
        problems.setdefault(name, Problem(name, value, _must_be(name, value)))
    return list(problems.values())


def _must_be(name: str, value: object) -> str:
    if name not in SkimConfig.model_fields:
        close = difflib.get_close_matches(name, SkimConfig.model_fields, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"is not a setting: {hint}the settings are {', '.join(SkimConfig.model_fields)}"
    text = allowed_values(name)
    if isinstance(value, str) and "number" in text and _NUMBER.fullmatch(value.strip()):
        # YAML reads 7e-3 as text, which no one expects.
        text += ", not text" + (" (YAML needs a decimal point in numbers such as 7.0e-3)" if "e" in value.lower() else "")
    return text


def allowed_values(name: str) -> str:
    """What the setting `name` takes, as the end of a sentence that starts with the name: `must be fast, mem-v or mem-kv`."""
    field = SkimConfig.model_fields[name]
    extra = field.json_schema_extra
    text = extra["must_be"] if isinstance(extra, dict) else ""
    return str(text) or f"must be {one_of(get_args(field.annotation))}"
