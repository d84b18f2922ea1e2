"""Random problems for the kernel bench: a paged cache, records, and page tables of one or more layers, larger than the L2 cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvskim.calibration import fit_layer
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.selectors import PageTables, Selector, get_selector

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """A decode batch: requests x context tokens, kv heads, query heads per kv head, head dim."""

    requests: int
    context: int
    heads: int
    group: int
    dim: int = 128

    def __str__(self) -> str:
        context = f"{self.context // 1024}K" if self.context < 1 << 20 else f"{self.context >> 20}M"
        return f"{self.requests} x {context}, {self.heads} kv heads, G {self.group}, d {self.dim}"

    @property
    def pages(self) -> int:
        return ceil_div(self.context, PAGE_TOKENS)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of the whole batch, bf16."""
        return 4 * self.requests * self.context * self.heads * self.dim


@functools.lru_cache(maxsize=8)
def sketch_tables(heads: int, dim: int, record_bytes: int = 256) -> Any:
    """Tables fitted on random keys whose channels have falling variance, as real ones do."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    spectrum = torch.logspace(0, -1.0, dim, device="cuda")
    keys = torch.randn(heads, 2048, dim, device="cuda", generator=generator) * spectrum
    queries = torch.randn(heads, 512, dim, device="cuda", generator=generator) * dim**-0.5
    return fit_layer(keys, queries, record_bytes=record_bytes).sketch.to("cuda")


def tables_of(selector: Selector, shape: Shape) -> Any:
    if selector.name == "sketch":
        return sketch_tables(shape.heads, shape.dim, selector.record_bytes(shape.dim))
    return PageTables(torch.zeros(shape.heads, shape.dim, device="cuda"))


class Records:
    """Random record bytes for several sets of the same shape in one pool, pages in random physical order.

    Random bytes are what a kernel's time depends on, not meaningful scores; for page selectors the float fields are made by encoding
    one random page and repeating its record, so that no field is NaN.
    """

    def __init__(self, selector: Selector, shape: Shape, smallest_bytes: int = 512 << 20, most_sets: int = 24) -> None:
        width = selector.record_bytes(shape.dim)
        per_set = shape.requests * shape.pages
        sets = max(2, min(most_sets, ceil_div(smallest_bytes, per_set * shape.heads * width)))
        count = sets * per_set
        self.bytes_per_set = per_set * shape.heads * width
        if selector.name == "sketch":
            self.pool = torch.randint(0, 256, (count, shape.heads, width), dtype=torch.uint8, device="cuda")
        else:
            keys = torch.randn(64, shape.heads, PAGE_TOKENS, shape.dim, device="cuda")
            few = selector.encode(keys, tables_of(selector, shape))
            self.pool = few[torch.randint(0, 64, (count,), device="cuda")].contiguous()
        order = torch.randperm(count, device="cuda").to(torch.int32)
        self.block_tables = [order[i * per_set : (i + 1) * per_set].view(shape.requests, shape.pages).contiguous() for i in range(sets)]


class Cache:
    """A paged bf16 KV cache in vLLM's layout ``[blocks, 2, block_size, H, D]``, random values, and block tables for several sets."""

    def __init__(self, shape: Shape, smallest_bytes: int = 512 << 20, most_sets: int = 8, block_size: int = BLOCK_SIZE) -> None:
        blocks = shape.requests * ceil_div(shape.context, block_size)
        sets = max(1, min(most_sets, ceil_div(smallest_bytes, shape.kv_bytes)))
        storage = torch.empty(sets * blocks, 2, block_size, shape.heads, shape.dim, dtype=torch.bfloat16, device="cuda")
        for part in storage.split(max(1, (1 << 30) // storage[0].numel())):
            part.normal_(0, 0.5)
        self.keys, self.values = storage.unbind(1)
        order = torch.randperm(sets * blocks, device="cuda").to(torch.int32)
        self.block_tables = [order[i * blocks : (i + 1) * blocks].view(shape.requests, -1).contiguous() for i in range(sets)]
        self.block_size = block_size


def seq_lens(shape: Shape) -> Tensor:
    return torch.full((shape.requests,), shape.context, dtype=torch.int32, device="cuda")


def query(shape: Shape) -> Tensor:
    return torch.randn(shape.requests, shape.heads * shape.group, shape.dim, dtype=torch.bfloat16, device="cuda")


def selector_by_name(name: str) -> Selector:
    """``sketch``, ``rki4``, or with an option: ``rki4:rank=4``."""
    base, _, option = name.partition(":")
    options = {}
    if option:
        key, _, value = option.partition("=")
        options[key] = int(value)
    return get_selector(base, **options)
