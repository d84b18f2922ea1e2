"""Encode on Hopper: sketch records (encode_sketch.cu) and the records of single pages (encode_pages.cu) as torch operators.

Checks of shapes are the caller's (kvskim.ops.encode); `sketch_kernel_serves` and `pages_kernel_serves` say what the kernels take.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.ops.cuda.library import FLOAT, INT, LONG, POINTER, STREAM, function, operator, pointer, stream
from kvskim.selectors.base import Selector
from kvskim.selectors.clse import Clse
from kvskim.selectors.mean import Mean
from kvskim.selectors.minmax import MinMax
from kvskim.selectors.quad import Quad
from kvskim.selectors.rki4 import PrincipalKeys
from kvskim.selectors.sketch import SketchTables

ELEMENT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
"""Codes of element types in the C interface (common.cuh, ElementType)."""

SKETCH_RECORD_BYTES = 256
SKETCH_HEAD_DIMS = (64, 96, 128, 256, 576)
FEW_SLOTS = 256
"""Most slots of a launch that the kernel for few of them gets by default (encode_sketch.cu, kFewTokens)."""
LARGEST_PAGE_HEAD_DIM = 576
OVERLAP_PREVIOUS = 1
ENCODERS = ("by tokens", "few", "many")
"""Kernels of sketch records by their codes in the C interface (encode_sketch.cu, Encoder); the first: chosen by the number of slots."""

_sketch = function(
    "kvskim_encode_sketch",
    (POINTER, INT, LONG, LONG, LONG, INT, POINTER, INT, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, LONG, INT, INT, FLOAT, INT,
     INT, STREAM),
)
_layers = function(
    "kvskim_encode_sketch_layers", (POINTER, INT, INT, LONG, LONG, LONG, INT, INT, LONG, INT, INT, INT, STREAM),
)
_pages = function(
    "kvskim_encode_pages",
    (POINTER, INT, LONG, LONG, LONG, INT, POINTER, INT, POINTER, INT, INT, INT, POINTER, LONG, INT, INT, INT, FLOAT, INT, STREAM),
)


class _Layer(ctypes.Structure):
    """EncodeLayer of encode_sketch_few.cuh."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("keys", "slot_mapping", "mean", "encode_matrix", "coefficient_bits", "slot_coefficient", "slot_digit", "records")
    ] + [("key_scale", ctypes.c_float)]


def _aligned(key_cache: Tensor) -> bool:
    """Whether rows of keys start at multiples of 16 bytes and pages are found by a shift."""
    bytes_per_element = key_cache.element_size()
    starts = (key_cache.data_ptr(), *(stride * bytes_per_element for stride in key_cache.stride()[:3]))
    per_block = key_cache.shape[1] // PAGE_TOKENS
    return all(start % 16 == 0 for start in starts) and per_block & (per_block - 1) == 0


def sketch_kernel_serves(tables: SketchTables, key_cache: Tensor) -> bool:
    """Whether the CUDA kernel takes these records and this cache: 256 bytes, a head dim and dtype it is compiled for, aligned rows."""
    return (
        tables.record_bytes == SKETCH_RECORD_BYTES and key_cache.shape[3] in SKETCH_HEAD_DIMS and key_cache.dtype in ELEMENT_TYPES
        and _aligned(key_cache)
    )


def pages_kernel_serves(selector: Selector, key_cache: Tensor) -> bool:
    """Whether the CUDA kernel has this selector, with this head dim and dtype."""
    dim = key_cache.shape[3]
    return (
        isinstance(selector, (Mean, MinMax, PrincipalKeys, Quad, Clse)) and dim % 8 == 0 and dim <= LARGEST_PAGE_HEAD_DIM
        and key_cache.dtype in ELEMENT_TYPES and _aligned(key_cache)
    )


def page_record_form(selector: Selector) -> tuple[int, int, int]:
    """``(kind, rank, bits)`` of a selector in the C interface of encode_pages.cu."""
    if isinstance(selector, Mean):
        return 0, 0, 8
    if isinstance(selector, MinMax):
        return 1, 0, selector.bits
    if isinstance(selector, PrincipalKeys):
        return 2, selector.rank, selector.vector_bits
    if isinstance(selector, Quad):
        return 3, selector.rank, selector.bits
    if isinstance(selector, Clse):
        return 4, selector.rank, 4
    raise ValueError(f"the selector {selector.name} has no CUDA encode kernel")


@operator("cuda_encode_sketch", mutates=("records",))
def encode_sketch(
    key_cache: Tensor, slot_mapping: Tensor, mean: Tensor, encode_matrix: Tensor, coefficient_bits: Tensor, coefficient_count: Tensor,
    slot_coefficient: Tensor, slot_digit: Tensor, records: Tensor, k_scale: float, encoder: int, flags: int,
) -> None:
    """Sketch records of the pages that ``slot_mapping`` completes.

    Args:
        key_cache: ``[blocks, block_size, H, D]`` bfloat16, float16 or float8_e4m3fn (times ``k_scale``), rows 16-byte aligned.
        slot_mapping: int64 ``[T]``, contiguous; -1: padding.
        mean to slot_digit: of SketchTables (256-byte records), contiguous.
        records: uint8 ``[N, H, 256]``, contiguous, by physical page.
        encoder: index into ENCODERS. Codes next to a boundary may differ between "few" and "many".
        flags: OVERLAP_PREVIOUS.
    """
    _, block_size, heads, dim = key_cache.shape
    with torch.cuda.device(key_cache.device):
        _sketch(
            pointer(key_cache), ELEMENT_TYPES[key_cache.dtype], key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), block_size,
            pointer(slot_mapping), slot_mapping.shape[0], pointer(mean), pointer(encode_matrix), pointer(coefficient_bits),
            pointer(coefficient_count), pointer(slot_coefficient), pointer(slot_digit), pointer(records), records.shape[0], heads, dim, k_scale,
            encoder, flags, stream(key_cache.device),
        )


def encode_sketch_layers(
    tables: Sequence[SketchTables], key_caches: Sequence[Tensor], slot_mappings: Sequence[Tensor], records: Sequence[Tensor], k_scales: Sequence[float],
    flags: int,
) -> None:
    """`encode_sketch` with the kernel "few" for several layers, by one launch for each 48 of them.

    Not a torch operator: nothing traces what an engine launches between the layers of a captured step.

    Args:
        tables, key_caches, slot_mappings, records, k_scales: of each layer, as `encode_sketch` takes them. Caches have the same shape, strides and dtype,
            records the same shape, and there are as many slots everywhere.
        flags: OVERLAP_PREVIOUS.
    """
    cache, pages = key_caches[0], records[0].shape[0]
    _, block_size, heads, dim = cache.shape
    layers = (_Layer * len(tables))(*(
        _Layer(
            pointer(keys), pointer(slots), pointer(own.mean), pointer(own.encode_matrix), pointer(own.coefficient_bits), pointer(own.slot_coefficient),
            pointer(own.slot_digit), pointer(record), scale,
        )
        for own, keys, slots, record, scale in zip(tables, key_caches, slot_mappings, records, k_scales)
    ))
    with torch.cuda.device(cache.device):
        _layers(
            ctypes.addressof(layers), len(tables), ELEMENT_TYPES[cache.dtype], cache.stride(0), cache.stride(1), cache.stride(2), block_size,
            slot_mappings[0].shape[0], pages, heads, dim, flags, stream(cache.device),
        )


@operator("cuda_encode_pages", mutates=("records",))
def encode_pages(
    key_cache: Tensor, slot_mapping: Tensor, offset: Tensor, records: Tensor, kind: int, rank: int, bits: int, k_scale: float, flags: int,
) -> None:
    """Records of r8, rki4, quad, clse, minmax or mean for the pages that ``slot_mapping`` completes.

    Args:
        key_cache, slot_mapping, k_scale, flags: as in `encode_sketch`.
        offset: float32 ``[H, D]``, contiguous.
        records: uint8 ``[N, H, W]``, contiguous, by physical page.
        kind, rank, bits: from `page_record_form`.
    """
    _, block_size, heads, dim = key_cache.shape
    with torch.cuda.device(key_cache.device):
        _pages(
            pointer(key_cache), ELEMENT_TYPES[key_cache.dtype], key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), block_size,
            pointer(slot_mapping), slot_mapping.shape[0], pointer(offset), kind, rank, bits, pointer(records), records.shape[0], heads, dim,
            records.shape[2], k_scale, flags, stream(key_cache.device),
        )
