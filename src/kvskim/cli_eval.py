"""`kvskim eval`: what a selector and a rule cost in quality."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvskim.cli_eval_page import page
from kvskim.cli_files import check_outputs
from kvskim.errors import KvskimError
from kvskim.rules.parameters import DEFAULT_TAU

if TYPE_CHECKING:
    from kvskim.eval.methods import Method, Setting
    from kvskim.eval.model import EvalModel

app = typer.Typer(help="Measure quality.", no_args_is_help=True)
app.command()(page)

LEAST_PREFIX = 128
"""Tokens before the decoded ones: fewer leave nothing to choose from."""
LEAST_NEEDLE_TOKENS = 1024
"""Fewer have no room for twelve planted facts."""


ModelArgument = Annotated[str, typer.Argument(help="Hugging Face model directory or .gguf file; 'demo' is the model of `kvskim demo`.")]
SelectorsOption = Annotated[str, typer.Option(help="Comma list of full, selectors and baselines, with options as in rki4:rank=4 (docs/evaluation.md).")]
RulesOption = Annotated[str, typer.Option("--rule", help="Comma list of budget, threshold and coverage.")]
BudgetsOption = Annotated[str, typer.Option(help="Comma list of budgets in tokens (128) or pages (8p), sink and window counted.")]
TausOption = Annotated[str, typer.Option("--tau", help="Comma list of thresholds of the threshold rule, each a setting of its own.")]
CoverageOption = Annotated[float, typer.Option(help="Target of the coverage rule.")]
CalibrationOption = Annotated[str, typer.Option(help="text: fit once on built-in text; prompt: on every prompt; or a file of `kvskim calibrate`.")]
ChatOption = Annotated[str, typer.Option(help="Chat template: auto, on or off.")]
SparseFromOption = Annotated[str, typer.Option(help="First sparse decode steps: the answer, or already the question.")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
TimeLimitOption = Annotated[float, typer.Option(help="Seconds after which no further sample is begun; 0: no limit.")]
WorkersOption = Annotated[int, typer.Option(help="Processes that share the work, each with a copy of the model; with cuda they use all GPUs in turn.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")]
MarkdownOption = Annotated[Path | None, typer.Option("--markdown", help="Write the tables to this file.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Write a PNG: the result over bytes read per step.")]
DEFAULT_METHODS = "full,oracle,sketch,rki4,minmax"
ENGINE_METHODS = "full,sketch,rki4,minmax"
"""In their place with vLLM, which has no oracle."""
DEFAULT_TAUS = f"{DEFAULT_TAU:g}"
DEFAULT_GPU_MEMORY = 0.9


@app.command()
def selectors(
    model: Annotated[str, typer.Argument(help="Hugging Face model directory or .gguf file; 'demo' is the model of `kvskim demo`.")] = "demo",
    tokens: Annotated[int, typer.Option(help="Length of the prose and code texts.")] = 8192,
    decoded: Annotated[int, typer.Option(help="Tokens at their end that are decoded sparsely.")] = 128,
    budgets: Annotated[str, typer.Option(help="Comma list of page budgets, sink and window counted.")] = "8,16,32",
    tau: Annotated[float, typer.Option(help="Threshold of the threshold rule.")] = DEFAULT_TAU,
    needle_tokens: Annotated[int, typer.Option(help="Length of the contexts with planted facts.")] = 6144,
    seeds: Annotated[int, typer.Option(help="Number of such contexts, 12 questions each.")] = 2,
    only: Annotated[str, typer.Option(help="Comma list of rows to run, as the table names them; empty: all selectors.")] = "",
    baselines: Annotated[bool, typer.Option("--baselines", help="Also the published methods (docs/baselines.md), slower than the selectors.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")] = None,
) -> None:
    """KL divergence, recall gap and planted facts answered, for every selector and rule, on a real model."""
    from kvskim.demo.model import require_packages
    from kvskim.eval.methods import check_share
    from kvskim.eval.selector_table import known_candidates
    from kvskim.eval.selectors_report import markdown, run_table, write

    require_packages("transformers")
    pages = _page_budgets(budgets)
    check_share("--tau", tau)
    _check_least(
        ("--decoded", decoded, 1), ("--tokens", tokens, decoded + LEAST_PREFIX), ("--needle-tokens", needle_tokens, LEAST_NEEDLE_TOKENS), ("--seeds", seeds, 1)
    )
    names = _words(only)
    known = [candidate.name for candidate in known_candidates()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KvskimError(f"--only names {', '.join(map(repr, unknown))}; the rows are {', '.join(known)}")
    check_outputs(json_path, markdown_path)
    result = run_table(
        _load(model, device), tokens=tokens, decoded=decoded, budgets=pages, tau=tau, needle_tokens=needle_tokens, seeds=seeds, only=names,
        baselines=baselines, log=_log(),
    )
    write(result, json_path, markdown_path, _command(), datetime.date.today().isoformat())
    print(markdown(result))


def _page_budgets(text: str) -> list[int]:
    """Budgets of a comma list; each must have room for sink, window and one page more."""
    from kvskim.eval.methods import LEAST_BUDGET

    try:
        pages = [int(word) for word in text.split(",")]
    except ValueError:
        pages = []
    if not pages or min(pages) < LEAST_BUDGET:
        raise KvskimError(f"--budgets is {text!r}; it must be a comma list of whole numbers, at least {LEAST_BUDGET} each, such as 8,16,32")
    return pages


@app.command()
def fidelity(
    model: ModelArgument = "demo",
    text: Annotated[list[Path] | None, typer.Option("--text", help="A UTF-8 text file; may be given several times. Default: built-in prose and code.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of a window of text.")] = 4096,
    decoded: Annotated[int, typer.Option(help="Tokens at its end that are decoded sparsely.")] = 128,
    seeds: Annotated[int, typer.Option(help="Windows of each text.")] = 2,
    selectors: SelectorsOption = DEFAULT_METHODS,
    rule: RulesOption = "budget,threshold",
    budgets: BudgetsOption = "128,256,512",
    tau: TausOption = DEFAULT_TAUS,
    coverage: CoverageOption = 0.95,
    calibration: CalibrationOption = "text",
    workers: WorkersOption = 1,
    engine: Annotated[
        str, typer.Option(help="transformers, or vllm: agreement of the tokens that whole engines write, on a GPU, in the type of the model.")
    ] = "transformers",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    json_path: JsonOption = None,
    markdown_path: MarkdownOption = None,
    plot_path: PlotOption = None,
) -> None:
    """KL, top-1, first divergence, missed mass, output error and oracle gap against full attention, for every method and setting."""
    from kvskim.demo.model import check_positions, require_packages
    from kvskim.eval import fidelity as measure
    from kvskim.eval.methods import Calibrations
    from kvskim.eval.workers import Setup, run_jobs

    require_packages("transformers", *(["matplotlib"] if plot_path else []))
    selectors = _check_engine(engine, selectors, dtype)
    if engine == "vllm" and workers > 1:
        raise KvskimError(f"--workers is {workers}; --engine vllm runs one engine at a time: leave it out")
    methods, settings = _compared(selectors, rule, budgets, tau, coverage)
    _check_least(("--decoded", decoded, 2), ("--tokens", tokens, decoded + LEAST_PREFIX), ("--seeds", seeds, 1), ("--workers", workers, 1))
    check_outputs(json_path, markdown_path, plot_path)
    texts = _texts(text)
    if engine == "vllm":
        from kvskim.eval import fidelity_vllm

        if plot_path is not None:
            raise KvskimError("--plot needs --engine transformers: whole engines don't say how many bytes a step reads")
        result = fidelity_vllm.run(
            model, texts, tokens=tokens, decoded=decoded, seeds=seeds, methods=methods, settings=settings, calibration=calibration, log=_log()
        )
        result["command"], result["date"] = _command(), datetime.date.today().isoformat()
        return _write(result, fidelity_vllm.markdown(result), "Fidelity in vLLM", json_path, markdown_path)
    loaded = _load(model, device, dtype)
    check_positions(loaded.model, tokens, "--tokens")
    windows = {name: measure.text_windows(loaded.tokenizer, words, tokens, seeds, name) for name, words in texts.items()}
    calibrations, spread = Calibrations(loaded, calibration), None
    if workers > 1:
        arguments = (model, dtype, decoded, methods, settings, calibration, calibrations.fitted_on_text(methods))
        spread = partial(run_jobs, Setup(measure.worker, arguments), device=device, workers=workers)
    result = measure.run_fidelity(loaded, windows, decoded, methods, settings, calibrations, _log(), spread)
    _write({**_machine(loaded), **result}, measure.markdown(result), "Fidelity", json_path, markdown_path)
    if plot_path is not None:
        measure.plot(result, plot_path)


@app.command()
def ruler(
    model: ModelArgument = "demo",
    tasks: Annotated[str, typer.Option(help="Comma list of tasks; empty: the thirteen of RULER.")] = "",
    contexts: Annotated[str, typer.Option(help="Comma list of context lengths in tokens, prompt and answer together.")] = "4096",
    samples: Annotated[int, typer.Option(help="Samples of each task, context and seed.")] = 20,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 1,
    first_seed: Annotated[int, typer.Option(help="First of them: runs with other seeds have other samples, and `kvskim eval page` joins them.")] = 0,
    selectors: SelectorsOption = DEFAULT_METHODS,
    rule: RulesOption = "budget,threshold",
    budgets: BudgetsOption = "128,256,512",
    tau: TausOption = DEFAULT_TAUS,
    coverage: CoverageOption = 0.95,
    calibration: CalibrationOption = "text",
    chat: ChatOption = "auto",
    sparse_from: SparseFromOption = "answer",
    limit: Annotated[int, typer.Option(help="Most tokens of an answer; 0: as the task says.")] = 0,
    time_limit: TimeLimitOption = 0.0,
    workers: WorkersOption = 1,
    engine: Annotated[str, typer.Option(help="transformers, or vllm: --workers engines answer, each with one method, on all GPUs in turn.")] = "transformers",
    gpu_memory: Annotated[float, typer.Option(help="With vllm: share of the memory of a GPU that the engines on it take together.")] = DEFAULT_GPU_MEMORY,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    json_path: JsonOption = None,
    markdown_path: MarkdownOption = None,
    plot_path: PlotOption = None,
) -> None:
    """Scores on the synthetic tasks of RULER, method by budget, with confidence intervals."""
    from kvskim.demo.model import check_positions, require_packages
    from kvskim.eval.answers import ModelAnswerer
    from kvskim.eval.methods import Calibrations
    from kvskim.eval.ruler.run import in_turn, plot, run_ruler, worker
    from kvskim.eval.ruler.tasks import LONGEST, RULER_TASKS, SHORTEST, TASKS
    from kvskim.eval.sample import PromptFormat, check_tasks
    from kvskim.eval.workers import Setup, run_jobs

    require_packages("transformers", *(["matplotlib"] if plot_path else []))
    named = _words(tasks)
    chosen = check_tasks(named, list(TASKS)) if named else list(RULER_TASKS)
    lengths = _whole_numbers(contexts, "--contexts", SHORTEST, LONGEST)
    selectors = _check_engine(engine, selectors, dtype)
    _check_ruler_engine(engine, sparse_from, gpu_memory)
    methods, settings = _compared(selectors, rule, budgets, tau, coverage)
    _check_least(("--samples", samples, 1), ("--seeds", seeds, 1), ("--first-seed", first_seed, 0), ("--workers", workers, 1), ("--limit", limit, 0))
    _check_time_limit(time_limit)
    check_outputs(json_path, markdown_path, plot_path)
    if engine == "vllm":
        from kvskim.eval.ruler import engine as engines

        about = dict(command=_command(), date=datetime.date.today().isoformat())
        result, tables = engines.run(
            model, tasks=chosen, contexts=lengths, samples=samples, seeds=range(first_seed, first_seed + seeds), methods=methods, settings=settings,
            calibration=calibration, chat=chat, limit=limit, time_limit=time_limit, workers=workers, gpu_memory=gpu_memory, device=device, log=_log(),
            save=lambda result: _write_json({**about, **result}, json_path),
        )
        _write({**about, **result}, tables, "RULER", json_path, markdown_path)
        if plot_path is not None:
            plot(result, plot_path, "RULER")
        if result["failed"]:
            raise KvskimError("engines failed, and the tables have what they had answered: " + "; ".join(f"{k}: {v}" for k, v in result["failed"].items()))
        return
    loaded = _load(model, device, dtype)
    check_positions(loaded.model, max(lengths), "--contexts")
    prompts = PromptFormat(loaded.tokenizer, chat)
    calibrations = Calibrations(loaded, calibration)
    answered = in_turn(ModelAnswerer(loaded, prompts, methods, settings, calibrations, sparse_from, limit), prompts)
    if workers > 1:
        arguments = (model, dtype, chat, methods, settings, calibration, calibrations.fitted_on_text(methods), sparse_from, limit)
        answered = partial(run_jobs, Setup(worker, arguments), device=device, workers=workers)
    machine = {**_machine(loaded), "limit": limit, "calibration": calibration}
    result, tables = run_ruler(
        answered, tasks=chosen, contexts=lengths, samples=samples, seeds=range(first_seed, first_seed + seeds),
        heads=len(loaded.sparse_layers) * loaded.num_kv_heads, time_limit=time_limit, log=_log(),
        save=lambda result: _write_json({**machine, **result}, json_path),
    )
    _write({**machine, **result}, tables, "RULER", json_path, markdown_path)
    if plot_path is not None:
        plot(result, plot_path, "RULER")


@app.command()
def benchmark(
    name: Annotated[str, typer.Argument(help="longbench, longbench-v2, infinitebench, scbench, math-500 or aime.")],
    model: ModelArgument = "demo",
    data: Annotated[Path | None, typer.Option("--data", help="Directory with the files; without it: from the hub, by the package datasets.")] = None,
    tasks: Annotated[str, typer.Option(help="Comma list of the benchmark's tasks; empty: all that the directory has.")] = "",
    samples: Annotated[int, typer.Option(help="Samples of each task, from the first one on; 0: all.")] = 0,
    limit: Annotated[int, typer.Option(help="Most tokens of an answer; 0: as the benchmark says.")] = 0,
    context: Annotated[int, typer.Option(help="Most tokens of prompt and answer; longer contexts lose their middle. 0: what the model was made for.")] = 0,
    selectors: SelectorsOption = DEFAULT_METHODS,
    rule: RulesOption = "budget,threshold",
    budgets: BudgetsOption = "128,256,512",
    tau: TausOption = DEFAULT_TAUS,
    coverage: CoverageOption = 0.95,
    calibration: CalibrationOption = "text",
    chat: ChatOption = "auto",
    sparse_from: SparseFromOption = "answer",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    json_path: JsonOption = None,
    markdown_path: MarkdownOption = None,
) -> None:
    """Scores on a published benchmark, with its own metrics, from files that you have or from the hub."""
    from kvskim.demo.model import check_positions, require_packages
    from kvskim.eval.answers import ModelAnswerer
    from kvskim.eval.benchmarks import read_benchmark, run_benchmark
    from kvskim.eval.methods import Calibrations
    from kvskim.eval.sample import PromptFormat

    require_packages("transformers")
    methods, settings = _compared(selectors, rule, budgets, tau, coverage)
    _check_least(("--samples", samples, 0), ("--limit", limit, 0), ("--context", context, 0))
    check_outputs(json_path, markdown_path)
    found = read_benchmark(name, data, tasks=_words(tasks), samples=samples, limit=limit)
    loaded = _load(model, device, dtype)
    if context:
        check_positions(loaded.model, context, "--context")
    longest = context or getattr(loaded.config, "max_position_embeddings", None)
    prompts = PromptFormat(loaded.tokenizer, chat, longest)
    prompts.check_room(found)
    answerer = ModelAnswerer(loaded, prompts, methods, settings, Calibrations(loaded, calibration), sparse_from)
    about = {**_machine(loaded), "benchmark": name}
    result, tables = run_benchmark(
        found, answerer, heads=len(loaded.sparse_layers) * loaded.num_kv_heads, log=_log(), save=lambda result: _write_json({**about, **result}, json_path),
    )
    _write({**about, **result}, tables, name, json_path, markdown_path)


def _compared(selectors: str, rule: str, budgets: str, taus: str, coverage: float) -> tuple[list[Method], list[Setting]]:
    """What the options ask to compare; raises KvskimError, naming the option that asks for something else."""
    from kvskim.eval.methods import parse_budgets, parse_methods, parse_taus, settings_of

    return parse_methods(selectors), settings_of(rule, parse_budgets(budgets), parse_taus(taus), coverage)


def _check_least(*options: tuple[str, int, int]) -> None:
    """Options, their values, and the least that each takes."""
    for option, value, least in options:
        if value < least:
            raise KvskimError(f"{option} is {value}; it must be at least {least}")


def _check_engine(engine: str, selectors: str, dtype: str) -> str:
    """The methods to compare, which depend on the engine where the user named none; raises KvskimError for an engine or a type that it does not have."""
    if engine not in ("transformers", "vllm"):
        raise KvskimError(f"--engine is {engine!r}; it must be transformers or vllm")
    if engine == "transformers":
        return selectors
    if dtype != "float32":
        raise KvskimError(f"--dtype is {dtype!r}; --engine vllm takes the type that the model's configuration names: leave it out")
    return ENGINE_METHODS if selectors == DEFAULT_METHODS else selectors


def _check_ruler_engine(engine: str, sparse_from: str, gpu_memory: float) -> None:
    """Refuse options of `eval ruler` alone that its engine does not have."""
    if engine == "transformers":
        if gpu_memory != DEFAULT_GPU_MEMORY:
            raise KvskimError(f"--gpu-memory is {gpu_memory}; it is for --engine vllm: leave it out")
        return
    if sparse_from != "answer":
        raise KvskimError(f"--sparse-from is {sparse_from!r}; --engine vllm reads the whole prompt with full attention: leave it out")
    if not 0 < gpu_memory <= 1:
        raise KvskimError(f"--gpu-memory is {gpu_memory}; it must be greater than 0 and at most 1")


def _check_time_limit(seconds: float) -> None:
    if not 0 <= seconds < float("inf"):
        raise KvskimError(f"--time-limit is {seconds}; it must be a number of seconds, or 0 for no limit")


def _log() -> Callable[[str], None]:
    console = Console(stderr=True)
    return lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)


def _command() -> str:
    return "kvskim " + shlex.join(sys.argv[1:])


def _load(model: str, device: str, dtype: str = "float32") -> EvalModel:
    """The model of a command; raises KvskimError where there is none, or no such device."""
    from kvskim.eval.model import load_named

    return load_named(model, device, dtype)


def _texts(files: list[Path] | None) -> dict[str, str]:
    """Texts by name: the user's, or built-in prose and code."""
    from kvskim.cli import _read_text
    from kvskim.eval.texts import code, prose

    if not files:
        return {"prose": prose()[2000:], "code": code()[2000:]}
    return {str(path): _read_text(path) or "" for path in files}


def _machine(loaded: EvalModel) -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else f"CPU ({platform.machine()})"
    dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    return dict(
        command=_command(), date=datetime.date.today().isoformat(), device=device, torch=torch.__version__, dtype=dtype, layers=loaded.num_layers,
        kv_heads=loaded.num_kv_heads, head_dim=loaded.head_dim,
    )


def _write_json(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        # In one move: whoever stops a run finds the last whole file.
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def _write(result: dict[str, Any], page: str, title: str, json_path: Path | None, markdown_path: Path | None) -> None:
    _write_json(result, json_path)
    if markdown_path is not None:
        head = f"# {title}\n\nMade by `{result['command']}` on {result['date']}: {result['device']}"
        shape = f", torch {result['torch']}, {result['dtype']}, {result['layers']} layers, {result['kv_heads']} kv heads, head dim {result['head_dim']}"
        markdown_path.write_text(f"{head}{shape if 'layers' in result else ''}.\n\n{page}", encoding="utf-8")
    print(page)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _whole_numbers(text: str, option: str, least: int, most: int) -> list[int]:
    words = _words(text)
    numbers = [int(word) for word in words if word.isascii() and word.isdigit()]
    if not numbers or len(numbers) < len(words) or min(numbers) < least or max(numbers) > most:
        raise KvskimError(f"{option} is {text!r}; it must be a comma list of whole numbers from {least} to {most}")
    return list(dict.fromkeys(numbers))
