"""Several workers: who has which heads and layers, one calibration file whatever the number of workers, and equal results."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mini_engine import MiniEngine, Request
from rank_engine import FEW, LAYERS, TOTAL_HEADS, RankEngine, as_rank, calibrate_on_prompts, wait_for_file

from kvskim.calibration import SKETCH_TENSORS, Calibration, CalibrationError, fit_layer, load_calibration, model_fingerprint
from kvskim.calibration_shares import Worker, join_shares, write_share
from kvskim.calibration_store import calibration_path
from kvskim.engines.vllm import calibrate, parallel
from kvskim.metrics import SkimMetrics

HERE = Path(__file__).parent
SIZES = [(2, 1), (1, 2), (2, 2)]
"""Tensor and pipeline parallel size."""
FLAT = {"full_pages": 0, "tau": 0.03, "min_pages": 1}
"""The default rule, with a threshold that is the mass of an average page."""


pytestmark = pytest.mark.usefixtures("small_calibration")


class Agreeing:
    """A group of ranks that is only asked whether all agree, and whose other ranks say what this one says."""

    cpu_group = None


@pytest.fixture
def agreeing(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op, group: None)
    return Agreeing()


def workers(tensor_size, pipeline_size):
    return [((t, tensor_size), (p, pipeline_size)) for p in range(pipeline_size) for t in range(tensor_size)]


def rank_engines(settings, sizes, group):
    engines = []
    for tensor, pipeline in workers(*sizes):
        with as_rank(tensor, pipeline, group):
            engines.append(RankEngine(settings, tensor, pipeline))
    return engines


def run_rank(engine, group, what):
    with as_rank(engine.tensor, engine.pipeline, group):
        return what(engine)


def whole_file():
    return calibration_path(model_fingerprint({"model_type": "stand-in"}), 256)


def kept():
    return sorted(path.name for path in whole_file().parent.iterdir())


# ---------------------------------------------------------------------- one file whatever the number of workers
@pytest.mark.parametrize("sizes", SIZES)
def test_what_workers_fit_is_one_file_equal_to_that_of_a_single_worker(sizes, agreeing, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="vllm.kvskim")
    alone = RankEngine(FEW)
    calibrate_on_prompts(alone)
    wait_for_file()
    expected = load_calibration(whole_file())
    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path / "other"))
    caplog.clear()
    engines = rank_engines(FEW, sizes, agreeing)
    for n, engine in enumerate(engines):
        assert int(engine.state.ready) == 0
        assert not whole_file().is_file(), f"only {n} of {len(engines)} workers have fitted"
        run_rank(engine, agreeing, calibrate_on_prompts)
        wait_for_file()
    assert kept() == [whole_file().name], "shares are taken away"
    assert len([line for line in caplog.messages if "kept in" in line]) == 1
    found = load_calibration(whole_file())
    found.check("stand-in", expected.fingerprint, TOTAL_HEADS, 64)
    assert sorted(found.layers) == sorted(expected.layers) == list(range(LAYERS))
    for index, layer in found.layers.items():
        torch.testing.assert_close(layer.mean, expected.layers[index].mean)
        for name in SKETCH_TENSORS:
            torch.testing.assert_close(getattr(layer.sketch, name), getattr(expected.layers[index].sketch, name), atol=1e-2, rtol=2e-2, msg=name)


@pytest.mark.parametrize("settings", [FEW, FLAT], ids=["budget", "threshold"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_file_of_one_worker_serves_several_with_the_same_result(sizes, settings, agreeing, monkeypatch):
    if settings is FLAT:
        # No page stands out, so a mass that is a little different shows in how many are attended.
        monkeypatch.setattr(MiniEngine, "scale", 0.02)
    alone = RankEngine(settings)
    calibrate_on_prompts(alone)
    wait_for_file()
    alone = RankEngine(settings)
    outputs = decode(alone)
    for engine in rank_engines(settings, sizes, agreeing):
        assert engine.state.calibrator is None
        assert engine.state.calibration_source == f"{whole_file()} (made with stand-in)"
        layers = range(engine.first_layer, engine.first_layer + len(engine.layers))
        heads = engine.head_slice("key")
        for index, layer in zip(layers, engine.state.layers.values()):
            theirs = alone.state.layers[f"model.layers.{index}.attn"].tables
            for name in ("mean", *SKETCH_TENSORS):
                assert torch.equal(getattr(layer.tables, name), getattr(theirs, name)[heads]), name
        for step, theirs in zip(decode(engine), outputs):
            for output, index in zip(step, layers):
                torch.testing.assert_close(output, theirs[index][:, engine.head_slice("query")])
        for index, layer in zip(layers, engine.state.layers.values()):
            theirs = alone.state.layers[f"model.layers.{index}.attn"]
            assert torch.equal(layer.counts[0], theirs.counts[0, heads])
            assert torch.equal(layer.records.records, theirs.records.records[:, heads])
            assert (layer.counts[0] == FEW["budget_pages"]).all() if settings is FEW else ((layer.counts[0] > 4) & (layer.counts[0] < 31)).all()


def decode(engine):
    """Outputs of each decode step, for each layer of the worker."""
    request = Request(3)
    engine.step([(request, 500)])
    return [engine.step([(request, 1)])[0] for _ in range(3)]


@pytest.mark.parametrize("sizes", SIZES)
def test_with_all_pages_every_worker_computes_full_attention(sizes, agreeing):
    request = Request(3)
    for engine in rank_engines({"rule": "budget", "budget": 1.0, "selector": "rki4", "full_pages": 0}, sizes, agreeing):
        request = Request(3)
        engine.step([(request, 500)])
        position = request.computed
        (outputs,) = engine.step([(request, 1)])
        for index, output in enumerate(outputs):
            torch.testing.assert_close(output, engine.expected(request, index, position, 1), atol=2e-5, rtol=2e-5)


def test_ranks_become_sparse_in_the_same_step(agreeing):
    engines = rank_engines(FEW, (2, 1), agreeing)
    assert len({run_rank(engine, agreeing, calibrate_on_prompts) for engine in engines}) == 1
    wait_for_file()


# ---------------------------------------------------------------------- real processes
def start_ranks(folder, size, heads, group):
    """Run ``size`` workers with gloo between them, and the cache directory of this test; returns what they report, and their tables."""
    folder.mkdir()
    path = os.pathsep.join([str(HERE), str(HERE / "standin"), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
    processes = []
    for rank in range(size):
        command = [sys.executable, str(HERE / "rank_engine.py"), str(rank), str(size), str(folder), str(heads), str(group)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for process in processes:
        try:
            printed, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0, printed
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return reports, [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def test_ranks_with_the_same_kv_head_fit_one_basis_for_all_its_query_heads(tmp_path, agreeing):
    """Multi-query attention on two ranks: both have the kv head, each with half of its query heads."""
    reports, tables = start_ranks(tmp_path / "run", 2, heads=1, group=4)
    assert reports[0]["steps"] == reports[1]["steps"] > 0
    assert kept() == [whole_file().name]
    found = load_calibration(whole_file())
    for index in range(LAYERS):
        assert torch.equal(tables[0][index]["encode_matrix"], tables[1][index]["encode_matrix"])
        keys, queries = captured(index, heads=1, group=4)
        places = torch.arange(16, 16 + keys.shape[1])
        expected = fit_layer(keys, queries[:, ::2], key_positions=places, query_positions=places[:: 2 * calibrate.QUERY_STRIDE])
        half = fit_layer(keys, queries[:2], key_positions=places, query_positions=places[:: calibrate.QUERY_STRIDE])
        torch.testing.assert_close(found.layers[index].sketch.query_matrix, expected.sketch.query_matrix, atol=1e-2, rtol=2e-2)
        assert not torch.allclose(found.layers[index].sketch.query_matrix.float(), half.sketch.query_matrix.float(), atol=1e-2, rtol=2e-2)
    # One worker takes the file, as do two.
    alone = RankEngine(FEW, heads=1, group=4)
    assert alone.state.calibrator is None
    for rank in range(2):
        with as_rank((rank, 2), group=agreeing):
            engine = RankEngine(FEW, (rank, 2), heads=1, group=4)
        assert engine.state.calibrator is None
        assert torch.equal(engine.state.layers["model.layers.0.attn"].tables.mean, found.layers[0].mean)


def captured(layer, heads, group):
    """Keys ``[H, 256, D]`` and scaled queries ``[Hq, 64, D]`` that calibration reads of the first prompt."""
    engine = RankEngine({"selector": "mean"}, heads=heads, group=group)
    keys, queries = (engine.tokens(1, layer, kind, 16, 256) for kind in ("key", "query"))
    return keys.transpose(0, 1), queries[:: calibrate.QUERY_STRIDE].transpose(0, 1) * engine.scale


@pytest.mark.parametrize(("total", "latent", "partners"), [(2, False, [[0, 1], [0, 1], [2, 3], [2, 3]]), (8, True, [[0, 1, 2, 3]] * 4), (4, False, None)])
def test_whose_queries_a_rank_fits_on(total, latent, partners):
    """Four ranks of three query heads: their queries are their numbers."""
    def queries(rank):
        return torch.arange(16.0)[:, None, None] + 100 * rank + 10 * torch.arange(3.0)[:, None] + torch.zeros(5)

    model = SimpleNamespace(use_mla=latent, get_total_num_kv_heads=lambda: total)
    config = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=4, pipeline_parallel_size=1))
    for rank in range(4):
        step = 1 if partners is None else len(partners[rank])
        group = SimpleNamespace(all_gather=lambda own, dim, step=step: torch.cat([queries(r)[::step] for r in range(4)], dim))
        with as_rank((rank, 4), group=None if partners is None else group):
            found = parallel.queries_of_all_ranks(config, queries(rank))
        assert torch.equal(found, torch.cat([queries(r)[::step] for r in (partners[rank] if partners else [rank])], 1))


def test_a_file_that_only_one_rank_finds_is_used_by_none(monkeypatch, agreeing):
    """Two hosts with a cache directory each, one of which has a file: ranks that differed in whether they fit would wait for each other for ever."""
    calibrate_on_prompts(RankEngine(FEW))
    wait_for_file()
    asked = []

    def another_has_none(tensor, op, group):
        asked.append(int(tensor))
        assert op == torch.distributed.ReduceOp.MIN
        tensor.fill_(0)

    monkeypatch.setattr(torch.distributed, "all_reduce", another_has_none)
    (engine, _) = rank_engines(FEW, (2, 1), agreeing)
    assert asked == [1, 1]
    assert engine.state.calibrator is not None
    assert engine.state.calibration_source.startswith("from the first")


# ---------------------------------------------------------------------- shares
def shares(tensor_size, pipeline_size=1, total_heads=4, layers=2):
    """The calibration of a model, and the shares of its workers."""
    generator = torch.Generator().manual_seed(1)
    fitted = {
        i: fit_layer(torch.randn(total_heads, 256, 64, generator=generator), torch.randn(2 * total_heads, 32, 64, generator=generator)) for i in range(layers)
    }
    found = []
    for worker in Worker(tensor_size=tensor_size, pipeline_size=pipeline_size).all():
        first, count = parallel.rank_heads(total_heads, worker.tensor_rank, tensor_size)
        own = list(fitted)[worker.pipeline_rank :: pipeline_size]
        cut = {i: fitted[i].__class__(fitted[i].mean[first : first + count], fitted[i].sketch.heads(first, first + count)) for i in own}
        found.append((Calibration("m", "f", cut, first), worker))
    return fitted, found


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 1), (4, 2), (8, 1)])
def test_joined_shares_are_the_whole(sizes):
    fitted, found = shares(*sizes)
    whole = join_shares([share for share, _ in found], 4)
    assert whole.first_head == 0
    for index, layer in fitted.items():
        assert torch.equal(whole.layers[index].mean, layer.mean)
        assert torch.equal(whole.layers[index].sketch.mean, layer.mean)
        for name in SKETCH_TENSORS:
            assert torch.equal(getattr(whole.layers[index].sketch, name), getattr(layer.sketch, name)), name


def test_shares_that_are_no_whole_are_refused():
    _, found = shares(4)
    with pytest.raises(CalibrationError, match="layer 0 hold kv heads 0-0, 2-2, 3-3 of 4"):
        join_shares([share for share, worker in found if worker.tensor_rank != 1], 4)
    with pytest.raises(CalibrationError, match="no whole"):
        join_shares([share for share, worker in found if worker.tensor_rank != 3], 4)


def test_workers_that_write_at_once_make_one_whole():
    _, found = shares(4, 2)
    results = []
    threads = [threading.Thread(target=lambda share=share, worker=worker: results.append(write_share(share, worker, 4))) for share, worker in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = calibration_path("f", 256)
    assert [result for result in results if result is not None] == [path]
    assert len(results) == 8
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert sorted(load_calibration(path).layers) == [0, 1]


def test_shares_of_other_sizes_are_left_alone():
    """Two engines with the same model and different sizes, whose first workers have the same rank."""
    _, by_heads = shares(2, 1)
    _, by_layers = shares(1, 2)
    assert write_share(*by_heads[0], 4) is None
    assert write_share(*by_layers[1], 4) is None
    assert write_share(*by_layers[0], 4) is not None
    assert len(list(calibration_path("f", 256).parent.iterdir())) == 2
    assert write_share(*by_heads[1], 4) is not None


def test_a_share_that_an_earlier_engine_left_is_not_used(agreeing):
    """Its other worker never wrote one, and the model may have other weights now."""
    first, second = rank_engines(FEW, (2, 1), agreeing)
    run_rank(second, agreeing, calibrate_on_prompts)
    wait_for_file()
    (left,) = kept()
    assert "share-tensor-1-of-2" in left
    first, second = rank_engines(FEW, (2, 1), agreeing)
    assert kept() == []
    run_rank(first, agreeing, calibrate_on_prompts)
    wait_for_file()
    assert ["share-tensor-0-of-2" in name for name in kept()] == [True]
    run_rank(second, agreeing, calibrate_on_prompts)
    wait_for_file()
    assert kept() == [whole_file().name]


def test_a_share_is_no_calibration_of_the_model(tmp_path):
    _, found = shares(2)
    found[1][0].save(tmp_path / "share.safetensors")
    share = load_calibration(tmp_path / "share.safetensors")
    assert share.first_head == 2
    with pytest.raises(CalibrationError, match=r"has shape \(2, 64\)"):
        share.check("m", "f", 4, 64)


# ---------------------------------------------------------------------- who speaks
@pytest.mark.parametrize(("rank", "tensor", "speaks", "first"), [
    (0, 2, True, True), (1, 2, False, False), (2, 2, True, False), (3, 2, False, False), (None, 1, True, True),
])
def test_who_speaks_for_whom(rank, tensor, speaks, first):
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=tensor))
    assert parallel.is_first_tensor_rank(config) is speaks
    assert parallel.is_first_worker(config) is first


def test_ranks_with_the_same_layers_log_once_and_count_steps_once(agreeing, caplog):
    prometheus = pytest.importorskip("prometheus_client")
    caplog.set_level(logging.INFO, logger="vllm.kvskim")
    registry = prometheus.CollectorRegistry()
    counters = SkimMetrics(registry)
    engines = rank_engines({"selector": "rki4", **FEW}, (2, 2), agreeing)
    assert len([line for line in caplog.messages if "in vLLM, variant" in line]) == 2, "a block for each part of the pipeline"
    assert [line.split("layers")[1][:4] for line in caplog.messages if "  sparse  " in line] == [" (0)", " (1)"]
    for engine in engines:
        engine.state.metrics = counters
        request = Request(1)
        engine.step([(request, 300)])
        engine.step([(request, 1)])
    assert registry.get_sample_value("kvskim_sparse_steps_total") == 1
    assert registry.get_sample_value("kvskim_decode_rows_total") == 1


def test_a_worker_knows_its_place():
    with as_rank((1, 2), (2, 3)):
        config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=3))
        worker = parallel.worker(config)
    assert worker == Worker(1, 2, 2, 3)
    with as_rank((1, 2)):
        config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_index=3))
        assert parallel.worker(config) == Worker(1, 2, engine=3)
    assert worker.count == 6
    assert len({w.path(Path("/x/whole.safetensors")) for w in (*worker.all(), *Worker(1, 2, 2, 3, engine=1).all())}) == 12
    assert MiniEngine(FEW).state.speaks
