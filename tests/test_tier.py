"""Values in host memory: residency never changes a result, nothing is lost, nothing leaks. Torch, and the kernels under Triton's interpreter."""

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
from kvskim.ops.fetch import FetchScratch, fetch, fetch_scratch, segments
from kvskim.ops.store import store
from kvskim.tier.torch_values import age_classes, selected_keys
from kvskim.tier.values import ValueTier, host_bytes, hot_slots, make_tier, slot_bytes
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


def run_step(tier: ValueTier, step: Step, sizes: Sizes, scratch: FetchScratch, kernels: str) -> None:
    store(tier, step.values, step.slot_mapping, kernels=kernels)
    fetch(tier, step.block_table, step.seq_lens, step.pages, step.counts, block_size=sizes.block_size, scratch=scratch, kernels=kernels)


def attended(worker: Worker, step: Step, tier: ValueTier | None, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse with values in GPU memory (no tier) or in a tier, from poisoned buffers."""
    out = torch.full_like(step.query, math.nan)
    lse = torch.full(step.query.shape[:2], math.nan)
    scratch = attend_scratch(required_partials(step.query, worker.keys, worker.values, step.block_table))
    common: dict[str, Any] = dict(scale=0.3, softcap=20.0, out=out, lse=lse, scratch=scratch, kernels=kernels)
    rest = (step.block_table, step.seq_lens, step.pages, step.counts)
    if tier is None:
        attend(step.query, worker.keys, worker.values, *rest, **common)
    else:
        attend_tiered(step.query, worker.keys, tier, *rest, **common)
    return out, lse


CASES = [
    (1, dict()),
    (3, dict(block_size=16, blocks=18, heads=1, group=4)),
    (7, dict(dtype=torch.bfloat16, dim=24)),
    (14, dict(block_size=64, blocks=8, longest=180, dtype=torch.float16)),
    (300, dict()),
]


@pytest.mark.parametrize(("slots", "options"), CASES)
def test_residency_never_changes_a_bit(slots: int, options: dict[str, Any]) -> None:
    """Through block reuse, shared prefixes, aborts and a hot cache of one page, what is attended is what values on the GPU give."""
    sizes = Sizes(**options)
    worker = live_through(sizes, slots, 200, "torch")
    assert worker.reused > 20
    assert worker.shared > 5


@needs_triton
@pytest.mark.parametrize(("slots", "options"), CASES[1:3])
def test_residency_never_changes_a_bit_in_the_kernels(slots: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_module, "multiprocessor_count", lambda device: 8 if slots == 3 else 1)
    live_through(Sizes(**options), slots, 5, "triton")


def live_through(sizes: Sizes, slots: int, steps: int, kernels: str) -> Worker:
    """Compare all steps of a worker's life, in bits, with values in GPU memory."""
    worker, tier = Worker(sizes, seed=slots), poisoned_tier(sizes, slots)
    scratch = poisoned_scratch(sizes.rows * sizes.heads, slots)
    live = 0
    for step in worker.steps(steps):
        run_step(tier, step, sizes, scratch, kernels)
        check_coherent(tier, worker.values)
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


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_hot_pages_are_not_read_from_the_host(kernels: str) -> None:
    sizes = Sizes()
    worker, tier, scratch = Worker(sizes, seed=3), poisoned_tier(sizes, 200), poisoned_scratch(8, 200)
    for step in worker.steps(2):
        run_step(tier, step, sizes, scratch, "torch")
    expected = attended(worker, step, None, kernels)[0]
    tier.host.fill_(math.nan)
    assert torch.equal(attended(worker, step, tier, kernels)[0], expected)
    assert expected.any()


@needs_triton
@pytest.mark.parametrize(("slots", "multiprocessors"), [(1, 1), (5, 24), (33, 24)])
def test_kernels_decide_as_the_definition_does(slots: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of the tier, after every step, however many programs share the work."""
    monkeypatch.setattr(attend_module, "multiprocessor_count", lambda device: multiprocessors)
    monkeypatch.setattr("kvskim.ops.triton.host_fetch.ENTRIES", 2)
    monkeypatch.setattr("kvskim.ops.triton.host_fetch.SLOT_CHUNK", 16)
    sizes = Sizes(requests=3, rows=3)
    worker, expected, got = Worker(sizes, seed=multiprocessors), poisoned_tier(sizes, slots), poisoned_tier(sizes, slots)
    scratch = replace(poisoned_scratch(sizes.rows * sizes.heads, slots), ages=torch.full((64 * 16,), JUNK, dtype=torch.int32))
    for step in worker.steps(4):
        run_step(expected, step, sizes, scratch, "torch")
        run_step(got, step, sizes, scratch, "triton")
        for f in fields(ValueTier):
            torch.testing.assert_close(getattr(got, f.name), getattr(expected, f.name), rtol=0, atol=0, equal_nan=True, msg=f.name)
    assert (segments(sizes.rows * sizes.heads, multiprocessors) > 1) == (multiprocessors > 1)
    assert int(got.counters[1]) > 0


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
    assert torch.equal(tier.host[4, :, 0], fused[0, 2])
    assert torch.equal(tier.host[4, :, 15], fused[1, 2])
    assert torch.equal(tier.host[0, :, 5], fused[3, 2])
    assert torch.equal(tier.hot[1, [0, 15]], fused[:2, 2, 1])
    assert int(tier.host.isnan().sum()) == tier.host.numel() - 3 * fused[0, 0].numel()
    assert int(tier.hot.isnan().sum()) == tier.hot.numel() - 2 * sizes.dim


def test_selected_keys_are_in_the_order_of_the_page_tables() -> None:
    sizes = Sizes()
    step = small_step(sizes, [[5, 2], [1]], [40, 20], [[0, 2], []])
    assert selected_keys(poisoned_tier(sizes, 1), *step, 32).tolist() == [20, 8, 21, 9, 4, 6, 5, 7]


def test_bytes_of_the_tier() -> None:
    assert slot_bytes(128, 2) == 4104
    assert hot_slots(2**30, 32, 128, 2) == 2**30 // (32 * 4104)
    assert host_bytes(10, 64, 32, 8, 128, 2) == 10 * 64 * 32 * 8 * 128 * 2
    tier = poisoned_tier(Sizes(dim=128, dtype=torch.bfloat16), 3)
    per_slot = tier.hot.nbytes + tier.owner.nbytes + tier.stamp.nbytes
    assert per_slot == 3 * slot_bytes(128, 2)


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
        ("host", torch.zeros(4, 2, 8, 16), "host is"),
        ("host", torch.zeros(4, 2, 16, 16, dtype=torch.float64), "host is"),
        ("host", torch.zeros(5, 2, 16, 16), "directory is"),
        ("hot", torch.zeros(0, 16, 16), "at least one slot"),
        ("hot", torch.zeros(3, 16, 16, dtype=torch.float16), "hot is"),
        ("owner", torch.zeros(4, dtype=torch.int32), "owner is"),
        ("stamp", torch.zeros(6, dtype=torch.int32)[::2], "contiguous"),
        ("counters", torch.zeros(3), "counters is"),
    ],
)
def test_a_tier_of_wrong_tensors_is_refused(name: str, value: torch.Tensor, message: str) -> None:
    tier = make_tier(torch.zeros(4, 2, 16, 16), 3, "cpu")
    with pytest.raises(ValueError, match=message):
        replace(tier, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(values=torch.zeros(1, 2, 16)), "values are"),
        (dict(values=torch.zeros(2, 2, 16, dtype=torch.bfloat16)), "values are"),
        (dict(values=torch.zeros(2, 2, 32)[..., ::2]), "contiguous"),
        (dict(slot_mapping=torch.zeros(2, dtype=torch.int32)), "slot_mapping must"),
        (dict(kernels="numpy"), "kernels is"),
    ],
)
def test_wrong_arguments_of_store_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = dict(values=torch.zeros(2, 2, 16), slot_mapping=torch.zeros(2, dtype=torch.int64), kernels="torch") | changes
    with pytest.raises(ValueError, match=message):
        store(poisoned_tier(Sizes(), 2), **arguments)  # type: ignore[arg-type]


def test_a_tier_of_another_cache_is_refused() -> None:
    worker = Worker(Sizes(), seed=0)
    step = next(worker.steps(1))
    with pytest.raises(ValueError, match="the tier holds"):
        attended(worker, step, poisoned_tier(Sizes(blocks=8), 2), "torch")
    with pytest.raises(ValueError, match="the tier holds"):
        attended(worker, step, poisoned_tier(Sizes(dtype=torch.float16), 2), "torch")
