"""Values, or keys and values, in host memory: residency never changes a result, nothing is lost, nothing leaks.

Torch, and the kernels under Triton's interpreter.
"""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kvskim.ops import attend as attend_module
from kvskim.ops.attend import attend, required_partials
from kvskim.ops.attend_tiered import attend_tiered
from kvskim.ops.fetch import FetchScratch, copy_fetched, fetch, fetch_scratch, segments
from kvskim.ops.store import store
from kvskim.tier.pages import HostTier, host_bytes, hot_slots, make_tier, slot_bytes
from kvskim.tier.torch_pages import age_classes, selected_keys
from tier_data import JUNK, Sizes, Step, Worker, attend_scratch, check_coherent, poisoned_tier

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")
IMPLEMENTATIONS = ["torch", pytest.param("triton", marks=needs_triton)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def poisoned_scratch(pairs: int, slots: int) -> FetchScratch:
    scratch = fetch_scratch(pairs, slots, "cpu")
    for f in fields(scratch):
        getattr(scratch, f.name).fill_(JUNK)
    return scratch


def run_step(tier: HostTier, step: Step, sizes: Sizes, scratch: FetchScratch, kernels: str) -> None:
    store(tier, step.values, step.slot_mapping, keys=step.keys if tier.with_keys else None, kernels=kernels)
    fetch(tier, step.block_table, step.seq_lens, step.pages, step.counts, block_size=sizes.block_size, scratch=scratch, kernels=kernels)


def attended(worker: Worker, step: Step, tier: HostTier | None, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse with all in GPU memory (no tier) or with a tier, from poisoned buffers."""
    out = torch.full_like(step.query, math.nan)
    lse = torch.full(step.query.shape[:2], math.nan)
    scratch = attend_scratch(required_partials(step.query, worker.keys, worker.values, step.block_table))
    common: dict[str, Any] = dict(scale=0.3, softcap=20.0, out=out, lse=lse, scratch=scratch, kernels=kernels)
    rest = (step.block_table, step.seq_lens, step.pages, step.counts)
    if tier is None:
        attend(step.query, worker.keys, worker.values, *rest, **common)
    else:
        attend_tiered(step.query, tier.key_cache if tier.with_keys else worker.keys, tier, *rest, **common)
    return out, lse


OF_KEYS = dict(block_size=16, blocks=18)
"""A tier that holds keys is a cache of blocks of 16 tokens."""

CASES = [
    (1, dict()),
    (3, dict(block_size=16, blocks=18, heads=1, group=4)),
    (7, dict(dtype=torch.bfloat16, dim=24)),
    (14, dict(block_size=64, blocks=8, longest=180, dtype=torch.float16)),
    (300, dict()),
]


@pytest.mark.parametrize(("slots", "options"), CASES)
@pytest.mark.parametrize("parts", [1, 2])
def test_residency_never_changes_a_bit(slots: int, options: dict[str, Any], parts: int) -> None:
    """Through block reuse, shared prefixes, aborts and a hot cache of one page, what is attended is what pages on the GPU give."""
    sizes = Sizes(**{**options, **(OF_KEYS if parts == 2 else {})})
    worker = live_through(sizes, slots, 200, "torch", parts)
    assert worker.reused > 20
    assert worker.shared > 5


@needs_triton
@pytest.mark.parametrize(("slots", "options", "parts"), [(*CASES[1], 1), (*CASES[2], 1), (*CASES[1], 2), (7, dict(dim=24, **OF_KEYS), 2)])
def test_residency_never_changes_a_bit_in_the_kernels(slots: int, options: dict[str, Any], parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_module, "multiprocessor_count", lambda device: 8 if slots == 3 else 1)
    live_through(Sizes(**options), slots, 5, "triton", parts)


def live_through(sizes: Sizes, slots: int, steps: int, kernels: str, parts: int) -> Worker:
    """Compare all steps of a worker's life, in bits, with pages in GPU memory."""
    worker, tier = Worker(sizes, seed=slots), poisoned_tier(sizes, slots, parts)
    scratch = poisoned_scratch(sizes.rows * sizes.heads, slots)
    live = 0
    for step in worker.steps(steps):
        run_step(tier, step, sizes, scratch, kernels)
        check_coherent(tier, *(worker.keys, worker.values)[2 - parts :])
        expected, got = attended(worker, step, None, kernels), attended(worker, step, tier, kernels)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        assert not torch.isnan(got[0]).any()
        live += int((step.seq_lens > 0).sum())
    assert live > steps
    selected, missing, fetched = tier.counters.tolist()
    assert selected > missing > 0
    assert (fetched < missing) == (slots < 30), "some pages of each small hot cache must have been read from the host directly"
    return worker


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_hot_pages_are_not_read_from_the_host(kernels: str, parts: int) -> None:
    sizes = Sizes(**(OF_KEYS if parts == 2 else {}))
    worker, tier, scratch = Worker(sizes, seed=3), poisoned_tier(sizes, 200, parts), poisoned_scratch(8, 200)
    for step in worker.steps(2):
        run_step(tier, step, sizes, scratch, "torch")
    expected = attended(worker, step, None, kernels)[0]
    tier.host.fill_(math.nan)
    assert torch.equal(attended(worker, step, tier, kernels)[0], expected)
    assert expected.any()


@needs_triton
@pytest.mark.parametrize(("slots", "multiprocessors", "parts"), [(1, 1, 1), (5, 24, 2), (33, 24, 1)])
def test_kernels_decide_as_the_definition_does(slots: int, multiprocessors: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of the tier, after every step, however many programs share the work."""
    monkeypatch.setattr(attend_module, "multiprocessor_count", lambda device: multiprocessors)
    monkeypatch.setattr("kvskim.ops.triton.host_fetch.ENTRIES", 2)
    monkeypatch.setattr("kvskim.ops.triton.host_fetch.SLOT_CHUNK", 16)
    sizes = Sizes(requests=3, rows=3)
    worker, expected, got = Worker(sizes, seed=multiprocessors), poisoned_tier(sizes, slots, parts), poisoned_tier(sizes, slots, parts)
    scratch = replace(poisoned_scratch(sizes.rows * sizes.heads, slots), ages=torch.full((64 * 16,), JUNK, dtype=torch.int32))
    for step in worker.steps(4):
        run_step(expected, step, sizes, scratch, "torch")
        run_step(got, step, sizes, scratch, "triton")
        for f in fields(HostTier):
            torch.testing.assert_close(getattr(got, f.name), getattr(expected, f.name), rtol=0, atol=0, equal_nan=True, msg=f.name)
    assert (segments(sizes.rows * sizes.heads, multiprocessors) > 1) == (multiprocessors > 1)
    assert int(got.counters[1]) > 0


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_copies_may_come_after_attention(kernels: str, parts: int) -> None:
    """Between a fetch and its copies the tier is true, and attention has the same bits; then every tensor is that of copies made at once."""
    sizes = Sizes(**(OF_KEYS if parts == 2 else {}))
    worker, at_once, later = Worker(sizes, seed=8), poisoned_tier(sizes, 9, parts), poisoned_tier(sizes, 9, parts)
    scratch = poisoned_scratch(sizes.rows * sizes.heads, 9)
    left = 0
    for step in worker.steps(20 if kernels == "torch" else 4):
        run_step(at_once, step, sizes, scratch, kernels)
        store(later, step.values, step.slot_mapping, keys=step.keys if parts == 2 else None, kernels=kernels)
        rest = (step.block_table, step.seq_lens, step.pages, step.counts)
        fetch(later, *rest, block_size=sizes.block_size, scratch=scratch, kernels=kernels, copies=False)
        check_coherent(later, *(worker.keys, worker.values)[2 - parts :])
        assert torch.equal(later.clock, at_once.clock)
        left += int(scratch.fetched_pages)
        before = [attended(worker, step, tier, kernels) for tier in (at_once, later)]
        copy_fetched(later, scratch, kernels=kernels)
        for out, lse in (before[1], attended(worker, step, later, kernels)):
            assert torch.equal(out, before[0][0])
            assert torch.equal(lse, before[0][1])
        for f in fields(HostTier):
            torch.testing.assert_close(getattr(later, f.name), getattr(at_once, f.name), rtol=0, atol=0, equal_nan=True, msg=f.name)
    assert left == int(later.counters[2]) > 0


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_a_fetch_that_misses_nothing_leaves_no_copies(kernels: str) -> None:
    sizes = Sizes(heads=1, blocks=10)
    tier, scratch = poisoned_tier(sizes, 8), poisoned_scratch(1, 8)
    step = small_step(sizes, [[5, 2]], [64], [[0, 1, 3]])
    for expected in (3, 0):
        fetch(tier, *step, block_size=32, scratch=scratch, kernels=kernels, copies=False)
        assert int(scratch.fetched_pages) == expected
        copy_fetched(tier, scratch, kernels=kernels)
    scratch.fetched_pages.fill_(JUNK)
    fetch(tier, *(t[:0] for t in step), block_size=32, scratch=scratch, kernels=kernels, copies=False)
    assert int(scratch.fetched_pages) == 0
    assert tier.counters.tolist() == [6, 3, 3]


def test_wrong_arguments_of_copies_are_refused() -> None:
    tier = poisoned_tier(Sizes(), 4)
    with pytest.raises(ValueError, match="kernels is 'numpy'"):
        copy_fetched(tier, poisoned_scratch(2, 4), kernels="numpy")
    with pytest.raises(ValueError, match=r"scratch\.missing"):
        copy_fetched(tier, poisoned_scratch(2, 3), kernels="torch")
    step = small_step(Sizes(), [[1]], [20], [[0]])
    with pytest.raises(ValueError, match="scratch buffers"):
        fetch(tier, *step, block_size=32, scratch=None, kernels="torch", copies=False)


def small_step(sizes: Sizes, blocks: list[list[int]], lengths: list[int], chosen: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """block_table, seq_lens, pages and counts of rows with the same selection for each head; an empty one means all pages."""
    table = torch.full((len(blocks), sizes.columns), 2**30, dtype=torch.int32)
    pages = torch.full((len(blocks), sizes.heads, 8), JUNK, dtype=torch.int32)
    counts = torch.zeros(len(blocks), sizes.heads, dtype=torch.int32)
    for r, row in enumerate(blocks):
        table[r, : len(row)] = torch.tensor(row, dtype=torch.int32)
        pages[r, :, : len(chosen[r])] = torch.tensor(chosen[r], dtype=torch.int32)
        counts[r] = len(chosen[r]) or -(-lengths[r] // 16)
    return table, torch.tensor(lengths, dtype=torch.int32), pages, counts


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_a_page_of_several_rows_is_fetched_once_and_then_hit(kernels: str) -> None:
    sizes = Sizes(heads=1, blocks=10)
    tier, scratch = poisoned_tier(sizes, 8), poisoned_scratch(3, 8)
    step = small_step(sizes, [[5, 2], [5, 9], [5, 2]], [64, 64, 64], [[0, 1, 3], [0, 1], [1, 3]])
    fetch(tier, *step, block_size=32, scratch=scratch, kernels=kernels)
    assert tier.counters.tolist() == [7, 3, 3]  # pages 10, 11 and 5
    assert torch.nonzero(tier.directory[:, 0]).view(-1).tolist() == [5, 10, 11]
    assert tier.owner[:4].tolist() == [10, 11, 5, -1]  # by first row and place
    fetch(tier, *step, block_size=32, scratch=scratch, kernels=kernels)
    assert tier.counters.tolist() == [14, 3, 3]
    assert int(tier.clock) == 3


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_pages_in_use_stay_and_the_oldest_go_first(kernels: str) -> None:
    sizes = Sizes(heads=1, block_size=16, blocks=10)
    tier, scratch = poisoned_tier(sizes, 3), poisoned_scratch(1, 3)

    def use(*pages: int) -> list[int]:
        fetch(tier, *small_step(sizes, [list(pages)], [16 * len(pages)], [[]]), block_size=16, scratch=scratch, kernels=kernels)
        return tier.owner.tolist()

    assert use(4) == [4, -1, -1]
    assert use(7, 8) == [4, 7, 8]  # empty slots before used ones
    assert use(8) == [4, 7, 8]
    assert use(8, 9) == [9, 7, 8]  # 4 and 7, of ages 3 and 2, are of one class
    assert use(8, 1, 2) == [2, 1, 8]  # the older one first
    assert use(1, 2, 8, 5, 6) == [2, 1, 8]  # no room: 5 and 6 are read from the host
    assert torch.nonzero(tier.directory[:, 0]).view(-1).tolist() == [1, 2, 8]
    assert tier.counters.tolist() == [14, 8, 6]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_a_clock_that_wraps_around_keeps_the_order(kernels: str) -> None:
    sizes = Sizes(heads=1, block_size=16, blocks=10)
    tier, scratch = poisoned_tier(sizes, 4), poisoned_scratch(1, 4)
    top = 2**31 - 1
    tier.clock.fill_(top)
    tier.owner.copy_(torch.tensor([1, 2, 3, 4]))
    tier.directory.view(-1)[[1, 2, 3, 4]] = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    tier.stamp.copy_(torch.tensor([top - 1, top - 40, -top, top - 3]))
    assert age_classes(tier).tolist() == [0, 5, 14, 1]
    fetch(tier, *small_step(sizes, [[2]], [16], [[]]), block_size=16, scratch=scratch, kernels=kernels)
    assert int(tier.clock) == -(2**31)
    assert int(tier.stamp[1]) == top
    fetch(tier, *small_step(sizes, [[9]], [16], [[]]), block_size=16, scratch=scratch, kernels=kernels)
    assert tier.owner.tolist() == [1, 2, 9, 4]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_padded_rows_and_slots_are_inert(kernels: str) -> None:
    sizes = Sizes()
    tier, scratch = poisoned_tier(sizes, 4), poisoned_scratch(4, 4)
    before = [getattr(tier, f.name).clone() for f in fields(tier)]
    step = small_step(sizes, [[0], [0]], [0, 0], [[0], [0]])
    fetch(tier, *step, block_size=32, scratch=scratch, kernels=kernels)
    store(tier, torch.zeros(3, 2, 16), torch.tensor([-1, -1, sizes.pages * 16]), kernels=kernels)
    for f, old in zip(fields(tier), before):
        if f.name != "clock":
            torch.testing.assert_close(getattr(tier, f.name), old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_a_page_beyond_the_request_is_not_fetched(kernels: str) -> None:
    sizes = Sizes()
    tier, scratch = poisoned_tier(sizes, 4), poisoned_scratch(2, 4)
    step = small_step(sizes, [[3, 6]], [40], [[0, 3]])  # pages 0 to 2 exist
    fetch(tier, *step, block_size=32, scratch=scratch, kernels=kernels)
    assert tier.counters.tolist() == [2, 2, 2]
    assert tier.owner.tolist() == [12, 13, -1, -1]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_store_takes_rows_with_any_strides(kernels: str) -> None:
    sizes = Sizes()
    tier = poisoned_tier(sizes, 2)
    fused = torch.randn(5, 3, sizes.heads, sizes.dim)
    tier.directory[4, 1] = 2
    tier.owner[1] = 9
    store(tier, fused[:, 2], torch.tensor([64, 79, -1, 5]), kernels=kernels)
    assert torch.equal(tier.host[4, :, 0, 0], fused[0, 2])
    assert torch.equal(tier.host[4, :, 0, 15], fused[1, 2])
    assert torch.equal(tier.host[0, :, 0, 5], fused[3, 2])
    assert torch.equal(tier.hot[1, 0, [0, 15]], fused[:2, 2, 1])
    assert int(tier.host.isnan().sum()) == tier.host.numel() - 3 * fused[0, 0].numel()
    assert int(tier.hot.isnan().sum()) == tier.hot.numel() - 2 * sizes.dim


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_store_puts_keys_ahead_of_values(kernels: str) -> None:
    sizes = Sizes()
    tier = poisoned_tier(sizes, 2, parts=2)
    fused = torch.randn(4, 3, sizes.heads, sizes.dim)
    tier.directory[4, 1], tier.owner[1] = 2, 9
    store(tier, fused[:, 2], torch.tensor([64, 79, -1, 5]), keys=fused[:, 1], kernels=kernels)
    for part in (0, 1):
        for token, (page, offset) in ((0, (4, 0)), (1, (4, 15)), (3, (0, 5))):
            assert torch.equal(tier.host[page, :, part, offset], fused[token, 1 + part])
        assert torch.equal(tier.hot[1, part, [0, 15]], fused[:2, 1 + part, 1])
    assert int(tier.host.isnan().sum()) == tier.host.numel() - 6 * fused[0, 0].numel()
    assert int(tier.hot.isnan().sum()) == tier.hot.numel() - 4 * sizes.dim


def test_keys_of_a_tier_are_a_cache_of_blocks_of_one_page() -> None:
    sizes = Sizes()
    tier = poisoned_tier(sizes, 2, parts=2)
    rows = torch.randn(1, sizes.heads, sizes.dim)
    store(tier, -rows, torch.tensor([70]), keys=rows, kernels="torch")
    assert tier.key_cache.shape == (sizes.pages, 16, sizes.heads, sizes.dim)
    assert torch.equal(tier.key_cache[4, 6], rows[0])
    assert tier.key_cache.data_ptr() == tier.host.data_ptr()
    with pytest.raises(ValueError, match="no keys"):
        _ = poisoned_tier(sizes, 2).key_cache


def test_selected_keys_are_in_the_order_of_the_page_tables() -> None:
    sizes = Sizes()
    step = small_step(sizes, [[5, 2], [1]], [40, 20], [[0, 2], []])
    assert selected_keys(poisoned_tier(sizes, 1), *step, 32).tolist() == [20, 8, 21, 9, 4, 6, 5, 7]


def test_bytes_of_the_tier() -> None:
    assert slot_bytes(1, 128, 2) == 4104
    assert slot_bytes(2, 128, 2) == 8200
    assert hot_slots(2**30, 32, 1, 128, 2) == 2**30 // (32 * 4104)
    for parts in (1, 2):
        assert host_bytes(10, 64, 32, 8, parts, 128, 2) == 10 * 64 * 32 * 8 * parts * 128 * 2
        tier = poisoned_tier(Sizes(dim=128, dtype=torch.bfloat16), 3, parts)
        per_slot = tier.hot.nbytes + tier.owner.nbytes + tier.stamp.nbytes
        assert per_slot == 3 * slot_bytes(parts, 128, 2)


def fetch_arguments(**changes: Any) -> dict[str, Any]:
    sizes = Sizes()
    names = ("block_table", "seq_lens", "pages", "counts")
    step = dict(zip(names, small_step(sizes, [[1]], [20], [[0]])))
    return dict(tier=poisoned_tier(sizes, 2), **step, block_size=32, scratch=poisoned_scratch(2, 2), kernels="triton") | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kernels="numpy"), "kernels is 'numpy'"),
        (dict(scratch=None), "scratch buffers"),
        (dict(block_size=24), "block_size is 24"),
        (dict(counts=torch.zeros(1, 2)), "counts is"),
        (dict(counts=torch.zeros(1, 3, dtype=torch.int32)), "counts is"),
        (dict(pages=torch.zeros(1, 2, 8, dtype=torch.int64)), "pages is"),
        (dict(seq_lens=torch.zeros(2, dtype=torch.int32)), "block_table is"),
        (dict(block_table=torch.zeros(1, 2**27, dtype=torch.int32).expand(1, 2**27), block_size=256), "2\\^31"),
        (dict(scratch=replace(poisoned_scratch(2, 2), missing=torch.zeros(1, dtype=torch.int32))), "scratch.missing"),
    ],
)
def test_wrong_arguments_of_fetch_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fetch(**fetch_arguments(**changes))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("host", torch.zeros(4, 2, 1, 8, 16), "host is"),
        ("host", torch.zeros(4, 2, 3, 16, 16), "host is"),
        ("host", torch.zeros(4, 2, 1, 16, 16, dtype=torch.float64), "host is"),
        ("host", torch.zeros(5, 2, 1, 16, 16), "directory is"),
        ("host", torch.zeros(4, 2, 2, 16, 16), "hot is"),
        ("hot", torch.zeros(0, 1, 16, 16), "at least one slot"),
        ("hot", torch.zeros(3, 1, 16, 16, dtype=torch.float16), "hot is"),
        ("owner", torch.zeros(4, dtype=torch.int32), "owner is"),
        ("stamp", torch.zeros(6, dtype=torch.int32)[::2], "contiguous"),
        ("counters", torch.zeros(3), "counters is"),
    ],
)
def test_a_tier_of_wrong_tensors_is_refused(name: str, value: torch.Tensor, message: str) -> None:
    tier = make_tier(torch.zeros(4, 2, 1, 16, 16), 3, "cpu")
    with pytest.raises(ValueError, match=message):
        replace(tier, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(values=torch.zeros(1, 2, 16)), "values are"),
        (dict(values=torch.zeros(2, 2, 16, dtype=torch.bfloat16)), "values are"),
        (dict(values=torch.zeros(2, 2, 32)[..., ::2]), "contiguous"),
        (dict(slot_mapping=torch.zeros(2, dtype=torch.int32)), "slot_mapping must"),
        (dict(keys=torch.zeros(2, 2, 16)), "leave keys out"),
        (dict(parts=2), "pass both"),
        (dict(parts=2, keys=torch.zeros(2, 3, 16)), "keys are"),
        (dict(parts=2, keys=torch.zeros(2, 2, 32)[..., ::2]), "last dimension of keys"),
        (dict(kernels="numpy"), "kernels is"),
    ],
)
def test_wrong_arguments_of_store_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = dict(values=torch.zeros(2, 2, 16), slot_mapping=torch.zeros(2, dtype=torch.int64), kernels="torch") | changes
    tier = poisoned_tier(Sizes(), 2, arguments.pop("parts", 1))
    with pytest.raises(ValueError, match=message):
        store(tier, **arguments)  # type: ignore[arg-type]


def test_a_tier_of_another_cache_is_refused() -> None:
    worker = Worker(Sizes(), seed=0)
    step = next(worker.steps(1))
    with pytest.raises(ValueError, match="the tier holds"):
        attended(worker, step, poisoned_tier(Sizes(blocks=8), 2), "torch")
    with pytest.raises(ValueError, match="the tier holds"):
        attended(worker, step, poisoned_tier(Sizes(dtype=torch.float16), 2), "torch")
    of_keys = poisoned_tier(Sizes(**OF_KEYS), 2, parts=2)
    foreign = replace(of_keys, host=of_keys.host.clone())
    out = torch.empty_like(step.query)
    rest = (step.block_table, step.seq_lens, step.pages, step.counts)
    with pytest.raises(ValueError, match="must be its own"):
        attend_tiered(step.query, of_keys.key_cache, foreign, *rest, scale=0.3, out=out, scratch=None, kernels="torch")
