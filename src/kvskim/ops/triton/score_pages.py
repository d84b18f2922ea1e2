"""Score for the selectors that code each page by itself: page log-masses of a decode step, and the sums that the rule needs.

One program per (chunk, request x kv head x 16 query heads). It strides over tiles of 16 pages up to the live length of its request, so the cost follows the
length, not the capacity. Products run on the integer codes as they are (they are exact in the dtype of the query); scales follow in float32.
Torch twins: the ``score`` of each selector in `kvskim.selectors`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.triton.forced import forced_mass
from kvskim.ops.triton.page_loads import CHANNELS
from kvskim.ops.triton.record_fields import load_bfloat16, load_float32, nibble_value
from kvskim.ops.triton.record_products import bfloat16_product, float32_product, int4_product, int8_product, query_energy, uint4_bounds
from kvskim.selectors.base import PageTables, Selector
from kvskim.selectors.clse import Clse
from kvskim.selectors.mean import Mean
from kvskim.selectors.minmax import MinMax
from kvskim.selectors.oracle import Oracle
from kvskim.selectors.quad import Quad
from kvskim.selectors.rki4 import PrincipalKeys
from kvskim.tier.pages import HostTier

_LOG_PAGE = tl.constexpr(2.772588722239781)


@triton.jit
def _principal_score(
    record, live, query_row, in_group, scale, HEAD_DIM: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
    RANK: tl.constexpr, VECTOR_BITS: tl.constexpr, COORDINATE_BITS: tl.constexpr, MEAN_SCALE_AT: tl.constexpr, VECTORS_AT: tl.constexpr,
    VECTOR_SCALE_AT: tl.constexpr, COORDINATES_AT: tl.constexpr, COORDINATE_SCALE_AT: tl.constexpr, ENERGIES_AT: tl.constexpr,
    RESIDUAL_AT: tl.constexpr,
):
    """Scores ``[16 pages, 16 query heads]`` of mean, r8, rki4, quad and clse records, without the static part of the mean."""
    score = int8_product(record, live, query_row, in_group, HEAD_DIM, STEP, WIDE) * (scale * load_bfloat16(record + MEAN_SCALE_AT, live))[:, None]
    t = tl.arange(0, 16)[None, :]
    logits = tl.zeros([16, 16, 16], tl.float32)  # pages, tokens, query heads
    squares = tl.zeros([16, 16], tl.float32)
    spread = tl.zeros([16, 16], tl.float32)
    for k in range(0, RANK):
        if VECTOR_BITS == 8:
            z = int8_product(record + VECTORS_AT + k * HEAD_DIM, live, query_row, in_group, HEAD_DIM, STEP, WIDE)
        else:
            z = int4_product(record + VECTORS_AT + k * (HEAD_DIM // 2), live, query_row, in_group, HEAD_DIM, STEP, WIDE)
        z *= (scale * load_bfloat16(record + VECTOR_SCALE_AT + 2 * k, live))[:, None]
        if ENERGIES_AT >= 0:
            spread += z * z * load_bfloat16(record + ENERGIES_AT + 2 * k, live)[:, None]
        if RESIDUAL_AT >= 0:
            squares += z * z
        if COORDINATE_BITS == 8:
            code = tl.load(record[:, None] + COORDINATES_AT + t * RANK + k, mask=live[:, None], other=0)
            coordinate = code.to(tl.int8, bitcast=True).to(tl.float32)
            logits += coordinate[:, :, None] * z[:, None, :]
        if COORDINATE_BITS == 4:
            byte = tl.load(record[:, None] + COORDINATES_AT + t * (RANK // 2) + k // 2, mask=live[:, None], other=0).to(tl.int32)
            coordinate = nibble_value(byte >> (4 * (k % 2))).to(tl.float32)
            logits += coordinate[:, :, None] * z[:, None, :]
    if COORDINATE_BITS > 0:
        token_scale = load_bfloat16(record[:, None] + COORDINATE_SCALE_AT + 2 * t, live[:, None])
        logits *= token_scale[:, :, None]
        peak = tl.max(logits, 1)
        score += peak + tl.log(tl.sum(tl.exp(logits - peak[:, None, :]), 1))
    else:
        score += spread / 32 + _LOG_PAGE
    if RESIDUAL_AT >= 0:
        outside = tl.maximum(query_energy(query_row, in_group, HEAD_DIM, STEP)[None, :] * (scale * scale) - squares, 0.0)
        score += outside * (load_float32(record + RESIDUAL_AT, live) / (32 * (HEAD_DIM - RANK)))[:, None]
    return score


@triton.jit
def _bounds_score(record, live, query_row, in_group, scale, HEAD_DIM: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, NIBBLES: tl.constexpr):
    """minmax: ``sum_j max(q_j lo_j, q_j hi_j)``; hi meets the positive part of the query, lo the negative one."""
    if NIBBLES:
        score = uint4_bounds(record, live, query_row, in_group, HEAD_DIM, STEP, WIDE)
    else:
        score = bfloat16_product(record, live, query_row, in_group, HEAD_DIM, STEP)
    return score * scale


@triton.jit
def _keys_score(record, live, query_row, in_group, scale, HEAD_DIM: tl.constexpr, STEP: tl.constexpr):
    """oracle: online log-sum-exp over the 16 stored keys."""
    peak = tl.full([16, 16], float("-inf"), tl.float32)
    mass = tl.zeros([16, 16], tl.float32)
    for t in range(0, 16):
        logit = float32_product(record + t * HEAD_DIM, live, query_row, in_group, HEAD_DIM, STEP) * scale
        new_peak = tl.maximum(peak, logit)
        mass = mass * tl.exp(peak - new_peak) + tl.exp(logit - new_peak)
        peak = new_peak
    return peak + tl.log(mass)


# Sizes of a batch are not specialised: one compilation serves every batch and length.
@triton.jit(do_not_specialize=["table_stride", "scores_stride_r", "scores_stride_h", "chunks", "sink_pages", "window_pages"])
def _score_kernel(
    query, records, block_table, seq_lens, base, forced, scores, partials,
    query_stride_r, query_stride_h, table_stride, scores_stride_r, scores_stride_h, chunks, scale, sink_pages, window_pages,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_STORED: tl.constexpr, HEAD_DIM: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr,
    RECORD_WORDS: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, FORM: tl.constexpr, SUBTRACT_BASE: tl.constexpr,
    RANK: tl.constexpr, VECTOR_BITS: tl.constexpr, COORDINATE_BITS: tl.constexpr, MEAN_SCALE_AT: tl.constexpr, VECTORS_AT: tl.constexpr,
    VECTOR_SCALE_AT: tl.constexpr, COORDINATES_AT: tl.constexpr, COORDINATE_SCALE_AT: tl.constexpr, ENERGIES_AT: tl.constexpr,
    RESIDUAL_AT: tl.constexpr, HEAD_TILES: tl.constexpr,
):
    chunk = tl.program_id(0)
    pair = tl.program_id(1) // HEAD_TILES
    request = pair // KV_HEADS
    head = pair % KV_HEADS
    scored = (tl.load(seq_lens + request) + 15) // 16 - window_pages
    if chunk * 16 >= scored:
        return
    g = tl.program_id(1) % HEAD_TILES * 16 + tl.arange(0, 16)
    in_group = g < GROUP
    query_row = query + request.to(tl.int64) * query_stride_r + (head * GROUP + g) * query_stride_h
    group_at = (request.to(tl.int64) * KV_HEADS + head) * GROUP_STORED + g
    known = tl.load(forced + group_at, mask=in_group, other=0.0)
    total = tl.zeros([16], tl.float32)
    for tile in range(chunk, (scored + 15) // 16, chunks):
        page = tile * 16 + tl.arange(0, 16)
        live = page < scored
        block = tl.load(block_table + request.to(tl.int64) * table_stride + page // PAGES_PER_BLOCK, mask=live, other=0).to(tl.int64)
        # Triton 3.6 takes multiples of numbers that count up for more divisible than they are, and reads odd record sizes in too wide pieces.
        physical = tl.multiple_of(block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK, 1)
        record = records + (physical * KV_HEADS + head) * RECORD_WORDS
        if FORM == "principal":
            score = _principal_score(
                record, live, query_row, in_group, scale, HEAD_DIM, STEP, WIDE, RANK, VECTOR_BITS, COORDINATE_BITS, MEAN_SCALE_AT, VECTORS_AT,
                VECTOR_SCALE_AT, COORDINATES_AT, COORDINATE_SCALE_AT, ENERGIES_AT, RESIDUAL_AT,
            )
        elif FORM == "keys":
            score = _keys_score(record, live, query_row, in_group, scale, HEAD_DIM, STEP)
        else:
            score = _bounds_score(record, live, query_row, in_group, scale, HEAD_DIM, STEP, WIDE, FORM == "nibble bounds")
        if SUBTRACT_BASE:
            score -= tl.load(base + group_at, mask=in_group, other=0.0)[None, :]
        # Comparisons, not min and max, so that NaN stays NaN: the rule must see a broken estimate.
        score = tl.where(score > 60000.0, 60000.0, tl.where(score < -60000.0, -60000.0, score))
        stored = score.to(scores.dtype.element_ty)
        at = request.to(tl.int64) * scores_stride_r + head.to(tl.int64) * scores_stride_h + page.to(tl.int64)[:, None] * GROUP_STORED + g[None, :]
        tl.store(scores + at, stored, mask=live[:, None] & in_group[None, :])
        excess = stored.to(tl.float32) - known[None, :]
        excess = tl.where(excess > 83.0, 83.0, excess)
        total += tl.sum(tl.where((live & (page >= sink_pages))[:, None], tl.exp(excess), 0.0), 0)
    partial_at = ((request.to(tl.int64) * KV_HEADS + head) * chunks + chunk) * GROUP_STORED + g
    tl.store(partials + partial_at, total, mask=in_group)


def _form(selector: Selector, head_dim: int) -> dict[str, object]:
    """Compile-time description of a record for `_score_kernel`."""
    form: dict[str, object] = {
        "FORM": "principal", "SUBTRACT_BASE": False, "RANK": 0, "VECTOR_BITS": 8, "COORDINATE_BITS": 0, "MEAN_SCALE_AT": -1,
        "VECTORS_AT": -1, "VECTOR_SCALE_AT": -1, "COORDINATES_AT": -1, "COORDINATE_SCALE_AT": -1, "ENERGIES_AT": -1, "RESIDUAL_AT": -1,
    }
    if isinstance(selector, Oracle):
        return form | {"FORM": "keys", "SUBTRACT_BASE": True}
    if isinstance(selector, MinMax):
        return form | {"FORM": "nibble bounds" if selector.bits == 4 else "bounds"}
    if not isinstance(selector, (Mean, PrincipalKeys, Quad, Clse)):
        raise ValueError(f"the selector {selector.name} has no page kernel; it has: rki4, r8, clse, quad, minmax, mean, oracle")
    form |= {f"{name.upper()}_AT": at for name, at in selector.format(head_dim).offsets.items() if name != "mean"}
    if isinstance(selector, PrincipalKeys):
        form |= {"RANK": selector.rank, "VECTOR_BITS": selector.vector_bits, "COORDINATE_BITS": 8}
    elif isinstance(selector, Quad):
        form |= {"RANK": selector.rank, "VECTOR_BITS": selector.bits}
    elif isinstance(selector, Clse):
        form |= {"RANK": selector.rank, "VECTOR_BITS": 4, "COORDINATE_BITS": 4}
    return form


def score_pages(
    selector: Selector, tables: PageTables, query: Tensor, key_cache: Tensor, records: Tensor, block_table: Tensor, seq_lens: Tensor, *,
    scale: float, softcap: float | None, sink_pages: int, window_pages: int, k_scale: float = 1.0,
    scores: Tensor, base: Tensor, forced: Tensor, partials: Tensor, tier: HostTier | None = None,
) -> None:
    """Page log-masses minus ``base``, the exact log-mass of the always-attended pages, and the partial sums of their quotients.

    ``partials[c] = sum over candidate pages of chunk c of exp(min(score - forced, 83))``; chunk c holds the 16-page tiles c, c + chunks, ...
    Two launches, CUDA-graph safe. Rows of 0 tokens are left alone.

    Args:
        selector: one of rki4, r8, clse, quad, minmax, mean, oracle.
        tables: offset float32 ``[H, D]``, contiguous.
        query: ``[R, Hq, D]``, last dimension contiguous.
        key_cache: ``[blocks, block_size, H, D]``, any strides, last dimension contiguous; read for the always-attended pages only.
        records: uint8 ``[pages, H, record_bytes]``, contiguous.
        block_table: int32 ``[R, blocks of a request]``.
        seq_lens: int32 ``[R]``, tokens in the cache.
        scores: float16 or float32 ``[R, H, page capacity, padded group]``, last two dimensions contiguous; written for pages below
            ``total - window_pages``, clamped to +-60000, NaN where a record is broken.
        base, forced: float32 ``[R, H, padded group]``, contiguous, see `forced_mass`.
        partials: float32 ``[R, H, chunks, padded group]``, contiguous; written for chunks that have a tile.
        tier: see `forced_mass`.

    Raises:
        ValueError: the selector has no such kernel.

    Source: docs/how-it-works.md, section "Scores".
    """
    requests, query_heads, head_dim = query.shape
    heads, group_stored, chunks = key_cache.shape[2], scores.shape[3], partials.shape[2]
    form = _form(selector, head_dim)
    if requests == 0:
        return
    forced_mass(
        query, key_cache, block_table, seq_lens, tables.offset, scale=scale, softcap=softcap, sink_pages=sink_pages,
        window_pages=window_pages, k_scale=k_scale, forced=forced, base=base, tier=tier,
    )
    width = selector.record_bytes(head_dim)
    words: torch.dtype = {"keys": torch.float32, "bounds": torch.int16}.get(str(form["FORM"]), torch.uint8)
    tiles = ceil_div(query_heads // heads, 16)
    _score_kernel[(chunks, requests * heads * tiles)](
        query, records.view(words), block_table, seq_lens, base, forced, scores, partials,
        query.stride(0), query.stride(1), block_table.stride(0), scores.stride(0), scores.stride(1), chunks, scale, sink_pages, window_pages,
        KV_HEADS=heads, GROUP=query_heads // heads, GROUP_STORED=group_stored, HEAD_DIM=head_dim,
        PAGES_PER_BLOCK=key_cache.shape[1] // PAGE_TOKENS, RECORD_WORDS=width // words.itemsize, STEP=CHANNELS, WIDE=query.is_cpu, HEAD_TILES=tiles,
        num_warps=4, **form,
    )
