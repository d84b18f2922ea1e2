"""Portable kernel that makes sketch records of the pages a step completes. Any record size, any head dim, any GPU that Triton serves.

Equation and byte order as in kvskim.selectors.sketch. A program codes one (page, kv head), one bit position of all words of the record at a
time: the 16 slots of a word at one position belong to one token mode. The kernel of Hopper is in kvskim.ops.cuda.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from kvskim.ops.triton.page_loads import completed_page, load_keys
from kvskim.selectors.sketch import SketchTables

STEP = 32
"""Channels per step of the sums over channels."""


@triton.jit
def _encode_kernel(
    key_cache, slot_mapping, mean, matrix, coefficient_bits, slot_coefficient, slot_digit, records, num_pages,
    key_stride_b, key_stride_t, key_stride_h, k_scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, RECORD_BYTES: tl.constexpr, UNIT_SLOT: tl.constexpr,
    UNIT_MODE: tl.constexpr, WORDS: tl.constexpr, PADDED_WORDS: tl.constexpr, STEP: tl.constexpr,
):
    slot, head, complete = completed_page(slot_mapping, num_pages)
    if not complete:
        return
    page = slot // 16
    slots = 4 * RECORD_BYTES
    matrix += head.to(tl.int64) * slots * HEAD_DIM
    word = tl.arange(0, PADDED_WORDS)
    within = tl.arange(0, 16)
    token = tl.arange(0, 16)
    packed = tl.zeros([PADDED_WORDS, 16], tl.int32)
    for position in tl.static_range(4):
        first = tl.zeros([PADDED_WORDS], tl.int32)
        mode = tl.zeros([PADDED_WORDS], tl.int32)
        for w in tl.static_range(WORDS):
            first = tl.where(word == w, UNIT_SLOT[position * WORDS + w], first)
            mode = tl.where(word == w, UNIT_MODE[position * WORDS + w], mode)
        # cos(pi (2 t + 1) mode / 32); whole turns are taken out in integers, where that is exact.
        turn = ((2 * token[None, :] + 1) * mode[:, None]) % 64
        weight = tl.where(mode[:, None] == 0, 0.25, 0.35355339059327373 * tl.cos(turn.to(tl.float32) * 0.09817477042468103))
        at = head * slots + first[:, None] + within[None, :]
        digit = tl.load(slot_digit + at).to(tl.int32)
        used = (digit < 4) & (word < WORDS)[:, None]
        row = tl.where(used, tl.load(slot_coefficient + at).to(tl.int32), 0)
        x = tl.zeros([PADDED_WORDS, 16], tl.float32)
        for start in range(0, HEAD_DIM, STEP):
            c = start + tl.arange(0, STEP)
            inside = c < HEAD_DIM
            keys = load_keys(key_cache, slot, head, start, key_stride_b, key_stride_t, key_stride_h, k_scale, HEAD_DIM, BLOCK_SIZE, STEP)
            keys -= tl.load(mean + head * HEAD_DIM + c, mask=inside, other=0.0)[None, :]
            modes = tl.dot(weight, keys, input_precision="ieee")
            m = tl.load(matrix + row[:, :, None] * HEAD_DIM + c[None, None, :], mask=inside[None, None, :], other=0.0).to(tl.float32)
            x += tl.sum(m * modes[:, None, :], 2)
        bits = tl.load(coefficient_bits + head * slots + row).to(tl.int32)
        half = (1 << bits) >> 1
        level = tl.floor(tl.where(x == x, x, 0.0))  # NaN: the middle code
        code = tl.minimum(tl.maximum(level, -half.to(tl.float32)), (half - 1).to(tl.float32)).to(tl.int32) + half
        packed |= tl.where(used, (code >> (2 * tl.where(used, digit, 0))) & 3, 0) << (2 * position)
    address = 64 * (word // 4)[:, None] + 4 * (word % 4)[:, None] + (16 * (within // 4) + within % 4)[None, :]
    record = records + (page * KV_HEADS + head) * RECORD_BYTES
    tl.store(record + address, packed.to(tl.uint8), mask=(word < WORDS)[:, None])


@functools.lru_cache
def _units(record_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First slot, and mode, of the 16 slots at (bit position, word), position-major."""
    from kvskim.layout import sketch_layout

    layout = sketch_layout(record_bytes)
    slots, modes = [], []
    for position in range(4):
        for word in range(record_bytes // 16):
            slot = int(layout.byte_slots[64 * (word // 4) + 4 * (word % 4), position])
            slots.append(slot)
            modes.append(int(layout.slot_mode[slot]))
    return tuple(slots), tuple(modes)


def encode_sketch(tables: SketchTables, key_cache: Tensor, slot_mapping: Tensor, records: Tensor, *, k_scale: float = 1.0) -> None:
    """Write the sketch records of the pages that the tokens of ``slot_mapping`` complete. CUDA-graph safe: nothing is read on the host.

    Args:
        tables: of the layer, contiguous, on the device of the cache; no page frame.
        key_cache: ``[blocks, block_size, H, D]``, any strides, last dimension contiguous; bfloat16, float16, float32 or float8_e4m3fn.
            Times ``k_scale`` it is the keys.
        slot_mapping: int64 ``[T]``: block * block_size + token in block; -1: padding.
        records: uint8 ``[pages, H, record_bytes]``, contiguous, indexed by physical page.
    """
    tokens, (_, block_size, heads, head_dim) = slot_mapping.shape[0], key_cache.shape
    if tokens == 0:
        return
    unit_slot, unit_mode = _units(tables.record_bytes)
    words = tables.record_bytes // 16
    _encode_kernel[(tokens, heads)](
        key_cache, slot_mapping, tables.mean, tables.encode_matrix, tables.coefficient_bits, tables.slot_coefficient, tables.slot_digit,
        records, records.shape[0], key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), k_scale,
        KV_HEADS=heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, RECORD_BYTES=tables.record_bytes, UNIT_SLOT=unit_slot,
        UNIT_MODE=unit_mode, WORDS=words, PADDED_WORDS=max(16, triton.next_power_of_2(words)), STEP=STEP,
    )
