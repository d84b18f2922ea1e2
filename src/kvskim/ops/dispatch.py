"""Which implementation of the operations serves a device: chosen once, at start, and told in one line."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch

IMPLEMENTATIONS = ("cuda", "triton", "torch")


@dataclass(frozen=True)
class Choice:
    """``kernels``: cuda, triton or torch. ``reason``: one line for the log and for `kvskim doctor`."""

    kernels: str
    reason: str


def triton_available() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=64)
def _choose(asked: str, device_type: str, device_index: int | None) -> Choice:
    if asked not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"kernels is {asked!r}; use auto, cuda, triton or torch")
    if device_type != "cuda":
        if asked in ("cuda", "triton"):
            raise ValueError(f"kernels is {asked!r}, which needs a GPU, but the device is {device_type!r}: use auto or torch")
        return Choice("torch", f"plain torch on {device_type}")
    if asked == "torch":
        return Choice("torch", "plain torch, as asked; slow on a GPU")
    from kvskim.ops.cuda.library import availability

    if asked in ("auto", "cuda"):
        available, reason = availability(device_index)
        # What a compiler says is many lines.
        first, *more = reason.splitlines()
        reason = f"{first.rstrip(':')}; `kvskim build` shows why" if more else first
        if available:
            return Choice("cuda", f"CUDA kernels ({reason})")
        if asked == "cuda":
            raise ValueError(f"kernels is 'cuda', but the CUDA kernels can't be used: {reason}; use auto or triton")
    else:
        reason = "as asked"
    if not triton_available():
        raise ValueError("the GPU has no usable kernels: the CUDA library can't be used and triton is not installed; install triton")
    return Choice("triton", f"Triton kernels ({reason})")


def choose(asked: str, device: torch.device | str) -> Choice:
    """The implementation for a device.

    Args:
        asked: the setting ``kernels``: auto, cuda, triton or torch.
        device: where the tensors live.

    Raises:
        ValueError: what is asked for can't serve the device; one sentence.
    """
    device = torch.device(device)
    return _choose(asked, device.type, device.index)


def resolve(kernels: str, device: torch.device | str) -> str:
    """`choose`, only the name."""
    return choose(kernels, device).kernels
