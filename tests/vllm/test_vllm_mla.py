"""Latent attention in the small engine: dense where all pages are selected, sparse in decode rows, records true, refused where it can't be."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from mini_engine import Request
from mla_mini_engine import HEADS, LATENT, MlaMiniEngine, expand, head_queries, latents
from vllm.config import VllmConfig, set_current_vllm_config

from kvskim.config import SkimConfig
from kvskim.engines.vllm import calibrate, parallel, probe
from kvskim.engines.vllm.calibration_source import model_settings
from kvskim.engines.vllm.check import attention_backend, has_latent_attention
from kvskim.engines.vllm.facts import engine_facts
from kvskim.engines.vllm.mla import SkimMlaBackend
from kvskim.engines.vllm.mla_layout import latent_views
from kvskim.engines.vllm.mla_metadata import SkimMlaMetadata
from kvskim.engines.vllm.report import start_block
from kvskim.engines.vllm.support import EngineFacts, mla_refusal
from kvskim.errors import UnsupportedError
from kvskim.ops.attend_plan import attend_scratch_sizes
from kvskim.ops.dispatch import Choice

ALL = {"selector": "mean", "rule": "budget", "budget": 1.0}
FEW = {"selector": "rki4", "rule": "budget", "budget_pages": 6}


pytestmark = pytest.mark.usefixtures("quiet")


def run(engine, scheduled, **options):
    """A step whose outputs are those of full attention."""
    before = {id(r): r.computed for r, _ in scheduled}
    outputs = engine.step(scheduled, **options)
    for (request, count), row in zip(sorted(scheduled, key=lambda item: item[1]), outputs):
        for layer, actual in enumerate(row):
            torch.testing.assert_close(actual, engine.expected(request, layer, before[id(request)], count), atol=2e-4, rtol=2e-4)
    return outputs


def dense_tokens(engine):
    return sum(layer.impl.dense_tokens for layer in engine.layers)


def pages_of(engine, *requests):
    per_block = engine.block_size // 16
    places = [(r.blocks[p // per_block], p % per_block) for r in requests for p in range(r.computed // 16)]
    return torch.tensor([block * per_block + page for block, page in places])


@pytest.mark.parametrize("block_size", [16, 64])
def test_all_pages_selected_is_full_attention(block_size):
    engine = MlaMiniEngine(ALL, block_size=block_size)
    a, b = Request(1), Request(2)
    run(engine, [(a, 150)])
    run(engine, [(a, 1), (b, 37)])
    run(engine, [(a, 1), (b, 60)])
    for padding in (0, 2, 1):
        run(engine, [(a, 1), (b, 1)], pad_rows=padding)
    assert dense_tokens(engine) == 0, "vLLM's decode must not have been called"
    assert probe.untrue_records(engine.state, pages_of(engine, a, b)) == dict.fromkeys(engine.state.layers, 0)


@pytest.mark.parametrize("rule", [
    {"rule": "budget", "budget_pages": 6}, {"rule": "threshold", "tau": 0.02, "min_pages": 2}, {"rule": "coverage", "coverage": 0.6, "min_pages": 1},
])
def test_decode_rows_attend_few_pages_and_the_right_ones(rule):
    engine = MlaMiniEngine({"selector": "rki4", **rule})
    a, b = Request(3), Request(4)
    run(engine, [(a, 700)])
    run(engine, [(b, 500)])
    far = []
    for _ in range(8):
        before = a.computed
        out = engine.step([(a, 1), (b, 1)])
        counts = [layer.counts[:2, 0] for layer in engine.state.layers.values()]
        assert all((c < 25).all() for c in counts)
        if rule["rule"] == "budget":
            assert all((c == 6).all() for c in counts), "a budget counts the pages of a request, one table for all query heads"
        far += [float((out[0][i] - engine.expected(a, i, before, 1)).norm() / engine.expected(a, i, before, 1).norm()) for i in range(2)]
    # Each query looks for one token; a page table that missed it would be off by more than the value itself.
    assert sum(far) / len(far) < 0.35


def test_prefix_hits_reuse_and_preemption_keep_records_true():
    engine = MlaMiniEngine(FEW, block_size=32, num_blocks=40)
    a = Request(5)
    run(engine, [(a, 200)])
    hit = Request(5, computed=192, blocks=a.blocks[:6])  # six full blocks from the prefix cache
    engine.step([(hit, 30), (a, 1)])
    assert probe.untrue_records(engine.state, pages_of(engine, a, hit)) == dict.fromkeys(engine.state.layers, 0)
    engine.release(a, keep=6)
    other = Request(6)
    run(engine, [(other, 150)])
    for _ in range(20):
        engine.step([(other, 1), (hit, 1)])
    assert probe.untrue_records(engine.state, pages_of(engine, other, hit)) == dict.fromkeys(engine.state.layers, 0)
    engine.state.layers["model.layers.0.self_attn.attn"].records.records[other.blocks[0] * 2] ^= 1
    assert probe.untrue_records(engine.state, pages_of(engine, other))["model.layers.0.self_attn.attn"] == 1


def test_short_prefills_go_the_way_of_prefill_and_speculative_rows_are_dense():
    engine = MlaMiniEngine(FEW, speculative=SimpleNamespace(num_speculative_tokens=2))
    a, b = Request(7), Request(8)
    run(engine, [(a, 300)])
    assert dense_tokens(engine) == 0
    run(engine, [(a, 3), (b, 40)])
    assert engine.metadata.num_decodes == 1
    assert dense_tokens(engine) == 2 * 3, "rows of three query tokens are vLLM's"
    engine.step([(a, 1), (b, 1)])
    assert dense_tokens(engine) == 2 * 3
    assert isinstance(engine.metadata, SkimMlaMetadata)


def test_the_sketch_is_fitted_on_the_first_prompts(monkeypatch):
    monkeypatch.setattr(calibrate, "CAPTURE_TOKENS", 512)
    engine = MlaMiniEngine({"selector": "sketch", "rule": "budget", "budget_pages": 6})
    state = engine.state
    a, b = Request(9), Request(10)
    run(engine, [(a, 300)])
    run(engine, [(a, 1), (b, 320)])
    kept = state.calibrator._keys["model.layers.1.self_attn.attn"]
    torch.testing.assert_close(kept[:272, 0].float(), latents(9, 1)[16:288].bfloat16().float())
    torch.testing.assert_close(kept[272:, 0].float(), latents(10, 1)[16:256].bfloat16().float())
    queries = state.calibrator._queries["model.layers.1.self_attn.attn"][:68].float()
    logits = torch.einsum("qhd,td->qht", queries, latents(9, 1)[:300]) * engine.scale
    keys, _ = expand(latents(9, 1)[:300], 1)
    wanted = torch.einsum("qhd,thd->qht", head_queries(9, 1)[16:288:4], keys) * engine.scale
    assert float((logits - wanted).abs().max()) < 0.02 * float(wanted.abs().max())
    run(engine, [(a, 1), (b, 1)])
    assert int(state.ready) == 0, "one layer is fitted in a step, and until the last every page is attended"
    for _ in range(2):
        engine.step([(a, 1), (b, 1)])
    assert int(state.ready) == 1
    assert all((layer.counts[:2] == 6).all() for layer in state.layers.values())
    assert probe.untrue_records(state, pages_of(engine, a, b)) == dict.fromkeys(state.layers, 0)


class DeepseekScalingRotaryEmbedding:
    head_size, base, scaling_factor, is_neox_style = 64, 10000.0, 40.0, False

    def _compute_inv_freq(self, scaling_factor):
        assert scaling_factor == 40.0
        return 1.0 / self.base ** (torch.arange(0, 64, 2).float() / 64)


def test_later_positions_turn_the_rotary_channels_only(monkeypatch):
    from vllm.model_executor.layers import rotary_embedding

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {"a": DeepseekScalingRotaryEmbedding()})
    rotary = calibrate.vllm_rotary(576, 512)
    assert (rotary.first, rotary.interleaved) == (512, True)
    row = torch.randn(3, 576)
    turned = rotary.rotate(row, 100)
    assert torch.equal(turned[:, :512], row[:, :512])
    pairs, before = (torch.view_as_complex(t[:, 512:].reshape(3, 32, 2)) for t in (turned, row))
    angle = 100 * DeepseekScalingRotaryEmbedding()._compute_inv_freq(40.0)
    torch.testing.assert_close(pairs, before * torch.polar(torch.ones(32), angle), atol=1e-4, rtol=1e-4)
    assert calibrate.vllm_rotary(576) is None


def test_every_rank_has_the_one_latent_head(monkeypatch):
    import vllm.distributed

    engine = MlaMiniEngine(FEW)
    monkeypatch.setattr(vllm.distributed, "rank", 1)
    engine.config.parallel_config.tensor_parallel_size = 2
    assert parallel.heads_of_this_rank(engine.config) == (1, 0, 1)
    assert model_settings(engine.config.model_config)["model_type"].endswith("latent rows"), "another calibration than that of its expanded heads"


def test_all_that_decode_needs_is_made_while_vllm_loads():
    engine = MlaMiniEngine({**FEW, "dense_layers": [0]})
    state = engine.state
    assert list(state.layers) == ["model.layers.1.self_attn.attn"]
    assert state.dense == {"model.layers.0.self_attn.attn": "dense_layers"}
    assert list(state.workspaces) == [(1, HEADS, LATENT + 64)]
    scratch, _ = attend_scratch_sizes(8, 1, HEADS, LATENT, state.page_capacity, 1)
    assert state.workspaces[(1, HEADS, LATENT + 64)].attend_partials.numel() == scratch, "partial results are as wide as the values"
    assert torch.get_default_dtype() == torch.float32
    layer = next(iter(state.layers.values()))
    assert layer.tables.offset.dtype == torch.float32, "vLLM loads with the model's dtype as the default"
    assert [spec.layer_name for spec in engine.records_layers()] == ["model.layers.1.self_attn.attn.kvskim_records"]
    block = "\n".join(start_block(state))
    assert "1 kv heads of 4 query heads, head size 320 (latent)" in block
    share = layer.records.record_bytes / (16 * 320 * 2)
    assert f"({share:.1%} of the latent cache)" in block
    assert "the parts of a query are joined for score in every step" in block
    run(engine, [(Request(11), 200)])
    for hook in engine.hooks():
        hook.quant_method.process_weights_after_loading(hook)  # a reload
    assert len(state.layers) == 1
    assert len(engine.records_layers()) == 1


@pytest.mark.parametrize(("selector", "kernels", "joined"), [("sketch", "cuda", False), ("sketch", "triton", True), ("rki4", "cuda", True)])
def test_the_start_says_where_the_parts_of_a_query_are_joined(selector, kernels, joined):
    state = MlaMiniEngine({**FEW, "selector": selector}).state
    state.kernels = Choice(kernels, "a reason")
    assert ("the parts of a query are joined for score in every step" in "\n".join(start_block(state))) == joined


def test_a_layer_that_vllm_has_not_loaded_does_not_run_dense_in_silence(monkeypatch):
    monkeypatch.setattr(MlaMiniEngine, "load", lambda self: [layer.process_weights_after_loading(torch.float32) for layer in self.layers])
    engine = MlaMiniEngine(FEW)
    engine.step([(Request(1), 700)])
    with pytest.raises(RuntimeError, match="has not processed the weights"):
        engine.step([(Request(1), 1)])


ASKED = dict(
    head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True, has_sink=False, use_sparse=False, use_mm_prefix=False,
    use_per_head_quant_scales=False, device_capability=(9, 0), attn_type="decoder", use_non_causal=False, use_batch_invariant=False, use_kv_connector=False,
)


def validate(asked=None, **settings):
    with set_current_vllm_config(VllmConfig(additional_config={"kvskim": settings})):
        return SkimMlaBackend.validate_configuration(**{**ASKED, **(asked or {})})


def test_models_with_mla_are_taken_and_others_are_not_judged():
    assert validate() == []
    assert validate(dict(use_mla=False, head_size=8, use_sparse=True)) == []


@pytest.mark.parametrize(("asked", "word"), [(dict(use_sparse=True), "indexer of its own"), (dict(head_size=192), "latent rows")])
def test_what_it_cannot_do_stops_the_engine_with_one_sentence(asked, word, caplog):
    with pytest.raises(UnsupportedError, match=word):
        validate(asked)
    assert validate(asked, on_unsupported="dense") == []
    assert word in caplog.text


def test_another_vllm_version_is_refused(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.27.1")
    with pytest.raises(UnsupportedError, match=r"latent attention \(MLA\) sparse with vLLM 0.24 only, and this is vLLM 0.27.1"):
        validate()


def test_the_check_knows_such_models_by_their_configuration(tmp_path):
    assert not has_latent_attention(str(tmp_path))
    for text, expected in (('{"kv_lora_rank": 512}', True), ('{"text_config": {"kv_lora_rank": 512}}', True), ('{"hidden_size": 5}', False)):
        (tmp_path / "config.json").write_text(text)
        assert has_latent_attention(str(tmp_path)) is expected


def test_the_check_takes_the_place_of_flash_attention_for_such_models(tmp_path, monkeypatch):
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(registry, "overrides", {})
    for name in ("KVSKIM_CONFIG", "KVSKIM_DISABLE"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever the check makes of it
        monkeypatch.delenv(name)
    assert attention_backend(str(tmp_path), FEW) == "CUSTOM"
    assert attention_backend(str(tmp_path), None) == "FLASH_ATTN"
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    assert attention_backend(str(tmp_path), None) == "FLASH_ATTN_MLA"
    assert "KVSKIM_CONFIG" not in os.environ
    assert attention_backend(str(tmp_path), FEW) == "FLASH_ATTN_MLA"
    assert json.loads(os.environ["KVSKIM_CONFIG"]) == FEW


@pytest.mark.parametrize("connector", ["OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_connectors_are_refused_with_it(connector):
    assert connector in str(mla_refusal(EngineFacts(connector=connector)))
    assert mla_refusal(EngineFacts(connector="DecodeBenchConnector")) is None


def test_sleep_mode_is_refused_with_it():
    """Level 2 throws away what was made while vLLM loaded: tables, the flag that they are ready, work buffers."""
    config = VllmConfig()
    config.model_config.enable_sleep_mode = True
    assert "--enable-sleep-mode" in str(mla_refusal(engine_facts(config, SkimConfig())))
    config.model_config.enable_sleep_mode = False
    assert mla_refusal(engine_facts(config, SkimConfig())) is None


def test_a_compiler_pass_that_writes_the_cache_itself_is_refused():
    """It joins the rotary embedding with the write, past `do_kv_cache_update`: no record would be made."""
    config = VllmConfig()
    for joined in (True, False):
        config.compilation_config.pass_config = SimpleNamespace(fuse_rope_kvcache_cat_mla=joined)
        assert ("fuse_rope_kvcache_cat_mla" in str(mla_refusal(engine_facts(config, SkimConfig())))) is joined


def test_a_layer_with_an_indexer_is_refused_and_dense_is_vllms_own():
    with pytest.raises(UnsupportedError, match="indexer of its own"):
        MlaMiniEngine(FEW, indexer=object())
    engine = MlaMiniEngine({**FEW, "on_unsupported": "dense"}, indexer=object())
    assert not engine.state.layers
    assert not engine.records_layers()
    assert engine.builder.reorder_batch_threshold == 512
    a = Request(1)
    run(engine, [(a, 100)])
    assert dense_tokens(engine) == 200, "short prefills are decode rows of vLLM's own backend"
    run(engine, [(a, 1)], pad_rows=1)


def test_a_draft_model_stays_dense():
    engine = MlaMiniEngine(FEW, speculative=SimpleNamespace(num_speculative_tokens=1), draft=True)
    assert not engine.state.layers
    assert engine.hooks() == [None, None]
    run(engine, [(Request(1), 40)])


def test_a_cache_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="kvskim knows"):
        latent_views(torch.zeros(2, 16, 1, 576), 576, 512)
    with pytest.raises(ValueError, match="contiguous rows"):
        latent_views(torch.zeros(2, 576, 16).transpose(1, 2), 576, 512)
