"""A share of the hot cache lost before each fetch: what a decode costs whose selections change from step to step, on data whose selections don't."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvskim.ops import step
from kvskim.tier.pages import HostTier

WHOLE = 65536
"""What stands for all slots in `share`."""


@triton.jit(do_not_specialize=["slots"])
def _lose_kernel(directory, owner, clock, share, slots, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(owner + slot, mask=slot < slots, other=-1)
    mixed = (slot.to(tl.uint32) * 2654435761) ^ (tl.load(clock).to(tl.uint32) * 2246822519)
    mixed = (mixed ^ (mixed >> 15)) * 3266489917
    mixed = (mixed ^ (mixed >> 13)) * 668265263
    lost = (key >= 0) & ((mixed >> 16) < tl.load(share).to(tl.uint32))
    tl.store(directory + key, tl.zeros_like(key), mask=lost)
    tl.store(owner + slot, tl.zeros_like(key) - 1, mask=lost)


def lose(tier: HostTier, share: torch.Tensor) -> None:
    """Empty so many 65536ths (int32 ``[1]`` on the device) of the slots, others in each fetch."""
    _lose_kernel[(triton.cdiv(tier.slots, 1024),)](tier.directory, tier.owner, tier.clock, share, tier.slots, BLOCK=1024)


def lose_before_fetch(device: str) -> torch.Tensor:
    """From now on every decode step loses a share of the hot cache: the one that is in the tensor given back, at first none. Before an engine is made."""
    share, fetch = torch.zeros(1, dtype=torch.int32, device=device), step.fetch

    def fetch_after(tier: HostTier, *arguments: Any, **more: Any) -> None:
        lose(tier, share)
        fetch(tier, *arguments, **more)

    step.fetch = fetch_after
    return share
