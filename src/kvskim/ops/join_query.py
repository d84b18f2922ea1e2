"""Public op ``join_query``: the two parts of a query of latent attention, side by side as the rows of the cache have them.

Engines compute the latent part (the query absorbed into the latent space) and the rotary part apart. What can't read them so, see
`kvskim.ops.latent_query`, gets them joined by it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join_query(latent: Tensor, rotary: Tensor, *, out: Tensor, kernels: str) -> None:
    """Write ``out[..., :L] = latent`` and ``out[..., L:] = rotary``.

    Args:
        latent: ``[R, Hq, L]``, any strides, last dimension contiguous.
        rotary: ``[R, Hq, E]``, the same.
        out: ``[R, Hq, L + E]``, contiguous, in the dtype of both.
        kernels: cuda, triton or torch. With cuda a kernel launched behind it with programmatic dependent launch may begin at once; it has to
            wait for the result, as `kvskim.ops.score.score` does.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.

    Example:
        >>> join_query(latent, rotary, out=query, kernels="torch")
    """
    requests, heads, channels = latent.shape
    if rotary.shape[:2] != (requests, heads) or out.shape != (requests, heads, channels + rotary.shape[2]):
        raise ValueError(f"the parts {list(latent.shape)} and {list(rotary.shape)} of a query do not fit rows of {list(out.shape)}")
    if latent.dtype != out.dtype or rotary.dtype != out.dtype:
        raise ValueError(f"the parts of a query are {latent.dtype} and {rotary.dtype}, and the rows {out.dtype}; they must be of one type")
    if latent.stride(2) != 1 or rotary.stride(2) != 1 or not out.is_contiguous():
        raise ValueError("the last dimension of both parts of a query, and its rows, must be contiguous")
    if kernels == "torch":
        torch.cat((latent, rotary), -1, out=out)
    elif kernels in ("cuda", "triton"):
        from kvskim.ops.triton.join_query import join_triton

        if requests:
            join_triton(latent, rotary, out, kernels == "cuda")
    else:
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
