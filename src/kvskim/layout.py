"""Shapes and bytes: pages of the KV cache and where a sketch record keeps its digits.

One truth for the selectors, the kernels, the documentation and the bench. Nothing here touches a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_TOKENS = 16
"""Tokens of a page: the unit of selection."""

SKETCH_HALF_ROWS: dict[int, tuple[int, ...]] = {
    128: (3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0),
    192: (5, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    256: (5, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1),
    384: (6, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 1),
}
"""Half rows (32 two-bit digits, 8 bytes) of each of the 16 token modes, by record size in bytes."""

# Mode 0 carries the page mean and wants the highest bit position, because rounding of the folded digit offset shrinks with it; within a
# position even modes come before odd ones, so that the even half of the inverse transform can run before the odd accumulators exist.
_RUNS_256: tuple[tuple[int, tuple[int, ...]], ...] = ((3, (0, 1)), (2, (2, 12, 3, 5)), (1, (4, 6, 7, 9)), (0, (8, 10, 14, 11, 13, 15)))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def dct_matrix(dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
    """Orthonormal 16-point DCT-II over the tokens of a page, ``[token, mode]``.

    ``T[t, j] = c_j cos(pi (2 t + 1) j / 32)`` with ``c_0 = 1/4`` and ``c_j = sqrt(1/8)``.
    """
    t = torch.arange(PAGE_TOKENS, dtype=torch.float64)
    matrix = torch.cos(math.pi * (2 * t[:, None] + 1) * t[None] / (2 * PAGE_TOKENS)) * math.sqrt(2 / PAGE_TOKENS)
    matrix[:, 0] = 1 / math.sqrt(PAGE_TOKENS)
    return matrix.to(dtype=dtype, device=device)


@dataclass(frozen=True)
class PageLayout:
    """Paged KV cache of one layer: physical page = block * pages_per_block + page in block."""

    block_size: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.block_size < PAGE_TOKENS or self.block_size % PAGE_TOKENS or (self.block_size & (self.block_size - 1)):
            raise ValueError(f"block_size is {self.block_size}; it must be a power of two and at least {PAGE_TOKENS}: use 16, 32, 64 or 128")

    @property
    def pages_per_block(self) -> int:
        return self.block_size // PAGE_TOKENS

    def kv_bytes_per_page(self, bytes_per_element: int = 2) -> int:
        """Bytes of K and V of one page and kv head."""
        return 2 * PAGE_TOKENS * self.head_dim * bytes_per_element

    def record_bytes_per_block(self, record_bytes: int) -> int:
        return self.pages_per_block * self.num_kv_heads * record_bytes


@dataclass(frozen=True)
class SketchLayout:
    """Where the two-bit digits of a sketch record lie (docs/how-it-works.md, section "The sketch record").

    A *slot* is one digit; the slots of a mode are consecutive, modes in order. In memory lane ``q`` (0..3) of a quad of threads owns the
    16 bytes at ``64 j + 16 q``; a mode owns consecutive 32-bit words of every lane at ONE bit position, so that a register is
    unpacked by a single AND.
    """

    record_bytes: int
    half_rows: tuple[int, ...]
    position: tuple[int, ...]
    """Bit position (0..3) of each mode: its digits are bits ``[2 position, 2 position + 2)`` of their bytes."""
    word_start: tuple[int, ...]
    """First word of each mode at its bit position."""

    @property
    def slots(self) -> int:
        return 4 * self.record_bytes

    @functools.cached_property
    def mode_start(self) -> tuple[int, ...]:
        starts = [0]
        for rows in self.half_rows:
            starts.append(starts[-1] + 32 * rows)
        return tuple(starts)

    @functools.cached_property
    def slot_mode(self) -> Tensor:
        """int64 ``[slots]``: token mode of a slot."""
        return torch.repeat_interleave(torch.arange(PAGE_TOKENS), torch.tensor([32 * r for r in self.half_rows]))

    @functools.cached_property
    def slot_byte(self) -> Tensor:
        """int64 ``[slots]``: byte of the record that holds a slot's digit."""
        u = torch.arange(self.slots) - torch.tensor(self.mode_start)[:-1][self.slot_mode]
        word = torch.tensor(self.word_start)[self.slot_mode] + u // 16
        return 64 * (word // 4) + 16 * ((u % 16) // 4) + 4 * (word % 4) + u % 4

    @functools.cached_property
    def slot_shift(self) -> Tensor:
        """int64 ``[slots]``: lowest bit of the digit within its byte."""
        return 2 * torch.tensor(self.position)[self.slot_mode]

    @functools.cached_property
    def byte_slots(self) -> Tensor:
        """int64 ``[record_bytes, 4]``: slot at each bit position of each byte, the inverse of slot_byte and slot_shift."""
        inverse = torch.full((self.record_bytes, 4), -1, dtype=torch.int64)
        inverse[self.slot_byte, self.slot_shift // 2] = torch.arange(self.slots)
        if (inverse < 0).any():
            raise AssertionError("the sketch layout does not cover every bit of the record")
        return inverse


def _deal_modes(half_rows: tuple[int, ...], words_per_position: int) -> dict[int, tuple[int, ...]]:
    """Deal modes to the four bit positions so that each position is filled exactly; largest first, mode 0 at the highest position."""
    room = {3: words_per_position, 2: words_per_position, 1: words_per_position, 0: words_per_position}
    modes: dict[int, list[int]] = {3: [], 2: [], 1: [], 0: []}
    order = sorted((m for m in range(PAGE_TOKENS) if half_rows[m]), key=lambda m: (-half_rows[m], m))

    def place(i: int) -> bool:
        if i == len(order):
            return True
        mode = order[i]
        for p in (3,) if mode == 0 else (3, 2, 1, 0):
            if room[p] >= 2 * half_rows[mode]:
                room[p] -= 2 * half_rows[mode]
                modes[p].append(mode)
                if place(i + 1):
                    return True
                modes[p].pop()
                room[p] += 2 * half_rows[mode]
        return False

    if not place(0):
        raise AssertionError(f"half rows {half_rows} can't be dealt to four bit positions")
    return {p: tuple(sorted(m, key=lambda mode: (mode % 2, mode))) for p, m in modes.items()}


@functools.lru_cache
def sketch_layout(record_bytes: int = 256) -> SketchLayout:
    """Layout of a sketch record of 128, 192, 256 or 384 bytes."""
    if record_bytes not in SKETCH_HALF_ROWS:
        raise ValueError(f"record_bytes is {record_bytes}; the sketch selector has records of {', '.join(map(str, SKETCH_HALF_ROWS))} bytes")
    half_rows = SKETCH_HALF_ROWS[record_bytes]
    runs = dict(_RUNS_256) if record_bytes == 256 else _deal_modes(half_rows, record_bytes // 16)
    position, word_start = [0] * PAGE_TOKENS, [0] * PAGE_TOKENS
    for p, run in runs.items():
        word = 0
        for mode in run:
            position[mode], word_start[mode] = p, word
            word += 2 * half_rows[mode]
        if word != record_bytes // 16:
            raise AssertionError(f"bit position {p} of the {record_bytes}-byte sketch record holds {word} words")
    return SketchLayout(record_bytes, half_rows, tuple(position), tuple(word_start))


LARGEST_GROUP = 128
"""Most query heads of one kv head: all heads of a model with latent attention."""


def padded_group(group: int) -> int:
    """Query heads per kv head as the kernels store them: 4, 8, 16, 32, 64 or 128 columns."""
    if not 1 <= group <= LARGEST_GROUP:
        raise ValueError(f"the model has {group} query heads per kv head; 1 to {LARGEST_GROUP} are supported")
    return max(4, 1 << (group - 1).bit_length())
