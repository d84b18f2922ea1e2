"""The paged engine with values, or keys and values, in host memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from mini_engine import MiniEngine, Request

VARIANTS = ["mem-v", "mem-kv"]
PAGE_BYTES = {"mem-v": 16 * 64 * 4 + 8, "mem-kv": 2 * 16 * 64 * 4 + 8}
"""Of a slot of the hot cache, in the float32 of these engines."""


class TierEngine(MiniEngine):
    """Caches have the shapes that the layers ask for; what has not been written holds NaN, in host memory zeros."""

    def _bind(self, num_blocks: int) -> None:
        for layer in self.layers:
            spec = layer.get_kv_cache_spec(self.config)
            shape = layer.get_attn_backend().get_kv_cache_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
            layer.kv_cache = torch.full(shape, torch.nan)
        self.bind_side_layers(num_blocks)

    def bind_side_layers(self, num_blocks: int) -> None:
        for layer in self.records_layers():
            spec = layer.get_kv_cache_spec(self.config)
            raw = torch.full((spec.page_size_bytes * num_blocks,), 0xFF, dtype=torch.uint8)
            shape = layer.get_attn_backend().get_kv_cache_shape(num_blocks, spec.storage_block_size, spec.num_kv_heads, spec.head_size)
            layer.kv_cache = raw.view(spec.dtype).view(shape)

    def _common(self, scheduled: list[tuple[Request, int]], pad_rows: int, dummy: bool) -> Any:
        common = super()._common(scheduled, pad_rows, dummy)
        return dataclasses.replace(common, seq_lens_cpu_upper_bound=common.seq_lens.clone())


def engine(settings: dict[str, Any], slots: int = 40, variant: str = "mem-v", **options: Any) -> TierEngine:
    """An engine whose hot cache has ``slots`` slots a layer, or one with values in GPU memory."""
    layers = options.get("num_layers", 2)
    tier = {"variant": variant, "hot_cache_gib": slots * layers * PAGE_BYTES[variant] / 2**30} if variant in VARIANTS else {}
    return TierEngine({**tier, **settings}, **options)
