"""Records as a cache layer of vLLM's own, and whatever else is kept for every page and kv head.

A `RecordsLayer` stands beside each sparse attention layer in vLLM's list of attention layers, with a cache spec of the same block size. So vLLM
sizes, allocates and binds the records, they share the block ids of their layer, and prefix caching, preemption, sleep, copies of blocks
and connectors treat them as they treat K and V. Row ``slot // 16`` of the records belongs to the page of that token slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvskim.engines.vllm.layout import records_element_dtype, records_shape, records_view
from kvskim.layout import PAGE_TOKENS

# From vLLM 0.29 on a spec says itself how many tokens share one entry.
_HAS_TOKENS_PER_STATE = any(field.name == "tokens_per_state" for field in fields(FullAttentionSpec))


@dataclass(frozen=True, kw_only=True)
class RecordsSpec(FullAttentionSpec):
    """One entry per page of 16 tokens: ``num_kv_heads`` records of ``head_size`` two-byte elements. For vLLM 0.24 to 0.28."""

    @property
    def storage_block_size(self) -> int:
        return self.block_size // PAGE_TOKENS

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.storage_block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def real_page_size_bytes(self) -> int:
        # Up to 0.27 vLLM counts with this one, in 0.28 with the other.
        return self.unpadded_page_size_bytes


class RecordsMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Records need no metadata of their own; they never limit which CUDA graphs vLLM captures."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Any:
        return common_attn_metadata


class RecordsBackend(AttentionBackend):
    """The shape of a records cache, for vLLM's planner; it computes no attention."""

    @staticmethod
    def get_name() -> str:
        return "KVSKIM_RECORDS"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("records have no attention implementation")

    @staticmethod
    def get_builder_cls() -> type[RecordsMetadataBuilder]:
        return RecordsMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        # vLLM passes the storage block size here, which is pages per block.
        return records_shape(num_blocks, block_size * PAGE_TOKENS, num_kv_heads, 2 * head_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """From vLLM 0.29 on, orders of layers, blocks, heads and tokens in memory: those where the blocks of a layer follow one another."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)


class RecordsLayer(nn.Module, AttentionLayerBase):
    """The records of one attention layer.

    Args:
        layer_name: name of the attention layer; the records are ``<layer_name>.<suffix>``.
        num_kv_heads: kv heads on this rank.
        record_bytes: bytes of one record.
        cache_dtype: type of K and V.
        suffix: tells side layers of one attention layer apart.
    """

    def __init__(
        self, layer_name: str, num_kv_heads: int, record_bytes: int, cache_dtype: torch.dtype, suffix: str = "kvskim_records"
    ) -> None:
        super().__init__()
        self.layer_name = f"{layer_name}.{suffix}"
        self.num_kv_heads = num_kv_heads
        self.record_bytes = record_bytes
        self.element_dtype = records_element_dtype(cache_dtype)
        self.records: Tensor | None = None
        """uint8 ``[pages, kv heads, record_bytes]`` once vLLM has bound the cache."""
        self.when_bound: Callable[[], None] | None = None
        """Called when ``records`` have changed."""
        self._bound: Any = torch.tensor([])

    @property
    def kv_cache(self) -> Any:
        return self._bound

    @kv_cache.setter
    def kv_cache(self, bound: Any) -> None:
        # vLLM binds at start and again after it has allocated anew; it binds something empty when it shuts down.
        self._bound = bound
        usable = isinstance(bound, Tensor) and bound.numel() > 0
        self.records = records_view(bound, self.num_kv_heads, self.record_bytes) if usable else None
        if self.when_bound is not None:
            self.when_bound()

    def bind_kv_cache(self, kv_cache: Any) -> None:
        """The same for vLLM 0.27 and later."""
        self.kv_cache = kv_cache

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RecordsBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        common: dict[str, Any] = dict(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.record_bytes // 2,
            dtype=self.element_dtype,
        )
        if _HAS_TOKENS_PER_STATE:
            return FullAttentionSpec(**common, head_size_v=0, tokens_per_state=PAGE_TOKENS)
        return RecordsSpec(**common)
