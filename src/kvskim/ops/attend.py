"""Sparse paged decode attention over a page table per (request, kv head): checks and choice of implementation.

With the selected pages ``P`` of a (request, kv head), for every query head of its group::

    x_t = scale * q . (k_scale * k_t)            for every token t of a page in P with position < seq_len
    x_t = softcap * tanh(x_t / softcap)          if softcap > 0
    lse = log sum_t exp(x_t),   out = sum_t exp(x_t - lse) * v_scale * v_t

See docs/how-it-works.md, section "Attend".
"""

from __future__ import annotations

import functools
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvskim.layout import LARGEST_GROUP, PAGE_TOKENS, ceil_div
from kvskim.ops.attend_plan import (
    LATENT_DIM,
    LATENT_HEADS,
    LATENT_SHARE,
    LATENT_VALUE_DIM,
    SHORT_SHARE,
    AttendPlan,
    attend_cluster,
    attend_plan,
    head_blocks,
    latent_plan,
    latent_tickets,
)
from kvskim.ops.latent_query import LatentQuery, Query, joined, parts_of, rows_are_contiguous
from kvskim.ops.torch_attend import attend_torch

Kernels = Literal["cuda", "triton", "torch"]

CUDA_HEAD_DIMS = (64, 96, 128, 256)
"""Head dims that the CUDA kernel is compiled for; Triton and torch take any."""

CUDA_GROUP = 16
"""Most query heads per kv head that the CUDA kernel takes."""

CUDA_LATENT_GROUP = 128
"""The same of the CUDA kernel of latent attention."""

USUAL_PAGES = 128
"""Pages of a selection that the thread blocks of the CUDA kernel are shared out for, where page tables are shorter still."""


class AttendScratch(Protocol):
    """Buffers that attend works in. They are shared by all layers: launches of one stream use them one after the other."""

    attend_partials: Tensor
    """float32, one-dimensional; size from `kvskim.ops.attend_plan.attend_scratch_sizes`; content arbitrary."""
    attend_tickets: Tensor
    """int32, one-dimensional; zero before the first launch, and every launch leaves it zero."""


def attend(
    query: Query, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, *,
    scale: float, softcap: float = 0.0, k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor, lse: Tensor | None = None,
    scratch: AttendScratch | None, kernels: str, overlap_previous: bool = False, settled: bool = False, full_pages: int = 0,
) -> None:
    """Attention of one query token per request to the selected pages of its KV cache.

    Args:
        query: ``[R, Hq, D]`` bfloat16 or float16 (torch: also float32, float64); head hq reads kv head hq // (Hq / H). Or a `LatentQuery`: where its
            first part has ``Dv`` channels, Triton reads the parts where they lie; else they are joined in new memory.
        key_cache, value_cache: ``[blocks, block_size, H, D]`` and ``[blocks, block_size, H, Dv]`` views of any strides with contiguous rows;
            dtype of the query, or, where ``Dv = D``, float8_e4m3fn. A value cache that is the first ``Dv`` channels of the key cache (latent
            attention) is read once.
        block_table: int32 ``[R, columns]``; entries of blocks beyond a request are not read.
        seq_lens: int32 ``[R]``, tokens in the cache including the current one. A row of 0 gives zeros and an lse of minus infinity.
        pages: int32 ``[R, H, capacity]``, ascending logical pages of 16 tokens; beyond the count not used.
        counts: int32 ``[R, H]``. A count equal to the pages of the request means all pages, and the table is not used.
        scale: factor of the logits. softcap: 0 for none. k_scale, v_scale: value = stored * scale.
        out: ``[R, Hq, Dv]`` in the dtype of the query. lse: float32 ``[R, Hq]``, natural logarithm, or None.
        scratch: see `AttendScratch`; not needed by torch.
        kernels: cuda, triton or torch. What the CUDA kernels do not serve at all, values of another width than the keys and groups of more
            than 16 query heads, the Triton kernels attend under "cuda" too; but for latent attention with 512 + 64 channels, see `serves_latent`.
        overlap_previous: let the launch begin before the kernel ahead of it in the stream has ended (programmatic dependent launch): the CUDA
            kernels, and the Triton kernels of latent attention.
        settled: all that is read here but ``pages`` and ``counts`` was complete, and all that reads or writes ``out``, ``lse`` and ``scratch`` had ended,
            before the kernel ahead let this launch begin, as behind `kvskim.ops.select.select`. With ``overlap_previous`` the CUDA kernel of latent
            attention then reads the query before that kernel has ended. Without it, and by the other kernels, not used.
        full_pages: where settled, the same of select: requests of at most so many pages have a count of all of them. The CUDA kernel of latent attention
            attends them, and writes what it has, without waiting for their count.

    Raises:
        ValueError: an argument has another shape, dtype, stride or device than said here.

    Allocates nothing but a joined query, and never waits for the device (cuda, triton); safe in CUDA graphs.
    """
    check_arguments(query, key_cache, value_cache, block_table, seq_lens, pages, counts, softcap, out, lse)
    if isinstance(query, LatentQuery) and (
        kernels == "torch" or query.latent.shape[2] != value_cache.shape[3] or not shares_rows(key_cache, value_cache)
    ):
        query = joined(query, kernels)
        settled = False  # the kernel ahead is the one that joins
    if kernels == "torch":
        assert isinstance(query, Tensor)
        attend_torch(
            query, key_cache, value_cache, block_table, seq_lens, pages, counts,
            scale=scale, softcap=softcap, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
        )
        return
    if kernels not in ("cuda", "triton"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
    if scratch is None:
        raise ValueError(f"the {kernels} kernels of attend need scratch buffers; pass scratch")
    if query.shape[0] == 0:
        return
    if kernels == "cuda" and serves_latent(query, key_cache, value_cache, out):
        _attend_latent(
            query, key_cache, block_table, seq_lens, pages, counts, out, lse, scratch, scale, softcap, k_scale, v_scale, overlap_previous,
            settled and overlap_previous, full_pages,
        )
        return
    plan = plan_of(query, key_cache, value_cache, block_table)
    splits = check_splits(query, key_cache, out, scratch, plan.splits)
    if attending_kernels(kernels, query.shape[1] // key_cache.shape[2], query.shape[2], value_cache.shape[3]) == "cuda":
        from kvskim.ops.cuda.attend import attend_cuda

        assert isinstance(query, Tensor)
        check_cuda(query, key_cache, value_cache, out)
        attend_cuda(
            query, key_cache, value_cache, block_table, seq_lens, pages, counts, out, lse, scratch.attend_partials, scratch.attend_tickets,
            splits, plan.pages_per_split, cluster_of(query, key_cache, block_table, pages), scale, softcap, k_scale, v_scale,
            overlap_previous,
        )
    else:
        from kvskim.ops.triton.attend import attend_triton

        attend_triton(
            query, key_cache, value_cache, block_table, seq_lens, pages, counts, out, lse, scratch.attend_partials,
            splits, plan.pages_per_split, scale, softcap, k_scale, v_scale, shares_rows(key_cache, value_cache),
            overlap_previous,
        )


def _attend_latent(
    query: Query, cache: Tensor, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, out: Tensor, lse: Tensor | None,
    scratch: AttendScratch, scale: float, softcap: float, k_scale: float, v_scale: float, overlap_previous: bool, settled: bool, full_pages: int,
) -> None:
    from kvskim.ops.cuda.attend_latent import attend_latent_cuda

    requests, query_heads, _ = query.shape
    heads, group = cache.shape[2], query_heads // cache.shape[2]
    capacity = block_table.shape[1] * (cache.shape[1] // PAGE_TOKENS)
    plan = latent_plan(requests, heads * ceil_div(group, LATENT_HEADS), capacity, multiprocessor_count(query.device))
    clusters = check_splits(query, cache, out, scratch, plan.clusters)
    if scratch.attend_tickets.numel() < latent_tickets(requests, heads, group):
        clusters = 1
    first, *others = parts_of(query)
    attend_latent_cuda(
        first, others[0] if others else first[..., LATENT_VALUE_DIM:], cache, block_table, seq_lens, pages, counts, out, lse, scratch.attend_partials,
        scratch.attend_tickets, plan.cluster, clusters, plan.pages_per_split, plan.crowded, scale, softcap, k_scale, v_scale, overlap_previous,
        settled, full_pages,
    )


def serves_latent(query: Query, key_cache: Tensor, value_cache: Tensor, out: Tensor) -> bool:
    """Whether the CUDA kernel of latent attention takes these: values that are the first 512 of the 576 channels of the keys, in the same memory, rows
    that begin where its copies need it, and at most 128 query heads."""
    return (
        shares_rows(key_cache, value_cache) and (key_cache.shape[3], value_cache.shape[3]) == (LATENT_DIM, LATENT_VALUE_DIM)
        and query.dtype in (torch.bfloat16, torch.float16) and key_cache.dtype == query.dtype
        and query.shape[1] // key_cache.shape[2] <= CUDA_LATENT_GROUP
        and _aligned(key_cache, 16) and _aligned(out, 8) and all(_aligned(part, 4) for part in parts_of(query))
    )


def _aligned(tensor: Tensor, unit: int) -> bool:
    """Whether all rows begin at multiples of so many bytes."""
    size = tensor.element_size()
    strides = zip(tensor.stride()[:-1], tensor.shape)
    return tensor.data_ptr() % unit == 0 and all(extent <= 1 or stride * size % unit == 0 for stride, extent in strides)


def attending_kernels(kernels: str, group: int, head_dim: int, value_dim: int) -> str:
    """Which kernels really attend what is not latent: under "cuda", values of another width than the keys and groups of more than 16 are Triton's."""
    return "triton" if kernels == "cuda" and (group > CUDA_GROUP or value_dim != head_dim) else kernels


def shares_rows(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether the values are the first channels of the keys, in the same memory: latent attention."""
    return (
        value_cache.shape[3] < key_cache.shape[3] and value_cache.data_ptr() == key_cache.data_ptr() and value_cache.stride() == key_cache.stride()
    )


def plan_of(query: Query, key_cache: Tensor, value_cache: Tensor, block_table: Tensor) -> AttendPlan:
    """Shares of the work of one call; see `kvskim.ops.attend_plan.attend_plan`."""
    heads = key_cache.shape[2]
    capacity = block_table.shape[1] * (key_cache.shape[1] // PAGE_TOKENS)
    share = LATENT_SHARE if shares_rows(key_cache, value_cache) else SHORT_SHARE
    return attend_plan(query.shape[0], heads * head_blocks(query.shape[1] // heads), capacity, multiprocessor_count(query.device), share)


def cluster_of(query: Tensor, key_cache: Tensor, block_table: Tensor, pages: Tensor) -> int:
    """Thread blocks of the CUDA kernel that share a (request, kv head)."""
    capacity = block_table.shape[1] * (key_cache.shape[1] // PAGE_TOKENS)
    # Long page tables are rare: rows that attend more pages than a table holds attend all, and are short or not calibrated yet.
    longest = min(capacity, max(pages.shape[2], USUAL_PAGES))
    return attend_cluster(query.shape[0], key_cache.shape[2], longest, multiprocessor_count(query.device))


@functools.lru_cache(maxsize=64)
def multiprocessor_count(device: torch.device) -> int:
    """Of a GPU; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_arguments(
    query: Query, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor,
    softcap: float, out: Tensor, lse: Tensor | None,
) -> None:
    """What all implementations need of the arguments of `attend`.

    Raises:
        ValueError: see `attend`.
    """
    if len(query.shape) != 3:
        raise ValueError(f"query has shape {tuple(query.shape)}; expected [requests, query heads, head dim]")
    requests, query_heads, dim = query.shape
    if key_cache.dim() != 4 or value_cache.dim() != 4 or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"key_cache and value_cache have shapes {tuple(key_cache.shape)} and {tuple(value_cache.shape)}; "
            "expected two of [blocks, block size, kv heads, head dim]"
        )
    value_dim = value_cache.shape[3]
    block_size, heads = key_cache.shape[1], key_cache.shape[2]
    if key_cache.shape[3] != dim:
        raise ValueError(f"query has head dim {dim} and the cache {key_cache.shape[3]}; they must be equal")
    if block_size % PAGE_TOKENS or block_size == 0:
        raise ValueError(f"the cache has blocks of {block_size} tokens; expected a multiple of {PAGE_TOKENS}")
    if heads == 0 or query_heads % heads:
        raise ValueError(f"{query_heads} query heads can't be shared among {heads} kv heads")
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ValueError(f"caches of {key_cache.dtype} and {value_cache.dtype} with a query of {query.dtype}; expected the query's dtype or float8_e4m3fn")
    if key_cache.element_size() == 1 and value_dim != dim:
        raise ValueError(f"a float8 cache with keys of {dim} and values of {value_dim} channels can't be attended; use a bfloat16 or float16 cache")
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1 or not rows_are_contiguous(query):
        raise ValueError("the last dimension of query, key_cache and value_cache must be contiguous")
    for name, tensor, shape in (
        ("block_table", block_table, (requests, block_table.shape[-1])), ("seq_lens", seq_lens, (requests,)),
        ("pages", pages, (requests, heads, pages.shape[-1])), ("counts", counts, (requests, heads)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected int32 {shape}")
    if block_table.dim() == 2 and block_table.stride(1) != 1 and block_table.shape[1] > 1:
        raise ValueError("the rows of block_table must be contiguous")
    if not (pages.is_contiguous() and counts.is_contiguous() and seq_lens.is_contiguous()):
        raise ValueError("pages, counts and seq_lens must be contiguous")
    if out.shape != (requests, query_heads, value_dim) or out.dtype != query.dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; expected {query.dtype} {(requests, query_heads, value_dim)}")
    if lse is not None and (lse.dtype != torch.float32 or lse.shape != (requests, query_heads) or not lse.is_contiguous()):
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}; expected contiguous float32 {(requests, query_heads)}")
    if not softcap >= 0:
        raise ValueError(f"softcap is {softcap}; use 0 for none or a positive number")
    for name, tensor in (
        ("key_cache", key_cache), ("value_cache", value_cache), ("block_table", block_table), ("seq_lens", seq_lens), ("pages", pages),
        ("counts", counts), ("out", out), ("lse", out if lse is None else lse),
    ):
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} and query on {query.device}; all tensors must be on one device")


def check_splits(query: Query, key_cache: Tensor, out: Tensor, scratch: AttendScratch, splits: int) -> int:
    """The number of splits, or fewer when a block table wider than the scratch was sized for asks for more than fit."""
    requests, query_heads, dim = out.shape
    heads = key_cache.shape[2]
    group = query_heads // heads
    if group > LARGEST_GROUP:
        raise ValueError(f"{group} query heads share a kv head; the kernels take at most {LARGEST_GROUP}, use kernels='torch'")
    if requests > 65535:
        raise ValueError(f"{requests} requests in one batch; the kernels take at most 65535")
    if out.stride(2) != 1:
        raise ValueError("the last dimension of out must be contiguous")
    least = requests * query_heads * (dim + 2)
    partials, tickets = scratch.attend_partials, scratch.attend_tickets
    if partials.dtype != torch.float32 or partials.numel() < least or not partials.is_contiguous() or partials.device != query.device:
        raise ValueError(f"scratch.attend_partials is {partials.dtype} with {partials.numel()} elements on {partials.device}; {least} float32 are needed")
    if tickets.dtype != torch.int32 or tickets.numel() < requests * heads or not tickets.is_contiguous() or tickets.device != query.device:
        raise ValueError(f"scratch.attend_tickets is {tickets.dtype} with {tickets.numel()} elements on {tickets.device}; {requests * heads} int32 are needed")
    return min(splits, partials.numel() // least)


def check_cuda(query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor) -> None:
    """What the CUDA kernel needs besides.

    Raises:
        ValueError: the query is of another type or head dim than it is compiled for, or rows are not aligned.
    """
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"query is {query.dtype}; the CUDA kernel takes bfloat16 and float16")
    if query.shape[2] not in CUDA_HEAD_DIMS:
        raise ValueError(f"head dim {query.shape[2]}; the CUDA kernel takes {', '.join(map(str, CUDA_HEAD_DIMS))}, use kernels='triton'")
    for name, tensor, unit in (("query", query, 8), ("key_cache", key_cache, 16), ("value_cache", value_cache, 16), ("out", out, 8)):
        if not _aligned(tensor, unit):
            raise ValueError(f"rows of {name} must begin at multiples of {unit} bytes")


def required_partials(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor) -> int:
    """Elements of ``scratch.attend_partials`` that a call with these tensors needs."""
    requests, query_heads, _ = query.shape
    return requests * query_heads * plan_of(query, key_cache, value_cache, block_table).splits * (value_cache.shape[3] + 2)
