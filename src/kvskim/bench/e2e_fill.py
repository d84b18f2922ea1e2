"""A KV connector for engines without weights: it fills the cache of requests that ask for it, so that no prefill is run, and leaves others alone.

Keys and values are filled by vLLM's DecodeBenchConnector. What kvskim keeps beside them is not filled with noise: records are made of the filled keys, as a
prefill would have made them, and where values, or keys and values, are in host memory, random ones are stored there.

A request asks with ``kv_transfer_params={"filled_tokens": N}`` in the ``extra_args`` of its sampling parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

from kvskim.bench.e2e_plan import FILL_STD
from kvskim.bench.page_slots import page_ends, token_slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SIDE_LAYER = ".kvskim_"
"""In the name of a cache that is neither keys nor values."""
ENCODED_AT_ONCE = 65536
"""Pages in one call of encode."""
STORED_AT_ONCE = 16384
"""Tokens in one call of store."""


class FillConnector(DecodeBenchConnector):
    """Fills the first ``filled_tokens`` tokens of a request when it is scheduled, and again when it is scheduled anew after a preemption."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._has_records = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens are filled: those asked for that are not computed, and never the last one, which gives the first output token."""
        wanted = int((request.kv_transfer_params or {}).get("filled_tokens", 0))
        return max(0, min(wanted, request.num_tokens - 1) - num_computed_tokens), False

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take note of the caches of keys and values; those of kvskim are not filled."""
        self._has_records = any(SIDE_LAYER in name for name in kv_caches)
        super().register_kv_caches({name: cache for name, cache in kv_caches.items() if SIDE_LAYER not in name})

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill the blocks of the requests that this step starts, then make their records."""
        super().start_load_kv(forward_context, **kwargs)
        if not self._has_records:
            return
        from kvskim.engines.vllm.state import SkimState

        state = SkimState.find(self._config.compilation_config.static_forward_context)
        assert state is not None, "there are records, and no layer that they belong to"
        size, device = self._config.cache_config.block_size, self._config.device_config.device
        for block_ids, tokens in self._get_connector_metadata().reqs_to_fill.values():
            if state.host_cache is not None:
                self._store(state, torch.tensor(token_slots(block_ids[0], size, tokens), dtype=torch.int64).to(device))
            ends = torch.tensor(page_ends(block_ids[0], size, tokens), dtype=torch.int64)
            for part in ends.to(device).split(ENCODED_AT_ONCE):
                for layer in state.layers.values():
                    state.encode(layer, part)

    def _store(self, state: Any, slots: Tensor) -> None:
        """Random keys and values for tokens of a cache in host memory; where the keys are not there, only the values are taken."""
        for layer in state.layers.values():
            for part in slots.split(STORED_AT_ONCE):
                shape = (2, len(part), layer.num_kv_heads, layer.head_size)
                keys, values = torch.randn(shape, dtype=self._config.model_config.dtype, device=slots.device) * FILL_STD
                state.host_cache.store(layer, keys, values, part)
