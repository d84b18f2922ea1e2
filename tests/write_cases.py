"""Cases of the op write_cache for the CPU and the GPU suite."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvskim.tier.pages import HostTier, make_tier

POISON = 777.0


def layouts(blocks: int, size: int, heads: int, dim: int, value_dim: int, dtype: torch.dtype, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Poisoned caches of keys and values as engines lay them out, each a pair of views ``[blocks, size, heads, dim]``."""
    def full(*shape: int) -> Tensor:
        return torch.full(shape, POISON, dtype=dtype, device=device)

    found = {"apart": (full(blocks, size, heads, dim), full(blocks, size, heads, value_dim))}
    both = full(blocks, size, heads, dim + value_dim)
    found["one row"] = (both[..., :dim], both[..., dim:])
    by_head = full(blocks, heads, size, dim + value_dim).transpose(1, 2)
    found["heads first"] = (by_head[..., :dim], by_head[..., dim:])
    if dim == value_dim:
        pair = full(blocks, 2, size, heads, dim)
        found["pairs"] = (pair[:, 0], pair[:, 1])
    return found


def slots_of(tokens: int, blocks: int, size: int, generator: torch.Generator) -> Tensor:
    """Different random slots, one in four of them none; the first and the last place are among them where there is room."""
    places = torch.randperm(blocks * size - 2, generator=generator)[: max(tokens - 2, 0)] + 1
    places = torch.cat([torch.tensor([blocks * size - 1, 0])[:tokens], places])
    return torch.where(torch.rand(tokens, generator=generator) < 0.25, -1, places).to(torch.int64)


def expected(rows: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """What the cache holds after the write, token by token."""
    after = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            after[slot // cache.shape[1], slot % cache.shape[1]] = rows[token]
    return after


@dataclass
class TierCase:
    """A poisoned tier of ``parts`` parts, the cache of its keys, and what its pool, its hot cache and its keys lie in, with a page more on either side.

    Half of the (page, kv head) pairs are hot, and some of the others claimed, as inside a fetch.
    """

    tier: HostTier
    key_cache: Tensor
    pool: Tensor
    hot: Tensor
    keys: Tensor

    @staticmethod
    def make(parts: int, blocks: int, size: int, heads: int, dim: int, memory: Tensor, device: str, generator: torch.Generator) -> TierCase:
        """memory: for the pool, flat, of the dtype of the tier."""
        pages = blocks * size // 16
        slots = max(1, pages * heads // 2)
        shape = (pages + 2, heads, parts, 16, dim)
        pool = memory[: torch.Size(shape).numel()].view(shape).fill_(POISON)
        hot = torch.full((slots + 2, parts, 16, dim), POISON, dtype=memory.dtype, device=device)
        keys = torch.full((blocks + 2, size, heads, dim), POISON, dtype=memory.dtype, device=device)
        directory = torch.randint(-(2**31), 0, (pages * heads,), generator=generator) * torch.randint(0, 2, (pages * heads,), generator=generator)
        directory[torch.randperm(pages * heads, generator=generator)[:slots]] = torch.arange(1, slots + 1)
        tier = replace(make_tier(pool[1:-1], slots, device), hot=hot[1:-1], directory=directory.view(pages, heads).int().to(device))
        return TierCase(tier, tier.key_cache if parts == 2 else keys[1:-1], pool, hot, keys)

    def content(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of it, on the CPU, once the device is done."""
        if self.hot.is_cuda:
            torch.cuda.synchronize()
        return self.pool.clone(), self.hot.cpu().clone(), self.keys.cpu().clone()

    def expected(self, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `content` is after the write, row by row."""
        pool, hot, cache = self.content()
        parts, directory, keys, values = self.pool.shape[2], self.tier.directory.tolist(), keys.cpu(), values.cpu()
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            page, at = divmod(slot, 16)
            for part, rows in enumerate((keys, values)[2 - parts :]):
                for head, place in enumerate(directory[page]):
                    pool[1 + page, head, part, at] = rows[token, head]
                    if place > 0:
                        hot[place, part, at] = rows[token, head]
            if parts == 1:
                cache[1 + slot // cache.shape[1], slot % cache.shape[1]] = keys[token]
        return pool, hot, cache


def rows_of(
    tokens: int, heads: int, dim: int, apart: bool, generator: torch.Generator, dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Keys and values of more than so many tokens: as a projection leaves them, side by side, or each with its heads far apart."""
    if apart:
        keys, values = torch.randn(2, heads, tokens + 2, dim, generator=generator).to(device, dtype).transpose(1, 2)
        return keys, values
    both = torch.randn(tokens + 1, 2 * heads * dim + 8, generator=generator).to(device, dtype)
    return both[:, : heads * dim].view(-1, heads, dim), both[:, heads * dim : 2 * heads * dim].view(-1, heads, dim)
