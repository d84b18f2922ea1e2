"""What the sparse layers of one worker share: configuration, tables, work buffers, and the decode step itself.

One `SkimState` hangs on the attention implementations of one engine's worker; there is none per process, so several engines
can live in one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig

from kvskim.config import load_config
from kvskim.engines.vllm import calibrate, calibration_source, parallel
from kvskim.engines.vllm.crossover import whole_rule
from kvskim.engines.vllm.encode_placement import CudaStreams, EncodeOrder
from kvskim.engines.vllm.facts import kv_connector
from kvskim.engines.vllm.layer_state import LayerState
from kvskim.engines.vllm.records import RecordsLayer
from kvskim.engines.vllm.report import rule_text, start_block
from kvskim.engines.vllm.sampler import ActivitySampler
from kvskim.engines.vllm.support import BLOCK_SIZES, calibration_refusal, workspace_rows
from kvskim.engines.vllm.tier import HostCache
from kvskim.errors import UnsupportedError
from kvskim.layout import PAGE_TOKENS, ceil_div, padded_group
from kvskim.metrics import metrics
from kvskim.ops.attend import Kernels
from kvskim.ops.dispatch import Choice, choose
from kvskim.ops.encode import EncodeLayer, encode, encode_layers, encoded_together
from kvskim.ops.fetch import copy_fetched, fetch
from kvskim.ops.latent_query import Query
from kvskim.ops.score import fills_pieces, scorer
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import StepBuffers, Workspace, table_capacity
from kvskim.ops.write_cache import write_cache
from kvskim.rules import RuleParameters
from kvskim.selectors import Selector, get_selector
from kvskim.tier.pages import HostTier

logger = logging.getLogger("vllm.kvskim")


class SkimState:
    """Shared by all layers of a worker."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        additional = vllm_config.additional_config
        loaded = load_config(additional.get("kvskim") if isinstance(additional, Mapping) else None)
        self.speaks = parallel.is_first_tensor_rank(vllm_config)
        """Others with the same layers leave logging and counting of what is the same for all to this worker."""
        for line in loaded.warnings if self.speaks else ():
            logger.warning("kvskim: %s", line)
        self.vllm_config = vllm_config
        self.config = loaded.config
        self.rule = self.config.rule_parameters()
        self.selector: Selector = get_selector(self.config.selector, **self.config.selector_options)
        self.layers: dict[str, LayerState] = {}
        self.dense: dict[str, str] = {}
        """Layers that keep full attention, and why."""
        self.host_cache = HostCache(vllm_config, self.config, self.log) if self.config.variant != "fast" else None
        self.calibrator: calibrate.Calibrator | None = None
        self.calibration_source = ""
        self.ready: Tensor | None = None
        """int32 ``[1]`` on the device: 1 once the tables are those of this model."""
        self.last_lengths: Tensor | None = None
        """Lengths of the rows of the last decode step, int32 on the device."""
        self.metrics = metrics()
        self.sampler: ActivitySampler | None = None
        self.kernels = Choice("", "not chosen yet")
        self.query_dtype = torch.bfloat16
        """Of the queries, known when `allocate` is called."""
        self.encode_order = EncodeOrder(self.config.window_pages, self._encode_together)
        self.rows = 0
        """Rows that one launch serves; a larger decode batch runs in parts."""
        self.workspaces: dict[tuple[int, int, int], Workspace] = {}
        self._buffers: dict[tuple[tuple[int, int, int], int], StepBuffers] = {}
        self._settings: dict[tuple[str, int, bool], StepSettings] = {}
        self._reported = self._said_others_write = False
        self.capturing = False
        """vLLM builds steps to capture them."""
        self.loading = 0
        """Latent attention: layers that vLLM has made and not yet loaded."""

    @staticmethod
    def find(layers: Mapping[str, Any]) -> SkimState | None:
        """The state of the engine that these layers (vLLM's static forward context) belong to, if it has one yet."""
        return next((s for s in (_state_of(layer) for layer in layers.values()) if s is not None), None)

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> SkimState:
        """The state of this engine's worker; made when its first layer asks for it."""
        return cls.find(vllm_config.compilation_config.static_forward_context) or cls(vllm_config)

    @property
    def max_rows(self) -> int:
        """Most rows of a decode step."""
        return int(self.vllm_config.scheduler_config.max_num_seqs)

    @property
    def page_capacity(self) -> int:
        """Most pages of a request, in whole blocks of the largest size."""
        return ceil_div(int(self.vllm_config.model_config.max_model_len), BLOCK_SIZES[-1]) * (BLOCK_SIZES[-1] // PAGE_TOKENS)

    def log(self, text: str) -> None:
        """Say it once for all workers that have the same layers."""
        if self.speaks:
            logger.info("kvskim: %s", text)

    def refuse(self, refusal: str | None) -> str | None:
        """Stop the engine, or give the reason back where the configuration asks for such layers to be dense; None: nothing speaks against them.

        Raises:
            UnsupportedError: there is a reason, and ``on_unsupported`` is ``refuse``.
        """
        if refusal is not None:
            if self.config.on_unsupported == "refuse":
                raise UnsupportedError(refusal)
            if self.speaks:
                self.metrics.unsupported(refusal)
        return refusal

    def add_layer(self, cache_dtype: torch.dtype, **facts: Any) -> LayerState:
        """Make a layer sparse: put its records beside it in vLLM's list of layers.

        Args:
            cache_dtype: type of K and V.
            facts: fields of `LayerState`.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        records = RecordsLayer(facts["name"], facts["num_kv_heads"], self.selector.record_bytes(facts["head_size"]), cache_dtype)
        if records.layer_name in layers:
            raise ValueError(f"vLLM already has a layer named {records.layer_name}")
        layer = LayerState(**facts, records=records)
        layers[records.layer_name] = records
        if self.host_cache is not None:
            layer.residency = self.host_cache.add(layer, cache_dtype)
            layers[layer.residency.layer_name] = layer.residency
        if not self.layers:
            records.when_bound = partial(self._records_bound, layer)
        self.layers[layer.name] = layer
        return layer

    def _records_bound(self, layer: LayerState) -> None:
        """Say where the number of records takes the CUDA scorer away that the start block has announced."""
        records, kernels = layer.records.records, self.kernels.kernels
        if records is None or kernels != "cuda" or fills_pieces(records):
            return
        if scorer(self.selector, kernels, layer.head_size, layer.group, self.query_dtype) == "cuda":
            self.log(f"{records.shape[0]} pages of {records[0].numel()} bytes of records do not fill 16-byte pieces: pages are scored by triton")

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate all that decode needs, once. Called in vLLM's profiling run, so that vLLM counts it before it sizes its cache."""
        if self.workspaces or not self.layers:
            return
        config = self.config
        self.kernels = choose(config.kernels, device)
        self.query_dtype = dtype
        kernels = cast(Kernels, self.kernels.kernels)
        if device.type == "cuda":
            self.encode_order.streams = CudaStreams(device)
        forced: dict[str, Any] = dict(sink_pages=config.sink_pages, window_pages=config.window_pages)
        layers = list(self.layers.values())
        table = table_capacity(self.rule, self.page_capacity, **forced)
        self.rows = min(
            workspace_rows(heads, padded_group(group), self.page_capacity, table, self.max_rows)
            for heads, group, _ in {layer.geometry for layer in layers}
        )
        self.ready = torch.zeros(1, dtype=torch.int32, device=device)
        for layer in layers:
            if layer.geometry not in self.workspaces:
                heads, group, dim = layer.geometry
                self.workspaces[layer.geometry] = Workspace(
                    max_requests=self.rows, num_kv_heads=heads, group=group, head_dim=layer.value_size, page_capacity=self.page_capacity, rule=self.rule,
                    device=device, kernels=kernels, record_bytes=self.selector.record_bytes(dim), **forced,
                )
            layer.tables = calibrate.empty_tables(self.selector, layer.num_kv_heads, layer.head_size, device)
            layer.settings = StepSettings(
                selector=self.selector, tables=layer.tables, rule=self.rule, scale=layer.scale, softcap=layer.softcap, kernels=kernels,
                overlap=kernels == "cuda", **forced,
            )
            shape = (self.max_rows, layer.num_kv_heads)
            layer.counts = torch.zeros(shape, dtype=torch.int32, device=device)
            layer.covered = torch.zeros(shape, dtype=torch.float32, device=device)
        if self.host_cache is not None:
            self.host_cache.allocate(kernels, self.rows, self.page_capacity, device, dtype)
        self.sampler = ActivitySampler(layers, device, self.metrics)
        self._calibrate(layers, device, dtype)
        self.metrics.calibrated(self.calibrator is None)
        self.report()

    def _calibrate(self, layers: list[LayerState], device: torch.device, dtype: torch.dtype) -> None:
        calibration, self.calibration_source = calibration_source.find_calibration(
            self.config, self.selector, self.vllm_config, [layer.index for layer in layers]
        )
        if calibration is not None:
            total_heads, first, count = parallel.heads_of_this_rank(self.vllm_config)
            for layer in layers:
                tables = calibrate.rank_tables(self.selector, calibration, layer.index, total_heads, layer.head_size, first, count)
                calibrate.copy_tables(layer.tables, tables)
            self.mark_ready()
        elif self.selector.needs_calibration:
            refusal = calibration_refusal(kv_connector(self.vllm_config))
            if refusal is not None:
                raise UnsupportedError(refusal)
            self.calibration_source = f"from the first {calibrate.CAPTURE_TOKENS} prefill tokens; until then every page is attended"
            rotary = calibrate.vllm_rotary(layers[0].head_size, layers[0].latent_size)
            self.calibrator = calibrate.Calibrator(self.selector, layers, rotary, self.vllm_config.model_config.max_model_len)
            self.calibrator.allocate(device, dtype)
        else:
            self.mark_ready()

    def mark_ready(self) -> None:
        """From the next decode step on the rule decides; until now every page was attended."""
        assert self.ready is not None
        self.ready.fill_(1)
        self.calibrator = None
        self.metrics.calibrated(True)

    def use_rule(self, rule: RuleParameters) -> None:
        """From the next step on another rule decides. Where ``full_pages`` of the configuration is ``auto``, the engine goes on to choose that number.

        Raises:
            UnsupportedError: CUDA graphs would go on with the rule that they were captured with, or the page tables are too small for this one.
        """
        mode = getattr(self.vllm_config.compilation_config, "cudagraph_mode", None)
        if mode is not None and mode.name != "NONE":
            raise UnsupportedError(
                f"the rule of a running engine can't be changed with cudagraph_mode {mode.name}: its CUDA graphs hold the rule that they were captured with; "
                "start the engine with enforce_eager"
            )
        needed = table_capacity(rule, self.page_capacity, self.config.sink_pages, self.config.window_pages)
        for workspace in self.workspaces.values():
            if needed > workspace.table_capacity:
                raise UnsupportedError(
                    f"the rule of a running engine can't be changed to {rule_text(rule)!r}: it needs page tables of {needed} pages, and this engine was "
                    f"started with room for {workspace.table_capacity}; start it with the rule that needs the largest"
                )
        self.rule = rule
        for layer in self.layers.values():
            if layer.settings is not None:
                layer.settings = replace(layer.settings, rule=rule)
        self._settings.clear()

    def report(self) -> None:
        """Log the start block, once."""
        if self.speaks and not self._reported:
            self._reported = True
            for line in start_block(self):
                logger.info("%s", line)

    def report_if_all_dense(self) -> None:
        """The same where no layer allocates anything, because none is sparse."""
        if not self.layers:
            self.report()

    def writes(self, layer: LayerState) -> bool:
        """The keys and values of a step are about to be written to a layer: its first work in a step.

        Returns:
            whether the kernel that comes next may begin before the one ahead of it has ended.
        """
        return not self.encode_order.begins(layer.name)

    def write(self, layer: LayerState, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, overlap: bool) -> bool:
        """Write K and V of a step of decode rows alone, wherever they are, with the kernel that lets the decode kernels behind it begin early.

        Queries must have been complete, or what completes them be on the stream, before.

        Args:
            key, value: ``[T', H, D]`` with T' >= T.
            kv_cache: the layer's cache as vLLM gives it.
            slot_mapping: int64 ``[T]``, -1: none.
            overlap: from `writes`.

        Returns:
            False: nothing was written, others must; other kernels than the CUDA ones, float8, or rows that are not aligned.
        """
        return self._write(layer, key, value, layer.views(kv_cache), slot_mapping, overlap)

    def write_latent(self, layer: LayerState, latent: Tensor, rotary: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> bool:
        """As `write`, the two parts of latent rows: ``[T', 1, L]`` and ``[T', 1, E]``."""
        overlap = self.writes(layer)
        rows, latents = layer.views(kv_cache)
        assert isinstance(latents, Tensor)
        return self._write(layer, latent, rotary, (latents, rows[..., latents.shape[-1] :]), slot_mapping, overlap)

    def _write(
        self, layer: LayerState, first: Tensor, second: Tensor, caches: tuple[Tensor, Tensor | HostTier], slot_mapping: Tensor, overlap: bool
    ) -> bool:
        if self.kernels.kernels != "cuda":
            return False
        written = write_cache(first, second, *caches, slot_mapping, kernels="cuda", overlap=overlap)
        if not written and not self._said_others_write:
            self._said_others_write = True
            reason = f"{first.dtype} in a cache of {caches[0].dtype}, or rows not aligned"
            self.log(f"the keys of decode steps are written by a kernel that lets no other begin early: {reason}")
        layer.wrote = written
        return written

    def keys_written(self, layer: LayerState, slot_mapping: Tensor, *, alone: bool) -> None:
        """A step has written the keys of these slots (int64, -1: none): make the records of the pages that they complete.

        Args:
            alone: the step has decode rows and no others, so `decode` follows for all of them.
        """
        def together() -> EncodeLayer | None:
            work = self._encode_layer(layer, slot_mapping)
            return work if encoded_together(work, self.kernels.kernels) else None

        self.encode_order.written(layer.name, lambda aside: self.encode(layer, slot_mapping, aside=aside), alone=alone, together=together)

    def _encode_layer(self, layer: LayerState, slot_mapping: Tensor) -> EncodeLayer:
        records = layer.records.records
        if records is None or layer.tables is None:
            raise RuntimeError(f"layer {layer.name} writes keys before vLLM's profiling run, or before its records were bound")
        return EncodeLayer(layer.tables, layer.caches()[0], slot_mapping, records)

    def _encode_together(self, layers: Sequence[EncodeLayer]) -> None:
        """Make the records of several layers, on a side stream."""
        encode_layers(self.selector, layers, kernels=self.kernels.kernels)

    def encode(self, layer: LayerState, slot_mapping: Tensor, *, aside: bool = False) -> None:
        """Make the records of the pages that these slots (int64, -1: none) complete, from the keys in the cache. aside: on a side stream."""
        work, kernels = self._encode_layer(layer, slot_mapping), self.kernels.kernels
        # Overlapped, as the decode kernels behind it are: it waits for the keys itself. On a side stream there is nothing to overlap with.
        overlap = kernels == "cuda" and not aside
        encode(self.selector, work.tables, work.key_cache, work.slot_mapping, work.records, kernels=kernels, overlap=overlap)

    def decode(
        self, layer: LayerState, query: Query, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor, *, alone: bool
    ) -> None:
        """One decode step of a layer for rows of one query token, in parts of as many rows as the workspace has.

        Args:
            query: ``[R, Hq, D]``; or, of latent attention, its parts.
            kv_cache: the layer's cache as vLLM gives it.
            block_table: int32 ``[R, blocks]``.
            seq_lens: int32 ``[R]``, 0 for a row that only fills a graph.
            out: ``[R, Hq, D]`` (latent attention: of the latent size), written.
            alone: the step has no rows besides these.
        """
        records = layer.records.records
        if records is None or layer.settings is None or layer.counts is None or layer.covered is None or self.ready is None:
            raise RuntimeError(f"layer {layer.name} decodes before vLLM's profiling run, or before its records were bound")
        key_cache, values = layer.views(kv_cache)
        fetching = self.host_cache.scratch[layer.name] if self.host_cache is not None else None
        # Nothing of this step needs the copies: attention reads what is missing where it is, beside what is hot. Nor does it need to be known meanwhile
        # what will be copied where: the slots of pages that are selected stay as they are.
        aside = fetching is not None and query.shape[0] <= self.rows and self.encode_order.may_fork(alone=alone)
        workspace = self.workspaces[layer.geometry]
        # A wider table than requests can fill would ask for more scratch memory than there is.
        block_table = block_table[:, : self.page_capacity * PAGE_TOKENS // key_cache.shape[1]]
        for first in range(0, query.shape[0], self.rows):
            rows = slice(first, min(first + self.rows, query.shape[0]))
            shared = self._step_buffers(layer.geometry, rows.stop - rows.start)
            buffers = replace(shared, counts=layer.counts[rows], covered=layer.covered[rows])
            decide = None
            if aside:
                assert isinstance(values, HostTier)
                decide = partial(
                    fetch, values, block_table[rows], seq_lens[rows], buffers.pages, buffers.counts, block_size=key_cache.shape[1], scratch=fetching,
                    kernels=self.kernels.kernels, copies=False,
                )
            decode_step(
                self._settings_for(layer, rows.stop - rows.start, key_cache, alone), query[rows], key_cache, values, records, block_table[rows],
                seq_lens[rows], ready=self.ready, workspace=workspace, buffers=buffers, out=out[rows], fetching=None if aside else fetching,
                selected=partial(self.encode_order.selected, decide),
                queries_settled=layer.wrote and alone,  # see `write`
            )
            layer.wrote = False
        if aside:
            assert isinstance(values, HostTier)
            assert fetching is not None
            self.encode_order.fork(partial(copy_fetched, values, fetching, kernels=self.kernels.kernels))
        self.encode_order.attended(layer.name)

    def _settings_for(self, layer: LayerState, rows: int, key_cache: Tensor, alone: bool) -> StepSettings:
        """The settings of a layer for a launch of so many rows, which decide up to which length all is attended where the configuration leaves it open."""
        assert layer.settings is not None
        key = (layer.name, rows, alone)
        if key not in self._settings:
            row_bytes = key_cache.element_size() * (layer.head_size + (0 if layer.latent_size is not None else layer.value_size))
            rule = self.rule_of(rows, layer.num_kv_heads, row_bytes, latent=layer.latent_size is not None)
            # A page that a row of one token completes is in its window, so its other records were made before. The prefix cache gives a block away in
            # the step that fills it: a prompt that is in such blocks but for its last token is such a row too. Beside decode rows one page of it can
            # be new, the last full one, for which score waits; beside a prefill any number.
            self._settings[key] = replace(layer.settings, rule=rule, settled=layer.settings.overlap and alone)
        return self._settings[key]

    def rule_of(self, rows: int, kv_heads: int, row_bytes: int, *, latent: bool) -> RuleParameters:
        """The rule for a launch of so many rows; see `crossover.whole_rule`."""
        if self.config.full_pages != "auto":
            return self.rule
        forced = self.config.sink_pages + self.config.window_pages
        return whole_rule(self.rule, forced, rows, kv_heads, row_bytes, fast=self.kernels.kernels == "cuda", latent=latent)

    def _step_buffers(self, geometry: tuple[int, int, int], rows: int) -> StepBuffers:
        # Views are made once for each number of rows: eager steps would pay for them in every layer.
        key = (geometry, rows)
        if key not in self._buffers:
            self._buffers[key] = self.workspaces[geometry].buffers(rows)
        return self._buffers[key]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all that `allocate` made, calibration's captured tokens left out."""
        return sum(w.nbytes for w in self.workspaces.values())


def _state_of(layer: Any) -> SkimState | None:
    state = getattr(getattr(layer, "impl", None), "skim_state", None)
    return state if isinstance(state, SkimState) else None
