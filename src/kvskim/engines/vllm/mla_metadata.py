"""The metadata of a step with latent attention: vLLM's own, with the rows that decode apart, and what calibration reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLAMetadata, FlashAttnMLAMetadataBuilder

from kvskim.engines.vllm.calibrate import Segment
from kvskim.engines.vllm.metadata import sparse_state
from kvskim.engines.vllm.step import begin_step, no_request


@dataclass
class SkimMlaMetadata(FlashAttnMLAMetadata):
    """vLLM's metadata; ``capture``: tokens of this step that calibration reads."""

    capture: tuple[Segment, ...] = ()

    @property
    def decodes_alone(self) -> bool:
        """Sparse layers decode all rows of the step."""
        return self.num_prefills == 0 and self.decode is not None and self.decode.max_query_len <= 1


class SkimMlaMetadataBuilder(FlashAttnMLAMetadataBuilder):
    """Builds `SkimMlaMetadata`. Where none of its layers is sparse it is vLLM's builder."""

    # vLLM's own runs prefills of up to 512 tokens as decode rows of many query tokens, which sparse layers would have to attend densely.
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        self._names = list(layer_names)
        self._state = sparse_state(vllm_config, layer_names)
        if self._state is None:
            self.reorder_batch_threshold = FlashAttnMLAMetadataBuilder.reorder_batch_threshold
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._all_sparse = self._state is not None and all(name in self._state.layers for name in layer_names)
        if self._state is not None:
            self.metadata_cls = SkimMlaMetadata

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> FlashAttnMLAMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._state is not None and isinstance(metadata, SkimMlaMetadata):
            decode = metadata.decode
            rows = decode.seq_lens.shape[0] if decode is not None and decode.max_query_len <= 1 else 0
            metadata.capture = begin_step(self._state, self._names, common_attn_metadata, rows, fast_build)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttnMLAMetadata:
        with no_request(self._state):
            return super().build_for_cudagraph_capture(common_attn_metadata)

    def _schedule_decode(
        self, num_reqs: Any, cu_query_lens: Any, max_query_len: Any, seqlens: Any, max_seq_len: Any, causal: Any, max_num_splits: Any
    ) -> Any:
        """FlashAttention's schedule is for rows that it attends: none, where all layers are sparse and rows have one token."""
        if self._all_sparse and max_query_len <= 1:
            return None
        return super()._schedule_decode(num_reqs, cu_query_lens, max_query_len, seqlens, max_seq_len, causal, max_num_splits)
