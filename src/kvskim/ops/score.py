"""Public op ``score``: log attention mass of every page for every query head, from the records; and what the rule needs of the rest.

    scores[r, h, p, g] = estimated log sum_t exp(scale q . k_t) of page p, minus base[r, h, g]
    forced[r, h, g]    = exact log-sum-exp over the always-attended pages, minus base
    partials[r, h, c, g] = sum over the candidate pages of chunk c of exp(min(score - forced, 83))

Source: docs/how-it-works.md, section "Scores".
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from kvskim.layout import LARGEST_GROUP, PAGE_TOKENS, ceil_div, padded_group
from kvskim.ops.latent_query import LatentQuery, Query, joined, parts_of, rows_are_contiguous
from kvskim.ops.torch_score import score_torch
from kvskim.selectors.base import PageTables
from kvskim.selectors.sketch import SketchTables
from kvskim.tier.pages import HostTier, check_tier

CUDA_RECORD_BYTES = 256
CUDA_GROUP = 16
"""Query heads per kv head that a CUDA kernel takes together; those of the sketch take larger groups in blocks of so many."""

TILE_PAGES = 16
"""Pages of a tile; chunk c of ``chunks`` handles the tiles c, c + chunks, ..."""


class ScoreScratch(Protocol):
    """What the sketch kernels work in, shared by all layers of a stream."""

    sketch_weights: Tensor
    """uint8, 16-byte aligned; size from `sketch_scratch_bytes`."""


def sketch_scratch_bytes(requests: int, heads: int, group: int, record_bytes: int = 256) -> int:
    """Bytes of ``scratch.sketch_weights``: int8 weights of the ``4 record_bytes`` digits and the scales of the modes, for ``requests`` rows."""
    return requests * heads * padded_group(group) * (4 * record_bytes + 128)


def scorer(selector: Any, kernels: str, head_dim: int, group: int = 1, dtype: torch.dtype = torch.bfloat16) -> str:
    """Which kernels really score: under "cuda" Triton scores what has no CUDA kernel: records of another form, see `form_of`, and larger groups of these."""
    if kernels != "cuda":
        return kernels
    if selector.name == "sketch":
        served = selector.record_bytes(head_dim) == CUDA_RECORD_BYTES and group <= LARGEST_GROUP
    else:
        from kvskim.ops.cuda.score_pages import form_of

        served = form_of(selector, head_dim, group, dtype) is not None
    return "cuda" if served else "triton"


def fills_pieces(records: Tensor) -> bool:
    """Whether the CUDA scorer of page records may read a cache: it copies 16 bytes at a time, and not past the last record. Else Triton scores."""
    return records.numel() % 16 == 0


def chunk_count(requests: int, heads: int, group: int, page_capacity: int, multiprocessors: int, kernels: str) -> int:
    """The ``chunks`` dimension of ``partials`` that suits a batch."""
    tiles = max(1, ceil_div(page_capacity, TILE_PAGES))
    if kernels == "cuda" and group <= CUDA_GROUP:
        from kvskim.ops.cuda.score_sketch import chunk_count as cuda_chunks

        return cuda_chunks(requests, heads, padded_group(group), page_capacity, multiprocessors)
    share = max(1, 8 * multiprocessors // max(1, requests * heads * ceil_div(group, CUDA_GROUP)))
    return min(tiles, share)


def score(
    selector: Any, tables: Any, query: Query, key_cache: Tensor, records: Tensor, block_table: Tensor, seq_lens: Tensor, *, scale: float, softcap: float = 0.0,
    sink_pages: int, window_pages: int, k_scale: float = 1.0, scores: Tensor, base: Tensor, forced: Tensor, partials: Tensor,
    scratch: ScoreScratch | None, kernels: str, full_pages: int = 0, overlap: bool = False, settled: bool = False, queries_settled: bool = False,
    tier: HostTier | None = None,
) -> None:
    """Score the pages of every request of a decode batch.

    Args:
        selector: the `Selector` that made the records.
        tables: its parameters for the layer, on the device.
        query: ``[R, Hq, D]`` bfloat16 or float16 (torch: any float), one token per request; or a `LatentQuery`. The CUDA kernels of the sketch read
            its parts where they lie, see `reads_parts`; others get them joined in new memory.
        key_cache: ``[blocks, block_size, H, D]``, any strides, last dimension contiguous, times ``k_scale`` the keys.
        records: uint8 ``[N, H, W]``, by physical page.
        block_table: int32 ``[R, columns]``. seq_lens: int32 ``[R]``; a row of 0 is left alone.
        scale: softmax scale. softcap: logit soft cap, 0 for none; it is applied to ``forced``, not to the estimates.
        scores: ``[R, H, page_capacity, padded group]`` float16 (torch: float32 too), written for pages before the window.
        base, forced: float32 ``[R, H, padded group]``, written.
        partials: float32 ``[R, H, chunks, padded group]``, written for chunks that have a tile; chunks from `chunk_count`.
        scratch: needed by the CUDA and Triton kernels of the sketch.
        kernels: cuda, triton or torch. What has no CUDA kernel, see `scorer` and `fills_pieces`, is scored by Triton under "cuda".
        full_pages: a request of at most so many pages is attended whole, so nothing need be written for it; the CUDA kernels leave it alone.
        overlap: CUDA only: launch before the preceding kernel has ended (programmatic dependent launch).
        settled: with ``overlap``: records of candidate pages, block table and lengths were complete before the chain of overlapped launches
            began, so they may be read ahead. That holds in a step of decode rows of one token: a page that it completes is in the window of its row.
            For a row whose last token begins a page the last full page may be new all the same; the kernel waits for its record.
            What the preceding kernel may write, keys of the open page and, without ``queries_settled``, queries, is never read ahead.
        queries_settled: with ``overlap``: the preceding kernel is `kvskim.ops.write_cache.write_cache`, or that and `encode` behind it, and what wrote
            the queries and what used ``scratch`` before were launched ahead of them. Then queries are read while they run.
        tier: where ``key_cache`` is the keys of a tier in host memory: that tier. The kernels read pages that are hot from its hot cache.

    Raises:
        ValueError: shapes or dtypes do not fit; one sentence.
    """
    _check(query, key_cache, records, block_table, seq_lens, scores, base, forced, partials, window_pages, kernels)
    if tier is not None:
        check_tier(tier, key_cache)
    if query.shape[0] == 0:
        return
    common: dict[str, Any] = dict(scale=scale, softcap=softcap, sink_pages=sink_pages, window_pages=window_pages, k_scale=k_scale)
    outputs: dict[str, Any] = dict(scores=scores, base=base, forced=forced, partials=partials)
    if isinstance(query, LatentQuery) and not reads_parts(query, tables, kernels):
        query, queries_settled = joined(query, kernels), False  # joined by a kernel that is the preceding one now
    if kernels == "torch":
        assert isinstance(query, Tensor)
        score_torch(selector, tables, query, key_cache, records, block_table, seq_lens, **common, **outputs)
    elif isinstance(tables, SketchTables) and kernels == "cuda" and tables.record_bytes == CUDA_RECORD_BYTES:
        if scratch is None:
            raise ValueError("the CUDA kernels of score need scratch buffers; pass scratch")
        from kvskim.ops.cuda import score_sketch as cuda

        flags = (cuda.OVERLAP_PREVIOUS | (cuda.RECORDS_SETTLED if settled else 0)) if overlap else 0
        early = cuda.QUERIES_SETTLED if overlap and queries_settled else 0
        first, *rest = parts_of(query)
        cuda.prepare_sketch(
            first, key_cache, tables.query_matrix, tables.slot_coefficient, tables.slot_digit, tables.mean, block_table, seq_lens,
            scratch.sketch_weights, base, forced, scale, softcap, k_scale, sink_pages, window_pages, full_pages, flags | early,
            None if tier is None else tier.hot, None if tier is None else tier.directory, rest[0] if rest else None,
        )
        cuda.score_sketch(
            records, block_table, seq_lens, scratch.sketch_weights, forced, scores, partials, query.shape[1] // key_cache.shape[2],
            key_cache.shape[1], sink_pages, window_pages, full_pages, flags,
        )
    elif isinstance(tables, SketchTables):
        assert isinstance(query, Tensor)
        from kvskim.ops.triton.score_sketch import score_sketch

        score_sketch(tables, query, key_cache, records, block_table, seq_lens, **common, **outputs, scratch=scratch, tier=tier)
    elif isinstance(tables, PageTables):
        assert isinstance(query, Tensor)
        group = query.shape[1] // key_cache.shape[2]
        if scorer(selector, kernels, query.shape[2], group, query.dtype) == "cuda" and fills_pieces(records):
            from kvskim.ops.cuda.score_pages import form_of, record_offsets
            from kvskim.ops.cuda.score_pages import score_pages as score_pages_cuda
            from kvskim.ops.triton.forced import forced_mass

            forced_mass(query, key_cache, block_table, seq_lens, tables.offset, **common, forced=forced, base=base, tier=tier)
            score_pages_cuda(
                form_of(selector, query.shape[2], group, query.dtype), query, records, block_table, seq_lens, forced, scores, partials, group,
                key_cache.shape[1], sink_pages, window_pages, full_pages, getattr(selector, "rank", 0), record_offsets(selector, query.shape[2]), scale,
            )
            return
        from kvskim.ops.triton.score_pages import score_pages

        score_pages(selector, tables, query, key_cache, records, block_table, seq_lens, **common, **outputs, tier=tier)
    else:
        raise ValueError(f"no GPU score kernel for tables of type {type(tables).__name__}; use kernels 'torch'")


def reads_parts(query: LatentQuery, tables: Any, kernels: str) -> bool:
    """Whether a query in parts is scored as it lies: by the CUDA kernels of 256-byte sketch records, from rows of whole steps of 32 channels that begin
    at multiples of 16 bytes."""
    aligned = all(
        part.data_ptr() % 16 == 0 and all(stride * part.element_size() % 16 == 0 for stride in part.stride()[:2]) for part in (query.latent, query.rotary)
    )
    is_sketch = isinstance(tables, SketchTables) and tables.record_bytes == CUDA_RECORD_BYTES
    return kernels == "cuda" and is_sketch and aligned and query.latent.shape[2] % 32 == 0


def _check(
    query: Query, key_cache: Tensor, records: Tensor, block_table: Tensor, seq_lens: Tensor, scores: Tensor, base: Tensor, forced: Tensor,
    partials: Tensor, window_pages: int, kernels: str,
) -> None:
    if kernels not in ("cuda", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
    requests, heads = query.shape[0], key_cache.shape[2]
    if len(query.shape) != 3 or key_cache.dim() != 4 or query.shape[2] != key_cache.shape[3] or query.shape[1] % heads:
        raise ValueError(f"query {list(query.shape)} and key_cache {list(key_cache.shape)} do not fit: [R, H G, D] and [blocks, block_size, H, D]")
    group = query.shape[1] // heads
    if scores.dim() != 4 or tuple(scores.shape[:2]) != (requests, heads) or scores.shape[3] < group:
        raise ValueError(f"scores {list(scores.shape)} do not fit {requests} requests, {heads} kv heads and {group} query heads each")
    columns = scores.shape[3]
    for name, tensor, shape in (
        ("base", base, (requests, heads, columns)), ("forced", forced, (requests, heads, columns)),
        ("partials", partials, (requests, heads, partials.shape[2] if partials.dim() == 4 else 0, columns)),
    ):
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be float32 {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
    if records.dtype != torch.uint8 or records.dim() != 3 or records.shape[1] != heads or not records.is_contiguous():
        raise ValueError(f"records must be contiguous uint8 [pages, {heads}, bytes], not {records.dtype} {list(records.shape)}")
    if block_table.dtype != torch.int32 or seq_lens.dtype != torch.int32 or tuple(seq_lens.shape) != (requests,) or block_table.shape[0] != requests:
        raise ValueError(f"block_table and seq_lens must be int32 with {requests} rows")
    if window_pages < 1:
        raise ValueError(f"window_pages is {window_pages}; it must be at least 1, because the open page has no record")
    if not rows_are_contiguous(query) or key_cache.stride(-1) != 1:
        raise ValueError("the last dimension of query and key_cache must be contiguous")
    if key_cache.shape[1] % PAGE_TOKENS:
        raise ValueError(f"block_size is {key_cache.shape[1]}; it must be a multiple of {PAGE_TOKENS}")
    if kernels != "torch":
        if scores.dtype != torch.float16 or columns != padded_group(group):
            raise ValueError(f"scores must be float16 with {padded_group(group)} columns for the {kernels} kernels, not {scores.dtype} with {columns}")
        for name, tensor in (("scores", scores), ("base", base), ("forced", forced), ("partials", partials), ("seq_lens", seq_lens)):
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous for the {kernels} kernels")
