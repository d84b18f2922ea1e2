"""Latent attention (MLA): a cache row of a token is its latent vector and its rotary part, in the shapes of the operations."""

from __future__ import annotations

from torch import Tensor


def latent_views(kv_cache: Tensor, head_size: int, latent_size: int) -> tuple[Tensor, Tensor]:
    """Keys ``[blocks, block_size, 1, head size]`` and values ``[blocks, block_size, 1, latent size]``, the first channels of the same rows.

    Args:
        kv_cache: ``[blocks, block_size, head size]``, strides are kept.

    Raises:
        ValueError: the tensor has another shape, or its rows are not contiguous.
    """
    if kv_cache.dim() != 3 or kv_cache.shape[2] != head_size:
        raise ValueError(f"the latent cache of a layer has shape {tuple(kv_cache.shape)}; kvskim knows [blocks, block size, {head_size}]")
    if kv_cache.stride(2) != 1:
        raise ValueError(f"the latent cache of a layer has strides {kv_cache.stride()}; kvskim needs contiguous rows")
    rows = kv_cache.unsqueeze(2)
    return rows, rows[..., :latent_size]
