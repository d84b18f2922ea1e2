"""Encode for the selectors that code each page by itself: records of the pages that a step completes, from the paged KV cache.

One program per (token of the step, kv head). A program whose slot does not end a page leaves at once, so the step's ``slot_mapping`` is
all it needs to know. Torch twins: `kvskim.selectors`, one file per selector; the bytes follow their ``format``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvskim.ops.triton.encode_eigen import encode_eigen_kernel
from kvskim.ops.triton.page_loads import CHANNELS, completed_page, load_keys, load_page
from kvskim.ops.triton.record_fields import (
    bfloat16_bits,
    bfloat16_value,
    ceil_bfloat16_bits,
    floor_bfloat16_bits,
    round_half_even,
    store_bfloat16,
)
from kvskim.selectors.base import PageTables, Selector
from kvskim.selectors.clse import Clse
from kvskim.selectors.mean import Mean
from kvskim.selectors.minmax import MinMax
from kvskim.selectors.oracle import Oracle
from kvskim.selectors.quad import Quad
from kvskim.selectors.rki4 import PrincipalKeys


@triton.jit
def _mean_kernel(
    key_cache, slot_mapping, offset, records, num_pages, key_stride_b, key_stride_t, key_stride_h, k_scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, RECORD_BYTES: tl.constexpr, STEP: tl.constexpr,
):
    slot, head, complete = completed_page(slot_mapping, num_pages)
    if not complete:
        return
    record = records + ((slot // 16) * KV_HEADS + head) * RECORD_BYTES
    c = tl.arange(0, STEP)
    largest = 0.0
    check = 0.0
    for start in range(0, HEAD_DIM, STEP):
        x = load_page(key_cache, offset, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
        mean = tl.sum(x, 0) / 16
        check += tl.sum(mean * 0.0, 0)
        largest = tl.maximum(largest, tl.max(tl.abs(mean), 0))
    finite = check == 0.0
    bits = bfloat16_bits(tl.where(finite, largest, 0.0) / 127)
    scale = bfloat16_value(bits)
    empty = scale < 1e-30
    for start in range(0, HEAD_DIM, STEP):
        x = load_page(key_cache, offset, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
        mean = tl.where(finite & (not empty), tl.sum(x, 0) / 16, 0.0)
        code = tl.clamp(round_half_even(mean / tl.where(empty, 1.0, scale)), -127.0, 127.0)
        tl.store(record + start + c, code.to(tl.int32).to(tl.uint8), mask=start + c < HEAD_DIM)
    store_bfloat16(record + HEAD_DIM, tl.where(finite, tl.where(empty, 0, bits), 0x7FC0), True)


@triton.jit
def _bounds_kernel(
    key_cache, slot_mapping, offset, records, num_pages, key_stride_b, key_stride_t, key_stride_h, k_scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, RECORD_BYTES: tl.constexpr, STEP: tl.constexpr,
    NIBBLES: tl.constexpr,
):
    """minmax: bounds per channel, rounded outwards, as bfloat16 or as 4-bit codes between the extremes over the channels."""
    slot, head, complete = completed_page(slot_mapping, num_pages)
    if not complete:
        return
    record = records + ((slot // 16) * KV_HEADS + head) * RECORD_BYTES
    check = 0.0
    lo_least = float("inf")
    lo_most = float("-inf")
    hi_least = float("inf")
    hi_most = float("-inf")
    for start in range(0, HEAD_DIM, STEP):
        live = start + tl.arange(0, STEP) < HEAD_DIM
        x = load_page(key_cache, offset, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
        check += tl.sum(tl.sum(x * 0.0, 0), 0)
        lo = tl.min(x, 0)
        hi = tl.max(x, 0)
        lo_least = tl.minimum(lo_least, tl.min(tl.where(live, lo, float("inf")), 0))
        lo_most = tl.maximum(lo_most, tl.max(tl.where(live, lo, float("-inf")), 0))
        hi_least = tl.minimum(hi_least, tl.min(tl.where(live, hi, float("inf")), 0))
        hi_most = tl.maximum(hi_most, tl.max(tl.where(live, hi, float("-inf")), 0))
    broken = check != 0.0
    lo_zero = tl.where(broken, 0x7FC0, floor_bfloat16_bits(lo_least))
    hi_zero = tl.where(broken, 0x7FC0, floor_bfloat16_bits(hi_least))
    # The tiny factor keeps zero + 15 scale at or beyond the extreme in spite of float32 rounding.
    lo_scale = ceil_bfloat16_bits((lo_most - bfloat16_value(lo_zero)) / 15 * (1 + 1e-6))
    hi_scale = ceil_bfloat16_bits((hi_most - bfloat16_value(hi_zero)) / 15 * (1 + 1e-6))
    lo_scale = tl.where(bfloat16_value(lo_scale) < 1e-30, bfloat16_bits(1e-30 + 0.0 * lo_least), lo_scale)
    hi_scale = tl.where(bfloat16_value(hi_scale) < 1e-30, bfloat16_bits(1e-30 + 0.0 * hi_least), hi_scale)
    for start in range(0, HEAD_DIM, STEP):
        x = load_page(key_cache, offset, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
        lo = tl.min(x, 0)
        hi = tl.max(x, 0)
        if NIBBLES:
            pair = start // 2 + tl.arange(0, STEP // 2)
            live = pair < HEAD_DIM // 2
            lo_code = _bound_codes(lo, lo_zero, lo_scale, broken, False)
            hi_code = _bound_codes(hi, hi_zero, hi_scale, broken, True)
            lo_even, lo_odd = tl.split(tl.reshape(lo_code, (STEP // 2, 2)))
            hi_even, hi_odd = tl.split(tl.reshape(hi_code, (STEP // 2, 2)))
            tl.store(record + pair, (lo_even | (lo_odd << 4)).to(tl.uint8), mask=live)
            tl.store(record + HEAD_DIM // 2 + pair, (hi_even | (hi_odd << 4)).to(tl.uint8), mask=live)
        else:
            c = start + tl.arange(0, STEP)
            store_bfloat16(record + 2 * c, tl.where(broken, 0x7FC0, floor_bfloat16_bits(lo)), c < HEAD_DIM)
            store_bfloat16(record + 2 * HEAD_DIM + 2 * c, tl.where(broken, 0x7FC0, ceil_bfloat16_bits(hi)), c < HEAD_DIM)
    if NIBBLES:
        store_bfloat16(record + HEAD_DIM, tl.where(broken, 0x7FC0, lo_scale), True)
        store_bfloat16(record + HEAD_DIM + 2, lo_zero, True)
        store_bfloat16(record + HEAD_DIM + 4, tl.where(broken, 0x7FC0, hi_scale), True)
        store_bfloat16(record + HEAD_DIM + 6, hi_zero, True)


@triton.jit
def _bound_codes(bound, zero_bits, scale_bits, broken, UPPER: tl.constexpr):
    """Codes 0..15 (int32) with zero + code * scale on the outer side of the bound."""
    zero = bfloat16_value(zero_bits)
    scale = bfloat16_value(scale_bits)
    steps = tl.where(broken, 0.0, (bound - zero) / scale)
    code = tl.clamp(tl.ceil(steps) if UPPER else tl.floor(steps), 0.0, 15.0)
    decoded = zero + code * scale
    if UPPER:
        code += tl.where(decoded < bound, 1.0, 0.0)
    else:
        code -= tl.where(decoded > bound, 1.0, 0.0)
    return tl.clamp(tl.where(broken, 0.0, code), 0.0, 15.0).to(tl.int32)


@triton.jit
def _keys_kernel(
    key_cache, slot_mapping, records, num_pages, key_stride_b, key_stride_t, key_stride_h, k_scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr,
):
    """oracle: the keys themselves in float32; ``records`` is a float32 pointer."""
    slot, head, complete = completed_page(slot_mapping, num_pages)
    if not complete:
        return
    record = records + ((slot // 16) * KV_HEADS + head) * (16 * HEAD_DIM)
    t = tl.arange(0, 16)[:, None]
    for start in range(0, HEAD_DIM, STEP):
        c = start + tl.arange(0, STEP)[None, :]
        x = load_keys(key_cache, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
        tl.store(record + t * HEAD_DIM + c, x, mask=c < HEAD_DIM)


def encode_pages(
    selector: Selector, tables: PageTables, key_cache: Tensor, slot_mapping: Tensor, records: Tensor, *, k_scale: float = 1.0
) -> None:
    """Write the records of the pages that the tokens of ``slot_mapping`` complete. CUDA-graph safe: nothing is read on the host.

    Args:
        selector: one of rki4, r8, clse, quad, minmax, mean, oracle.
        tables: offset float32 ``[H, D]``, contiguous, on the device of the cache.
        key_cache: ``[blocks, block_size, H, D]``, any strides, last dimension contiguous; bfloat16, float16, float32 or float8_e4m3fn.
            Times ``k_scale`` it is the keys.
        slot_mapping: int64 ``[T]``: block * block_size + token in block; -1: padding. A slot that ends a page (slot % 16 == 15) makes its record.
        records: uint8 ``[pages, H, record_bytes]``, contiguous, indexed by physical page.

    Raises:
        ValueError: the selector has no such kernel.
    """
    tokens, (_, block_size, heads, head_dim) = slot_mapping.shape[0], key_cache.shape
    if tokens == 0:
        return
    grid = (tokens, heads)
    strides = (key_cache.stride(0), key_cache.stride(1), key_cache.stride(2))
    sizes = {"KV_HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "STEP": CHANNELS}
    width = selector.record_bytes(head_dim)
    if isinstance(selector, Mean):
        _mean_kernel[grid](key_cache, slot_mapping, tables.offset, records, records.shape[0], *strides, k_scale, RECORD_BYTES=width, num_warps=1, **sizes)
    elif isinstance(selector, MinMax):
        _bounds_kernel[grid](
            key_cache, slot_mapping, tables.offset, records, records.shape[0], *strides, k_scale, RECORD_BYTES=width, NIBBLES=selector.bits == 4,
            num_warps=1, **sizes,
        )
    elif isinstance(selector, Oracle):
        _keys_kernel[grid](key_cache, slot_mapping, records.view(torch.float32), records.shape[0], *strides, k_scale, num_warps=1, **sizes)
    elif isinstance(selector, (PrincipalKeys, Quad, Clse)):
        encode_eigen_kernel[grid](
            key_cache, slot_mapping, tables.offset, records, records.shape[0], *strides, k_scale, RECORD_BYTES=width, num_warps=1, **sizes,
            **_eigen_form(selector, head_dim),
        )
    else:
        raise ValueError(f"the selector {selector.name} has no page kernel; it has: rki4, r8, clse, quad, minmax, mean, oracle")


def _eigen_form(selector: PrincipalKeys | Quad | Clse, head_dim: int) -> dict[str, int]:
    """Compile-time description of a record for `encode_eigen_kernel`; -1: the record has no such field."""
    at = selector.format(head_dim).offsets
    fields = ("mean_scale", "vectors", "vector_scale", "coordinates", "coordinate_scale", "energies", "residual")
    form = {"RANK": selector.rank} | {f"{name.upper()}_AT": at.get(name, -1) for name in fields}
    if isinstance(selector, PrincipalKeys):
        return form | {"VECTOR_BITS": selector.vector_bits, "COORDINATE_BITS": 8}
    if isinstance(selector, Quad):
        return form | {"VECTOR_BITS": selector.bits, "COORDINATE_BITS": 0}
    return form | {"VECTOR_BITS": 4, "COORDINATE_BITS": 4}
