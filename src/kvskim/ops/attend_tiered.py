"""`kvskim.ops.attend` where values, or keys and values, are in host memory: the same sums in the same order, each page read from where it is."""

from __future__ import annotations

import functools

from torch import Tensor

from kvskim.ops.attend import AttendScratch, attending_kernels, check_arguments, check_cuda, check_splits, cluster_of, plan_of
from kvskim.ops.torch_attend import attend_rows, rows
from kvskim.tier.pages import HostTier, check_tier
from kvskim.tier.torch_pages import KEYS, VALUES, rows_of


def attend_tiered(
    query: Tensor, key_cache: Tensor, tier: HostTier, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, *,
    scale: float, softcap: float = 0.0, out: Tensor, lse: Tensor | None = None, scratch: AttendScratch | None, kernels: str,
    overlap_previous: bool = False,
) -> None:
    """Attention of one query token per request to the selected pages, bit for bit that of `kvskim.ops.attend.attend` with all of them on the GPU.

    Args:
        query, key_cache, block_table, seq_lens, pages, counts, scale, softcap, out, lse, scratch, kernels, overlap_previous: as there; float8 caches
            are not taken.
        tier: the values of all pages of ``key_cache``, or keys and values; then ``key_cache`` is the tier's own. Pages that a
            `kvskim.ops.fetch.fetch` of the same selection has made hot are read from GPU memory, all others from host memory.

    Raises:
        ValueError: an argument has another shape, dtype, stride or device than said here.

    Allocates nothing and never waits for the device (cuda, triton); safe in CUDA graphs.
    """
    # Values have the shape of keys; where they are is checked below.
    check_arguments(query, key_cache, key_cache, block_table, seq_lens, pages, counts, softcap, out, lse)
    check_tier(tier, key_cache)
    if kernels == "torch":
        values = functools.partial(rows_of, tier, part=VALUES)
        keys = functools.partial(rows_of, tier, part=KEYS) if tier.with_keys else functools.partial(rows, key_cache)
        attend_rows(
            query, key_cache, keys, values, block_table, seq_lens, pages, counts, scale=scale, softcap=softcap, k_scale=1.0, v_scale=1.0, out=out, lse=lse,
        )
        return
    if kernels not in ("cuda", "triton"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
    if scratch is None:
        raise ValueError(f"the {kernels} kernels of attend_tiered need scratch buffers; pass scratch")
    if query.shape[0] == 0:
        return
    plan = plan_of(query, key_cache, key_cache, block_table)
    splits = check_splits(query, key_cache, out, scratch, plan.splits)
    if attending_kernels(kernels, query.shape[1] // key_cache.shape[2], query.shape[2], query.shape[2]) == "cuda":
        from kvskim.ops.cuda.attend import attend_tiered_cuda

        check_cuda(query, key_cache, key_cache, out)
        attend_tiered_cuda(
            query, key_cache, tier.host, tier.hot, tier.directory, block_table, seq_lens, pages, counts, out, lse, scratch.attend_partials,
            scratch.attend_tickets, splits, plan.pages_per_split, cluster_of(query, key_cache, block_table, pages), scale, softcap, overlap_previous,
        )
        return
    from kvskim.ops.triton.attend import attend_triton

    attend_triton(
        query, key_cache, tier, block_table, seq_lens, pages, counts, out, lse, scratch.attend_partials, splits, plan.pages_per_split,
        scale, softcap, 1.0, 1.0, False,
    )
