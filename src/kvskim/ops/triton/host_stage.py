"""Keys and values of contexts into a cache of their own: one program per page and kv head, where the values lie together on the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.tier.values import ValueTier


@triton.jit(do_not_specialize=["rows", "table_stride"])
def _stage_kernel(
    host, hot, directory, key_cache, block_table, context_lens, starts, staged, key_stride_b, key_stride_t, key_stride_h, table_stride, rows,
    ROWS_PADDED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    head = tl.program_id(1)
    own_block = index // PAGES_PER_BLOCK
    r = tl.arange(0, ROWS_PADDED)
    ends = tl.load(starts + 1 + r, mask=r < rows, other=2147483647)
    row = tl.sum((ends <= own_block).to(tl.int32), 0)
    if row >= rows:
        return
    page = (own_block - tl.load(starts + row)) * PAGES_PER_BLOCK + index % PAGES_PER_BLOCK
    if page * 16 >= tl.load(context_lens + row):
        return
    block = tl.load(block_table + row.to(tl.int64) * table_stride + page // PAGES_PER_BLOCK).to(tl.int64)
    in_block = page % PAGES_PER_BLOCK
    t = tl.arange(0, 16)[:, None]
    d = tl.arange(0, DIM_PADDED)[None, :]
    in_row = d < DIM
    keys = tl.load(key_cache + block * key_stride_b + (in_block * 16 + t) * key_stride_t + head * key_stride_h + d, mask=in_row, other=0)
    key = (block * PAGES_PER_BLOCK + in_block) * HEADS + head
    place = tl.load(directory + key).to(tl.int64)
    if place > 0:
        values = tl.load(hot + ((place - 1) * 16 + t) * DIM + d, mask=in_row, other=0)
    else:
        values = tl.load(host + (key * 16 + t) * DIM + d, mask=in_row, other=0)
    tokens: tl.constexpr = PAGES_PER_BLOCK * 16
    to = staged + ((own_block.to(tl.int64) * 2 * tokens + in_block * 16 + t) * HEADS + head) * DIM + d
    tl.store(to, keys, mask=in_row)
    tl.store(to + tokens * HEADS * DIM, values, mask=in_row)


def stage_triton(
    tier: ValueTier, key_cache: Tensor, block_table: Tensor, context_lens: Tensor, starts: Tensor, staged: Tensor, pages: int
) -> None:
    """Arguments as checked by `kvskim.ops.stage.stage`; pages: of all blocks that may be staged."""
    _, block_size, heads, dim = key_cache.shape
    rows = context_lens.shape[0]
    _stage_kernel[(pages, heads)](
        tier.host, tier.hot, tier.directory, key_cache, block_table, context_lens, starts, staged, key_cache.stride(0), key_cache.stride(1),
        key_cache.stride(2), block_table.stride(0), rows, ROWS_PADDED=triton.next_power_of_2(rows), HEADS=heads, DIM=dim,
        DIM_PADDED=triton.next_power_of_2(dim), PAGES_PER_BLOCK=block_size // PAGE_TOKENS, num_warps=4,
    )
