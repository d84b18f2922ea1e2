"""Plain torch version of the operations on a `HostTier`: what the kernels are compared with, and what CPUs run."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.torch_attend import gather_tokens
from kvskim.tier.pages import AGE_CLASSES, HostTier

EMPTY = AGE_CLASSES - 1
IN_USE = -1
KEYS, VALUES = 0, -1
"""Parts of a page."""


def store_torch(tier: HostTier, keys: Tensor | None, values: Tensor, slot_mapping: Tensor) -> None:
    """See `kvskim.ops.store.store`."""
    written = (slot_mapping >= 0) & (slot_mapping < tier.pages * PAGE_TOKENS)
    page, offset = slot_mapping[written] // PAGE_TOKENS, slot_mapping[written] % PAGE_TOKENS
    token, head = torch.nonzero(tier.directory[page] > 0, as_tuple=True)
    slot = tier.directory[page[token], head].long() - 1
    there = tier.host.device
    for part, given in ((KEYS, keys), (VALUES, values)):
        if given is not None:
            rows = given[: slot_mapping.shape[0]][written]
            tier.host[page.to(there), :, part, offset.to(there)] = rows.to(there)
            tier.hot[slot, part, offset[token]] = rows[token, head]


def choose_torch(tier: HostTier, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """All of `kvskim.ops.fetch.fetch` but the copies: the pages to copy, as ``page * H + head``, and the slots to copy them to, int32. These are empty."""
    directory = tier.directory.view(-1)
    keys = selected_keys(tier, block_table, seq_lens, pages, counts, block_size)
    place = directory[keys]
    tier.stamp[(place[place > 0] - 1).long()] = tier.clock
    missing = list(dict.fromkeys(keys[place == 0].tolist()))
    ages = age_classes(tier)
    victims = [slot for age in range(EMPTY, IN_USE, -1) for slot in torch.nonzero(ages == age).view(-1).tolist()]
    count = min(len(missing), len(victims))
    for slot in victims[:count]:
        former = int(tier.owner[slot])
        if former >= 0:
            directory[former] = 0
        tier.owner[slot], tier.stamp[slot] = -1, tier.clock[0]
    tier.counters.add_(torch.tensor([len(keys), len(missing), count], device=tier.device))
    tier.clock.add_(1)
    copied, to = (torch.tensor(numbers[:count], dtype=torch.int32, device=tier.device) for numbers in (missing, victims))
    return copied, to


def copy_torch(tier: HostTier, missing: Tensor, victims: Tensor) -> None:
    """See `kvskim.ops.fetch.copy_fetched`; arguments from `choose_torch`."""
    directory, pool = tier.directory.view(-1), tier.host.view(-1, *tier.hot.shape[1:])
    for key, slot in zip(missing.tolist(), victims.tolist()):
        tier.hot[slot] = pool[key].to(tier.device)
        tier.owner[slot], directory[key] = key, slot + 1


def selected_keys(tier: HostTier, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, block_size: int) -> Tensor:
    """``page * H + head`` of every selected page, int64, ordered by row, kv head and place in the table."""
    tokens, positions = gather_tokens(block_table, seq_lens, pages, counts, block_size)
    first = tokens[..., ::PAGE_TOKENS] // PAGE_TOKENS
    keys = first * tier.heads + torch.arange(tier.heads, device=first.device)[:, None]
    return keys[positions[..., ::PAGE_TOKENS] < seq_lens.clamp(min=0)[:, None, None]]


def age_classes(tier: HostTier) -> Tensor:
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


def rows_of(tier: HostTier, tokens: Tensor, part: int) -> Tensor:
    """Rows ``[R, H, W, D]`` of physical tokens ``[R, H, W]``, keys or values as ``part`` says, each from where it is."""
    head = torch.arange(tier.heads, device=tokens.device)[None, :, None]
    page, offset = tokens // PAGE_TOKENS, tokens % PAGE_TOKENS
    place = tier.directory[page, head].long()
    there = tier.host.device
    direct = tier.host[page.to(there), head.to(there), part, offset.to(there)].to(tier.device)
    return torch.where((place > 0)[..., None], tier.hot[(place - 1).clamp(min=0), part, offset], direct)


def stage_torch(tier: HostTier, key_cache: Tensor | None, block_table: Tensor, context_lens: Tensor, starts: Tensor, staged: Tensor) -> None:
    """See `kvskim.ops.stage.stage`."""
    block_size = staged.shape[2]
    for row, length in enumerate(context_lens.tolist()):
        token = torch.arange(ceil_div(length, PAGE_TOKENS) * PAGE_TOKENS, device=tier.device)
        block = block_table[row, token // block_size].long()
        own = int(starts[row]) + token // block_size
        physical = (block * block_size + token % block_size).expand(tier.heads, -1)
        keys = rows_of(tier, physical[None], KEYS)[0].transpose(0, 1) if key_cache is None else key_cache[block, token % block_size]
        staged[own, 0, token % block_size] = keys
        staged[own, 1, token % block_size] = rows_of(tier, physical[None], VALUES)[0].transpose(0, 1)
