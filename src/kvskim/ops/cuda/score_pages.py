"""Scores of the selectors that code each page by itself, on Hopper (score_pages.cu), as a torch operator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvskim.ops.cuda.library import FLOAT, INT, LONG, POINTER, STREAM, function, operator, pointer, stream
from kvskim.ops.cuda.score_sketch import ELEMENT_TYPES, page_shift
from kvskim.selectors.base import Selector
from kvskim.selectors.clse import Clse
from kvskim.selectors.mean import Mean
from kvskim.selectors.minmax import MinMax
from kvskim.selectors.quad import Quad
from kvskim.selectors.rki4 import PrincipalKeys

HEAD_DIMS = (64, 128, 256)
OFFSETS = ("mean_scale", "vectors", "vector_scale", "coordinates", "coordinate_scale", "energies", "residual")
"""Fields of a record whose first bytes the kernel is told, in the order of PageScores (score_pages.cuh)."""

_score = function(
    "kvskim_score_pages",
    (INT, POINTER, LONG, LONG, INT, POINTER, LONG, POINTER, LONG, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT, INT, INT, INT, INT,
     INT, INT, INT, INT, POINTER, FLOAT, STREAM),
)


def form_of(selector: Selector, head_dim: int, group: int, dtype: torch.dtype) -> int | None:
    """Which of the kernel's forms (PageForm) scores a selector's records; None where Triton does.

    Written for head dims 64, 128 and 256 and up to 16 query heads per kv head; rki4 and r8 with an even rank of at most 8, quad with int4
    directions and clse of rank 2, minmax with 16-bit bounds and bf16 queries.
    """
    if head_dim not in HEAD_DIMS or group > 16:
        return None
    if isinstance(selector, Mean):
        return 0
    if isinstance(selector, PrincipalKeys):
        return None if selector.rank > 8 or selector.rank % 2 else {8: 1, 4: 2}[selector.vector_bits]
    if isinstance(selector, Quad):
        return 3 if selector.rank == 2 and selector.bits == 4 else None
    if isinstance(selector, Clse):
        return 4 if selector.rank == 2 else None
    if isinstance(selector, MinMax):
        return 5 if selector.bits == 16 and dtype == torch.bfloat16 else None
    return None


def record_offsets(selector: Selector, head_dim: int) -> list[int]:
    """First byte of each of `OFFSETS`, 0 for what the record lacks."""
    offsets = selector.format(head_dim).offsets  # type: ignore[attr-defined]
    return [offsets.get(name, 0) for name in OFFSETS]


@operator("cuda_score_pages", mutates=("scores", "partials"))
def score_pages(
    form: int, query: Tensor, records: Tensor, block_table: Tensor, seq_lens: Tensor, forced: Tensor, scores: Tensor, partials: Tensor,
    group: int, block_size: int, sink_pages: int, window_pages: int, full_pages: int, rank: int, offsets: Sequence[int], scale: float,
) -> None:
    """Log-mass of every page but the window's, without the static part, and the sums of exp(score - forced) of each chunk of pages.

    Args:
        form, rank, offsets: from `form_of`, of the selector, from `record_offsets`.
        query: bf16 or fp16 ``[R, H * G, D]``, rows 16-byte aligned.
        records: uint8 ``[N, H, W]`` contiguous, 16-byte aligned.
        block_table: int32 ``[R, columns]``. seq_lens: int32 ``[R]``.
        forced: float32 ``[R, H, Gp]``.
        scores: float16 ``[R, H, page_capacity, Gp]`` contiguous; NaN where a record is broken.
        partials: float32 ``[R, H, chunks, Gp]``.
        full_pages: requests of at most so many pages are left alone.

    Raises:
        RuntimeError: an address is not aligned, or the library has no such form.
    """
    requests, heads, capacity, _ = scores.shape
    _score(
        form, pointer(query), query.stride(0), query.stride(1), ELEMENT_TYPES[query.dtype], pointer(records), records.numel(),
        pointer(block_table), block_table.stride(0), pointer(seq_lens), pointer(forced), pointer(scores), pointer(partials), requests, heads,
        group, query.shape[2], capacity, partials.shape[2], page_shift(block_size), sink_pages, window_pages, full_pages, records.shape[2], rank,
        (ctypes.c_int * len(offsets))(*offsets), scale, stream(query.device),
    )
