"""Public op ``store``: write new values, or keys and values, through to the host pool and to the copies that are hot.

It is driven by the slots that a step writes and by nothing else, so it keeps a `kvskim.tier.pages.HostTier` coherent through chunked prefill, block
reuse, preemption, prefix hits and aborted requests without knowing of any of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.tier.pages import HostTier
from kvskim.tier.torch_pages import store_torch


def store(tier: HostTier, values: Tensor, slot_mapping: Tensor, *, keys: Tensor | None = None, kernels: str) -> None:
    """Write the values, or keys and values, of a step's tokens, all kv heads.

    Args:
        tier: where to.
        values: ``[T', H, D]`` with T' >= T, in the tier's dtype; the last dimension contiguous.
        slot_mapping: int64 ``[T]``, ``physical page * 16 + token in page``; -1: padding, which writes nothing. No slot occurs twice.
        keys: like ``values``; given if and only if the tier holds keys.
        kernels: cuda, triton or torch; under "cuda" the Triton kernel writes.

    Raises:
        ValueError: an argument has another shape, dtype, stride or device than said here.

    Allocates nothing and never waits for the device (triton); safe in CUDA graphs.
    """
    if kernels not in ("cuda", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [tokens], not {slot_mapping.dtype} {list(slot_mapping.shape)}")
    if (keys is not None) != tier.with_keys:
        raise ValueError("the tier holds keys and values; pass both" if tier.with_keys else "the tier holds values and no keys; leave keys out")
    tokens, shape = slot_mapping.shape[0], (tier.heads, tier.dim)
    for name, rows in (("values", values), ("keys", values if keys is None else keys)):
        if rows.dim() != 3 or rows.shape[0] < tokens or tuple(rows.shape[1:]) != shape or rows.dtype != tier.hot.dtype:
            raise ValueError(f"{name} are {rows.dtype} {list(rows.shape)}; expected {tier.hot.dtype} [{tokens} or more, {shape[0]}, {shape[1]}]")
        if rows.stride(2) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous")
        if rows.device != tier.device:
            raise ValueError(f"{name} are on {rows.device} and the tier on {tier.device}; both must be on one device")
    if slot_mapping.device != tier.device:
        raise ValueError(f"slot_mapping is on {slot_mapping.device} and the tier on {tier.device}; both must be on one device")
    if tokens == 0:
        return
    if kernels == "torch":
        store_torch(tier, keys, values, slot_mapping)
    else:
        from kvskim.ops.triton.host_store import store_triton

        store_triton(tier, keys, values, slot_mapping)
