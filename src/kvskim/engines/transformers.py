"""kvskim in Hugging Face transformers: an attention implementation that decodes sparsely, on a CPU or a GPU.

    from kvskim.engines.transformers import enable
    host = enable(model)                       # or from_pretrained(..., attn_implementation="kvskim") after importing this module
    model.generate(...)
    print(host.statistics().attended_share, host.report())

Prefill, training and layers that can't be sparse run transformers' own sdpa. A decode step (one query token per row) of the other layers
skims the records of all pages and attends the few that matter. Keys and values stay in the model's own dynamic cache; records lie beside
them in the same cache object (`SkimLayer`). All state hangs on the attention modules and on the cache.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvskim.calibration import Calibration, CalibrationError, model_fingerprint
from kvskim.config import SkimConfig, is_disabled, load_config
from kvskim.engines.transformers_cache import PageRecords
from kvskim.engines.transformers_calibration import find_calibration, layer_calibration, model_name, shape_of_keys
from kvskim.engines.transformers_dense import dense_attention
from kvskim.engines.transformers_layer import LayerStatistics, Observer, SkimAttention, StepTrace, rotary_of
from kvskim.errors import UnsupportedError
from kvskim.layout import PAGE_TOKENS
from kvskim.metrics import metrics
from kvskim.selectors import get_selector

__all__ = [
    "Host",
    "LayerReport",
    "LayerStatistics",
    "StepTrace",
    "UnsupportedError",
    "cache_keyword",
    "disable",
    "enable",
    "register_transformers",
    "report",
]

IMPLEMENTATION = "kvskim"
_STATE = "_kvskim"
_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value")

logger = logging.getLogger("kvskim.transformers")


@dataclass(frozen=True)
class LayerReport:
    """name: of the attention module. sparse: whether its decode steps are sparse. reason: why not, in words."""

    name: str
    layer: int
    sparse: bool
    reason: str


@dataclass
class Host:
    """A model with kvskim switched on; what `enable` returns."""

    model: nn.Module
    config: SkimConfig
    previous_implementation: str | None = None

    def layers(self) -> list[SkimAttention]:
        return _states(self.model)

    def report(self) -> list[LayerReport]:
        return report(self.model)

    def statistics(self) -> LayerStatistics:
        """Sums over all layers that can be sparse."""
        return sum((state.statistics for state in self.layers() if state.dense_reason is None), LayerStatistics())

    def reset_statistics(self) -> None:
        for state in self.layers():
            state.statistics = LayerStatistics()

    def observe(self, observer: Observer | None, *, exact: bool = False) -> None:
        """Call ``observer`` after every decode step of every layer that can be sparse; ``exact`` adds exact coverage (reads all keys)."""
        for state in self.layers():
            state.observer, state.exact = observer, exact

    def calibration(self) -> Calibration | None:
        """The calibration in use, as it can be saved; None until every layer that can be sparse has one."""
        states = [state for state in self.layers() if state.dense_reason is None]
        layers = {state.index: state.calibration for state in states if state.calibration is not None}
        if not layers or len(layers) < len(states):
            return None
        return Calibration(_model_name(self.model), model_fingerprint(_text_config(self.model).to_dict()), layers)

    def fit_calibration(self, caches: list[Any], *, progress: Callable[[str], None] | None = None, **options: Any) -> Calibration:
        """Fit the calibration of every layer that can be sparse on prompts that were just prefilled, instead of at the first decode step.

        Args:
            caches: caches of prompts without padding, prefilled since `enable` with samples being taken (`SkimAttention.capture`, or a
                selector that needs a calibration and has none).
            progress: called with the name of each layer before it is fitted.
            options: of `kvskim.calibration.fit_layer`.

        Raises:
            CalibrationError: the prompts are too short, or no samples of them were taken, because the layers have a calibration already, need none, or
                the prompts were prefilled before `enable`.
        """
        for state in self.layers():
            if state.dense_reason is not None:
                continue
            if progress is not None:
                progress(state.name)
            layers = [cache.layers[state.index] for cache in caches]
            if not state.fit(layers, [[0] * layer.keys.shape[0] for layer in layers], least_tokens=2 * PAGE_TOKENS, **options):
                raise CalibrationError(_why_not_fitted(state, any(layer.queries for layer in layers)))
            state.settings = None
        calibration = self.calibration()
        assert calibration is not None
        return calibration

    def disable(self) -> None:
        disable(self.model)
        if self.previous_implementation is not None:
            self.model.set_attn_implementation(self.previous_implementation)  # type: ignore[operator]


def register_transformers() -> None:
    """Make ``attn_implementation="kvskim"`` known to transformers. Importing this module does it; doing it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def enable(
    model: nn.Module,
    config: SkimConfig | None = None,
    *,
    calibration: Calibration | None = None,
    observer: Observer | None = None,
) -> Host:
    """Switch kvskim on for a transformers model, replacing settings of an earlier call.

    Args:
        model: a causal language model.
        config: settings; None reads ``KVSKIM_CONFIG`` and defaults.
        calibration: one in memory; None takes the file that the settings name, or with ``auto`` the one that is kept for this model; where there is
            none, it is fitted on the first long prompt.
        observer: called after every decode step of every layer, see `Host.observe`.

    Raises:
        UnsupportedError: no layer of the model can be sparse, or a setting has no meaning here (unless ``on_unsupported`` is ``dense``).
        CalibrationError: the calibration can't be read or is another model's.
    """
    config = load_config().config if config is None else config
    text_config = _text_config(model)
    if calibration is not None:
        calibration.check(_model_name(model), model_fingerprint(text_config.to_dict()), *shape_of_keys(text_config))
    previous = getattr(text_config, "_attn_implementation", None)
    disable(model)
    modules = [(name, module) for name, module in model.named_modules() if _is_decoder_attention(module)]
    for name, module in modules:
        state = _attach(module, name, config)
        state.observer = observer
    if isinstance(config.dense_layers, tuple) and set(config.dense_layers) - {state.index for state in _states(model)}:
        known = [state.index for state in _states(model)]
        disable(model)
        absent = sorted(set(config.dense_layers) - set(known))
        raise UnsupportedError(
            f"dense_layers names {', '.join(map(str, absent))}, but the attention layers of {_model_name(model)} are "
            f"{f'{min(known)} to {max(known)}' if known else 'unknown'}: name only those"
        )
    sparse = [state for state in _states(model) if state.dense_reason is None]
    try:
        if calibration is None and sparse:
            calibration = find_calibration(_model_name(model), text_config, sparse)
        for state in sparse:
            state.calibration = None if calibration is None else calibration.layer(state.index)
            if state.calibration is not None:
                # A calibration for records of another size is refused here, not at the first token.
                heads, dim = state.calibration.mean.shape
                state.selector.tables(heads, dim, state.calibration)
    except CalibrationError:
        disable(model)
        raise
    dense = [entry for entry in report(model) if not entry.sparse]
    if len(dense) == len(modules) and config.on_unsupported == "refuse":
        disable(model)
        why = dense[0].reason if dense else "no attention module with a layer index was found"
        raise UnsupportedError(f"no layer of {_model_name(model)} can be sparse ({why}): use its own attention, or set on_unsupported to 'dense'")
    if len(dense) == len(modules):
        for entry in dense:
            metrics().unsupported(entry.reason)
    if dense:
        logger.warning("%d of %d layers keep full attention: %s", len(dense), len(modules), "; ".join(f"{d.name} ({d.reason})" for d in dense))
    model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
    return Host(model, config, previous if previous != IMPLEMENTATION else None)


def disable(model: nn.Module) -> None:
    """Remove kvskim's state from a model. Its attention implementation stays what it is."""
    for module in model.modules():
        if hasattr(module, _STATE):
            module._kvskim_hook.remove()  # type: ignore[union-attr, operator]
            del module._kvskim_hook, module._kvskim


def report(model: nn.Module) -> list[LayerReport]:
    """Which attention layers decode sparsely, and why the others don't. Complete after `enable`, else after the first forward call."""
    return [LayerReport(s.name, s.index, s.dense_reason is None, s.dense_reason or "") for s in _states(model)]


def cache_keyword(model: nn.Module) -> str:
    """The name that the model's forward call gives its cache argument; it differs between versions of transformers."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in names), _CACHE_ARGUMENTS[0])


def _why_not_fitted(state: SkimAttention, sampled: bool) -> str:
    """Why a layer could not be fitted, and what helps. ``sampled``: whether samples of the prompts were taken."""
    if sampled:
        return "the text is too short to calibrate on: give at least a few hundred tokens"
    capture = "set `capture` of each of `Host.layers()` to True before the prompts are prefilled"
    if state.calibration is not None:
        return (
            f"the layer {state.name} has a calibration already (one that was kept for this model, given to `enable`, or fitted at a decode step), so no "
            f"samples of these prompts were taken: use the one that `Host.calibration` returns, or {capture}"
        )
    if not state.selector.needs_calibration:
        return f"the selector {state.config.selector!r} needs no calibration, so no samples of these prompts were taken: leave this out, or {capture}"
    return f"the layer {state.name} has no samples of these prompts: prefill them after `enable`"


def _states(model: nn.Module) -> list[SkimAttention]:
    return [getattr(module, _STATE) for module in model.modules() if hasattr(module, _STATE)]


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _model_name(model: nn.Module) -> str:
    return model_name(model.config) or type(model).__name__


def _is_decoder_attention(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("layer_idx", "num_key_value_groups")) and getattr(module, "is_causal", True)


def _attach(module: nn.Module, name: str, config: SkimConfig) -> SkimAttention:
    if config.variant != "fast":
        raise UnsupportedError(f"variant={config.variant!r} keeps keys or values in host memory, which only the vLLM engine can do: use variant 'fast'")
    if config.kernels in ("cuda", "triton") and next(module.parameters()).device.type == "cpu":
        raise UnsupportedError(f"kernels={config.kernels!r} needs a GPU, but the model is on the CPU: use kernels 'auto' or 'torch', or move the model first")
    index = int(module.layer_idx)  # type: ignore[arg-type]
    model_config: Any = getattr(module, "config", None)
    state = SkimAttention(name, index, config, get_selector(config.selector, **config.selector_options))
    types = getattr(model_config, "layer_types", None)
    layer_type = types[index] if types and index < len(types) else None
    state.dense_reason = _dense_reason(module, model_config, layer_type, config)
    if isinstance(getattr(module, "head_dim", None), int):
        try:
            state.selector.record_bytes(module.head_dim)  # type: ignore[arg-type]
        except ValueError as error:
            if state.dense_reason is None and config.on_unsupported == "refuse":
                raise UnsupportedError(f"the selector does not fit this model: {error}") from error
            state.dense_reason = state.dense_reason or str(error)
    if model_config is not None:
        state.rotary = rotary_of(model_config, layer_type)
        state.max_position = int(getattr(model_config, "max_position_embeddings", 0) or 0)
    module._kvskim = state  # type: ignore[assignment]
    module._kvskim_hook = module.register_forward_pre_hook(_before_forward, with_kwargs=True)  # type: ignore[assignment]
    return state


def _dense_reason(module: nn.Module, model_config: Any, layer_type: str | None, config: SkimConfig) -> str | None:
    """Why a layer keeps full attention, in words, or None."""
    window = getattr(module, "sliding_window", None)
    chunk = None
    if layer_type is None:
        # A model without a list of layer types has the window, or the chunks, in every layer.
        window = window or getattr(model_config, "sliding_window", None)
        chunk = getattr(model_config, "attention_chunk_size", None)
    if is_disabled():
        return "KVSKIM_DISABLE switches kvskim off"
    if config.is_dense(int(module.layer_idx)):  # type: ignore[arg-type]
        return "named by dense_layers"
    if window:
        return f"sliding window of {window} tokens"
    if chunk:
        return f"attends within chunks of {chunk} tokens"
    if layer_type not in (None, "full_attention"):
        return f"its type is {layer_type}"
    if getattr(module, "is_kv_shared_layer", False):
        return "uses the keys of another layer"
    if getattr(module, "sinks", None) is not None:
        return "learned attention sinks"
    if getattr(module, "indexer", None) is not None:
        return "chooses its tokens with a trained indexer of its own"
    return None


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The attention function is not told the cache object; the module's forward call is."""
    cache = next((kwargs[name] for name in _CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
    if cache is None:
        cache = next((value for value in args if hasattr(value, "get_seq_length")), None)
    module._kvskim.adopt(cache)  # type: ignore[union-attr, operator]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: ``query [B, Hq, T, D]``, ``key, value [B, H, S, D]`` -> ``[B, T, Hq, D]``."""
    for name, meaning in (("s_aux", "learned attention sinks"), ("position_bias", "a position bias")):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{type(module).__name__} uses {meaning}, which kvskim does not support: load it with attn_implementation='eager'")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    dense = {"scaling": scale, "dropout": dropout, **kwargs}
    if not _is_decoder_attention(module) or module.training:
        return dense_attention(module, query, key, value, attention_mask, softcap, **dense)
    if not hasattr(module, _STATE):
        # attn_implementation="kvskim" without enable(): this layer is seen for the first time, and its cache from the next call on.
        state = _attach(module, f"layers.{module.layer_idx}", load_config().config)
        if state.dense_reason is not None:
            logger.warning("layer %d keeps full attention: %s", state.index, state.dense_reason)
        else:
            state.calibration = layer_calibration(module, state)
            state.remember(query, key, row_starts(attention_mask, key), scale)
    state: SkimAttention = module._kvskim  # type: ignore[assignment, no-redef]
    layer, state.current = state.current, None
    if state.dense_reason is None and kwargs.get("sliding_window"):
        state.dense_reason = f"sliding window of {kwargs['sliding_window']} tokens"
        logger.warning("layer %d keeps full attention: %s", state.index, state.dense_reason)
    if state.cache_problem is not None:
        problem = f"{state.cache_problem} has no records: use transformers' DynamicCache (cache_implementation='dynamic')"
        if state.config.on_unsupported == "refuse":
            raise UnsupportedError(f"{problem}, or set on_unsupported to 'dense'")
        state.dense_reason = problem
        metrics().unsupported(problem)
        logger.warning("layer %d keeps full attention: %s", state.index, problem)
    if layer is None or state.dense_reason is not None:
        return dense_attention(module, query, key, value, attention_mask, softcap, **dense)

    starts = row_starts(attention_mask, key)
    decoding = query.shape[2] == 1
    if starts is None and decoding and state.config.on_unsupported == "refuse":
        raise UnsupportedError(
            "the attention mask hides tokens behind the first visible one, which kvskim does not support in decoding: "
            "pad on the left (tokenizer.padding_side='left'), or set on_unsupported to 'dense'"
        )
    if starts is None:
        return dense_attention(module, query, key, value, attention_mask, softcap, **dense)
    cached = state.cached(module, layer, key, value)
    if cached is None:
        state.dense_reason = "its latent cache is not what its keys are made of"
        logger.warning("layer %d keeps full attention: %s", state.index, state.dense_reason)
        return dense_attention(module, query, key, value, attention_mask, softcap, **dense)
    state.prepare(query, *cached, scale, softcap)
    if not state.calibrated or state.capture:
        layer.queries += state.sample(query, key, starts, scale)
        if decoding and not state.capture and state.fit([layer], [starts]):
            state.prepare(query, *cached, scale, softcap)
    if state.calibrated:
        assert state.settings is not None
        if layer.records is None or layer.records.tables is not state.settings.tables or layer.records.starts != starts:
            layer.records = PageRecords(state.selector, state.settings.tables, starts, state.settings.kernels)
        layer.records.update(cached[0])
        if decoding:
            return state.decode(query, *cached, layer.records), None
    elif decoding:
        state.count_dense(starts, query, *cached)
    return dense_attention(module, query, key, value, attention_mask, softcap, **dense)


def row_starts(mask: Tensor | None, key: Tensor) -> list[int] | None:
    """Index of each row's first real token, from the mask of the last query token; None if a later token is hidden too.

    mask: None (no padding), bool (True: visible) or additive float, ``[B, 1 or Hq, T, S]``.
    """
    rows, tokens = key.shape[0], key.shape[2]
    if mask is None:
        return [0] * rows
    if mask.dim() != 4 or mask.shape[-1] != tokens:
        return None
    last = mask[:, :, -1]
    if last.dtype != torch.bool:
        visible = last > torch.finfo(last.dtype).min / 2
        if not bool((last[visible] == 0).all()):
            return None
        last = visible
    counts = last.sum(-1)
    first = last.to(torch.uint8).argmax(-1)
    if not bool((first + counts == tokens).all()) or not bool((first == first[:, :1]).all()):
        return None
    return first[:, 0].expand(rows).tolist()


register_transformers()
