"""Calibration in the engine: what is captured, when decode becomes sparse, and that it happens on the device."""

import logging
import threading

import pytest
import torch
from mini_engine import MiniEngine, Request

from kvskim.calibration import model_fingerprint
from kvskim.calibration_store import calibration_path
from kvskim.engines.vllm import calibrate, calibration_source, probe
from kvskim.engines.vllm.calibrate import Segment, plan_segments
from kvskim.engines.vllm.parallel import rank_heads
from kvskim.layout import PAGE_TOKENS
from kvskim.rotary import Rotary
from kvskim.selectors import get_selector

FEW = {"rule": "budget", "budget_pages": 6}


pytestmark = pytest.mark.usefixtures("small_calibration")


def test_segments_are_whole_pages_of_long_rows_without_their_first_page():
    # Rows of 1, 100, 63 and 64 tokens; the second goes on with a prompt of 600 tokens.
    assert plan_segments([0, 1, 101, 164, 228], [9, 600, 63, 64], 0, 256) == (Segment(17, 80, 0, 516), Segment(180, 48, 80, 16))
    assert plan_segments([0, 1000], [1000], 240, 256) == (Segment(16, 16, 240, 16),)
    assert plan_segments([0, 1000], [1000], 256, 256) == ()
    assert plan_segments([0, 63], [63], 0, 256) == ()


def all_pages(engine, request, count):
    """Decode and check that every page is attended, with the result of full attention."""
    for _ in range(count):
        position = request.computed
        (outputs,) = engine.step([(request, 1)])
        for index, output in enumerate(outputs):
            torch.testing.assert_close(output, engine.expected(request, index, position, 1), atol=2e-5, rtol=2e-5)


def test_decode_is_dense_until_all_layers_are_fitted_and_sparse_from_then_on():
    engine = MiniEngine(FEW)
    state = engine.state
    assert int(state.ready) == 0
    a, b = Request(1), Request(2)
    engine.step([(a, 200)])
    all_pages(engine, a, 2)
    assert "of 256 tokens captured" in state.calibrator.progress
    engine.step([(b, 300), (a, 1)])
    assert state.calibrator.progress == "0 of 2 layers fitted"
    # One layer per step; the step that fits the last one is sparse.
    all_pages(engine, b, 1)
    assert state.calibrator.progress == "1 of 2 layers fitted"
    assert int(state.ready) == 0
    engine.step([(b, 1)])
    assert state.calibrator is None
    assert int(state.ready) == 1
    for layer in state.layers.values():
        assert (layer.counts[0] == 6).all()
    # Pages written before there were tables have records now, as have those written after.
    engine.step([(a, 40)])
    pages = [block for request in (a, b) for block in request.blocks[: request.computed // PAGE_TOKENS]]
    assert probe.untrue_records(state, torch.tensor(pages)) == dict.fromkeys(state.layers, 0)


def test_the_switch_leaves_every_address_as_it_was():
    """A captured graph holds addresses: tables, flag and records must stay where they are."""
    engine = MiniEngine(FEW)
    state = engine.state

    def addresses():
        tables = [getattr(layer.tables, f).data_ptr() for layer in state.layers.values() for f in ("mean", "encode_matrix", "query_matrix", "slot_digit")]
        return [state.ready.data_ptr(), *tables, *(layer.records.records.data_ptr() for layer in state.layers.values())]

    before = addresses()
    settings = [layer.settings for layer in state.layers.values()]
    request = Request(1)
    engine.step([(request, 400)])
    for _ in range(3):
        engine.step([(request, 1)])
    assert int(state.ready) == 1
    assert addresses() == before
    assert all(layer.settings is s for layer, s in zip(state.layers.values(), settings))
    assert all(layer.settings.tables is layer.tables for layer in state.layers.values())


def test_equal_prompts_give_equal_tables():
    tables = []
    for _ in range(2):
        engine = MiniEngine(FEW)
        request = Request(1)
        engine.step([(request, 150)])
        engine.step([(request, 200)])
        for _ in range(3):
            engine.step([(request, 1)])
        tables.append([layer.tables for layer in engine.state.layers.values()])
    for a, b in zip(*tables):
        for name in ("mean", "encode_matrix", "query_matrix", "slot_coefficient", "slot_digit", "coefficient_bits"):
            assert torch.equal(getattr(a, name), getattr(b, name))
    assert not torch.equal(tables[0][0].mean, tables[0][1].mean)


def test_there_is_no_second_fit():
    engine = MiniEngine(FEW)
    request, other = Request(1), Request(2)
    engine.step([(request, 400)])
    for _ in range(3):
        engine.step([(request, 1)])
    before = [layer.tables.encode_matrix.clone() for layer in engine.state.layers.values()]
    engine.step([(other, 600)])
    for _ in range(3):
        engine.step([(request, 1), (other, 1)])
    assert all(torch.equal(layer.tables.encode_matrix, b) for layer, b in zip(engine.state.layers.values(), before))


def test_dummy_runs_and_short_prompts_are_not_captured():
    engine = MiniEngine(FEW)
    dummy = Request(1)
    engine.step([(dummy, 300)], dummy=True)
    engine.release(dummy)
    engine.step([(Request(2), 40), (Request(3), 2)])
    assert engine.state.calibrator.progress == "0 of 256 tokens captured"
    assert not engine.metadata.capture


def test_captured_tokens_are_those_of_the_prompt():
    engine = MiniEngine(FEW)
    request, short = Request(4), Request(5)
    engine.step([(short, 1), (request, 90)])
    engine.step([(short, 1), (request, 90)])
    calibrator = engine.state.calibrator
    name = "model.layers.1.attn"
    keys = torch.cat([engine.tokens(4, 1, "key", 16, 64), engine.tokens(4, 1, "key", 106, 64)])
    assert torch.equal(calibrator._keys[name][:128].float(), keys.to(calibrator._keys[name].dtype).float())
    queries = torch.cat([engine.tokens(4, 1, "query", 16, 64)[::4], engine.tokens(4, 1, "query", 106, 64)[::4]])
    assert torch.equal(calibrator._queries[name][:32].float(), queries.to(calibrator._queries[name].dtype).float())


def test_a_file_is_used_from_the_first_step_on(tmp_path):
    from kvskim.calibration import Calibration, fit_layer, model_fingerprint

    generator = torch.Generator().manual_seed(1)
    calibration = Calibration("stand-in", model_fingerprint({"model_type": "stand-in"}))
    for layer in range(2):
        calibration.layers[layer] = fit_layer(torch.randn(2, 512, 64, generator=generator), torch.randn(4, 64, 64, generator=generator))
    file = tmp_path / "stand-in.safetensors"
    calibration.save(file)
    engine = MiniEngine({**FEW, "calibration": str(file)})
    assert int(engine.state.ready) == 1
    assert engine.state.calibrator is None
    assert engine.state.calibration_source == str(file)
    request = Request(1)
    engine.step([(request, 400)])
    engine.step([(request, 1)])
    assert all((layer.counts[0] == 6).all() for layer in engine.state.layers.values())


def test_a_file_of_another_model_stops_the_engine(tmp_path):
    from kvskim.calibration import Calibration, CalibrationError, fit_layer

    generator = torch.Generator().manual_seed(1)
    other = Calibration("other", "0123456789abcdef", {0: fit_layer(torch.randn(2, 512, 64, generator=generator), torch.randn(4, 64, 64, generator=generator))})
    file = tmp_path / "other.safetensors"
    other.save(file)
    with pytest.raises(CalibrationError, match="made for the model other"):
        MiniEngine({**FEW, "calibration": str(file)})


def test_a_cached_calibration_is_found(tmp_path):
    from kvskim.calibration import Calibration, fit_layer, model_fingerprint

    generator = torch.Generator().manual_seed(1)
    fingerprint = model_fingerprint({"model_type": "stand-in"})
    layers = {i: fit_layer(torch.randn(2, 512, 64, generator=generator), torch.randn(4, 64, 64, generator=generator)) for i in range(2)}
    file = calibration_path(fingerprint, 256)
    assert tmp_path in file.parents
    file.parent.mkdir(parents=True)
    Calibration("stand-in", fingerprint, layers).save(file)
    engine = MiniEngine(FEW)
    assert int(engine.state.ready) == 1
    assert engine.state.calibration_source == f"{file} (made with stand-in)"


def fit(engine):
    request = Request(1)
    engine.step([(request, 400)])
    for _ in range(3):
        engine.step([(request, 1)])
    for thread in threading.enumerate():
        if thread.name == calibration_source.THREAD_NAME:
            thread.join(30)
    return request


def test_a_fit_is_kept_for_the_next_engine(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vllm.kvskim")
    first = MiniEngine(FEW)
    fit(first)
    file = calibration_path(model_fingerprint({"model_type": "stand-in"}), 256)
    assert [line for line in caplog.messages if "kept in" in line] == [f"kvskim: calibration: kept in {file}; delete the file to fit anew"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    second = MiniEngine(FEW)
    assert int(second.state.ready) == 1
    for ours, theirs in zip(second.state.layers.values(), first.state.layers.values()):
        for name in ("mean", "encode_matrix", "query_matrix", "slot_coefficient", "slot_digit", "coefficient_bits", "coefficient_count"):
            assert torch.equal(getattr(ours.tables, name), getattr(theirs.tables, name))


def test_a_fit_of_some_layers_is_no_calibration_of_all(caplog):
    fit(MiniEngine({**FEW, "dense_layers": [1]}))
    engine = MiniEngine(FEW)
    assert int(engine.state.ready) == 0
    assert "no kept calibration is used" in caplog.text
    fit(engine)
    assert int(MiniEngine(FEW).state.ready) == 1


@pytest.mark.parametrize("why", ["unwritable", "short"])
def test_a_fit_that_is_not_kept_says_so_in_one_line(monkeypatch, tmp_path, caplog, why):
    caplog.set_level(logging.INFO, logger="vllm.kvskim")
    engine = MiniEngine(FEW)
    if why == "unwritable":
        (tmp_path / "file").touch()
        monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path / "file"))
    else:
        # Later positions are seen where the rotary embedding is known.
        engine.state.calibrator._served_positions = 512
        engine.state.calibrator._rotary = Rotary(1.0 / 10000.0 ** (torch.arange(32) / 32))
        engine.state.vllm_config.model_config.hf_text_config.max_position_embeddings = 4096
    fit(engine)
    assert int(engine.state.ready) == 1
    assert len([line for line in caplog.messages if "not kept for other engines" in line]) == 1
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(("total", "world", "expected"), [
    (8, 1, [(0, 8)]), (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]), (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
])
def test_heads_of_a_tensor_parallel_rank(total, world, expected):
    assert [rank_heads(total, rank, world) for rank in range(world)] == expected


@pytest.mark.parametrize("name", ["sketch", "mean", "rki4"])
def test_rank_tables_are_the_cut_of_the_whole(name):
    from kvskim.calibration import Calibration, fit_layer

    generator = torch.Generator().manual_seed(2)
    fitted = fit_layer(torch.randn(4, 256, 64, generator=generator), torch.randn(8, 32, 64, generator=generator))
    selector = get_selector(name)
    whole = selector.tables(4, 64, fitted)
    part = calibrate.rank_tables(selector, Calibration("m", "f", {3: fitted}), 3, 4, 64, 1, 2)
    field = "encode_matrix" if name == "sketch" else "offset"
    assert torch.equal(getattr(part, field), getattr(whole, field)[1:3])
    target = calibrate.empty_tables(selector, 2, 64, torch.device("cpu"))
    calibrate.copy_tables(target, part)
    for key, value in vars(part).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(target, key), value), key


@pytest.mark.parametrize("known", [True, False])
def test_the_fit_is_for_all_positions_of_the_longest_request(monkeypatch, known):
    fits, fit_layer = [], calibrate.fit_layer
    rotary = Rotary(1.0 / 10000.0 ** (torch.arange(32) / 32))
    monkeypatch.setattr(calibrate, "vllm_rotary", lambda *_: rotary if known else None)
    monkeypatch.setattr(calibrate, "fit_layer", lambda *args, **options: fits.append(options) or fit_layer(*args, **options))
    engine = MiniEngine(FEW)
    a, b = Request(1), Request(2)
    engine.step([(a, 100)])
    engine.step([(a, 100), (b, 300)])
    for _ in range(2):
        engine.step([(a, 1), (b, 1)])
    assert int(engine.state.ready) == 1
    assert len(fits) == 2
    assert fits[0]["served_positions"] == (engine.state.vllm_config.model_config.max_model_len if known else 0)
    expected = torch.cat([torch.arange(16, 96), torch.arange(116, 196), torch.arange(16, 112)])
    assert torch.equal(fits[0]["key_positions"], expected)
    assert torch.equal(fits[0]["query_positions"], expected[:: calibrate.QUERY_STRIDE])


def test_page_slots_cover_every_page_once(monkeypatch):
    monkeypatch.setattr(calibrate, "ENCODE_PAGES", 4)
    slots = torch.cat(list(calibrate.page_slots(10, torch.device("cpu"))))
    assert slots.tolist() == [16 * page + 15 for page in range(10)]
