"""Call of the CUDA kernel that writes new rows into the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.ops.cuda.library import INT, LONG, POINTER, STREAM, function, operator, pointer, stream

_OVERLAP_PREVIOUS = 1

_write_cache = function("kvskim_write_cache", (
    POINTER, LONG, LONG, POINTER, LONG, LONG,  # keys, values
    POINTER, LONG, LONG, LONG, POINTER, LONG, LONG, LONG,  # key_cache, value_cache
    POINTER, INT, INT, INT, INT, INT,  # slots, tokens, heads, bytes of a row of keys and of values, block size
    POINTER, POINTER, INT,  # hot, directory, parts
    INT, STREAM,  # flags
))


def write_kernel_serves(*tensors: Tensor) -> bool:
    """Whether rows of these keys, values and caches are pieces of 16 bytes at multiples of 16 bytes, and slots count in 32 bits."""
    return all(
        tensor.data_ptr() % 16 == 0 and tensor.stride(-1) == 1 and tensor.shape[-1] * tensor.element_size() % 16 == 0
        and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    ) and all(tensor.shape[0] * tensor.shape[1] < 2**32 for tensor in tensors)


@operator("write_cache", mutates=("key_cache", "value_cache", "hot"))
def write_cache_cuda(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, overlap_previous: bool, hot: Tensor | None,
    directory: Tensor | None,
) -> None:
    """Arguments as checked by `kvskim.ops.write_cache.write_cache`; of a tier, its caches and tensors one by one."""
    size = keys.element_size()
    with torch.cuda.device(keys.device):
        _write_cache(
            pointer(keys), keys.stride(0) * size, keys.stride(1) * size, pointer(values), values.stride(0) * size, values.stride(1) * size,
            pointer(key_cache), *(size * stride for stride in key_cache.stride()[:3]),
            pointer(value_cache), *(size * stride for stride in value_cache.stride()[:3]),
            pointer(slot_mapping), slot_mapping.shape[0], keys.shape[1], keys.shape[2] * size, values.shape[2] * size, key_cache.shape[1],
            pointer(hot), pointer(directory), 0 if hot is None else hot.shape[1], _OVERLAP_PREVIOUS if overlap_previous else 0, stream(keys.device),
        )
