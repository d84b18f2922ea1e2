"""Values in host memory in the small engine: the same outputs, bit for bit, whatever becomes of requests and blocks."""

import logging
import random

import pytest
import torch
from mini_engine import Request
from tier_engine import PAGE_BYTES, engine

from kvskim.engines.vllm import probe, support, tier
from kvskim.errors import UnsupportedError

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


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_all_pages_selected_is_full_attention(block_size, softcap):
    e = engine(ALL, block_size=block_size, softcap=softcap)
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


@pytest.mark.parametrize(("settings", "slots", "block_size"), [(FEW, 3, 16), (ALL, 25, 32), ({**FEW, "budget_pages": 4}, 2000, 64)])
def test_values_on_the_host_never_change_a_bit(settings, slots, block_size):
    options = dict(block_size=block_size, num_blocks=60 * 16 // block_size * 2)
    engines = [engine(settings, slots, **options), engine(settings, variant="fast", **options)]
    compared = 0
    for tiered, resident in live(engines, 50, slots, 5, block_size=block_size):
        for a, b in zip(tiered, resident):
            for x, y in zip(a, b):
                assert torch.equal(x, y)
                assert x.any()
                compared += 1
    assert compared > 150
    check(engines[0].state)
    for layer in engines[0].state.layers.values():
        selected, missing, copied = layer.tier.counters.tolist()
        assert selected > missing > 0
        assert (copied < missing) == (slots < 60), "some pages of each small hot cache found no room in it"


def test_fault_11_finished_requests_leave_nothing_behind():
    """Many short requests with a hot cache of three pages, all blocks used over and over: no value is dropped, and no slot is lost."""
    e, resident = engine(FEW, 3, num_layers=1, num_blocks=40), engine(FEW, variant="fast", num_layers=1, num_blocks=40)
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


def test_prompts_that_do_not_fit_together_are_staged_in_groups(monkeypatch):
    e = engine(ALL, block_size=32, num_blocks=120)
    groups = []
    stage = tier.HostValues.stage
    monkeypatch.setattr(tier.HostValues, "stage", lambda self, layer, cache, rows: groups.append(rows) or stage(self, layer, cache, rows))
    requests = [Request(i) for i in range(4)]
    e.step([(requests[3], 30)])
    e.step([(request, 700) for request in requests[:2]])
    e.step([(requests[2], 900)])
    groups.clear()
    before = [request.computed for request in requests]
    scheduled = [(requests[3], 1), (requests[0], 60), (requests[1], 70), (requests[2], 80)]
    outputs = e.step(scheduled)
    # Blocks of 32 tokens: 24, 25 and 31 for the prompts; the room is for a request of 2048 tokens, 64 blocks.
    assert [group.blocks for group in groups] == [49, 31, 49, 31]
    for row, index in zip(outputs, (3, 0, 1, 2)):
        for layer, actual in enumerate(row):
            count = actual.shape[0]
            torch.testing.assert_close(actual, e.expected(requests[index], layer, before[index], count), atol=2e-5, rtol=2e-5)


def test_new_prompts_copy_no_context(monkeypatch):
    e = engine(ALL)
    monkeypatch.setattr(tier, "stage", lambda *_, **__: pytest.fail("a context was copied"))
    a, b = Request(1), Request(2)
    e.step([(a, 100), (b, 33)])
    e.step([(a, 1), (b, 1)])
    monkeypatch.undo()
    copied = []
    monkeypatch.setattr(tier, "stage", lambda *_, **__: copied.append(1))
    e.step([(a, 1), (b, 2)])
    assert len(copied) == 2


def test_fault_18_all_on_the_gpu_is_there_before_the_cache_is_sized():
    e = engine(FEW, 7)
    host = e.state.host_values
    kept = [*(t.data_ptr() for cache in host._hot.values() for t in vars(cache).values()), host._staging.data_ptr(), host.scratch.missing.data_ptr()]
    for layer in e.state.layers.values():
        assert layer.tier.hot.shape == (7, 16, 64)
        assert layer.tier.host.shape == (160, 2, 16, 64)
        assert layer.tier.directory.data_ptr() == layer.residency.records.data_ptr()
    request = Request(1)
    e.step([(request, 100)])
    e.step([(request, 1)])
    after = [*(t.data_ptr() for cache in host._hot.values() for t in vars(cache).values()), host._staging.data_ptr(), host.scratch.missing.data_ptr()]
    assert after == kept
    specs = {name: layer.get_kv_cache_spec(e.config) for name, layer in e.context.items()}
    assert sorted(spec.page_size_bytes for spec in specs.values()) == sorted(2 * [16 * 2 * 64 * 2, 2 * 256, 2 * 4])


def test_fault_22_values_on_the_host_may_be_bound_again():
    e, request = engine(ALL, 9), Request(1)
    e.step([(request, 70)])
    e.step([(request, 1)])
    for layer in e.records_layers():
        layer.kv_cache = []
    for layer in e.state.layers.values():
        assert layer.tier is None
    assert not e.state.host_values._memory
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


def test_untrue_copies_are_found():
    e, request = engine(ALL, 9), Request(1)
    e.step([(request, 70)])
    e.step([(request, 1)])
    name, layer = next(iter(e.state.layers.items()))
    layer.tier.hot[int(layer.tier.directory.max()) - 1, 3, 3] += 1
    assert probe.untrue_copies(e.state)[name] == 1
    layer.tier.owner[0] += 1
    assert probe.untrue_copies(e.state)[name] > 1


def test_every_byte_is_said(caplog):
    caplog.set_level(logging.INFO)
    engine(FEW, 50, block_size=32, num_blocks=64)
    text = [record.message for record in caplog.records if "page-locked" in record.message or "hot cache" in record.message]
    # bfloat16 in vLLM's configuration: values 2 x 64 x 32 x 2 bytes of 2 layers and 64 blocks.
    assert text[0].endswith(f"{64 * 2 * (8192 + 2 * 2 * 260) / 2**30:.2f} GiB of keys, records and directory; {2 * 50 * PAGE_BYTES / 2**20:.1f} MiB of "
                            f"hot cache, 50 slots a layer (19.5% of all pages and kv heads); {2 * 2048 * 128 * 4 / 2**20:.1f} MiB for prompts")
    assert text[1].endswith("0.00 GiB of values, page-locked")


def test_the_hot_cache_is_a_share_of_the_memory_where_nothing_is_said(monkeypatch):
    monkeypatch.setattr(tier, "cache_memory", lambda *_: 2 * 500 * PAGE_BYTES * 1000 // 12)
    e = engine({**FEW, "variant": "mem-v"}, variant="default")
    assert [layer.tier.slots for layer in e.state.layers.values()] == [500, 500]


def test_metrics_count_what_came_from_the_host(monkeypatch):
    from kvskim.engines.vllm import sampler
    from kvskim.metrics import SkimMetrics

    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    e, request = engine(FEW, 5), Request(1)
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
    assert value[3] == value[1] * 4096
    selected, missing, copied = numbers
    assert 0 < copied < missing
    assert sampler.fetched(e.state.layers.values(), torch.device("cpu")).tolist() == [selected, missing, missing - copied, missing * 4096]


REFUSED = {
    "mem-kv": (dict(variant="mem-kv"), "variant 'mem-kv' is not there yet in vLLM: set variant to 'mem-v' or 'fast'"),
    "version": (
        dict(vllm_version="0.26.0"), "variant 'mem-v' works with vLLM 0.24 only, and this is vLLM 0.26.0: install that version, or set variant to 'fast'",
    ),
    "connector": (
        dict(connector="OffloadingConnector"),
        "variant 'mem-v' does not work with KV connectors, which would not move its values, and this is OffloadingConnector: leave it out, "
        "or set variant to 'fast'",
    ),
    "sleep": (
        dict(sleep_mode=True),
        "variant 'mem-v' does not work with sleep mode, which would not keep its values: leave out --enable-sleep-mode, or set variant to 'fast'",
    ),
    "speculation": (
        dict(speculative=True), "variant 'mem-v' does not work with speculative decoding yet: leave out --speculative-config, or set variant to 'fast'",
    ),
    "dense layers": (
        dict(dense_layers=True),
        "variant 'mem-v' keeps the values of all layers in host memory, so no layer can keep full attention: leave out dense_layers, "
        "or set variant to 'fast'",
    ),
    "memory that can't be locked": (
        dict(pinned_memory=False), "variant 'mem-v' needs page-locked host memory, which this machine does not have: set variant to 'fast'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_values_in_host_memory_do_not_work_with_is_refused_in_one_sentence(name):
    changes, sentence = REFUSED[name]
    assert support.engine_refusal(support.EngineFacts(variant="mem-v")) is None
    assert support.engine_refusal(support.EngineFacts(**{"variant": "mem-v", **changes})) == sentence


@pytest.mark.parametrize(("settings", "options", "words"), [
    ({"dense_layers": [1]}, {}, "leave out dense_layers"),
    ({}, dict(speculative=object()), "speculative decoding"),
    ({}, dict(windows=(None, 128)), "model.layers.1.attn keeps full attention (sliding window)"),
    ({}, dict(windows=(128, None)), "model.layers.0.attn keeps full attention (sliding window)"),
    ({"hot_cache_gib": 1e-9}, {}, "hot_cache_gib is 1e-09, which is less than one page of each of 2 layers"),
    ({"host_memory_gib": 0.001}, {}, "the values of 160 KV cache blocks take 0.0 GiB of host memory, and host_memory_gib is 0.001: raise host_memory_gib"),
])
def test_engines_that_can_not_have_their_values_on_the_host_stop(settings, options, words):
    with pytest.raises(UnsupportedError) as error:
        engine({**FEW, **settings}, **options)
    assert words in str(error.value)


def test_on_demand_a_refused_engine_keeps_full_attention():
    e = engine({**FEW, "dense_layers": [1], "on_unsupported": "dense"}, variant="mem-v")
    assert not e.state.layers
    assert all("leave out dense_layers" in reason for reason in e.state.dense.values())
    assert all(layer.kv_cache.shape[1] == 2 for layer in e.layers)
    request = Request(1)
    for count in (40, 1):
        before = request.computed
        (outputs,) = e.step([(request, count)])
        torch.testing.assert_close(outputs[0], e.expected(request, 0, before, count), atol=2e-5, rtol=2e-5)


def test_too_little_host_memory_is_said_before_the_cache_is_made(monkeypatch):
    """What vLLM may give to its cache is known in the profiling run: 2 layers, 2 kv heads, blocks of 16 tokens."""
    gib = 2**30
    monkeypatch.setattr(tier, "cache_memory", lambda *_: 20 * gib)
    monkeypatch.setattr(tier, "available_host_memory", lambda: 12 * gib)
    monkeypatch.setattr(tier.HostValues, "_bind", lambda *_: pytest.fail("the cache was made"))
    blocks, values = 20 * gib // (2 * (4096 + 2 * 260)), 2 * 4096
    with pytest.raises(UnsupportedError) as error:
        engine(FEW)
    fits = 8 * gib * blocks // (blocks * values)
    assert str(error.value) == (
        f"the values of {blocks} KV cache blocks take {blocks * values / gib:.1f} GiB of host memory, and 8.0 GiB can be had with 4 GiB left for other use: "
        f"set --num-gpu-blocks-override to {fits} or less, or variant to 'fast'"
    )


def test_a_given_number_of_blocks_is_judged_before_anything_is_loaded(monkeypatch):
    from mini_engine import MiniEngine
    from vllm.model_executor.layers.attention import Attention

    def config(self, additional, max_rows, speculative, make=MiniEngine.make_config):
        made = make(self, additional, max_rows, speculative)
        made.cache_config.num_gpu_blocks_override = 10**9
        return made

    monkeypatch.setattr(MiniEngine, "make_config", config)
    monkeypatch.setattr(Attention, "process_weights_after_loading", lambda *_: pytest.fail("the weights were loaded"))
    with pytest.raises(UnsupportedError, match=r"the values of 1000000000 KV cache blocks take 7629\.4 GiB of host memory"):
        engine(FEW)
