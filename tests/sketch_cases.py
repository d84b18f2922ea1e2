"""Random decode steps for the sketch score kernels, with poisoned outputs and a float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvskim.layout import ceil_div, dct_matrix, padded_group, sketch_layout
from kvskim.ops.score import sketch_scratch_bytes
from kvskim.selectors.sketch import SketchTables, round_weights, slot_weights, unpack_digits

GUARD = 256
"""Elements before and after every output that no kernel may touch."""


def random_tables(heads: int, dim: int, record_bytes: int, generator: torch.Generator) -> SketchTables:
    """Tables with random coefficient counts, digits and unused slots; the logits of random records spread by a few nats."""
    layout = sketch_layout(record_bytes)
    slots = layout.slots
    matrix = torch.zeros(heads, slots, dim)
    count = torch.zeros(heads, 16, dtype=torch.int32)
    coefficient = torch.zeros(heads, slots, dtype=torch.int16)
    digit = torch.full((heads, slots), 255, dtype=torch.uint8)
    for h in range(heads):
        for j, (start, stop) in enumerate(zip(layout.mode_start, layout.mode_start[1:])):
            n = stop - start
            if not n:
                continue
            used = int(torch.randint(1, n + 1, (1,), generator=generator))
            count[h, j] = used
            coefficient[h, start:stop] = (start + torch.randint(0, used, (n,), generator=generator)).short()
            own = torch.randint(0, 4, (n,), generator=generator).to(torch.uint8)
            own[torch.rand(n, generator=generator) < 0.05] = 255
            digit[h, start:stop] = own
            power = torch.where(own < 4, 4.0 ** own.float().clamp_max(3), torch.zeros(())).square().sum().sqrt().clamp_min(1)
            spread = 12.0 if j == 0 else 6.0 / (1 + j / 3)
            matrix[h, start : start + used] = torch.randn(used, dim, generator=generator) * spread / (1.12 * power)
    bits = torch.zeros(heads, slots, dtype=torch.uint8)
    mean = torch.randn(heads, dim, generator=generator)
    return SketchTables(record_bytes, mean, torch.zeros(heads, slots, dim, dtype=torch.bfloat16), matrix.bfloat16(), bits, count, coefficient, digit)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A NaN-filled tensor with guard elements around it."""
    flat = torch.full((math.prod(shape) + 2 * GUARD,), math.nan, dtype=dtype, device=device)
    return flat[GUARD:-GUARD].view(shape)


def guards_intact(tensor: Tensor) -> bool:
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return bool(flat[:GUARD].isnan().all() and flat[-GUARD:].isnan().all())


@dataclass
class Scratch:
    sketch_weights: Tensor


@dataclass
class SketchCase:
    """One decode step. ``layout``: "tokens" ``[blocks, block_size, H, D]``, "heads" (head-major memory), "interleaved" (K and V in one block)."""

    lengths: list[int]
    heads: int = 2
    group: int = 4
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    layout: str = "tokens"
    float8: bool = False
    softcap: float = 0.0
    sink_pages: int = 1
    window_pages: int = 1
    record_bytes: int = 256
    chunks: int = 3
    seed: int = 0
    device: torch.device | str = "cpu"
    inputs: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        requests, per_block = len(self.lengths), self.block_size // 16
        need = [ceil_div(n, self.block_size) for n in self.lengths]
        blocks = sum(need) + 3
        order = torch.randperm(blocks, generator=g).int()
        table = torch.full((requests, max(need) + 2), 1 << 30, dtype=torch.int32)  # what is beyond a request may not be read
        at = 0
        for r, n in enumerate(need):
            table[r, :n] = order[at : at + n]
            at += n
        self.scale = 1 / math.sqrt(self.dim)
        self.k_scale = 0.5 if self.float8 else 1.0
        query = torch.randn(requests, self.heads * self.group, self.dim, generator=g).to(self.dtype)
        keys = torch.randn(blocks, self.block_size, self.heads, self.dim, generator=g) * 2
        keys = keys.to(torch.float8_e4m3fn if self.float8 else self.dtype)
        poison = torch.full((self.heads, self.dim), math.nan).to(keys.dtype)
        for r, n in enumerate(self.lengths):
            if n == 0:
                query[r] = math.nan
            for token in range(n, need[r] * self.block_size):
                keys[int(table[r, token // self.block_size]), token % self.block_size] = poison
        if self.layout == "heads":
            keys = keys.transpose(1, 2).contiguous().to(self.device).transpose(1, 2)
        elif self.layout == "interleaved":
            keys = torch.stack([keys, torch.full_like(keys.float(), math.nan).to(keys.dtype)], 1).to(self.device)[:, 0]
        records = torch.randint(0, 256, (blocks * per_block, self.heads, self.record_bytes), dtype=torch.uint8, generator=g)
        self.page_capacity = max(1, ceil_div(max(self.lengths), 16)) + 3
        self.tables = random_tables(self.heads, self.dim, self.record_bytes, g).to(self.device)
        self.inputs = dict(
            query=query.to(self.device), key_cache=keys.to(self.device), records=records.to(self.device), block_table=table.to(self.device),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
        )

    def outputs(self) -> dict[str, Tensor]:
        columns = padded_group(self.group)
        rows = (len(self.lengths), self.heads)
        return dict(
            scores=guarded((*rows, self.page_capacity, columns), torch.float16, self.device),
            base=guarded((*rows, columns), torch.float32, self.device),
            forced=guarded((*rows, columns), torch.float32, self.device),
            partials=guarded((*rows, self.chunks, columns), torch.float32, self.device),
        )

    def scratch(self) -> Scratch:
        size = sketch_scratch_bytes(len(self.lengths), self.heads, self.group, self.record_bytes)
        return Scratch(torch.full((size,), 0x7F, dtype=torch.uint8, device=self.device))

    def settings(self) -> dict[str, Any]:
        return dict(scale=self.scale, softcap=self.softcap, sink_pages=self.sink_pages, window_pages=self.window_pages, k_scale=self.k_scale)

    def scored_pages(self, r: int) -> int:
        return max(0, ceil_div(self.lengths[r], 16) - self.window_pages)

    def rounded_weights(self) -> tuple[Tensor, Tensor]:
        """The reference's int8 weights ``[R, H, G, slots]`` and scales ``[R, H, G, 16]``."""
        query = self.inputs["query"].float().unflatten(1, (self.heads, self.group))
        return round_weights(slot_weights(query * self.scale, self.tables), self.tables.layout)

    def expected_scores(self, r: int, weights: Tensor, scales: Tensor, sample: Tensor | None = None) -> Tensor:
        """float64 ``[H, pages, G]`` from int8 weights of request r, for all scored pages or a sample of them."""
        layout, per_block = self.tables.layout, self.block_size // 16
        pages = torch.arange(self.scored_pages(r), device=weights.device) if sample is None else sample
        row = self.inputs["block_table"][r]
        physical = row[pages // per_block].long() * per_block + pages % per_block
        digits = unpack_digits(self.inputs["records"][physical], layout).double() - 1.5
        values = [
            torch.einsum("hgs,phs->hpg", weights[r, ..., start:stop].double(), digits[..., start:stop]) * scales[r, :, None, :, j].double()
            for j, (start, stop) in enumerate(zip(layout.mode_start, layout.mode_start[1:]))
        ]
        return (torch.stack(values, -1) @ dct_matrix(torch.float64, weights.device).T).logsumexp(-1)

    def expected_forced(self, r: int) -> tuple[Tensor, Tensor]:
        """float64 ``(forced, base)``, each ``[H, G]``."""
        query = self.inputs["query"][r].double().unflatten(0, (self.heads, self.group))
        base = self.scale * torch.einsum("hgd,hd->hg", query, self.tables.mean.double())
        total = ceil_div(self.lengths[r], 16)
        tokens = torch.tensor([t for t in range(self.lengths[r]) if t // 16 < self.sink_pages or t // 16 >= total - self.window_pages])
        tokens = tokens.to(query.device)
        blocks = self.inputs["block_table"][r][tokens // self.block_size].long()
        keys = self.inputs["key_cache"].float()[blocks, tokens % self.block_size].double() * self.k_scale
        logits = self.scale * torch.einsum("hgd,thd->hgt", query, keys)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits.logsumexp(-1) - base, base


def compare(case: SketchCase, out: dict[str, Tensor], score_tolerance: float = 0.02, weights: tuple[Tensor, Tensor] | None = None) -> list[str]:
    """What is wrong with the outputs of a score op, one short line each; empty when nothing is."""
    problems = []

    def expect(name: str, r: int, error: Tensor | float, limit: float) -> None:
        worst = float(error.max()) if isinstance(error, Tensor) and error.numel() else float(error) if not isinstance(error, Tensor) else 0.0
        if not worst <= limit:
            problems.append(f"{name} of request {r} (length {case.lengths[r]}): error {worst:.2e} > {limit:.0e}")

    problems += [f"{name} was written outside" for name, tensor in out.items() if not guards_intact(tensor)]
    rounded, scales = case.rounded_weights() if weights is None else weights
    group, chunks = case.group, case.chunks
    for r, length in enumerate(case.lengths):
        pages = case.scored_pages(r)
        if not bool(out["scores"][r, :, pages:].isnan().all()):
            problems.append(f"scores of request {r} were written from page {pages} on")
        if length == 0:
            continue
        forced, base = case.expected_forced(r)
        expect("base", r, (out["base"][r, :, :group] - base).abs(), 2e-5)
        expect("forced", r, (out["forced"][r, :, :group] - forced).abs(), 5e-5)
        if pages == 0:
            continue
        wanted = case.expected_scores(r, rounded, scales)
        error = (out["scores"][r, :, :pages, :group].double() - wanted).abs()
        half_place = wanted.abs() * 2.0**-11 if out["scores"].dtype == torch.float16 else 0.0  # what storing it as float16 may cost
        expect("scores", r, (error - half_place).clamp_min(0), score_tolerance)
        term = (wanted - out["forced"][r, :, None, :group].double()).clamp_max(83).exp()
        term[:, : case.sink_pages] = 0
        tiles = ceil_div(pages, 16)
        term = torch.nn.functional.pad(term, (0, 0, 0, 16 * tiles - pages)).unflatten(1, (tiles, 16)).sum(2)
        for chunk in range(min(chunks, tiles)):
            sums = term[:, chunk::chunks].sum(1)
            error = (out["partials"][r, :, chunk, :group].double() - sums).abs() / sums.clamp_min(1e-30)
            expect(f"partials of chunk {chunk}", r, torch.where(sums > 0, error, out["partials"][r, :, chunk, :group].double().abs()), 2 * score_tolerance)
    return problems
