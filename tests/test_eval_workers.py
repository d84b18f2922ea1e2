"""Samples spread over processes: the same results as in one, in jobs that are begun in order and finished; faults are one sentence."""

import json

import pytest
import torch

from kvskim.errors import KvskimError
from kvskim.eval.answers import ModelAnswerer
from kvskim.eval.methods import Calibrations, parse_methods, settings_of
from kvskim.eval.model import load_named
from kvskim.eval.ruler.run import Job, in_turn, jobs_of, page, run_ruler, with_tables, worker
from kvskim.eval.sample import PromptFormat
from kvskim.eval.workers import Setup, run_jobs, worker_devices
from worker_jobs import describing

SETUP = Setup(describing, ("n",))


def test_every_job_is_done_once_by_one_of_the_processes():
    results = dict(run_jobs(SETUP, range(4), device="cpu", workers=2))
    assert sorted(results) == [0, 1, 2, 3]
    assert all(torch.equal(result["square"], torch.tensor([job * job])) for job, result in results.items())
    assert {(r["device"], r["name"], r["threads"]) for r in results.values()} == {("cpu", "n", 1)}
    assert len({r["process"] for r in results.values()}) == 2


def test_jobs_that_were_begun_are_finished_and_no_more_are_begun():
    asked = []
    done = run_jobs(SETUP, iter(range(100)), lambda: len(asked) < 1 or bool(asked.append(1)), device="cpu", workers=1)
    first = next(done)
    asked.append(1)
    assert [first[0], *(job for job, _ in done)] == [0]


@pytest.mark.parametrize(("job", "words"), [(7, "^seven is too many$"), (8, r"a worker process ended before its time .* use fewer --workers")])
def test_a_fault_of_a_process_is_one_sentence(job, words):
    with pytest.raises(KvskimError, match=words) as error:
        list(run_jobs(SETUP, [job], device="cpu", workers=1))
    assert "\n" not in str(error.value)


def test_gpus_in_turn(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert worker_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert worker_devices("cuda:1", 2) == ["cuda:1", "cuda:1"]
    assert worker_devices("cpu", 2) == ["cpu", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model with a tokenizer of words, as a Hugging Face directory."""
    from tiny import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def test_processes_give_what_one_gives(folder):
    methods, settings = parse_methods("full,oracle,rkv"), settings_of("budget", [4], [0.007], 0.95)
    model = load_named(folder)
    prompts = PromptFormat(model.tokenizer)
    here = in_turn(ModelAnswerer(model, prompts, methods, settings, Calibrations(model, "prompt"), limit=6), prompts)
    setup = Setup(worker, (folder, "float32", "auto", methods, settings, "prompt", None, "answer", 6))
    jobs = list(jobs_of(["kv_recall"], [512], 2, [0]))
    expected = {job.number: rows for job, rows in here(jobs, lambda: True)}
    found = {job.number: rows for job, rows in run_jobs(setup, jobs, device="cpu", workers=2)}
    assert found == expected
    assert sorted(found) == [0, 1]
    assert {row.answer.method for rows in found.values() for row in rows} == {"full", "oracle", "rkv"}


def test_the_first_sample_of_every_task_comes_before_the_second_of_any():
    jobs = list(jobs_of(["a", "b"], [1, 2], 2, [5, 6]))
    assert jobs[:4] == [Job("a", 1, 5, 0, 0), Job("b", 1, 5, 0, 0), Job("a", 2, 5, 0, 0), Job("b", 2, 5, 0, 0)]
    assert jobs[4] == Job("a", 1, 6, 0, 2)
    assert [job.index for job in jobs] == [0] * 8 + [1] * 8
    assert len({(job.task, job.context, job.number) for job in jobs}) == 16


def answered_after(seconds, clock, monkeypatch):
    """Answers that take ``seconds`` each, by a clock of their own."""
    from kvskim.eval.answers import Answer, Scored

    monkeypatch.setattr("kvskim.eval.ruler.run.time.perf_counter", lambda: clock[0])

    def answered(jobs, keep_going):
        for job in jobs:
            if not keep_going():
                return
            clock[0] += seconds
            yield job, [
                Scored(job.task, job.context, job.number, 0, 500, score, Answer(method, setting, "x", 4.0, 0.1, 64.0))
                for method, setting, score in (("full", "all", 1.0), ("some", "64 tokens", float(job.task == "vt")))
            ]

    return answered


def test_a_time_limit_ends_a_run_after_whole_samples(monkeypatch):
    clock, saved = [100.0], []
    result, text = run_ruler(
        answered_after(7.0, clock, monkeypatch), tasks=["cwe", "vt"], contexts=[512, 1024], samples=9, seeds=[0], heads=2, time_limit=40.0,
        log=lambda _: None, save=saved.append,
    )
    # Begun at 0, 7 ... 35 seconds.
    assert clock[0] == 142.0
    assert result["counts"] == {"512": {"cwe": 2, "vt": 2}, "1024": {"cwe": 1, "vt": 1}}
    assert "4 samples, 2 of each task, the same for every method and setting." in text
    assert [cell["score"]["mean"] for cell in result["tables"]["1024"]] == [1.0, 0.5]
    # Every 20 seconds, and at the end; what was saved on the way gives tables too.
    assert [len(so_far["answers"]) // 2 for so_far in saved] == [6, 6, 6]
    assert [so_far["seconds"] for so_far in saved] == [21.0, 42.0, 42.0]
    stopped = with_tables({**json.loads(json.dumps(saved[0])), "answers": json.loads(json.dumps(saved[0]["answers"][:6]))})
    assert stopped["counts"] == {"512": {"cwe": 1, "vt": 1}, "1024": {"cwe": 1, "vt": 0}}
    assert "1 samples, 0 to 1 of each task, the same for every method and setting. Means are without vt, of which there is none." in page(stopped)
    assert page(stopped).count("Means are without") == 1


@pytest.mark.parametrize(("arguments", "words"), [
    (["ruler", "--workers", "0"], "--workers is 0; it must be at least 1"), (["ruler", "--time-limit", "-1"], "--time-limit is -1.0"),
    (["ruler", "--time-limit", "nan"], "--time-limit is nan"), (["ruler", "--limit", "-2"], "--limit is -2; it must be at least 0"),
    (["fidelity", "--workers", "0"], "--workers is 0"), (["fidelity", "--engine", "vllm", "--workers", "2"], "--workers is 2; --engine vllm runs one engine"),
])
def test_a_wrong_option_is_one_sentence(arguments, words, refused):
    refused(words, "eval", *arguments)
