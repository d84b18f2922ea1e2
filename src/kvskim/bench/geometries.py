"""Shapes of well-known models, for engines without weights: what a decode step costs depends on the shapes, not on the numbers in them.

Taken from the models' published ``config.json``. The longest position is widened to 1M tokens for all, and position scaling left out, so that every
context can be timed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST = 1 << 20

_EVERY: dict[str, Any] = dict(hidden_act="silu", tie_word_embeddings=False, torch_dtype="bfloat16", max_position_embeddings=LONGEST)
_COMMON: dict[str, Any] = dict(_EVERY, head_dim=128, hidden_size=4096, num_attention_heads=32)
GEOMETRIES: Mapping[str, Mapping[str, Any]] = {
    "glm4-9b-1m": dict(
        _COMMON, architectures=["GlmForCausalLM"], model_type="glm", attention_bias=True, intermediate_size=13696, num_hidden_layers=40,
        num_key_value_heads=4, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-07, rope_theta=1e8, vocab_size=151552, eos_token_id=[151329],
        pad_token_id=151329,
    ),
    "llama3.1-8b": dict(
        _COMMON, architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, intermediate_size=14336, num_hidden_layers=32,
        num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=5e5, vocab_size=128256, bos_token_id=128000, eos_token_id=128001,
    ),
    "qwen3-8b": dict(
        _COMMON, architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, intermediate_size=12288, num_hidden_layers=36,
        num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=1e6, vocab_size=151936, bos_token_id=151643, eos_token_id=151645, use_sliding_window=False,
        sliding_window=None,
    ),
    # Latent attention and experts.
    "deepseek-v2-lite": dict(
        _EVERY, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", attention_bias=False, hidden_size=2048, intermediate_size=10944,
        num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1,
        moe_layer_freq=1, n_group=1, topk_group=1, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0,
        rms_norm_eps=1e-6, rope_theta=1e4, vocab_size=102400, bos_token_id=100000, eos_token_id=100001,
    ),
}


def write_geometry(name: str, parent: Path) -> Path:
    """A model folder ``parent/name`` that holds nothing but the ``config.json`` of this geometry; returns the folder."""
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(GEOMETRIES[name], indent=1) + "\n", encoding="utf-8")
    return folder
