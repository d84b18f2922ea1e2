"""Fields of packed records inside Triton kernels: bfloat16 and float32 at any byte address, rounding that is the same on every back end.

Conversions are done on the bits, so that the interpreter, GPUs without bfloat16 and GPUs with it give the same bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_half_even(x):
    """Nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for the fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def bfloat16_bits(x):
    """Bits (int32, 0..65535) of the bfloat16 nearest to float32 ``x``, ties to even; NaN becomes the quiet NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(x == x, rounded, 0x7FC0)


@triton.jit
def floor_bfloat16_bits(x):
    """Bits of the largest bfloat16 not above ``x``: dropping the low half rounds towards zero, so carry first for negative numbers."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (tl.where(bits < 0, bits + 0xFFFF, bits) >> 16) & 0xFFFF
    return tl.where(x == x, rounded, 0x7FC0)


@triton.jit
def ceil_bfloat16_bits(x):
    """Bits of the smallest bfloat16 not below ``x``."""
    return tl.where(x == x, floor_bfloat16_bits(-x) ^ 0x8000, 0x7FC0)


@triton.jit
def bfloat16_value(bits):
    """float32 of the bits of a bfloat16 (any integer type, low 16 bits)."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_bfloat16(pointer, bits, mask):
    """Two bytes, little endian, at a uint8 pointer that need not be aligned."""
    tl.store(pointer, (bits & 0xFF).to(tl.uint8), mask=mask)
    tl.store(pointer + 1, ((bits >> 8) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def load_bfloat16(pointer, mask):
    """float32 of two bytes, little endian, at a uint8 pointer that need not be aligned; 0 where masked."""
    low = tl.load(pointer, mask=mask, other=0).to(tl.int32)
    high = tl.load(pointer + 1, mask=mask, other=0).to(tl.int32)
    return bfloat16_value(low | (high << 8))


@triton.jit
def store_float32(pointer, x, mask):
    """Four bytes, little endian, at a uint8 pointer that need not be aligned."""
    bits = x.to(tl.int32, bitcast=True)
    for i in tl.static_range(4):
        tl.store(pointer + i, ((bits >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def load_float32(pointer, mask):
    """float32 of four bytes, little endian, at a uint8 pointer that need not be aligned; 0 where masked."""
    low = tl.load(pointer, mask=mask, other=0).to(tl.int32) | (tl.load(pointer + 1, mask=mask, other=0).to(tl.int32) << 8)
    high = tl.load(pointer + 2, mask=mask, other=0).to(tl.int32) | (tl.load(pointer + 3, mask=mask, other=0).to(tl.int32) << 8)
    return (low | (high << 16)).to(tl.float32, bitcast=True)


@triton.jit
def nibble_value(nibble):
    """Signed value -8..7 of a 4-bit two's complement code 0..15 (any integer type), int32."""
    return ((nibble.to(tl.int32) & 15) ^ 8) - 8
