"""What the two kernels of a split of attend have in common: which tokens a tile has, the running softmax, and where the sums go."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def live_count(seq_lens, counts, request, pair, table_capacity):
    """Tokens of the request, pages to attend, and how many of them the table names (none when it is the identity)."""
    tokens = tl.maximum(tl.load(seq_lens + request), 0)
    total = (tokens + 15) // 16
    count = tl.minimum(tl.maximum(tl.load(counts + pair), 0), total)
    from_table = tl.where(count == total, 0, tl.minimum(count, table_capacity))
    count = tl.where(count == total, count, from_table)
    return tokens, count, from_table


@triton.jit
def tile_tokens(
    pages, block_table, request, pair, first, live_splits, t, tokens, count, from_table, table_stride, table_capacity, PAGES_PER_BLOCK: tl.constexpr
):
    """Of the tokens ``t`` of a tile, whose pages are those ``first``, ``first + live_splits`` and so on of the selection: page, block (int64), place in the
    block, and whether there is such a token."""
    index = first + (t // 16) * live_splits
    page = tl.load(pages + pair.to(tl.int64) * table_capacity + index, mask=index < from_table, other=0)
    page = tl.where(index < from_table, page, index)
    live = (index < count) & (page >= 0) & (page * 16 + t % 16 < tokens)
    block = tl.load(block_table + request.to(tl.int64) * table_stride + page // PAGES_PER_BLOCK, mask=live, other=0).to(tl.int64)
    return page, block, (page % PAGES_PER_BLOCK) * 16 + t % 16, live


@triton.jit
def product(a, b, accumulator, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Matrix product in float32, added to ``accumulator`` where that is not None."""
    if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16 operands
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision=PRECISION)
    else:
        out = tl.dot(a, b, accumulator, input_precision=PRECISION)
    return out


@triton.jit
def next_softmax(x, live, logit_scale, softcap, maximum, total, SOFTCAP: tl.constexpr):
    """Weights of a tile with query-key products ``x``, the factor that shrinks the sums before it, and maximum and sum with it. Logits are in base 2."""
    x *= logit_scale
    if SOFTCAP:
        x = softcap * (1.0 - 2.0 / (tl.exp2(2.0 * 1.4426950408889634 / softcap * x) + 1.0))
    x *= 1.4426950408889634
    x = tl.where(live[None, :], x, float("-inf"))
    raised = tl.maximum(maximum, tl.max(x, 1))
    shrink = tl.exp2(maximum - raised)
    weights = tl.exp2(x - raised[:, None])
    return weights, shrink, raised, total * shrink + tl.sum(weights, 1)


@triton.jit
def store_sums(partials, partial_pairs, pair, split, splits, g, e, output, maximum, total, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Weighted values, maximum and sum of a split, for the merge."""
    line = (pair.to(tl.int64) * splits + split) * GROUP + g
    tl.store(partials + line[:, None] * VALUE_DIM + e[None, :], output, mask=(g < GROUP)[:, None] & (e < VALUE_DIM)[None, :])
    tl.store(partial_pairs + line * 2, maximum, mask=g < GROUP)
    tl.store(partial_pairs + line * 2 + 1, total, mask=g < GROUP)
