"""The metadata of a step: which rows decode, what FlashAttention needs for the others, and what calibration reads.

`build` is the one place that runs on the host in every step, before a captured graph is replayed too. It never waits for the GPU.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder

from kvskim.engines.vllm.calibrate import Segment
from kvskim.engines.vllm.staging import StagedRows, plan_staging
from kvskim.engines.vllm.state import SkimState
from kvskim.engines.vllm.step import begin_step, no_request
from kvskim.engines.vllm.support import leading_single_token_rows


@dataclass
class SkimMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata of the whole step, and how a sparse layer splits it.

    ``decode_rows``: rows 0 .. decode_rows - 1 have one query token each, token i for row i; sparse layers decode them sparsely.
    ``rest``: FlashAttention's metadata of the other rows, where there are any besides decode rows. ``capture``: tokens of this step that
    calibration reads. ``staged``: the other rows where values, or both, are in host memory, which ``rest`` does not serve.
    """

    decode_rows: int = 0
    rest: FlashAttentionMetadata | None = None
    capture: tuple[Segment, ...] = ()
    staged: tuple[StagedRows, ...] = ()

    @property
    def decodes_alone(self) -> bool:
        """Sparse layers decode all rows of the step."""
        return self.decode_rows > 0 and self.rest is None


class SkimMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds `SkimMetadata`. Where none of its layers is sparse it is vLLM's builder."""

    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._state = sparse_state(vllm_config, layer_names)
        if self._state is not None:
            # The older model runner orders requests by this: decode rows first. The newer one always does.
            self.reorder_batch_threshold = 1
            sparse = self._state.layers
            self._all_sparse = all(name in sparse for name in layer_names)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        stock = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if sparse_state(vllm_config, None) is None:
            return stock
        # Rows with several query tokens are dense, so a graph of them is FlashAttention's; a graph of mixed rows would freeze the split.
        speculative = vllm_config.speculative_config is not None
        most = AttentionCGSupport.UNIFORM_BATCH if speculative else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return most if stock.value > most.value else stock

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> FlashAttentionMetadata:
        state = self._state
        if state is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        decode_rows = self._decode_rows(common)
        capture = begin_step(state, self.layer_names, common, decode_rows, fast_build)
        rest = None
        if 0 < decode_rows < common.num_reqs:
            rest = super().build(0, _rows_from(common, decode_rows), fast_build)
            if rest.scheduler_metadata is not None:
                # The builder keeps one buffer for captured graphs; the metadata of the whole step would overwrite it.
                rest.scheduler_metadata = rest.scheduler_metadata.clone()
        # FlashAttention's schedule of the whole step is for layers that run it: none, where all are sparse and some row decodes.
        unused = self._all_sparse and decode_rows > 0
        whole = super().build(common_prefix_len, common, fast_build or unused)
        staged: tuple[StagedRows, ...] = ()
        if state.host_cache is not None and decode_rows < common.num_reqs:
            size = int(self.kv_cache_spec.block_size)
            staged = plan_staging(whole if rest is None else rest, common, decode_rows, size, state.host_cache.room_blocks(size))
        return SkimMetadata(**vars(whole), decode_rows=decode_rows, rest=rest, capture=capture, staged=staged)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttentionMetadata:
        with no_request(self._state):
            return super().build_for_cudagraph_capture(common_attn_metadata)

    @staticmethod
    def _decode_rows(common: CommonAttentionMetadata) -> int:
        if common.causal is not True or getattr(common, "mm_req_doc_ranges", None) is not None:
            return 0
        if common.max_query_len <= 1:
            # Rows that only fill a graph count: they have length 0 and are inert.
            return min(common.num_reqs, common.num_actual_tokens)
        return leading_single_token_rows(common.query_start_loc_cpu[: common.num_reqs + 1].numpy(), common.num_actual_tokens)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False if self._state is not None else super().use_cascade_attention(*args, **kwargs)


def _rows_from(common: CommonAttentionMetadata, first: int) -> CommonAttentionMetadata:
    """The step without its first ``first`` rows, which have one token each."""
    rows = slice(first, common.num_reqs)
    changes: dict[str, Any] = dict(
        query_start_loc=common.query_start_loc[first : common.num_reqs + 1] - first,
        query_start_loc_cpu=common.query_start_loc_cpu[first : common.num_reqs + 1] - first,
        seq_lens=common.seq_lens[rows],
        num_reqs=common.num_reqs - first,
        num_actual_tokens=common.num_actual_tokens - first,
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[first : common.num_actual_tokens],
    )
    # Copies on the host and per-row extras of the whole step would be wrong here; FlashAttention does not read them for causal rows.
    kept = {*changes, "max_query_len", "max_seq_len", "causal"}
    changes.update({field.name: field.default for field in dataclasses.fields(common) if field.name not in kept})
    return dataclasses.replace(common, **changes)


def sparse_state(vllm_config: VllmConfig, layer_names: list[str] | None) -> SkimState | None:
    """The state of this worker, where at least one of the layers (None: any layer) is sparse."""
    state = SkimState.find(vllm_config.compilation_config.static_forward_context)
    if state is None or not state.layers:
        return None
    if layer_names is not None and not any(name in state.layers for name in layer_names):
        return None
    return state
