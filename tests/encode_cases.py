"""Random paged keys, random sketch tables and poisoned records for the encode tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, dct_matrix, sketch_layout
from kvskim.ops.encode import encode, encode_torch
from kvskim.selectors import PageTables, Selector, get_selector
from kvskim.selectors.sketch import UNUSED_DIGIT, SketchTables, unpack_digits

POISON = 0xAA
LAYOUTS = ("tokens", "heads", "interleaved")
STEPS = {1: 1.0, 2: 0.3, 3: 0.09, 4: 0.03}
"""Step of a coefficient by its number of digits; keys in the tests have a spread of about 1.5."""


def random_sketch_tables(heads: int, dim: int, record_bytes: int, generator: torch.Generator, most_digits: int = 4) -> SketchTables:
    """Tables with random directions, widths (1 to ``most_digits`` digits) and counts, digits in random slots, and some slots unused."""
    layout = sketch_layout(record_bytes)
    slots = layout.slots
    encode_matrix, query_matrix = torch.zeros(2, heads, slots, dim)
    bits = torch.zeros(heads, slots, dtype=torch.uint8)
    count = torch.zeros(heads, PAGE_TOKENS, dtype=torch.int32)
    coefficient = torch.zeros(heads, slots, dtype=torch.int16)
    digit = torch.full((heads, slots), UNUSED_DIGIT, dtype=torch.uint8)
    for h in range(heads):
        for mode, (start, stop) in enumerate(zip(layout.mode_start, layout.mode_start[1:])):
            if stop == start:
                continue
            room = stop - start - int(torch.randint(0, 8, (1,), generator=generator))
            entries: list[tuple[int, int]] = []
            row = start
            while room > 0 and row - start < dim:
                digits = min(room, int(torch.randint(1, most_digits + 1, (1,), generator=generator)))
                direction = torch.randn(dim, generator=generator)
                direction /= direction.norm()
                encode_matrix[h, row], query_matrix[h, row] = direction / STEPS[digits], direction * STEPS[digits]
                bits[h, row] = 2 * digits
                entries += [(row, k) for k in range(digits)]
                room -= digits
                row += 1
            count[h, mode] = row - start
            places = start + torch.randperm(stop - start, generator=generator)[: len(entries)]
            coefficient[h, places] = torch.tensor([r for r, _ in entries], dtype=torch.int16)
            digit[h, places] = torch.tensor([k for _, k in entries], dtype=torch.uint8)
    mean = torch.randn(heads, dim, generator=generator) * 2
    return SketchTables(record_bytes, mean, encode_matrix.bfloat16(), query_matrix.bfloat16(), bits, count, coefficient, digit)


@dataclass
class EncodeCase:
    """A cache full of random keys. ``layout``: "tokens" ``[blocks, block_size, H, D]``, "heads" (head-major), "interleaved" (K beside V)."""

    selector_name: str = "sketch"
    options: dict[str, Any] = field(default_factory=dict)
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    heads: int = 2
    block_size: int = 16
    blocks: int = 6
    layout: str = "tokens"
    bias: float = 0.0
    most_digits: int = 4
    seed: int = 0
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.selector: Selector = get_selector(self.selector_name, **self.options)
        width = self.selector.record_bytes(self.dim)
        self.k_scale = 0.37 if self.dtype == torch.float8_e4m3fn else 1.0
        if self.selector_name == "sketch":
            tables: Any = random_sketch_tables(self.heads, self.dim, width, g, self.most_digits)
            centre = tables.mean
        else:
            centre = torch.randn(self.heads, self.dim, generator=g) * 2
            tables = PageTables(centre)
        if self.bias:  # a few huge constant channels, as some models have
            centre[:, :: self.dim // 4] += self.bias
        low = torch.randn(self.blocks, self.block_size, self.heads, 4, generator=g) @ torch.randn(4, self.dim, generator=g)
        keys = centre + torch.randn(self.blocks, self.block_size, self.heads, self.dim, generator=g) + 0.5 * low
        keys = (keys / self.k_scale).to(self.dtype)
        if self.layout == "heads":
            keys = keys.transpose(1, 2).contiguous().to(self.device).transpose(1, 2)
        elif self.layout == "interleaved":
            keys = torch.stack([keys.float(), torch.full_like(keys.float(), torch.nan)], 1).to(self.dtype).to(self.device)[:, 0]
        self.key_cache = keys.to(self.device)
        self.tables = tables.to(self.device)
        self.records = torch.full((self.blocks * self.block_size // PAGE_TOKENS, self.heads, width), POISON, dtype=torch.uint8, device=self.device)

    @property
    def pages(self) -> int:
        return self.records.shape[0]

    def slots(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def run(self, slots: list[int], kernels: str) -> None:
        """``kernels``: those of `encode`, and behind a space the encoder if it is not to be chosen: "cuda few"."""
        self.encode(self.slots(slots), kernels)

    def encode(self, slots: Tensor, kernels: str, **options: Any) -> None:
        kernels, _, encoder = kernels.partition(" ")
        encode(
            self.selector, self.tables, self.key_cache, slots, self.records, k_scale=self.k_scale, kernels=kernels, encoder=encoder or None, **options
        )

    def expected(self, slots: list[int]) -> Tensor:
        """Records of the torch reference on the CPU, poison where no page is completed."""
        records = torch.full_like(self.records, POISON, device="cpu")
        encode_torch(self.selector, self.tables.to("cpu"), self.key_cache.cpu(), torch.tensor(slots, dtype=torch.int64), records, k_scale=self.k_scale)
        return records

    def completed(self, slots: list[int]) -> list[int]:
        return sorted({s // 16 for s in slots if s >= 0 and s % 16 == 15 and s // 16 < self.pages})

    def queries(self) -> Tensor:
        g = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(3, self.heads, 2, self.dim, generator=g) * self.dim**-0.5

    def problems(self, slots: list[int]) -> list[str]:
        """What is wrong with the records after `run`, one short line each; empty when nothing is."""
        actual, wanted = self.records.cpu(), self.expected(slots)
        done = self.completed(slots)
        others = [p for p in range(self.pages) if p not in done]
        found = []
        if not bool((actual[others] == POISON).all()):
            found.append("records of pages that were not completed were written")
        if not done:
            return found
        if self.selector_name == "sketch":
            per_page = self.key_cache.cpu().float() * self.k_scale
            keys = per_page.unflatten(1, (-1, PAGE_TOKENS)).flatten(0, 1)[done].transpose(1, 2)
            # Every code is checked; scores differ where a code on a boundary does, by the weight of its step.
            return found + sketch_problems(actual[done], wanted[done], keys, self.tables.to("cpu"))
        if self.selector_name == "minmax" and not torch.equal(actual, wanted):
            found.append(f"{int((actual != wanted).sum())} bytes of bounds differ")
        if self.selector_name == "mean" and float((actual != wanted).float().mean()) > 0.005:
            found.append("codes of means differ")
        tables = self.tables.to("cpu")
        ours, reference = (self.selector.score(self.queries(), r[done], tables) for r in (actual, wanted))
        error = float((ours - reference).abs().max())
        # Eigenvectors may come with either sign, and half-way codes round either way with them.
        if not error <= (0.02 if self.selector_name in ("mean", "minmax") else 0.08):
            found.append(f"scores differ by {error:.3f}")
        return found


def sketch_codes(records: Tensor, tables: SketchTables) -> Tensor:
    """Codes int64 ``[P, H, S]`` that the digits of the records make, 0 where a row is unused."""
    digits = unpack_digits(records, tables.layout).long()
    value = torch.where(tables.slot_digit != UNUSED_DIGIT, digits << (2 * tables.slot_digit.long().clamp_max(3)), 0)
    codes = torch.zeros(records.shape[0], records.shape[1], tables.layout.slots, dtype=torch.int64)
    return codes.scatter_add_(-1, tables.slot_coefficient.long().expand_as(value), value)


def exact_values(keys: Tensor, tables: SketchTables) -> tuple[Tensor, Tensor]:
    """Coefficients in steps, float64 ``[P, H, S]``, of pages ``[P, H, 16, D]``; and the root of the sum of squares of their terms."""
    modes = torch.einsum("tj,phtd->phjd", dct_matrix(torch.float64), keys.double() - tables.mean.double()[None, :, None])
    matrix = tables.encode_matrix.double()
    value, spread = torch.zeros(2, keys.shape[0], keys.shape[1], tables.layout.slots, dtype=torch.float64)
    for mode, (start, stop) in enumerate(zip(tables.layout.mode_start, tables.layout.mode_start[1:])):
        value[..., start:stop] = torch.einsum("phd,hsd->phs", modes[:, :, mode], matrix[:, start:stop])
        spread[..., start:stop] = torch.einsum("phd,hsd->phs", modes[:, :, mode].square(), matrix[:, start:stop].square()).sqrt()
    return value, spread


def sketch_problems(actual: Tensor, wanted: Tensor, keys: Tensor, tables: SketchTables) -> list[str]:
    found = []
    difference = (sketch_codes(actual, tables) - sketch_codes(wanted, tables)).abs()
    used = int(tables.coefficient_count.sum()) * len(actual)
    if int(difference.max()) > 1:
        found.append(f"codes differ by up to {int(difference.max())}")
    # At most one code in 200 lies so close to a boundary; of few codes some more may by chance: three standard deviations.
    likely = 0.005 * used
    if int((difference > 0).sum()) > max(1.0, likely + 3 * likely**0.5):
        found.append(f"{int((difference > 0).sum())} of {used} codes differ")
    # A code may only differ where the coefficient lies on a boundary, as far as 11 bits of mantissa can tell: then either code is as good.
    if bool((difference > 0).any()):
        value, spread = exact_values(keys, tables)
        distance = (value - value.round()).abs()
        off = (difference > 0) & (distance > 1e-3 + 2e-3 * spread)
        if bool(off.any()):
            found.append(f"{int(off.sum())} codes differ although their coefficient is up to {float(distance[off].max()):.3f} steps from a boundary")
    unused = unpack_digits(actual, tables.layout)[:, tables.slot_digit == UNUSED_DIGIT]
    if bool((unused != 0).any()):
        found.append("digits of unused slots are not 0")
    return found


def slot_lists(case: EncodeCase) -> dict[str, list[int]]:
    """Slot mappings of every kind of step, by name. The blocks of a request are in random order."""
    g = torch.Generator().manual_seed(case.seed + 2)
    order = torch.randperm(case.blocks, generator=g).tolist()
    request = [block * case.block_size + t for block in order for t in range(case.block_size)]
    last = [p * 16 + 15 for p in torch.randperm(case.pages, generator=g).tolist()]
    return {
        "empty": [], "padding": [-1] * 5, "one": [last[0]], "not the last": [last[0] - 1], "15 tokens": request[:15], "16 tokens": request[:16],
        "17 tokens": request[:17], "chunk": request[5:39], "prompt": [*request, -1, -1], "decode, all complete": last,
        "decode, none completes": [s - 1 - i % 15 for i, s in enumerate(last)], "decode, mixed": [s - i % 2 for i, s in enumerate(last)] + [-1],
        "beyond the records": [last[0], case.pages * 16 + 15, (1 << 40) * 16 + 15],
    }
