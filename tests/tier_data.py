"""A worker's life for the host tier: requests that come, share prefixes, grow, are aborted, and whose blocks are used again.

Every token's K and V are a function of nothing but a running number, so that no two writes are the same: a stale copy shows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvskim.layout import ceil_div
from kvskim.tier.pages import HostTier, make_tier

JUNK = -(2**30) - 7


@dataclass
class Sizes:
    """Of a worker: blocks of its cache, requests at most, and rows of a step, which is padded to them.

    ``decoded``: tokens of a request behind its prompt, at most. ``eager``: how likely it is that one more request comes in a step.
    """

    blocks: int = 9
    block_size: int = 32
    heads: int = 2
    group: int = 2
    dim: int = 16
    requests: int = 3
    rows: int = 4
    longest: int = 80
    decoded: int = 6
    eager: float = 0.7
    dtype: torch.dtype = torch.float32

    @property
    def pages(self) -> int:
        return self.blocks * self.block_size // 16

    @property
    def columns(self) -> int:
        return ceil_div(self.longest, self.block_size) + 1


@dataclass
class Step:
    """One decode step: arguments of store, fetch and attend."""

    keys: Tensor
    values: Tensor
    slot_mapping: Tensor
    query: Tensor
    block_table: Tensor
    seq_lens: Tensor
    pages: Tensor
    counts: Tensor


@dataclass
class _Request:
    blocks: list[int]
    length: int
    left: int


class Worker:
    """Resident caches as the truth, and the steps of random requests. Rows that were never written hold NaN."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self.sizes, self.random, self.torch = sizes, random.Random(seed), torch.Generator().manual_seed(seed)
        shape = (sizes.blocks, sizes.block_size, sizes.heads, sizes.dim)
        self.keys = torch.full(shape, math.nan, dtype=sizes.dtype)
        self.values = torch.full(shape, math.nan, dtype=sizes.dtype)
        self.owners = [0] * sizes.blocks
        self.running: list[_Request] = []
        self.reused = 0
        self.shared = 0
        self._used: set[int] = set()

    def steps(self, count: int) -> Iterator[Step]:
        for _ in range(count):
            yield self._step()

    def _step(self) -> Step:
        slots: list[int] = []
        for request in list(self.running):
            if request.left == 0 or self.random.random() < 0.05:  # done, or aborted
                self.running.remove(request)
                for block in request.blocks:
                    self.owners[block] -= 1
        while len(self.running) < self.sizes.requests and self.random.random() < self.sizes.eager:
            if not self._admit(slots):
                break
        for request in self.running:
            if request.left and self._grow(request):
                slots.append(self._slot(request, request.length))
                request.length += 1
                request.left -= 1
        self.random.shuffle(slots)
        fresh = torch.randn(len(slots), 2, self.sizes.heads, self.sizes.dim, generator=self.torch).to(self.sizes.dtype)
        where = torch.tensor(slots, dtype=torch.int64)
        self.keys.view(-1, *self.keys.shape[2:])[where] = fresh[:, 0]
        self.values.view(-1, *self.values.shape[2:])[where] = fresh[:, 1]
        # vLLM hands over more rows than slots, and slots that only fill a graph.
        padded = torch.cat([fresh, torch.full((3, 2, self.sizes.heads, self.sizes.dim), math.nan, dtype=self.sizes.dtype)])
        return Step(padded[:, 0], padded[:, 1], torch.cat([where, torch.tensor([-1, -1])]), *self._selection())

    def _admit(self, slots: list[int]) -> bool:
        length = self.random.randint(1, self.sizes.longest - self.sizes.decoded)
        prefix = self._prefix(length)
        request = _Request(list(prefix), length, self.random.randint(1, self.sizes.decoded))
        for block in prefix:
            self.owners[block] += 1
        self.shared += bool(prefix)
        request.length = len(prefix) * self.sizes.block_size
        while request.length < length:
            if not self._grow(request):
                for block in request.blocks:
                    self.owners[block] -= 1
                slots[:] = [slot for slot in slots if slot // self.sizes.block_size not in request.blocks[len(prefix) :]]
                return False
            slots.append(self._slot(request, request.length))
            request.length += 1
        self.running.append(request)
        return True

    def _prefix(self, length: int) -> list[int]:
        """Whole blocks of another request's written prefix, as a prefix cache hands them out."""
        if not self.running or self.random.random() < 0.3:
            return []
        other = self.random.choice(self.running)
        return other.blocks[: min(other.length, length - 1) // self.sizes.block_size]

    def _grow(self, request: _Request) -> bool:
        if request.length < len(request.blocks) * self.sizes.block_size:
            return True
        free = [block for block in range(1, self.sizes.blocks) if self.owners[block] == 0]
        if not free:
            return False
        block = self.random.choice(free)
        self.reused += block in self._used
        self._used.add(block)
        self.owners[block] += 1
        request.blocks.append(block)
        return True

    def _slot(self, request: _Request, position: int) -> int:
        return request.blocks[position // self.sizes.block_size] * self.sizes.block_size + position % self.sizes.block_size

    def _selection(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        s = self.sizes
        rows = [*self.running, *[None] * (s.rows - len(self.running))]
        self.random.shuffle(rows)
        query = torch.randn(s.rows, s.heads * s.group, s.dim, generator=self.torch).to(s.dtype)
        table = torch.full((s.rows, s.columns), 2**30, dtype=torch.int32)
        lengths = torch.zeros(s.rows, dtype=torch.int32)
        pages = torch.full((s.rows, s.heads, ceil_div(s.longest, 16)), JUNK, dtype=torch.int32)
        counts = torch.full((s.rows, s.heads), 5, dtype=torch.int32)  # of a padded row: must not matter
        for r, request in enumerate(rows):
            if request is None:
                table[r] = 0
                continue
            table[r, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
            lengths[r] = request.length
            total = ceil_div(request.length, 16)
            for h in range(s.heads):
                counts[r, h] = total
                if self.random.random() < 0.8:
                    chosen = sorted({total - 1, *self.random.sample(range(total), self.random.randint(0, min(total, 4)))})
                    counts[r, h] = len(chosen)
                    if len(chosen) < total:
                        pages[r, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        return query, table, lengths, pages, counts


def poisoned_tier(sizes: Sizes, slots: int, parts: int = 1) -> HostTier:
    """A tier of values, or of keys and values, whose never-written places hold NaN."""
    host = torch.full((sizes.pages, sizes.heads, parts, 16, sizes.dim), math.nan, dtype=sizes.dtype)
    tier = make_tier(host, slots, "cpu")
    tier.hot.fill_(math.nan)
    return tier


def attend_scratch(elements: int) -> Any:
    return SimpleNamespace(attend_partials=torch.full((elements,), math.nan), attend_tickets=torch.zeros(1024, dtype=torch.int32))


def pages_of(*caches: Tensor) -> Tensor:
    """Caches ``[blocks, block_size, H, D]``, of values or of keys and values, in the order of a tier's host pool."""
    blocks, block_size, heads, dim = caches[0].shape
    return torch.stack([cache.view(blocks * block_size // 16, 16, heads, dim).transpose(1, 2) for cache in caches], 2)


def check_coherent(tier: HostTier, *caches: Tensor) -> None:
    """The invariant of a `HostTier`, against the resident caches of what it holds; NaN equals NaN."""
    host = pages_of(*caches)
    torch.testing.assert_close(tier.host, host, rtol=0, atol=0, equal_nan=True)
    assert int(tier.directory.min()) >= 0, "a claim was left in the directory"
    hot = torch.nonzero(tier.directory.view(-1)).view(-1)
    slots = tier.directory.view(-1)[hot].long() - 1
    assert len(set(slots.tolist())) == len(slots), "two pages have one slot"
    assert torch.equal(tier.owner[slots].long(), hot)
    assert int((tier.owner >= 0).sum()) == len(slots), "a slot has an owner that does not know of it"
    torch.testing.assert_close(tier.hot[slots], host.reshape(-1, *tier.hot.shape[1:])[hot], rtol=0, atol=0, equal_nan=True)
