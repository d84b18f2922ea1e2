"""Which page a program encodes, and its keys in float32, chunk by chunk of channels."""

from __future__ import annotations

import triton
import triton.language as tl

CHANNELS = 64
"""Channels per step; head dims that are no multiple (96) cost a masked tail, and none is padded to a power of two."""


@triton.jit
def completed_page(slot_mapping, num_pages):
    """``(slot, head, complete)`` of this program: grid axis 0 is the token of the step, axis 1 the kv head. Slots beyond the records are inert."""
    slot = tl.load(slot_mapping + tl.program_id(0)).to(tl.int64)
    return slot, tl.program_id(1), (slot >= 0) & (slot % 16 == 15) & (slot // 16 < num_pages)


@triton.jit
def load_keys(
    key_cache, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr,
):
    """Keys of the page that ``slot`` ends, channels ``start .. start + STEP``: float32 ``[16, STEP]``, 0 beyond the head dim."""
    t = (slot % BLOCK_SIZE - 15 + tl.arange(0, 16))[:, None]
    c = start + tl.arange(0, STEP)
    at = (slot // BLOCK_SIZE) * key_stride_b + t * key_stride_t + head * key_stride_h + c[None, :]
    return tl.load(key_cache + at, mask=(c < HEAD_DIM)[None, :], other=0.0).to(tl.float32) * k_scale


@triton.jit
def load_page(
    key_cache, offset, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr,
):
    """`load_keys` minus the static offset of the head."""
    x = load_keys(key_cache, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
    c = start + tl.arange(0, STEP)
    return x - tl.load(offset + head * HEAD_DIM + c, mask=c < HEAD_DIM, other=0.0)[None, :]
