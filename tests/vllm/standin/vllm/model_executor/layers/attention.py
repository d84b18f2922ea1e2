from __future__ import annotations

import torch
from torch import nn

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec


class Attention(nn.Module, AttentionLayerBase):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, cache_config=None, logits_soft_cap=None,
        per_layer_sliding_window=None, prefix="", attn_type="decoder", kv_sharing_target_layer_name=None, attn_backend=None,
        quant_config=None, **extra_impl_args,
    ):
        super().__init__()
        config = get_current_vllm_config()
        # A checkpoint with a quantised cache decides where the engine was not told otherwise.
        kv_cache_dtype = "fp8" if quant_config is not None and cache_config.cache_dtype == "auto" else cache_config.cache_dtype
        self.layer_name, self.num_heads, self.num_kv_heads, self.head_size = prefix, num_heads, num_kv_heads, head_size
        self.sliding_window = per_layer_sliding_window
        self.kv_cache_torch_dtype = config.model_config.dtype
        self.attn_backend = attn_backend
        self.impl = attn_backend.get_impl_cls()(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, per_layer_sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
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


class MLAAttention(nn.Module, AttentionLayerBase):
    def __init__(
        self, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank, kv_lora_rank, kv_b_proj, cache_config=None,
        quant_config=None, prefix="", attn_backend=None, use_sparse=False, indexer=None,
    ):
        super().__init__()
        config = get_current_vllm_config()
        self.num_heads, self.scale, self.kv_lora_rank, self.kv_b_proj = num_heads, scale, kv_lora_rank, kv_b_proj
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.head_size, self.num_kv_heads, self.layer_name, self.attn_backend = kv_lora_rank + qk_rope_head_dim, 1, prefix, attn_backend
        self.impl = attn_backend.get_impl_cls()(
            num_heads=num_heads, head_size=self.head_size, scale=scale, num_kv_heads=1, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
            logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None, q_lora_rank=q_lora_rank, kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim, qk_head_dim=qk_nope_head_dim + qk_rope_head_dim,
            v_head_dim=v_head_dim, kv_b_proj=kv_b_proj, indexer=indexer,
        )
        config.compilation_config.static_forward_context[prefix] = self
        self.kv_cache_dtype = "auto"
        self._k_scale = torch.ones(())
        self.kv_cache = torch.tensor([])

    def process_weights_after_loading(self, act_dtype):
        weight = self.kv_b_proj.weight.T.view(self.kv_lora_rank, self.num_heads, -1)
        plain, value = weight.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        self.W_UV, self.W_UK_T = value.transpose(0, 1), plain.permute(1, 2, 0)

    def forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output):
        if attn_metadata is None:
            return output.fill_(0)
        total, decoded = attn_metadata.num_actual_tokens, attn_metadata.num_decode_tokens
        q, k_c_normed, k_pe = q[:total], k_c_normed[:total], k_pe[:total]
        if total > decoded:
            self.impl.forward_mha(
                q[decoded:], k_c_normed[decoded:], k_pe[decoded:], kv_cache, attn_metadata, self._k_scale, output=output[decoded:total]
            )
        if decoded:
            plain, rotary = q[:decoded].split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
            latent = torch.bmm(plain.transpose(0, 1), self.W_UK_T).transpose(0, 1)
            out, _ = self.impl.forward_mqa((latent, rotary), kv_cache, attn_metadata, self)
            output[:decoded] = torch.bmm(out.view(-1, self.num_heads, self.kv_lora_rank).transpose(0, 1), self.W_UV).transpose(0, 1).flatten(1)
        return output

    def get_attn_backend(self):
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config):
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size, num_kv_heads=1, head_size=self.head_size, dtype=vllm_config.model_config.dtype
        )
