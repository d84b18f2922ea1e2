"""`kvskim bench e2e`: processes, what becomes of failures, files, exit status. A stand-in takes the place of the engines."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from kvskim import cli_bench, cli_bench_e2e
from kvskim.bench import e2e_run
from kvskim.bench.e2e_plan import SIDES, Job, Model
from kvskim.bench.e2e_report import FORMAT, read_results
from kvskim.bench.geometries import LONGEST
from kvskim.config import SkimConfig
from kvskim.errors import KvskimError

STANDIN = Path(__file__).parent / "bench_standin.py"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _standin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(e2e_run, "COMMAND", (sys.executable, str(STANDIN)))
    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KVSKIM_CONFIG", raising=False)
    monkeypatch.delenv("KVSKIM_DISABLE", raising=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, vLLM, and kvskim as its plugin."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: object() if name == "vllm" else found(name, *more))
    plugin = EntryPoint("kvskim", "kvskim.engines.vllm.plugin:register_plugin", "vllm.general_plugins")
    monkeypatch.setattr(cli_bench_e2e, "entry_points", lambda group: [plugin] if group == "vllm.general_plugins" else [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def bench(*words: str) -> Result:
    return CliRunner().invoke(cli_bench.app, ["e2e", *words])


def request(*batches: int, **more: Any) -> e2e_run.Request:
    jobs = tuple(Job("decode", batch, 16384) for batch in batches)
    settings = SkimConfig(rule="budget", budget_pages=128).model_dump(mode="json")
    return e2e_run.Request(Model("llama3.1-8b", None, LONGEST), jobs, SIDES, settings, **{"timeout": 30.0, **more})


def outcomes(run: e2e_run.Run) -> dict[int, str | float]:
    return {entry["job"]["batch"]: entry["error"] or entry["value"]["tpot_ms"] for entry in run.jobs}


# ---------------------------------------------------------------------- the command
@pytest.mark.usefixtures("machine")
def test_both_sides_are_measured_and_written(tmp_path: Path) -> None:
    files = {option: tmp_path / f"result{suffix}" for option, suffix in (("--json", ".json"), ("--markdown", ".md"), ("--plot", ".png"), ("--log", ".log"))}
    words = [str(word) for pair in files.items() for word in pair]
    result = bench("--cases", "1x16K,4x128K", "--ttft", "32K", "--load", "2x32K", *words)
    assert result.exit_code == 0, result.output
    content = json.loads(files["--json"].read_text())
    assert [round(row["speedup"], 6) for row in content["rows"]] == [2.5, 2.5, round(100 / 101, 6), 2.5]
    assert content["runs"][1]["settings"]["budget_pages"] == 128
    assert "calibration" not in json.dumps(content["runs"][0])
    text = files["--markdown"].read_text()
    assert "| llama3.1-8b | sketch, budget: 128 pages | 4 x 128K | 10.00 | 4.00 | 2.50x |" in text
    assert "| 32K | 100.0 | 101.0 | 1.00% |" in text
    assert "3.0%" in text.split("### Engines")[1]
    assert files["--plot"].read_bytes().startswith(PNG)
    assert "2.50x" in result.output


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("cases", "code"), [("1x16K", 0), ("1x16K,14x16K", 1), ("13x16K,1x16K", 1)])
def test_a_failed_case_is_shown_and_fails_the_command(cases: str, code: int, tmp_path: Path) -> None:
    result = bench("--cases", cases, "--json", str(tmp_path / "r.json"))
    assert result.exit_code == code, result.output
    rows = {row["job"]["batch"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert rows[1]["speedup"] == 2.5
    if 14 in rows:
        assert rows[14]["kvskim_error"] == "too large for this GPU"
        assert "too large for this GPU" in result.output
    if 13 in rows:
        assert rows[13]["dense_error"] == "ValueError: the engine met its end"


@pytest.mark.usefixtures("machine")
def test_an_engine_that_does_not_start_leaves_the_other_sides_figures(tmp_path: Path) -> None:
    result = bench("--cases", "1x16K,4x16K", "--blocks", "666", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 1
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["dense_error"], row["kvskim"]["tpot_ms"], row["speedup"]) for row in rows] == [("RuntimeError: no memory for the cache", 4.0, None)] * 2


@pytest.mark.usefixtures("machine")
def test_sides_measured_apart_are_put_together(tmp_path: Path) -> None:
    dense, both = tmp_path / "dense.json", tmp_path / "both.json"
    assert bench("--cases", "1x16K,4x128K", "--side", "dense", "--json", str(dense)).exit_code == 0
    assert [row["speedup"] for row in json.loads(dense.read_text())["rows"]] == [None, None]
    result = bench("--cases", "1x16K", "--side", "kvskim", "--merge", str(dense), "--json", str(both), "--plot", str(tmp_path / "r.png"))
    assert result.exit_code == 0, result.output
    rows = {row["job"]["batch"]: row for row in json.loads(both.read_text())["rows"]}
    assert rows[1]["speedup"] == 2.5
    assert rows[4]["speedup"] is None
    picture = tmp_path / "again.png"
    drawn = CliRunner().invoke(cli_bench.app, ["plot", str(both), str(picture)])
    assert drawn.exit_code == 0, drawn.output
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.usefixtures("machine")
def test_profiles_come_last_and_stand_beside_the_times(tmp_path: Path) -> None:
    path, text = tmp_path / "r.json", tmp_path / "r.md"
    result = bench("--cases", "1x16K", "--ttft", "32K", "--profile", "--json", str(path), "--markdown", str(text))
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    for found in content["runs"]:
        assert [entry["job"]["kind"] for entry in found["jobs"]] == ["decode", "ttft", "profile"]
    [row] = [row for row in content["rows"] if row["job"]["kind"] == "profile"]
    assert row["kvskim"]["kernels"] == [{"name": "nvjet", "group": "linear layers", "us": 3000.0, "launches": 4.0}]
    for shown in (text.read_text(), result.output):
        assert "Where a step's time goes: llama3.1-8b, 1 x 16K, sketch, budget: 128 pages" in shown
    assert "| measured without the profiler minus that | 400.0 |  | 400.0 |  |" in text.read_text()
    assert "| dense | linear layers | nvjet | 9000.0 | 4.0 |" in text.read_text()
    assert "--profile looks at decode cases" in str(bench("--ttft", "32K", "--profile").exception)


@pytest.mark.usefixtures("machine")
def test_times_on_several_gpus_stand_beside_each_other_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert bench("--cases", "1x16K", "--side", "dense", "--json", str(one)).exit_code == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = bench("--cases", "1x16K", "--tensor-parallel", "2", "--merge", str(one), "--json", str(two))
    assert result.exit_code == 0, result.output
    found = json.loads(two.read_text())
    assert {(row["model"], row["speedup"]) for row in found["rows"]} == {("llama3.1-8b", None), ("llama3.1-8b on 2 GPUs", 2.5)}
    assert [run["arguments"].get("tensor_parallel_size") for run in found["runs"]] == [None, 2, 2]


@pytest.mark.usefixtures("machine")
def test_quick_and_default_cases(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert bench("--quick", "--json", str(path)).exit_code == 0
    assert [(row["job"]["batch"], row["job"]["context"]) for row in json.loads(path.read_text())["rows"]] == [(1, 16384), (1, 131072)]
    assert bench("glm4-9b-1m", "--json", str(path)).exit_code == 0
    assert (1, 1 << 20) in [(row["job"]["batch"], row["job"]["context"]) for row in json.loads(path.read_text())["rows"]]
    assert bench("--ttft", "32K", "--json", str(path)).exit_code == 0
    assert [row["job"]["kind"] for row in json.loads(path.read_text())["rows"]] == ["ttft"]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("words", "said"), [
    (("no-such-model",), "neither a geometry"), (("--cases", "one"), "--cases has 'one'"), (("--side", "left"), "--side is 'left'"),
    (("--quick", "--cases", "1x16K"), "--quick has its own cases"),
    (("--variant", "cold"), "variant='cold'"), (("--selector", "oracle"), "selector 'oracle'"), (("--budget-pages", "2"), "budget_pages=2"),
    (("--rule", "budget"), "needs a budget"), (("--json", "/no/such/folder/r.json"), "does not exist"), (("--merge", "/no/such.json"), "there is no such file"),
    (("--config", "{\"tau\": 2}"), "tau=2"), (("--tensor-parallel", "3"), "--tensor-parallel is 3; llama3.1-8b has 32 query heads"),
    (("--tensor-parallel", "16"), "--tensor-parallel is 16, and torch sees"),
])
def test_what_can_be_known_before_is_refused_before(words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e_run, "run", lambda *_: pytest.fail("work was started"))
    result = bench(*words)
    assert result.exit_code != 0
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.usefixtures("machine")
def test_latent_attention_is_refused_where_the_engine_would_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[e2e_run.Request] = []
    monkeypatch.setattr(e2e_run, "run", lambda request, *_: asked.append(request) or [])
    for release, refused in (("0.24.0", False), ("0.26.0", True)):
        monkeypatch.setattr(cli_bench_e2e, "version", lambda _, release=release: release)
        result = bench("deepseek-v2-lite", "--cases", "1x16K")
        assert ("with vLLM 0.24 only, and this is vLLM 0.26.0" in str(result.exception)) is refused
        assert bench("deepseek-v2-lite", "--cases", "1x16K", "--side", "dense").exception is None
        assert bench("llama3.1-8b", "--cases", "1x16K").exception is None
    assert [request.model.latent for request in asked] == [True, True, False, True, False]


@pytest.mark.usefixtures("machine")
def test_without_a_gpu_vllm_or_matplotlib_nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(e2e_run, "run", lambda *_: pytest.fail("work was started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA GPU" in str(bench("--quick").exception)
    monkeypatch.setattr(cli_bench_e2e, "entry_points", lambda group: [])
    assert "on the path but not installed" in str(bench("--quick").exception)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    assert "vllm is not installed" in str(bench("--quick").exception)
    assert "a plot needs matplotlib" in str(bench("--quick", "--plot", str(tmp_path / "r.png")).exception)


def test_settings_of_the_command() -> None:
    def rule(*, real: bool = False, config: str | None = None, **options: Any) -> SkimConfig:
        return cli_bench_e2e.settings_of(config, real=real, **options)

    assert (rule().rule, rule().budget_pages) == ("budget", 128)
    assert rule(real=True) == SkimConfig()
    assert rule(tau=0.01, budget_pages=None).rule == "threshold"
    assert rule(coverage=0.9).coverage == 0.9
    assert rule(config='{"rule": "coverage"}', selector="rki4") == SkimConfig(rule="coverage", selector="rki4")
    assert rule(config='{"selector": "rki4", "selector_options": {"rank": 4}}').budget_pages == 128
    assert rule(budget_pages=64, config='{"sink_pages": 2}').sink_pages == 2


# ---------------------------------------------------------------------- processes
def test_one_bad_job_does_not_take_the_others_with_it() -> None:
    runs = e2e_run.run(request(1, 13, 2, 14, 16, 3), lambda *_: None)
    for run, tpot in zip(runs, (10.0, 4.0)):
        assert outcomes(run) == {
            1: tpot, 13: "ValueError: the engine met its end", 2: tpot, 14: "too large for this GPU", 16: "RuntimeError: out of blocks", 3: tpot,
        }
        assert run.engine is not None
        assert run.engine["start_s"] == 50.0


def test_everything_measured_so_far_is_kept() -> None:
    seen: list[list[int]] = []
    e2e_run.run(request(1, 13, 2), lambda *_: None, lambda runs: seen.append([len(run.jobs) for run in runs]))
    assert seen == [[1], [2], [3], [3, 1], [3, 2], [3, 3]]


def test_a_process_that_takes_too_long_is_ended_with_all_its_jobs() -> None:
    started = time.monotonic()
    runs = e2e_run.run(request(1, 15, 2, timeout=3.0), lambda *_: None)
    assert time.monotonic() - started < 30
    for run, tpot in zip(runs, (10.0, 4.0)):
        late = "the engine took more than 3 seconds, the limit of --timeout"
        assert outcomes(run) == {1: tpot, 15: late, 2: late}


def test_the_calibration_goes_to_kvskim_only_and_lies_at_the_same_place_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[dict[str, Any]] = []
    follow = e2e_run.follow
    monkeypatch.setattr(e2e_run, "follow", lambda spec, *more: specs.append(dict(spec)) or follow(spec, *more))
    for _ in range(2):
        e2e_run.run(request(1), lambda *_: None)
    prepared, dense, sparse = specs[:3]
    assert prepared["calibration"] == sparse["settings"]["calibration"]
    assert dense["settings"] is None
    assert (dense["latent"], sparse["latent"]) == (False, False)
    assert dense["llm"] == sparse["llm"]
    assert Path(dense["llm"]["model"], "config.json").is_file()
    assert specs[3:] == specs[:3]


def test_the_engines_are_told_of_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[dict[str, Any]] = []
    monkeypatch.setattr(e2e_run, "follow", lambda spec, *_: specs.append(dict(spec)) or iter(()))
    settings = SkimConfig(rule="budget", budget_pages=128).model_dump(mode="json")
    asked = e2e_run.Request(Model("deepseek-v2-lite", None, LONGEST, latent=True), (Job("decode", 1, 16384),), SIDES, settings)
    e2e_run.run(asked, lambda *_: None)
    assert [spec.get("latent") for spec in specs] == [None, True, True]
    assert json.loads(Path(specs[1]["llm"]["model"], "config.json").read_text())["kv_lora_rank"] == 512


def test_what_the_engines_print_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engines.log"
    log.write_text("earlier\n")
    e2e_run.run(request(13, 16, log=log), lambda *_: None)
    lines = log.read_text().splitlines()
    assert lines[0] == "earlier"
    assert lines.count("ValueError: the engine met its end") == lines.count("(EngineCore pid=1) RuntimeError: out of blocks") == 2


def test_the_cause_is_read_from_the_output() -> None:
    text = """
    (EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
    Traceback (most recent call last):
    RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
    """
    assert e2e_run.root_cause(text) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert e2e_run.root_cause("vllm.EngineDeadError: gone") == "vllm.EngineDeadError: gone"
    assert e2e_run.root_cause("killed") == ""


def test_other_files_are_not_results(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(KvskimError, match="is not a result of"):
        read_results(tmp_path / "r.json", "--merge")
    (tmp_path / "r.json").write_text(json.dumps({"format": FORMAT, "runs": [{"side": "dense", "speed": 1}]}))
    with pytest.raises(KvskimError, match="is damaged"):
        read_results(tmp_path / "r.json", "--merge")


# ---------------------------------------------------------------------- everything
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("cases", "kernels_pass", "code"), [("1x16K", True, 0), ("14x16K", True, 1), ("1x16K", False, 1)])
def test_all_is_e2e_and_kernels(cases: str, kernels_pass: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[Any] = []
    monkeypatch.setattr(cli_bench, "run_kernels", lambda *paths, **options: called.append((paths, options["quick"])) or kernels_pass)
    result = CliRunner().invoke(cli_bench.app, ["all", "--output", str(tmp_path), "--cases", cases])
    assert result.exit_code == code, result.output
    assert called == [(("auto", tmp_path / "kernels.json", tmp_path / "kernels.md"), False)]
    assert {"e2e.json", "e2e.md"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "e2e.png").exists() is (cases == "1x16K")


@pytest.mark.parametrize(("gpu", "said"), [(True, ["vllm is not installed here"]), (False, ["vllm is not installed here", "torch sees none"])])
def test_all_goes_on_where_one_of_them_can_not_run(gpu: bool, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else found(name, *more))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    called: list[Any] = []
    if gpu:
        monkeypatch.setattr(cli_bench, "run_kernels", lambda *paths, **_: called.append(paths) or True)
    result = CliRunner().invoke(cli_bench.app, ["all", "--output", str(tmp_path), "--cases", "1x16K"])
    assert result.exit_code == 1, result.output
    assert len(called) == gpu
    for words in said:
        assert words in " ".join(result.output.split())


def test_all_needs_a_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli_bench.app, ["all", "--output", str(tmp_path / "missing")])
    assert "which is no folder: create it first" in str(result.exception)
