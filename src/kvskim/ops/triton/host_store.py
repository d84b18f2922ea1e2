"""Write-through of new value rows: one program per token, to the host pool and to the hot copies of its page, where there are some."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvskim.tier.values import ValueTier


@triton.jit
def _store_kernel(
    values, slot_mapping, host, hot, directory, value_stride_t, value_stride_h, num_pages,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    if (slot < 0) | (slot // 16 >= num_pages):
        return
    head = tl.arange(0, HEADS_PADDED)
    d = tl.arange(0, DIM_PADDED)[None, :]
    written = (head < HEADS)[:, None] & (d < DIM)
    rows = tl.load(values + token.to(tl.int64) * value_stride_t + head[:, None] * value_stride_h + d, mask=written, other=0)
    key = slot // 16 * HEADS + head
    tl.store(host + ((key * 16 + slot % 16) * DIM)[:, None] + d, rows, mask=written)
    place = tl.load(directory + key, mask=head < HEADS, other=0).to(tl.int64)
    tl.store(hot + (((place - 1) * 16 + slot % 16) * DIM)[:, None] + d, rows, mask=written & (place > 0)[:, None])


def store_triton(tier: ValueTier, values: Tensor, slot_mapping: Tensor) -> None:
    """Arguments as checked by `kvskim.ops.store.store`."""
    dim = values.shape[2]
    _store_kernel[(slot_mapping.shape[0],)](
        values, slot_mapping, tier.host, tier.hot, tier.directory, values.stride(0), values.stride(1), tier.pages,
        HEADS=tier.heads, HEADS_PADDED=triton.next_power_of_2(tier.heads), DIM=dim, DIM_PADDED=triton.next_power_of_2(dim), num_warps=4,
    )
