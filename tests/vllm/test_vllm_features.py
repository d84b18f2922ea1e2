"""What vLLM does around attention: drafts, several samples of one prompt, sleep, connectors, parallelism. Each is correct, or refused in one sentence."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from mini_engine import MiniEngine, Request
from vllm.model_executor.layers.attention import Attention

from kvskim.engines.vllm import facts, probe
from kvskim.engines.vllm.backend import SkimBackend
from kvskim.engines.vllm.report import start_block
from kvskim.errors import UnsupportedError
from kvskim.layout import PAGE_TOKENS
from kvskim.ops.step import decode_step

ALL = {"selector": "mean", "rule": "budget", "budget": 1.0}
FEW = {"selector": "minmax", "rule": "budget", "budget_pages": 6}


pytestmark = pytest.mark.usefixtures("quiet")


def run(engine, scheduled, **options):
    """A step whose outputs must be those of full attention, computed from the text of each request and not from any cache."""
    before = {id(request): request.computed for request, _ in scheduled}
    outputs = engine.step(scheduled, **options)
    for row, (request, count) in zip(outputs, sorted(scheduled, key=lambda item: item[1])):
        for layer, actual in enumerate(row):
            torch.testing.assert_close(actual, engine.expected(request, layer, before[id(request)], count), atol=2e-5, rtol=2e-5)
    return outputs


def pages_of(engine, request):
    per_block = engine.block_size // PAGE_TOKENS
    return torch.tensor([request.blocks[p // per_block] * per_block + p % per_block for p in range(request.computed // PAGE_TOKENS)])


def assert_true_records(engine, *requests):
    for request in requests:
        assert probe.untrue_records(engine.state, pages_of(engine, request)) == dict.fromkeys(engine.state.layers, 0)


# Speculative decoding


def test_speculation_without_a_draft_model_leaves_the_model_sparse():
    """With n-gram speculation vLLM enters the model itself as its own draft model."""

    class Engine(MiniEngine):
        def make_config(self, additional, max_rows, speculative):
            config = super().make_config(additional, max_rows, speculative)
            speculative.draft_model_config = speculative.target_model_config = config.model_config
            return config

    engine = Engine(FEW, speculative=SimpleNamespace(method="ngram"))
    assert engine.state.dense == {}
    assert list(engine.state.layers) == ["model.layers.0.attn", "model.layers.1.attn"]


def test_a_model_that_is_its_own_draft_configuration_is_no_draft():
    model = SimpleNamespace(runner_type="generate")
    config = SimpleNamespace(
        model_config=model, speculative_config=SimpleNamespace(draft_model_config=model, target_model_config=model),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    assert not facts.is_draft_model(config)
    model.runner_type = "draft"
    assert facts.is_draft_model(config)


def test_a_draft_model_built_under_the_configuration_of_its_target_stays_dense():
    engine = MiniEngine(FEW, speculative=SimpleNamespace(method="eagle"))
    with engine.current_config():
        draft = Attention(4, 64, 0.125, 2, cache_config=engine.config.cache_config, prefix="model.layers.2.attn", attn_backend=SkimBackend)
    draft.process_weights_after_loading(torch.bfloat16)
    assert engine.state.dense == {"model.layers.2.attn": "draft model"}
    assert list(engine.state.layers) == ["model.layers.0.attn", "model.layers.1.attn"]
    assert len(engine.records_layers()) == 2


def test_draft_steps_are_not_taken_for_the_last_step():
    engine = MiniEngine(FEW, speculative=SimpleNamespace(method="eagle"))
    a, b = Request(1), Request(2)
    engine.step([(a, 160), (b, 32)])
    engine.step([(a, 1), (b, 1)])
    lengths = engine.state.last_lengths
    assert lengths.tolist() == [161, 33]
    engine.builder.build(0, engine._common([(a, 1)], 0, False), fast_build=True)
    assert engine.state.last_lengths is lengths


# Several samples of one prompt, preemption, resume


@pytest.mark.parametrize("block_size", [16, 64])
def test_samples_of_one_prompt_share_blocks_and_go_their_own_ways(block_size):
    engine = MiniEngine({**ALL, "selector": "rki4"}, block_size=block_size)
    first = Request(1)
    run(engine, [(first, 200)])
    shared = 200 // block_size
    second = Request(1, computed=shared * block_size, blocks=first.blocks[:shared])
    run(engine, [(second, 200 - shared * block_size)])
    assert second.blocks[shared] != first.blocks[shared]
    for _ in range(40):
        run(engine, [(first, 1), (second, 1)])
    assert_true_records(engine, first, second)


def test_a_prompt_that_another_one_fills_in_the_same_step_does_not_read_records_ahead(monkeypatch):
    """The prefix cache gives blocks away in the step that fills them: all but the last token of the second prompt are in those of the first."""
    engine = MiniEngine({**FEW, "selector": "rki4", "full_pages": 8})
    for layer in engine.state.layers.values():
        layer.settings = replace(layer.settings, overlap=True)  # as with the CUDA kernels
    settled, attended = [], []

    def step(settings, *tensors, **buffers):
        decode_step(settings, *tensors, **buffers)
        settled.append(settings.settled)
        attended.append(buffers["buffers"].pages[0].clone())

    monkeypatch.setattr("kvskim.engines.vllm.state.decode_step", step)
    first, second, other = Request(1), Request(1, computed=192), Request(2)
    engine.grow(first, 193)
    second.blocks = first.blocks[:12]
    in_one_step = engine.step([(first, 193), (second, 1)])[0]
    assert settled == [False, False]
    engine.step([(other, 192)])
    again = Request(1, computed=192, blocks=first.blocks[:12])
    for alone, at_once in zip(engine.step([(again, 1)])[0], in_one_step):
        assert torch.equal(alone, at_once)
    assert settled == [False, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(attended[:2], attended[2:]))
    engine.step([(again, 1), (other, 1)])
    assert settled[4:] == [True, True]


def test_a_copied_block_brings_its_records_along():
    """Later versions copy a block that is shared in part: K, V and records alike, by whole blocks."""
    engine = MiniEngine({**ALL, "selector": "rki4"}, block_size=64)
    first = Request(1)
    run(engine, [(first, 64)])
    copy = engine.free.pop()
    for layer in (*engine.layers, *engine.records_layers()):
        layer.kv_cache[copy] = layer.kv_cache[first.blocks[0]]
    # The first 40 tokens are a hit; the rest of the block is another text.
    second = Request(1, computed=40, blocks=[copy])
    run(engine, [(second, 30)])
    run(engine, [(second, 1)])
    assert_true_records(engine, first, second)


def test_a_preempted_request_comes_back_in_other_blocks():
    engine = MiniEngine(ALL)
    a, b = Request(1), Request(2)
    run(engine, [(a, 150), (b, 90)])
    old = list(a.blocks)
    engine.release(a)
    other = Request(3)
    run(engine, [(other, 100), (b, 1)])  # takes the blocks of the preempted one
    assert set(other.blocks) & set(old)
    run(engine, [(a, 151), (b, 1), (other, 1)])
    for _ in range(20):
        run(engine, [(a, 1), (b, 1), (other, 1)])
    assert_true_records(engine, a, b, other)


# Sleep


@pytest.mark.parametrize("settings", [{**ALL, "selector": "rki4"}, {"selector": "sketch", "rule": "budget", "budget_pages": 6}])
def test_after_sleep_and_wake_up_nothing_of_the_old_cache_is_used(settings):
    """Sleep discards all cache layers, records among them, and clears the prefix cache. Tables, flags and captured tokens stay."""
    engine = MiniEngine(settings)
    request = Request(1)
    run(engine, [(request, 100)])
    tables = [{name: t.clone() for name, t in vars(layer.tables).items() if isinstance(t, torch.Tensor)} for layer in engine.state.layers.values()]
    addresses = [layer.kv_cache.data_ptr() for layer in (*engine.layers, *engine.records_layers())]
    engine.release(request)
    for layer in engine.layers:
        layer.kv_cache.fill_(torch.nan)  # the same addresses, with whatever is there
    for layer in engine.records_layers():
        layer.records.fill_(0xA5)
    assert [layer.kv_cache.data_ptr() for layer in (*engine.layers, *engine.records_layers())] == addresses
    for layer in engine.layers:
        layer.process_weights_after_loading(torch.bfloat16)  # as after a reload of weights
    assert len(engine.records_layers()) == 2
    run(engine, [(request, 100)])
    for before, layer in zip(tables, engine.state.layers.values()):
        assert all(torch.equal(before[name], getattr(layer.tables, name)) for name in before)
    if settings["selector"] == "rki4":
        for _ in range(20):
            run(engine, [(request, 1)])
        assert_true_records(engine, request)


# KV connectors


def connector(name, **extra):
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=extra.pop("module", None), kv_connector_extra_config=extra)


@pytest.mark.parametrize("name", ["OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_blocks_that_a_connector_brings_back_have_their_records(name):
    engine = MiniEngine({**FEW, "selector": "rki4"}, block_size=64, connector=connector(name))
    first = Request(1)
    engine.step([(first, 640)])
    (expected,) = engine.step([(first, 1)])
    caches = (*engine.layers, *engine.records_layers())
    host = [layer.kv_cache[first.blocks[:10]].clone() for layer in caches]  # a connector stores whole blocks of every cache layer
    engine.release(first)
    engine.step([(Request(2), 700)])
    back = Request(1, computed=640, blocks=[engine.free.pop() for _ in range(11)])
    for layer, blocks in zip(caches, host):
        layer.kv_cache[back.blocks[:10]] = blocks
    (actual,) = engine.step([(back, 1)])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))
    assert_true_records(engine, back)


@pytest.mark.parametrize(("given", "word"), [
    (connector("NixlConnector"), "NixlConnector"), (connector("LMCacheConnectorV1"), "LMCacheConnectorV1"),
    (connector("OffloadingConnector", spec_name="TieringOffloadingSpec"), "TieringOffloadingSpec"),
])
def test_other_connectors_are_refused(given, word):
    with pytest.raises(UnsupportedError, match=word):
        MiniEngine(FEW, connector=given)
    assert MiniEngine({**FEW, "on_unsupported": "dense"}, connector=given).state.layers == {}


def test_connectors_of_kvskim_and_for_measurements_are_taken():
    for given in (connector("DecodeBenchConnector"), connector("FillConnector", module="kvskim.bench.e2e_fill")):
        assert len(MiniEngine({"selector": "sketch"}, connector=given).state.layers) == 2


def test_stored_blocks_and_calibration_on_first_prompts_do_not_go_together():
    given = connector("OffloadingConnector")
    with pytest.raises(UnsupportedError, match="kvskim calibrate"):
        MiniEngine({"selector": "sketch"}, connector=given)
    # With `on_unsupported: dense` too: the layers have their records by then.
    with pytest.raises(UnsupportedError, match="kvskim calibrate"):
        MiniEngine({"selector": "sketch", "on_unsupported": "dense"}, connector=given)
    assert MiniEngine({"selector": "rki4"}, connector=given).state.calibrator is None


# The type of the cache


@pytest.mark.parametrize("engine", [dict(cache_dtype="fp8"), dict(quant_config=object()), dict(cache_dtype="float16")])
def test_fault_07_a_cache_of_another_type_is_refused_by_the_layer(engine):
    """Also where the checkpoint asks for it and the engine's own setting is still "auto"."""
    with pytest.raises(UnsupportedError, match=r"KV cache of type (fp8|float16)"):
        MiniEngine(FEW, **engine)


# Windows


def test_fault_09_layers_with_blocks_of_their_own_are_refused():
    windows = (None, 512)
    with pytest.raises(UnsupportedError, match=r"1 sliding-window.*--disable-hybrid-kv-cache-manager"):
        MiniEngine(FEW, windows=windows, separate_blocks=True)
    left_dense = MiniEngine({**FEW, "on_unsupported": "dense"}, windows=windows, separate_blocks=True)
    assert left_dense.state.layers == {}
    assert left_dense.records_layers() == []
    assert "--disable-hybrid-kv-cache-manager" in left_dense.state.dense["model.layers.0.attn"]
    taken = MiniEngine(FEW, windows=windows, separate_blocks=False)
    assert list(taken.state.layers) == ["model.layers.0.attn"]
    assert "dense        1 layers (model.layers.1.attn): sliding window" in "\n".join(start_block(taken.state))
    assert len(MiniEngine(FEW, separate_blocks=True).state.layers) == 2


# Tensor and pipeline parallelism


class OneHead(MiniEngine):
    """A rank that has one kv head."""

    num_kv_heads, group = 1, 4


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_one_kv_head_on_a_rank(block_size):
    engine = OneHead({**ALL, "selector": "rki4"}, block_size=block_size)
    a, b = Request(1), Request(2)
    run(engine, [(a, 150)])
    run(engine, [(a, 1), (b, 37)])
    for _ in range(20):
        run(engine, [(a, 1), (b, 1)], pad_rows=1)
    assert_true_records(engine, a, b)


def test_a_later_part_of_a_pipeline_has_the_layers_of_its_names():
    engine = MiniEngine({**FEW, "dense_layers": [5]}, num_layers=3, first_layer=4)
    assert [layer.index for layer in engine.state.layers.values()] == [4, 6]
    assert engine.state.dense == {"model.layers.5.attn": "dense_layers"}
    request = Request(1)
    engine.step([(request, 200)])
    engine.step([(request, 1)])
    assert all((layer.counts[0] == 6).all() for layer in engine.state.layers.values())


def test_the_longest_request_fits():
    from mini_engine import MAX_TOKENS

    engine = MiniEngine(ALL, num_layers=1, block_size=64)
    request = Request(1)
    run(engine, [(request, MAX_TOKENS - 2)])
    run(engine, [(request, 1)])
    run(engine, [(request, 1)])
    assert request.computed == MAX_TOKENS
