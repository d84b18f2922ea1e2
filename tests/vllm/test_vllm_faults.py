"""Kinds of faults that show in an engine only: each test fails where its kind comes back."""

import pytest
import torch
from mini_engine import MAX_TOKENS, MiniEngine, Request

from kvskim.engines.vllm import probe, state
from kvskim.layout import PAGE_TOKENS

FEW = {"selector": "rki4", "rule": "budget", "budget_pages": 6}


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def attend_pages(engine, request, position, pages, layer, softcap):
    """Attention of one token over some of its pages, ``[Hq, D]``, from the text of the request."""
    tokens = torch.tensor([page * PAGE_TOKENS + offset for page in pages for offset in range(PAGE_TOKENS) if page * PAGE_TOKENS + offset <= position])
    q = engine.tokens(request.seed, layer, "query", position, 1)[0]
    k, v = (engine.tokens(request.seed, layer, kind, 0, position + 1)[tokens].repeat_interleave(engine.group, 1) for kind in ("key", "value"))
    logits = torch.einsum("hd,thd->ht", q, k) * engine.scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return torch.einsum("ht,thd->hd", logits.softmax(-1), v)


def test_fault_06_soft_cap_is_applied_to_the_few_pages_that_are_selected():
    engine = MiniEngine(FEW, num_layers=1, softcap=2.0)
    request = Request(3)
    engine.step([(request, 640)])
    ((out,),) = engine.step([(request, 1)])
    (workspace,) = engine.state.workspaces.values()
    pages = workspace.buffers(1).pages[0]
    layer = next(iter(engine.state.layers.values()))
    for head in range(engine.num_kv_heads):
        chosen = pages[head, : layer.counts[0, head]].tolist()
        assert len(chosen) == 6
        queries = slice(head * engine.group, (head + 1) * engine.group)
        capped, plain = (attend_pages(engine, request, 640, chosen, 0, softcap)[queries] for softcap in (2.0, 0.0))
        torch.testing.assert_close(out[0, queries], capped, atol=2e-5, rtol=2e-5)
        assert (out[0, queries] - plain).abs().max() > 1e-2


def test_fault_09_blocks_that_vllm_splits_for_its_kernels_keep_their_records():
    """The cache and the block table are in kernel blocks of 32 tokens, the records in the blocks of 128 that vLLM manages."""
    plain, split = (MiniEngine(FEW, block_size=32) for _ in range(2))
    for layer in split.records_layers():
        layer.kv_cache = layer.kv_cache.reshape(-1, 8, *layer.kv_cache.shape[2:])
    results = []
    for engine in (plain, split):
        a, b = Request(1), Request(2)
        engine.step([(a, 640)])
        engine.step([(a, 1), (b, 300)])
        results.append([row for _ in range(20) for row in engine.step([(a, 1), (b, 1)])])
        places = [(r.blocks[p // 2], p % 2) for r in (a, b) for p in range(r.computed // PAGE_TOKENS)]
        pages = torch.tensor([block * 2 + page for block, page in places])
        assert probe.untrue_records(engine.state, pages) == dict.fromkeys(engine.state.layers, 0)
    assert all(torch.equal(x, y) for left, right in zip(*results) for x, y in zip(left, right))


def test_fault_09_layers_of_another_group_have_metadata_of_their_own():
    """vLLM makes a builder for each group of layers: one without sparse layers is vLLM's own, whatever the other does."""
    from kvskim.engines.vllm.metadata import SkimMetadata, SkimMetadataBuilder

    engine = MiniEngine(FEW, num_layers=2, windows=(None, 64))
    names = [layer.layer_name for layer in engine.layers]
    spec = engine.layers[0].get_kv_cache_spec(engine.config)
    sparse, dense = (SkimMetadataBuilder(spec, [name], engine.config, torch.device("cpu")) for name in names)
    request = Request(1)
    engine.step([(request, 200)])
    common = engine._common([(request, 1)], 0, False)
    assert sparse.build(0, common).decode_rows == 1
    lengths = engine.state.last_lengths
    other = Request(2)
    engine.grow(other, 50)
    assert not isinstance(dense.build(0, engine._common([(other, 50)], 0, False)), SkimMetadata)
    assert engine.state.last_lengths is lengths
    assert dense.use_cascade_attention() is True
    assert sparse.use_cascade_attention() is False


def test_fault_18_nothing_is_allocated_after_the_profiling_run():
    engine = MiniEngine(FEW, num_layers=1)

    def held():
        layer = next(iter(engine.state.layers.values()))
        owners = [*engine.state.workspaces.values(), layer.tables, layer]
        return {(type(o).__name__, name): (t.data_ptr(), t.nbytes) for o in owners for name, t in vars(o).items() if isinstance(t, torch.Tensor)}

    before = held()
    assert len(before) > 6
    rows = [Request(seed) for seed in range(1, 9)]
    for request in rows:
        engine.step([(request, 200)])
    for count in (1, 8, 3):
        engine.step([(request, 1) for request in rows[:count]], pad_rows=8 - count)
    assert held() == before


@pytest.mark.parametrize("tokens", [262_144, 1_048_576])
def test_fault_19_a_long_context_starts_and_decodes_like_a_short_one(monkeypatch, tokens):
    def results():
        engine = MiniEngine(FEW, num_layers=1, max_rows=2)
        request = Request(1)
        engine.step([(request, 500)])
        return engine.state.page_capacity, [engine.step([(request, 1)])[0][0] for _ in range(3)]

    short, expected = results()
    assert short == MAX_TOKENS // PAGE_TOKENS
    monkeypatch.setattr(state.SkimState, "max_rows", property(lambda self: 2))
    make = MiniEngine.make_config

    def longer(self, *arguments):
        config = make(self, *arguments)
        config.model_config.max_model_len = tokens
        return config

    monkeypatch.setattr(MiniEngine, "make_config", longer)
    long, actual = results()
    assert long == tokens // PAGE_TOKENS
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


def test_fault_20_an_error_in_a_step_is_raised_and_changes_nothing(monkeypatch):
    """One failure is not caught, does not turn another path on, and is not tried again."""
    engine = MiniEngine(FEW)
    request = Request(1)
    engine.step([(request, 320)])
    kernels, tried = engine.state.kernels, []
    real = state.decode_step

    def fail(*_, **__):
        tried.append(1)
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(state, "decode_step", fail)
    before = engine.dense_tokens()
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine.step([(request, 1)])
    assert (len(tried), engine.dense_tokens()) == (1, before)
    monkeypatch.setattr(state, "decode_step", real)
    engine.step([(request, 1)])
    assert engine.state.kernels is kernels
    assert engine.dense_tokens() == before
    assert all((layer.counts[0] == 6).all() for layer in engine.state.layers.values())


def test_fault_27_requests_of_few_pages_are_attended_whole_beside_long_ones():
    engine = MiniEngine({"selector": "rki4", "rule": "threshold", "tau": 0.4, "min_pages": 8})
    short, long = Request(1), Request(2)
    engine.step([(short, 8 * PAGE_TOKENS), (long, 600)])
    (out, _) = engine.step([(short, 1), (long, 1)])
    for index, layer in enumerate(engine.state.layers.values()):
        # One first and one last page, and seven in between: no more than the rule takes at least.
        assert (layer.counts[0] == 9).all()
        assert (layer.counts[1] < 15).all()
        torch.testing.assert_close(out[index], engine.expected(short, index, 8 * PAGE_TOKENS, 1), atol=2e-5, rtol=2e-5)
