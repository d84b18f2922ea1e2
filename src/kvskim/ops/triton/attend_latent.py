"""Splits of attend where the values are the first channels of the key rows (latent attention): every row is loaded once.

With a latent part of ``VALUE_DIM`` channels and a rotary part of ``REST``, a token's logit is ``q[:VALUE_DIM] . c + q[VALUE_DIM:] . r`` and its value
is ``c``. Partial sums lie as those of `kvskim.ops.triton.attend`, whose second kernel merges them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvskim.ops.triton.attend_parts import live_count, next_softmax, product, store_sums, tile_tokens


def latent_form(head_block: int) -> dict[str, int]:
    """Pages of a tile, warps and stages of `latent_split_kernel`, so that queries, tiles and sums of 576 channels fit a Hopper multiprocessor.

    With 16 query heads a tile of four pages is what a split usually has to do, so that its loads are one latency after the other only once.
    """
    return {"TILE_PAGES": 4 if head_block <= 32 else 2, "num_warps": 8, "num_stages": 2}


# Sizes of a batch are not specialised: one compilation serves every batch.
@triton.jit(do_not_specialize=["table_stride", "table_capacity", "splits", "pages_per_split"])
def latent_split_kernel(
    query, rest_query, cache, block_table, seq_lens, pages, counts, partials, partial_pairs,
    query_stride_r, query_stride_h, rest_stride_r, rest_stride_h, stride_b, stride_t, stride_h, table_stride, table_capacity, splits, pages_per_split,
    logit_scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCK: tl.constexpr, HEAD_BLOCKS: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, TILE_PAGES: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """One program per (request, kv head, block of query heads) and split. Logits are in base 2.

    ``query`` are the first VALUE_DIM channels of the queries, ``rest_query`` the others.

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
    rest_rows = rest_query + request.to(tl.int64) * rest_stride_r + (head * GROUP + g)[:, None] * rest_stride_h
    q_rest = tl.load(rest_rows + r[None, :], mask=in_group & in_rest, other=0.0)
    maximum = tl.full([HEAD_BLOCK], -1e30, tl.float32)
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    output = tl.zeros([HEAD_BLOCK, VALUE_PADDED], tl.float32)
    for start in range(0, count, TILE_PAGES * live_splits):
        _page, block, in_block, live = tile_tokens(
            pages, block_table, request, pair, start + split, live_splits, t, tokens, count, from_table, table_stride, table_capacity, PAGES_PER_BLOCK
        )
        rows = (cache + block * stride_b + in_block * stride_t + head * stride_h)[:, None]
        latent = tl.load(rows + e[None, :], mask=live[:, None] & in_value, other=0.0)
        rest = tl.load(rows + VALUE_DIM + r[None, :], mask=live[:, None] & in_rest, other=0.0)
        x = product(q_latent, tl.trans(latent), None, PRECISION, INTERPRETED)
        x = product(q_rest, tl.trans(rest), x, PRECISION, INTERPRETED)
        weights, shrink, maximum, total = next_softmax(x, live, logit_scale, softcap, maximum, total, SOFTCAP)
        output = output * shrink[:, None]
        output += product(weights.to(latent.dtype), latent, None, PRECISION, INTERPRETED)
    store_sums(partials, partial_pairs, pair, split, splits, g, e, output, maximum, total, GROUP, VALUE_DIM)
