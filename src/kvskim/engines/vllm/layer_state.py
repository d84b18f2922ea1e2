"""One sparse layer on a rank: its shapes, where its keys, values and records are, and what its last decode step selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvskim.engines.vllm.layout import key_value_views, key_view
from kvskim.engines.vllm.mla_layout import latent_views
from kvskim.engines.vllm.records import RecordsLayer
from kvskim.ops.step import StepSettings
from kvskim.tier.pages import HostTier


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
    latent_size: int | None = None
    """Latent attention: the values are the first channels of the keys, so many of them."""
    tables: Any = None
    settings: StepSettings | None = None
    counts: Tensor | None = None
    covered: Tensor | None = None
    residency: RecordsLayer | None = None
    """Values, or keys and values, in host memory: which of them are hot; see `tier.HostCache`."""
    tier: HostTier | None = None
    """Where they are, as soon as the residency is bound."""
    wrote: bool = False
    """`SkimState.write` has written this layer's keys of the step, and nothing was launched since but the making of their records."""

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def geometry(self) -> tuple[int, int, int]:
        """Layers of one geometry share a workspace."""
        return self.num_kv_heads, self.group, self.head_size

    @property
    def value_size(self) -> int:
        return self.latent_size or self.head_size

    def views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor | HostTier]:
        """K and V in a cache of this layer, in the shapes of the operations."""
        if self.residency is not None:
            if self.tier is None:
                raise RuntimeError(f"layer {self.name} is used before its residency was bound")
            return self.tier.key_cache if self.tier.with_keys else key_view(kv_cache, self.head_size), self.tier
        if self.latent_size is not None:
            return latent_views(kv_cache, self.head_size, self.latent_size)
        return key_value_views(kv_cache, self.head_size)

    def caches(self) -> tuple[Tensor, Tensor | HostTier]:
        """K and V as vLLM has bound them."""
        return self.views(self.module.kv_cache)
