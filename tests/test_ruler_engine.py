"""RULER through vLLM engines, played by one that knows the answers: groups, order, settings, scores, partial results, refusals."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvskim.errors import KvskimError
from kvskim.eval.methods import parse_methods, settings_of
from kvskim.eval.quality_page import ruler_section
from kvskim.eval.ruler import engine as engines
from kvskim.eval.ruler import engine_worker
from kvskim.eval.ruler.engine_worker import OUTPUT_SHARES, Prompt, Spec, answer_group, cut, groups_of
from kvskim.eval.ruler.run import Job, jobs_of
from kvskim.eval.sample import PromptFormat, Question
from kvskim.eval.text_metrics import string_match_all, string_match_part
from kvskim.eval.workers import run_jobs
from ruler_engine import ENOUGH, FILLER, STOP, TOTAL_PAGES, PlayedEngine

BLOCK = 16


def question(*references, limit=30, metric=string_match_all):
    return Question("which?", references, metric, limit)


def sample_of(number, context=512, tokens=500, references=("alpha",), questions=1, task="vt", **more):
    job = Job(task, context, 0, number, number)
    start = 1000 * context + 10 * number
    return [
        Prompt(job, i, question(*references, **more), np.arange(start + i, start + i + tokens, dtype=np.int32), more.get("limit", 30)) for i in range(questions)
    ]


METHOD, = parse_methods("mean")
SETTINGS = settings_of("budget,threshold", [4, ENOUGH], [0.007, 0.002], 0.95)


def test_groups_fit_the_cache_are_of_one_context_and_keep_samples_whole(monkeypatch):
    samples = [sample_of(0, 512), sample_of(0, 1024, 1000), sample_of(1, 512), sample_of(1, 1024, 1000), sample_of(2, 512), sample_of(3, 512, questions=2)]
    each = 500 + OUTPUT_SHARES * (30 + 2 * BLOCK)
    places = lambda groups: [[(p.job.context, p.job.number, p.index) for p in group] for group in groups]  # noqa: E731
    # Two short prompts, or one long one; the group whose first sample comes first is first.
    assert places(groups_of(samples, 2 * each, BLOCK)) == [
        [(512, 0, 0), (512, 1, 0)], [(1024, 0, 0)], [(1024, 1, 0)], [(512, 2, 0)], [(512, 3, 0), (512, 3, 1)],
    ]
    assert [len(group) for group in groups_of(samples[:5], 2 * each - 1, BLOCK)] == [1] * 5
    assert [len(group) for group in groups_of(samples, 1 << 20, BLOCK)] == [5, 2]
    monkeypatch.setattr(engine_worker, "GROUP_PROMPTS", 2)
    assert [len(group) for group in groups_of(samples, 1 << 20, BLOCK)] == [2, 2, 1, 2]
    with pytest.raises(KvskimError, match=rf"a sample of 1024 tokens needs a KV cache of {each + 500} tokens, and that of an engine has room for {each}: use"):
        groups_of(samples, each, BLOCK)


def test_an_answer_ends_at_a_stop_token_or_where_its_score_is_certain():
    engine = PlayedEngine([sample_of(0, references=("alpha", "beta"))])
    both = question("alpha", "beta")
    assert cut([FILLER, 3, 4, 3, STOP, 4], [STOP], both, engine.text) == [FILLER, 3, 4]
    assert cut([3, FILLER, STOP, 4], [STOP], both, engine.text) == [3, FILLER]
    assert cut([3, FILLER], [STOP], both, engine.text) == [3, FILLER]
    assert cut([FILLER, 4, 3], [STOP], question("beta", "gamma", metric=string_match_part), engine.text) == [FILLER, 4]


def test_every_setting_answers_a_group_before_the_next_and_scores_are_known():
    samples = [sample_of(0), sample_of(1, references=("alpha", "beta", "gamma", "delta"), task="niah_multivalue"), sample_of(2, limit=3)]
    samples[1] = [replace(samples[1][0], limit=3)]
    engine = PlayedEngine(samples)
    rows, cached = answer_group(engine, [p for s in samples for p in s], METHOD, SETTINGS, engine.text, [STOP], head_dim=64)
    # The prompts are read first, with all pages attended; then each rule in turn answers all of them.
    assert engine.calls == ["whole", 3, 4, 3, ENOUGH, 3, 0.007, 3, 0.002, 3]
    found = {(row.sample, row.answer.setting): row for row in rows}
    assert {key: row.score for key, row in found.items() if key[1] == "64 tokens"} == {(0, "64 tokens"): 0.0, (1, "64 tokens"): 0.0, (2, "64 tokens"): 0.0}
    # Three tokens have room for two of the four values.
    assert [found[number, "128 tokens"].score for number in range(3)] == [1.0, 0.5, 1.0]
    assert found[0, "128 tokens"].answer.text == "filler alpha"
    assert found[1, "threshold 0.007"].answer.text == "filler alpha beta"
    assert found[1, "threshold 0.002"].answer.text == "filler alpha beta"
    assert found[0, "64 tokens"].answer.text == "filler"
    assert cached == pytest.approx(496 / 500)
    answer = found[0, "128 tokens"].answer
    # K and V of eight pages in bfloat16, and records of 64 channels in 8 bits, with their scale, of all but sink and window.
    from kvskim.selectors import get_selector

    assert (answer.pages, answer.share) == (ENOUGH, ENOUGH / TOTAL_PAGES)
    assert answer.bytes == ENOUGH * 2 * 16 * 64 * 2 + (TOTAL_PAGES - 3) * get_selector("mean").bytes_per_page(64)


def test_full_attention_has_one_setting_and_reads_the_pages_of_the_prompt():
    samples = [sample_of(0), sample_of(1)]
    engine = PlayedEngine(samples)
    rows, _ = answer_group(engine, [p for s in samples for p in s], parse_methods("full")[0], (), engine.text, [STOP], head_dim=64)
    assert engine.calls == [2]
    assert [(row.answer.method, row.answer.setting, row.score, row.answer.pages, row.answer.share) for row in rows] == [("full", "all", 1.0, 32.0, 1.0)] * 2
    assert rows[0].answer.bytes == 32 * 2 * 16 * 64 * 2


def test_no_group_is_begun_after_the_deadline(monkeypatch):
    monkeypatch.setattr(engine_worker, "GROUP_PROMPTS", 1)
    samples = [sample_of(0), sample_of(1), sample_of(2)]
    spec = Spec(model="m", method=METHOD, settings=tuple(SETTINGS), engine={}, prompts="", stop=(STOP,), longest=600, weights=0, head_dim=64, deadline=10.5)
    engine, clock = PlayedEngine(samples), iter([9.0, 10.0, 11.0])
    *lines, last = engine_worker.run(spec, engine, samples, engine.text, lambda: next(clock))
    assert last == {"finished": True}
    assert [(line["group"], line["groups"], len(line["rows"])) for line in lines] == [(0, 3, 4), (1, 3, 4)]
    json.dumps(lines)


def answered(numbers, method="a", task="vt"):
    return [{"task": task, "context_tokens": 512, "sample": n, "method": method} for n in numbers]


def test_only_samples_that_all_methods_have_answered_are_compared():
    samples = lambda rows: {(row["method"], row["sample"]) for row in rows}  # noqa: E731
    rows = {"a": answered([0, 1, 2]), "b": answered([0, 1, 3], "b"), "c": []}
    assert samples(engines.fair(rows, ())) == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
    # An engine that failed takes the others back only where it had come far enough.
    rows = {"a": answered(range(4)), "b": answered([0], "b"), "c": answered([0, 1], "c")}
    assert samples(engines.fair(rows, {"b", "c"})) == {(m, n) for m in "ac" for n in (0, 1)}
    assert samples(engines.fair(rows, ())) == {(m, 0) for m in "abc"}
    assert engines.fair({"a": []}, {"a"}) == []


def test_places_on_all_gpus():
    assert engines.places_of([0, 1], 3, 0.9) == [engines.Place(0, 0.45), engines.Place(1, 0.9), engines.Place(0, 0.45)]
    assert engines.places_of([3], 2, 0.8) == [engines.Place(3, 0.4)] * 2


@pytest.mark.parametrize(("seen", "index", "only"), [(None, 1, "1"), ("", 1, "1"), ("4,6", 1, "6"), ("GPU-ab, GPU-cd", 0, "GPU-ab")])
def test_an_engine_sees_one_of_the_gpus_that_its_parent_sees(seen, index, only, monkeypatch):
    from os import environ

    from kvskim.config import see_one_gpu

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen or "")
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    see_one_gpu(index)
    assert environ["CUDA_VISIBLE_DEVICES"] == only


def test_the_engine_begins_with_the_rule_that_needs_the_largest_tables():
    few, many, large, small, coverage = settings_of("budget,threshold,coverage", [4, 400], [0.007, 0.0035], 0.95)
    assert engines.largest_table([few, large]) == large
    assert engines.largest_table([few, large, small]) == engines.largest_table([small, large, few]) == small
    assert engines.largest_table([few, large, small, many]) == many
    assert engines.largest_table([many, coverage, small]) == coverage


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model with a tokenizer of words, as a Hugging Face directory."""
    from tiny import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(engines, "WORKER", (sys.executable, str(Path(__file__).parent / "ruler_engine.py")))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("kvskim.eval.fidelity_vllm.find_spec", lambda name: name)
    monkeypatch.setattr(engines, "POLL_SECONDS", 0.05)


def run(folder, methods, budgets=(4, ENOUGH), samples=3, contexts=(512,), **more):
    return engines.run(
        folder, tasks=["niah_single_1", "vt"], contexts=contexts, samples=samples, seeds=[0], methods=parse_methods(methods),
        settings=settings_of("budget", list(budgets), [0.007], 0.95), **{"log": lambda _: None, "workers": 2, **more},
    )


def test_prompts_are_those_of_the_transformers_host(folder):
    from kvskim.eval.answers import ModelAnswerer
    from kvskim.eval.methods import Calibrations
    from kvskim.eval.model import load_named
    from kvskim.eval.ruler import make_samples

    model = load_named(folder)
    prompts = PromptFormat(model.tokenizer)
    fed = []
    answerer = ModelAnswerer(model, prompts, parse_methods("full"), SETTINGS, Calibrations(model, "prompt"), limit=2)
    answerer._of_question = lambda question, prompt, context: fed.append((prompt.tolist(), min(question.limit, 2))) or iter(())
    jobs = list(jobs_of(["kv_recall", "vt"], [512], 1, [3]))
    for job in jobs:
        list(answerer.answers(next(iter(make_samples(job.task, job.context, 1, prompts, job.seed, job.index)))))
    made = engines.make_prompts(folder, "auto", 2, jobs)
    assert [(prompt.tokens.tolist(), prompt.limit) for sample in made for prompt in sample] == fed
    assert len(fed) > 2


def test_several_processes_make_the_prompts_that_one_makes(folder, monkeypatch):
    jobs = list(jobs_of(["kv_recall", "vt"], [512], 2, [3]))
    alone = engines.make_prompts(folder, "auto", 2, jobs)
    asked = []
    monkeypatch.setattr(engines, "run_jobs", lambda *arguments, workers, **more: asked.append(workers) or run_jobs(*arguments, workers=workers, **more))
    monkeypatch.setattr(engines, "TOKENS_PER_MAKER", 1024)
    monkeypatch.setattr(engines.os, "cpu_count", lambda: 8)
    made = engines.make_prompts(folder, "auto", 2, jobs)
    assert asked == [2]
    assert [[prompt.tokens.tolist() for prompt in sample] for sample in made] == [[prompt.tokens.tolist() for prompt in sample] for sample in alone]


def test_engines_have_the_calibration_of_the_transformers_host(folder, tmp_path):
    from kvskim.calibration import CalibrationError, load_calibration
    from kvskim.eval.methods import Calibrations
    from kvskim.eval.model import load_named

    methods = parse_methods("full,sketch:record_bytes=128,sketch,mean")
    files = engines.calibration_files(folder, "cpu", methods, "text", "print", tmp_path)
    assert list(files) == ["sketch:record_bytes=128", "sketch", "mean"]
    assert files["sketch"] == files["mean"] != files["sketch:record_bytes=128"]
    calibrations = Calibrations(load_named(folder))
    calibrations.read_text(methods)
    for method in methods[1:]:
        found = load_calibration(files[method.label])
        assert found.fingerprint == "print"
        selector = engines.get_selector(method.name, **dict(method.options))
        for layer, expected in calibrations.tables(method, 0).items():
            tables = selector.tables(2, 16, found.layer(layer))
            for name, value in vars(expected).items():
                if torch.is_tensor(value):
                    assert torch.equal(getattr(tables, name), value), name
    assert engines.calibration_files(folder, "cpu", methods, files["mean"], "print", tmp_path) == dict.fromkeys(files, files["mean"])
    with pytest.raises(CalibrationError, match=r"no such file"):
        engines.calibration_files(folder, "cpu", methods, str(tmp_path / "none"), "print", tmp_path)


def test_engines_side_by_side(folder, played, tmp_path):
    saved = []
    result, page = run(folder, "full,mean,sketch", save=saved.append)
    assert result["counts"] == {"512": {"niah_single_1": 3, "vt": 3}}
    cells = {(cell["method"], cell["setting"]): cell for cell in result["tables"]["512"]}
    assert {key: cell["score"]["mean"] for key, cell in cells.items()} == {
        ("full", "all"): 1.0, ("mean", "64 tokens"): 0.0, ("mean", "128 tokens"): 1.0, ("sketch", "64 tokens"): 0.0, ("sketch", "128 tokens"): 1.0,
    }
    assert cells["mean", "128 tokens"]["difference"]["mean"] == 0.0
    assert cells["mean", "128 tokens"]["share"] == ENOUGH / TOTAL_PAGES
    assert (result["engine"], result["device"], result["dtype"], result["failed"], result["heads"]) == ("vllm 0.0", "2 x a GPU", "bfloat16", {}, 4)
    assert [(about["method"], about["groups"][0]["prompts"]) for about in result["engines"]] == [("full", 6), ("mean", 6), ("sketch", 6)]
    # Two at a time, one on each GPU: the third has the place of the one that was done first.
    assert [about["place"] for about in result["engines"]][:2] == [[0, 0.9], [1, 0.9]]
    assert saved[-1] == result
    json.dumps(result)
    assert page.startswith("Answers by vllm 0.0: prompts are read with full attention, so the first token")
    text = ruler_section("Tiny", {**result, "command": "kvskim eval ruler", "date": "day"}, "sketch", "mean")
    assert "## RULER, Tiny, in vllm 0.0\n" in text
    assert "sketch minus mean, in points: 64 tokens 0.0 [0.0, 0.0]" in text


def test_an_engine_that_fails_loses_its_current_group_and_the_others_go_on(folder, played, monkeypatch):
    said = []
    result, _ = run(folder, "full,minmax,quad,mean", contexts=(512, 600), log=said.append, workers=4)
    # One group of each context: the first engine answers none of them, the second that of 512 tokens.
    assert set(result["tables"]) == {"512"}
    assert {cell["method"] for cell in result["tables"]["512"]} == {"full", "quad", "mean"}
    assert result["failed"] == {"minmax": "RuntimeError: out of memory, as a real engine may be", "quad": "exit status 3"}
    assert any(line.startswith("minmax: the engine stopped with exit status 1 (RuntimeError: out of memory") for line in said)


def test_nothing_answered_is_an_error_that_says_why(folder, played):
    with pytest.raises(KvskimError, match=r"^no engine has answered a sample: minmax: RuntimeError: out of memory, as a real engine may be$"):
        run(folder, "minmax", samples=1)
    with pytest.raises(KvskimError, match=r"^no engine has answered a sample: the --time-limit was over before$"):
        run(folder, "mean", samples=1, time_limit=1e-6)


def test_an_engine_ends_with_the_process_that_started_it(tmp_path):
    import subprocess

    program = "import kvskim.eval.ruler.engine_worker as w, time; w._end_with_parent(); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        begun = time.monotonic()
        process.stdin.close()
        assert process.wait(30) == 1
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize(("arguments", "words"), [
    (["--engine", "cuda"], "--engine is 'cuda'; it must be transformers or vllm"),
    (["--engine", "vllm", "--selectors", "full,oracle,snapkv"], "--selectors has oracle, snapkv; --engine vllm runs kvskim's own selectors only"),
    (["--engine", "vllm", "--calibration", "prompt"], "--calibration is prompt; an engine keeps one calibration for all prompts"),
    (["--engine", "vllm", "--sparse-from", "question"], "--sparse-from is 'question'; --engine vllm reads the whole prompt with full attention"),
    (["--engine", "vllm", "--dtype", "bfloat16"], "--dtype is 'bfloat16'; --engine vllm takes the type"),
    (["--engine", "vllm", "--gpu-memory", "1.5"], "--gpu-memory is 1.5; it must be greater than 0 and at most 1"),
    (["--gpu-memory", "0.5"], "--gpu-memory is 0.5; it is for --engine vllm: leave it out"),
    (["--engine", "vllm"], "--engine vllm needs a Hugging Face model directory, and demo is none"),
])
def test_a_wrong_option_is_one_sentence_before_any_work(arguments, words, refused):
    refused(words, "eval", "ruler", *arguments)


def test_without_a_gpu_or_with_latent_attention_or_too_few_positions_it_is_one_sentence(folder, played, monkeypatch, tmp_path):
    with pytest.raises(KvskimError, match=r"--contexts asks for 8192 tokens in all, but this model was made for 4096"):
        run(folder, "mean", contexts=(8192,))
    with pytest.raises(KvskimError, match=r"--device is 'cuda:7'"):
        run(folder, "mean", device="cuda:7")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v2", "kv_lora_rank": 512}))
    with pytest.raises(KvskimError, match=r"has latent attention"):
        run(str(tmp_path), "mean")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(KvskimError, match=r"--engine vllm needs a GPU, and torch sees none here"):
        run(folder, "mean")


def test_the_command(folder, played, tmp_path, monkeypatch, capsys):
    from kvskim import cli

    def command(methods):
        arguments = ["--tasks", "niah_single_1", "--contexts", "512", "--samples", "2", "--selectors", methods, "--budgets", "64,128", "--rule", "budget"]
        files = ["--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
        monkeypatch.setattr("sys.argv", ["kvskim", "eval", "ruler", folder, "--engine", "vllm", "--workers", "4", *arguments, *files])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code

    assert command("full,mean") == 0
    assert (tmp_path / "r.md").read_text().startswith("# RULER\n\nMade by `kvskim eval ruler ")
    assert "| mean | 128 tokens | 100.0 | 100.0 |" in capsys.readouterr().out
    # Engines that failed: the tables of the others, and an exit status that says so.
    assert command("full,mean,minmax") == 2
    assert "engines failed, and the tables have what they had answered: minmax: RuntimeError: out of memory" in capsys.readouterr().err
    result = json.loads((tmp_path / "r.json").read_text())
    assert {cell["method"] for cell in result["tables"]["512"]} == {"full", "mean"}
    monkeypatch.setattr("sys.argv", ["kvskim", "eval", "page", "--ruler", f"Tiny={tmp_path / 'r.json'}", "--default", "mean", "--compared", "full"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert "## RULER, Tiny, in vllm 0.0" in capsys.readouterr().out
