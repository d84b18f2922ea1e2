"""Call of the CUDA fetch kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.ops.cuda.library import INT, LONG, POINTER, STREAM, function, operator, pointer, stream

_OVERLAP_PREVIOUS = 1
_COPIES_LATER = 4

_fetch = function("kvskim_fetch", (
    POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER,  # host, hot, directory, owner, stamp, clock, counters
    POINTER, LONG, POINTER, POINTER, POINTER,  # block_table, seq_lens, pages, counts
    POINTER, POINTER, POINTER,  # missing, victims, fetched_pages
    INT, INT, INT, INT, INT, INT,  # pairs, heads, slots, table capacity, pages per block, page bytes
    INT, STREAM,  # flags
))


@operator("fetch", mutates=("hot", "directory", "owner", "stamp", "clock", "counters", "missing", "victims", "fetched_pages"))
def fetch_cuda(
    host: Tensor, hot: Tensor, directory: Tensor, owner: Tensor, stamp: Tensor, clock: Tensor, counters: Tensor, block_table: Tensor, seq_lens: Tensor,
    pages: Tensor, counts: Tensor, missing: Tensor, victims: Tensor, fetched_pages: Tensor, block_size: int, overlap_previous: bool, copies: bool,
) -> None:
    """Arguments as checked by `kvskim.ops.fetch.fetch`; the tensors of the tier one by one."""
    with torch.cuda.device(hot.device):
        _fetch(
            pointer(host), pointer(hot), pointer(directory), pointer(owner), pointer(stamp), pointer(clock), pointer(counters),
            pointer(block_table), block_table.stride(0), pointer(seq_lens), pointer(pages), pointer(counts), pointer(missing), pointer(victims),
            pointer(fetched_pages), counts.numel(), host.shape[1], hot.shape[0], pages.shape[2], block_size // PAGE_TOKENS,
            hot.stride(0) * hot.element_size(), (_OVERLAP_PREVIOUS if overlap_previous else 0) | (0 if copies else _COPIES_LATER),
            stream(hot.device),
        )
