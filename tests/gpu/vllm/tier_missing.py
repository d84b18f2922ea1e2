"""A share of the hot cache lost in each step: what a decode costs whose selections change from step to step, on data whose selections don't."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvskim.ops.fetch import FetchScratch
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
    """Empty so many 65536ths (int32 ``[1]`` on the device) of the slots, others in each step."""
    _lose_kernel[(triton.cdiv(tier.slots, 1024),)](tier.directory, tier.owner, tier.clock, share, tier.slots, BLOCK=1024)


def lose_for_next_step(device: str) -> torch.Tensor:
    """From now on a layer loses a share of its hot cache for its next decode step: the one that is in the tensor given back, at first none. In vLLM.

    It does so behind all else that the step does with the hot cache: where copies are made beside the layers that follow, behind the copies, so that no
    layer waits for it; else behind attention.
    """
    from kvskim.engines.vllm import state

    share, decode_step, copy_fetched = torch.zeros(1, dtype=torch.int32, device=device), state.decode_step, state.copy_fetched

    def step(
        settings: Any, query: Any, key_cache: Tensor, values: Tensor | HostTier, *arguments: Any, fetching: FetchScratch | None = None, **more: Any
    ) -> None:
        decode_step(settings, query, key_cache, values, *arguments, fetching=fetching, **more)
        if isinstance(values, HostTier) and fetching is not None:
            lose(values, share)

    def copy(tier: HostTier, scratch: FetchScratch, **more: Any) -> None:
        copy_fetched(tier, scratch, **more)
        lose(tier, share)

    state.decode_step, state.copy_fetched = step, copy
    return share
