"""Cases of the op write_cache for the CPU and the GPU suite."""

from __future__ import annotations

import torch
from torch import Tensor

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
