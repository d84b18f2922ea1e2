"""Portable twin of the CUDA attend kernel: pages of one (request, kv head) in splits, then one program per query head merges them.

Groups of more than 64 query heads take several programs per split. Where the values are the first channels of the keys in the same memory,
`kvskim.ops.triton.attend_latent` does the splits. Where values, or keys and values, are in host memory, the same kernel reads each page from its slot of
the hot cache, or from the host if it has none: the arithmetic, and so every bit of the result, is that of pages in GPU memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.ops.attend_plan import head_block, head_blocks
from kvskim.ops.latent_query import Query, parts_of
from kvskim.ops.triton.attend_latent import latent_form, latent_split_kernel
from kvskim.ops.triton.attend_parts import live_count, next_softmax, product, store_sums, tile_tokens
from kvskim.tier.pages import HostTier

WIDEST_WITH_MANY_HEADS = 256
"""Channels, padded, up to which one program of `_split_kernel` attends for more than 16 query heads: more do not fit in shared memory."""

MERGE_ELEMENTS = 8192
"""Partial values that one program of the merge holds in registers."""


@triton.jit
def _widen_e4m3(byte):
    """e4m3 to float32 by its bits: as fp16 with the exponent field moved, the value is 256 times too small, subnormals included."""
    bits = byte.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


# Sizes of a batch are not specialised: one compilation serves every batch.
@triton.jit(do_not_specialize=["table_stride", "table_capacity", "splits", "pages_per_split"])
def _split_kernel(
    query, key_cache, value_cache, hot, directory, block_table, seq_lens, pages, counts, partials, partial_pairs,
    query_stride_r, query_stride_h, key_stride_b, key_stride_t, key_stride_h, value_stride_b, value_stride_t, value_stride_h, table_stride,
    table_capacity, splits, pages_per_split, logit_scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCK: tl.constexpr, HEAD_BLOCKS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, TILE_PAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    EIGHT_BIT: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Maximum, sum and weighted values over every live-splits-th page, TILE_PAGES pages at a time. Logits are in base 2.

    PARTS above 0: of a `kvskim.tier.pages.HostTier`. ``value_cache`` is its host pool, whose strides are not used, nor is, with two parts, the key
    cache.
    """
    pair = tl.program_id(0) // HEAD_BLOCKS
    split = tl.program_id(1)
    request = pair // HEADS
    head = pair % HEADS
    tokens, count, from_table = live_count(seq_lens, counts, request, pair, table_capacity)
    live_splits = tl.minimum(splits, (count + pages_per_split - 1) // pages_per_split)
    if split >= live_splits:
        return
    g = tl.program_id(0) % HEAD_BLOCKS * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    d = tl.arange(0, DIM_PADDED)
    e = tl.arange(0, VALUE_PADDED)
    t = tl.arange(0, TILE_PAGES * 16)
    in_row = d < DIM
    in_value = e < VALUE_DIM
    q = tl.load(
        query + request.to(tl.int64) * query_stride_r + (head * GROUP + g)[:, None] * query_stride_h + d[None, :],
        mask=(g < GROUP)[:, None] & in_row[None, :], other=0.0,
    )
    maximum = tl.full([HEAD_BLOCK], -1e30, tl.float32)
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    output = tl.zeros([HEAD_BLOCK, VALUE_PADDED], tl.float32)
    for start in range(0, count, TILE_PAGES * live_splits):
        page, block, in_block, live = tile_tokens(
            pages, block_table, request, pair, start + split, live_splits, t, tokens, count, from_table, table_stride, table_capacity, PAGES_PER_BLOCK
        )
        if PARTS > 0:
            key = (block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK) * HEADS + head
            place = tl.load(directory + key, mask=live, other=0)
            is_hot = (live & (place > 0))[:, None]
            is_cold = (live & (place <= 0))[:, None]
            hot_rows = (hot + ((place - 1).to(tl.int64) * (PARTS * 16) + t % 16) * VALUE_DIM)[:, None]
            host_rows = (value_cache + (key * (PARTS * 16) + t % 16) * VALUE_DIM)[:, None]
            at = (PARTS - 1) * 16 * VALUE_DIM + e[None, :]
            v = tl.load(hot_rows + at, mask=is_hot & in_value[None, :], other=0)
            direct = tl.load(host_rows + at, mask=is_cold & in_value[None, :], other=0)
            v = tl.where((place > 0)[:, None], v, direct)
        else:
            value_rows = value_cache + block * value_stride_b + in_block * value_stride_t + head * value_stride_h
            v = tl.load(value_rows[:, None] + e[None, :], mask=live[:, None] & in_value[None, :], other=0)
        if PARTS == 2:
            k = tl.load(hot_rows + d[None, :], mask=is_hot & in_row[None, :], other=0)
            direct = tl.load(host_rows + d[None, :], mask=is_cold & in_row[None, :], other=0)
            k = tl.where((place > 0)[:, None], k, direct)
        else:
            key_rows = key_cache + block * key_stride_b + in_block * key_stride_t + head * key_stride_h
            k = tl.load(key_rows[:, None] + d[None, :], mask=live[:, None] & in_row[None, :], other=0)
        if EIGHT_BIT:
            k = _widen_e4m3(k).to(q.dtype)
            v = _widen_e4m3(v).to(q.dtype)
        x = product(q, tl.trans(k), None, PRECISION, INTERPRETED)
        weights, shrink, maximum, total = next_softmax(x, live, logit_scale, softcap, maximum, total, SOFTCAP)
        output = output * shrink[:, None]
        output += product(weights.to(v.dtype), v, None, PRECISION, INTERPRETED)
    store_sums(partials, partial_pairs, pair, split, splits, g, e, output, maximum, total, GROUP, VALUE_DIM)


@triton.jit(do_not_specialize=["table_capacity", "splits", "pages_per_split"])
def _merge_kernel(
    partials, partial_pairs, seq_lens, counts, out, lse, out_stride_r, out_stride_h, table_capacity, splits, pages_per_split, v_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, SPLITS_PADDED: tl.constexpr, WITH_LSE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per query head and CHANNELS channels; all splits are loaded at once, because one after the other is one latency after the other."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    query_head = tl.program_id(1)
    pair = request * HEADS + query_head // GROUP
    _tokens, count, _from_table = live_count(seq_lens, counts, request, pair, table_capacity)
    live_splits = tl.minimum(splits, (count + pages_per_split - 1) // pages_per_split)
    d = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    in_row = d < DIM
    s = tl.arange(0, SPLITS_PADDED)
    live = s < live_splits
    line = pair.to(tl.int64) * splits * GROUP + query_head % GROUP + s * GROUP
    peaks = tl.load(partial_pairs + line * 2, mask=live, other=-1e30)
    sums = tl.load(partial_pairs + line * 2 + 1, mask=live, other=0.0)
    values = tl.load(partials + line[:, None] * DIM + d[None, :], mask=live[:, None] & in_row[None, :], other=0.0)
    maximum = tl.max(peaks, 0)
    weight = tl.exp2(peaks - maximum)
    total = tl.sum(weight * sums, 0)
    empty = total == 0.0
    norm = tl.where(empty, 0.0, v_scale / tl.where(empty, 1.0, total))
    output = tl.sum(weight[:, None] * values, 0)
    row = out + request.to(tl.int64) * out_stride_r + query_head * out_stride_h
    tl.store(row + d, (output * norm).to(out.dtype.element_ty), mask=in_row)
    if WITH_LSE:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if tl.program_id(2) == 0:
            log_total = tl.log(tl.where(empty, 1.0, total))
            tl.store(lse + request * HEADS * GROUP + query_head, tl.where(empty, float("-inf"), maximum * 0.6931471805599453 + log_total))


def attend_triton(
    query: Query, key_cache: Tensor, values: Tensor | HostTier, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, out: Tensor,
    lse: Tensor | None, partials: Tensor, splits: int, pages_per_split: int, scale: float, softcap: float, k_scale: float, v_scale: float,
    shared_rows: bool, overlap: bool = False,
) -> None:
    """Arguments as checked by `kvskim.ops.attend.attend`; splits and pages_per_split from `kvskim.ops.attend_plan.attend_plan`.

    values: the value cache, or the tier where they are in host memory. shared_rows: the values are the first channels of the keys.
    overlap: programmatic dependent launches (only where rows are shared). Only there may the query be in parts, of which the first is as wide as values.
    """
    requests, query_heads, dim = query.shape
    if isinstance(values, HostTier):
        value_cache, hot, directory, parts, value_dim = values.host, values.hot, values.directory, values.host.shape[2], values.dim
    else:
        value_cache, hot, directory, parts, value_dim = values, values, block_table, 0, values.shape[3]
    heads = key_cache.shape[2]
    group = query_heads // heads
    padded, value_padded = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    eight_bit = key_cache.element_size() == 1
    if eight_bit:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        hot = value_cache
    pairs = partials[requests * heads * splits * group * value_dim :]
    block, blocks = head_block(group), head_blocks(group)
    if not shared_rows and max(padded, value_padded) > WIDEST_WITH_MANY_HEADS:
        block, blocks = 16, triton.cdiv(group, 16)
    overlap = overlap and shared_rows
    common: dict[str, Any] = dict(
        HEADS=heads, GROUP=group, HEAD_BLOCK=block, HEAD_BLOCKS=blocks, VALUE_DIM=value_dim, VALUE_PADDED=value_padded,
        PAGES_PER_BLOCK=key_cache.shape[1] // PAGE_TOKENS, SOFTCAP=softcap > 0, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        INTERPRETED=query.device.type == "cpu",
    )
    first, *others = parts_of(query)
    if shared_rows:
        rest = others[0] if others else first[..., value_dim:]
        latent_split_kernel[(requests * heads * blocks, splits)](
            first, rest, key_cache, block_table, seq_lens, pages, counts, partials, pairs,
            first.stride(0), first.stride(1), rest.stride(0), rest.stride(1), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
            block_table.stride(0),
            pages.shape[2], splits, pages_per_split, scale * k_scale, softcap,
            REST=dim - value_dim, REST_PADDED=max(16, triton.next_power_of_2(dim - value_dim)), OVERLAP=overlap, launch_pdl=overlap,
            **latent_form(block), **common,
        )
    else:
        _split_kernel[(requests * heads * blocks, splits)](
            first, key_cache, value_cache, hot, directory, block_table, seq_lens, pages, counts, partials, pairs,
            first.stride(0), first.stride(1), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
            value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), block_table.stride(0),
            pages.shape[2], splits, pages_per_split, scale * k_scale, softcap,
            DIM=dim, DIM_PADDED=padded, TILE_PAGES=4 if max(padded, value_padded) <= 128 else 2, EIGHT_BIT=eight_bit, PARTS=parts,
            num_warps=4 if block == 16 else 8, num_stages=2, **common,
        )
    splits_padded = triton.next_power_of_2(splits)
    channels = min(value_padded, max(16, MERGE_ELEMENTS // splits_padded))
    _merge_kernel[(requests, query_heads, triton.cdiv(value_dim, channels))](
        partials, pairs, seq_lens, counts, out, out if lse is None else lse, out.stride(0), out.stride(1), pages.shape[2], splits,
        pages_per_split, v_scale, HEADS=heads, GROUP=group, DIM=value_dim, CHANNELS=channels, SPLITS_PADDED=splits_padded,
        WITH_LSE=lse is not None, OVERLAP=overlap, launch_pdl=overlap, num_warps=4,
    )
