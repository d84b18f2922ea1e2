from __future__ import annotations

import torch
from torch import nn

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec


class Attention(nn.Module, AttentionLayerBase):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, cache_config=None, logits_soft_cap=None,
        per_layer_sliding_window=None, prefix="", attn_type="decoder", kv_sharing_target_layer_name=None, attn_backend=None, **extra_impl_args,
    ):
        super().__init__()
        config = get_current_vllm_config()
        self.layer_name, self.num_heads, self.num_kv_heads, self.head_size = prefix, num_heads, num_kv_heads, head_size
        self.sliding_window = per_layer_sliding_window
        self.kv_cache_torch_dtype = config.model_config.dtype
        self.attn_backend = attn_backend
        self.impl = attn_backend.get_impl_cls()(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, per_layer_sliding_window, "auto", logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **extra_impl_args,
        )
        self._k_scale, self._v_scale = torch.ones(()), torch.ones(())
        self.kv_cache = torch.tensor([])
        config.compilation_config.static_forward_context[prefix] = self

    def process_weights_after_loading(self, act_dtype):
        self.impl.process_weights_after_loading(act_dtype)

    def get_attn_backend(self):
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config):
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size, num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype=self.kv_cache_torch_dtype
        )
