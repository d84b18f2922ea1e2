"""Random problems for the kernel bench: a paged cache, records, and page tables of one or more layers, larger than the L2 cache."""

from __future__ import annotations

import functools
import math
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
    """A decode batch: requests x context tokens, kv heads, query heads per kv head, head dim.

    ``latent``: so many channels of a cache row are its value too (MLA, one kv head); 0: keys and values apart.
    """

    requests: int
    context: int
    heads: int
    group: int
    dim: int = 128
    latent: int = 0

    def __str__(self) -> str:
        context = f"{self.context // 1024}K" if self.context < 1 << 20 else f"{self.context >> 20}M"
        heads = f"MLA, {self.group} heads" if self.latent else f"{self.heads} kv heads, G {self.group}"
        return f"{self.requests} x {context}, {heads}, d {self.dim}"

    @property
    def value_dim(self) -> int:
        return self.latent or self.dim

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V of one token and kv head, bf16."""
        return 2 * self.dim if self.latent else 4 * self.dim

    @property
    def pages(self) -> int:
        return ceil_div(self.context, PAGE_TOKENS)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of the whole batch, bf16."""
        return self.requests * self.context * self.heads * self.row_bytes


@functools.lru_cache(maxsize=8)
def sketch_tables(heads: int, dim: int, record_bytes: int = 256, device: str = "cuda") -> Any:
    """Tables fitted on random keys whose channels have falling variance, as real ones do."""
    generator = torch.Generator(device=device).manual_seed(0)
    spectrum = torch.logspace(0, -1.0, dim, device=device)
    keys = torch.randn(heads, 2048, dim, device=device, generator=generator) * spectrum
    queries = torch.randn(heads, 512, dim, device=device, generator=generator) * dim**-0.5
    return fit_layer(keys, queries, record_bytes=record_bytes).sketch.to(device)


def tables_of(selector: Selector, shape: Shape, device: str = "cuda") -> Any:
    if selector.name == "sketch":
        return sketch_tables(shape.heads, shape.dim, selector.record_bytes(shape.dim), device)
    return PageTables(torch.zeros(shape.heads, shape.dim, device=device))


def record_pool(selector: Selector, shape: Shape, count: int, device: str = "cuda") -> Tensor:
    """Random records, uint8 ``[count, heads, record bytes]``.

    Random bytes are what a kernel's time depends on, not meaningful scores; for page selectors some random pages are encoded and their records
    repeated, so that no float field is NaN.
    """
    if selector.name == "sketch":
        return torch.randint(0, 256, (count, shape.heads, selector.record_bytes(shape.dim)), dtype=torch.uint8, device=device)
    keys = torch.randn(64, shape.heads, PAGE_TOKENS, shape.dim, device=device)
    few = selector.encode(keys, tables_of(selector, shape, device))
    return few[torch.randint(0, 64, (count,), device=device)].contiguous()


class Records:
    """Records of `record_pool` for several sets of the same shape in one pool, pages in random physical order."""

    def __init__(self, selector: Selector, shape: Shape, smallest_bytes: int = 512 << 20, most_sets: int = 24) -> None:
        width = selector.record_bytes(shape.dim)
        per_set = shape.requests * shape.pages
        sets = max(2, min(most_sets, ceil_div(smallest_bytes, per_set * shape.heads * width)))
        count = sets * per_set
        self.bytes_per_set = per_set * shape.heads * width
        self.pool = record_pool(selector, shape, count)
        order = torch.randperm(count, device="cuda").to(torch.int32)
        self.block_tables = [order[i * per_set : (i + 1) * per_set].view(shape.requests, shape.pages).contiguous() for i in range(sets)]


class Cache:
    """A paged bf16 KV cache in vLLM's layout, random values, and block tables for several sets.

    ``[blocks, 2, block_size, H, D]``, or ``[blocks, block_size, D]`` of latent rows. ``sets`` None: as many, up to 8, as the whole cache takes
    to have ``smallest_bytes``.
    """

    def __init__(
        self, shape: Shape, smallest_bytes: int = 512 << 20, sets: int | None = None, block_size: int = BLOCK_SIZE, device: str = "cuda"
    ) -> None:
        blocks = shape.requests * ceil_div(shape.context, block_size)
        sets = max(1, min(8, ceil_div(smallest_bytes, shape.kv_bytes))) if sets is None else sets
        row = (block_size, shape.dim) if shape.latent else (2, block_size, shape.heads, shape.dim)
        storage = torch.empty(sets * blocks, *row, dtype=torch.bfloat16, device=device)
        for part in storage.split(max(1, (1 << 30) // storage[0].numel())):
            part.normal_(0, 0.5)
        if shape.latent:
            self.keys = storage.unsqueeze(2)
            self.values = self.keys[..., : shape.latent]
        else:
            self.keys, self.values = storage.unbind(1)
        order = torch.randperm(sets * blocks, device=device).to(torch.int32)
        self.block_tables = [order[i * blocks : (i + 1) * blocks].view(shape.requests, -1).contiguous() for i in range(sets)]
        self.block_size = block_size
        self.pages = sets * blocks * (block_size // PAGE_TOKENS)


def seq_lens(shape: Shape, device: str = "cuda") -> Tensor:
    return torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device)


def query(shape: Shape, device: str = "cuda") -> Tensor:
    return torch.randn(shape.requests, shape.heads * shape.group, shape.dim, dtype=torch.bfloat16, device=device)


def fill_scores(scores: Tensor, base: Tensor, forced: Tensor, partials: Tensor, near_equal: bool = False) -> None:
    """Random scores with one sink and one window page, and the sums that belong to them; arguments as of `kvskim.ops.score.score`.

    ``near_equal``: every page has about the same mass, so in float16 most pages have the same few scores, as in an engine without weights. Else the
    scores of pages differ by a standard deviation of 2.5.
    """
    if near_equal:
        scores.normal_(math.log(PAGE_TOKENS), 2e-4)
    else:
        scores.normal_(-9.0, 2.5)
    base.zero_()
    forced.zero_()
    terms = torch.exp(scores[:, :, 1:-1].float()).sum(2) / partials.shape[2]
    partials.copy_(terms[:, :, None].expand_as(partials))


def selector_by_name(name: str) -> Selector:
    """``sketch``, ``rki4``, or with an option: ``rki4:rank=4``."""
    base, _, option = name.partition(":")
    options = {}
    if option:
        key, _, value = option.partition("=")
        options[key] = int(value)
    return get_selector(base, **options)
