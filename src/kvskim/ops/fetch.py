"""Public op ``fetch``: make the selected pages hot, as far as the hot cache has room for them.

All decisions are taken on the device, in an order that depends on nothing but the arguments and the state of the tier:

1. Selected pages that are hot are in use: their stamp becomes the clock, and they stay.
2. The others, each once however many rows select it, are missing; they are ordered by first row, kv head and place in the page table.
3. Slots that are not in use are victims: empty ones first, then by `kvskim.tier.pages.AGE_CLASSES` of the fetches since their last use, oldest
   first, and by slot within a class. This is least-recently-used up to a factor of two in age.
4. The i-th missing page is copied from the host into the i-th victim. When the victims run out, the remaining pages stay on the host, where
   `kvskim.ops.attend_tiered` reads them: slower, and no other result.

The copies may be left to `copy_fetched`, after attention, which then reads missing pages from the host while it computes with those that are hot. The
decisions may then be taken beside attention: they leave selected pages that are hot where they are, and make none hot.

See docs/how-it-works.md, section "The host tier".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops import attend
from kvskim.tier.pages import AGE_CLASSES, HostTier
from kvskim.tier.torch_pages import choose_torch, copy_torch

SLOT_CHUNK = 512
"""Slots that one program classifies."""

MOST_SEGMENTS = 32
"""Most programs that share the page table of one (row, kv head)."""

CUDA_PAIRS = 32768
"""Most rows times kv heads that the CUDA kernel takes; larger batches are the Triton kernels'."""


@dataclass(frozen=True)
class FetchScratch:
    """Work buffers of `fetch`, int32, content arbitrary; shared by all layers whose launches follow each other in one stream. Between a fetch that leaves
    its copies to `copy_fetched` and that, no other fetch may have them."""

    selected: Tensor
    """``[programs]``: selected pages."""
    misses: Tensor
    """``[programs]``: selected pages that this program is the first to miss."""
    ages: Tensor
    """``[chunks, AGE_CLASSES]``: possible victims of each class."""
    missing: Tensor
    """``[slots]``: page * H + head of the pages to copy."""
    victims: Tensor
    """``[slots]``: the slots to copy them to."""
    fetched_pages: Tensor
    """``[1]``: how many."""


def segments(pairs: int, multiprocessors: int) -> int:
    """Programs that share the page table of one (row, kv head): two programs on each multiprocessor, unless the pairs are more than that."""
    return max(1, min(MOST_SEGMENTS, 2 * multiprocessors // max(pairs, 1)))


def fetch_scratch(max_pairs: int, slots: int, device: torch.device | str) -> FetchScratch:
    """Buffers for batches of up to ``max_pairs`` rows times kv heads and hot caches of up to ``slots``."""
    programs = max(max_pairs, 2 * attend.multiprocessor_count(torch.device(device)))
    sizes = (programs, programs, ceil_div(slots, SLOT_CHUNK) * AGE_CLASSES, slots, slots, 1)
    return FetchScratch(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


def fetch(
    tier: HostTier, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, *, block_size: int, scratch: FetchScratch | None, kernels: str,
    overlap_previous: bool = False, copies: bool = True,
) -> None:
    """Copy selected pages that are not hot from the host into the hot cache; pages that this selection uses are never replaced.

    Args:
        tier: of one layer; all its tensors but ``host`` are changed.
        block_table: int32 ``[R, columns]``; entries of blocks beyond a request are not read.
        seq_lens: int32 ``[R]``; rows of 0 select nothing.
        pages, counts: the selection, int32 ``[R, H, capacity]`` and ``[R, H]``, as in `kvskim.ops.attend.attend`.
        block_size: tokens of a block.
        scratch: from `fetch_scratch`; torch needs it only without ``copies``.
        kernels: cuda, triton or torch. Batches of more than `CUDA_PAIRS` rows times kv heads Triton fetches for under "cuda" too.
        overlap_previous: CUDA only: let the launch begin before the kernel ahead of it in the stream has ended (programmatic dependent launch).
        copies: False leaves them to `copy_fetched`, which must come before the tier is used by anything but attention to this selection. Until then
            missing pages are not hot, and the slots that they get are empty. Attention to this selection may run beside such a fetch too.

    Raises:
        ValueError: an argument has another shape, dtype, stride or device than said here.

    Allocates nothing and never waits for the device (cuda, triton); safe in CUDA graphs.
    """
    _check(tier, block_table, seq_lens, pages, counts, block_size, kernels)
    if kernels == "torch" and copies:
        copy_torch(tier, *choose_torch(tier, block_table, seq_lens, pages, counts, block_size))
        return
    if scratch is None:
        raise ValueError(f"the {kernels} kernels of fetch need scratch buffers; pass scratch")
    if kernels == "torch":
        missing, victims = choose_torch(tier, block_table, seq_lens, pages, counts, block_size)
        scratch.missing[: len(missing)], scratch.victims[: len(victims)] = missing, victims
        scratch.fetched_pages.fill_(len(missing))
        return
    pairs = counts.numel()
    if pairs == 0:
        scratch.fetched_pages.zero_()
        return
    multiprocessors = attend.multiprocessor_count(tier.device)
    share = segments(pairs, multiprocessors)
    _check_scratch(scratch, pairs * share, tier)
    if kernels == "cuda" and pairs <= CUDA_PAIRS:
        from kvskim.ops.cuda.fetch import fetch_cuda

        if tier.host.data_ptr() % 16 or tier.hot.data_ptr() % 16:
            raise ValueError("host and hot must begin at multiples of 16 bytes")
        fetch_cuda(
            tier.host, tier.hot, tier.directory, tier.owner, tier.stamp, tier.clock, tier.counters, block_table, seq_lens, pages, counts,
            scratch.missing, scratch.victims, scratch.fetched_pages, block_size, overlap_previous, copies,
        )
        return
    from kvskim.ops.triton.host_fetch import fetch_triton

    fetch_triton(tier, block_table, seq_lens, pages, counts, block_size, scratch, share, multiprocessors, copies)


def copy_fetched(tier: HostTier, scratch: FetchScratch, *, kernels: str) -> None:
    """The copies that a `fetch` of this tier with these buffers has left; it may run beside anything that does not use the tier.

    Args:
        tier, scratch: as they were given to fetch.
        kernels: cuda, triton or torch; under "cuda" the Triton kernel copies.

    Raises:
        ValueError: kernels is none of these, or the buffers are too small.

    Allocates nothing and never waits for the device (cuda, triton); safe in CUDA graphs.
    """
    if kernels not in ("cuda", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
    _check_scratch(scratch, 0, tier)
    if kernels == "torch":
        count = int(scratch.fetched_pages)
        copy_torch(tier, scratch.missing[:count], scratch.victims[:count])
        return
    from kvskim.ops.triton.host_fetch import copy_triton

    copy_triton(tier, scratch, attend.multiprocessor_count(tier.device))


def _check(tier: HostTier, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, block_size: int, kernels: str) -> None:
    if kernels not in ("cuda", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
    if block_size < PAGE_TOKENS or block_size % PAGE_TOKENS:
        raise ValueError(f"block_size is {block_size}; expected a multiple of {PAGE_TOKENS}")
    requests, heads = seq_lens.shape[0], tier.heads
    for name, tensor, shape in (
        ("block_table", block_table, (requests, block_table.shape[-1])), ("seq_lens", seq_lens, (requests,)),
        ("pages", pages, (requests, heads, pages.shape[-1])), ("counts", counts, (requests, heads)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected int32 {shape}")
        if tensor.device != tier.device:
            raise ValueError(f"{name} is on {tensor.device} and the tier on {tier.device}; both must be on one device")
    if block_table.stride(1) != 1 and block_table.shape[1] > 1:
        raise ValueError("the rows of block_table must be contiguous")
    if not (pages.is_contiguous() and counts.is_contiguous() and seq_lens.is_contiguous()):
        raise ValueError("pages, counts and seq_lens must be contiguous")
    capacity = block_table.shape[1] * (block_size // PAGE_TOKENS)
    if requests * heads * capacity >= 2**31:
        raise ValueError(f"{requests} requests with {heads} kv heads and up to {capacity} pages each; a fetch numbers fewer than 2^31 pages")


def _check_scratch(scratch: FetchScratch, programs: int, tier: HostTier) -> None:
    chunks = ceil_div(tier.slots, SLOT_CHUNK)
    for name, tensor, least in (
        ("selected", scratch.selected, programs), ("misses", scratch.misses, programs), ("ages", scratch.ages, chunks * AGE_CLASSES),
        ("missing", scratch.missing, tier.slots), ("victims", scratch.victims, tier.slots), ("fetched_pages", scratch.fetched_pages, 1),
    ):
        if tensor.dtype != torch.int32 or tensor.numel() < least or not tensor.is_contiguous() or tensor.device != tier.device:
            raise ValueError(f"scratch.{name} is {tensor.dtype} with {tensor.numel()} elements on {tensor.device}; {least} int32 are needed")
