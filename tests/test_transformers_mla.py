"""The Hugging Face host on a tiny random DeepSeek-V2: its cache holds latent rows, and these are scored, selected and attended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DeepseekV2Config, DynamicCache

from kvskim.config import SkimConfig
from kvskim.engines.decode import DecodeSettings, decode_attention
from kvskim.engines.transformers import UnsupportedError, cache_keyword, enable
from kvskim.engines.transformers_cache import SkimLayer
from kvskim.engines.transformers_mla import is_latent, latent_heads, latent_rotary
from kvskim.layout import PAGE_TOKENS
from kvskim.reference import ReferenceLayer
from kvskim.rules import RuleParameters
from kvskim.selectors import get_selector

HEADS, LATENT, PLAIN, ROTARY, VALUE = 6, 32, 16, 8, 12
EVERYTHING = SkimConfig(selector="rki4", rule="budget", budget=1.0)
SPARSE = SkimConfig(selector="rki4", rule="budget", budget_pages=5)


@pytest.fixture(autouse=True)
def _own_store(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path))
    torch.set_num_threads(1)


def make(seed=0, **changes):
    torch.manual_seed(seed)
    config = DeepseekV2Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=HEADS, kv_lora_rank=LATENT,
        q_lora_rank=None, qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTARY, v_head_dim=VALUE, first_k_dense_replace=2, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None, **changes,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


def prompt(tokens, rows=1, seed=1):
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def decode_all(model, ids, prefill, **kwargs):
    """Logits of every token from index ``prefill`` on, fed one at a time."""
    cache = DynamicCache(config=model.config)

    def step(part, end):
        extra = {name: value[:, :end] for name, value in kwargs.items()}
        with torch.no_grad():
            return model(input_ids=part, use_cache=True, **{cache_keyword(model): cache}, **extra).logits[:, -1]

    step(ids[:, :prefill], prefill)
    return torch.stack([step(ids[:, t : t + 1], t + 1) for t in range(prefill, ids.shape[1])], 1), cache


def rows_of(layer):
    return torch.cat([layer.keys, layer.values], -1)


def assert_records_right(cache):
    for layer in cache.layers:
        assert isinstance(layer, SkimLayer)
        rows, records = rows_of(layer), layer.records
        assert rows.shape[1] == 1
        pages = rows.shape[2] // PAGE_TOKENS
        assert records.counts == [pages] * rows.shape[0]
        for row in range(rows.shape[0]):
            fresh = records.selector.encode(rows[row, :, : pages * PAGE_TOKENS].unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1), records.tables)
            assert torch.equal(records.row(row), fresh)


def test_all_pages_selected_is_the_models_own_attention():
    ids = prompt(140)
    expected, _ = decode_all(make(), ids, 100)
    model = make()
    host = enable(model, EVERYTHING)
    actual, cache = decode_all(model, ids, 100)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
    assert all(entry.sparse for entry in host.report())
    assert host.statistics().sparse_rows == 2 * 40
    assert_records_right(cache)


def test_one_page_table_per_layer_and_few_pages():
    model = make()
    host = enable(model, SPARSE)
    traces = []
    host.observe(traces.append, exact=True)
    decode_all(model, prompt(420), 400)
    assert len(traces) == 2 * 20
    assert all(trace.rows[0].pages.shape[0] == 1 and int(trace.rows[0].pages.sum()) == 5 for trace in traces)
    covered = torch.stack([trace.rows[0].exact for trace in traces]).mean()
    assert 0.2 < float(covered) < 1.0
    # Latent rows of 40 channels, once, against records of rki4.
    token_bytes = (LATENT + ROTARY) * 4
    record = get_selector("rki4").record_bytes(LATENT + ROTARY)
    last = traces[-1]
    open_tokens = (last.tokens[0] - 1) % 16 + 1
    assert last.dense_bytes == last.tokens[0] * token_bytes
    assert last.bytes_read == (4 * 16 + open_tokens) * token_bytes + (-(-last.tokens[0] // 16) - 3) * record


def test_a_step_is_that_of_the_reference_on_latent_rows():
    model = make()
    host = enable(model, SPARSE)
    traces, queries = [], []
    state = host.layers()[0]
    module = next(m for m in model.modules() if getattr(m, "_kvskim", None) is state)
    plain = state.decode

    def watched(query, key, value, records):
        queries.append(state.latent.absorb(query).clone())
        return plain(query, key, value, records)

    state.decode = watched
    host.observe(traces.append)
    _, cache = decode_all(model, prompt(333), 332)
    rows = rows_of(cache.layers[0])[0, 0]
    tables, selector = state.settings.tables, state.selector
    reference = ReferenceLayer(
        selector, tables, num_pages=21, num_kv_heads=1, head_dim=LATENT + ROTARY, value_dim=LATENT, scale=module.scaling, parameters=SPARSE.rule_parameters(),
        sink_pages=SPARSE.sink_pages, window_pages=SPARSE.window_pages,
    )
    reference.write(rows[:, None], rows[:, None, :LATENT], torch.arange(len(rows)))
    expected = reference.decode(queries[0][:, :, 0], torch.arange(21)[None], torch.tensor([len(rows)]))
    trace = next(trace for trace in traces if trace.layer == 0)
    assert trace.rows[0].pages[0].nonzero()[:, 0].tolist() == expected.rows[0][0].pages.tolist()
    torch.testing.assert_close(trace.rows[0].out, expected.out[0], atol=1e-4, rtol=1e-4)


def test_the_sketch_is_fitted_on_latent_rows_of_the_first_prompt():
    model = make()
    host = enable(model, SkimConfig(selector="sketch", rule="budget", budget_pages=6))
    _, cache = decode_all(model, prompt(1100), 1090)
    assert host.statistics().sparse_rows > 0
    calibration = host.calibration()
    assert calibration is not None
    assert all(tuple(layer.mean.shape) == (1, LATENT + ROTARY) for layer in calibration.layers.values())
    assert host.layers()[0].rotary.first == LATENT
    assert_records_right(cache)
    # A calibration of latent rows is one for this model.
    again = make()
    enable(again, SkimConfig(selector="sketch"), calibration=calibration)


def test_left_padded_rows_of_a_batch():
    ids = prompt(200, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    expected, _ = decode_all(make(), ids, 180, attention_mask=mask)
    model = make()
    host = enable(model, EVERYTHING)
    actual, _ = decode_all(model, ids, 180, attention_mask=mask)
    torch.testing.assert_close(actual, expected, atol=3e-4, rtol=3e-4)
    assert host.statistics().rows == 2 * 2 * 20


def test_rotary_of_latent_rows_turns_what_transformers_has_turned():
    """A cached row seen 100 positions later is the row that the model would have cached there."""
    model = make()
    rotary = latent_rotary(model.config)
    ids = prompt(40)
    caches = []
    for offset in (0, 100):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, position_ids=torch.arange(offset, offset + 40)[None], use_cache=True, **{cache_keyword(model): cache})
        caches.append(rows_of(cache.layers[0]))
    assert not torch.allclose(caches[0], caches[1], atol=1e-2)
    torch.testing.assert_close(rotary.rotate(caches[0], 100), caches[1], atol=1e-4, rtol=1e-4)


def test_a_cache_that_does_not_explain_the_keys_stays_dense():
    model = make()
    host = enable(model, EVERYTHING)
    for layer in model.model.layers:
        attention = layer.self_attn
        expand = attention.expand_kv
        attention.expand_kv = lambda latent, rotary, expand=expand: expand(2 * latent, rotary)
    decode_all(model, prompt(60), 50)
    assert all(entry.reason == "its latent cache is not what its keys are made of" for entry in host.report())
    assert host.statistics().rows == 0


def test_a_trained_indexer_stays_dense():
    model = make()
    for layer in model.model.layers:
        layer.self_attn.indexer = object()
    with pytest.raises(UnsupportedError, match="trained indexer of its own"):
        enable(model, EVERYTHING)


def test_weights_that_are_not_plain_are_not_guessed():
    layer = SimpleNamespace(keys=torch.zeros(1, 1, 3, LATENT), values=torch.zeros(1, 1, 3, ROTARY))
    module = make().model.layers[0].self_attn
    assert is_latent(module, layer)
    assert not is_latent(module, SimpleNamespace(keys=torch.zeros(1, HEADS, 3, PLAIN + ROTARY), values=torch.zeros(1, HEADS, 3, VALUE)))
    key, value = torch.zeros(1, HEADS, 3, PLAIN + ROTARY), torch.zeros(1, HEADS, 3, VALUE)
    assert latent_heads(module, layer, key, value) is not None
    weight = module.kv_b_proj.weight.detach()
    del module.kv_b_proj
    module.kv_b_proj = SimpleNamespace(weight=weight.to(torch.int8))
    assert latent_heads(module, layer, key, value) is None


@pytest.mark.parametrize("budget", [4, 100])
def test_heads_with_values_narrower_than_keys(budget):
    """What a version of transformers that caches expanded heads hands over."""
    generator = torch.Generator().manual_seed(3)
    key, value = torch.randn(3, 200, 24, generator=generator), torch.randn(3, 200, 10, generator=generator)
    query = torch.randn(3, 24, generator=generator) * 2
    selector, rule = get_selector("rki4"), RuleParameters(rule="budget", budget_pages=budget, min_pages=0)
    tables = selector.tables(3, 24)
    records = selector.encode(key[:, :192].unflatten(1, (-1, 16)).transpose(0, 1), tables)
    result = decode_attention(DecodeSettings(selector, tables, rule, 1, 2, 0.2), query, key, value, records)
    reference = ReferenceLayer(selector, tables, num_pages=13, num_kv_heads=3, head_dim=24, value_dim=10, scale=0.2, parameters=rule)
    reference.write(key.transpose(0, 1), value.transpose(0, 1), torch.arange(200))
    expected = reference.decode(query[None], torch.arange(13)[None], torch.tensor([200]))
    for head, row in enumerate(expected.rows[0]):
        assert result.pages[head].nonzero()[:, 0].tolist() == row.pages.tolist()
    torch.testing.assert_close(result.out, expected.out[0], atol=1e-4, rtol=1e-4)
