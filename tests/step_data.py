"""A decode batch in a paged cache, for tests of the operations and of the whole step on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvskim.calibration import fit_layer
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.selectors import PageTables, get_selector


@dataclass
class Batch:
    """One layer of a paged batch. Everything a step needs, in the shapes of `kvskim.ops`."""

    selector: Any
    tables: Any
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    records: Tensor
    block_table: Tensor
    seq_lens: Tensor
    scale: float

    @property
    def page_capacity(self) -> int:
        return self.block_table.shape[1] * (self.key_cache.shape[1] // PAGE_TOKENS)

    def to(self, device: str) -> Batch:
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.__dict__.items()}
        moved["tables"] = self.tables.to(device)
        return Batch(**moved)


def peaked_keys(lengths: int, heads: int, dim: int, generator: torch.Generator) -> Tensor:
    """Keys ``[T, H, D]`` with slowly moving content, so that pages differ and attention has peaks."""
    walk = torch.randn(max(lengths, 1), heads, dim, generator=generator).cumsum(0) * 0.15
    return (walk + torch.randn(max(lengths, 1), heads, dim, generator=generator) + 1.5 * torch.randn(1, heads, dim, generator=generator))[:lengths]


def make_batch(
    selector: str, lengths: list[int], *, heads: int = 2, group: int = 2, dim: int = 64, block_size: int = 16, dtype: torch.dtype = torch.float32,
    packed: bool = False, seed: int = 0, sharpness: float = 2.0, **options: Any,
) -> Batch:
    """Random requests in randomly placed blocks, records encoded with the torch selectors. ``packed``: K and V interleaved per row, as newer vLLM has it."""
    generator = torch.Generator().manual_seed(seed)
    chosen = get_selector(selector, **options)
    scale = dim**-0.5
    blocks = [ceil_div(n, block_size) for n in lengths]
    total = sum(blocks) + 3
    order = torch.randperm(total, generator=generator).to(torch.int32)
    table = torch.full((len(lengths), max([*blocks, 1])), 2**30, dtype=torch.int32)  # an entry that must never be read
    if packed:
        storage = torch.randn(total, heads, block_size, 2 * dim, generator=generator).to(dtype)
        key_cache, value_cache = storage.transpose(1, 2).split(dim, -1)
    else:
        storage = torch.randn(total, 2, block_size, heads, dim, generator=generator).to(dtype)
        key_cache, value_cache = storage.unbind(1)
    at = 0
    for r, n in enumerate(lengths):
        table[r, : blocks[r]] = order[at : at + blocks[r]]
        at += blocks[r]
        keys = peaked_keys(n, heads, dim, generator).to(dtype)
        position = torch.arange(n)
        block = table[r, position // block_size].long()
        key_cache[block, position % block_size] = keys
        value_cache[block, position % block_size] = torch.randn(n, heads, dim, generator=generator).to(dtype)
    query = (torch.randn(len(lengths), heads * group, dim, generator=generator) * sharpness).to(dtype)
    sample = peaked_keys(512, heads, dim, generator).transpose(0, 1)
    if selector == "sketch":
        queries = torch.randn(heads * group, 64, dim, generator=generator) * scale * sharpness
        tables: Any = fit_layer(sample, queries, record_bytes=chosen.record_bytes(dim)).sketch
    else:
        tables = PageTables(sample.mean(1))
    pages = key_cache.reshape(total, block_size // PAGE_TOKENS, PAGE_TOKENS, heads, dim).flatten(0, 1).transpose(1, 2)
    records = chosen.encode(pages, tables)
    return Batch(chosen, tables, query, key_cache, value_cache, records.contiguous(), table, torch.tensor(lengths, dtype=torch.int32), scale)
