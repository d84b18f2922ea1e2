"""How many thread blocks share the pages of one (request, kv head), and how much scratch memory that takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kvskim.layout import ceil_div

PER_MULTIPROCESSOR = 2
"""Thread blocks of the CUDA kernel that keep a multiprocessor's memory path full. It holds three at most head dims; more splits cost merging."""

MAXIMUM_SPLITS = 128
"""Also in the CUDA sources."""

SHORT_SHARE = 8
"""Pages that are worth a thread block of their own while the GPU is not full: two for each of its four warps."""

LATENT_SHARE = 4
"""The same where keys and values are one row (latent attention): a page is four times as long, and there are no heads to fill the GPU with."""

LONG_SHARE = 512
"""Pages that are worth another thread block when there are enough of them anyway: only long requests of a ragged batch are split."""

MAXIMUM_CLUSTER = 16
"""Thread blocks of the largest cluster. Also in the CUDA sources."""

CLUSTERED_PER_MULTIPROCESSOR = 1
"""Thread blocks of clusters on a multiprocessor: one has a long ring of pages, and each more makes merging longer."""

CLUSTER_SHARE = 32
"""Most pages of a thread block of a cluster when clusters leave more than half of the GPU idle: a longer request gets more splits instead."""

LATENT_DIM, LATENT_VALUE_DIM = 576, 512
"""Channels of keys and of values that the CUDA kernel of latent attention is written for."""

LATENT_HEADS = 16
"""Query heads of one thread block of that kernel."""

LATENT_SPLIT = 16
"""Pages of a thread block of that kernel that are worth another cluster of them while the GPU is not full."""

LARGEST_HEAD_BLOCK = 64
"""Most query heads that one program attends for: their sums of values stay in registers."""


def head_block(group: int) -> int:
    """Query heads of one program of the Triton kernels: 16, 32 or 64."""
    return max(16, min(LARGEST_HEAD_BLOCK, 1 << (group - 1).bit_length()))


def head_blocks(group: int) -> int:
    """Programs that share the query heads of a kv head; 1 for groups of up to 64."""
    return ceil_div(group, head_block(group))


@dataclass(frozen=True)
class AttendPlan:
    """The host's part of the decision; the device uses ``min(splits, ceil(count / pages_per_split))`` of the splits."""

    splits: int
    pages_per_split: int


@functools.lru_cache(maxsize=4096)
def attend_plan(requests: int, heads: int, page_capacity: int, multiprocessors: int, short_share: int = SHORT_SHARE) -> AttendPlan:
    """Splits for a batch, from what the host knows when a graph is captured.

    Args:
        requests: rows of the batch, padded rows included.
        heads: kv heads, times `head_blocks`.
        page_capacity: most pages a request can have (columns of the block table times pages per block).
        multiprocessors: of the GPU.
        short_share: pages that are worth a thread block of their own while the GPU is not full.

    While a few rows can't fill the GPU, they get as many splits as run at once, in one wave. When the rows fill
    it, splits are there for long requests alone, and the total stays small, because idle ones cost a launch each.
    """
    rows = max(requests * heads, 1)
    full = PER_MULTIPROCESSOR * max(multiprocessors, 1)
    if 2 * rows <= full:
        splits, share = min(full // rows, MAXIMUM_SPLITS if rows <= 2 else MAXIMUM_SPLITS // 2), short_share
    else:
        splits, share = max(1, min(8, 8 * full // rows)), LONG_SHARE
    return AttendPlan(max(1, min(splits, ceil_div(page_capacity, share))), share)


@functools.lru_cache(maxsize=4096)
def attend_cluster(requests: int, heads: int, page_capacity: int, multiprocessors: int) -> int:
    """Thread blocks of the cluster that shares a (request, kv head) in the CUDA kernel, a power of two; 1: splits as in `attend_plan` instead.

    A cluster merges through shared memory, without scratch. Arguments as in `attend_plan`.
    """
    rows = max(requests * heads, 1)
    room = max(CLUSTERED_PER_MULTIPROCESSOR * multiprocessors // rows, min(2 * multiprocessors // rows, 2))
    cluster = 1
    while 2 * cluster <= room and cluster < min(MAXIMUM_CLUSTER, page_capacity):
        cluster *= 2
    fills = 2 * rows * cluster > multiprocessors
    return cluster if fills or page_capacity <= cluster * CLUSTER_SHARE else 1


@dataclass(frozen=True)
class LatentPlan:
    """Thread blocks of the CUDA kernel of latent attention: ``cluster`` to a cluster, up to ``clusters`` of them for a (request, kv head, 16 query heads).

    The device uses as many clusters as ``count / (cluster * pages_per_split)``; the launch makes clusters smaller, and unless ``crowded`` fewer, until
    all run at once.
    """

    cluster: int
    clusters: int
    pages_per_split: int
    crowded: bool


@functools.lru_cache(maxsize=4096)
def latent_plan(requests: int, heads: int, page_capacity: int, multiprocessors: int) -> LatentPlan:
    """As `attend_plan`, for the CUDA kernel of latent attention. ``heads``: kv heads, times blocks of `LATENT_HEADS` query heads.

    A cluster merges through shared memory; only what is longer than a usual selection is shared by several clusters, which merge through global memory.
    """
    rows = max(requests * heads, 1)
    if rows > multiprocessors:
        clusters = min(8, 8 * PER_MULTIPROCESSOR * multiprocessors // rows, ceil_div(page_capacity, LONG_SHARE))
        return LatentPlan(1, max(1, clusters), LONG_SHARE, crowded=True)
    cluster = max(1, min(multiprocessors // rows, MAXIMUM_CLUSTER, page_capacity))
    clusters = min(multiprocessors // (rows * cluster), ceil_div(page_capacity, cluster * LATENT_SPLIT))
    return LatentPlan(cluster, max(1, clusters), LATENT_SPLIT, crowded=False)


def latent_tickets(requests: int, heads: int, group: int) -> int:
    """Elements of ``scratch.attend_tickets`` that clusters which share a request need."""
    return requests * heads * ceil_div(group, LATENT_HEADS) * MAXIMUM_CLUSTER


@functools.lru_cache(maxsize=256)
def attend_scratch_sizes(requests: int, heads: int, group: int, value_dim: int, page_capacity: int, multiprocessors: int) -> tuple[int, int]:
    """Elements of ``scratch.attend_partials`` (float32) and ``scratch.attend_tickets`` (int32) for any batch of up to ``requests`` rows."""
    blocks = heads * head_blocks(group)
    most = max(rows * heads * attend_plan(rows, blocks, page_capacity, multiprocessors).splits for rows in range(1, max(requests, 1) + 1))
    tickets = latent_tickets(max(requests, 1), heads, group) if value_dim == LATENT_VALUE_DIM else max(requests, 1) * heads
    return most * group * (value_dim + 2), tickets
