"""What an evaluation compares: methods as the command line names them, budgets and rules, and the policies they give for a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvskim.calibration import Calibration, CalibrationError, LayerCalibration, fit_layer, load_calibration, model_fingerprint
from kvskim.calibration_store import MEAN_RECORD_BYTES
from kvskim.demo.calibration_text import calibration_ids
from kvskim.errors import KvskimError
from kvskim.eval.model import EvalModel
from kvskim.eval.policy import Policy, SelectorPolicy
from kvskim.layout import PAGE_TOKENS
from kvskim.rules import RuleParameters
from kvskim.rules.parameters import DEFAULT_TAU, DEFAULT_WINDOW_PAGES
from kvskim.selectors import SELECTORS, Selector, get_selector

FULL = "full"
"""Name of full attention in lists of methods."""
CALIBRATION_TOKENS = 8192
"""As `kvskim calibrate` reads where nothing is said."""
QUERY_STRIDE = 8
"""One in so many tokens gives queries to a fit, as in the transformers host, which `kvskim calibrate` runs."""
LEAST_BUDGET = 1 + DEFAULT_WINDOW_PAGES + 1
"""Pages: sink, window and one more."""


@dataclass(frozen=True)
class Method:
    """One row of a table: full attention, a selector, or a baseline, with options. ``label`` is what the user wrote."""

    label: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_baseline(self) -> bool:
        return self.name != FULL and self.name not in SELECTORS


@dataclass(frozen=True)
class Setting:
    """One column of a table: a rule with its number. ``budget_tokens`` is None where the number of tokens is not fixed."""

    label: str
    parameters: RuleParameters
    budget_tokens: int | None = None


def _baselines() -> dict[str, Any]:
    from kvskim.eval.baselines import BASELINES

    return dict(BASELINES)


def _value(text: str) -> int | float | bool | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def parse_methods(text: str) -> list[Method]:
    """Methods of a comma list such as ``full,sketch,sketch:record_bytes=128,rki4:rank=4``; options of one method are joined by ``+``.

    Raises:
        KvskimError: an unknown name or option, or nothing to compare.
    """
    known = [FULL, *SELECTORS, *_baselines()]
    methods: list[Method] = []
    for label in (word.strip() for word in text.split(",")):
        if not label:
            continue
        name, _, tail = label.partition(":")
        if name not in known:
            raise KvskimError(f"--selectors names {name!r}; known are {', '.join(known)}")
        pairs = [part.partition("=") for part in tail.split("+") if part]
        if any(not sign for _, sign, _ in pairs) or (name == FULL and pairs):
            raise KvskimError(f"--selectors has {label!r}; options are written NAME:OPTION=VALUE+OPTION=VALUE, and {FULL} has none")
        method = Method(label, name, tuple((key, _value(value)) for key, _, value in pairs))
        try:
            if method.is_baseline:
                _baselines()[name](budget_tokens=LEAST_BUDGET * PAGE_TOKENS * 64, **dict(method.options))
            elif name != FULL:
                get_selector(name, **dict(method.options))
        except (ValueError, TypeError) as error:
            raise KvskimError(f"--selectors has {label!r}: {error}") from error
        if method not in methods:
            methods.append(method)
    if not methods:
        raise KvskimError(f"--selectors is {text!r}; it must name at least one of {', '.join(known)}")
    return methods


def parse_budgets(text: str) -> list[int]:
    """Budgets in pages, of a comma list in tokens (``64,128``) or pages (``4p,8p``), sink and window counted."""
    budgets = []
    for word in (part.strip() for part in text.split(",")):
        number = word.removesuffix("p")
        tokens = int(number) if number.isascii() and number.isdigit() else 0
        if word.endswith("p"):
            tokens *= PAGE_TOKENS
        if tokens < LEAST_BUDGET * PAGE_TOKENS or tokens % PAGE_TOKENS:
            raise KvskimError(
                f"--budgets has {word!r}; a budget is a number of tokens, a multiple of {PAGE_TOKENS} and at least {LEAST_BUDGET * PAGE_TOKENS}, such as 128, "
                f"or a number of pages, at least {LEAST_BUDGET}, such as 8p"
            )
        budgets.append(tokens // PAGE_TOKENS)
    return list(dict.fromkeys(budgets))


def parse_taus(text: str) -> list[float]:
    """Thresholds of a comma list such as ``0.007,0.005``, in its order.

    Raises:
        KvskimError: a word that is no threshold, or two that a table would show under the same name.
    """
    words: dict[str, str] = {}
    for word in (part.strip() for part in text.split(",")):
        try:
            tau = float(word)
        except ValueError:
            tau = 0.0
        if not 0 < tau <= 1:
            raise KvskimError(f"--tau has {word!r}; a threshold is a number greater than 0 and at most 1, such as {DEFAULT_TAU:g}")
        label = threshold_label(tau)
        if label in words:
            raise KvskimError(f"--tau has {words[label]!r} and {word!r}, which are both the setting {label!r}: leave one of them out")
        words[label] = word
    return [float(word) for word in words.values()]


def threshold_label(tau: float) -> str:
    """Label of the setting of a threshold."""
    return f"threshold {tau:g}"


def check_share(option: str, value: float) -> None:
    """Raises KvskimError where ``value`` is no share of the attention mass."""
    if not 0 < value <= 1:
        raise KvskimError(f"{option} is {value}; it must be greater than 0 and at most 1")


def settings_of(rules: str, budgets: Sequence[int], taus: Sequence[float], coverage: float) -> list[Setting]:
    """Columns for the rules of a comma list: every budget for ``budget``, every tau for ``threshold``, one for ``coverage``."""
    check_share("--coverage", coverage)
    settings = []
    for rule in dict.fromkeys(word.strip() for word in rules.split(",") if word.strip()):
        if rule == "budget":
            for pages in budgets:
                parameters = RuleParameters(rule="budget", budget_pages=pages, min_pages=0)
                settings.append(Setting(f"{pages * PAGE_TOKENS} tokens", parameters, pages * PAGE_TOKENS))
        elif rule == "threshold":
            settings += [Setting(threshold_label(tau), RuleParameters(rule="threshold", tau=tau)) for tau in taus]
        elif rule == "coverage":
            settings.append(Setting(f"coverage {coverage:g}", RuleParameters(rule="coverage", coverage=coverage)))
        else:
            raise KvskimError(f"--rule has {rule!r}; it must be a comma list of budget, threshold and coverage")
    if not settings:
        raise KvskimError(f"--rule is {rules!r}; it must be a comma list of budget, threshold and coverage")
    return settings


@dataclass(frozen=True)
class Sample:
    """Keys ``[H, T, D]`` and scaled queries ``[Hq, n, D]`` of a text by layer, and their positions ``[T]`` and ``[n]``."""

    keys: dict[int, Tensor]
    key_positions: Tensor
    queries: dict[int, Tensor]
    query_positions: Tensor


def fit_key(selector: Selector, head_dim: int) -> tuple[int, bool]:
    """Record size and frame of the fit that a selector uses. One that takes only the mean key of a fit shares that of the default records."""
    size = selector.record_bytes(head_dim) if selector.needs_calibration else MEAN_RECORD_BYTES
    return size, bool(getattr(selector, "page_frame", False))


class Calibrations:
    """Selector parameters of every sparse layer.

    Args:
        source: ``text``: fitted once, as `kvskim calibrate` does, on built-in text that the evaluation does not use otherwise; ``prompt``: fitted on every
            prompt; else the path of a file of ``kvskim calibrate``.
        fitted: what `fitted_on_text` of another process gave, in the place of fitting on the built-in text here.

    Raises:
        CalibrationError: the file can't be read or is another model's.
    """

    def __init__(self, model: EvalModel, source: str = "text", fitted: Mapping[tuple[int, bool], dict[int, LayerCalibration]] | None = None) -> None:
        self.model, self.source = model, source
        self._fits: dict[tuple[int, bool], dict[int, LayerCalibration]] = dict(fitted or {})
        self._tables: dict[str, dict[int, Any]] = {}
        self._file: Calibration | None = None
        self._text_ready = fitted is not None
        if source not in ("text", "prompt"):
            self._file = load_calibration(Path(source).expanduser())
            config = model.config
            self._file.check(str(getattr(config, "_name_or_path", "") or config.model_type), model_fingerprint(config.to_dict()), *self._shape)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.model.num_kv_heads, self.model.head_dim

    def new_prompt(self) -> None:
        """A prompt was prefilled: what was fitted on another is dropped where every prompt has its own."""
        if self.source == "prompt":
            self._fits, self._tables = {}, {}

    def needs_text(self, methods: Sequence[Method]) -> bool:
        return self.source == "text" and not self._text_ready and any(method.name in SELECTORS for method in methods)

    def read_text(self, methods: Sequence[Method]) -> None:
        """Fit on the built-in text all that ``methods`` need. It replaces what the model's store holds, so it comes before any prompt."""
        samples = []
        for ids in calibration_ids(self.model.tokenizer, min(CALIBRATION_TOKENS, self._positions or CALIBRATION_TOKENS)):
            self.model.reserve(len(ids))
            self.model.prefill(torch.tensor(ids), query_stride=QUERY_STRIDE)
            samples.append(self._sample(len(ids)))
        for method in methods:
            if method.name in SELECTORS:
                self._fit(get_selector(method.name, **dict(method.options)), samples)
        self._text_ready = True

    def fitted_on_text(self, methods: Sequence[Method]) -> dict[tuple[int, bool], dict[int, LayerCalibration]] | None:
        """All that `read_text` fits for ``methods``, for other processes; None with another source, or where nothing needs it."""
        if self.needs_text(methods):
            self.read_text(methods)
        return dict(self._fits) if self._text_ready else None

    def tables(self, method: Method, tokens: int) -> dict[int, Any]:
        """Parameters of the selector of ``method`` for a prompt of ``tokens`` tokens in the store."""
        if method.label not in self._tables:
            selector = get_selector(method.name, **dict(method.options))
            file, layers = self._file, self.model.sparse_layers
            fits = self._fit(selector, None, tokens) if file is None else {layer: file.layer(layer) for layer in layers}
            self._tables[method.label] = {layer: selector.tables(*self._shape, fit).to(self.model.device) for layer, fit in fits.items()}
        return self._tables[method.label]

    @property
    def _positions(self) -> int:
        return int(getattr(self.model.config, "max_position_embeddings", None) or 0)

    def _sample(self, tokens: int) -> Sample:
        """What a fit reads of the first ``tokens`` tokens in the store: all but the first page, the attention sink, which is like no other page."""
        model = self.model
        stop = tokens // PAGE_TOKENS * PAGE_TOKENS
        kept = model.calibration_positions() < tokens
        return Sample(
            {layer: model.keys[layer][:, PAGE_TOKENS:stop] for layer in model.sparse_layers}, torch.arange(PAGE_TOKENS, stop, device=model.device),
            {layer: model.calibration_queries(layer)[:, kept] for layer in model.sparse_layers}, model.calibration_positions()[kept],
        )

    def _fit(self, selector: Any, samples: Sequence[Sample] | None, tokens: int = 0) -> dict[int, LayerCalibration]:
        size, frame = fit_key(selector, self.model.head_dim)
        if (size, frame) not in self._fits:
            if self.source == "text" and samples is None:
                raise CalibrationError("the built-in text was not read before the first prompt")
            samples = samples or [self._sample(tokens)]
            rotary = self._rotary()
            served = 0 if rotary is None or frame else max(tokens, self._positions)
            key_positions, query_positions = (torch.cat([getattr(s, name) for s in samples]) for name in ("key_positions", "query_positions"))
            self._fits[size, frame] = {
                layer: fit_layer(
                    torch.cat([s.keys[layer] for s in samples], 1), torch.cat([s.queries[layer] for s in samples], 1), record_bytes=size, rotary=rotary,
                    served_positions=served, key_positions=key_positions, query_positions=query_positions, page_frame=frame,
                )
                for layer in self.model.sparse_layers
            }
        return self._fits[size, frame]

    def _rotary(self) -> Any:
        from kvskim.engines.transformers_layer import rotary_of

        kinds = getattr(self.model.config, "layer_types", None)
        return rotary_of(self.model.config, kinds[self.model.sparse_layers[0]] if kinds else None)


class PromptPolicies:
    """The policies that decode from one prefilled prompt; what is independent of the budget is made once for all budgets of a method."""

    def __init__(self, model: EvalModel, tokens: int, calibrations: Calibrations, measure: bool = False) -> None:
        self.model, self.tokens, self.calibrations, self.measure = model, tokens, calibrations, measure

    def each(self, methods: Sequence[Method], settings: Sequence[Setting]) -> Iterator[tuple[Method, Setting, Policy]]:
        """Every method but full attention under every setting that it has. A baseline has budgets only."""
        for method in methods:
            if method.name == FULL:
                continue
            earlier: Any = None
            for setting in settings:
                policy: Any
                if not method.is_baseline:
                    selector = get_selector(method.name, **dict(method.options))
                    policy = SelectorPolicy(selector, self.calibrations.tables(method, self.tokens), setting.parameters, measure=self.measure)
                    if earlier is not None:
                        policy.prefix = earlier.prefix
                elif setting.budget_tokens is None:
                    continue
                else:
                    policy = _baselines()[method.name](budget_tokens=setting.budget_tokens, **dict(method.options))
                    policy.measure = self.measure
                    if earlier is not None and hasattr(policy, "share"):
                        policy.share(earlier)
                policy.prepare(self.model, self.tokens)
                yield method, setting, policy
                earlier = policy
