"""Public op ``write_cache``: write the keys and values of a decode step's tokens into their pages, wherever these are.

Engines write their cache themselves, but the kernels of a decode step then wait until that write has ended. This one lets them begin while it runs
(programmatic dependent launch), which takes the loading of the query matrix off the chain of a step. What is in host memory it writes like
`kvskim.ops.store.store`, which writes the tokens of all other steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.tier.pages import HostTier, check_tier
from kvskim.tier.torch_pages import store_torch


def write_cache(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor | HostTier, slot_mapping: Tensor, *, kernels: str, overlap: bool = False
) -> bool:
    """Write rows of keys and values where their slots say; or write nothing, and say so.

    Args:
        keys, values: ``[T', H, D]`` and ``[T', H, Dv]`` with T' >= T, in the dtype of the caches.
        key_cache, value_cache: ``[blocks, block_size, H, D]`` and ``[blocks, block_size, H, Dv]`` views of any strides; written. Or, instead of a
            cache of values, the tier that holds them in host memory: its pool and its hot copies are written. Of a tier with keys ``key_cache`` is its own.
        slot_mapping: int64 ``[T]``, ``block * block_size + token in block``; -1: padding, which writes nothing. No slot occurs twice.
        kernels: cuda or torch. There is no Triton kernel.
        overlap: cuda: the launch may begin before the kernel ahead of it in the stream has ended, which must not be the one that writes
            ``slot_mapping``. Not where the stream waits for another one just ahead of it. The kernel behind it may begin early in any case, if it is
            launched so, but not before the kernels ahead have ended.

    Returns:
        whether the rows were written. False: the cache has another dtype, or rows are not pieces of 16 bytes at multiples of 16 bytes (cuda).

    Raises:
        ValueError: an argument has another shape or device than said here.

    Allocates nothing and never waits for the device (cuda); safe in CUDA graphs.
    """
    if kernels not in ("cuda", "torch"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda' or 'torch'")
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [tokens], not {slot_mapping.dtype} {list(slot_mapping.shape)}")
    tier = value_cache if isinstance(value_cache, HostTier) else None
    value_view = value_cache.value_cache if isinstance(value_cache, HostTier) else value_cache
    for name, rows, cache in (("keys", keys, key_cache), ("values", values, value_view)):
        if rows.dim() != 3 or cache.dim() != 4 or rows.shape[0] < slot_mapping.shape[0] or rows.shape[1:] != cache.shape[2:]:
            raise ValueError(
                f"{name} have shape {list(rows.shape)} and their cache {list(cache.shape)}; expected [{slot_mapping.shape[0]} or more, heads, dim] "
                "and [blocks, block size, heads, dim]"
            )
        if not rows.device == cache.device == slot_mapping.device:
            raise ValueError(f"{name} are on {rows.device}, their cache on {cache.device} and slot_mapping on {slot_mapping.device}; all must be on one device")
    if tier is not None:
        check_tier(tier, key_cache)
    elif key_cache.shape[:3] != value_view.shape[:3]:
        raise ValueError(
            f"the caches of keys and values have shapes {list(key_cache.shape)} and {list(value_view.shape)}; they must have the same blocks and heads"
        )
    if not keys.dtype == values.dtype == key_cache.dtype == value_view.dtype:
        return False
    if kernels == "cuda":
        from kvskim.ops.cuda.write_cache import write_cache_cuda, write_kernel_serves

        hot, directory = (None, None) if tier is None else (tier.hot, tier.directory)
        if not write_kernel_serves(keys, values, key_cache, value_view, *(() if hot is None else (hot,))):
            return False
        write_cache_cuda(keys, values, key_cache, value_view, slot_mapping, overlap, hot, directory)
        return True
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    blocks, tokens = slots // key_cache.shape[1], slots % key_cache.shape[1]
    if tier is None or not tier.with_keys:
        key_cache[blocks, tokens] = keys[: slot_mapping.shape[0]][real]
    if tier is None:
        value_view[blocks, tokens] = values[: slot_mapping.shape[0]][real]
    else:
        store_torch(tier, keys if tier.with_keys else None, values, slot_mapping)
    return True
