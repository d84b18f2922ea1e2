"""`kvskim eval ruler --engine vllm`: vLLM engines that answer the samples, one process for each method, side by side on all GPUs."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvskim.calibration import Calibration, load_calibration, model_fingerprint
from kvskim.demo.model import check_positions, reading_model, usable_device
from kvskim.engines.vllm.check import ending, exception_line, has_latent_attention
from kvskim.errors import KvskimError
from kvskim.eval.answers import named_stop_tokens
from kvskim.eval.fidelity_vllm import check_engine, engine_settings
from kvskim.eval.methods import FULL, Calibrations, Method, Setting, fit_key
from kvskim.eval.model import load_named, shape_of
from kvskim.eval.ruler.engine_worker import Prompt, Spec
from kvskim.eval.ruler.run import SAVE_SECONDS, Job, jobs_of, page, with_tables
from kvskim.eval.ruler.tasks import make_samples
from kvskim.eval.sample import PromptFormat
from kvskim.eval.workers import Setup, run_jobs
from kvskim.layout import ceil_div
from kvskim.ops.workspace import table_capacity
from kvskim.rules.parameters import DEFAULT_WINDOW_PAGES
from kvskim.selectors import get_selector

WORKER = (sys.executable, "-m", "kvskim.eval.ruler.engine_worker")
"""The program of an engine's process."""
POLL_SECONDS = 0.5
MOST_MAKERS = 16
"""Most processes that make prompts."""
TOKENS_PER_MAKER = 1 << 21
"""Tokens of samples that a process makes in about the time that it takes to start."""
ENDLESS_PAGES = 1 << 40
"""More pages than any request has."""

Log = Callable[[str], None]


def prompts_of(prompts: PromptFormat, job: Job, limit: int) -> list[Prompt]:
    """The questions of one sample, in the token ids that `kvskim.eval.answers.ModelAnswerer` feeds its model.

    limit: most tokens of an answer where a question allows more; 0: as the question says.
    """
    (sample,) = make_samples(job.task, job.context, 1, prompts, job.seed, job.index)
    before, tails = prompts.split(sample)
    return [
        Prompt(job, index, question, np.array(before + tail, dtype=np.int32), min(question.limit, limit or question.limit))
        for index, (question, tail) in enumerate(zip(sample.questions, tails))
    ]


def prompt_maker(device: str, model: str, chat: str, limit: int) -> Callable[[Job], list[Prompt]]:
    """The ``make`` of a process that makes prompts (`kvskim.eval.workers.Setup`)."""
    prompts = PromptFormat(read_tokenizer(model), chat)
    return lambda job: prompts_of(prompts, job, limit)


def read_tokenizer(model: str) -> Any:
    """The tokenizer in the folder of a model."""
    from transformers import AutoTokenizer

    with reading_model(model):
        return AutoTokenizer.from_pretrained(model, local_files_only=True)


def make_prompts(model: str, chat: str, limit: int, jobs: Sequence[Job]) -> list[list[Prompt]]:
    """The prompts of all samples, in their order, made by as many processes as pay."""
    makers = min(os.cpu_count() or 1, MOST_MAKERS, len(jobs), sum(job.context for job in jobs) // TOKENS_PER_MAKER)
    if makers < 2:
        make = prompt_maker("cpu", model, chat, limit)
        return [make(job) for job in jobs]
    made = dict(run_jobs(Setup(prompt_maker, (model, chat, limit)), jobs, device="cpu", workers=makers))
    return [made[job] for job in jobs]


def calibration_files(model: str, device: str, methods: Sequence[Method], calibration: str, fingerprint: str, folder: Path) -> dict[str, str]:
    """File of the calibration of each selector, by its label.

    Args:
        device: where the built-in text is read.
        calibration: ``text``: fitted here, as `Calibrations` fits it for the transformers host; else a file.
        fingerprint: of the model, which the engine compares.
        folder: for what is fitted here.
    """
    sparse = [method for method in methods if method.name != FULL]
    if calibration != "text":
        file = Path(calibration).expanduser().resolve()
        load_calibration(file)
        return {method.label: str(file) for method in sparse}
    if not sparse:
        return {}
    loaded = load_named(model, device)
    fits = Calibrations(loaded).fitted_on_text(sparse) or {}
    files = {}
    for (size, frame), layers in fits.items():
        files[size, frame] = str(folder / f"calibration-{size}{'-page-frame' if frame else ''}.safetensors")
        Calibration(model, fingerprint, layers).save(files[size, frame])
    found = {method.label: files[fit_key(get_selector(method.name, **dict(method.options)), loaded.head_dim)] for method in sparse}
    # The model and its layers refer to each other.
    del loaded, fits
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def largest_table(settings: Sequence[Setting]) -> Setting:
    """The setting whose rule needs the largest page table: an engine that was started with it can take up all others.

    Tables are compared as if requests had no end. An engine rounds the pages of its longest request up, and so may have to tell rules apart that would all
    take every page of a request of just that length.
    """
    return max(settings, key=lambda setting: table_capacity(setting.parameters, ENDLESS_PAGES, 1, DEFAULT_WINDOW_PAGES))


def fair(rows: Mapping[str, Sequence[Mapping[str, Any]]], failed: Collection[str]) -> list[dict[str, Any]]:
    """The answers to samples that all methods have answered, which are compared.

    A method without an answer does not count, nor one whose engine failed before it had half as many as the method with the most.

    Args:
        rows: of each method, by its label.
        failed: labels of methods whose engine failed.
    """
    places = {label: {_place(row) for row in found} for label, found in rows.items() if found}
    most = max(map(len, places.values()), default=0)
    counted = [label for label, found in places.items() if label not in failed or 2 * len(found) >= most]
    shared = set.intersection(*(places[label] for label in counted)) if counted else set()
    return [dict(row) for label in counted for row in rows[label] if _place(row) in shared]


def _place(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["task"], row["context_tokens"], row["sample"]


@dataclass
class Running:
    """An engine's process, and what it has written so far."""

    label: str
    process: subprocess.Popen[bytes]
    rows_file: Path
    log_file: Path
    read: int = 0
    finished: bool = False
    """It has said that it begins no other group."""

    @classmethod
    def begin(cls, spec: Spec, folder: Path, number: int) -> Running:
        """Start the process of an engine."""
        spec_file, rows_file, log_file = (folder / f"engine-{number}.{kind}" for kind in ("spec", "rows", "log"))
        spec_file.write_bytes(pickle.dumps(spec))
        with log_file.open("wb") as log:
            # It ends when the other end of its input is closed.
            process = subprocess.Popen(
                [*WORKER, str(spec_file), str(rows_file)], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return cls(spec.method.label, process, rows_file, log_file)

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it has written since the last call; a line that is not complete is left for the next."""
        if not self.rows_file.exists():
            return
        with self.rows_file.open("rb") as file:
            file.seek(self.read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def end(self) -> None:
        """End the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def printed(self) -> str:
        """What it has printed."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")


@dataclass
class Progress:
    """What all engines have given so far, by the label of their method."""

    rows: dict[str, list[dict[str, Any]]]
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """The exception that ended an engine, in one line."""

    def take(self, engine: Running, line: dict[str, Any], log: Log) -> None:
        """A line that an engine has written."""
        if "finished" in line:
            engine.finished = True
            return
        if "about" in line:
            self.about[engine.label] = {**line["about"], "groups": []}
            log(f"{engine.label}: {line['about']['engine']} started in {line['about']['start_seconds']:.0f} s, {line['about']['capacity']} tokens of KV cache")
            return
        self.rows[engine.label] += line["rows"]
        self.about[engine.label]["groups"].append({key: line[key] for key in ("prompts", "cached", "seconds")})
        scores = [row["score"] for row in line["rows"]]
        found = f", {line['cached']:.0%} of them found in the prefix cache" if line["cached"] is not None else ""
        log(
            f"{engine.label}: group {line['group'] + 1} of {line['groups']}, {line['prompts']} prompts of {line['rows'][0]['context_tokens']} tokens{found}, "
            f"mean score {100 * sum(scores) / len(scores):.1f}, {line['seconds']:.0f} s"
        )

    def ended(self, engine: Running, log: Log) -> None:
        """An engine's process has ended, or is no longer needed."""
        status = engine.process.returncode
        if not engine.finished:
            printed = engine.printed()
            self.failed[engine.label] = exception_line(printed) or f"exit status {status}"
            log(f"{engine.label}: the engine stopped with exit status {status}{ending(printed)}")


@dataclass(frozen=True)
class Place:
    """Where an engine runs: index of the GPU, and its share of that GPU's memory."""

    gpu: int
    share: float


def places_of(gpus: Sequence[int], engines: int, gpu_memory: float) -> list[Place]:
    """Places for engines that run side by side, on all GPUs in turn. Those on one GPU share ``gpu_memory`` of it."""
    taken = [gpus[number % len(gpus)] for number in range(engines)]
    return [Place(gpu, gpu_memory / taken.count(gpu)) for gpu in taken]


def watch(specs: Sequence[Spec], places: Sequence[Place], folder: Path, progress: Progress, log: Log, save: Callable[[], None]) -> None:
    """Run all engines, each in the first place that is free, until the last has ended; ``save`` is called every `SAVE_SECONDS`."""
    waiting = list(enumerate(specs))
    running: dict[int, Running] = {}
    saved = time.perf_counter()
    try:
        while waiting or running:
            for slot, place in enumerate(places):
                if slot not in running and waiting:
                    number, spec = waiting.pop(0)
                    running[slot] = Running.begin(replace(spec, gpu=place.gpu, share=place.share), folder, number)
            time.sleep(POLL_SECONDS)
            for slot, engine in list(running.items()):
                done = engine.process.poll() is not None
                for line in engine.lines():
                    progress.take(engine, line, log)
                # How an engine comes to its end is of no interest, and may take a while.
                if done or engine.finished:
                    progress.ended(engine, log)
                    engine.end()
                    del running[slot]
            if time.perf_counter() - saved > SAVE_SECONDS:
                save()
                saved = time.perf_counter()
    finally:
        for engine in running.values():
            engine.end()


def run(
    model: str, *, tasks: Sequence[str], contexts: Sequence[int], samples: int, seeds: Sequence[int], methods: Sequence[Method], settings: Sequence[Setting],
    calibration: str = "text", chat: str = "auto", limit: int = 0, time_limit: float = 0.0, workers: int = 1, gpu_memory: float = 0.9, device: str = "cpu",
    log: Log = print, save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> tuple[dict[str, Any], str]:
    """Scores of the samples that all methods have answered, as `kvskim.eval.ruler.run.run_ruler` gives them, and the tables as Markdown.

    Args:
        model: a Hugging Face model directory.
        calibration: ``text`` or a file.
        time_limit: seconds from now, after which no engine begins a group of prompts; 0: no limit. Engines that wait for others share it.
        workers: engines side by side, on all GPUs in turn.
        gpu_memory: share of a GPU's memory that its engines take together.
        device: where the calibration on built-in text is fitted; ``cuda:1``: also the only GPU with engines.
        save: given the results so far every `SAVE_SECONDS`.

    Returns:
        beside what `run_ruler` gives: ``engine`` with its version, ``engines``, what each of them says of itself, and ``failed``, the error that ended an
        engine, by method.

    Raises:
        KvskimError: no engine can do what is asked for, or none has answered anything.
    """
    start, began = time.perf_counter(), time.time()
    check_engine(model, methods, calibration)
    if has_latent_attention(model):
        raise KvskimError(f"the model in {model} has latent attention (MLA), which the evaluation does not know: use another model")
    gpus = _gpus(device)
    config, shape, stop = _read_model(model)
    check_positions(SimpleNamespace(config=config), max(contexts), "--contexts")
    # A wrong --chat is said before any work.
    PromptFormat(read_tokenizer(model), chat)
    jobs = list(jobs_of(tasks, contexts, samples, seeds))
    heads = len(shape.sparse_layers) * shape.num_kv_heads
    result: dict[str, Any] = dict(
        tasks=list(tasks), contexts=list(contexts), samples=samples, seeds=list(seeds), time_limit=time_limit, heads=heads, limit=limit,
        calibration=calibration, layers=shape.num_layers, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
    )
    places = places_of(gpus, min(workers, len(methods)), gpu_memory)
    progress = Progress({method.label: [] for method in methods})

    def so_far() -> dict[str, Any]:
        about = _about(progress, len({place.gpu for place in places}))
        return {**result, **about, "seconds": round(time.perf_counter() - start, 1), "answers": fair(progress.rows, progress.failed)}

    with tempfile.TemporaryDirectory(prefix="kvskim-ruler-") as name:
        folder = Path(name)
        with ThreadPoolExecutor(1) as beside:
            fitting = beside.submit(calibration_files, model, device, methods, calibration, model_fingerprint(config.get_text_config().to_dict()), folder)
            made = make_prompts(model, chat, limit, jobs)
            files = fitting.result()
        longest = max(len(prompt.tokens) + prompt.limit for sample in made for prompt in sample)
        prompts_file = folder / "prompts"
        prompts_file.write_bytes(pickle.dumps(made))
        log(f"{len(made)} samples of up to {longest} tokens made in {time.perf_counter() - start:.0f} s")
        turns = ceil_div(len(methods), len(places))
        specs = []
        for number, method in enumerate(methods):
            sparse = method.name != FULL
            specs.append(Spec(
                model=model, method=method, settings=tuple(settings) if sparse else (),
                # A short request is to be as sparse as a long one.
                engine={**engine_settings(method, largest_table(settings), files[method.label]), "full_pages": 0} if sparse else None,
                prompts=str(prompts_file), stop=tuple(stop), longest=longest, weights=_weights(model), head_dim=shape.head_dim,
                deadline=began + time_limit * (number // len(places) + 1) / turns if time_limit else float("inf"),
            ))
        watch(specs, places, folder, progress, log, lambda: save(so_far()))
    finished = so_far()
    if not finished["answers"]:
        reasons = "; ".join(f"{label}: {reason}" for label, reason in progress.failed.items())
        raise KvskimError(f"no engine has answered a sample: {reasons or 'the --time-limit was over before'}")
    finished = with_tables(finished)
    save(finished)
    return finished, page(finished)


def _gpus(device: str) -> list[int]:
    count = torch.cuda.device_count()
    if not count:
        raise KvskimError("--engine vllm needs a GPU, and torch sees none here: use --engine transformers")
    usable_device(device)
    return [int(device.removeprefix("cuda:"))] if device.startswith("cuda:") else list(range(count))


def _read_model(model: str) -> tuple[Any, Any, list[int]]:
    """Configuration and shape of a model, and the tokens that end its answers, as `kvskim.eval.answers.stop_tokens` finds them."""
    from transformers import AutoConfig, GenerationConfig

    with reading_model(model):
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        generation = GenerationConfig.from_pretrained(model, local_files_only=True) if Path(model, "generation_config.json").is_file() else None
    sources = (generation, config.get_text_config(), read_tokenizer(model))
    return config, shape_of(config.get_text_config()), sorted(named_stop_tokens(*sources))


def _weights(model: str) -> int:
    """Bytes of a model's weights on disk, which are about those on the GPU."""
    return sum(file.stat().st_size for file in Path(model).iterdir() if file.suffix in (".safetensors", ".bin"))


def _about(progress: Progress, gpus: int) -> dict[str, Any]:
    """What the engines say of themselves; that of the first stands for all, which are of one machine."""
    if not progress.about:
        return {"engine": "vllm", "device": "", "torch": "", "dtype": "", "engines": [], "failed": progress.failed}
    first = next(iter(progress.about.values()))
    device = first["device"] if gpus == 1 else f"{gpus} x {first['device']}"
    return {
        "engine": first["engine"], "device": device, "torch": first["torch"], "dtype": first["dtype"],
        "engines": [{"method": label, **progress.about[label]} for label in progress.rows if label in progress.about], "failed": dict(progress.failed),
    }
