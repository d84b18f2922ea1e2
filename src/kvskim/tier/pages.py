"""Where pages of one layer live when they are in host memory: a host pool of all pages, and a hot cache of some of them on the GPU.

A page holds values, or keys and values. The pool has a place for every physical page, under the block ids of the KV cache; it is the truth. The hot
cache holds copies of (page, kv head) pairs in *slots*; a directory says which slot holds a pair. Every write goes to the pool and to the copy, if
there is one, so at all times::

    directory[page, head] = slot + 1   implies   hot[slot] == host[page, head]   and   owner[slot] = page * kv heads + head

Therefore it never matters for a result whether a page is hot, and nothing must be told when a block changes hands: a new request writes its rows
through the same operations. See docs/how-it-works.md, section "The host tier".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.tier.host_memory import on_device

AGE_CLASSES = 16
"""Classes of slots by the fetches since their last use: class c < 14 holds ages 2^c .. 2^(c+1) - 1, class 14 all older ones, class 15 empty slots."""

TIER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class HostTier:
    """The values of one layer, or its keys and values.

    Attributes:
        host: ``[pages, H, P, 16, D]`` contiguous, by physical page, so that what is fetched at once lies together. With P = 1 parts a page holds
            values, with P = 2 keys, then values. In pinned host memory, or on the device of the others. Rows that were never written are arbitrary.
        hot: ``[slots, P, 16, D]`` contiguous, the dtype of ``host``. Content of empty slots arbitrary.
        directory: int32 ``[pages, H]``: slot + 1 where a copy is hot, 0 where none is. Negative only inside a fetch.
        owner: int32 ``[slots]``: page * H + head, or -1 for an empty slot.
        stamp: int32 ``[slots]``: clock of the last fetch that selected the slot.
        clock: int32 ``[1]``: number of the next fetch; wraps around.
        counters: int64 ``[3]``: selected pages, distinct pages among them that were not hot, and those that were copied. The rest, third from
            second, was read from the host directly, because there was no free slot.

    Raises:
        ValueError: a tensor has another shape, dtype, stride or device than said here; one sentence.
    """

    host: Tensor
    hot: Tensor
    directory: Tensor
    owner: Tensor
    stamp: Tensor
    clock: Tensor
    counters: Tensor

    def __post_init__(self) -> None:
        if self.host.dim() != 5 or self.host.shape[2] not in (1, 2) or self.host.shape[3] != PAGE_TOKENS or self.host.dtype not in TIER_DTYPES:
            raise ValueError(
                f"host is {self.host.dtype} {list(self.host.shape)}; expected bfloat16, float16 or float32 "
                f"[pages, kv heads, 1 or 2, {PAGE_TOKENS}, head dim]"
            )
        pages, heads, parts, _, dim = self.host.shape
        if pages * heads >= 2**31:
            raise ValueError(f"{pages} pages of {heads} kv heads; a tier counts fewer than 2^31 of both together")
        if self.hot.dim() != 4 or self.hot.shape[0] < 1:
            raise ValueError(f"hot has shape {list(self.hot.shape)}; expected [slots, {parts}, {PAGE_TOKENS}, {dim}] with at least one slot")
        slots = self.hot.shape[0]
        for name, tensor, dtype, shape in (
            ("hot", self.hot, self.host.dtype, (slots, parts, PAGE_TOKENS, dim)), ("directory", self.directory, torch.int32, (pages, heads)),
            ("owner", self.owner, torch.int32, (slots,)), ("stamp", self.stamp, torch.int32, (slots,)), ("clock", self.clock, torch.int32, (1,)),
            ("counters", self.counters, torch.int64, (3,)),
        ):
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
            if tensor.device != self.hot.device:
                raise ValueError(f"{name} is on {tensor.device} and hot on {self.hot.device}; all but host must be on one device")
        for name, tensor in vars(self).items():
            if not tensor.is_contiguous():
                raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
        if self.host.device != self.hot.device and not self.host.is_pinned():
            raise ValueError("host is ordinary host memory, which the GPU can't read; it must be pinned")

    @property
    def slots(self) -> int:
        return self.hot.shape[0]

    @property
    def heads(self) -> int:
        return self.host.shape[1]

    @property
    def pages(self) -> int:
        return self.host.shape[0]

    @property
    def dim(self) -> int:
        return self.host.shape[4]

    @property
    def with_keys(self) -> bool:
        """Whether a page holds its keys too."""
        return self.host.shape[2] == 2

    @property
    def device(self) -> torch.device:
        return self.hot.device

    @functools.cached_property
    def key_cache(self) -> Tensor:
        """The keys of ``host`` as a cache ``[pages, 16, H, D]`` of blocks of 16 tokens on the device of the others, which reads them where they are.

        Raises:
            ValueError: the tier has no keys.
        """
        if not self.with_keys:
            raise ValueError("the tier holds values and no keys")
        return self.pool[:, :, 0].transpose(1, 2)

    @functools.cached_property
    def value_cache(self) -> Tensor:
        """The values of ``host``, like `key_cache`."""
        return self.pool[:, :, -1].transpose(1, 2)

    @functools.cached_property
    def pool(self) -> Tensor:
        """``host`` as a tensor of the device of the others, which reads and writes it where it is."""
        return self.host if self.host.device == self.device else on_device(self.host, self.device)


@dataclass(frozen=True)
class HotCache:
    """The part of a `HostTier` whose size does not depend on the number of pages; fields as there."""

    hot: Tensor
    owner: Tensor
    stamp: Tensor
    clock: Tensor
    counters: Tensor


def make_hot_cache(slots: int, parts: int, dim: int, dtype: torch.dtype, device: torch.device | str) -> HotCache:
    """A hot cache of ``slots`` (page, kv head) pairs of so many parts, empty."""
    return HotCache(
        hot=torch.empty(slots, parts, PAGE_TOKENS, dim, dtype=dtype, device=device),
        owner=torch.full((slots,), -1, dtype=torch.int32, device=device),
        stamp=torch.zeros(slots, dtype=torch.int32, device=device),
        clock=torch.ones(1, dtype=torch.int32, device=device),
        counters=torch.zeros(3, dtype=torch.int64, device=device),
    )


def join_tier(host: Tensor, cache: HotCache, directory: Tensor) -> HostTier:
    """A tier over a host pool. The hot cache is emptied, the directory zeroed; counters go on.

    Args:
        host: see `HostTier`.
        cache: of the dtype, parts and head dim of ``host``.
        directory: int32 ``[pages, H]``, content arbitrary.
    """
    directory.zero_()
    cache.owner.fill_(-1)
    return HostTier(host, cache.hot, directory, cache.owner, cache.stamp, cache.clock, cache.counters)


def make_tier(host: Tensor, slots: int, device: torch.device | str) -> HostTier:
    """A tier over a host pool, with an empty hot cache of ``slots`` pairs and a directory on ``device``."""
    pages, heads, parts, _, dim = host.shape
    return join_tier(host, make_hot_cache(slots, parts, dim, host.dtype, device), torch.empty(pages, heads, dtype=torch.int32, device=device))


def slot_bytes(parts: int, dim: int, element_size: int) -> int:
    """GPU memory of one slot: a page of one kv head, its owner and its stamp."""
    return parts * PAGE_TOKENS * dim * element_size + 8


def hot_slots(memory: int, layers: int, parts: int, dim: int, element_size: int) -> int:
    """Slots of each layer that ``memory`` bytes for all layers pay for."""
    return memory // (layers * slot_bytes(parts, dim, element_size))


def host_bytes(blocks: int, block_size: int, layers: int, heads: int, parts: int, dim: int, element_size: int) -> int:
    """Host memory for ``blocks`` KV cache blocks of ``block_size`` tokens, all layers."""
    return blocks * layers * ceil_div(block_size, PAGE_TOKENS) * PAGE_TOKENS * heads * parts * dim * element_size



def check_tier(tier: HostTier, key_cache: Tensor) -> None:
    """That a tier holds the values of this cache ``[blocks, block_size, H, D]``, or that the cache is the keys in the tier."""
    blocks, block_size, heads, dim = key_cache.shape
    expected = (blocks * (block_size // PAGE_TOKENS), heads, 1 + tier.with_keys, PAGE_TOKENS, dim)
    if tuple(tier.host.shape) != expected or tier.host.dtype != key_cache.dtype or key_cache.dtype == torch.float8_e4m3fn:
        raise ValueError(f"the tier holds {tier.host.dtype} {list(tier.host.shape)}; the pages of a {key_cache.dtype} cache like this are {list(expected)}")
    if tier.with_keys and (key_cache.data_ptr() != tier.host.data_ptr() or block_size != PAGE_TOKENS):
        raise ValueError(f"the tier holds keys too, so key_cache must be its own, of blocks of {PAGE_TOKENS} tokens")
    if tier.device != key_cache.device:
        raise ValueError(f"the tier is on {tier.device} and the cache on {key_cache.device}; both must be on one device")
