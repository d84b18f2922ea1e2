"""`kvskim bench e2e`: what its processes do, on a vLLM that only takes note of what it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvskim.bench import e2e_engine, e2e_worker, timing
from kvskim.bench.e2e_plan import Job
from kvskim.bench.geometries import write_geometry
from kvskim.calibration import load_calibration
from kvskim.config import SkimConfig, configured_by, load_config

JOBS = [Job("decode", 1, 16384), Job("decode", 2, 16384), Job("decode", 3, 16384)]


class FakeLLM:
    """Answers like a `vllm.LLM` that has started."""

    made: list[dict[str, Any]]

    def __init__(self, **arguments: Any) -> None:
        self.made.append({**arguments, "disabled": os.environ["KVSKIM_DISABLE"]})
        cache = SimpleNamespace(num_gpu_blocks=1000, block_size=16)
        model = SimpleNamespace(max_model_len=16384, get_vocab_size=lambda: 500)
        config = SimpleNamespace(cache_config=cache, model_config=model, scheduler_config=SimpleNamespace(async_scheduling=True))
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[str]:
        return [json.dumps({"kvskim_bench_facts": {"weight_bytes": 7}, "kvskim_bench_activity": {"calibrated": True}}[method])]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = ModuleType("vllm")
    module.LLM, module.__version__ = FakeLLM, "0.24.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(FakeLLM, "made", [], raising=False)
    # Restored afterwards: the process writes to it.
    monkeypatch.setenv("KVSKIM_DISABLE", "0")
    monkeypatch.setenv("KVSKIM_CONFIG", "{}")
    monkeypatch.delenv("KVSKIM_CONFIG")
    return FakeLLM


def events_of(spec: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    (folder / "spec.json").write_text(json.dumps(spec))
    e2e_worker.main([str(folder / "spec.json"), str(folder / "events.jsonl")])
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def spec(side: str, **more: Any) -> dict[str, Any]:
    jobs = [asdict(job) for job in JOBS]
    return dict(task="measure", side=side, settings={"selector": "mean"}, llm={"model": "m"}, real=False, repetitions=2, latent=False, jobs=jobs) | more


@pytest.mark.parametrize("side", ["dense", "kvskim"])
def test_each_side_has_its_own_backend(side: str, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(e2e_engine.EngineBench, "attempt", lambda bench, job: seen.append((bench.filled, bench.repetitions, job)) or ({"x": 1}, "", True))
    events = events_of(spec(side), tmp_path)
    [made] = llm.made
    expected: dict[str, Any] = {}
    if side == "kvskim":
        expected = {"attention_backend": "CUSTOM", "additional_config": {"kvskim": {"selector": "mean"}}}
    assert made == {"model": "m", "disabled": "1" if side == "dense" else "0", **expected}
    assert seen == [(True, 2, job) for job in JOBS]
    engine = next(event for event in events if event["event"] == "engine")
    assert (engine["kv_blocks"], engine["block_tokens"], engine["weight_bytes"], engine["vllm"]) == (1000, 16, 7, "0.24.0")
    results = [event for event in events if event["event"] == "result"]
    assert [event["job"] for event in results] == [job.key for job in JOBS]
    assert [event["event"] for event in events[-3:]] == ["job", "result", "done"]


@pytest.mark.parametrize("side", ["dense", "kvskim"])
def test_latent_attention_is_configured_where_vllm_looks(side: str, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(e2e_engine.EngineBench, "attempt", lambda *_: ({"x": 1}, "", True))
    settings = SkimConfig(rule="budget", budget_pages=128).model_dump(mode="json")
    events_of(spec(side, latent=True, settings=settings), tmp_path)
    [made] = llm.made
    if side == "dense":
        assert made == {"model": "m", "disabled": "1"}
        assert configured_by() is None
    else:
        assert made["attention_backend"] == "FLASH_ATTN_MLA"
        # Both ways say the same, and saying it twice drops nothing.
        loaded = load_config(made["additional_config"]["kvskim"])
        assert (loaded.config, loaded.warnings, configured_by()) == (SkimConfig(**settings), [], "KVSKIM_CONFIG")
        assert load_config().config == SkimConfig(**settings)


def test_processes_need_nothing_of_the_command_line() -> None:
    modules = "kvskim.bench.e2e_worker, kvskim.bench.e2e_engine, kvskim.bench.random_calibration"
    code = f"import sys, {modules}; print(sorted({{'typer', 'rich', 'matplotlib', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_engine_that_can_not_go_on_is_left(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes = iter([(None, "too large", True), (None, "dead", False)])
    monkeypatch.setattr(e2e_engine.EngineBench, "attempt", lambda *_: next(outcomes))
    results = [(event["value"], event["error"]) for event in events_of(spec("dense"), tmp_path) if event["event"] == "result"]
    assert results == [(None, "too large"), (None, "dead")]


def test_the_machine_is_described_and_a_calibration_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_geometry("llama3.1-8b", tmp_path)
    settings = json.loads((folder / "config.json").read_text()) | {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 3e12)
    calibration = tmp_path / "c.safetensors"
    prepared = dict(task="prepare", model=str(folder), calibration=str(calibration), record_bytes=128)
    machine = next(event for event in events_of(prepared, tmp_path) if event["event"] == "machine")
    assert (machine["gpu"], machine["copy_bandwidth"]) == ("a GPU", 3e12)
    assert load_calibration(calibration).layer(0).sketch.record_bytes == 128
