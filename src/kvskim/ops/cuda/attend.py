"""Call of the CUDA attend kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.ops.cuda.library import FLOAT, INT, LONG, POINTER, STREAM, function, operator, pointer, stream

_ELEMENT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
_OVERLAP_PREVIOUS = 1

_attend = function("kvskim_attend", (
    POINTER, LONG, LONG,  # query
    POINTER, LONG, LONG, LONG,  # key_cache
    POINTER, LONG, LONG, LONG,  # value_cache
    POINTER, POINTER, POINTER, INT,  # pages in host memory, their hot copies, directory, parts of a page
    POINTER, LONG, POINTER, POINTER, POINTER,  # block_table, seq_lens, pages, counts
    POINTER, LONG, LONG, POINTER, POINTER, POINTER,  # out, lse, partials, tickets
    INT, INT, INT, INT, INT, INT,  # requests, heads, group, dim, pages per block, table capacity
    INT, INT, INT,  # splits, pages per split, cluster
    INT, INT, FLOAT, FLOAT, FLOAT, FLOAT, INT, STREAM,  # query type, cache type, scale, softcap, k_scale, v_scale, flags
))


@operator("attend", mutates=("out", "lse", "partials", "tickets"))
def attend_cuda(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, out: Tensor,
    lse: Tensor | None, partials: Tensor, tickets: Tensor, splits: int, pages_per_split: int, cluster: int, scale: float,
    softcap: float, k_scale: float, v_scale: float, overlap_previous: bool,
) -> None:
    """Arguments as checked by `kvskim.ops.attend.attend`; splits and pages_per_split from `kvskim.ops.attend_plan.attend_plan`,
    cluster from `kvskim.ops.attend_plan.attend_cluster`.
    """
    values = (pointer(value_cache), value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), None, None, None, 0)
    _launch(
        query, key_cache, values, block_table, seq_lens, pages, counts, out, lse, partials, tickets, (splits, pages_per_split, cluster),
        (scale, softcap, k_scale, v_scale), overlap_previous,
    )


@operator("attend_tiered", mutates=("out", "lse", "partials", "tickets"))
def attend_tiered_cuda(
    query: Tensor, key_cache: Tensor, host: Tensor, hot: Tensor, directory: Tensor, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor,
    out: Tensor, lse: Tensor | None, partials: Tensor, tickets: Tensor, splits: int, pages_per_split: int, cluster: int, scale: float, softcap: float,
    overlap_previous: bool,
) -> None:
    """Arguments as checked by `kvskim.ops.attend_tiered.attend_tiered`; values, or keys and values, in the tensors of a `kvskim.tier.pages.HostTier`."""
    values = (None, 0, 0, 0, pointer(host), pointer(hot), pointer(directory), host.shape[2])
    _launch(
        query, key_cache, values, block_table, seq_lens, pages, counts, out, lse, partials, tickets, (splits, pages_per_split, cluster),
        (scale, softcap, 1.0, 1.0), overlap_previous,
    )


def _launch(
    query: Tensor, key_cache: Tensor, values: tuple[int | None, ...], block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, out: Tensor,
    lse: Tensor | None, partials: Tensor, tickets: Tensor, plan: tuple[int, int, int], numbers: tuple[float, float, float, float], overlap_previous: bool,
) -> None:
    requests, query_heads, dim = query.shape
    heads = key_cache.shape[2]
    with torch.cuda.device(query.device):
        _attend(
            pointer(query), query.stride(0), query.stride(1),
            pointer(key_cache), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), *values,
            pointer(block_table), block_table.stride(0), pointer(seq_lens), pointer(pages), pointer(counts),
            pointer(out), out.stride(0), out.stride(1), pointer(lse), pointer(partials), pointer(tickets),
            requests, heads, query_heads // heads, dim, key_cache.shape[1] // PAGE_TOKENS, pages.shape[2], *plan,
            _ELEMENT_TYPES[query.dtype], _ELEMENT_TYPES[key_cache.dtype], *numbers, _OVERLAP_PREVIOUS if overlap_previous else 0,
            stream(query.device),
        )
