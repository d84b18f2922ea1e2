"""What kvskim keeps for one attention module of a transformers model: settings, calibration, counters, and why it is dense if it is."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from kvskim.calibration import LayerCalibration, fit_layer
from kvskim.config import SkimConfig
from kvskim.engines.decode import DecodeSettings, RowResult, decode_attention
from kvskim.engines.transformers_cache import PageRecords, SkimLayer
from kvskim.engines.transformers_mla import LatentHeads, is_latent, latent_heads, latent_rotary, latent_shape
from kvskim.errors import UnsupportedError
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.dispatch import resolve
from kvskim.rotary import Rotary
from kvskim.selectors import Selector

logger = logging.getLogger("kvskim")

QUERY_SAMPLE_STRIDE = 8
"""Queries of every eighth token are kept for a calibration; keys need no sampling, the cache has them all."""
LEAST_CALIBRATION_TOKENS = 1024
"""A request with fewer tokens is no basis for a calibration: it is decoded densely and the next one is tried."""
_HALF_SPLIT_ROTARY = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3", "smollm3", "olmo2", "granite")


@dataclass(frozen=True)
class StepTrace:
    """One decode step of one layer, for observers (`kvskim.engines.transformers.enable`).

    rows: one result per request, see `RowResult`. tokens: length of each request. bytes_read, dense_bytes: bytes of records, keys and
    values that this step had to read, and what full attention reads.
    """

    layer: int
    rows: list[RowResult]
    tokens: list[int]
    bytes_read: int
    dense_bytes: int


@dataclass
class LayerStatistics:
    """Sums over decode steps of one layer; a row is one request in one step.

    rows, sparse_rows: how many there were, and how many of them the rule was applied to. pages_attended, pages_total: summed over kv heads.
    covered_mass: estimated mass of the attended pages, summed over rows and kv heads (`heads` terms). bytes_read, dense_bytes: see `StepTrace`.
    """

    rows: int = 0
    sparse_rows: int = 0
    heads: int = 0
    pages_attended: int = 0
    pages_total: int = 0
    covered_mass: float = 0.0
    bytes_read: int = 0
    dense_bytes: int = 0

    def __add__(self, other: LayerStatistics) -> LayerStatistics:
        return LayerStatistics(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def attended_share(self) -> float:
        """Pages attended divided by pages there were; 1 before the first step."""
        return self.pages_attended / self.pages_total if self.pages_total else 1.0

    @property
    def mean_covered_mass(self) -> float:
        """Mean estimated attention mass of the attended pages; 1 before the first step."""
        return self.covered_mass / self.heads if self.heads else 1.0


Observer = Callable[[StepTrace], None]


@dataclass
class SkimAttention:
    """State of one attention module (attribute ``_kvskim`` of the module).

    dense_reason: why this layer keeps full attention, or None. current: cache layer of the forward call in progress.
    """

    name: str
    index: int
    config: SkimConfig
    selector: Selector
    dense_reason: str | None = None
    calibration: LayerCalibration | None = None
    rotary: Rotary | None = None
    max_position: int = 0
    observer: Observer | None = None
    exact: bool = False
    capture: bool = False
    current: SkimLayer | None = None
    statistics: LayerStatistics = field(default_factory=LayerStatistics)
    settings: DecodeSettings | None = None
    cache_problem: str | None = None
    unclaimed: tuple[weakref.ref[Tensor], list[tuple[Tensor, Tensor]]] | None = None
    latent: LatentHeads | None = None
    """Set where the cache holds latent rows instead of the keys and values of the heads."""

    @property
    def calibrated(self) -> bool:
        return self.settings is not None

    def adopt(self, cache: Any) -> None:
        """Find this layer's part of a cache object and give it records; called before every forward call of the module."""
        self.current, self.cache_problem = None, None
        if cache is None or self.dense_reason is not None:
            return
        layers = getattr(cache, "layers", None)
        if layers is None:
            self.cache_problem = f"a cache of type {type(cache).__name__}"
            return
        if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
            while len(layers) <= self.index:
                layers.append(DynamicLayer())
        if self.index >= len(layers):
            return
        layer = layers[self.index]
        if type(layer) is DynamicLayer:
            layer = layers[self.index] = SkimLayer.adopt(layer)
            if self.unclaimed is not None and layer.keys is not None and self.unclaimed[0]() is layer.keys:
                layer.queries = self.unclaimed[1]
            self.unclaimed = None
        if isinstance(layer, SkimLayer):
            self.current = layer
        else:
            self.cache_problem = f"a cache layer of type {type(layer).__name__}"

    def cached(self, module: nn.Module, layer: SkimLayer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """What this layer scores and attends: ``key`` and ``value``, or the latent rows that they were expanded from; None where that is not clear."""
        if not is_latent(module, layer):
            if self.rotary is not None and self.rotary.first:
                self.rotary = None  # it is for latent rows, and this version of transformers keeps the keys of the heads
            return key, value
        if self.latent is None:
            self.latent = latent_heads(module, layer, key, value)
            if self.latent is None:
                return None
        rows = self.latent.rows(layer)
        return rows, self.latent.values(rows)

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> None:
        """Make the decode settings as soon as the selector has what it needs. ``query [B, Hq, T, D]``, ``key``, ``value [B, H, T, D]``."""
        if self.settings is not None or (self.calibration is None and self.selector.needs_calibration):
            return
        heads, dim = key.shape[1], key.shape[-1]
        self.selector.record_bytes(dim)
        tables = self.selector.tables(heads, dim, self.calibration).to(key.device)
        self.settings = DecodeSettings(
            self.selector, tables, self.config.rule_parameters(), self.config.sink_pages, self.config.window_pages, scale, softcap,
            kernels=self.choose_kernels(query, key, value),
        )

    def choose_kernels(self, query: Tensor, key: Tensor, value: Tensor) -> str:
        """cuda, triton or torch for this layer; said once in the log. Kernels that are asked for and can't serve are refused."""
        from kvskim.engines.decode_kernels import kernel_refusal

        refusal = kernel_refusal(self.selector, query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
        asked = self.config.kernels
        if refusal is not None and asked in ("cuda", "triton"):
            raise UnsupportedError(f"kernels={asked!r} can't serve the layer {self.name}: {refusal}; use kernels 'auto' or 'torch'")
        try:
            kernels = "torch" if refusal is not None else resolve(asked, key.device)
        except ValueError as error:
            raise UnsupportedError(str(error)) from error
        if kernels == "torch" and key.device.type == "cuda" and asked == "auto":
            logger.warning("kvskim: layer %s decodes in plain torch on the GPU: %s", self.name, refusal)
        return kernels

    def sample(self, query: Tensor, key: Tensor, starts: list[int], scale: float) -> list[tuple[Tensor, Tensor]]:
        """Positions, and scaled queries, of every eighth real token of ``query [B, Hq, T, D]``, the last T tokens of ``key``, for a calibration."""
        first = key.shape[2] - query.shape[2]
        kept = []
        for row, start in enumerate(starts):
            begin = max(start - first, 0)
            begin += -(begin + first - start) % QUERY_SAMPLE_STRIDE
            if begin < query.shape[2]:
                sample = query[row, :, begin::QUERY_SAMPLE_STRIDE].float() * scale
                positions = torch.arange(first + begin - start, first + query.shape[2] - start, QUERY_SAMPLE_STRIDE, device=query.device)
                kept.append((positions, sample if self.latent is None else self.latent.absorb(sample)))
        return kept

    def remember(self, query: Tensor, key: Tensor, starts: list[int] | None, scale: float) -> None:
        """Query samples of a call whose cache is not known yet; the cache layer that holds this very key tensor will claim them."""
        if starts is not None and self.selector.needs_calibration and self.calibration is None:
            self.unclaimed = (weakref.ref(key), self.sample(query, key, starts, scale))

    def fit(self, layers: list[SkimLayer], starts: list[list[int]], least_tokens: int = LEAST_CALIBRATION_TOKENS, **options: Any) -> bool:
        """Fit the calibration on the keys and query samples of some caches, if they hold enough; records made before are void.

        layers: this layer's part of each cache. starts: for each of them, the first real token of every row. options: see `fit_layer`.
        """
        keys, positions = [], []
        for layer, rows in zip(layers, starts):
            for row, start in enumerate(rows):
                assert layer.keys is not None
                tokens = (layer.get_seq_length() - start) // PAGE_TOKENS * PAGE_TOKENS
                cached = layer.keys if self.latent is None else self.latent.rows(layer)
                # The first page, the attention sink, is always attended, and its keys are unlike all others.
                keys.append(cached[row, :, start + PAGE_TOKENS : start + tokens])
                positions.append(torch.arange(PAGE_TOKENS, max(PAGE_TOKENS, tokens), device=cached.device))
        queries = [sample for layer in layers for sample in layer.queries]
        if sum(key.shape[1] for key in keys) < least_tokens or not queries:
            return False
        query_positions, samples = (torch.cat(parts, dim) for parts, dim in zip(zip(*queries), (0, 1)))
        self.fit_on(torch.cat(keys, 1), torch.cat(positions), samples, query_positions, **options)
        for layer in layers:
            layer.queries = []
        return True

    def fit_on(self, keys: Tensor, key_positions: Tensor, queries: Tensor, query_positions: Tensor, **options: Any) -> None:
        """Fit the calibration on ``keys [H, T, D]`` and scaled ``queries [Hq, n, D]`` of these positions, for all positions that the model has."""
        page_frame = bool(self.config.selector_options.get("page_frame", False))
        served = 0
        if self.rotary is not None and self.max_position and not page_frame:
            served = max(self.max_position, int(key_positions.max()) + 1)
        self.calibration = fit_layer(
            keys,
            queries,
            record_bytes=self.selector.record_bytes(keys.shape[-1]) if self.selector.needs_calibration else 256,
            rotary=self.rotary,
            served_positions=served,
            key_positions=key_positions,
            query_positions=query_positions,
            page_frame=page_frame,
            **options,
        )

    def decode(self, query: Tensor, key: Tensor, value: Tensor, records: PageRecords) -> Tensor:
        """One decode step: ``query [B, Hq, 1, D]`` over what `cached` gave; returns ``[B, 1, Hq, Dv]``."""
        assert self.settings is not None
        if self.latent is not None:
            query = self.latent.absorb(query)
        results = [
            decode_attention(self.settings, query[row, :, 0], key[row, :, start:], value[row, :, start:], records.row(row), exact=self.exact)
            for row, start in enumerate(records.starts)
        ]
        self.count(results, [key.shape[2] - start for start in records.starts], key, value)
        out = torch.stack([result.out for result in results])[:, None]
        return out if self.latent is None else self.latent.project(out)

    def count(self, results: list[RowResult], tokens: list[int], key: Tensor, value: Tensor) -> None:
        """Add a step to the statistics and show it to the observer."""
        heads = key.shape[1]
        # Latent rows are keys and values in one.
        own_values = 0 if self.latent is not None else value.shape[-1]
        token_bytes = (key.shape[-1] + own_values) * key.element_size()
        record = self.selector.record_bytes(key.shape[-1])
        forced = self.config.sink_pages + self.config.window_pages
        read = dense = 0
        for result, length in zip(results, tokens):
            total, attended = result.pages.shape[1], int(result.pages.sum())
            row_dense = heads * length * token_bytes
            row_read = row_dense
            if result.sparse:
                # The last page is always attended and may be partly filled.
                row_read = (attended * PAGE_TOKENS - heads * (total * PAGE_TOKENS - length)) * token_bytes + heads * (total - forced) * record
            read, dense = read + row_read, dense + row_dense
            self.statistics += LayerStatistics(
                1, int(result.sparse), heads, attended, heads * total, float(result.covered.sum()), row_read, row_dense
            )
        if self.observer is not None:
            self.observer(StepTrace(self.index, results, tokens, read, dense))

    def count_dense(self, starts: list[int], query: Tensor, key: Tensor, value: Tensor) -> None:
        """The same for a decode step that attended everything without a selection."""
        heads = key.shape[1]
        tokens = [key.shape[2] - start for start in starts]
        ones = torch.ones(heads)
        rows = [
            RowResult(query[row, :, 0], torch.ones(heads, ceil_div(length, PAGE_TOKENS), dtype=torch.bool), ones, ones, sparse=False)
            for row, length in enumerate(tokens)
        ]
        self.count(rows, tokens, key, value)


def rotary_of(config: Any, layer_type: str | None) -> Rotary | None:
    """Rotation speeds of a model with a static rotary embedding in half-split layout, or None where that is not certain.

    config: the text configuration of the model. layer_type: key of ``rope_parameters`` in models that have one set per layer type.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if latent_shape(config) is not None:
        return latent_rotary(config)
    parameters = getattr(config, "rope_parameters", None)
    if getattr(config, "model_type", "") not in _HALF_SPLIT_ROTARY or not isinstance(parameters, dict):
        return None
    nested = layer_type is not None and isinstance(parameters.get(layer_type), dict)
    if nested:
        parameters = parameters[layer_type]
    kind, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta")
    if theta is None or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Rotary(1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if nested or kind not in ("linear", "llama3"):
        # yarn changes length as well as angle in some models, and dynamic kinds depend on the sequence.
        return None
    return Rotary(ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].float())
