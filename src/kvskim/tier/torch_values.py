"""Plain torch version of the operations on a `ValueTier`: what the kernels are compared with, and what CPUs run."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.torch_attend import gather_tokens
from kvskim.tier.values import AGE_CLASSES, ValueTier

EMPTY = AGE_CLASSES - 1
IN_USE = -1


def store_torch(tier: ValueTier, values: Tensor, slot_mapping: Tensor) -> None:
    """See `kvskim.ops.store.store`."""
    written = (slot_mapping >= 0) & (slot_mapping < tier.pages * PAGE_TOKENS)
    rows = values[: slot_mapping.shape[0]][written]
    page, offset = slot_mapping[written] // PAGE_TOKENS, slot_mapping[written] % PAGE_TOKENS
    tier.host[page.to(tier.host.device), :, offset.to(tier.host.device)] = rows.to(tier.host.device)
    token, head = torch.nonzero(tier.directory[page] > 0, as_tuple=True)
    tier.hot[tier.directory[page[token], head].long() - 1, offset[token]] = rows[token, head]


def fetch_torch(tier: ValueTier, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, block_size: int) -> None:
    """See `kvskim.ops.fetch.fetch`."""
    directory = tier.directory.view(-1)
    keys = selected_keys(tier, block_table, seq_lens, pages, counts, block_size)
    place = directory[keys]
    tier.stamp[(place[place > 0] - 1).long()] = tier.clock
    missing = list(dict.fromkeys(keys[place == 0].tolist()))
    ages = age_classes(tier)
    victims = [slot for age in range(EMPTY, IN_USE, -1) for slot in torch.nonzero(ages == age).view(-1).tolist()]
    for key, slot in zip(missing, victims):
        former = int(tier.owner[slot])
        if former >= 0:
            directory[former] = 0
        tier.hot[slot] = tier.host.view(-1, *tier.hot.shape[1:])[key].to(tier.device)
        tier.owner[slot], tier.stamp[slot], directory[key] = key, tier.clock[0], slot + 1
    tier.counters.add_(torch.tensor([len(keys), len(missing), min(len(missing), len(victims))], device=tier.device))
    tier.clock.add_(1)


def selected_keys(tier: ValueTier, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, block_size: int) -> Tensor:
    """``page * H + head`` of every selected page, int64, ordered by row, kv head and place in the table."""
    tokens, positions = gather_tokens(block_table, seq_lens, pages, counts, block_size)
    first = tokens[..., ::PAGE_TOKENS] // PAGE_TOKENS
    keys = first * tier.heads + torch.arange(tier.heads, device=first.device)[:, None]
    return keys[positions[..., ::PAGE_TOKENS] < seq_lens.clamp(min=0)[:, None, None]]


def age_classes(tier: ValueTier) -> Tensor:
    """int64 ``[slots]``: `AGE_CLASSES` by fetches since the last use; `IN_USE` for the slots that this fetch has selected."""
    age = tier.clock - tier.stamp
    oldest = EMPTY - 1
    classes = torch.zeros_like(age, dtype=torch.int64)
    for power in range(1, EMPTY):
        classes += age >= 2**power
    classes[age < 0] = oldest  # the clock has wrapped around since
    classes[age == 0] = IN_USE
    classes[tier.owner < 0] = EMPTY
    return classes


def value_rows(tier: ValueTier, tokens: Tensor) -> Tensor:
    """Values ``[R, H, W, D]`` of physical tokens ``[R, H, W]``, each from where it is."""
    head = torch.arange(tier.heads, device=tokens.device)[None, :, None]
    page, offset = tokens // PAGE_TOKENS, tokens % PAGE_TOKENS
    place = tier.directory[page, head].long()
    there = tier.host.device
    direct = tier.host[page.to(there), head.to(there), offset.to(there)].to(tier.device)
    return torch.where((place > 0)[..., None], tier.hot[(place - 1).clamp(min=0), offset], direct)


def stage_torch(tier: ValueTier, key_cache: Tensor, block_table: Tensor, context_lens: Tensor, starts: Tensor, staged: Tensor) -> None:
    """See `kvskim.ops.stage.stage`."""
    block_size = key_cache.shape[1]
    for row, length in enumerate(context_lens.tolist()):
        token = torch.arange(ceil_div(length, PAGE_TOKENS) * PAGE_TOKENS, device=key_cache.device)
        block = block_table[row, token // block_size].long()
        own = int(starts[row]) + token // block_size
        staged[own, 0, token % block_size] = key_cache[block, token % block_size]
        physical = (block * block_size + token % block_size).expand(tier.heads, -1)
        staged[own, 1, token % block_size] = value_rows(tier, physical[None])[0].transpose(0, 1)
