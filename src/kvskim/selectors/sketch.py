"""``sketch``, the default selector: a fixed linear transform of the page, scalar-quantised into two-bit digits.

Per (layer, kv head) calibration fits a mean key ``m`` and, for each of the 16 token modes of the orthonormal DCT ``T``, a pair of bases with
``q . (k - m) = (Wq^T q) . (Wk^T (k - m))``: squared error there is expected squared logit error of queries of one length (the query metric). A record is

    Y = T^T (K - m)                         16 modes x D
    x = encode_matrix[row] . Y_mode         = coefficient / step
    code = clamp(floor(x), -2^(b-1), 2^(b-1) - 1) + 2^(b-1) = sum_k digit_k 4^k

and its score is linear in the digits up to the log-sum-exp over the 16 tokens:

    y_mode = a_mode sum_slots W8 (digit - 3/2),   W8 = round(W / a_mode),  W = scale (query_matrix[row] . q) 4^k,  a_mode = max|W| / 127
    S = q . m + log sum_t exp(sum_mode T[t, mode] y_mode)

Source: docs/how-it-works.md, section "The sketch record".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, SketchLayout, dct_matrix, sketch_layout
from kvskim.rotary import Rotary
from kvskim.selectors.base import Selector, check_keys, register

if TYPE_CHECKING:
    from kvskim.calibration import LayerCalibration

UNUSED_DIGIT = 255


@dataclass(frozen=True)
class SketchTables:
    """Parameters of the sketch of one layer; ``S = 4 * record_bytes`` slots, rows and slots grouped by token mode.

    mean float32 ``[H, D]``; encode_matrix, query_matrix bfloat16 ``[H, S, D]`` (row: one coefficient, scaled by 1/step and step);
    coefficient_bits uint8 ``[H, S]`` (2, 4, 6, 8; 0: row unused); coefficient_count int32 ``[H, 16]``: rows used of each mode;
    slot_coefficient int16 ``[H, S]``: row whose digit a slot holds; slot_digit uint8 ``[H, S]``: which digit (255: slot unused).
    """

    record_bytes: int
    mean: Tensor
    encode_matrix: Tensor
    query_matrix: Tensor
    coefficient_bits: Tensor
    coefficient_count: Tensor
    slot_coefficient: Tensor
    slot_digit: Tensor
    rotary: Rotary | None = None
    """Set for page-frame records: keys are turned back by the position of the page centre before coding, queries per page."""

    def __post_init__(self) -> None:
        heads, dim = self.mean.shape
        slots = 4 * self.record_bytes
        for name, shape in (
            ("encode_matrix", (heads, slots, dim)), ("query_matrix", (heads, slots, dim)), ("coefficient_bits", (heads, slots)),
            ("coefficient_count", (heads, PAGE_TOKENS)), ("slot_coefficient", (heads, slots)), ("slot_digit", (heads, slots)),
        ):
            actual = tuple(getattr(self, name).shape)
            if actual != shape:
                raise ValueError(f"sketch table {name} has shape {actual}; expected {shape}")

    @property
    def layout(self) -> SketchLayout:
        return sketch_layout(self.record_bytes)

    def to(self, device: torch.device | str) -> SketchTables:
        moved: dict[str, Any] = {k: v.to(device).contiguous() for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def heads(self, start: int, stop: int) -> SketchTables:
        """Tables of kv heads ``start`` to ``stop``: the share of one tensor-parallel rank."""
        cut: dict[str, Any] = {k: v[start:stop].contiguous() for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return replace(self, **cut)


def encode_codes(keys: Tensor, tables: SketchTables) -> Tensor:
    """Codes of all coefficient rows, int64 ``[P, H, S]``; unused rows are 0. ``keys``: ``[P, H, 16, D]``."""
    layout = tables.layout
    keys = keys.float() - tables.mean[None, :, None]
    modes = torch.einsum("tj,phtd->hjpd", dct_matrix(device=keys.device), keys)
    values = torch.cat([
        modes[:, j] @ tables.encode_matrix[:, start:stop].float().transpose(1, 2)
        for j, (start, stop) in enumerate(zip(layout.mode_start, layout.mode_start[1:])) if stop > start
    ], -1)
    half = 2.0 ** (tables.coefficient_bits.float() - 1)[:, None]
    # Keys that are not finite must give a defined record, the same in every implementation: NaN the middle code, infinities the ends of the range.
    code = torch.minimum(torch.maximum(torch.floor(values), -half), half - 1).nan_to_num() + half
    used = (tables.coefficient_bits > 0)[:, None]
    return torch.where(used, code, torch.zeros_like(code)).long().transpose(0, 1)


def pack_digits(digits: Tensor, layout: SketchLayout) -> Tensor:
    """Digits ``[..., S]`` (0..3, slot order) into records uint8 ``[..., W]``."""
    parts = digits[..., layout.byte_slots.to(digits.device)]
    shifts = 2 * torch.arange(4, device=digits.device)
    return (parts << shifts).sum(-1).to(torch.uint8)


def unpack_digits(records: Tensor, layout: SketchLayout) -> Tensor:
    """Records uint8 ``[..., W]`` into digits uint8 ``[..., S]`` in slot order."""
    # Word-major bytes: a mode is then a run of columns at one bit position, and no gather is needed.
    words = records.unflatten(-1, (layout.record_bytes // 64, 4, 4, 4)).transpose(-3, -2).flatten(-4)
    digits = [(words if position == 0 else words >> (2 * position)) & 3 for position in range(4)]
    parts = [
        digits[position][..., 16 * start : 16 * start + 32 * half_rows]
        for half_rows, position, start in zip(layout.half_rows, layout.position, layout.word_start)
    ]
    return torch.cat(parts, -1)


def slot_weights(queries: Tensor, tables: SketchTables) -> Tensor:
    """Weight of every slot, float32 ``[..., H, G, S]``: ``(query_matrix[row] . q) 4^digit``. ``queries [..., H, G, D]`` are scaled."""
    rows = torch.einsum("...hgd,hsd->...hgs", queries.float(), tables.query_matrix.float())
    index = tables.slot_coefficient.long()[:, None].expand(*rows.shape)
    used = tables.slot_digit != UNUSED_DIGIT
    power = torch.where(used, 4.0 ** tables.slot_digit.float().clamp_max(3), torch.zeros((), device=used.device))
    return rows.gather(-1, index) * power[:, None]


def round_weights(weights: Tensor, layout: SketchLayout) -> tuple[Tensor, Tensor]:
    """Int8 weights with one scale per (mode, query head): ``(W8 float32 [..., S], scale float32 [..., 16])``."""
    modes = slot_modes(layout.record_bytes, weights.device)
    largest = weights.new_zeros(*weights.shape[:-1], PAGE_TOKENS)
    scale = largest.scatter_reduce_(-1, modes.expand(weights.shape), weights.abs(), "amax") / 127
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(weights / divisor.index_select(-1, modes)), scale


@lru_cache
def slot_modes(record_bytes: int, device: torch.device) -> Tensor:
    """int64 ``[S]``: token mode of each slot."""
    return sketch_layout(record_bytes).slot_mode.to(device)


@register
class Sketch(Selector):
    """Transform-coded page, 256 bytes at any head dimension by default (3.1% of a bf16 KV page at head dim 128).

    Args:
        record_bytes: 128, 192, 256 or 384.
        page_frame: undo the rotary rotation of the page centre before coding. Halves the loss at equal bytes, but the query must be
            rotated once per page: a reference option without a kernel.
    """

    name = "sketch"
    converges = True
    needs_calibration = True

    def __init__(self, record_bytes: int = 256, page_frame: bool = False) -> None:
        self.layout = sketch_layout(record_bytes)
        self.page_frame = page_frame

    def record_bytes(self, head_dim: int) -> int:
        return self.layout.record_bytes

    def tables(self, num_kv_heads: int, head_dim: int, calibration: LayerCalibration | None = None) -> SketchTables:
        if calibration is None:
            raise ValueError("the selector sketch needs a calibration: fit one on the prompt, or give `calibration: FILE` made by `kvskim calibrate`")
        return calibration.sketch_tables(self.layout.record_bytes, self.page_frame)

    def _frame(self, tables: SketchTables, positions: Tensor | None) -> tuple[Rotary, Tensor]:
        if tables.rotary is None or positions is None:
            raise ValueError("page_frame records need the model's rotary embedding and the position of every page")
        return tables.rotary, positions + PAGE_TOKENS // 2

    def encode(self, keys: Tensor, tables: SketchTables, page_positions: Tensor | None = None) -> Tensor:
        check_keys(keys)
        if self.page_frame:
            rotary, centre = self._frame(tables, page_positions)
            keys = rotary.rotate(keys.float(), -centre[:, None, None])
        codes = encode_codes(keys, tables)
        index = tables.slot_coefficient.long().expand(codes.shape[0], -1, -1)
        used = tables.slot_digit != UNUSED_DIGIT
        digit = codes.gather(-1, index) >> (2 * tables.slot_digit.long().clamp_max(3)) & 3
        return pack_digits(torch.where(used, digit, torch.zeros_like(digit)), self.layout)

    def score(self, queries: Tensor, records: Tensor, tables: SketchTables, page_positions: Tensor | None = None) -> Tensor:
        centred = unpack_digits(records, self.layout).float() - 1.5  # [P, H, S]
        queries = queries.float()
        if self.page_frame:
            return self._score_page_frame(queries, centred, tables, page_positions)
        weights, scale = round_weights(slot_weights(queries, tables), self.layout)
        modes = [
            torch.einsum("nhgs,phs->nhpg", weights[..., start:stop], centred[..., start:stop])
            for start, stop in zip(self.layout.mode_start, self.layout.mode_start[1:])
        ]
        logits = (torch.stack(modes, -1) * scale[:, :, None]) @ dct_matrix(device=records.device).T
        base = torch.einsum("nhgd,hd->nhg", queries, tables.mean)
        return torch.logsumexp(logits, -1) + base[:, :, None]

    def _score_page_frame(self, queries: Tensor, centred: Tensor, tables: SketchTables, positions: Tensor | None) -> Tensor:
        rotary, centre = self._frame(tables, positions)
        out = []
        for p in range(centred.shape[0]):
            turned = rotary.rotate(queries, -centre[p])
            weights = slot_weights(turned, tables)
            modes = torch.stack([
                torch.einsum("nhgs,hs->nhg", weights[..., start:stop], centred[p, :, start:stop])
                for start, stop in zip(self.layout.mode_start, self.layout.mode_start[1:])
            ], -1)
            base = torch.einsum("nhgd,hd->nhg", turned, tables.mean)
            out.append(torch.logsumexp(modes @ dct_matrix(device=centred.device).T, -1) + base)
        if not out:
            return queries.new_zeros(*queries.shape[:2], 0, queries.shape[2])
        return torch.stack(out, 2)
