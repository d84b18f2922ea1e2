"""Three kernels, one after the other, that decide what to fetch, and one that fetches it; see `kvskim.ops.fetch`.

Missing pages are claimed in the directory itself: entry e of the selection lowers a 0 to e - 2^31, and the lowest entry that selects a page wins
whatever the order in which programs run. Entries are numbered by row, kv head and place in the table. A program has consecutive entries, so
that the number of a missing page is what earlier programs found plus its place within its own.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.fetch import SLOT_CHUNK, FetchScratch
from kvskim.ops.triton.attend_parts import live_count
from kvskim.tier.pages import AGE_CLASSES, HostTier

ENTRIES = 128
"""Entries of a page table that a program looks up at once."""

COPIES = 4
"""Programs that copy, for each multiprocessor: enough requests under way to keep the bus to the host busy."""


@triton.jit
def _own_segment(seq_lens, counts, table_capacity, SEGMENTS: tl.constexpr, HEADS: tl.constexpr, ENTRIES: tl.constexpr):
    """What part of which page table this program has: ``(pair, tokens, count, from_table, first, end)``."""
    pair = tl.program_id(0) // SEGMENTS
    tokens, count, from_table = live_count(seq_lens, counts, pair // HEADS, pair, table_capacity)
    share = tl.cdiv(tl.cdiv(count, SEGMENTS), ENTRIES) * ENTRIES
    first = tl.program_id(0) % SEGMENTS * share
    return pair, tokens, count, from_table, first, tl.minimum(first + share, count)


@triton.jit
def _selected(
    block_table, pages, pair, index, tokens, from_table, end, table_stride, table_capacity, page_capacity, HEADS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
):
    """Page * H + head of entries ``index`` of a page table, whether there is such an entry, and what it claims a missing page with."""
    page = tl.load(pages + pair.to(tl.int64) * table_capacity + index, mask=index < from_table, other=0)
    page = tl.where(index < from_table, page, index)
    live = (index < end) & (page >= 0) & (page < (tokens + 15) // 16)
    block = tl.load(block_table + (pair // HEADS).to(tl.int64) * table_stride + page // PAGES_PER_BLOCK, mask=live, other=0).to(tl.int64)
    key = (block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK) * HEADS + pair % HEADS
    return key, live, pair * page_capacity + index + (-2147483648)


@triton.jit
def _age_class(owner, stamp, clock, slot, in_range, AGE_CLASSES: tl.constexpr):
    """As `kvskim.tier.torch_pages.age_classes`; -1 where the slot is in use or out of range."""
    age = clock - tl.load(stamp + slot, mask=in_range, other=0)
    result = tl.zeros_like(age)
    for power in tl.static_range(1, AGE_CLASSES - 1):
        result += (age >= (1 << power)).to(tl.int32)
    result = tl.where(age < 0, AGE_CLASSES - 2, result)
    result = tl.where(age == 0, -1, result)
    result = tl.where(tl.load(owner + slot, mask=in_range, other=0) < 0, AGE_CLASSES - 1, result)
    return tl.where(in_range, result, -1)


@triton.jit
def _total(numbers, count, BLOCK: tl.constexpr):
    """Sum of the first ``count`` of an array."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(numbers + i, mask=i < count, other=0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["table_stride", "table_capacity", "page_capacity"])
def _mark_kernel(
    directory, stamp, clock, block_table, seq_lens, pages, counts, table_stride, table_capacity, page_capacity,
    HEADS: tl.constexpr, SEGMENTS: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):
    """Stamp the slots in use; claim the pages that are missing."""
    pair, tokens, _count, from_table, first, end = _own_segment(seq_lens, counts, table_capacity, SEGMENTS, HEADS, ENTRIES)
    now = tl.load(clock)
    for start in range(first, end, ENTRIES):
        key, live, claim = _selected(
            block_table, pages, pair, start + tl.arange(0, ENTRIES), tokens, from_table, end, table_stride, table_capacity, page_capacity,
            HEADS, PAGES_PER_BLOCK,
        )
        # A place that is positive is so for the whole kernel: only zeros are claimed.
        place = tl.load(directory + key, mask=live, other=0)
        tl.store(stamp + place - 1, tl.zeros_like(place) + now, mask=live & (place > 0))
        tl.atomic_min(directory + key, claim, mask=live & (place <= 0), sem="relaxed")


@triton.jit(do_not_specialize=["slots", "programs", "table_stride", "table_capacity", "page_capacity"])
def _count_kernel(
    directory, owner, stamp, clock, selected, misses, ages, block_table, seq_lens, pages, counts, slots, programs, table_stride, table_capacity,
    page_capacity, HEADS: tl.constexpr, SEGMENTS: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, ENTRIES: tl.constexpr, SLOT_CHUNK: tl.constexpr,
    AGE_CLASSES: tl.constexpr,
):
    """The first programs count the selected pages and the claims that won, the others the victims of each class in a chunk of slots."""
    if tl.program_id(0) < programs:
        pair, tokens, _count, from_table, first, end = _own_segment(seq_lens, counts, table_capacity, SEGMENTS, HEADS, ENTRIES)
        all_live = tl.zeros([ENTRIES], tl.int32)
        won = tl.zeros([ENTRIES], tl.int32)
        for start in range(first, end, ENTRIES):
            key, live, claim = _selected(
                block_table, pages, pair, start + tl.arange(0, ENTRIES), tokens, from_table, end, table_stride, table_capacity, page_capacity,
                HEADS, PAGES_PER_BLOCK,
            )
            place = tl.load(directory + key, mask=live, other=0)
            all_live += live.to(tl.int32)
            won += (live & (place == claim)).to(tl.int32)
        tl.store(selected + tl.program_id(0), tl.sum(all_live, 0))
        tl.store(misses + tl.program_id(0), tl.sum(won, 0))
    else:
        chunk = tl.program_id(0) - programs
        slot = chunk * SLOT_CHUNK + tl.arange(0, SLOT_CHUNK)
        age = _age_class(owner, stamp, tl.load(clock), slot, slot < slots, AGE_CLASSES)
        c = tl.arange(0, AGE_CLASSES)
        tl.store(ages + chunk * AGE_CLASSES + c, tl.sum((age[:, None] == c[None, :]).to(tl.int32), 0))


# What differs between a fetch with copies and one without is no constant of compilation: a captured step can't load a kernel that no step ran before.
@triton.jit(do_not_specialize=["slots", "programs", "chunks", "table_stride", "table_capacity", "page_capacity", "copies_follow"])
def _assign_kernel(
    directory, owner, stamp, clock, counters, selected, misses, ages, missing, victims, fetched_pages, block_table, seq_lens, pages, counts, slots,
    programs, chunks, table_stride, table_capacity, page_capacity, copies_follow, HEADS: tl.constexpr, SEGMENTS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr, ENTRIES: tl.constexpr, SLOT_CHUNK: tl.constexpr, AGE_CLASSES: tl.constexpr, SUMMED: tl.constexpr,
):
    """The first programs list the pages to copy and take back the claims of the rest, the others list the victims and make them homeless."""
    total = _total(misses, programs, SUMMED)
    fetched = tl.minimum(total, _total(ages, chunks * AGE_CLASSES, SUMMED))
    if tl.program_id(0) == 0:
        tl.store(fetched_pages, fetched)
        tl.store(counters, tl.load(counters) + _total(selected, programs, SUMMED))
        tl.store(counters + 1, tl.load(counters + 1) + total)
        tl.store(counters + 2, tl.load(counters + 2) + fetched)
    if total == 0:
        return
    if tl.program_id(0) < programs:
        pair, tokens, _count, from_table, first, end = _own_segment(seq_lens, counts, table_capacity, SEGMENTS, HEADS, ENTRIES)
        found = _total(misses, tl.program_id(0), SUMMED)
        for start in range(first, end, ENTRIES):
            key, live, claim = _selected(
                block_table, pages, pair, start + tl.arange(0, ENTRIES), tokens, from_table, end, table_stride, table_capacity, page_capacity,
                HEADS, PAGES_PER_BLOCK,
            )
            won = live & (tl.load(directory + key, mask=live, other=0) == claim)
            order = found + tl.cumsum(won.to(tl.int32), 0) - 1
            tl.store(missing + order, key.to(tl.int32), mask=won & (order < fetched))
            # A claim that the next kernel makes good stays.
            tl.store(directory + key, tl.zeros_like(order), mask=won & (order >= fetched * copies_follow))
            found += tl.sum(won.to(tl.int32), 0)
    else:
        chunk = tl.program_id(0) - programs
        slot = chunk * SLOT_CHUNK + tl.arange(0, SLOT_CHUNK)
        now = tl.load(clock)
        age = _age_class(owner, stamp, now, slot, slot < slots, AGE_CLASSES)
        c = tl.arange(0, AGE_CLASSES)
        everywhere = tl.zeros([AGE_CLASSES], tl.int32)
        earlier = tl.zeros([AGE_CLASSES], tl.int32)
        for start in range(0, chunks, 64):
            i = start + tl.arange(0, 64)[:, None]
            counted = tl.load(ages + i * AGE_CLASSES + c[None, :], mask=i < chunks, other=0)
            everywhere += tl.sum(counted, 0)
            earlier += tl.sum(tl.where(i < chunk, counted, 0), 0)
        older = tl.sum(everywhere, 0) - tl.cumsum(everywhere, 0)
        member = (age[:, None] == c[None, :]).to(tl.int32)
        order = tl.sum(member * ((older + earlier)[None, :] + tl.cumsum(member, 0) - 1), 1)
        victim = (age >= 0) & (order < fetched)
        tl.store(victims + order, slot, mask=victim)
        former = tl.load(owner + slot, mask=victim, other=-1)
        tl.store(directory + former, tl.zeros_like(former), mask=former >= 0)
        tl.store(owner + slot, tl.zeros_like(slot) - 1, mask=victim)
        tl.store(stamp + slot, tl.zeros_like(slot) + now, mask=victim)


@triton.jit(do_not_specialize=["ticks", "copies"])
def _copy_kernel(
    host, hot, directory, owner, clock, missing, victims, fetched_pages, ticks, copies, PAGE_ELEMENTS: tl.constexpr, PADDED: tl.constexpr,
):
    """A page of one kv head at a time, and its entry in the directory, unless ``copies`` is 0. The first program moves the clock on by ``ticks``."""
    if tl.program_id(0) == 0:
        tl.store(clock, tl.load(clock) + ticks)
    i = tl.arange(0, PADDED)
    for order in range(tl.program_id(0), tl.load(fetched_pages) * copies, tl.num_programs(0)):
        key = tl.load(missing + order)
        slot = tl.load(victims + order)
        rows = tl.load(host + key.to(tl.int64) * PAGE_ELEMENTS + i, mask=i < PAGE_ELEMENTS, other=0)
        tl.store(hot + slot.to(tl.int64) * PAGE_ELEMENTS + i, rows, mask=i < PAGE_ELEMENTS)
        tl.store(owner + slot, key)
        tl.store(directory + key, slot + 1)


def fetch_triton(
    tier: HostTier, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, block_size: int, scratch: FetchScratch, share: int,
    multiprocessors: int, copies: bool,
) -> None:
    """Arguments as checked by `kvskim.ops.fetch.fetch`; share: programs for each page table."""
    programs, chunks = counts.numel() * share, ceil_div(tier.slots, SLOT_CHUNK)
    per_block = block_size // PAGE_TOKENS
    selection = (block_table, seq_lens, pages, counts)
    sizes = (block_table.stride(0), pages.shape[2], block_table.shape[1] * per_block)
    common: dict[str, Any] = dict(HEADS=tier.heads, SEGMENTS=share, PAGES_PER_BLOCK=per_block, ENTRIES=ENTRIES, num_warps=4)
    _mark_kernel[(programs,)](tier.directory, tier.stamp, tier.clock, *selection, *sizes, **common)
    _count_kernel[(programs + chunks,)](
        tier.directory, tier.owner, tier.stamp, tier.clock, scratch.selected, scratch.misses, scratch.ages, *selection, tier.slots, programs, *sizes,
        SLOT_CHUNK=SLOT_CHUNK, AGE_CLASSES=AGE_CLASSES, **common,
    )
    _assign_kernel[(programs + chunks,)](
        tier.directory, tier.owner, tier.stamp, tier.clock, tier.counters, scratch.selected, scratch.misses, scratch.ages, scratch.missing,
        scratch.victims, scratch.fetched_pages, *selection, tier.slots, programs, chunks, *sizes, int(copies),
        SLOT_CHUNK=SLOT_CHUNK, AGE_CLASSES=AGE_CLASSES, SUMMED=1024, **common,
    )
    copy_triton(tier, scratch, multiprocessors, ticks=1, copies=copies)


def copy_triton(tier: HostTier, scratch: FetchScratch, multiprocessors: int, *, ticks: int = 0, copies: bool = True) -> None:
    """Arguments as checked by `kvskim.ops.fetch.copy_fetched`; ticks: 1 to move the clock on; copies: False for nothing but that."""
    elements = tier.hot.stride(0)
    _copy_kernel[(min(COPIES * multiprocessors, tier.slots) if copies else 1,)](
        tier.host, tier.hot, tier.directory, tier.owner, tier.clock, scratch.missing, scratch.victims, scratch.fetched_pages, ticks, int(copies),
        PAGE_ELEMENTS=elements, PADDED=triton.next_power_of_2(elements), num_warps=4,
    )
