"""Exact log-mass of the always-attended pages, and the static part of every score. Shared by the score kernels of all selectors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.triton.page_loads import CHANNELS
from kvskim.tier.pages import HostTier


@triton.jit
def soft_capped(x, softcap):
    """``softcap tanh(x / softcap)`` with tanh(y) = 1 - 2 / (exp(2 y) + 1), exact at both infinities."""
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * (x / softcap)) + 1.0))


# Sizes of a batch are not specialised: one compilation serves every batch.
@triton.jit(do_not_specialize=["table_stride", "sink_pages", "window_pages"])
def _forced_kernel(
    query, key_cache, hot, directory, block_table, seq_lens, offset, forced, base,
    query_stride_r, query_stride_h, key_stride_b, key_stride_t, key_stride_h, table_stride,
    scale, softcap, k_scale, sink_pages, window_pages,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_STORED: tl.constexpr, HEAD_DIM: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, HEAD_TILES: tl.constexpr, TIERED: tl.constexpr,
):
    """One program per (request, kv head, 16 query heads): online log-sum-exp over the first and the last pages of the request.

    WIDE: products in float32, for queries and keys of different types and for the interpreter. TIERED: ``key_cache`` is in a
    `kvskim.tier.pages.HostTier`, whose blocks are pages and whose slots lie as its kv heads do; hot pages are read from their slots.
    """
    request = tl.program_id(0)
    head = tl.program_id(1) // HEAD_TILES
    seq_len = tl.load(seq_lens + request)
    if seq_len <= 0:
        return
    g = tl.program_id(1) % HEAD_TILES * 16 + tl.arange(0, 16)
    t = tl.arange(0, 16)
    d = tl.arange(0, STEP)
    in_group = g < GROUP
    query_row = query + request.to(tl.int64) * query_stride_r + (head * GROUP + g)[:, None] * query_stride_h
    static = tl.zeros([16], tl.float32)
    for start in range(0, HEAD_DIM, STEP):
        c = start + d
        q = tl.load(query_row + c[None, :], mask=in_group[:, None] & (c < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
        o = tl.load(offset + head * HEAD_DIM + c, mask=c < HEAD_DIM, other=0.0)
        static += tl.sum(q * o[None, :], 1)
    static *= scale

    total = (seq_len + 15) // 16
    count = tl.minimum(total, sink_pages + window_pages)
    peak = tl.full([16], float("-inf"), tl.float32)
    mass = tl.zeros([16], tl.float32)
    for i in range(0, count):
        page = tl.where(i < sink_pages, i, total - count + i)
        block = tl.load(block_table + request.to(tl.int64) * table_stride + page // PAGES_PER_BLOCK).to(tl.int64)
        token = page * 16 + t
        live = token < seq_len
        in_block = (page % PAGES_PER_BLOCK) * 16 + t
        key_row = key_cache + block * key_stride_b + in_block[None, :] * key_stride_t + head * key_stride_h
        if TIERED:
            place = tl.load(directory + block * KV_HEADS + head).to(tl.int64)
            if place > 0:
                key_row = hot + (place - 1) * key_stride_h + in_block[None, :] * key_stride_t
        logits = tl.zeros([16, 16], tl.float32)
        for start in range(0, HEAD_DIM, STEP):
            c = start + d
            q = tl.load(query_row + c[None, :], mask=in_group[:, None] & (c < HEAD_DIM)[None, :], other=0.0)
            k = tl.load(key_row + c[:, None], mask=live[None, :] & (c < HEAD_DIM)[:, None], other=0.0)
            if WIDE:
                q = q.to(tl.float32)
                k = k.to(tl.float32)
            logits = tl.dot(q, k, logits, input_precision="ieee")
        logits *= scale * k_scale
        if SOFTCAP:
            logits = soft_capped(logits, softcap)
        logits = tl.where(live[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        mass = mass * tl.exp(peak - new_peak) + tl.sum(tl.exp(logits - new_peak[:, None]), 1)
        peak = new_peak
    at = (request.to(tl.int64) * KV_HEADS + head) * GROUP_STORED + g
    tl.store(forced + at, peak + tl.log(mass) - static, mask=in_group)
    tl.store(base + at, static, mask=in_group)


def forced_mass(
    query: Tensor, key_cache: Tensor, block_table: Tensor, seq_lens: Tensor, offset: Tensor, *, scale: float, softcap: float | None,
    sink_pages: int, window_pages: int, k_scale: float, forced: Tensor, base: Tensor, tier: HostTier | None = None,
) -> None:
    """Exact log-sum-exp over the always-attended pages, minus ``base``, and ``base = scale q . offset``.

    ``forced_g = log sum_t exp(cap(scale q_g . k_t)) - base_g`` over the tokens of the first ``sink_pages`` and the last ``window_pages`` pages.

    Args:
        query: ``[R, Hq, D]``, last dimension contiguous.
        key_cache: ``[blocks, block_size, H, D]``, any strides, last dimension contiguous; times ``k_scale`` it is the keys.
        block_table: int32 ``[R, blocks of a request]``.
        seq_lens: int32 ``[R]``; rows of 0 tokens are left alone.
        offset: float32 ``[H, D]``, contiguous: static offset or mean key of the selector.
        scale: softmax scale.
        softcap: logit soft cap; None or 0 for none.
        sink_pages: pages at the start that are always attended.
        window_pages: pages at the end that are always attended, at least 1.
        k_scale: factor from stored to real keys.
        forced: float32 ``[R, H, padded group]``, contiguous; written for the first ``Hq / H`` columns.
        base: the same.
        tier: holds ``key_cache``, or None; what of it is hot is read from there.

    Source: docs/how-it-works.md, section "Scores".
    """
    requests, heads = query.shape[0], key_cache.shape[2]
    if requests == 0:
        return
    tiles = ceil_div(query.shape[1] // heads, 16)
    _forced_kernel[(requests, heads * tiles)](
        query, key_cache, key_cache if tier is None else tier.hot, block_table if tier is None else tier.directory, block_table, seq_lens, offset,
        forced, base, query.stride(0), query.stride(1), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), block_table.stride(0),
        scale, softcap or 0.0, k_scale, sink_pages, window_pages,
        KV_HEADS=heads, GROUP=query.shape[1] // heads, GROUP_STORED=forced.shape[2], HEAD_DIM=query.shape[2],
        PAGES_PER_BLOCK=key_cache.shape[1] // PAGE_TOKENS, SOFTCAP=bool(softcap), STEP=CHANNELS,
        WIDE=query.is_cpu or query.dtype != key_cache.dtype, HEAD_TILES=tiles, TIERED=tier is not None, num_warps=2,
    )
