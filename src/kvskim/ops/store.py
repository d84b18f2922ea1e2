"""Public op ``store``: write new values through to the host pool and to the copies that are hot.

It is driven by the slots that a step writes and by nothing else, so it keeps a `kvskim.tier.values.ValueTier` coherent through chunked prefill, block
reuse, preemption, prefix hits and aborted requests without knowing of any of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.tier.torch_values import store_torch
from kvskim.tier.values import ValueTier


def store(tier: ValueTier, values: Tensor, slot_mapping: Tensor, *, kernels: str) -> None:
    """Write the values of a step's tokens, all kv heads.

    Args:
        tier: where to.
        values: ``[T', H, D]`` with T' >= T, in the tier's dtype; the last dimension contiguous.
        slot_mapping: int64 ``[T]``, ``physical page * 16 + token in page``; -1: padding, which writes nothing. No slot occurs twice.
        kernels: cuda, triton or torch; under "cuda" the Triton kernel writes.

    Raises:
        ValueError: an argument has another shape, dtype, stride or device than said here.

    Allocates nothing and never waits for the device (triton); safe in CUDA graphs.
    """
    if kernels not in ("cuda", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [tokens], not {slot_mapping.dtype} {list(slot_mapping.shape)}")
    tokens, shape = slot_mapping.shape[0], (tier.heads, tier.hot.shape[2])
    if values.dim() != 3 or values.shape[0] < tokens or tuple(values.shape[1:]) != shape or values.dtype != tier.hot.dtype:
        raise ValueError(f"values are {values.dtype} {list(values.shape)}; expected {tier.hot.dtype} [{tokens} or more, {shape[0]}, {shape[1]}]")
    if values.stride(2) != 1:
        raise ValueError("the last dimension of values must be contiguous")
    for name, tensor in (("values", values), ("slot_mapping", slot_mapping)):
        if tensor.device != tier.device:
            raise ValueError(f"{name} is on {tensor.device} and the tier on {tier.device}; both must be on one device")
    if tokens == 0:
        return
    if kernels == "torch":
        store_torch(tier, values, slot_mapping)
    else:
        from kvskim.ops.triton.host_store import store_triton

        store_triton(tier, values, slot_mapping)
