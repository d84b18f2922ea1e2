"""The Hugging Face host against transformers' own attention, on tiny random models."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvskim.calibration import CalibrationError
from kvskim.calibration_store import write_stored
from kvskim.config import SkimConfig
from kvskim.engines import transformers_layer
from kvskim.engines.decode import DecodeSettings, decode_attention
from kvskim.engines.transformers import UnsupportedError, cache_keyword, disable, enable, report
from kvskim.engines.transformers_cache import SkimLayer
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.reference import ReferenceLayer
from kvskim.rules import RuleParameters
from kvskim.selectors import get_selector

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, sliding_window=24, layer_types=["sliding_attention", "full_attention", "full_attention"], query_pre_attn_scalar=16
    ),
    "gemma2": lambda: Gemma2Config(
        **SIZES, sliding_window=24, layer_types=["sliding_attention", "full_attention", "full_attention"], query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
    ),
}
EVERYTHING = SkimConfig(selector="rki4", rule="budget", budget=1.0)
SPARSE = SkimConfig(selector="rki4", rule="budget", budget_pages=4)
STOCK = {"gemma2": "eager"}


def make(name="llama", attention=None, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention or STOCK.get(name, "sdpa")).eval()
    for parameter in model.parameters():
        # Sharper than the usual initialisation, so that what is attended matters.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


def prompt(tokens, rows=1, seed=1):
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def step(model, ids, cache, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{cache_keyword(model): cache}, **kwargs).logits[:, -1]


def decode_all(model, ids, prefill, cache=None):
    """Logits of every token from index ``prefill`` on, fed one at a time."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    step(model, ids[:, :prefill], cache)
    return torch.stack([step(model, ids[:, t : t + 1], cache) for t in range(prefill, ids.shape[1])], 1), cache


def skim_layers(cache):
    return [layer for layer in cache.layers if isinstance(layer, SkimLayer)]


def assert_records_right(cache, starts=None):
    """Records of complete pages equal a fresh encoding of the cached keys, and there is none for the open page."""
    layers = skim_layers(cache)
    assert layers
    for layer in layers:
        records = layer.records
        for row in range(layer.keys.shape[0]):
            start = 0 if starts is None else starts[row]
            complete = (layer.keys.shape[2] - start) // PAGE_TOKENS
            assert records.starts[row] == start
            assert records.counts[row] == complete
            pages = layer.keys[row, :, start : start + complete * PAGE_TOKENS].unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
            assert torch.equal(records.row(row), records.selector.encode(pages, records.tables))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_stock_when_everything_is_selected(name):
    ids = prompt(150)
    expected, _ = decode_all(make(name), ids, 120)
    model = make(name)
    host = enable(model, EVERYTHING)
    actual, cache = decode_all(model, ids, 120)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
    statistics = host.statistics()
    assert statistics.sparse_rows == statistics.rows == 30 * len(skim_layers(cache))
    assert statistics.attended_share == 1.0


@pytest.mark.parametrize("name", CONFIGS)
def test_sparse_steps_read_less_and_differ(name):
    """The comparison above can fail: with few pages the logits are others."""
    ids = prompt(150)
    expected, _ = decode_all(make(name), ids, 140)
    model = make(name)
    host = enable(model, SPARSE)
    actual, cache = decode_all(model, ids, 140)
    assert not torch.allclose(actual, expected, atol=1e-3)
    statistics = host.statistics()
    assert statistics.pages_attended == statistics.heads * 4
    assert statistics.bytes_read < statistics.dense_bytes
    assert 0 < statistics.mean_covered_mass < 1
    assert_records_right(cache)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_gives_the_same_tokens(name):
    ids = prompt(130)
    arguments = {"max_new_tokens": 20, "do_sample": False}
    expected = make(name).generate(ids, **arguments)
    model = make(name)
    enable(model, EVERYTHING)
    assert torch.equal(model.generate(ids, **arguments), expected)


def test_from_pretrained_with_the_name_alone(tmp_path, monkeypatch):
    make("llama").save_pretrained(tmp_path)
    monkeypatch.setenv("KVSKIM_CONFIG", '{"selector": "rki4", "rule": "budget", "budget_pages": 4}')
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="kvskim")
    cache = DynamicCache(config=model.config)
    ids = prompt(150)
    model.generate(ids, max_new_tokens=20, do_sample=False, **{cache_keyword(model): cache})
    assert all(entry.sparse for entry in report(model))
    assert len(report(model)) == 3
    assert_records_right(cache)
    monkeypatch.setenv("KVSKIM_CONFIG", '{"selector": "rki4", "rule": "budget", "budget": 1.0}')
    disable(model)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), stock.generate(ids, max_new_tokens=20, do_sample=False))


def padded_batch(lengths, seed=5):
    rows = [prompt(length, seed=seed + n)[0] for n, length in enumerate(lengths)]
    width = max(lengths)
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.long), torch.ones(len(row), dtype=torch.long)]) for row in rows])
    return rows, ids, mask


@pytest.mark.parametrize("config", [EVERYTHING, SPARSE], ids=["everything", "sparse"])
def test_left_padded_rows_decode_as_if_alone(config):
    lengths = [130, 83, 113]
    rows, ids, mask = padded_batch(lengths)
    model = make("llama")
    enable(model, config)
    cache = DynamicCache(config=model.config)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, **{cache_keyword(model): cache})
    assert_records_right(cache, [max(lengths) - length for length in lengths])
    for row, alone in enumerate(rows):
        expected = model.generate(alone[None], max_new_tokens=24, do_sample=False)
        assert torch.equal(out[row, -24:], expected[0, -24:])


def test_tokens_hidden_in_the_middle_are_refused_in_one_sentence():
    model = make("llama")
    enable(model, SPARSE)
    mask = torch.ones(1, 120, dtype=torch.long)
    mask[0, 50:60] = 0
    with pytest.raises(UnsupportedError, match=r"pad on the left"):
        model.generate(prompt(120), attention_mask=mask, max_new_tokens=4, do_sample=False)


def test_beam_search_moves_records_with_their_rows():
    ids = prompt(120, rows=2)
    arguments = {"max_new_tokens": 24, "do_sample": False, "num_beams": 3}
    expected = make("llama").generate(ids, **arguments)
    model = make("llama")
    enable(model, EVERYTHING)
    assert torch.equal(model.generate(ids, **arguments), expected)
    enable(model, SPARSE)
    cache = DynamicCache(config=model.config)
    model.generate(ids, **{cache_keyword(model): cache}, **arguments)
    assert_records_right(cache)


def test_cropped_cache_forgets_pages_that_are_no_longer_complete():
    model = make("llama")
    enable(model, SPARSE)
    ids, other = prompt(150), prompt(150, seed=9)
    _, cache = decode_all(model, ids, 120)
    cache.crop(-37)
    assert cache.get_seq_length() == 113
    step(model, other[:, :30], cache)
    actual = step(model, other[:, 30:31], cache)
    assert_records_right(cache)
    fresh = DynamicCache(config=model.config)
    step(model, ids[:, :113], fresh)
    step(model, other[:, :30], fresh)
    torch.testing.assert_close(actual, step(model, other[:, 30:31], fresh), atol=1e-4, rtol=1e-4)


def test_assisted_decoding_gives_the_same_tokens_and_right_records():
    ids = prompt(40).repeat(1, 4)
    arguments = {"max_new_tokens": 40, "do_sample": False, "prompt_lookup_num_tokens": 5}
    expected = make("llama").generate(ids, **arguments)
    model = make("llama")
    enable(model, EVERYTHING)
    cache = DynamicCache(config=model.config)
    assert torch.equal(model.generate(ids, **{cache_keyword(model): cache}, **arguments), expected)
    step(model, prompt(1), cache)
    assert_records_right(cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_match_stock_when_everything_is_selected(dtype):
    ids = prompt(150)
    expected, _ = decode_all(make("llama").to(dtype), ids, 140)
    model = make("llama").to(dtype)
    enable(model, EVERYTHING)
    actual, cache = decode_all(model, ids, 140)
    assert cache.layers[0].keys.dtype == dtype
    scale = float(expected.float().std())
    assert float((actual - expected).float().abs().mean()) < 0.03 * scale
    assert_records_right(cache)


@pytest.mark.parametrize("action", ["repeat", "select", "copy", "replace"])
def test_records_follow_the_rows_of_the_cache(action):
    model = make("llama")
    enable(model, SPARSE)
    ids = prompt(140, rows=3)
    _, cache = decode_all(model, ids, 125)
    if action == "repeat":
        cache.batch_repeat_interleave(2)
    elif action == "select":
        cache.batch_select_indices(torch.tensor([2, 0]))
    elif action == "copy":
        before, cache = cache, copy.deepcopy(cache)
        step(model, prompt(40, rows=3, seed=8), before)
        assert before.layers[0].records.tables is cache.layers[0].records.tables
    else:
        for layer in cache.layers:
            layer.keys = layer.keys.flip(0)
    rows = cache.layers[0].keys.shape[0]
    step(model, prompt(1, rows=rows, seed=3), cache)
    assert_records_right(cache)


def test_fault_1_a_page_is_recorded_after_its_last_key_not_one_token_early():
    model = make("llama")
    enable(model, SPARSE)
    ids = prompt(130)
    cache = DynamicCache(config=model.config)
    step(model, ids[:, :70], cache)
    for t in range(70, 130):
        step(model, ids[:, t : t + 1], cache)
        assert_records_right(cache)


def test_fault_2_a_request_of_the_same_length_does_not_get_the_records_of_another():
    model = make("llama")
    enable(model, SPARSE)
    first, second = prompt(140, seed=1), prompt(140, seed=2)
    _, kept = decode_all(model, first, 130)
    actual, cache = decode_all(model, second, 130)
    assert_records_right(cache)
    assert_records_right(kept)
    fresh = make("llama")
    enable(fresh, SPARSE)
    expected, _ = decode_all(fresh, second, 130)
    assert torch.equal(actual, expected)
    # The same cache object, emptied and filled with a request of the same length.
    kept.reset()
    actual, _ = decode_all(model, second, 130, kept)
    assert torch.equal(actual, expected)


def test_fault_6_soft_cap_is_applied_to_selected_pages():
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(*shape, generator=generator) for shape in ((2, 200, 32), (2, 200, 32), (6, 32)))
    rule = RuleParameters(rule="budget", budget_pages=5, min_pages=0)
    selector = get_selector("oracle")
    settings = DecodeSettings(selector, selector.tables(2, 32), rule, 1, 1, 1.0, softcap=1.5)
    records = selector.encode(key[:, :192].unflatten(1, (-1, 16)).transpose(0, 1), settings.tables)
    result = decode_attention(settings, query, key, value, records, exact=True)
    for head in range(6):
        tokens = result.pages[head // 3].repeat_interleave(16)[:200]
        logits = 1.5 * torch.tanh((query[head].double() @ key[head // 3].double().T) / 1.5)
        weights = torch.softmax(logits.masked_fill(~tokens, -torch.inf), -1)
        torch.testing.assert_close(result.out[head].double(), weights @ value[head // 3].double(), atol=1e-5, rtol=1e-5)


def test_fault_10_a_full_cache_hit_with_one_new_token_gets_records():
    ids = prompt(141)
    stock = make("llama")
    cache = DynamicCache(config=stock.config)
    step(stock, ids[:, :140], cache)
    model = make("llama")
    host = enable(model, SPARSE)
    step(model, ids[:, 140:], cache)
    assert_records_right(cache)
    assert host.statistics().pages_attended == host.statistics().heads * 4


def test_fault_14_dense_layers_are_reported_and_have_no_records(caplog):
    model = make("gemma3")
    with caplog.at_level(logging.WARNING, logger="kvskim.transformers"):
        host = enable(model, SPARSE)
    assert len(caplog.records) == 1
    assert "model.layers.0.self_attn (sliding window of 24 tokens)" in caplog.text
    _, cache = decode_all(model, prompt(140), 130)
    assert [entry.sparse for entry in host.report()] == [False, True, True]
    assert [isinstance(layer, SkimLayer) for layer in cache.layers] == [False, True, True]
    assert host.report()[0].reason == "sliding window of 24 tokens"


def test_fault_23_records_are_made_during_prefill():
    model = make("llama")
    enable(model, SPARSE)
    cache = DynamicCache(config=model.config)
    step(model, prompt(100), cache)
    assert [layer.records.counts for layer in skim_layers(cache)] == [[6]] * 3
    step(model, prompt(60, seed=4), cache)
    assert_records_right(cache)


def test_dense_layers_setting_is_honoured():
    model = make("llama")
    host = enable(model, SPARSE.model_copy(update={"dense_layers": (1,)}))
    assert [entry.sparse for entry in host.report()] == [True, False, True]


def test_models_without_a_sparse_layer_are_refused_in_one_sentence():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MistralConfig(**SIZES, sliding_window=32))
    with pytest.raises(UnsupportedError, match=r"no layer of mistral can be sparse \(sliding window of 32 tokens\)"):
        enable(model, SPARSE)
    host = enable(model, SPARSE.model_copy(update={"on_unsupported": "dense"}))
    assert not any(entry.sparse for entry in host.report())
    assert model.generate(prompt(60), max_new_tokens=3, do_sample=False).shape == (1, 63)


@pytest.mark.parametrize(
    ("change", "words"), [({"variant": "mem-v"}, "variant='mem-v'"), ({"kernels": "cuda"}, "kernels='cuda'")], ids=["variant", "kernels"]
)
def test_settings_without_meaning_here_are_refused(change, words):
    with pytest.raises(UnsupportedError, match=words):
        enable(make("llama"), SkimConfig(selector="rki4", **change))


def test_a_head_dim_that_the_selector_cannot_code_is_refused_at_once():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "head_dim": 2}))
    with pytest.raises(UnsupportedError, match=r"the selector does not fit this model: .*head dim"):
        enable(model, SkimConfig(selector="clse"))


def test_static_cache_is_refused_in_one_sentence():
    model = make("llama")
    enable(model, SPARSE)
    with pytest.raises(UnsupportedError, match=r"StaticLayer has no records: use transformers' DynamicCache"):
        model.generate(prompt(60), max_new_tokens=3, do_sample=False, cache_implementation="static", disable_compile=True)


def test_disable_restores_stock_bit_for_bit():
    ids = prompt(140)
    expected, _ = decode_all(make("llama"), ids, 130)
    model = make("llama")
    host = enable(model, SPARSE)
    assert not torch.equal(decode_all(model, ids, 130)[0], expected)
    host.disable()
    assert torch.equal(decode_all(model, ids, 130)[0], expected)


def test_disabled_by_the_environment_is_stock_and_says_so(monkeypatch):
    ids = prompt(140)
    expected, _ = decode_all(make("llama"), ids, 130)
    monkeypatch.setenv("KVSKIM_DISABLE", "1")
    model = make("llama")
    host = enable(model, SPARSE.model_copy(update={"on_unsupported": "dense"}))
    assert torch.equal(decode_all(model, ids, 130)[0], expected)
    assert {entry.reason for entry in host.report()} == {"KVSKIM_DISABLE switches kvskim off"}


@pytest.mark.parametrize("plain", [False, True], ids=["enable", "name alone"])
def test_sketch_is_dense_until_calibrated_on_the_first_long_prompt(plain, monkeypatch):
    stock = make("llama")
    model = make("llama", attention="kvskim" if plain else None)
    if not plain:
        enable(model, SkimConfig())
    short, ids = prompt(200), prompt(1100)
    expected, _ = decode_all(stock, short, 195)
    assert torch.equal(decode_all(model, short, 195)[0], expected)
    states = [module._kvskim for module in model.modules() if hasattr(module, "_kvskim")]
    assert not any(state.calibrated for state in states)
    _, cache = decode_all(model, ids, 1090)
    assert all(state.calibrated for state in states)
    assert_records_right(cache)
    fitted = [state.calibration for state in states]
    decode_all(model, prompt(1200, seed=7), 1190)
    assert all(state.calibration is before for state, before in zip(states, fitted))
    assert states[0].statistics.sparse_rows == 20


def test_a_fit_is_told_the_positions_of_its_keys_and_queries(monkeypatch):
    """Those of the real tokens of left-padded rows prefilled in two parts, without each row's first page; for all positions that the model has."""
    fits, fit = [], transformers_layer.fit_layer
    monkeypatch.setattr(transformers_layer, "fit_layer", lambda *data, **options: fits.append((*data, options)) or fit(*data, **options))
    monkeypatch.setattr(transformers_layer, "LEAST_CALIBRATION_TOKENS", 64)
    model = make("llama")
    enable(model, SkimConfig(rule="budget", budget_pages=4))
    ids, mask = prompt(150, rows=2), torch.ones(2, 150, dtype=torch.long)
    mask[0, :21] = mask[1, :21] = 0
    cache = DynamicCache(config=model.config)
    step(model, ids[:, :100], cache, attention_mask=mask[:, :100])
    step(model, ids[:, 100:149], cache, attention_mask=mask[:, :149])
    for layer in skim_layers(cache):
        for row in range(2):
            assert [positions.tolist() for positions, _ in layer.queries[row::2]] == [list(range(0, 79, 8)), list(range(80, 128, 8))]
    layer = skim_layers(cache)[0]
    model.model.layers[0].self_attn._kvskim.fit([layer], [[21, 21]], least_tokens=64)
    keys, queries, options = fits[0]
    assert options["served_positions"] == model.config.max_position_embeddings
    assert options["key_positions"].tolist() == [*range(16, 128)] * 2
    assert torch.equal(keys[:, :112], layer.keys[0, :, 37:149])
    assert sorted(options["query_positions"].tolist()) == sorted([*range(0, 128, 8)] * 2)
    assert queries.shape[1] == 32


def test_name_alone_calibrates_on_the_very_first_prompt():
    model = make("llama", attention="kvskim")
    decode_all(model, prompt(1100), 1095)
    assert all(module._kvskim.calibrated for module in model.modules() if hasattr(module, "_kvskim"))


def test_calibration_of_one_model_serves_it_again_and_is_refused_by_another(tmp_path):
    model = make("llama")
    host = enable(model, SkimConfig())
    assert host.calibration() is None
    ids = prompt(1100)
    decode_all(model, ids, 1090)
    calibration = host.calibration()
    calibration.save(tmp_path / "basis.safetensors")
    config = SkimConfig(calibration=str(tmp_path / "basis.safetensors"))
    again = make("llama")
    host = enable(again, config)
    actual, _ = decode_all(again, ids, 1090)
    torch.testing.assert_close(actual[:, 1:], decode_all(model, ids, 1090)[0][:, 1:])
    assert host.statistics().sparse_rows == 30
    with pytest.raises(CalibrationError, match="was made for the model"):
        enable(make("qwen3"), config)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("selector", ["oracle", "rki4", "minmax"])
@pytest.mark.parametrize("tokens", [1, 16, 17, 150, 208])
def test_decode_attention_equals_the_reference(selector, tokens, softcap):
    generator = torch.Generator().manual_seed(tokens)
    heads, group, dim = 2, 3, 32
    key, value = (torch.randn(heads, tokens, dim, generator=generator) for _ in range(2))
    query = torch.randn(heads * group, dim, generator=generator)
    chosen = get_selector(selector)
    tables = chosen.tables(heads, dim)
    rule = RuleParameters(rule="threshold", tau=0.05, min_pages=2)
    pages = ceil_div(tokens, PAGE_TOKENS)
    reference = ReferenceLayer(
        chosen, tables, num_pages=pages, num_kv_heads=heads, head_dim=dim, scale=0.3, parameters=rule, softcap=softcap or 0.0
    )
    reference.write(key.transpose(0, 1), value.transpose(0, 1), torch.arange(tokens))
    expected = reference.decode(query[None], torch.arange(pages)[None], torch.tensor([tokens]))
    settings = DecodeSettings(chosen, tables, rule, 1, 2, 0.3, softcap)
    complete = tokens // PAGE_TOKENS
    records = chosen.encode(key[:, : complete * PAGE_TOKENS].unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1), tables)
    result = decode_attention(settings, query, key, value, records, exact=True)
    torch.testing.assert_close(result.out, expected.out[0], atol=1e-5, rtol=1e-4)
    for head, row in enumerate(expected.rows[0]):
        assert result.pages[head].nonzero()[:, 0].tolist() == row.pages.tolist()
        assert float(result.covered[head]) == pytest.approx(row.covered, abs=1e-5)
        assert float(result.exact[head]) == pytest.approx(row.exact_covered, abs=1e-5)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A calibration of the tiny llama in an own cache directory: its file, and the model it was fitted with."""
    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path))
    model = make("llama")
    host = enable(model, SkimConfig())
    decode_all(model, prompt(1100), 1090)
    assert not list(tmp_path.iterdir())
    return write_stored(host.calibration()), model


@pytest.mark.parametrize("plain", [False, True], ids=["enable", "name alone"])
def test_a_kept_calibration_is_used_from_the_first_step_on(kept, plain):
    again = make("llama", attention="kvskim" if plain else None)
    if not plain:
        enable(again, SkimConfig())
    short = prompt(200)
    decode_all(again, short, 195)
    states = [module._kvskim for module in again.modules() if hasattr(module, "_kvskim")]
    assert [state.statistics.sparse_rows for state in states] == [5] * len(states)
    # Another model, and another record size, do not take it.
    for model, config in ((make("qwen3"), SkimConfig()), (make("llama"), SkimConfig(selector_options={"record_bytes": 128}))):
        assert all(state.calibration is None for state in enable(model, config).layers())


def test_fault_15_the_name_alone_takes_the_calibration_file_of_the_settings(kept, monkeypatch, tmp_path):
    path = kept[0].rename(tmp_path / "mine.safetensors")
    monkeypatch.setenv("KVSKIM_CONFIG", f'{{"calibration": "{path}"}}')
    model = make("llama", attention="kvskim")
    decode_all(model, prompt(200), 195)
    assert all(module._kvskim.statistics.sparse_rows == 5 for module in model.modules() if hasattr(module, "_kvskim"))
    with pytest.raises(CalibrationError, match="was made for the model"):
        decode_all(make("qwen3", attention="kvskim"), prompt(200), 195)


def test_a_file_that_is_refused_leaves_no_state_behind(kept):
    model = make("qwen3")
    with pytest.raises(CalibrationError, match="was made for the model"):
        enable(model, SkimConfig(calibration=str(kept[0])))
    assert report(model) == []
