"""Kernel of `kvskim.ops.join_query`: a copy whose end the next kernel need not wait for before it begins."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS_PER_PROGRAM = 4


@triton.jit
def _join_kernel(
    latent, rotary, out, latent_stride_r, latent_stride_h, rotary_stride_r, rotary_stride_h,
    HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr, ROTARY: tl.constexpr, ROTARY_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per (request, BLOCK query heads)."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    e = tl.arange(0, LATENT_PADDED)[None, :]
    r = tl.arange(0, ROTARY_PADDED)[None, :]
    first = (h < HEADS) & (e < LATENT)
    second = (h < HEADS) & (r < ROTARY)
    x = tl.load(latent + request * latent_stride_r + h * latent_stride_h + e, mask=first, other=0.0)
    y = tl.load(rotary + request * rotary_stride_r + h * rotary_stride_h + r, mask=second, other=0.0)
    row = out + (request * HEADS + h) * (LATENT + ROTARY)
    tl.store(row + e, x, mask=first)
    tl.store(row + LATENT + r, y, mask=second)


def join_triton(latent: Tensor, rotary: Tensor, out: Tensor, overlap: bool) -> None:
    """Arguments as checked by `kvskim.ops.join_query.join_query`."""
    requests, heads, channels = latent.shape
    _join_kernel[(requests, triton.cdiv(heads, HEADS_PER_PROGRAM))](
        latent, rotary, out, latent.stride(0), latent.stride(1), rotary.stride(0), rotary.stride(1), HEADS=heads, LATENT=channels,
        LATENT_PADDED=triton.next_power_of_2(channels), ROTARY=rotary.shape[2], ROTARY_PADDED=triton.next_power_of_2(rotary.shape[2]),
        BLOCK=HEADS_PER_PROGRAM, OVERLAP=overlap, num_warps=4,
    )
