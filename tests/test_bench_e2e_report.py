"""`kvskim bench e2e`: roofline arithmetic, speed-ups, merging, tables, plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvskim.bench import e2e_report as report
from kvskim.bench import e2e_tables, plot
from kvskim.bench.e2e_plan import DENSE, KVSKIM, Job
from kvskim.bench.e2e_run import Run
from kvskim.config import SkimConfig
from kvskim.errors import KvskimError

LAYER = dict(kv_heads=8, head_size=128, window=None, element_bytes=2, latent=False, record_bytes=None)
BUDGET = SkimConfig(rule="budget", budget_pages=128).model_dump(mode="json")


def engine(*layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = dict(vllm="0.24.0", start_s=50.0, weight_bytes=1000, expert_bytes=0, kernels="cuda", graphs="FULL", kv_blocks=1000, block_tokens=16)
    return {**base, "layers": list(layers), **more}


def make_run(side: str, times: dict[tuple[int, int], float | str], *, model: str = "m", settings: dict[str, Any] | None = None, **more: Any) -> Run:
    sparse = side == KVSKIM
    run = Run(
        side, model, "dummy", (settings or BUDGET) if sparse else None, {"gpu": "G", "torch": "2", "copy_bandwidth": 1e12},
        {"max_model_len": 1024, "max_num_seqs": 4},
        engine(LAYER | {"record_bytes": 256 if sparse else None}, kv_blocks=970 if sparse else 1000),
    )
    for (batch, context), time in times.items():
        value = None if isinstance(time, str) else dict(tpot_ms=time, tokens_s=1e3 * batch / time, activity={})
        run.add(Job("decode", batch, context), value, time if isinstance(time, str) else "")
    for name, value in more.items():
        setattr(run, name, value)
    return run


def test_bytes_of_a_dense_step() -> None:
    # 16384 tokens x 8 heads x (K and V) x 128 x 2 bytes in each of two layers.
    assert report.step_bytes(engine(LAYER, LAYER), 1, 16384) == 1000 + 2 * 67_108_864
    assert report.step_bytes(engine(LAYER), 3, 16384) == 1000 + 3 * 67_108_864
    # A window of 1024 tokens reads no more than these.
    assert report.step_bytes(engine(LAYER | {"window": 1024}), 1, 16384) == 1000 + 1024 * 8 * 2 * 128 * 2
    assert report.step_bytes(engine(LAYER, expert_bytes=10), 1, 16384) is None
    # A latent row is key and value in one.
    assert report.step_bytes(engine(LAYER | {"latent": True, "kv_heads": 1, "head_size": 576}), 1, 16384) == 1000 + 16384 * 576 * 2


def test_bytes_of_a_sparse_step() -> None:
    sparse = LAYER | {"record_bytes": 256}
    records = 1024 * 8 * 256
    assert report.step_bytes(engine(sparse), 1, 16384, attended=0) == 1000 + records
    # 8 heads of 128 pages of 16 tokens of K and V.
    assert report.step_bytes(engine(sparse), 1, 16384, attended=8 * 128) == 1000 + records + 8 * 128 * 16 * 2 * 128 * 2
    # An incomplete page has no record of its own, and is counted with one.
    assert report.step_bytes(engine(sparse), 1, 16385) == 1000 + records + 8 * 256
    # A dense layer beside it reads all.
    assert report.step_bytes(engine(sparse, LAYER), 2, 16384, attended=16) == 1000 + 2 * (records + 67_108_864) + 16 * 8192
    assert report.step_bytes(engine(sparse, expert_bytes=10), 1, 16384) is None


def test_floor_is_bytes_over_bandwidth() -> None:
    run = make_run(DENSE, {(1, 16384): 5.0})
    assert report.floor_ms(run, Job("decode", 1, 16384), {}) == pytest.approx((1000 + 67_108_864) / 1e12 * 1e3)
    run.engine = None
    assert report.floor_ms(run, Job("decode", 1, 16384), {}) is None


def test_rows_pair_the_sides() -> None:
    dense = make_run(DENSE, {(1, 16384): 6.0, (4, 131072): "no room", (8, 65536): 20.0})
    sparse = make_run(KVSKIM, {(1, 16384): 5.0, (4, 131072): 7.0, (2, 16384): 4.0})
    other = make_run(DENSE, {(1, 16384): 99.0}, model="n")
    rows = report.rows([other, sparse, dense])
    found = {(row.model, row.job.batch): row for row in rows}
    assert len(rows) == len(found) == 5
    assert found["m", 1].speedup == pytest.approx(1.2)
    assert found["m", 1].roofline_speedup == pytest.approx((1000 + 67_108_864) / (1000 + 1024 * 8 * 256))
    assert (found["m", 4].speedup, found["m", 4].dense_error, found["m", 4].of(KVSKIM)) == (None, "no room", 7.0)
    assert found["m", 8].kvskim is None
    assert found["m", 2].dense is None
    assert (found["n", 1].of(DENSE), found["n", 1].kvskim) == (99.0, None)


def test_more_tokens_per_second_are_a_speedup() -> None:
    job = Job("load", 4, 1024, 12, 64, 1, 9)
    row = report.Row("m", "dummy", "", job, {"output_tokens_s": 100.0}, {"output_tokens_s": 150.0})
    assert row.speedup == 1.5


def test_pages_and_mass_are_means() -> None:
    row = report.Row("m", "dummy", "", Job("decode", 1, 16384), None, {"activity": dict(attended=256, count=4, covered=3.0, total=4096)})
    assert (row.pages, row.covered) == (64.0, 0.75)
    assert report.Row("m", "dummy", "", Job("decode", 1, 16384), None, {"activity": {}}).pages is None


def test_labels_say_what_differs_from_the_defaults() -> None:
    assert report.label(BUDGET) == "sketch, budget: 128 pages"
    assert report.label(SkimConfig(selector="rki4", selector_options={"rank": 4}).model_dump(mode="json")).startswith("rki4 rank 4, threshold: mass >= ")


def test_merging_keeps_the_later_figure_of_a_job() -> None:
    first = make_run(DENSE, {(1, 16384): "failed", (2, 16384): 7.0})
    second = make_run(DENSE, {(1, 16384): 6.0})
    sparse, rki4 = make_run(KVSKIM, {(1, 16384): 5.0}), make_run(KVSKIM, {(1, 16384): 8.0}, settings=SkimConfig(selector="rki4").model_dump(mode="json"))
    merged = report.merge([first, sparse, second, rki4])
    assert [run.side for run in merged] == [DENSE, KVSKIM, KVSKIM]
    assert {entry["job"]["batch"]: entry["value"] and entry["value"]["tpot_ms"] for entry in merged[0].jobs} == {1: 6.0, 2: 7.0}
    assert [row.speedup for row in report.rows(merged)] == [pytest.approx(1.2), pytest.approx(0.75), None]
    # An engine that did not start does not erase the facts of the one that did.
    failed = make_run(DENSE, {(4, 16384): "no start"}, engine=None)
    assert report.merge([first, failed])[0].engine is not None


def test_results_of_different_gpus_are_not_merged() -> None:
    other = make_run(KVSKIM, {(1, 16384): 5.0}, machine={"gpu": "H", "torch": "2", "copy_bandwidth": 1e12})
    with pytest.raises(KvskimError, match=r"different GPUs \(G, H\)"):
        report.merge([make_run(DENSE, {(1, 16384): 6.0}), other])


def test_blocks_lost_to_records() -> None:
    dense, sparse = make_run(DENSE, {}), make_run(KVSKIM, {})
    assert e2e_tables.blocks_lost(sparse, dense) == pytest.approx(0.03)
    assert e2e_tables.blocks_lost(dense, dense) is None
    sparse.arguments = {"max_model_len": 2048}
    assert e2e_tables.blocks_lost(sparse, dense) is None
    dense.arguments = sparse.arguments = {"num_gpu_blocks_override": 970}
    assert e2e_tables.blocks_lost(sparse, dense) is None


def test_markdown_names_failures_and_keeps_its_columns() -> None:
    not_started = make_run(KVSKIM, {}, model="n", engine=None, error="no room")
    text = e2e_tables.markdown([make_run(DENSE, {(1, 16384): "a | b"}), make_run(KVSKIM, {(1, 16384): 5.0}), not_started])
    assert "failed: a / b" in text
    assert "failed: no room" in text
    widths = [line.count("|") for line in text.split("### Engines")[0].splitlines() if line.startswith("|")]
    assert len(set(widths)) == 1


def test_plot_lines_by_batch_and_selector(tmp_path: Path) -> None:
    runs = [
        make_run(DENSE, {(1, 16384): 6.0, (1, 131072): 9.0, (4, 16384): 7.0}), make_run(KVSKIM, {(1, 131072): 4.0, (1, 16384): 5.0, (4, 16384): 5.0}),
        make_run(DENSE, {(1, 16384): 6.0}, model="n"), make_run(KVSKIM, {(1, 16384): 5.0}, model="n"),
    ]
    rows = [row for row in report.rows(runs) if row.model == "m"]
    assert {name: [row.job.context for row in line] for name, line in plot.lines(rows).items()} == {"batch 1": [16384, 131072], "batch 4": [16384]}
    rki4 = make_run(KVSKIM, {(1, 16384): 5.0}, settings=SkimConfig(selector="rki4").model_dump(mode="json"))
    assert len(plot.lines(report.rows([*runs[:2], rki4]))) == 3
    plot.draw(runs, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KvskimError, match="nothing to plot"):
        plot.draw(runs[:1], tmp_path / "r.png")
    # One selector alone gives the picture that a result without the others gives.
    plot.draw([*runs, rki4], tmp_path / "one.png", "sketch")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "r.png").read_bytes()
    with pytest.raises(KvskimError, match="--selector is 'quad'; the results have rki4, sketch"):
        plot.draw([*runs, rki4], tmp_path / "one.png", "quad")
