"""How large the cache of an engine with values, or keys and values, in host memory is, and which engines can't have it."""

import logging

import pytest
import torch
from mini_engine import Request
from tier_engine import PAGE_BYTES, VARIANTS, engine

from kvskim.engines.vllm import support, tier
from kvskim.errors import UnsupportedError
from kvskim.tier.host_memory import affordable_blocks

FEW = {"selector": "minmax", "rule": "budget", "budget_pages": 6}
GIB = 2**30
KV_BLOCK = 2 * 2 * 4096
"""Host memory of a block of 16 tokens with keys and values: 2 layers, 2 kv heads of 64 channels, bfloat16."""
RECORDS_BLOCK = 2 * (32 + 2 * 260)
"""GPU memory of the same block."""
V_BLOCK, KEYS_BLOCK = 2 * 4096, 2 * (4096 + 2 * 260)
"""The same with values on the host."""


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def with_blocks(monkeypatch, **cache):
    """Engines whose configuration of the cache has these fields."""
    from mini_engine import MiniEngine

    def config(self, additional, max_rows, speculative, make=MiniEngine.make_config):
        made = make(self, additional, max_rows, speculative)
        for name, value in cache.items():
            setattr(made.cache_config, name, value)
        return made

    monkeypatch.setattr(MiniEngine, "make_config", config)


def test_every_byte_is_said(caplog):
    caplog.set_level(logging.INFO)
    engine(FEW, 50, block_size=32, num_blocks=64)
    text = [record.message for record in caplog.records if "page-locked" in record.message or "hot cache" in record.message]
    # bfloat16 in vLLM's configuration: values 2 x 64 x 32 x 2 bytes of 2 layers and 64 blocks.
    assert text[0].endswith(f"{64 * 2 * (8192 + 2 * 2 * 260) / 2**30:.2f} GiB of keys, records and directory; {2 * 50 * (4096 + 8) / 2**20:.1f} MiB of "
                            "hot cache, 50 slots a layer (19.5% of all pages and kv heads)")
    (step,) = [record.message for record in caplog.records if "for prompts" in record.message]
    assert step.endswith(f"{2 * 2048 * 128 * 4 / 2**20:.1f} MiB for prompts while a layer attends to them, taken from memory for activations")
    assert text[1].endswith("0.00 GiB of values, page-locked")
    caplog.clear()
    engine(FEW, 50, "mem-kv", num_blocks=6400)
    text = [record.message for record in caplog.records if "page-locked" in record.message or "hot cache" in record.message]
    assert f"{6400 * 2 * (32 + 2 * 260) / 2**30:.2f} GiB of records and directory; {2 * 50 * (8192 + 8) / 2**20:.1f} MiB of hot cache" in text[0]
    assert text[1].endswith(f"{6400 * 2 * 2 * 4096 / 2**30:.2f} GiB of keys and values, page-locked")


@pytest.mark.parametrize(("variant", "share"), [("mem-v", 0.012), ("mem-kv", 0.5)])
def test_the_hot_cache_is_a_share_of_the_memory_where_nothing_is_said(variant, share, monkeypatch):
    monkeypatch.setattr(tier, "cache_memory", lambda *_: int(2 * 500 * PAGE_BYTES[variant] / share) + 1)
    e = engine({**FEW, "variant": variant}, variant="default")
    assert [layer.tier.slots for layer in e.state.layers.values()] == [500, 500]


def test_the_hot_cache_has_no_more_slots_than_there_are_pages(monkeypatch):
    with_blocks(monkeypatch, num_gpu_blocks_override=160)
    monkeypatch.setattr(tier, "cache_memory", lambda *_: 2**30)
    e = engine({**FEW, "variant": "mem-kv"}, variant="default")
    assert [layer.tier.slots for layer in e.state.layers.values()] == [160 * 2, 160 * 2]


@pytest.mark.parametrize(("variant", "available", "limit", "told", "expected"), [
    ("mem-kv", 12, None, 4, 8 * GIB // KV_BLOCK), ("mem-kv", 12, 2.0, 4, 2 * GIB // KV_BLOCK), ("mem-kv", 12, 100.0, 4, 8 * GIB // KV_BLOCK),
    ("mem-kv", 1000, None, 4, None),
    ("mem-v", 12, None, 20, 8 * GIB // V_BLOCK), ("mem-v", 12, 2.0, 4, 2 * GIB // V_BLOCK), ("mem-v", 1000, None, 20, None),
])
def test_blocks_are_as_many_as_the_host_holds(variant, available, limit, told, expected, monkeypatch, caplog):
    """Where the GPU has room for more blocks than the host the engine is told to make fewer, and says so, and how many there were without a host tier."""
    caplog.set_level(logging.INFO)
    with_blocks(monkeypatch, kv_cache_memory_bytes=told * GIB)
    monkeypatch.setattr(tier, "available_host_memory", lambda: available * GIB)
    e = engine({**FEW, **({} if limit is None else {"host_memory_gib": limit})}, variant=variant)
    assert e.config.cache_config.num_gpu_blocks_override == expected
    said = [record.message for record in caplog.records if "are made" in record.message]
    room, resident = told * GIB // (RECORDS_BLOCK if variant == "mem-kv" else KEYS_BLOCK), told * GIB // (KV_BLOCK + 2 * 2 * 256)
    more = f"; variant 'fast' has room for about {resident}" if resident > (expected or room) else ""
    text = f"kvskim: the GPU has room for up to {room} blocks, and host memory for {expected}: {expected} are made{more}"
    assert said == ([] if expected is None else [text])
    assert bool(more) == ((variant, available, limit) in (("mem-kv", 12, 2.0), ("mem-v", 12, None)))
    assert (expected or room) <= room


def test_the_hot_cache_comes_off_the_memory_that_is_not_told(monkeypatch):
    monkeypatch.setattr(tier, "cache_memory", lambda *_: 4 * GIB)
    monkeypatch.setattr(tier, "available_host_memory", lambda: 1000 * GIB)
    e = engine(FEW, variant="mem-kv")
    hot = int(e.state.config.hot_cache_gib * GIB)
    assert e.state.host_cache._judge(4 * GIB, hot) == (4 * GIB - hot) // RECORDS_BLOCK


@pytest.mark.parametrize(("available", "expected"), [
    (12, 8 * GIB // KV_BLOCK),  # far less than the GPU has room for
    (4 + 470, (32 * GIB - 4 * GIB) // RECORDS_BLOCK),  # what vLLM takes for a step may leave room for fewer than the host holds
    (4 + 600, None),
])
def test_blocks_that_may_not_fit_the_gpu_are_not_asked_for(available, expected, monkeypatch):
    """vLLM makes as many as the setting says, whether the GPU has room for them or not."""
    monkeypatch.setattr(tier, "cache_memory", lambda *_: 32 * GIB + int(20 * 2 * PAGE_BYTES["mem-kv"]))
    monkeypatch.setattr(tier, "available_host_memory", lambda: available * GIB)
    e = engine(FEW, 20, variant="mem-kv")
    assert e.config.cache_config.num_gpu_blocks_override == expected


@pytest.mark.parametrize(("variant", "host"), [("mem-v", V_BLOCK), ("mem-kv", KV_BLOCK)])
@pytest.mark.parametrize("missing", [0, 1])
def test_what_was_left_to_others_may_be_used_by_them_until_the_cache_is_made(variant, host, missing, monkeypatch):
    """An engine that takes all that the host had in the profiling run starts, though compiling has taken some of the rest since."""
    later = [160 * host + 2 * GIB - missing]
    monkeypatch.setattr(tier, "available_host_memory", lambda: later[0] if tiers[0]._hot else 4 * GIB + 160 * host)
    tiers, allocate = [], tier.HostCache.allocate
    monkeypatch.setattr(tier.HostCache, "allocate", lambda self, *arguments: tiers.append(self) or allocate(self, *arguments))
    if missing:
        with pytest.raises(UnsupportedError, match=r"of 160 KV cache blocks take 0\.0 GiB of host memory"):
            engine(FEW, variant=variant)
    else:
        assert all(layer.tier is not None for layer in engine(FEW, variant=variant).state.layers.values())


@pytest.mark.parametrize(("variant", "what", "told", "gpu", "host"), [
    ("mem-v", "values", 20, KEYS_BLOCK, V_BLOCK), ("mem-kv", "keys and values", 4, RECORDS_BLOCK, KV_BLOCK),
])
def test_several_workers_say_how_many_blocks_fit(variant, what, told, gpu, host, monkeypatch):
    """Their engine is another process, which can't be told."""
    with_blocks(monkeypatch, kv_cache_memory_bytes=told * GIB)
    monkeypatch.setattr(tier, "workers", lambda *_: 2)
    monkeypatch.setattr(tier, "available_host_memory", lambda: 12 * GIB)
    with pytest.raises(UnsupportedError) as error:
        engine(FEW, variant=variant)
    assert f"the {what} of {told * GIB // gpu} KV cache blocks take" in str(error.value)
    assert f"set --num-gpu-blocks-override to {4 * GIB // host} or less" in str(error.value)


@pytest.mark.parametrize(("variant", "host"), [("mem-v", V_BLOCK), ("mem-kv", KV_BLOCK)])
def test_a_request_that_the_host_can_not_hold_is_said(variant, host):
    with pytest.raises(UnsupportedError) as error:
        engine({**FEW, "host_memory_gib": 64 * host / GIB}, variant=variant)
    assert str(error.value) == (
        "one request of --max-model-len takes 0.0 GiB of host memory, and 0.0 GiB can be had: set --max-model-len to 1024 or less, raise host_memory_gib "
        "if it is set, or set variant to 'fast'"
    )


@pytest.mark.parametrize(("variant", "what", "gpu", "host"), [("mem-v", "values", KEYS_BLOCK, V_BLOCK), ("mem-kv", "keys and values", RECORDS_BLOCK, KV_BLOCK)])
def test_too_little_host_memory_is_said_before_the_cache_is_made(variant, what, gpu, host, monkeypatch):
    """The number of blocks is known in the profiling run. One that was asked for is not lowered."""
    with_blocks(monkeypatch, num_gpu_blocks_override=20 * GIB // gpu)
    monkeypatch.setattr(tier.HostCache, "look_ahead", lambda *_: None)
    monkeypatch.setattr(tier, "cache_memory", lambda *_: 20 * GIB)
    monkeypatch.setattr(tier, "available_host_memory", lambda: 12 * GIB)
    monkeypatch.setattr(tier.HostCache, "_bind", lambda *_: pytest.fail("the cache was made"))
    blocks = 20 * GIB // gpu
    with pytest.raises(UnsupportedError) as error:
        engine(FEW, variant=variant)
    assert str(error.value) == (
        f"the {what} of {blocks} KV cache blocks take {blocks * host / GIB:.1f} GiB of host memory, and 8.0 GiB can be had with 4 GiB left for other use: "
        f"set --num-gpu-blocks-override to {8 * GIB // host} or less, or variant to 'fast'"
    )


def test_a_given_number_of_blocks_is_judged_before_anything_is_loaded(monkeypatch):
    from vllm.model_executor.layers.attention import Attention

    with_blocks(monkeypatch, num_gpu_blocks_override=10**9)
    monkeypatch.setattr(Attention, "process_weights_after_loading", lambda *_: pytest.fail("the weights were loaded"))
    with pytest.raises(UnsupportedError, match=r"the values of 1000000000 KV cache blocks take 7629\.4 GiB of host memory"):
        engine(FEW)
    with pytest.raises(UnsupportedError, match=r"the keys and values of 1000000000 KV cache blocks take 15258\.8 GiB of host memory"):
        engine(FEW, variant="mem-kv")


REFUSED = {
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
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_pages_in_host_memory_do_not_work_with_is_refused_in_one_sentence(name, variant):
    changes, sentence = REFUSED[name]
    if variant == "mem-kv":
        sentence = sentence.replace("mem-v", "mem-kv").replace("its values", "its keys and values").replace("the values", "the keys and values")
    assert support.engine_refusal(support.EngineFacts(variant=variant)) is None
    assert support.engine_refusal(support.EngineFacts(**{"variant": variant, **changes})) == sentence


def test_blocks_of_several_pages_are_refused_with_keys_on_the_host():
    sentence = "variant 'mem-kv' works with blocks of 16 tokens, and these have 64: set --block-size to 16, or set variant to 'fast'"
    assert support.engine_refusal(support.EngineFacts(variant="mem-kv", block_size=64)) == sentence
    assert support.engine_refusal(support.EngineFacts(variant="mem-kv", block_size=16)) is None
    # Where vLLM itself has chosen the size.
    with pytest.raises(UnsupportedError) as error:
        engine(FEW, variant="mem-kv", block_size=64)
    assert str(error.value) == sentence


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


def test_others_are_left_a_twentieth_of_the_host_memory_and_four_gib_at_least():
    assert affordable_blocks(GIB, 400 * GIB, 1, None) == 380
    assert affordable_blocks(GIB, 80 * GIB, 1, None) == 76
    assert affordable_blocks(GIB, 40 * GIB, 2, None) == 18
    assert affordable_blocks(GIB, 3 * GIB, 1, None) == 0
