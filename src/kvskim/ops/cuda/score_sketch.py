"""The sketch selector on Hopper: query preparation (prepare_sketch.cu) and page scores (score_sketch.cu) as torch operators.

Shapes: R requests, H kv heads, G query heads per kv head padded to Gp = 4, 8, 16, 32, 64 or 128 columns, D head dim (a multiple of
32).
Checks of shapes and dtypes are the caller's (kvskim.ops.score); here only what the kernels can't take is refused.
"""

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.ops.cuda.library import FLOAT, INT, LONG, POINTER, STREAM, function, operator, pointer, stream, value_function

ELEMENT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
"""Codes of element types in the C interface (common.cuh, ElementType)."""

OVERLAP_PREVIOUS = 1
"""Launch flag: the launch may begin before the kernel ahead of it in the stream has ended (programmatic dependent launch)."""
RECORDS_SETTLED = 2
"""Launch flag: records, block table and lengths were complete before the chain of overlapped launches began, so they are read while the kernel
ahead still runs. Queries and keys never are."""
QUERIES_SETTLED = 4
"""Launch flag of `prepare_sketch`: the queries were complete, and what reads its outputs had ended, before the kernel ahead let this launch begin: it
may read and write them at once. Keys it reads when that kernel has ended."""

_weight_bytes = value_function("kvskim_sketch_weight_bytes", (INT, INT, INT))
_chunks = value_function("kvskim_score_sketch_chunks", (INT, INT, INT, INT, INT), INT)
_prepare = function(
    "kvskim_prepare_sketch",
    (POINTER, LONG, LONG, POINTER, LONG, LONG, INT, INT, POINTER, POINTER, POINTER, POINTER, POINTER, LONG, LONG, LONG, INT, POINTER, POINTER,
     POINTER, LONG, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT, INT, INT, INT, INT, FLOAT, FLOAT, FLOAT, INT, STREAM),
)
_score = function(
    "kvskim_score_sketch",
    (POINTER, POINTER, LONG, POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT, INT, INT, INT, INT, INT, INT, STREAM),
)


def weight_bytes(requests: int, heads: int, group: int) -> int:
    """Bytes of scratch between the two kernels (16-byte aligned): int8 weights and their scales."""
    return _weight_bytes(requests, heads, group)


def chunk_count(requests: int, heads: int, padded_group: int, page_capacity: int, multiprocessors: int) -> int:
    """Warps, or CTAs, that share the pages of a (request, kv head): the ``chunks`` dimension of ``partials``."""
    return _chunks(requests, heads, padded_group, page_capacity, multiprocessors)


def page_shift(block_size: int) -> int:
    """log2 of the pages of a block.

    Raises:
        ValueError: block_size is not 16 times a power of two.
    """
    pages = block_size // PAGE_TOKENS
    if pages < 1 or block_size % PAGE_TOKENS or pages & (pages - 1):
        raise ValueError(f"block_size is {block_size}; it must be a power of two and at least {PAGE_TOKENS}")
    return pages.bit_length() - 1


@operator("cuda_prepare_sketch", mutates=("weights", "base", "forced"))
def prepare_sketch(
    query: Tensor, key_cache: Tensor, query_matrix: Tensor, slot_coefficient: Tensor, slot_digit: Tensor, mean: Tensor,
    block_table: Tensor, seq_lens: Tensor, weights: Tensor, base: Tensor, forced: Tensor, scale: float, softcap: float,
    k_scale: float, sink_pages: int, window_pages: int, full_pages: int, flags: int, hot: Tensor | None = None, directory: Tensor | None = None,
    rest: Tensor | None = None,
) -> None:
    """Weights of all record digits, score of the mean key (``base``), exact log-mass of the always-attended pages minus it (``forced``).

    Args:
        query: bf16 or fp16 ``[R, H * G, D]``, last dimension contiguous, rows 16-byte aligned. Of a query in parts, the first.
        key_cache: ``[blocks, block_size, H, D]`` in the query's dtype or float8_e4m3fn, any strides but the last, rows 16-byte aligned.
        query_matrix, slot_coefficient, slot_digit, mean: of SketchTables (256-byte records), contiguous, 16-byte aligned.
        block_table: int32 ``[R, max_blocks]``. seq_lens: int32 ``[R]``.
        weights: uint8 scratch of ``weight_bytes``. base, forced: float32 ``[R, H, Gp]``. Rows of ``base`` and ``forced`` with
            length 0 are left as they are; their queries are read but not used.
        softcap: 0 for none.
        full_pages: requests of at most so many pages are left alone.
        flags: OVERLAP_PREVIOUS, RECORDS_SETTLED, QUERIES_SETTLED.
        hot, directory: of the `kvskim.tier.pages.HostTier` that ``key_cache`` is in, or None.
        rest: the second part of a query in parts, the same; the first then has a multiple of 32 channels. Or None.
    """
    heads, dim = mean.shape
    requests = seq_lens.shape[0]
    if query.dtype not in (torch.bfloat16, torch.float16) or key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ValueError(f"query is {query.dtype} and key_cache {key_cache.dtype}; the CUDA kernel takes bfloat16 or float16, keys alike or float8_e4m3fn")
    if query_matrix.shape[1] != 1024:
        raise ValueError(f"records of {query_matrix.shape[1] // 4} bytes; the CUDA kernel is written for 256")
    rest_strides = (0, 0) if rest is None else (rest.stride(0), rest.stride(1))
    _prepare(
        pointer(query), query.stride(0), query.stride(1), pointer(rest), *rest_strides, query.shape[2], ELEMENT_TYPES[query.dtype], pointer(query_matrix),
        pointer(slot_coefficient), pointer(slot_digit), pointer(mean), pointer(key_cache), key_cache.stride(0), key_cache.stride(1),
        key_cache.stride(2), ELEMENT_TYPES[key_cache.dtype], pointer(hot), pointer(directory), pointer(block_table), block_table.stride(0),
        pointer(seq_lens), pointer(weights), pointer(base), pointer(forced), requests, heads, query.shape[1] // heads, dim,
        page_shift(key_cache.shape[1]), sink_pages, window_pages, full_pages, scale, softcap, k_scale, flags, stream(query.device),
    )


@operator("cuda_score_sketch", mutates=("scores", "partials"))
def score_sketch(
    records: Tensor, block_table: Tensor, seq_lens: Tensor, weights: Tensor, forced: Tensor, scores: Tensor, partials: Tensor,
    group: int, block_size: int, sink_pages: int, window_pages: int, full_pages: int, flags: int,
) -> None:
    """Log-mass of every page but the window's, minus ``base``, and the sums of exp(score - forced) of each chunk of pages.

    Args:
        records: uint8 ``[N, H, 256]`` contiguous, by physical page.
        weights, forced: as `prepare_sketch` wrote them.
        scores: float16 ``[R, H, page_capacity, Gp]`` contiguous. partials: float32 ``[R, H, chunks, Gp]``.
        full_pages: requests of at most so many pages are left alone.
        flags: OVERLAP_PREVIOUS, RECORDS_SETTLED.
    """
    requests, heads, capacity, _ = scores.shape
    _score(
        pointer(records), pointer(block_table), block_table.stride(0), pointer(seq_lens), pointer(weights), pointer(forced),
        pointer(scores), pointer(partials), requests, heads, group, capacity, partials.shape[2], page_shift(block_size), sink_pages,
        window_pages, full_pages, flags, stream(scores.device),
    )
