"""Write-through of new rows: one program per token, to the host pool and to the hot copies of its page, where there are some."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvskim.tier.pages import HostTier


@triton.jit
def _store_kernel(
    keys, values, slot_mapping, host, hot, directory, key_stride_t, key_stride_h, value_stride_t, value_stride_h, num_pages,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    if (slot < 0) | (slot // 16 >= num_pages):
        return
    head = tl.arange(0, HEADS_PADDED)
    d = tl.arange(0, DIM_PADDED)[None, :]
    written = (head < HEADS)[:, None] & (d < DIM)
    key = slot // 16 * HEADS + head
    place = tl.load(directory + key, mask=head < HEADS, other=0).to(tl.int64)
    is_hot = written & (place > 0)[:, None]
    in_pool = host + ((key * (PARTS * 16) + slot % 16) * DIM)[:, None] + d
    in_slot = hot + (((place - 1) * (PARTS * 16) + slot % 16) * DIM)[:, None] + d
    if PARTS == 2:
        rows = tl.load(keys + token.to(tl.int64) * key_stride_t + head[:, None] * key_stride_h + d, mask=written, other=0)
        tl.store(in_pool, rows, mask=written)
        tl.store(in_slot, rows, mask=is_hot)
    at_values: tl.constexpr = (PARTS - 1) * 16 * DIM
    rows = tl.load(values + token.to(tl.int64) * value_stride_t + head[:, None] * value_stride_h + d, mask=written, other=0)
    tl.store(in_pool + at_values, rows, mask=written)
    tl.store(in_slot + at_values, rows, mask=is_hot)


def store_triton(tier: HostTier, keys: Tensor | None, values: Tensor, slot_mapping: Tensor) -> None:
    """Arguments as checked by `kvskim.ops.store.store`."""
    keys = values if keys is None else keys
    _store_kernel[(slot_mapping.shape[0],)](
        keys, values, slot_mapping, tier.host, tier.hot, tier.directory, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), tier.pages,
        HEADS=tier.heads, HEADS_PADDED=triton.next_power_of_2(tier.heads), PARTS=tier.host.shape[2], DIM=tier.dim,
        DIM_PADDED=triton.next_power_of_2(tier.dim), num_warps=4,
    )
