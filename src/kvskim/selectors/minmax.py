"""`minmax`: per-channel bounds of the keys of a page (Tang et al., "Quest", arXiv 2406.10774)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvskim.selectors.base import PageTables, Selector, register
from kvskim.selectors.page_eigen import SMALLEST_SCALE, Field, RecordFormat, centred_pages, check_bits, check_head_dim

_LEVELS = 15


def floor_bfloat16(values: Tensor) -> Tensor:
    """Largest bfloat16 not above each float32 value; NaN stays NaN."""
    bits = values.float().contiguous().view(torch.int32)
    # Dropping the low half rounds towards zero; for negative numbers that is up, so carry into the kept half first.
    bits = torch.where(bits < 0, bits + 0xFFFF, bits)
    rounded = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), torch.full_like(rounded, math.nan), rounded)


def ceil_bfloat16(values: Tensor) -> Tensor:
    """Smallest bfloat16 not below each float32 value; NaN stays NaN."""
    return -floor_bfloat16(-values.float())


def _code_bounds(bound: Tensor, *, upper: bool) -> tuple[Tensor, Tensor]:
    """4-bit codes uint8 ``[..., D]`` and (scale, zero) bfloat16 ``[..., 2]``, rounded outwards: the decoded bound stays a bound."""
    zero = floor_bfloat16(bound.amin(-1))
    # The tiny factor keeps zero + 15 scale at or above the largest bound in spite of float32 rounding.
    scale = ceil_bfloat16((bound.amax(-1) - zero.float()) / _LEVELS * (1 + 1e-6))
    scale = torch.where(scale.float() < SMALLEST_SCALE, torch.full_like(scale, SMALLEST_SCALE), scale)
    steps = (bound - zero.float()[..., None]) / scale.float()[..., None]
    codes = (steps.ceil() if upper else steps.floor()).clamp(0, _LEVELS)
    decoded = zero.float()[..., None] + codes * scale.float()[..., None]
    missed = decoded < bound if upper else decoded > bound
    codes = (codes + missed.float() * (1 if upper else -1)).clamp(0, _LEVELS)
    return codes.nan_to_num(0).to(torch.uint8), torch.stack((scale, zero), -1)


@register
class MinMax(Selector):
    """``S = sum_j max(q_j lo_j, q_j hi_j)``: an upper bound of every logit of the page.

    Record: lo and hi bfloat16 ``[D]`` each, rounded outwards; with ``bits=4`` codes 0..15 ``[D]`` of lo, then of hi, then (scale, zero)
    bfloat16 of lo and of hi with ``bound = zero + code * scale``.
    """

    name = "minmax"

    def __init__(self, bits: int = 16) -> None:
        self.bits = check_bits(self.name, bits, (16, 4))

    def format(self, head_dim: int) -> RecordFormat:
        check_head_dim(self.name, head_dim, multiple=2 if self.bits == 4 else 1)
        if self.bits == 16:
            return RecordFormat((Field("lo", "bfloat16", (head_dim,)), Field("hi", "bfloat16", (head_dim,))))
        return RecordFormat((
            Field("lo", "uint4", (head_dim,)), Field("hi", "uint4", (head_dim,)),
            Field("lo_range", "bfloat16", (2,)), Field("hi_range", "bfloat16", (2,)),
        ))

    def record_bytes(self, head_dim: int) -> int:
        return self.format(head_dim).nbytes

    def encode(self, keys: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        x = centred_pages(keys, tables)
        finite = torch.isfinite(x).all(-1).all(-1)[..., None]
        lo, hi = torch.where(finite, x.amin(2), math.nan), torch.where(finite, x.amax(2), math.nan)
        layout = self.format(keys.shape[-1])
        if self.bits == 16:
            return layout.pack({"lo": floor_bfloat16(lo), "hi": ceil_bfloat16(hi)})
        lo_codes, lo_range = _code_bounds(lo, upper=False)
        hi_codes, hi_range = _code_bounds(hi, upper=True)
        return layout.pack({"lo": lo_codes, "hi": hi_codes, "lo_range": lo_range, "hi_range": hi_range})

    def score(self, queries: Tensor, records: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        fields = self.format(queries.shape[-1]).unpack(records)
        lo, hi = fields["lo"].float(), fields["hi"].float()
        if self.bits == 4:
            lo_range, hi_range = fields["lo_range"].float(), fields["hi_range"].float()
            lo = lo_range[..., 1:] + lo * lo_range[..., :1]
            hi = hi_range[..., 1:] + hi * hi_range[..., :1]
        q = queries.float()
        bound = torch.einsum("nhgd,phd->nhpg", q.clamp_min(0), hi) + torch.einsum("nhgd,phd->nhpg", q.clamp_max(0), lo)
        return bound + torch.einsum("nhgd,hd->nhg", q, tables.offset.float())[:, :, None]
