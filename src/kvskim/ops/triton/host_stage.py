"""Keys and values of contexts into a cache of their own: one program per page and kv head, whose rows lie together on the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.tier.pages import HostTier

FEW_ROWS = 16
"""Steps of up to so many prompts share one compiled kernel: a prompt that comes along with others should not wait for a compiler."""


@triton.jit(do_not_specialize=["rows", "table_stride"])
def _stage_kernel(
    host, hot, directory, key_cache, block_table, context_lens, starts, staged, key_stride_b, key_stride_t, key_stride_h, table_stride, rows,
    ROWS_PADDED: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
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
    key = (block * PAGES_PER_BLOCK + in_block) * HEADS + head
    place = tl.load(directory + key).to(tl.int64)
    value_row = (PARTS - 1) * 16 + t
    if place > 0:
        values = tl.load(hot + ((place - 1) * (PARTS * 16) + value_row) * DIM + d, mask=in_row, other=0)
    else:
        values = tl.load(host + (key * (PARTS * 16) + value_row) * DIM + d, mask=in_row, other=0)
    if PARTS == 1:
        keys = tl.load(key_cache + block * key_stride_b + (in_block * 16 + t) * key_stride_t + head * key_stride_h + d, mask=in_row, other=0)
    elif place > 0:
        keys = tl.load(hot + ((place - 1) * (PARTS * 16) + t) * DIM + d, mask=in_row, other=0)
    else:
        keys = tl.load(host + (key * (PARTS * 16) + t) * DIM + d, mask=in_row, other=0)
    tokens: tl.constexpr = PAGES_PER_BLOCK * 16
    to = staged + ((own_block.to(tl.int64) * 2 * tokens + in_block * 16 + t) * HEADS + head) * DIM + d
    tl.store(to, keys, mask=in_row)
    tl.store(to + tokens * HEADS * DIM, values, mask=in_row)


def padded_rows(rows: int) -> int:
    """Rows that the kernel for ``rows`` prompts is compiled for."""
    return max(FEW_ROWS, triton.next_power_of_2(rows))


def stage_triton(
    tier: HostTier, key_cache: Tensor | None, block_table: Tensor, context_lens: Tensor, starts: Tensor, staged: Tensor, pages: int
) -> None:
    """Arguments as checked by `kvskim.ops.stage.stage`; pages: of all blocks that may be staged."""
    rows = context_lens.shape[0]
    strides = (0, 0, 0) if key_cache is None else key_cache.stride()[:3]
    _stage_kernel[(pages, tier.heads)](
        tier.host, tier.hot, tier.directory, tier.hot if key_cache is None else key_cache, block_table, context_lens, starts, staged, *strides,
        block_table.stride(0), rows, ROWS_PADDED=padded_rows(rows), HEADS=tier.heads, PARTS=tier.host.shape[2], DIM=tier.dim,
        DIM_PADDED=triton.next_power_of_2(tier.dim), PAGES_PER_BLOCK=staged.shape[2] // PAGE_TOKENS, num_warps=4,
    )
