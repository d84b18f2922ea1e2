"""Portable twin of the CUDA attend kernel: pages of one (request, kv head) in splits, then one program per query head merges them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvskim.layout import PAGE_TOKENS


@triton.jit
def _widen_e4m3(byte):
    """e4m3 to float32 by its bits: as fp16 with the exponent field moved, the value is 256 times too small, subnormals included."""
    bits = byte.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def _live_count(seq_lens, counts, request, pair, table_capacity):
    """Tokens of the request, pages to attend, and how many of them the table names (none when it is the identity)."""
    tokens = tl.maximum(tl.load(seq_lens + request), 0)
    total = (tokens + 15) // 16
    count = tl.minimum(tl.maximum(tl.load(counts + pair), 0), total)
    from_table = tl.where(count == total, 0, tl.minimum(count, table_capacity))
    count = tl.where(count == total, count, from_table)
    return tokens, count, from_table


@triton.jit
def _split_kernel(
    query, key_cache, value_cache, block_table, seq_lens, pages, counts, partials, partial_pairs,
    query_stride_r, query_stride_h, key_stride_b, key_stride_t, key_stride_h, value_stride_b, value_stride_t, value_stride_h, table_stride,
    table_capacity, splits, pages_per_split, logit_scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr,
    TILE_PAGES: tl.constexpr, SOFTCAP: tl.constexpr, EIGHT_BIT: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Maximum, sum and weighted values over every live-splits-th page, TILE_PAGES pages at a time. Logits are in base 2."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    request = pair // HEADS
    head = pair % HEADS
    tokens, count, from_table = _live_count(seq_lens, counts, request, pair, table_capacity)
    live_splits = tl.minimum(splits, (count + pages_per_split - 1) // pages_per_split)
    if split >= live_splits:
        return
    g = tl.arange(0, 16)
    d = tl.arange(0, DIM_PADDED)
    t = tl.arange(0, TILE_PAGES * 16)
    in_row = d < DIM
    q = tl.load(
        query + request.to(tl.int64) * query_stride_r + (head * GROUP + g)[:, None] * query_stride_h + d[None, :],
        mask=(g < GROUP)[:, None] & in_row[None, :], other=0.0,
    )
    maximum = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    output = tl.zeros([16, DIM_PADDED], tl.float32)
    for start in range(0, count, TILE_PAGES * live_splits):
        index = start + split + (t // 16) * live_splits
        listed = index < count
        page = tl.load(pages + pair.to(tl.int64) * table_capacity + index, mask=index < from_table, other=0)
        page = tl.where(index < from_table, page, index)
        position = page * 16 + t % 16
        live = listed & (page >= 0) & (position < tokens)
        block = tl.load(block_table + request.to(tl.int64) * table_stride + page // PAGES_PER_BLOCK, mask=live, other=0).to(tl.int64)
        in_block = (page % PAGES_PER_BLOCK) * 16 + t % 16
        present = live[:, None] & in_row[None, :]
        key_rows = key_cache + block * key_stride_b + in_block * key_stride_t + head * key_stride_h
        k = tl.load(key_rows[:, None] + d[None, :], mask=present, other=0)
        value_rows = value_cache + block * value_stride_b + in_block * value_stride_t + head * value_stride_h
        v = tl.load(value_rows[:, None] + d[None, :], mask=present, other=0)
        if EIGHT_BIT:
            k = _widen_e4m3(k).to(q.dtype)
            v = _widen_e4m3(v).to(q.dtype)
        if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16 operands
            x = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision=PRECISION) * logit_scale
        else:
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * logit_scale
        if SOFTCAP:
            x = softcap * (1.0 - 2.0 / (tl.exp2(2.0 * 1.4426950408889634 / softcap * x) + 1.0))
        x *= 1.4426950408889634
        x = tl.where(live[None, :], x, float("-inf"))
        raised = tl.maximum(maximum, tl.max(x, 1))
        shrink = tl.exp2(maximum - raised)
        weights = tl.exp2(x - raised[:, None])
        total = total * shrink + tl.sum(weights, 1)
        output = output * shrink[:, None]
        if INTERPRETED:
            output += tl.dot(weights.to(v.dtype).to(tl.float32), v.to(tl.float32), input_precision=PRECISION)
        else:
            output += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        maximum = raised
    line = (pair.to(tl.int64) * splits + split) * GROUP + g
    tl.store(partials + line[:, None] * DIM + d[None, :], output, mask=(g < GROUP)[:, None] & in_row[None, :])
    tl.store(partial_pairs + line * 2, maximum, mask=g < GROUP)
    tl.store(partial_pairs + line * 2 + 1, total, mask=g < GROUP)


@triton.jit
def _merge_kernel(
    partials, partial_pairs, seq_lens, counts, out, lse, out_stride_r, out_stride_h, table_capacity, splits, pages_per_split, v_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, WITH_LSE: tl.constexpr,
):
    """One program per query head."""
    request = tl.program_id(0)
    query_head = tl.program_id(1)
    pair = request * HEADS + query_head // GROUP
    _tokens, count, _from_table = _live_count(seq_lens, counts, request, pair, table_capacity)
    live_splits = tl.minimum(splits, (count + pages_per_split - 1) // pages_per_split)
    d = tl.arange(0, DIM_PADDED)
    in_row = d < DIM
    first = pair.to(tl.int64) * splits * GROUP + query_head % GROUP
    maximum = -1e30
    for s in range(0, live_splits):
        maximum = tl.maximum(maximum, tl.load(partial_pairs + (first + s * GROUP) * 2))
    total = 0.0
    output = tl.zeros([DIM_PADDED], tl.float32)
    for s in range(0, live_splits):
        line = first + s * GROUP
        weight = tl.exp2(tl.load(partial_pairs + line * 2) - maximum)
        total += weight * tl.load(partial_pairs + line * 2 + 1)
        output += weight * tl.load(partials + line * DIM + d, mask=in_row, other=0.0)
    empty = total == 0.0
    norm = tl.where(empty, 0.0, v_scale / tl.where(empty, 1.0, total))
    row = out + request.to(tl.int64) * out_stride_r + query_head * out_stride_h
    tl.store(row + d, (output * norm).to(out.dtype.element_ty), mask=in_row)
    if WITH_LSE:
        log_total = tl.log(tl.where(empty, 1.0, total))
        tl.store(lse + request * HEADS * GROUP + query_head, tl.where(empty, float("-inf"), maximum * 0.6931471805599453 + log_total))


def attend_triton(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, out: Tensor,
    lse: Tensor | None, partials: Tensor, splits: int, pages_per_split: int, scale: float, softcap: float, k_scale: float, v_scale: float,
) -> None:
    """Arguments as checked by `kvskim.ops.attend.attend`; splits and pages_per_split from `kvskim.ops.attend_plan.attend_plan`."""
    requests, query_heads, dim = query.shape
    heads = key_cache.shape[2]
    group = query_heads // heads
    padded = max(16, triton.next_power_of_2(dim))
    eight_bit = key_cache.element_size() == 1
    if eight_bit:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    pairs = partials[requests * heads * splits * group * dim :]
    _split_kernel[(requests * heads, splits)](
        query, key_cache, value_cache, block_table, seq_lens, pages, counts, partials, pairs,
        query.stride(0), query.stride(1), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), block_table.stride(0),
        pages.shape[2], splits, pages_per_split, scale * k_scale, softcap,
        HEADS=heads, GROUP=group, DIM=dim, DIM_PADDED=padded, PAGES_PER_BLOCK=key_cache.shape[1] // PAGE_TOKENS,
        TILE_PAGES=4 if padded <= 128 else 2, SOFTCAP=softcap > 0, EIGHT_BIT=eight_bit, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        INTERPRETED=query.device.type == "cpu", num_warps=4, num_stages=2,
    )
    _merge_kernel[(requests, query_heads)](
        partials, pairs, seq_lens, counts, out, query if lse is None else lse, out.stride(0), out.stride(1), pages.shape[2], splits,
        pages_per_split, v_scale, HEADS=heads, GROUP=group, DIM=dim, DIM_PADDED=padded, WITH_LSE=lse is not None, num_warps=4,
    )
