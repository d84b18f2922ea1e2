"""`kvskim bench e2e`: what is computed from an engine's answers, on an engine with a clock of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvskim.bench import e2e_engine, e2e_load
from kvskim.bench.e2e_engine import EngineBench, Prompts
from kvskim.bench.e2e_load import Trace, arrivals, drive, summary
from kvskim.bench.e2e_plan import DENSE, KVSKIM, Job
from kvskim.bench.geometries import write_geometry
from kvskim.bench.random_calibration import write_random_calibration
from kvskim.calibration import load_calibration, model_fingerprint
from kvskim.engines.vllm.calibration_source import model_settings


class Engine:
    """A `vllm.LLM` whose decode step takes ``steps`` milliseconds, one value after the other for each pair of runs, and a prefill ``prefill`` seconds."""

    def __init__(self, steps: list[float], prefill: list[float] = [], blocks: int = 10**6, calibrated_after: int = 0) -> None:  # noqa: B006
        self.steps, self.prefill, self.now = list(steps), list(prefill), 100.0
        self.calls: list[Any] = []
        self.calibrated_after = calibrated_after
        self.recorded: dict[str, Any] = {"step_us": 5.0}
        cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=16)
        model = SimpleNamespace(max_model_len=1 << 17)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache, model_config=model))

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[str]:
        if method.startswith("kvskim_bench_profile"):
            self.calls.append((method, args))
            return [json.dumps(self.recorded if method.endswith("result") else {})]
        assert method == "kvskim_bench_activity"
        return [json.dumps({"calibrated": len(self.calls) >= self.calibrated_after, "attended": 5})]

    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
        assert use_tqdm is False
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self.calls.append((ids, params))
        if params.max_tokens == 1 and self.prefill:
            self.now += self.prefill.pop(0)
        tokens = params.max_tokens
        # The first call of a job warms up; each value of steps then serves a short and a long run.
        step = self.steps[(len(self.calls) - 2) // 2 % len(self.steps)] / 1e3 if self.steps else 0.0
        starts = [self.now + row * step for row in range(len(ids))]
        outputs = [SimpleNamespace(metrics=SimpleNamespace(first_token_ts=start, last_token_ts=start + (tokens - 1) * step)) for start in starts]
        self.now += 10
        return outputs


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.SamplingParams = lambda **fields: SimpleNamespace(**fields)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


def bench(engine: Engine, side: str = KVSKIM, *, filled: bool = True, **more: Any) -> EngineBench:
    return EngineBench(engine, side, Prompts(1000), filled=filled, **more)


# ---------------------------------------------------------------------- jobs
@pytest.mark.parametrize("batch", [1, 32])
def test_time_per_token_is_the_median_of_differences(batch: int) -> None:
    engine = Engine([4.0, 9.0, 5.0])
    value = bench(engine).decode(Job("decode", batch, 16384))
    assert value["runs_ms"] == pytest.approx([4.0, 9.0, 5.0])
    assert value["tpot_ms"] == pytest.approx(5.0)
    assert value["tokens_s"] == pytest.approx(batch / 5e-3)
    assert value["activity"]["attended"] == 5


def test_contexts_end_where_the_case_says_and_are_filled() -> None:
    engine = Engine([4.0])
    bench(engine, repetitions=1).decode(Job("decode", 2, 16384))
    short, long = Job("decode", 2, 16384).output_lengths
    lengths = [(len(ids), len(ids[0]), params.max_tokens) for ids, params in engine.calls]
    assert lengths == [(2, 16384 - long, 8), (2, 16384 - long, short), (2, 16384 - long, long)]
    for ids, params in engine.calls:
        assert params.extra_args["kv_transfer_params"]["filled_tokens"] >= len(ids[0])
        assert params.ignore_eos is True
        assert ids[0] != ids[1]
    real = Engine([4.0])
    bench(real, filled=False, repetitions=1).decode(Job("decode", 1, 16384))
    assert all(params.extra_args is None for _, params in real.calls)


def test_a_batch_that_does_not_run_together_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "output_lengths", (24, 88))
    value, error, usable = bench(Engine([4.0])).attempt(Job("decode", 32, 16384))
    assert value is None
    assert "did not run together" in error
    assert usable


def test_a_case_that_does_not_fit_is_not_started() -> None:
    # 2 x 1024 tokens are 128 blocks of 16, and one block is vLLM's own.
    for blocks, fits in ((128, False), (129, True)):
        engine = Engine([4.0], blocks=blocks)
        value, error, usable = bench(engine).attempt(Job("decode", 2, 1024))
        assert (value is not None) is fits
        assert usable
        assert bool(engine.calls) is fits
        assert ("needs 128 blocks of KV cache" in error) is not fits


def test_a_profile_records_the_steps_of_the_same_requests() -> None:
    engine = Engine([4.0])
    job = Job("profile", 3, 16384)
    assert bench(engine).run(job) == {"step_us": 5.0}
    before, (ids, parameters), after = engine.calls
    assert (before, after) == (("kvskim_bench_profile", (3,)), ("kvskim_bench_profile_result", ()))
    assert (len(ids), len(ids[0]) + parameters.max_tokens) == (3, 16384)
    assert parameters.extra_args["kv_transfer_params"]["filled_tokens"] >= len(ids[0])
    engine.recorded = {"error": "nothing was seen"}
    assert bench(engine).attempt(job) == (None, "nothing was seen", True)


def test_errors_of_the_engine_end_its_use() -> None:
    engine = Engine([4.0])
    engine.generate = lambda *_, **__: 1 / 0  # type: ignore[assignment,method-assign]
    assert bench(engine).attempt(Job("decode", 1, 1024)) == (None, "ZeroDivisionError: division by zero", False)


def test_time_to_first_token_is_measured_on_new_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([], prefill=[50.0, 2.0, 7.0, 3.0, 8.0, 8.0, 9.0])
    monkeypatch.setattr(e2e_engine.time, "perf_counter", lambda: engine.now)
    jobs = bench(engine)
    # The engine's clock moves by another 10 seconds in each call.
    assert jobs.ttft(Job("ttft", 1, 32768)) == {"ttft_ms": pytest.approx(13e3), "runs_ms": pytest.approx([12e3, 17e3, 13e3])}
    assert jobs.ttft(Job("ttft", 1, 4096))["ttft_ms"] == pytest.approx(18e3)
    prompts = [ids[0] for ids, _ in engine.calls]
    assert [len(ids) for ids in prompts] == [8192, *[32768] * 3, *[4096] * 3]
    assert len({tuple(ids[:16]) for ids in prompts}) == 7
    assert all(params.extra_args["kv_transfer_params"]["filled_tokens"] == 0 for _, params in engine.calls)


def test_calibration_is_waited_for() -> None:
    engine = Engine([4.0], calibrated_after=3)
    bench(engine, filled=False).calibrate()
    assert len(engine.calls) == 3
    never = Engine([4.0], calibrated_after=99)
    with pytest.raises(Exception, match="did not calibrate"):
        bench(never, filled=False).calibrate()
    untouched = Engine([4.0], calibrated_after=99)
    bench(untouched, DENSE).calibrate()
    assert not untouched.calls


def test_prompts_differ_and_are_in_the_vocabulary() -> None:
    for prompts in (Prompts(500), Prompts(500, list(range(100, 400)))):
        taken = [prompts.take(700) for _ in range(5)]
        assert all(len(ids) == 700 for ids in taken)
        assert len({tuple(ids[:16]) for ids in taken}) == 5
        assert all(100 <= token < 500 for ids in taken for token in ids)


# ---------------------------------------------------------------------- load
class LoadEngine:
    """Decodes all that it has, one token a step of 10 ms; a new request takes a step of 100 ms for its prompt, one after the other."""

    def __init__(self, suffix: str = "") -> None:
        self.now, self.suffix = 0.0, suffix
        self.waiting: list[list[Any]] = []
        self.running: list[list[Any]] = []
        self.most = 0

    def add(self, name: str, tokens: int) -> None:
        self.waiting.append([name + self.suffix, tokens])
        self.most = max(self.most, len(self.waiting) + len(self.running))

    def step(self) -> list[Any]:
        self.now += 0.1 if self.waiting else 0.01
        if self.waiting:
            self.running.append(self.waiting.pop(0))
        outputs = []
        for request in self.running:
            request[1] -= 1
            outputs.append(SimpleNamespace(request_id=request[0], finished=request[1] == 0, outputs=[SimpleNamespace(token_ids=[1])]))
        self.running = [request for request in self.running if request[1]]
        return outputs


def run_load(job: Job, monkeypatch: pytest.MonkeyPatch, suffix: str = "") -> tuple[LoadEngine, list[Trace], list[float]]:
    engine = LoadEngine(suffix)
    added: list[float] = []

    def submit(index: int, tokens: int) -> str:
        added.append(engine.now)
        engine.add(f"load-{index:06d}", tokens)
        return f"load-{index:06d}"

    def sleep(seconds: float) -> None:
        engine.now += seconds

    monkeypatch.setattr(e2e_load.time, "sleep", sleep)
    return engine, drive(engine, job, submit, clock=lambda: engine.now), added


@pytest.mark.parametrize(("filled", "prefill", "warm_context", "given"), [(True, 64, 20000, 19936), (True, -1, 8192, 0), (False, -1, 8192, None)])
def test_a_load_is_measured_after_a_small_one(
    filled: bool, prefill: int, warm_context: int, given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("vllm.sampling_params")
    module.RequestOutputKind = SimpleNamespace(DELTA="new tokens only")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    llm, loaded = Engine([]), LoadEngine()
    asked: list[tuple[str, tuple[int, ...], Any]] = []

    def add_request(name: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        asked.append((name, tuple(prompt["prompt_token_ids"]), parameters))
        loaded.add(name, parameters.max_tokens)

    llm.llm_engine.add_request, llm.llm_engine.step = add_request, loaded.step
    job = Job("load", 16, 20000, 20, prefill, 5, 9)
    figures = bench(llm, filled=filled).load(job)
    warm = [entry for entry in asked if entry[0].startswith("warm-up")]
    measured = asked[len(warm) :]
    assert {entry[0][:7] for entry in measured} == {"measure"}
    assert (len(warm), len(measured)) == (8, 20)
    assert {len(entry[1]) for entry in warm} == {warm_context}
    assert all(4 <= entry[2].max_tokens <= 9 for entry in warm)
    assert {len(entry[1]) for entry in measured} == {20000}
    assert len({entry[1][:16] for entry in asked}) == 28
    assert figures["output_tokens"] == sum(entry[2].max_tokens for entry in measured)
    # Long prompts are filled in but for what is computed; all of it where there is nothing to fill with.
    for entry in asked:
        extra = entry[2].extra_args
        assert (extra and extra["kv_transfer_params"]["filled_tokens"]) == given
        assert entry[2].output_kind == "new tokens only"


@pytest.mark.parametrize("suffix", ["", "-1a2b"])
def test_a_closed_loop_keeps_its_requests_in_flight(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("load", 4, 1024, 11, 64, 5, 20)
    engine, traces, _ = run_load(job, monkeypatch, suffix)
    assert engine.most == 4
    assert [sum(trace.tokens) for trace in traces] == [arrival.output for arrival in arrivals(job)]
    assert all(5 <= sum(trace.tokens) <= 20 for trace in traces)


def test_an_open_loop_follows_the_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("load", 4, 1024, 40, 64, 2, 3, rate=0.5)
    _, traces, added = run_load(job, monkeypatch)
    planned = [arrival.second for arrival in arrivals(job)]
    assert 40 < planned[-1] < 160
    assert planned == sorted(planned)
    # Added when due, or after the step that was under way then.
    assert all(0 <= late - due <= 0.1 + 1e-9 for late, due in zip(added, planned))
    assert [trace.arrival for trace in traces] == planned
    assert arrivals(job) == arrivals(job)


def test_figures_of_a_load() -> None:
    job = Job("load", 2, 1000, 2)
    traces = [Trace(0.0, [1.0, 1.5, 2.0], [1, 1, 1]), Trace(0.5, [2.0, 2.1, 2.2, 4.0], [1, 1, 1, 2])]
    figures = summary(job, traces)
    assert figures["output_tokens_s"] == 8 / 4
    assert figures["total_tokens_s"] == 2008 / 4
    assert figures["itl_p50_ms"] == pytest.approx(500)
    assert figures["itl_p99_ms"] == pytest.approx(1800)
    assert (figures["ttft_p50_ms"], figures["ttft_p99_ms"]) == (1000, 1500)
    assert figures["most_decoding"] == 2
    with pytest.raises(RuntimeError, match="1 of 1 requests gave no token"):
        summary(job, [Trace(0.0)])


def test_most_at_once() -> None:
    assert e2e_load.most_at_once([(0.0, 1.0), (1.0, 2.0), (3.0, 3.0)]) == 2
    assert e2e_load.most_at_once([(0.0, 1.0), (1.5, 2.0), (1.6, 1.7), (1.9, 4.0)]) == 2
    assert e2e_load.most_at_once([]) == 0


def test_percentiles_are_values_that_occur() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [e2e_load.percentile(values, share) for share in (0.5, 0.99, 1.0, 0.0)] == [50, 99, 100, 1]
    assert e2e_load.percentile([7.0], 0.99) == 7


# ---------------------------------------------------------------------- calibration
def test_a_random_calibration_fits_the_geometry(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = write_geometry("glm4-9b-1m", tmp_path)
    settings = json.loads((folder / "config.json").read_text()) | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(settings))
    written = write_random_calibration(folder, tmp_path / "c.safetensors", record_bytes=128)
    read = load_calibration(tmp_path / "c.safetensors")
    assert sorted(read.layers) == [0, 1, 2]
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    read.check("another name", model_fingerprint(config.to_dict()), 2, 32)
    assert torch.equal(read.layer(2).sketch_tables(128, False).encode_matrix, written.layer(0).sketch.encode_matrix)


def test_a_random_calibration_of_a_model_with_latent_attention(tmp_path: Path) -> None:
    settings = dict(
        model_type="deepseek_v2", num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, hidden_size=64, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, q_lora_rank=None,
    )
    (tmp_path / "config.json").write_text(json.dumps(settings))
    written = write_random_calibration(tmp_path, tmp_path / "c.safetensors", record_bytes=128)
    fingerprint = model_fingerprint(model_settings(SimpleNamespace(model=str(tmp_path), use_mla=True)))
    written.check("a name", fingerprint, 1, 48)
