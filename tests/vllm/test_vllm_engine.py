"""The backend in a small engine: what the rows attend, what the records hold, in whatever order requests come and go."""

import random

import pytest
import torch
from mini_engine import MiniEngine, Request
from vllm.v1.attention.backend import AttentionCGSupport

from kvskim.engines.vllm import probe
from kvskim.engines.vllm.metadata import SkimMetadata, SkimMetadataBuilder
from kvskim.layout import PAGE_TOKENS

ALL = {"selector": "mean", "rule": "budget", "budget": 1.0}
FEW = {"selector": "minmax", "rule": "budget", "budget_pages": 6}


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def check_step(engine, requests, outputs, before):
    """Outputs of a step are those of full attention."""
    order = sorted(range(len(requests)), key=lambda i: requests[i][1])
    for output, i in zip(outputs, order):
        request, count = requests[i]
        for layer, actual in enumerate(output):
            close(actual, engine.expected(request, layer, before[i], count, engine.layers[0].impl.logits_soft_cap))


def run(engine, requests, **options):
    before = [request.computed for request, _ in requests]
    outputs = engine.step(requests, **options)
    check_step(engine, requests, outputs, before)
    return outputs


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_all_pages_selected_is_full_attention(block_size, softcap):
    engine = MiniEngine(ALL, block_size=block_size, softcap=softcap)
    a, b = Request(1), Request(2)
    run(engine, [(a, 150)])
    run(engine, [(a, 1), (b, 37)])
    run(engine, [(a, 1), (b, 1)])
    run(engine, [(a, 1), (b, 1)], pad_rows=2)
    run(engine, [(a, 1), (b, 60)])
    for _ in range(20):
        run(engine, [(a, 1), (b, 1)], pad_rows=1)


def test_decode_rows_attend_few_pages_and_the_right_ones():
    engine = MiniEngine({**FEW, "selector": "rki4"})
    request = Request(3)
    engine.step([(request, 640)])
    for _ in range(5):
        position = request.computed
        (outputs,) = engine.step([(request, 1)])
        for layer, state in zip(engine.layers, engine.state.layers.values()):
            assert (state.counts[0] == 6).all()
            assert (state.covered[0] > 0.3).all()
            index = engine.layers.index(layer)
            expected = engine.expected(request, index, position, 1)
            # Few pages carry most of the mass, so the result is near, and not equal.
            assert not torch.equal(outputs[index], expected)
            cosine = torch.cosine_similarity(outputs[index].flatten(), expected.flatten(), 0)
            assert cosine > 0.8


def test_fault_24_decode_rows_are_sparse_in_mixed_steps_too():
    alone, mixed = MiniEngine(FEW), MiniEngine(FEW)
    for engine in (alone, mixed):
        request, other = Request(3), Request(4)
        engine.step([(request, 640)])
        before = engine.dense_tokens()
        if engine is alone:
            (first, *_), dense = engine.step([(request, 1)]), 0
        else:
            (first, *_), dense = engine.step([(request, 1), (other, 100)]), 100
        assert engine.dense_tokens() - before == dense * len(engine.layers)
        for state in engine.state.layers.values():
            assert (state.counts[0] == 6).all()
        if engine is alone:
            reference = first
        else:
            for a, b in zip(first, reference):
                assert torch.equal(a, b)


def test_a_one_token_prompt_and_a_one_token_rest_of_a_prompt_are_decode_rows():
    engine = MiniEngine(ALL)
    a, b = Request(5), Request(6)
    run(engine, [(a, 1)])
    run(engine, [(b, 63), (a, 1)])
    run(engine, [(b, 1), (a, 1)])
    assert isinstance(engine.metadata, SkimMetadata)
    assert engine.metadata.decode_rows == 2
    assert engine.metadata.rest is None


def test_rows_with_several_query_tokens_are_dense():
    engine = MiniEngine(FEW)
    request = Request(7)
    run(engine, [(request, 400)])
    before = engine.dense_tokens()
    run(engine, [(request, 3)])
    assert engine.dense_tokens() - before == 3 * len(engine.layers)


def test_rejected_speculative_tokens_do_not_leave_their_mark():
    engine = MiniEngine(ALL)
    request = Request(8)
    run(engine, [(request, 29)])
    run(engine, [(request, 5)])  # completes page 1, with tokens that are then rejected
    request.computed = 30
    request.seed = 9  # from here on the text is another
    old = engine.tokens(8, 0, "key", 0, 30)
    engine.step([(request, 1)])
    engine.step([(request, 1)])
    stored = engine.layers[0].kv_cache[request.blocks[1], 0]
    assert torch.equal(stored[:14], old[16:30])
    assert torch.equal(stored[14:], engine.tokens(9, 0, "key", 30, 2))
    assert probe.untrue_records(engine.state, torch.tensor([request.blocks[1]])) == dict.fromkeys(engine.state.layers, 0)


def complete_pages(engine, requests):
    pages = []
    per_block = engine.block_size // PAGE_TOKENS
    for request in requests:
        for page in range(request.computed // PAGE_TOKENS):
            pages.append(request.blocks[page // per_block] * per_block + page % per_block)
    return torch.tensor(pages, dtype=torch.int64)


@pytest.mark.parametrize("block_size", [16, 64])
def test_records_of_live_pages_are_true_after_anything(block_size):
    """Faults 1, 2, 10, 23: prefix hits, preemption, aborts, block reuse, chunked prefill; every live page has the record of its keys."""
    engine = MiniEngine({"selector": "rki4", "rule": "threshold", "tau": 0.02, "min_pages": 2}, block_size=block_size, num_blocks=640 // block_size)
    rng = random.Random(block_size)
    running = []
    target = {}
    for step in range(60):
        while len(running) < 3 and len(engine.free) * block_size > 200:
            # Few texts and few lengths: new requests look like old ones.
            request = Request(rng.choice([1, 2]))
            target[id(request)] = rng.choice([48, 49, 96, 100])
            running.append(request)
        scheduled = []
        for request in list(running):
            left = target[id(request)] - request.computed
            if left <= 0 or rng.random() < 0.08:
                engine.release(request)
                running.remove(request)
                continue
            scheduled.append((request, 1 if rng.random() < 0.6 else min(left, rng.choice([7, 16, 33]))))
        needed = sum(-(-(r.computed + n) // block_size) - len(r.blocks) for r, n in scheduled)
        while scheduled and needed > len(engine.free):
            victim, _ = scheduled.pop()
            engine.release(victim)  # preempted: computed again from its first token
            needed = sum(-(-(r.computed + n) // block_size) - len(r.blocks) for r, n in scheduled)
        if scheduled:
            engine.step(scheduled, pad_rows=2 if all(n == 1 for _, n in scheduled) and step % 2 else 0)
    pages = complete_pages(engine, running)
    assert len(pages) > 0
    assert probe.untrue_records(engine.state, pages) == dict.fromkeys(engine.state.layers, 0)


def test_untrue_records_are_found():
    engine = MiniEngine(ALL)
    request = Request(1)
    engine.step([(request, 64)])
    state = next(iter(engine.state.layers.values()))
    page = request.blocks[2]
    state.records.records[page, 1, 7] ^= 1
    found = probe.untrue_records(engine.state, complete_pages(engine, [request]))
    assert found[state.name] == 1
    assert sum(found.values()) == 1


def test_a_record_of_either_encoder_is_true(monkeypatch):
    """On a GPU steps of few and of many tokens are recorded by kernels that differ in codes next to a boundary."""
    engine = MiniEngine(ALL)
    request = Request(1)
    engine.step([(request, 64)])
    state = next(iter(engine.state.layers.values()))
    real = probe.encode

    def encode(*arguments, encoder, **keywords):
        real(*arguments, **keywords)
        if encoder == "many":
            arguments[4][..., 3] ^= 1

    monkeypatch.setattr(probe, "encoders", lambda *_: ("few", "many"))
    monkeypatch.setattr(probe, "encode", encode)
    pages = complete_pages(engine, [request])
    state.records.records[pages[1], 0, 3] ^= 1
    assert sum(probe.untrue_records(engine.state, pages).values()) == 0
    state.records.records[pages[2], 0, 3] ^= 2
    assert sum(probe.untrue_records(engine.state, pages).values()) == 1


def test_fault_10_a_full_prefix_hit_with_one_new_token_finds_its_records():
    engine = MiniEngine(FEW)
    first = Request(1)
    engine.step([(first, 480)])
    (expected,) = engine.step([(first, 1)])
    second = Request(1, computed=480, blocks=[*first.blocks[:30], engine.free.pop()])
    (actual,) = engine.step([(second, 1)])
    for a, b in zip(actual, expected):
        assert torch.equal(a, b)
    assert all((state.counts[0] == 6).all() for state in engine.state.layers.values())


def test_fault_1_a_page_gets_its_record_with_its_last_key_and_not_before():
    engine = MiniEngine(ALL)
    request = Request(1)
    engine.step([(request, 30)])
    records = next(iter(engine.state.layers.values())).records.records
    page = request.blocks[1]
    untouched = records[page].clone()
    engine.step([(request, 1)])
    assert torch.equal(records[page], untouched)
    engine.step([(request, 1)])
    assert not torch.equal(records[page], untouched)
    assert probe.untrue_records(engine.state, torch.tensor([page])) == dict.fromkeys(engine.state.layers, 0)


def test_batches_larger_than_the_workspace_run_in_parts(monkeypatch):
    whole, parts = [], []
    for outputs, rows in ((whole, 8), (parts, 2)):
        monkeypatch.setattr("kvskim.engines.vllm.state.workspace_rows", lambda *_, rows=rows: rows)
        engine = MiniEngine(FEW)
        assert engine.state.rows == rows
        requests = [Request(seed) for seed in range(5)]
        for request in requests:
            engine.step([(request, 160 + 16 * request.seed)])
        for row in engine.step([(request, 1) for request in requests], pad_rows=2):
            outputs.extend(row)
        outputs.extend(state.counts[:7].clone() for state in engine.state.layers.values())
    assert all(torch.equal(a, b) for a, b in zip(whole, parts))


def test_dense_layers_and_sparse_layers_share_a_step():
    engine = MiniEngine({**FEW, "dense_layers": [0]}, num_layers=3, windows=(None, 2048, None))
    assert list(engine.state.layers) == ["model.layers.2.attn"]
    assert engine.state.dense == {"model.layers.0.attn": "dense_layers", "model.layers.1.attn": "sliding window"}
    assert len(engine.records_layers()) == 1
    a, b = Request(1), Request(2)
    engine.step([(a, 320)])
    # The stand-in for FlashAttention checks that each call has the schedule of its own rows.
    before = engine.dense_tokens()
    rows = engine.step([(a, 1), (b, 50)])
    assert engine.dense_tokens() - before == 2 * 51 + 50
    close(rows[0][0], engine.expected(a, 0, 320, 1))
    close(rows[1][2], engine.expected(b, 2, 0, 50))
    rows = engine.step([(a, 1), (b, 1)], pad_rows=0)
    close(rows[0][1], engine.expected(a, 1, 321, 1))


def test_no_schedule_is_made_where_no_layer_reads_it():
    engine = MiniEngine(FEW)
    request = Request(1)
    engine.step([(request, 64)])
    made = engine.builder.schedules_made
    engine.step([(request, 1)])
    assert engine.builder.schedules_made == made


def test_with_all_layers_dense_the_builder_is_vllms_own():
    engine = MiniEngine({"dense_layers": 2})
    assert not engine.state.layers
    assert not engine.records_layers()
    request = Request(1)
    run(engine, [(request, 40)])
    run(engine, [(request, 1)])
    assert not isinstance(engine.metadata, SkimMetadata)
    assert SkimMetadataBuilder.get_cudagraph_support(engine.config, None) == AttentionCGSupport.ALWAYS
    assert engine.builder.use_cascade_attention() is True


def test_cuda_graph_support():
    engine = MiniEngine(FEW)
    assert SkimMetadataBuilder.get_cudagraph_support(engine.config, None) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert engine.builder.reorder_batch_threshold == 1
    assert engine.builder.use_cascade_attention() is False
    speculating = MiniEngine(FEW, speculative=object())
    assert SkimMetadataBuilder.get_cudagraph_support(speculating.config, None) == AttentionCGSupport.UNIFORM_BATCH


def test_metadata_of_another_builder_is_refused():
    engine = MiniEngine(FEW)
    request = Request(1)
    engine.step([(request, 20)])
    layer = engine.layers[0]
    out = torch.zeros(1, 4, 64)
    with pytest.raises(TypeError, match=r"model\.layers\.0\.attn"):
        layer.impl.forward(layer, out, None, None, layer.kv_cache, object(), out)


def test_fault_18_all_is_allocated_in_the_profiling_run():
    engine = MiniEngine({})  # the sketch, which also needs room for captured tokens
    state = engine.state
    buffers = {name: t.data_ptr() for w in state.workspaces.values() for name, t in vars(w).items() if isinstance(t, torch.Tensor)}
    assert buffers
    captured = state.calibrator.bytes
    assert captured > 0
    request = Request(1)
    engine.step([(request, 100)])
    engine.step([(request, 1)])
    after = {name: t.data_ptr() for w in state.workspaces.values() for name, t in vars(w).items() if isinstance(t, torch.Tensor)}
    assert after == buffers
    assert state.calibrator.bytes == captured


def test_fault_22_caches_may_be_bound_again():
    engine = MiniEngine(ALL)
    request = Request(1)
    run(engine, [(request, 70)])
    for layer in engine.records_layers():
        layer.kv_cache = []
        assert layer.records is None
    engine._bind(160)
    engine.release(request)
    run(engine, [(request, 70)])
    run(engine, [(request, 1)])
    for layer in engine.records_layers():
        layer.bind_kv_cache(layer.kv_cache.clone())
    run(engine, [(request, 1)])


def test_activity_is_measured(caplog):
    from kvskim.engines.vllm import report

    engine = MiniEngine(FEW)
    assert report.last_step(engine.state) is None
    a, b = Request(1), Request(2)
    engine.step([(a, 160), (b, 32)])
    assert report.last_step(engine.state) is None
    engine.step([(a, 1), (b, 1)], pad_rows=3)
    seen = report.last_step(engine.state)["model.layers.1.attn"]
    # 11 pages of which 6, and 3 pages of which all, for two kv heads.
    assert (seen.total, seen.count) == (2 * (11 + 3), 4)
    assert seen.attended == 2 * (6 + 3)
    assert 0.5 < seen.mean_covered <= 1.0
    assert (seen + seen).share == seen.share


def test_start_block_says_what_is_sparse():
    from kvskim.engines.vllm.report import start_block

    engine = MiniEngine({**FEW, "dense_layers": [1]}, num_layers=3)
    text = "\n".join(start_block(engine.state))
    for part in ("2 of 3 layers (0, 2)", "minmax", "256 bytes per page", "budget: 6 pages", "torch", "dense_layers", "8 of 8 rows x 128 pages"):
        assert part in text
    assert len(text.splitlines()) <= 10
    silent = "\n".join(start_block(MiniEngine({"dense_layers": 2}).state))
    assert "NO LAYER" in silent


def test_another_scorer_than_the_chosen_kernels_is_named(monkeypatch):
    """By the start block where the selector or the type of the queries decides, and when records are bound where their number does."""
    from kvskim.engines.vllm.report import start_block
    from kvskim.ops.dispatch import Choice

    engine = MiniEngine({**FEW, "selector": "rki4"})
    state, said = engine.state, []
    monkeypatch.setattr(state, "log", said.append)
    state.kernels = Choice("cuda", "a reason")
    layer = next(iter(state.layers.values()))
    for pages in (16, 17):
        layer.records.records = torch.zeros(pages, 1, layer.records.record_bytes, dtype=torch.uint8)
        layer.records.when_bound()
    assert len(said) == 1
    assert said[0].startswith("17 pages")
    assert said[0].endswith("pages are scored by triton")
    assert "scored by" not in "\n".join(start_block(state))
    engine = MiniEngine(FEW)
    engine.state.kernels = Choice("cuda", "a reason")
    for dtype, other in ((torch.bfloat16, False), (torch.float16, True)):
        engine.state.query_dtype = dtype
        assert ("pages are scored by triton" in "\n".join(start_block(engine.state))) == other


def test_fault_29_metrics_show_that_sparse_attention_ran(monkeypatch):
    from kvskim.engines.vllm import sampler
    from kvskim.metrics import SkimMetrics

    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    engine = MiniEngine(FEW)
    monkeypatch.setattr(sampler, "SAMPLE_SECONDS", 0.0)
    engine.state.metrics = engine.state.sampler._metrics = SkimMetrics(registry)
    a, b = Request(1), Request(2)
    engine.step([(a, 160), (b, 32)])
    engine.step([(a, 1), (b, 1)], pad_rows=3)
    captured = engine.builder.build_for_cudagraph_capture(engine._common([(a, 1), (b, 1)], 0, True))
    assert captured.decode_rows == 2, "a step that is only captured is built like others, and not counted"
    for _ in range(2):
        engine.step([(a, 1), (b, 1)])
    value = registry.get_sample_value
    assert value("kvskim_sparse_steps_total") == 3
    assert value("kvskim_dense_rows_total", {"reason": "several_query_tokens"}) == 2
    # One step: 11 pages of which 6, and 3 pages of which all, for two kv heads in two layers; the next sample is still under way.
    assert (value("kvskim_attended_pages_total"), value("kvskim_pages_total"), value("kvskim_heads_total")) == (4 * 9, 4 * 14, 8)
    assert value("kvskim_full_heads_total") == 4
    assert 0.5 < value("kvskim_covered_mass_total") / value("kvskim_heads_total") <= 1.0


def test_layers_left_dense_on_demand_are_counted(monkeypatch):
    from kvskim.engines.vllm import state
    from kvskim.metrics import SkimMetrics

    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    mine = SkimMetrics(registry)
    monkeypatch.setattr(state, "metrics", lambda: mine)
    engine = MiniEngine({**FEW, "on_unsupported": "dense"}, num_layers=3, attn_type="encoder_only")
    assert len(engine.state.dense) == 3
    (family,) = [f for f in registry.collect() if f.name == "kvskim_unsupported"]
    assert [s.value for s in family.samples if s.name.endswith("_total")] == [3]


def test_fault_20_an_allocation_that_fails_stops_the_engine(monkeypatch):
    from kvskim.engines.vllm import state

    tried = []

    def fail(**_):
        tried.append(1)
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(state, "Workspace", fail)
    with pytest.raises(torch.OutOfMemoryError):
        MiniEngine(FEW)
    assert len(tried) == 1
