"""What the sparse layers of one worker share: configuration, tables, work buffers, and the decode step itself.

One `SkimState` hangs on the attention implementations of one engine's worker; there is none per process, so several engines
can live in one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig

from kvskim.calibration import Calibration
from kvskim.config import LoadedConfig, load_config
from kvskim.engines.vllm import calibrate
from kvskim.engines.vllm.layout import key_value_views
from kvskim.engines.vllm.records import RecordsLayer
from kvskim.engines.vllm.report import start_block
from kvskim.engines.vllm.workspace import Workspace
from kvskim.ops import attend, dispatch, encode, score, select
from kvskim.selectors import Selector, get_selector

logger = logging.getLogger("vllm.kvskim")


@dataclass
class LayerState:
    """One sparse layer on this rank. ``counts`` int32 and ``covered`` float32 ``[rows, kv heads]`` are those of its last decode step."""

    name: str
    index: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    softcap: float
    module: Any
    """vLLM's attention layer, for its cache."""
    records: RecordsLayer
    tables: Any = None
    counts: Tensor | None = None
    covered: Tensor | None = None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def caches(self) -> tuple[Tensor, Tensor]:
        return key_value_views(self.module.kv_cache, self.head_size)


class SkimState:
    """Shared by all layers of a worker."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        additional = vllm_config.additional_config
        arguments = additional.get("kvskim") if isinstance(additional, Mapping) else None
        loaded: LoadedConfig = load_config(arguments)
        for line in loaded.warnings:
            logger.warning("kvskim: %s", line)
        self.vllm_config = vllm_config
        self.config = loaded.config
        self.rule = self.config.rule_parameters()
        self.selector: Selector = get_selector(self.config.selector, **self.config.selector_options)
        self.layers: dict[str, LayerState] = {}
        self.dense: dict[str, str] = {}
        """Layers that keep full attention, and why."""
        self.calibrator: calibrate.Calibrator | None = None
        self.calibration_source = ""
        self.ready: Tensor | None = None
        self.last_lengths: Tensor | None = None
        """Lengths of the rows of the last decode step, int32 on the device."""
        self.workspace: Workspace | None = None
        self.kernels = ""
        self._calibration: Calibration | None = None
        self._reported = False

    @staticmethod
    def find(layers: Mapping[str, Any]) -> SkimState | None:
        """The state of the engine that these layers (vLLM's static forward context) belong to, if it has one yet."""
        return next((s for s in (_state_of(layer) for layer in layers.values()) if s is not None), None)

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> SkimState:
        """The state of this engine's worker; made when its first layer asks for it."""
        return cls.find(vllm_config.compilation_config.static_forward_context) or cls(vllm_config)

    def log(self, text: str) -> None:
        logger.info("kvskim: %s", text)

    def add_layer(self, layer: LayerState) -> None:
        self.layers[layer.name] = layer

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate all that decode needs, once. Called in vLLM's profiling run, so that vLLM counts it before it sizes its cache."""
        if self.workspace is not None or not self.layers:
            return
        self.kernels = dispatch.resolve(self.config.kernels, device, selector=self.config.selector)
        config, vllm_config = self.config, self.vllm_config
        layers = list(self.layers.values())
        self.workspace = Workspace(
            layers, self.rule, device=device, max_rows=vllm_config.scheduler_config.max_num_seqs, max_tokens=vllm_config.model_config.max_model_len,
            sink_pages=config.sink_pages, window_pages=config.window_pages, kernels=self.kernels,
        )
        self.ready = torch.zeros(1, dtype=torch.int32, device=device)
        for layer in layers:
            layer.tables = calibrate.empty_tables(self.selector, layer.num_kv_heads, layer.head_size, device)
            shape = (self.workspace.max_rows, layer.num_kv_heads)
            layer.counts = torch.zeros(shape, dtype=torch.int32, device=device)
            layer.covered = torch.zeros(shape, dtype=torch.float32, device=device)
        self._calibrate(layers, device, dtype)
        self.report()

    def _calibrate(self, layers: list[LayerState], device: torch.device, dtype: torch.dtype) -> None:
        calibration, self.calibration_source = calibrate.find_calibration(self.config, self.selector, self.vllm_config)
        if calibration is not None:
            total_heads, first, count = calibrate.heads_of_this_rank(self.vllm_config)
            for layer in layers:
                tables = calibrate.rank_tables(self.selector, calibration, layer.index, total_heads, layer.head_size, first, count)
                calibrate.copy_tables(layer.tables, tables)
            self.mark_ready()
        elif self.selector.needs_calibration:
            rotary = calibrate.vllm_rotary(layers[0].head_size)
            positions = calibrate.later_positions(self.vllm_config.model_config.max_model_len)
            self.calibrator = calibrate.Calibrator(self.selector, layers, rotary, positions)
            self.calibrator.allocate(device, dtype)
        else:
            self.mark_ready()

    def mark_ready(self) -> None:
        """From the next decode step on the rule decides; until now every page was attended."""
        assert self.ready is not None
        self.ready.fill_(1)
        self.calibrator = None

    def report(self) -> None:
        """Log the start block, once."""
        if not self._reported:
            self._reported = True
            for line in start_block(self):
                logger.info("%s", line)

    def encode(self, layer: LayerState, slot_mapping: Tensor) -> None:
        """Make the records of the pages that these slots (int64, -1: none) complete, from the keys in the cache."""
        records = layer.records.records
        assert records is not None, "vLLM has not bound the records"
        encode.encode(layer.tables, layer.caches()[0], slot_mapping, records, kernels=self.kernels)

    def decode(
        self, layer: LayerState, query: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor
    ) -> None:
        """One decode step of a layer for rows of one query token, in parts of as many rows as the workspace has.

        Args:
            query: ``[R, Hq, D]``.
            kv_cache: the layer's cache as vLLM gives it.
            block_table: int32 ``[R, blocks]``.
            seq_lens: int32 ``[R]``, 0 for a row that only fills a graph.
            out: ``[R, Hq, D]``, written.
        """
        w = self.workspace
        records = layer.records.records
        assert w is not None and records is not None and layer.counts is not None and layer.covered is not None
        key_cache, value_cache = key_value_views(kv_cache, layer.head_size)
        sink, window = self.config.sink_pages, self.config.window_pages
        for first in range(0, query.shape[0], w.rows):
            rows = slice(first, min(first + w.rows, query.shape[0]))
            b = w.buffers(layer, rows.stop - rows.start)
            q, table, lengths = query[rows], block_table[rows], seq_lens[rows]
            counts, covered = layer.counts[rows], layer.covered[rows]
            score.score(
                layer.tables, q, key_cache, records, table, lengths, scale=layer.scale, softcap=layer.softcap, sink_pages=sink, window_pages=window,
                scores=b.scores, base=b.base, forced=b.forced, partials=b.partials, scratch=w.scratch, kernels=self.kernels,
            )
            select.select(
                b.scores, b.base, b.forced, b.partials, lengths, group=layer.group, rule=self.rule, sink_pages=sink, window_pages=window,
                ready=self.ready, pages=b.pages, counts=counts, covered=covered, kernels=self.kernels,
            )
            attend.attend(
                q, key_cache, value_cache, table, lengths, b.pages, counts, scale=layer.scale, softcap=layer.softcap, out=out[rows],
                scratch=w.scratch, kernels=self.kernels,
            )


def _state_of(layer: Any) -> SkimState | None:
    state = getattr(getattr(layer, "impl", None), "skim_state", None)
    return state if isinstance(state, SkimState) else None


def states(layers: Iterable[Any]) -> list[SkimState]:
    """The distinct states among attention layers."""
    found: list[SkimState] = []
    for layer in layers:
        state = _state_of(layer)
        if state is not None and all(state is not s for s in found):
            found.append(state)
    return found
