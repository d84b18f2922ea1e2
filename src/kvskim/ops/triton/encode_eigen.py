"""The encode kernel of rki4, r8, clse and quad: the principal directions of one page, its codes, its record.

Torch twin: `kvskim.selectors.page_eigen.decompose` and the ``encode`` of each selector. Directions may come with the other sign, which no
score can tell.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvskim.ops.triton.jacobi import symmetric_eigen
from kvskim.ops.triton.page_loads import completed_page, load_page
from kvskim.ops.triton.record_fields import bfloat16_bits, bfloat16_value, round_half_even, store_bfloat16, store_float32


@triton.jit
def _scale(largest, LEVELS: tl.constexpr):
    """``(bits, divisor, empty)`` of a quantiser scale: its bfloat16 bits, the number to divide by, and whether the codes are all zero."""
    bits = bfloat16_bits(largest / LEVELS)
    value = bfloat16_value(bits)
    empty = value < 1e-30
    return tl.where(empty, 0, bits), tl.where(empty, 1.0, value), empty


@triton.jit
def _codes(x, divisor, empty, LEVELS: tl.constexpr):
    """Signed codes (int32) of ``x``: computed with the scale as it is stored."""
    code = tl.clamp(round_half_even(tl.where(empty, 0.0, x / divisor)), -1.0 * LEVELS, 1.0 * LEVELS)
    return code.to(tl.int32)


@triton.jit
def encode_eigen_kernel(
    key_cache, slot_mapping, offset, records, num_pages, key_stride_b, key_stride_t, key_stride_h, k_scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr,
    RECORD_BYTES: tl.constexpr, RANK: tl.constexpr, VECTOR_BITS: tl.constexpr, COORDINATE_BITS: tl.constexpr,
    MEAN_SCALE_AT: tl.constexpr, VECTORS_AT: tl.constexpr, VECTOR_SCALE_AT: tl.constexpr, COORDINATES_AT: tl.constexpr,
    COORDINATE_SCALE_AT: tl.constexpr, ENERGIES_AT: tl.constexpr, RESIDUAL_AT: tl.constexpr,
):
    slot, head, complete = completed_page(slot_mapping, num_pages)
    if not complete:
        return
    record = records + ((slot // 16) * KV_HEADS + head) * RECORD_BYTES
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    kept = tl.arange(0, 16) < RANK

    gram = tl.zeros([16, 16], tl.float32)
    largest_mean = 0.0
    for start in range(0, HEAD_DIM, STEP):
        x = load_page(key_cache, offset, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
        mean = tl.sum(x, 0) / 16
        largest_mean = tl.maximum(largest_mean, tl.max(tl.abs(mean), 0))
        x -= mean[None, :]
        gram = tl.dot(x, tl.trans(x), gram, input_precision="ieee")
    trace = tl.sum(tl.sum(tl.where(row == column, gram, 0.0), 1), 0)
    finite = tl.abs(trace) < float("inf")
    trace = tl.where(finite, trace, 0.0)
    # Relative to the trace, so that the squares of the rotations neither overflow nor vanish.
    unit = tl.where(trace > 0.0, trace, 1.0)
    diagonal, vectors = symmetric_eigen(tl.where(finite, gram, 0.0) / unit)

    # Row k of `order` picks the eigenpair of rank k: as many others are larger, ties by index.
    value_row = tl.sum(tl.where(row == column, diagonal, 0.0), 1)[:, None]
    value_column = tl.sum(tl.where(row == column, diagonal, 0.0), 0)[None, :]
    place = tl.sum(tl.where((value_row > value_column) | ((value_row == value_column) & (row < column)), 1, 0), 0)
    order = tl.where(row == place[None, :], 1.0, 0.0)
    energy = tl.maximum(tl.sum(order * value_column, 1) * unit, 1e-10)
    sigma = tl.sqrt(energy)
    directions = tl.dot(order, tl.trans(vectors), input_precision="ieee")
    project = directions / sigma[:, None]

    VECTOR_LEVELS: tl.constexpr = 127 if VECTOR_BITS == 8 else 7
    largest_vector = tl.zeros([16], tl.float32)
    for start in range(0, HEAD_DIM, STEP):
        x = load_page(key_cache, offset, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
        x = tl.where(finite, x - (tl.sum(x, 0) / 16)[None, :], 0.0)
        v = tl.dot(project, x, input_precision="ieee")
        largest_vector = tl.maximum(largest_vector, tl.max(tl.abs(v), 1))
    mean_bits, mean_divisor, mean_empty = _scale(tl.where(finite, largest_mean, 0.0), 127)
    vector_bits, vector_divisor, vector_empty = _scale(largest_vector, VECTOR_LEVELS)
    for start in range(0, HEAD_DIM, STEP):
        x = load_page(key_cache, offset, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
        x = tl.where(finite, x, 0.0)
        mean = tl.sum(x, 0) / 16
        c = start + tl.arange(0, STEP)
        tl.store(record + c, _codes(mean, mean_divisor, mean_empty, 127).to(tl.uint8), mask=c < HEAD_DIM)
        v = tl.dot(project, x - mean[None, :], input_precision="ieee")
        code = _codes(v, vector_divisor[:, None], vector_empty[:, None], VECTOR_LEVELS)
        if VECTOR_BITS == 8:
            live = kept[:, None] & (c < HEAD_DIM)[None, :]
            tl.store(record + VECTORS_AT + row * HEAD_DIM + c[None, :], code.to(tl.uint8), mask=live)
        else:
            even, odd = tl.split(tl.reshape(code, (16, STEP // 2, 2)))
            pair = start // 2 + tl.arange(0, STEP // 2)
            live = kept[:, None] & (pair < HEAD_DIM // 2)[None, :]
            packed = ((even & 15) | ((odd & 15) << 4)).to(tl.uint8)
            tl.store(record + VECTORS_AT + row * (HEAD_DIM // 2) + pair[None, :], packed, mask=live)
    store_bfloat16(record + MEAN_SCALE_AT, tl.where(finite, mean_bits, 0x7FC0), True)
    k = tl.arange(0, 16)
    store_bfloat16(record + VECTOR_SCALE_AT + 2 * k, vector_bits, kept)

    if ENERGIES_AT >= 0:
        store_bfloat16(record + ENERGIES_AT + 2 * k, bfloat16_bits(energy), kept)
    if RESIDUAL_AT >= 0:
        residual = tl.maximum(trace - tl.sum(tl.where(kept, energy, 0.0), 0), 0.0)
        store_float32(record + RESIDUAL_AT, residual, True)
        for i in tl.static_range(RESIDUAL_AT + 4, RECORD_BYTES):
            tl.store(record + i, tl.full([], 0, tl.uint8))
    if COORDINATE_BITS > 0:
        COORDINATE_LEVELS: tl.constexpr = 127 if COORDINATE_BITS == 8 else 7
        coordinates = tl.where(kept[None, :], tl.trans(directions * sigma[:, None]), 0.0)
        bits, divisor, empty = _scale(tl.max(tl.abs(coordinates), 1), COORDINATE_LEVELS)
        code = _codes(coordinates, divisor[:, None], empty[:, None], COORDINATE_LEVELS)
        if COORDINATE_BITS == 8:
            tl.store(record + COORDINATES_AT + row * RANK + column, code.to(tl.uint8), mask=kept[None, :])
        else:
            even, odd = tl.split(tl.reshape(code, (16, 8, 2)))
            pair = tl.arange(0, 8)[None, :]
            packed = ((even & 15) | ((odd & 15) << 4)).to(tl.uint8)
            tl.store(record + COORDINATES_AT + row * (RANK // 2) + pair, packed, mask=pair < RANK // 2)
        store_bfloat16(record + COORDINATE_SCALE_AT + 2 * k, bits, True)
