"""Products of the rows of 16 records with the query heads of one group, inside Triton programs.

All return float32 ``[16 records, 16 query heads]``. ``record``: pointers ``[16]`` to the row; ``live``: which records exist; ``query_row``:
pointers ``[16]`` to the queries; ``in_group``: which of them exist. The integer codes are exact in bfloat16, float16 and float32, so the
products run in the dtype of the query; ``WIDE`` runs them in float32 all the same (the interpreter has no bfloat16 products).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvskim.ops.triton.record_fields import load_bfloat16, nibble_value


@triton.jit
def _query(query_row, in_group, c, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr):
    """Channels ``c`` of the queries, ``[channels, 16]``, in their dtype or in float32."""
    q = tl.load(query_row[None, :] + c[:, None], mask=in_group[None, :] & (c < HEAD_DIM)[:, None], other=0.0)
    return q.to(tl.float32) if WIDE else q


@triton.jit
def int8_product(record, live, query_row, in_group, HEAD_DIM: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr):
    """int8 codes, one per channel."""
    out = tl.zeros([16, 16], tl.float32)
    for start in range(0, HEAD_DIM, STEP):
        c = start + tl.arange(0, STEP)
        q = _query(query_row, in_group, c, HEAD_DIM, WIDE)
        code = tl.load(record[:, None] + c[None, :], mask=live[:, None] & (c < HEAD_DIM)[None, :], other=0)
        out = tl.dot(code.to(tl.int8, bitcast=True).to(q.dtype), q, out, input_precision="ieee")
    return out


@triton.jit
def int4_product(record, live, query_row, in_group, HEAD_DIM: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr):
    """Signed 4-bit codes, two channels per byte: even and odd channels are two products, so that nothing is interleaved."""
    out = tl.zeros([16, 16], tl.float32)
    for start in range(0, HEAD_DIM // 2, STEP // 2):
        b = start + tl.arange(0, STEP // 2)
        even = _query(query_row, in_group, 2 * b, HEAD_DIM, WIDE)
        odd = _query(query_row, in_group, 2 * b + 1, HEAD_DIM, WIDE)
        byte = tl.load(record[:, None] + b[None, :], mask=live[:, None] & (b < HEAD_DIM // 2)[None, :], other=0).to(tl.int32)
        out = tl.dot(nibble_value(byte).to(even.dtype), even, out, input_precision="ieee")
        out = tl.dot(nibble_value(byte >> 4).to(odd.dtype), odd, out, input_precision="ieee")
    return out


@triton.jit
def bfloat16_product(record, live, query_row, in_group, HEAD_DIM: tl.constexpr, STEP: tl.constexpr):
    """Bounds in bfloat16 (int16 pointers): hi times the positive plus lo times the negative part of the query, in float32."""
    out = tl.zeros([16, 16], tl.float32)
    for start in range(0, HEAD_DIM, STEP):
        c = start + tl.arange(0, STEP)
        q = _query(query_row, in_group, c, HEAD_DIM, True)
        mask = live[:, None] & (c < HEAD_DIM)[None, :]
        lo = tl.load(record[:, None] + c[None, :], mask=mask, other=0).to(tl.int32) << 16
        hi = tl.load(record[:, None] + HEAD_DIM + c[None, :], mask=mask, other=0).to(tl.int32) << 16
        out = tl.dot(hi.to(tl.float32, bitcast=True), tl.maximum(q, 0.0), out, input_precision="ieee")
        out = tl.dot(lo.to(tl.float32, bitcast=True), tl.minimum(q, 0.0), out, input_precision="ieee")
    return out


@triton.jit
def float32_product(record, live, query_row, in_group, HEAD_DIM: tl.constexpr, STEP: tl.constexpr):
    """Keys in float32 (float32 pointers)."""
    out = tl.zeros([16, 16], tl.float32)
    for start in range(0, HEAD_DIM, STEP):
        c = start + tl.arange(0, STEP)
        q = _query(query_row, in_group, c, HEAD_DIM, True)
        key = tl.load(record[:, None] + c[None, :], mask=live[:, None] & (c < HEAD_DIM)[None, :], other=0.0)
        out = tl.dot(key, q, out, input_precision="ieee")
    return out


@triton.jit
def uint4_bounds(record, live, query_row, in_group, HEAD_DIM: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr):
    """Bounds in 4-bit codes: lo codes, hi codes, then (scale, zero) of lo and of hi; ``bound = zero + code * scale``."""
    hi_out = tl.zeros([16, 16], tl.float32)
    lo_out = tl.zeros([16, 16], tl.float32)
    positive = tl.zeros([16], tl.float32)
    negative = tl.zeros([16], tl.float32)
    for start in range(0, HEAD_DIM // 2, STEP // 2):
        b = start + tl.arange(0, STEP // 2)
        mask = live[:, None] & (b < HEAD_DIM // 2)[None, :]
        lo = tl.load(record[:, None] + b[None, :], mask=mask, other=0).to(tl.int32)
        hi = tl.load(record[:, None] + HEAD_DIM // 2 + b[None, :], mask=mask, other=0).to(tl.int32)
        for parity in tl.static_range(2):
            q = _query(query_row, in_group, 2 * b + parity, HEAD_DIM, WIDE)
            up = tl.where(q > 0.0, q, 0.0).to(q.dtype)
            down = tl.where(q < 0.0, q, 0.0).to(q.dtype)
            hi_out = tl.dot(((hi >> (4 * parity)) & 15).to(q.dtype), up, hi_out, input_precision="ieee")
            lo_out = tl.dot(((lo >> (4 * parity)) & 15).to(q.dtype), down, lo_out, input_precision="ieee")
            positive += tl.sum(up.to(tl.float32), 0)
            negative += tl.sum(down.to(tl.float32), 0)
    ranges = record + HEAD_DIM
    out = hi_out * load_bfloat16(ranges + 4, live)[:, None] + positive[None, :] * load_bfloat16(ranges + 6, live)[:, None]
    return out + lo_out * load_bfloat16(ranges, live)[:, None] + negative[None, :] * load_bfloat16(ranges + 2, live)[:, None]


@triton.jit
def query_energy(query_row, in_group, HEAD_DIM: tl.constexpr, STEP: tl.constexpr):
    """``|q|^2`` of every query head, float32 ``[16]``."""
    out = tl.zeros([16], tl.float32)
    for start in range(0, HEAD_DIM, STEP):
        q = _query(query_row, in_group, start + tl.arange(0, STEP), HEAD_DIM, True)
        out += tl.sum(q * q, 0)
    return out
