"""The dense baseline: vLLM's FlashAttention-3 paged decode, also of latent rows, called as vLLM calls it in FULL CUDA graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

SPLITS_FOR_GRAPHS = 32
"""vLLM's default for attention_config.flash_attn_max_num_splits_for_cuda_graph."""


def available() -> str | None:
    """None when the baseline can run, else the reason in words."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
    except ImportError as error:
        return f"vllm's FlashAttention can't be imported ({error})"
    return None if is_fa_version_supported(3) else "vllm has no FlashAttention-3 for this GPU"


def dense_decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, out: Tensor) -> Callable[[], None]:
    """A launch of dense paged decode; shapes as in `kvskim.ops.attend`. The scheduling metadata is made here, as vLLM makes it once per step."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    requests, heads, dim = query.shape
    longest = int(seq_lens.max())
    starts = torch.arange(requests + 1, dtype=torch.int32, device=query.device)
    metadata = get_scheduler_metadata(
        batch_size=requests, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=heads, num_heads_kv=key_cache.shape[2], headdim=dim, cache_seqlens=seq_lens,
        qkv_dtype=query.dtype, cu_seqlens_q=starts, page_size=key_cache.shape[1], causal=True, window_size=(-1, -1), num_splits=SPLITS_FOR_GRAPHS,
    )

    def launch() -> None:
        flash_attn_varlen_func(
            q=query, k=key_cache, v=value_cache, out=out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=seq_lens, max_seqlen_k=longest, softmax_scale=scale,
            causal=True, window_size=[-1, -1], block_table=block_table, softcap=0.0, scheduler_metadata=metadata, fa_version=3, num_splits=SPLITS_FOR_GRAPHS,
        )

    return launch


def dense_latent_decode(query: Tensor, rows: Tensor, latent: int, block_table: Tensor, seq_lens: Tensor, scale: float) -> Callable[[], Tensor]:
    """A launch of dense paged decode of latent rows (MLA), as vLLM's backend FLASH_ATTN_MLA does it; returns ``[R, heads, latent]``.

    Args:
        query: ``[R, heads, D]``, absorbed. rows: ``[blocks, block_size, 1, D]``. latent: channels of a row that are its value; the others are rotary.
        block_table, seq_lens: as in `kvskim.ops.attend`.
        scale: of the logits.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    requests, heads, dim = query.shape
    longest = int(seq_lens.max())
    starts = torch.arange(requests + 1, dtype=torch.int32, device=query.device)
    values, plain = query[..., :latent].contiguous(), query[..., latent:].contiguous()
    metadata = get_scheduler_metadata(
        batch_size=requests, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=heads, num_heads_kv=1, headdim=dim - latent, cache_seqlens=seq_lens,
        qkv_dtype=query.dtype, headdim_v=latent, page_size=rows.shape[1], cu_seqlens_q=starts, causal=True, num_splits=SPLITS_FOR_GRAPHS,
    )

    def launch() -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q=plain, k=rows[..., latent:], v=rows[..., :latent], q_v=values, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=longest, seqused_k=seq_lens,
            block_table=block_table, softmax_scale=scale, causal=True, return_softmax_lse=False, fa_version=3, scheduler_metadata=metadata,
            num_splits=SPLITS_FOR_GRAPHS,
        )
        return out

    return launch
