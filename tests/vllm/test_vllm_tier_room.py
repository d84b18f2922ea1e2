"""The room for prompts: memory of a step, taken while one layer attends to them, of one size, with anything in it."""

import gc
import importlib.util
import sys
import weakref
from pathlib import Path

import pytest
import torch
from mini_engine import MAX_TOKENS, Request
from tier_engine import VARIANTS, engine
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from kvskim.engines.vllm import tier

ALL = {"selector": "mean", "rule": "budget", "budget": 1.0}
NUMBERS = 2 * MAX_TOKENS * 2 * 64
"""Keys and values of one request of the longest length in one layer."""


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.fixture
def rooms(monkeypatch):
    """The rooms that were taken, as layer name, size of the storage and the storage's owner; a second one while there is a first fails."""
    taken = []
    room = tier.HostCache.room

    def watched(self, layer, block_size):
        assert not [name for name, _, alive in taken if alive() is not None], "one room at a time"
        made = room(self, layer, block_size)
        taken.append((layer.name, made.untyped_storage().nbytes(), weakref.ref(made)))
        return made

    monkeypatch.setattr(tier.HostCache, "room", watched)
    return taken


def left(rooms):
    """Names and sizes of the rooms; all must have been given back."""
    assert all(alive() is None for _, _, alive in rooms)
    found = [(name, size) for name, size, _ in rooms]
    rooms.clear()
    return found


@pytest.mark.parametrize(("variant", "block_size"), [("mem-v", 16), ("mem-v", 64), ("mem-kv", 16)])
def test_the_room_is_there_while_a_layer_attends_to_prompts(variant, block_size, rooms):
    gc.disable()  # it is given back at once, and not when somebody collects garbage
    try:
        e = engine(ALL, variant=variant, block_size=block_size)
        both = [(layer.layer_name, NUMBERS * 4) for layer in e.layers]
        # vLLM's profiling run has seen it in the place where steps have it.
        assert left(rooms) == both
        a, b = Request(1), Request(2)
        for scheduled, padding, expected in (
            ([(a, 100)], 0, both), ([(a, 1), (b, 30)], 0, both), ([(a, 40), (b, 3)], 0, both), ([(a, 1), (b, 1)], 0, []), ([(a, 1), (b, 1)], 2, []),
        ):
            e.step(scheduled, pad_rows=padding)
            assert left(rooms) == expected
        # vLLM runs the model without metadata later, too: on the stream of its captures.
        e._profile()
        assert left(rooms) == []
    finally:
        gc.enable()


def test_prompts_that_do_not_fit_together_share_a_room(rooms):
    e = engine(ALL, num_blocks=400)
    requests = [Request(i) for i in range(3)]
    for request, count in zip(requests, (900, 800, 700)):
        e.step([(request, count)])
    left(rooms)
    e.step([(request, 5) for request in requests])
    assert [len(e.metadata.staged), len(left(rooms))] == [2, 2]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_profiling_run_without_memory_for_the_room_ends_as_any_other(variant, monkeypatch):
    monkeypatch.setattr(torch, "empty", without(NUMBERS))
    with pytest.raises(torch.OutOfMemoryError, match="no memory for 524288 numbers"):
        engine(ALL, variant=variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_without_memory_for_the_room_ends_as_any_other(variant, monkeypatch, rooms):
    e, request = engine(ALL, variant=variant), Request(1)
    e.step([(request, 100)])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", without(NUMBERS))
        e.step([(request, 1)])  # decode needs none
        with pytest.raises(torch.OutOfMemoryError, match="no memory for 524288 numbers"):
            e.step([(request, 10)])
    left(rooms)
    (outputs,) = e.step([(request, 10)])
    torch.testing.assert_close(outputs[1], e.expected(request, 1, 101, 10), atol=2e-5, rtol=2e-5)


def without(numbers, empty=torch.empty):
    """An allocator that has no block for so many numbers."""

    def allocate(*size, **options):
        if size == (numbers,):
            raise torch.OutOfMemoryError(f"no memory for {numbers} numbers")
        return empty(*size, **options)

    return allocate


@pytest.mark.parametrize(("variant", "block_size"), [("mem-v", 16), ("mem-v", 64), ("mem-kv", 16)])
def test_what_memory_held_before_never_reaches_a_result(variant, block_size, monkeypatch):
    """The room comes full of NaN. FlashAttention may read whole tiles of whatever is in a row's block table, so there is none in any of its blocks; and
    outputs are those of an engine with all in GPU memory."""
    e, resident = (engine(ALL, variant=v, block_size=block_size, num_blocks=100 * 64 // block_size) for v in (variant, "fast"))
    for x in (e, resident):
        for layer in x.layers:
            layer.kv_cache.zero_()  # as vLLM makes it
    room, forward, lengths = tier.HostCache.room, FlashAttentionImpl.forward, []
    monkeypatch.setattr(tier.HostCache, "room", lambda *arguments: room(*arguments).fill_(torch.nan))

    def reads_all(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        if self.skim_state is e.state:
            assert not kv_cache[metadata.block_table.unique().long()].isnan().any()
            lengths.extend(metadata.seq_lens.tolist())
        return forward(self, layer, query, key, value, kv_cache, metadata, output, *scales)

    monkeypatch.setattr(FlashAttentionImpl, "forward", reads_all)
    requests = [[Request(seed) for seed in (1, 2, 3, 4)] for _ in range(2)]
    for plan in (
        {0: 64}, {0: 3, 1: 129}, {0: 1, 1: 1, 2: 63}, {0: 60, 1: 60, 2: 1, 3: 1}, {3: 15}, {3: 2}, {0: 2, 1: 3, 3: 46}, {2: 900, 3: 2}, {1: 800, 2: 300, 3: 2},
        {0: 1, 3: 700}, {1: 5, 2: 6, 3: 7, 0: 8},
    ):
        outputs = [x.step([(mine[i], count) for i, count in plan.items()]) for x, mine in zip((e, resident), requests)]
        for ours, theirs in zip(*outputs):
            for a, b in zip(ours, theirs):
                assert torch.equal(a, b)
                assert a.isfinite().all()
                assert a.any()
    assert len(e.metadata.staged) > 1
    assert {0, 1} <= {length % block_size for length in lengths}


@pytest.mark.parametrize(("room", "attention", "elsewhere", "added"), [
    (500, 800, 900, 0), (500, 800, 600, 200), (500, 800, 100, 500), (0, 800, 100, 0), (500, 0, 900, 0),
])
def test_what_the_room_adds_is_measured(room, attention, elsewhere, added, monkeypatch):
    """By `tests/gpu/vllm/tier_memory.py`, with the statistics of PyTorch's allocator."""
    spec = importlib.util.spec_from_file_location("tier_memory", Path(__file__).parent.parent / "gpu/vllm/tier_memory.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    now, most, held = [1000], [10**6], [10**6]

    def take(size):
        now[0] += size
        most[0], held[0] = max(most[0], now[0]), max(held[0], now[0] + 50)
        now[0] -= size

    def reset():
        most[0], held[0] = now[0], now[0] + 40

    for name, function in (
        ("memory_allocated", lambda: now[0]), ("max_memory_allocated", lambda: most[0]), ("max_memory_reserved", lambda: held[0]),
        ("reset_peak_memory_stats", reset),
    ):
        monkeypatch.setattr(torch.cuda, name, function)

    class Implementation:
        def forward(self, size, *, output):
            take(size)
            return output

    def run():
        layer = Implementation()
        for _ in range(2):
            assert layer.forward(attention, output=3) == 3
            take(elsewhere)
            layer.forward(attention // 2, output=4)
            take(elsewhere // 2)

    forward = Implementation.forward
    peaks = script.step_peaks(Implementation, run)
    assert Implementation.forward is forward
    assert (peaks.attention, peaks.elsewhere, peaks.peak) == (attention, elsewhere, max(attention, elsewhere))
    assert peaks.held == max(attention, elsewhere) + 50
    assert peaks.added_by(room) == added
