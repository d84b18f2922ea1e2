"""Views of vLLM's tensors in the shapes of the operations. Keyed on the rank of a tensor, not on vLLM's version; strides are kept.

The FlashAttention family hands out one tensor per layer with K and V in it:

* rank 5, vLLM 0.24 and 0.25: ``[blocks, 2, block_size, kv heads, head size]`` (strides tell NHD from HND);
* rank 4, from 0.26 on: ``[blocks, kv heads, block_size, 2 * head size]``, K and V packed in the last dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS


def key_value_views(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer's cache, each ``[blocks, block_size, kv heads, head size]`` with the strides of the cache.

    Raises:
        ValueError: the tensor has none of the known layouts, or its last dimension is not contiguous.
    """
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2 and kv_cache.shape[4] == head_size:
        key, value = kv_cache.unbind(1)
    elif kv_cache.dim() == 4 and kv_cache.shape[3] == 2 * head_size:
        key, value = kv_cache.transpose(1, 2).split(head_size, -1)
    else:
        raise ValueError(f"the KV cache of a layer has shape {tuple(kv_cache.shape)}, which kvskim does not know for head size {head_size}")
    if key.stride(-1) != 1:
        raise ValueError(f"the KV cache of a layer has strides {kv_cache.stride()}; kvskim needs contiguous heads")
    return key, value


def key_view(kv_cache: Tensor, head_size: int) -> Tensor:
    """K of a cache without V, ``[blocks, 1, block_size, kv heads, head size]``, as ``[blocks, block_size, kv heads, head size]``.

    Raises:
        ValueError: the tensor has another layout, or its last dimension is not contiguous.
    """
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 1 or kv_cache.shape[4] != head_size or kv_cache.stride(-1) != 1:
        raise ValueError(
            f"the cache of keys of a layer has shape {tuple(kv_cache.shape)} and strides {kv_cache.stride()}; expected [blocks, 1, block size, kv heads, "
            f"{head_size}] with contiguous heads"
        )
    return kv_cache[:, 0]


def records_element_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """The two-byte type under which vLLM allocates records.

    Records are bytes, but vLLM's own tools (a connector that fills the cache with random numbers, for one) expect floating point. It must
    differ from the type of K and V: specs of equal fields are taken for one and the same.
    """
    return torch.float16 if model_dtype == torch.bfloat16 else torch.bfloat16


def records_shape(num_blocks: int, block_size: int, num_kv_heads: int, record_bytes: int) -> tuple[int, int, int, int]:
    """Shape in two-byte elements: ``[blocks, pages per block, kv heads, record_bytes / 2]``."""
    return num_blocks, block_size // PAGE_TOKENS, num_kv_heads, record_bytes // 2


def records_view(bound: Tensor, num_kv_heads: int, record_bytes: int) -> Tensor:
    """The bound records of a layer as uint8 ``[pages, kv heads, record_bytes]``, indexed by physical page.

    vLLM binds ``[blocks, pages, kv heads, elements]``, or from 0.29 on ``[blocks, kv heads, pages, elements]`` with heads or pages outermost in memory.
    It copies and moves records by whole blocks only, so the order inside a block is kvskim's own: pages first, as the operations want it.

    Raises:
        ValueError: the tensor is not made of such records, or its blocks are not dense.
    """
    elements = record_bytes // 2
    if bound.dim() != 4 or bound.element_size() != 2 or bound.shape[3] != elements:
        raise ValueError(f"the records of a layer were bound as {bound.dtype} {tuple(bound.shape)}; expected two-byte elements [.., .., .., {elements}]")
    if num_kv_heads not in bound.shape[1:3]:
        raise ValueError(f"the records of a layer were bound as {tuple(bound.shape)}; expected [blocks, pages, {num_kv_heads}, {elements}]")
    rows = bound.shape[1] * bound.shape[2]
    block = bound[0]
    if (bound.shape[0] > 1 and bound.stride(0) != rows * elements) or not (block.is_contiguous() or block.transpose(0, 1).is_contiguous()):
        raise ValueError(f"the records of a layer were bound with strides {bound.stride()}; kvskim needs dense blocks of records, one after the other")
    dense = bound.as_strided((bound.shape[0] * rows, elements), (elements, 1))
    return dense.view(torch.uint8).view(-1, num_kv_heads, record_bytes)
