"""Public op ``stage``: keys and values of the contexts of several requests, together in GPU memory, for the attention of their prompts.

Attention to a prompt reads a cache with one block table for keys and values. Where values, or both, are on the host, a copy of what the rows of a step
need takes the place of the cache: the rows' blocks one after the other, in the order of their tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.tier.pages import HostTier, check_tier
from kvskim.tier.torch_pages import stage_torch


def stage(
    tier: HostTier, key_cache: Tensor | None, block_table: Tensor, context_lens: Tensor, starts: Tensor, staged: Tensor, *, blocks: int, kernels: str
) -> None:
    """Copy every page that holds a token of a context; rows of the pages beyond the context, and all other pages, are arbitrary or left alone.

    What is in the tier comes from the hot cache where it is hot, else from the host; the hot cache is not changed.

    Args:
        tier: the values of all pages of ``key_cache``, or keys and values.
        key_cache: ``[blocks, block_size, H, D]`` of any strides with contiguous rows; None where the tier holds keys.
        block_table: int32 ``[R, columns]``; only entries of blocks with a token of a context are read.
        context_lens: int32 ``[R]``: tokens of each row to copy, from its first on.
        starts: int32 ``[R + 1]``, not falling: row r takes the blocks ``starts[r]`` to ``starts[r + 1] - 1`` of ``staged``, enough for its context.
        staged: ``[S, 2, block_size, H, D]`` contiguous, keys and values, written.
        blocks: at least ``starts[R]`` and at most S, known to the host.
        kernels: cuda, triton or torch; under "cuda" the Triton kernel copies.

    Raises:
        ValueError: an argument has another shape, dtype, stride or device than said here.

    Allocates nothing and never waits for the device (triton).
    """
    if kernels not in ("cuda", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
    if (key_cache is None) != tier.with_keys:
        raise ValueError("the tier holds keys and values; leave key_cache out" if tier.with_keys else "the tier holds values and no keys; pass key_cache")
    block_size = staged.shape[2] if staged.dim() == 5 else 0
    if key_cache is not None:
        check_tier(tier, key_cache)
        block_size = key_cache.shape[1]
        if key_cache.stride(3) != 1:
            raise ValueError("the rows of key_cache must be contiguous")
    fits = staged.dim() == 5 and tuple(staged.shape[1:]) == (2, block_size, tier.heads, tier.dim) and block_size > 0 and block_size % PAGE_TOKENS == 0
    if not fits or not staged.is_contiguous() or staged.dtype != tier.hot.dtype:
        raise ValueError(
            f"staged is {staged.dtype} {list(staged.shape)}; expected contiguous {tier.hot.dtype} [blocks, 2, block size, {tier.heads}, {tier.dim}]"
        )
    rows = context_lens.shape[0]
    for name, tensor, shape in (
        ("block_table", block_table, (rows, block_table.shape[-1])), ("context_lens", context_lens, (rows,)), ("starts", starts, (rows + 1,)),
    ):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected int32 {list(shape)}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the rows of {name} must be contiguous")
    if not 0 <= blocks <= staged.shape[0]:
        raise ValueError(f"{blocks} blocks are to be staged, and there is room for {staged.shape[0]}")
    for name, tensor in (("staged", staged), ("block_table", block_table), ("context_lens", context_lens), ("starts", starts)):
        if tensor.device != tier.device:
            raise ValueError(f"{name} is on {tensor.device} and the tier on {tier.device}; both must be on one device")
    if blocks == 0 or rows == 0:
        return
    if kernels == "torch":
        stage_torch(tier, key_cache, block_table, context_lens, starts, staged)
    else:
        from kvskim.ops.triton.host_stage import stage_triton

        stage_triton(tier, key_cache, block_table, context_lens, starts, staged, blocks * (block_size // PAGE_TOKENS))
