"""Splits of attend where the values are the first channels of the key rows (latent attention): every row is loaded once.

With a latent part of ``VALUE_DIM`` channels and a rotary part of ``REST``, a token's logit is ``q[:VALUE_DIM] . c + q[VALUE_DIM:] . r`` and its value
is ``c``. Partial sums lie as those of `kvskim.ops.triton.attend`, whose second kernel merges them.
"""

from __future__ import annotations

import triton
import triton.language as tl


def latent_form(head_block: int) -> dict[str, int]:
    """Pages of a tile, warps and stages of `latent_split_kernel`, so that queries, tiles and sums of 576 channels fit a Hopper multiprocessor.

    With 16 query heads a tile of four pages is what a split usually has to do, so that its loads are one latency after the other only once.
    """
    return {"TILE_PAGES": 4 if head_block <= 32 else 2, "num_warps": 8, "num_stages": 2}


@triton.jit
def live_count(seq_lens, counts, request, pair, table_capacity):
    """Tokens of the request, pages to attend, and how many of them the table names (none when it is the identity)."""
    tokens = tl.maximum(tl.load(seq_lens + request), 0)
    total = (tokens + 15) // 16
    count = tl.minimum(tl.maximum(tl.load(counts + pair), 0), total)
    from_table = tl.where(count == total, 0, tl.minimum(count, table_capacity))
    count = tl.where(count == total, count, from_table)
    return tokens, count, from_table


# Sizes of a batch are not specialised: one compilation serves every batch.
@triton.jit(do_not_specialize=["table_stride", "table_capacity", "splits", "pages_per_split"])
def latent_split_kernel(
    query, cache, block_table, seq_lens, pages, counts, partials, partial_pairs,
    query_stride_r, query_stride_h, stride_b, stride_t, stride_h, table_stride, table_capacity, splits, pages_per_split, logit_scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCK: tl.constexpr, HEAD_BLOCKS: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, TILE_PAGES: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """One program per (request, kv head, block of query heads) and split. Logits are in base 2.

    OVERLAP: the launch may begin before the kernel ahead of it has ended, and waits here; and so may the merge behind it.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0) // HEAD_BLOCKS
    split = tl.program_id(1)
    request = pair // HEADS
    head = pair % HEADS
    tokens, count, from_table = live_count(seq_lens, counts, request, pair, table_capacity)
    live_splits = tl.minimum(splits, (count + pages_per_split - 1) // pages_per_split)
    if split >= live_splits:
        return
    g = tl.program_id(0) % HEAD_BLOCKS * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    e = tl.arange(0, VALUE_PADDED)
    r = tl.arange(0, REST_PADDED)
    t = tl.arange(0, TILE_PAGES * 16)
    in_group = (g < GROUP)[:, None]
    in_value = (e < VALUE_DIM)[None, :]
    in_rest = (r < REST)[None, :]
    query_rows = query + request.to(tl.int64) * query_stride_r + (head * GROUP + g)[:, None] * query_stride_h
    q_latent = tl.load(query_rows + e[None, :], mask=in_group & in_value, other=0.0)
    q_rest = tl.load(query_rows + VALUE_DIM + r[None, :], mask=in_group & in_rest, other=0.0)
    maximum = tl.full([HEAD_BLOCK], -1e30, tl.float32)
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    output = tl.zeros([HEAD_BLOCK, VALUE_PADDED], tl.float32)
    for start in range(0, count, TILE_PAGES * live_splits):
        index = start + split + (t // 16) * live_splits
        page = tl.load(pages + pair.to(tl.int64) * table_capacity + index, mask=index < from_table, other=0)
        page = tl.where(index < from_table, page, index)
        live = (index < count) & (page >= 0) & (page * 16 + t % 16 < tokens)
        block = tl.load(block_table + request.to(tl.int64) * table_stride + page // PAGES_PER_BLOCK, mask=live, other=0).to(tl.int64)
        in_block = (page % PAGES_PER_BLOCK) * 16 + t % 16
        rows = (cache + block * stride_b + in_block * stride_t + head * stride_h)[:, None]
        latent = tl.load(rows + e[None, :], mask=live[:, None] & in_value, other=0.0)
        rest = tl.load(rows + VALUE_DIM + r[None, :], mask=live[:, None] & in_rest, other=0.0)
        if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16 operands
            x = tl.dot(q_latent.to(tl.float32), tl.trans(latent.to(tl.float32)), input_precision=PRECISION)
            x = tl.dot(q_rest.to(tl.float32), tl.trans(rest.to(tl.float32)), x, input_precision=PRECISION)
        else:
            x = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
            x = tl.dot(q_rest, tl.trans(rest), x, input_precision=PRECISION)
        x *= logit_scale
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
            output += tl.dot(weights.to(latent.dtype).to(tl.float32), latent.to(tl.float32), input_precision=PRECISION)
        else:
            output += tl.dot(weights.to(latent.dtype), latent, input_precision=PRECISION)
        maximum = raised
    line = (pair.to(tl.int64) * splits + split) * GROUP + g
    tl.store(partials + line[:, None] * VALUE_DIM + e[None, :], output, mask=in_group & in_value)
    tl.store(partial_pairs + line * 2, maximum, mask=g < GROUP)
    tl.store(partial_pairs + line * 2 + 1, total, mask=g < GROUP)
