"""Call of the CUDA kernel of latent attention (attend_latent.cu)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.ops.cuda.library import FLOAT, INT, LONG, POINTER, STREAM, function, operator, pointer, stream

_ELEMENT_TYPES = {torch.bfloat16: 0, torch.float16: 1}
_OVERLAP_PREVIOUS, _QUERIES_SETTLED = 1, 4

_attend = function("kvskim_attend_latent", (
    POINTER, LONG, LONG, POINTER, LONG, LONG,  # the two parts of the query
    POINTER, LONG, LONG, LONG,  # cache
    POINTER, LONG, POINTER, POINTER, POINTER,  # block_table, seq_lens, pages, counts
    POINTER, LONG, LONG, POINTER, POINTER, POINTER,  # out, lse, partials, tickets
    INT, INT, INT, INT, INT,  # requests, heads, group, pages per block, table capacity
    INT, INT, INT, INT, INT, INT,  # query unit, full pages, cluster, clusters, pages per split, crowded
    INT, FLOAT, FLOAT, FLOAT, FLOAT, INT, STREAM,  # type, scale, softcap, k_scale, v_scale, flags
))


@operator("attend_latent", mutates=("out", "lse", "partials", "tickets"))
def attend_latent_cuda(
    latent: Tensor, rotary: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, out: Tensor, lse: Tensor | None,
    partials: Tensor, tickets: Tensor, cluster: int, clusters: int, pages_per_split: int, crowded: bool, scale: float, softcap: float, k_scale: float,
    v_scale: float, overlap_previous: bool, settled: bool = False, full_pages: int = 0,
) -> None:
    """Arguments as checked by `kvskim.ops.attend.attend`, with the query in its two parts of 512 and 64 channels and the cache of 576; cluster, clusters,
    pages_per_split and crowded from `kvskim.ops.attend_plan.latent_plan`.
    """
    requests, query_heads, _ = latent.shape
    flags = (_OVERLAP_PREVIOUS if overlap_previous else 0) | (_QUERIES_SETTLED if settled else 0)
    heads = cache.shape[2]
    with torch.cuda.device(latent.device):
        _attend(
            pointer(latent), latent.stride(0), latent.stride(1), pointer(rotary), rotary.stride(0), rotary.stride(1),
            pointer(cache), cache.stride(0), cache.stride(1), cache.stride(2),
            pointer(block_table), block_table.stride(0), pointer(seq_lens), pointer(pages), pointer(counts),
            pointer(out), out.stride(0), out.stride(1), pointer(lse), pointer(partials), pointer(tickets),
            requests, heads, query_heads // heads, cache.shape[1] // PAGE_TOKENS, pages.shape[2],
            _query_unit(latent, rotary), full_pages if settled else 0, cluster, clusters, pages_per_split, int(crowded), _ELEMENT_TYPES[latent.dtype],
            scale, softcap, k_scale, v_scale, flags, stream(latent.device),
        )


def _query_unit(*parts: Tensor) -> int:
    """Bytes of the query that are copied at a time: 16 where all rows of both parts begin at multiples of it, else 4."""
    aligned = all(
        part.data_ptr() % 16 == 0 and all(extent <= 1 or stride % 8 == 0 for stride, extent in zip(part.stride()[:2], part.shape)) for part in parts
    )
    return 16 if aligned else 4
