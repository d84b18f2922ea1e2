"""Portable kernels of the sketch selector: query weights of all digits, and page scores. Any record size, any GPU that Triton serves.

Equation and layout as in kvskim.selectors.sketch, with int8 weights and one scale per (token mode, query head). Digits are taken as
``2 digit - 3``, the odd integers -3 .. 3, so that the int32 products need no bias. The kernels of Hopper are in kvskim.ops.cuda.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div, padded_group
from kvskim.ops.triton.forced import forced_mass
from kvskim.selectors.sketch import SketchTables
from kvskim.tier.pages import HostTier

LIMIT = tl.constexpr(60000.0)
"""Scores are clamped to what float16 holds."""
EXPONENT_LIMIT = tl.constexpr(83.0)
ROUND = tl.constexpr(12582912.0)
"""1.5 x 2^23: adding and subtracting it rounds a small float32 to the nearest integer, halves to even."""


class WeightScratch(Protocol):
    """Scratch memory between the two kernels; ``sketch_weights`` is uint8 of at least `weight_bytes`."""

    sketch_weights: Tensor


def weight_bytes(requests: int, heads: int, group: int, record_bytes: int) -> int:
    """Bytes of scratch: int8 weights ``[R, H, slots, Gp]``, then float32 scales ``[R, H, 16, Gp]``."""
    return requests * heads * padded_group(group) * (4 * record_bytes + 4 * PAGE_TOKENS)


def scan_form(columns: int) -> tuple[int, int]:
    """Query heads and warps of a program of the scan, for groups padded to ``columns``: reading and unpacking records is shared by more heads of
    large groups, whose logits of 16 pages must still stay in registers.
    """
    return (32, 8) if columns >= 32 else (16, 4)


@triton.jit
def _slot_weights(
    query_row, matrix, slot_coefficient, slot_digit, slot, scale, in_group, HEAD_DIM: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
):
    """``(query_matrix[row] . q) scale 4^digit`` of 32 slots, float32 ``[32, 16]``."""
    digit = tl.load(slot_digit + slot).to(tl.int32)
    used = digit < 4  # a slot without a digit may name any row
    row = tl.where(used, tl.load(slot_coefficient + slot).to(tl.int32), 0)
    d = tl.arange(0, STEP)
    total = tl.zeros([32, 16], tl.float32)
    for start in range(0, HEAD_DIM, STEP):
        c = start + d
        inside = c < HEAD_DIM
        m = tl.load(matrix + row[:, None] * HEAD_DIM + c[None, :], mask=inside[None, :], other=0.0)
        q = tl.load(query_row[None, :] + c[:, None], mask=inside[:, None] & in_group[None, :], other=0.0)
        if WIDE:  # not for bfloat16 queries on a GPU: their products with the bfloat16 matrix are exact as they are
            m = m.to(tl.float32)
            q = q.to(tl.float32)
        total = tl.dot(m, q, total, input_precision="ieee")
    power = tl.where(used, 1 << (2 * tl.where(used, digit, 0)), 0).to(tl.float32)
    return tl.where(used[:, None], total * scale * power[:, None], 0.0)


@triton.jit
def _prepare_kernel(
    query, seq_lens, matrix, slot_coefficient, slot_digit, weights, scales, query_stride_r, query_stride_h, scale, window_pages,
    HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr,
    MODE_START: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, HEAD_TILES: tl.constexpr,
):
    """One program per (request, kv head and 16 query heads, token mode): weights twice, first for their maximum, then rounded."""
    request = tl.program_id(0)
    head = tl.program_id(1) // HEAD_TILES
    mode = tl.program_id(2)
    if (tl.load(seq_lens + request) + 15) // 16 <= window_pages:
        return
    first = 0
    last = 0
    for j in tl.static_range(16):
        first = tl.where(mode == j, MODE_START[j], first)
        last = tl.where(mode == j, MODE_START[j + 1], last)
    g = tl.program_id(1) % HEAD_TILES * 16 + tl.arange(0, 16)
    in_group = g < GROUP
    query_row = query + request.to(tl.int64) * query_stride_r + (head * GROUP + g) * query_stride_h
    matrix += head.to(tl.int64) * SLOTS * HEAD_DIM
    slot_coefficient += head * SLOTS
    slot_digit += head * SLOTS
    u = tl.arange(0, 32)
    largest = tl.zeros([16], tl.float32)
    broken = tl.zeros([16], tl.int32)
    for start in range(first, last, 32):
        w = _slot_weights(query_row, matrix, slot_coefficient, slot_digit, start + u, scale, in_group, HEAD_DIM, STEP, WIDE)
        largest = tl.maximum(largest, tl.max(tl.where(w == w, tl.abs(w), 0.0), 0))
        broken = tl.maximum(broken, tl.max((w != w).to(tl.int32), 0))
    # The maximum above leaves NaN out, but a query that is not a number must be seen in every score.
    unit = tl.where(broken > 0, float("nan"), tl.div_rn(largest, tl.full([16], 127.0, tl.float32)))
    divisor = tl.where(unit > 0, unit, 1.0)
    row = request.to(tl.int64) * HEADS + head
    for start in range(first, last, 32):
        w = _slot_weights(query_row, matrix, slot_coefficient, slot_digit, start + u, scale, in_group, HEAD_DIM, STEP, WIDE)
        rounded = (tl.div_rn(w, tl.broadcast_to(divisor[None, :], w.shape)) + ROUND) - ROUND
        at = (row * SLOTS + start + u)[:, None] * COLUMNS + g[None, :]
        tl.store(weights + at, rounded.to(tl.int8), mask=(g < COLUMNS)[None, :])
    tl.store(scales + (row * 16 + mode) * COLUMNS + g, unit, mask=g < COLUMNS)


@triton.jit
def _score_kernel(
    records, block_table, seq_lens, weights, scales, forced, scores, partials, table_stride, capacity, chunks, sink_pages, window_pages,
    HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, RECORD_BYTES: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr,
    HALF_ROWS: tl.constexpr, POSITION: tl.constexpr, WORD_START: tl.constexpr, MODE_START: tl.constexpr, HEAD_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per (request, kv head and WIDTH query heads, chunk of 16-page tiles)."""
    request = tl.program_id(0)
    head = tl.program_id(1) // HEAD_TILES
    chunk = tl.program_id(2)
    pages = (tl.load(seq_lens + request) + 15) // 16 - window_pages
    if chunk * 16 >= pages:
        return
    row = request.to(tl.int64) * HEADS + head
    g = tl.program_id(1) % HEAD_TILES * WIDTH + tl.arange(0, WIDTH)
    stored = g < COLUMNS
    t = tl.arange(0, 16).to(tl.float32)
    # A half row is two neighbouring words of each lane of a quad: eight bytes in each quarter of a 64-byte line.
    k = tl.arange(0, 32)
    byte_of = 16 * (k // 8) + k % 8
    slot_of = 16 * ((k % 8) // 4) + 4 * (k // 8) + k % 4
    weights += row * (4 * RECORD_BYTES) * COLUMNS
    scales += row * 16 * COLUMNS
    reference = tl.load(forced + row * COLUMNS + g, mask=stored, other=0.0)
    mass = tl.zeros([WIDTH], tl.float32)
    for tile in range(chunk, (pages + 15) // 16, chunks):
        page = tile * 16 + tl.arange(0, 16)
        known = tl.minimum(page, pages - 1)
        block = tl.load(block_table + request.to(tl.int64) * table_stride + known // PAGES_PER_BLOCK).to(tl.int64)
        record = records + ((block * PAGES_PER_BLOCK + known % PAGES_PER_BLOCK) * HEADS + head) * RECORD_BYTES
        logits = tl.zeros([16, 16, WIDTH], tl.float32)  # token, page, query head
        for mode in tl.static_range(16):
            if HALF_ROWS[mode] > 0:
                total = tl.zeros([16, WIDTH], tl.int32)
                for half_row in range(HALF_ROWS[mode]):
                    word = WORD_START[mode] + 2 * half_row
                    x = tl.load(record[:, None] + (64 * (word // 4) + 4 * (word % 4)) + byte_of[None, :])
                    digit = ((x >> (2 * POSITION[mode])) & 3).to(tl.int8) * 2 - 3
                    at = (MODE_START[mode] + 32 * half_row + slot_of)[:, None] * COLUMNS + g[None, :]
                    total = tl.dot(digit.to(tl.int8), tl.load(weights + at, mask=stored[None, :], other=0), total, out_dtype=tl.int32)
                unit = tl.load(scales + mode * COLUMNS + g, mask=stored, other=0.0)
                value = total.to(tl.float32) * (0.5 * unit)[None, :]
                norm = 0.25 if mode == 0 else 0.35355339059327376
                wave = norm * tl.cos((2.0 * t + 1.0) * (mode * 0.09817477042468103))  # pi mode (2 t + 1) / 32
                logits += wave[:, None, None] * value[None, :, :]
        peak = tl.max(logits, 0)
        score = peak + tl.log(tl.sum(tl.exp(logits - peak[None, :, :]), 0))
        # NaN becomes the largest score: a broken estimate may cost time, never quality.
        score = tl.where(score == score, tl.minimum(tl.maximum(score, -LIMIT), LIMIT), LIMIT)
        live = (page < pages)[:, None] & stored[None, :]
        tl.store(scores + (row * capacity + page)[:, None] * COLUMNS + g[None, :], score.to(tl.float16), mask=live)
        term = tl.exp(tl.minimum(score - reference[None, :], EXPONENT_LIMIT))
        mass += tl.sum(tl.where(live & (page >= sink_pages)[:, None], term, 0.0), 0)
    tl.store(partials + (row * chunks + chunk) * COLUMNS + g, mass, mask=stored)


def score_sketch(
    tables: SketchTables, query: Tensor, key_cache: Tensor, records: Tensor, block_table: Tensor, seq_lens: Tensor, *, scale: float,
    softcap: float | None, sink_pages: int, window_pages: int, k_scale: float, scores: Tensor, base: Tensor, forced: Tensor,
    partials: Tensor, scratch: WeightScratch | Any, tier: HostTier | None = None,
) -> None:
    """`kvskim.ops.score.score` for sketch records of 128, 192, 256 or 384 bytes; arguments as there, already checked."""
    requests, heads, dim = query.shape[0], key_cache.shape[2], query.shape[2]
    if requests == 0:
        return
    group, columns, layout = query.shape[1] // heads, scores.shape[3], tables.layout
    forced_mass(
        query, key_cache, block_table, seq_lens, tables.mean, scale=scale, softcap=softcap, sink_pages=sink_pages, window_pages=window_pages,
        k_scale=k_scale, forced=forced, base=base, tier=tier,
    )
    needed = weight_bytes(requests, heads, group, layout.record_bytes)
    if scratch is None or scratch.sketch_weights.numel() < needed:
        have = 0 if scratch is None else scratch.sketch_weights.numel()
        raise ValueError(f"scratch.sketch_weights has {have} bytes; {requests} requests with records of {layout.record_bytes} bytes need {needed}")
    rows = requests * heads * columns
    weights = scratch.sketch_weights[: rows * layout.slots].view(torch.int8)
    scales = scratch.sketch_weights[rows * layout.slots : needed].view(torch.float32)
    tiles = ceil_div(group, 16)
    wide = query.is_cpu or query.dtype != torch.bfloat16
    _prepare_kernel[(requests, heads * tiles, PAGE_TOKENS)](
        query, seq_lens, tables.query_matrix, tables.slot_coefficient, tables.slot_digit, weights, scales, query.stride(0), query.stride(1),
        scale, window_pages, HEADS=heads, GROUP=group, COLUMNS=columns, HEAD_DIM=dim, SLOTS=layout.slots, MODE_START=layout.mode_start,
        STEP=64, WIDE=wide, HEAD_TILES=tiles, num_warps=4,
    )
    width, warps = scan_form(columns)
    tiles = ceil_div(group, width)
    _score_kernel[(requests, heads * tiles, partials.shape[2])](
        records, block_table, seq_lens, weights, scales, forced, scores, partials, block_table.stride(0), scores.shape[2], partials.shape[2],
        sink_pages, window_pages, HEADS=heads, GROUP=group, COLUMNS=columns, RECORD_BYTES=layout.record_bytes,
        PAGES_PER_BLOCK=key_cache.shape[1] // PAGE_TOKENS, HALF_ROWS=layout.half_rows, POSITION=layout.position,
        WORD_START=layout.word_start, MODE_START=layout.mode_start, HEAD_TILES=tiles, WIDTH=width, num_warps=warps,
    )
