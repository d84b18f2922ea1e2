"""Values, or keys and values, in host memory in the small engine: the same outputs, bit for bit, whatever becomes of requests and blocks."""

import random

import pytest
import torch
from mini_engine import Request
from tier_engine import VARIANTS, engine

from kvskim.engines.vllm import probe, tier
from kvskim.engines.vllm import state as state_module

ALL = {"selector": "mean", "rule": "budget", "budget": 1.0}
FEW = {"selector": "minmax", "rule": "budget", "budget_pages": 6}


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def check(state):
    assert probe.untrue_copies(state) == dict.fromkeys(state.layers, 0)
    assert len(state.layers) > 0


@pytest.mark.parametrize(("variant", "block_size", "softcap"), [
    ("mem-v", 16, None), ("mem-v", 64, 5.0), ("mem-kv", 16, None), ("mem-kv", 16, 5.0),
])
def test_all_pages_selected_is_full_attention(variant, block_size, softcap):
    e = engine(ALL, variant=variant, block_size=block_size, softcap=softcap)
    a, b = Request(1), Request(2)
    for scheduled, pad in (
        ([(a, 150)], 0), ([(a, 1), (b, 37)], 0), ([(a, 1), (b, 1)], 2), ([(a, 1), (b, 60)], 0), ([(a, 90), (b, 5)], 0), ([(a, 1), (b, 1)], 1),
    ):
        before = {id(request): request.computed for request, _ in scheduled}
        outputs = e.step(scheduled, pad_rows=pad)
        for (request, count), row in zip(sorted(scheduled, key=lambda item: item[1]), outputs):
            for layer, actual in enumerate(row):
                torch.testing.assert_close(actual, e.expected(request, layer, before[id(request)], count, softcap or 0.0), atol=2e-5, rtol=2e-5)
    check(e.state)


def live(engines, steps, seed, requests, longest=300, block_size=16):
    """Random requests in several engines at once: prefixes are shared, prompts come in chunks, requests are aborted, preempted and computed again, and
    their blocks go to others. Yields the outputs of each step."""
    rng = random.Random(seed)
    running = [[] for _ in engines]
    made = reused = shared = 0
    used = set()
    for step in range(steps):
        if len(running[0]) < requests and rng.random() < 0.6:
            made += 1
            text, prefix = rng.randrange(6), None
            twins = [i for i, r in enumerate(running[0]) if r.seed == text and r.computed >= block_size]
            if twins and rng.random() < 0.7:
                prefix = twins[0]
                shared += 1
            for e, mine in zip(engines, running):
                request = Request(text)
                if prefix is not None:
                    blocks = mine[prefix].computed // e.block_size
                    request.blocks, request.computed = list(mine[prefix].blocks[:blocks]), blocks * e.block_size
                    request.shared = blocks
                mine.append(request)
        plan = []
        for i, request in enumerate(running[0]):
            plan.append((i, 1 if request.computed > 60 and rng.random() < 0.8 else rng.choice([1, 2, 15, 16, 40, 90])))
        plan = [(i, min(n, longest - running[0][i].computed)) for i, n in plan if running[0][i].computed < longest]
        free, scheduled = len(engines[0].free), []
        for i, n in plan:
            need = -(-(running[0][i].computed + n) // block_size) - len(running[0][i].blocks)
            if need <= free:
                free -= max(0, need)
                scheduled.append((i, n))
        if scheduled:
            pad = 2 if all(n == 1 for _, n in scheduled) and step % 2 else 0
            yield [e.step([(mine[i], n) for i, n in scheduled], pad_rows=pad) for e, mine in zip(engines, running)]
            reused += sum(not used.isdisjoint(running[0][i].blocks) for i, _ in scheduled)
        for i in reversed(range(len(running[0]))):
            # One that shares its beginning with another may not give those blocks back.
            if not (running[0][i].computed >= longest or rng.random() < 0.06):
                continue
            used.update(running[0][i].blocks)
            lent = max((getattr(r, "shared", 0) for r in running[0] if r is not running[0][i] and r.seed == running[0][i].seed), default=0)
            preempt = rng.random() < 0.4 and lent == 0 and not getattr(running[0][i], "shared", 0)
            for e, mine in zip(engines, running):
                e.release(mine[i], keep=max(lent, getattr(mine[i], "shared", 0)))
                if not preempt:
                    mine.pop(i)
    assert made > steps // 8
    assert shared > 2
    assert reused > steps // 2


@pytest.mark.parametrize(("variant", "settings", "slots", "block_size"), [
    ("mem-v", FEW, 3, 16), ("mem-v", ALL, 25, 32), ("mem-v", {**FEW, "budget_pages": 4}, 2000, 64),
    ("mem-kv", FEW, 4, 16), ("mem-kv", ALL, 25, 16), ("mem-kv", {**FEW, "budget_pages": 4}, 2000, 16),
])
def test_pages_on_the_host_never_change_a_bit(variant, settings, slots, block_size):
    """Outputs, and all records that the engines hold, are those of an engine with keys and values in GPU memory."""
    options = dict(block_size=block_size, num_blocks=60 * 16 // block_size * 2)
    engines = [engine(settings, slots, variant, **options), engine(settings, variant="fast", **options)]
    compared = 0
    for tiered, resident in live(engines, 50, slots, 5, block_size=block_size):
        for a, b in zip(tiered, resident):
            for x, y in zip(a, b):
                assert torch.equal(x, y)
                assert x.any()
                compared += 1
    assert compared > 150
    check(engines[0].state)
    for tiered, resident in zip(*(e.state.layers.values() for e in engines)):
        assert torch.equal(tiered.records.records, resident.records.records)
        assert (tiered.records.records != 255).any()
    for layer in engines[0].state.layers.values():
        selected, missing, copied = layer.tier.counters.tolist()
        assert selected > missing > 0
        assert (copied < missing) == (slots < 60), "some pages of each small hot cache found no room in it"


@pytest.mark.parametrize("variant", VARIANTS)
def test_fault_11_finished_requests_leave_nothing_behind(variant):
    """Many short requests with a hot cache of three pages, all blocks used over and over: nothing is dropped, and no slot is lost."""
    e, resident = engine(FEW, 3, variant, num_layers=1, num_blocks=40), engine(FEW, variant="fast", num_layers=1, num_blocks=40)
    rng = random.Random(1)
    for _ in range(30):
        lengths = [rng.randint(1, 120) for _ in range(4)]
        pairs = [(Request(seed), Request(seed)) for seed in rng.sample(range(50), 4)]
        for counts in (lengths, [1] * 4, [1] * 4):
            outputs = [x.step([(pair[i], n) for pair, n in zip(pairs, counts)]) for i, x in enumerate((e, resident))]
            assert all(torch.equal(a[0], b[0]) for a, b in zip(*outputs))
        for pair in pairs:
            e.release(pair[0])
            resident.release(pair[1])
    check(e.state)
    (layer,) = e.state.layers.values()
    assert layer.tier.slots == 3
    assert int((layer.tier.owner >= 0).sum()) == 3


@pytest.mark.parametrize(("variant", "window", "soon"), [("mem-v", 2, False), ("mem-kv", 2, False), ("mem-kv", 1, False), ("mem-v", 2, True)])
def test_choices_and_copies_beside_the_rest_of_a_captured_step_change_nothing(variant, window, soon):
    """Made as late, or as soon, as a GPU may make them: outputs are those of `fast`, and hot caches those of pages fetched ahead of attention."""
    from test_vllm_encode_placement import give_streams

    settings = {**FEW, "window_pages": window}
    e, at_once, resident = engine(settings, 20, variant), engine(settings, 20, variant), engine(settings, variant="fast")
    streams = give_streams(e, at_once=soon)
    requests = [[Request(seed) for seed in (1, 2, 1)] for _ in range(3)]
    rng = random.Random(3)
    for lengths in ([200, 90, 40], *([1, 1, 1] for _ in range(20)), [30, 1, 1], *([1, 1, 1] for _ in range(8))):
        streams.is_capturing = max(lengths) == 1 and rng.random() < 0.8
        outputs = [x.step(list(zip(mine, lengths)), pad_rows=2 * (max(lengths) == 1)) for x, mine in zip((e, at_once, resident), requests)]
        for rows in zip(*outputs):
            for a, b, c in zip(*rows):
                assert torch.equal(a, b)
                assert torch.equal(a, c)
        check(e.state)
    assert streams.log.count("join") > 15
    assert streams.log.count("fork") == streams.log.count("join") * (6 if window == 2 else 4)
    assert streams.log.count("wait") == streams.log.count("join"), "the second of two layers waits for the first"
    for one, two in zip(e.state.layers.values(), at_once.state.layers.values()):
        for name in ("directory", "owner", "stamp", "counters", "clock"):
            assert torch.equal(getattr(one.tier, name), getattr(two.tier, name)), name
        assert int(one.tier.counters[2]) > 40


@pytest.mark.parametrize(("variant", "block_size"), [("mem-v", 16), ("mem-v", 64), ("mem-kv", 16)])
def test_steps_of_decode_rows_alone_write_all_in_one_launch(variant, block_size, monkeypatch):
    """It may begin early, but behind what was decided beside attention of the layer ahead; the preparation behind it reads the queries early in any case."""
    from test_vllm_encode_placement import give_streams, write_as_on_a_gpu

    engines = [engine(FEW, 20, variant, block_size=block_size), engine(FEW, variant="fast", block_size=block_size)]
    streams, overlaps, told, stored = give_streams(engines[0]), write_as_on_a_gpu(engines[0], monkeypatch), [], []
    decode_step, store = state_module.decode_step, tier.store

    def seen(*tensors, queries_settled, **settings):
        told.append(queries_settled)
        decode_step(*tensors, queries_settled=queries_settled, **settings)

    monkeypatch.setattr(tier, "store", lambda *arguments, **more: stored.append(1) or store(*arguments, **more))
    requests = [[Request(seed) for seed in (1, 2, 3)] for _ in engines]
    for counts, capturing, begin_early in (
        ([90, 70, 40], False, []), ([1, 1, 1], False, [True, True]), *[([1, 1, 1], True, [True, False])] * 20, ([1, 30, 1], False, []),
        ([1, 1, 1], True, [True, False]), ([1, 1, 1], False, [True, True]),
    ):
        for log in (overlaps, told, stored):
            log.clear()
        outputs = []
        for e, mine in zip(engines, requests):
            streams.is_capturing = capturing and e is engines[0]
            monkeypatch.setattr(state_module, "decode_step", seen if e is engines[0] else decode_step)
            outputs.append(e.step(list(zip(mine, counts)), pad_rows=2 * (max(counts) == 1)))
        assert all(torch.equal(a, b) for rows in zip(*outputs) for a, b in zip(*rows))
        assert overlaps == begin_early
        assert told == [bool(begin_early)] * (2 if min(counts) == 1 else 0)
        assert len(stored) == (0 if begin_early else 2)
        check(engines[0].state)
    for a, b in zip(*(e.state.layers.values() for e in engines)):
        assert torch.equal(a.records.records, b.records.records)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_captured_step_runs_was_run_before(variant, monkeypatch):
    """A kernel can't be loaded while a step is captured, and eager steps do not leave their copies for later."""
    ran = []
    monkeypatch.setattr(tier, "copy_fetched", lambda tier, scratch, kernels: ran.append((tier, int(scratch.fetched_pages), kernels)))
    e = engine(FEW, 20, variant)
    assert [(tier.directory.data_ptr(), count, kernels) for tier, count, kernels in ran] == [
        (layer.tier.directory.data_ptr(), 0, "torch") for layer in e.state.layers.values()
    ]


def test_batches_in_parts_copy_at_once():
    """The buffers of a layer hold one list of copies."""
    from test_vllm_encode_placement import give_streams

    e, resident = engine(FEW, 40, "mem-kv"), engine(FEW, variant="fast")
    streams = give_streams(e)
    requests = [[Request(seed) for seed in (1, 2, 3)] for _ in range(2)]
    for mine, x in zip(requests, (e, resident)):
        x.step([(request, 120 + i) for i, request in enumerate(mine)])
        x.state.rows = 2
    streams.is_capturing = True
    for _ in range(4):
        outputs = [x.step([(request, 1) for request in mine]) for mine, x in zip(requests, (e, resident))]
        assert all(torch.equal(a, b) for rows in zip(*outputs) for a, b in zip(*rows))
    assert streams.log.count("fork") == 8  # records only
    check(e.state)


@pytest.mark.parametrize(("variant", "block_size"), [("mem-v", 32), ("mem-kv", 16)])
def test_prompts_that_do_not_fit_together_are_staged_in_groups(variant, block_size, monkeypatch):
    e = engine(ALL, variant=variant, block_size=block_size, num_blocks=120 * 32 // block_size)
    groups = []
    stage = tier.HostCache.stage
    monkeypatch.setattr(tier.HostCache, "stage", lambda self, layer, cache, rows, room: groups.append(rows) or stage(self, layer, cache, rows, room))
    requests = [Request(i) for i in range(4)]
    e.step([(requests[3], 30)])
    e.step([(request, 700) for request in requests[:2]])
    e.step([(requests[2], 900)])
    groups.clear()
    before = [request.computed for request in requests]
    scheduled = [(requests[3], 1), (requests[0], 60), (requests[1], 70), (requests[2], 80)]
    outputs = e.step(scheduled)
    # 760, 770 and 980 tokens; the room is for a request of 2048.
    sizes = [-(-760 // block_size) - (-770 // block_size), -(-980 // block_size)]
    assert [group.blocks for group in groups] == sizes * 2
    for row, index in zip(outputs, (3, 0, 1, 2)):
        for layer, actual in enumerate(row):
            count = actual.shape[0]
            torch.testing.assert_close(actual, e.expected(requests[index], layer, before[index], count), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_new_prompts_copy_no_context(variant, monkeypatch):
    e = engine(ALL, variant=variant)
    monkeypatch.setattr(tier, "stage", lambda *_, **__: pytest.fail("a context was copied"))
    a, b = Request(1), Request(2)
    e.step([(a, 100), (b, 33)])
    e.step([(a, 1), (b, 1)])
    monkeypatch.undo()
    copied = []
    monkeypatch.setattr(tier, "stage", lambda *_, **__: copied.append(1))
    e.step([(a, 1), (b, 2)])
    assert len(copied) == 2


@pytest.mark.parametrize(("variant", "parts", "left"), [("mem-v", 1, 16 * 2 * 64 * 2), ("mem-kv", 2, 16 * 2)])
def test_fault_18_all_on_the_gpu_is_there_before_the_cache_is_sized(variant, parts, left):
    e = engine(FEW, 7, variant)
    host = e.state.host_cache

    def places():
        made = [*host._hot.values(), *host.scratch.values()]
        return [t.data_ptr() for part in made for t in vars(part).values()]

    kept = places()
    for layer in e.state.layers.values():
        assert layer.tier.hot.shape == (7, parts, 16, 64)
        assert layer.tier.host.shape == (160, 2, parts, 16, 64)
        assert layer.tier.directory.data_ptr() == layer.residency.records.data_ptr()
    request = Request(1)
    e.step([(request, 100)])
    e.step([(request, 1)])
    assert places() == kept
    specs = {name: layer.get_kv_cache_spec(e.config) for name, layer in e.context.items()}
    assert sorted(spec.page_size_bytes for spec in specs.values()) == sorted(2 * [left, 2 * 256, 2 * 4])
    assert sum(spec.page_size_bytes for spec in specs.values()) == host.block_bytes(host=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fault_22_pages_on_the_host_may_be_bound_again(variant):
    e, request = engine(ALL, 9, variant), Request(1)
    e.step([(request, 70)])
    e.step([(request, 1)])
    for layer in e.records_layers():
        layer.kv_cache = []
    for layer in e.state.layers.values():
        assert layer.tier is None
    assert not e.state.host_cache._memory
    with pytest.raises(RuntimeError, match="before its residency was bound"):
        next(iter(e.state.layers.values())).caches()
    with torch.inference_mode(False):
        e._bind(200)
    for layer in e.state.layers.values():
        assert (layer.tier.owner == -1).all()
        assert (layer.tier.directory == 0).all()
    e.release(request)
    for count in (70, 1, 1):
        before = request.computed
        (outputs,) = e.step([(request, count)])
        torch.testing.assert_close(outputs[1], e.expected(request, 1, before, count), atol=2e-5, rtol=2e-5)
    assert all(layer.tier.pages == 200 for layer in e.state.layers.values())
    check(e.state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_untrue_copies_are_found(variant):
    e, request = engine(ALL, 9, variant), Request(1)
    e.step([(request, 70)])
    e.step([(request, 1)])
    name, layer = next(iter(e.state.layers.items()))
    layer.tier.hot[int(layer.tier.directory.max()) - 1, 0, 3, 3] += 1
    assert probe.untrue_copies(e.state)[name] == 1
    layer.tier.owner[0] += 1
    assert probe.untrue_copies(e.state)[name] > 1


@pytest.mark.parametrize(("variant", "page"), [("mem-v", 4096), ("mem-kv", 8192)])
def test_metrics_count_what_came_from_the_host(variant, page, monkeypatch):
    from kvskim.engines.vllm import sampler
    from kvskim.metrics import SkimMetrics

    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    e, request = engine(FEW, 5, variant), Request(1)
    monkeypatch.setattr(sampler, "SAMPLE_SECONDS", 0.0)
    e.state.metrics = e.state.sampler._metrics = SkimMetrics(registry)
    e.step([(request, 160)])
    for _ in range(14):
        e.step([(request, 1)])
    numbers = torch.stack([layer.tier.counters for layer in e.state.layers.values()]).sum(0).tolist()
    value = [registry.get_sample_value(f"kvskim_tier_{name}_total") for name in ("pages", "missing_pages", "homeless_pages", "bytes")]
    # Six pages of two kv heads in two layers; the last steps are not taken up yet.
    assert value[0] % 24 == 0
    assert 10 * 24 <= value[0] <= numbers[0] == 14 * 24
    assert value[0] >= value[1] >= value[2] > 0
    assert value[3] == value[1] * page
    selected, missing, copied = numbers
    assert 0 < copied < missing
    assert sampler.fetched(e.state.layers.values(), torch.device("cpu")).tolist() == [selected, missing, missing - copied, missing * page]
