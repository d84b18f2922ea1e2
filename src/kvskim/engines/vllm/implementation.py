"""The attention of one layer: FlashAttention for prefill rows, the four operations for decode rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from kvskim.engines.vllm.facts import decodes_alone, engine_facts, is_draft_model, layer_index
from kvskim.engines.vllm.layer_state import LayerState
from kvskim.engines.vllm.metadata import SkimMetadata
from kvskim.engines.vllm.staging import StagedRows
from kvskim.engines.vllm.state import SkimState
from kvskim.engines.vllm.support import LayerFacts, engine_refusal, layer_refusal, mixed_windows_refusal, tier_layer_refusal
from kvskim.errors import UnsupportedError


class SkimImpl(FlashAttentionImpl):
    """One layer. Sparse, unless a reason speaks against it, in which case it is vLLM's FlashAttention and nothing else.

    Raises:
        UnsupportedError: the layer can't be sparse, and ``on_unsupported`` is ``refuse``.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, sinks, **extra,
        )
        self._vllm_config = get_current_vllm_config()
        self.skim_state = SkimState.of(self._vllm_config)
        self.skim_layer: LayerState | None = None
        self.dense_because: str | None = None
        if sliding_window is not None:
            self.dense_because = "sliding window"
        elif is_draft_model(self._vllm_config):
            self.dense_because = "draft model"
        else:
            facts = LayerFacts(
                head_size=head_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                attention_type=str(getattr(attn_type, "value", attn_type)),
                alibi=alibi_slopes is not None,
                sinks=sinks is not None,
                shares_cache_of=kv_sharing_target_layer_name,
            )
            # A checkpoint may ask for another type of cache than the engine was started with, and a layer may be left out of that.
            engine = replace(engine_facts(self._vllm_config, self.skim_state.config), cache_dtype=str(kv_cache_dtype))
            self.dense_because = self.skim_state.refuse(engine_refusal(engine) or layer_refusal(facts))
            if self.dense_because is None and self.skim_state.host_cache is not None:
                self.skim_state.host_cache.look_ahead(num_kv_heads, head_size)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Find out which layer this is, and put its records beside it. vLLM calls this once per layer after loading, or again on a reload."""
        super().process_weights_after_loading(act_dtype)
        if self.skim_layer is not None:
            return
        layers = self._vllm_config.compilation_config.static_forward_context
        name, module = next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        index = layer_index(name)
        if self.dense_because is None and type(module) is not Attention:
            self.dense_because = type(module).__name__
        if self.dense_because is None and self.skim_state.config.is_dense(index):
            self.dense_because = "dense_layers"
        if self.dense_because is None:
            # All layers are there now.
            windowed = sum(1 for layer in layers.values() if _is_windowed(layer))
            separate = not self._vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
            self.dense_because = self.skim_state.refuse(mixed_windows_refusal(windowed, separate))
        if self.dense_because is not None:
            self.skim_state.dense[name] = self.dense_because
            self._refuse_mixture()
            return
        self.skim_layer = self.skim_state.add_layer(
            module.kv_cache_torch_dtype, name=name, index=index, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_size=self.head_size,
            scale=self.scale, softcap=float(self.logits_soft_cap), module=module,
        )
        self._refuse_mixture()

    def _refuse_mixture(self) -> None:
        """What is in host memory is so for all layers or none: vLLM's blocks have one size."""
        host_cache = self.skim_state.host_cache
        refusal = tier_layer_refusal(self.skim_state.dense, self.skim_state.config.variant) if host_cache is not None and host_cache.layers else None
        if refusal is not None:
            raise UnsupportedError(refusal)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one step. Arguments and result as in vLLM's `FlashAttentionImpl.forward`."""
        sparse = self.skim_layer
        if sparse is None:
            if attn_metadata is None:
                self.skim_state.report_if_all_dense()
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if attn_metadata is None:
            # vLLM measures its memory now: what decode needs must exist before it sizes the cache.
            self.skim_state.allocate(query.device, query.dtype)
            if self.skim_state.host_cache is not None:
                self.skim_state.host_cache.measure_room(sparse)
            return output.fill_(0)
        if not isinstance(attn_metadata, SkimMetadata):
            raise TypeError(f"layer {sparse.name} got metadata of type {type(attn_metadata).__name__}; kvskim needs its own")
        if attn_metadata.capture and self.skim_state.calibrator is not None:
            self.skim_state.calibrator.capture(sparse, query, key, attn_metadata.capture)
        rows = attn_metadata.decode_rows
        if rows == 0 and self.skim_state.host_cache is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported")
        rest = attn_metadata.rest
        if rows > 0:
            self.skim_state.decode(
                sparse, query[:rows], kv_cache, attn_metadata.block_table[:rows], attn_metadata.seq_lens[:rows], output[:rows], alone=rest is None
            )
        if attn_metadata.staged:
            self._attend_staged(layer, query, key, value, kv_cache, attn_metadata.staged, output)
        elif rest is not None and self.skim_state.host_cache is None:
            super().forward(layer, query[rows:], key[rows:], value[rows:], kv_cache, rest, output[rows:])
        return output

    def _attend_staged(
        self, layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, groups: tuple[StagedRows, ...], output: Tensor
    ) -> None:
        """FlashAttention on contexts that are copied together, in memory that is given back with the return. The groups use it one after the other."""
        host_cache, sparse = self.skim_state.host_cache, self.skim_layer
        assert host_cache is not None
        assert sparse is not None
        room = host_cache.room(sparse, sparse.views(kv_cache)[0].shape[1])
        for staged in groups:
            at = staged.tokens
            host_cache.stage(sparse, kv_cache, staged, room)
            super().do_kv_cache_update(layer, key[at], value[at], room, staged.slots)
            super().forward(layer, query[at], key[at], value[at], room, staged.metadata, output[at])

    def do_kv_cache_update(self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write K and V, then the records of the pages that this completes."""
        host_cache, sparse = self.skim_state.host_cache, self.skim_layer
        if sparse is None or kv_cache.numel() == 0:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        alone = decodes_alone(sparse.name)
        overlap = self.skim_state.writes(sparse)
        if alone and self.skim_state.write(sparse, key, value, kv_cache, slot_mapping, overlap=overlap):
            pass  # all of it, in one launch
        elif host_cache is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            if not host_cache.with_keys:
                # The cache has keys and no values: they are written twice to the same place, which costs less than a kernel of our own.
                super().do_kv_cache_update(layer, key, key, kv_cache.expand(-1, 2, -1, -1, -1), slot_mapping)
            host_cache.store(sparse, key, value, slot_mapping)
        self.skim_state.keys_written(sparse, slot_mapping, alone=alone)

    def fused_rope_kvcache_supported(self) -> bool:
        # A fused operation would write K past do_kv_cache_update: records would not be made.
        return False


def _is_windowed(layer: Any) -> bool:
    return getattr(layer, "sliding_window", None) is not None or getattr(layer, "attention_chunk_size", None) is not None
