"""`kvskim bench e2e` and `kvskim bench plot`: a real vLLM engine, dense against kvskim."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvskim.cli_files import check_outputs, writable
from kvskim.config import SkimConfig, configured_by, is_disabled, load_config
from kvskim.config_sources import read_settings
from kvskim.errors import KvskimError

if TYPE_CHECKING:
    from kvskim.bench.e2e_run import Request, Run

DEFAULT_MODEL = "llama3.1-8b"
BUDGET_PAGES = 128
"""Budget where no rule is given and weights are dummy: their attention is near uniform, so a threshold would attend next to nothing."""

ModelArgument = Annotated[str, typer.Argument(help="glm4-9b-1m, llama3.1-8b, qwen3-8b, deepseek-v2-lite, or the folder of a Hugging Face model.")]
CasesOption = Annotated[str | None, typer.Option(help="Comma list of BATCHxCONTEXT, such as 1x16K,4x131072. Default: a list for each geometry.")]
SelectorOption = Annotated[str | None, typer.Option(help="Record format: sketch, rki4, r8, clse, quad, minmax or mean.")]
RuleOption = Annotated[str | None, typer.Option(help="How pages are chosen: threshold, budget or coverage. Default with dummy weights: budget.")]
BudgetOption = Annotated[int | None, typer.Option(help=f"Pages attended, sink and window included; implies rule budget. Default: {BUDGET_PAGES}.")]
TauOption = Annotated[float | None, typer.Option(help="Rule threshold: smallest estimated mass of a page that is attended; implies the rule.")]
CoverageOption = Annotated[float | None, typer.Option(help="Mass the attended pages must reach; implies rule coverage.")]
VariantOption = Annotated[str | None, typer.Option(help="Where keys and values live: fast, mem-v or mem-kv.")]
ConfigOption = Annotated[str | None, typer.Option("--config", help="More settings of kvskim: a JSON or YAML file, or inline JSON.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")]
MarkdownOption = Annotated[Path | None, typer.Option("--markdown", help="Write the tables to this file.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw speed-up over context into this PNG file; needs matplotlib.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Two cases, 1x16K and 1x128K: under five minutes.")]


@dataclass(frozen=True)
class Outputs:
    """Files to write, and what is written before."""

    command: str
    json_path: Path | None = None
    markdown_path: Path | None = None
    plot_path: Path | None = None
    merge_path: Path | None = None

    def check(self) -> list[Run]:
        """Refuse, before any work, what could not be written or read after it; returns the runs to merge with."""
        from kvskim.bench.e2e_report import read_results
        from kvskim.bench.plot import require_matplotlib

        check_outputs(self.json_path, self.markdown_path, self.plot_path)
        if self.plot_path is not None:
            require_matplotlib()
        return [] if self.merge_path is None else read_results(self.merge_path, "--merge")

    def write(self, runs: list[Run]) -> None:
        """Write the figures; the plot is left to the end."""
        from kvskim.bench.e2e_report import as_json
        from kvskim.bench.e2e_tables import markdown

        if self.json_path is not None:
            self.json_path.write_text(json.dumps(as_json(runs, self.command), indent=1) + "\n", encoding="utf-8")
        if self.markdown_path is not None:
            self.markdown_path.write_text(markdown(runs), encoding="utf-8")


def e2e(
    model: ModelArgument = DEFAULT_MODEL,
    cases: CasesOption = None,
    batch: Annotated[str | None, typer.Option(help="Comma list of batch sizes, for every context of --ctx.")] = None,
    ctx: Annotated[str | None, typer.Option(help="Comma list of context lengths in tokens, such as 16384,131072 or 16K,128K.")] = None,
    ttft: Annotated[str | None, typer.Option(help="Comma list of prompt lengths whose time to first token is measured.")] = None,
    load: Annotated[str | None, typer.Option(help="REQUESTSxCONTEXT: so many requests in flight, with prompts of so many tokens each.")] = None,
    load_requests: Annotated[int | None, typer.Option(help="Requests in all. Default: three times those in flight.")] = None,
    load_prefill: Annotated[
        str | None,
        typer.Option(help="Prompt tokens computed, the rest is filled in: a number, fill (next to none) or real (all). Default: 2048; with --real: real."),
    ] = None,
    load_output: Annotated[str | None, typer.Option(help="Shortest and longest output in tokens. Default: 64,448.")] = None,
    load_rate: Annotated[float | None, typer.Option(help="Arrivals per second (Poisson). Default: a new request as soon as one ends.")] = None,
    selector: SelectorOption = None,
    rule: RuleOption = None,
    budget_pages: BudgetOption = None,
    tau: TauOption = None,
    coverage: CoverageOption = None,
    variant: VariantOption = None,
    config: ConfigOption = None,
    real: Annotated[bool, typer.Option("--real", help="Real weights, real prompts and real prefill, from a model folder.")] = False,
    side: Annotated[str, typer.Option(help="dense, kvskim or both.")] = "both",
    profile: Annotated[
        bool, typer.Option("--profile", help="After all measurements, record some steps of each decode case: where their time goes, kernel by kernel.")
    ] = False,
    repetitions: Annotated[int, typer.Option(help="Measurements of each case; the median counts.", min=1)] = 3,
    gpu_memory: Annotated[float, typer.Option(help="Share of GPU memory that vLLM may use.", min=0.05, max=1.0)] = 0.9,
    blocks: Annotated[int | None, typer.Option(help="Number of KV blocks instead of what vLLM finds room for.", min=1)] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share every layer; the floor is that of the first one.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for one engine, after which it is ended.", min=1)] = 1800,
    quick: QuickOption = False,
    json_path: JsonOption = None,
    markdown_path: MarkdownOption = None,
    plot_path: PlotOption = None,
    merge_path: Annotated[Path | None, typer.Option("--merge", help="A result of --json, to which this run's figures are added.")] = None,
    log: Annotated[Path | None, typer.Option(help="Append all that the engines print to this file.")] = None,
) -> None:
    """Time per token, time to first token and throughput of vLLM, dense against kvskim, each in a process of its own.

    Without --real weights are dummy, and the KV cache of decode cases is filled without prefill. Exits with 1 when a measurement failed.
    """
    from kvskim.bench import e2e_plan as plan

    outputs = Outputs("kvskim " + shlex.join(sys.argv[1:]), json_path, markdown_path, plot_path, merge_path)
    if side not in (*plan.SIDES, "both"):
        raise KvskimError(f"--side is {side!r}; it must be dense, kvskim or both")
    chosen = plan.find_model(model, real=real)
    if quick and (cases is not None or batch is not None or ctx is not None):
        raise KvskimError("--quick has its own cases: leave out --cases, --batch and --ctx, or --quick")
    if quick or not any((cases, batch, ctx, ttft, load)):
        cases = plan.QUICK_CASES if quick else plan.DEFAULT_CASES.get(model, plan.QUICK_CASES)
    loads = plan.load_jobs(load, requests=load_requests, prefill=load_prefill, output=load_output, rate=load_rate, real=real)
    decodes = plan.decode_jobs(cases, batch, ctx)
    jobs = [*decodes, *plan.ttft_jobs(ttft), *loads, *(plan.profile_jobs(decodes) if profile else ())]
    plan.check_positions(chosen, jobs)
    plan.check_tensor_parallel(chosen, tensor_parallel)
    settings = settings_of(config, real=real, selector=selector, rule=rule, budget_pages=budget_pages, tau=tau, coverage=coverage, variant=variant)
    if log is not None:
        writable(log, "--log")
    earlier = outputs.check()
    sides = plan.SIDES if side == "both" else (side,)
    request = request_of(
        chosen, jobs, sides, settings, real=real, repetitions=repetitions, memory=gpu_memory, blocks=blocks, tensor_parallel=tensor_parallel,
        timeout=timeout, log=log,
    )
    if not run_e2e(request, outputs, earlier):
        raise typer.Exit(1)


def settings_of(config: str | None, *, real: bool, **options: Any) -> SkimConfig:
    """The configuration of kvskim: of the environment, ``--config`` and the options, later wins; a number that belongs to a rule implies the rule."""
    given = {} if config is None else read_settings(config, name="--config")[0]
    options = {name: value for name, value in options.items() if value is not None}
    implied = {"budget_pages": "budget", "tau": "threshold", "coverage": "coverage"}
    if "rule" not in options:
        options.update([("rule", rule) for name, rule in implied.items() if name in options])
    if not real and configured_by() is None and not {"rule", "budget", *implied} & {*given, *options}:
        options.update(rule="budget", budget_pages=BUDGET_PAGES)
    return load_config({**given, **options}).config


def request_of(
    model: Any, jobs: list[Any], sides: tuple[str, ...], settings: SkimConfig, *, real: bool, tensor_parallel: int = 1, **how: Any
) -> Request:
    """The request, after all that can be known before any work has been checked: vLLM, its plugin, what kvskim can do in it, the GPU.

    Raises:
        KvskimError: one sentence on what is missing.
    """
    from kvskim.bench.e2e_plan import KVSKIM
    from kvskim.bench.e2e_run import Request

    if KVSKIM in sides:
        _check_settings(settings, latent=model.latent)
    if importlib.util.find_spec("vllm") is None:
        raise KvskimError("vllm is not installed here; install it with: pip install 'kvskim[vllm]'")
    if KVSKIM in sides and not any(entry.value.startswith("kvskim.") for entry in entry_points(group="vllm.general_plugins")):
        raise KvskimError("kvskim is on the path but not installed, so vLLM would not load it: install it with pip")
    import torch

    if not torch.cuda.is_available():
        raise KvskimError("kvskim bench e2e needs a CUDA GPU; torch sees none")
    if 1 < tensor_parallel > torch.cuda.device_count():
        raise KvskimError(f"--tensor-parallel is {tensor_parallel}, and torch sees {torch.cuda.device_count()} GPUs: give at most so many")
    calibrate = not real and settings.calibration == "auto"
    return Request(
        model, tuple(jobs), sides, json.loads(settings.model_dump_json()), real=real, random_calibration=calibrate, tensor_parallel=tensor_parallel, **how
    )


def _check_settings(settings: SkimConfig, *, latent: bool) -> None:
    from kvskim.engines.vllm.support import EngineFacts, engine_refusal, mla_refusal

    if is_disabled():
        raise KvskimError("KVSKIM_DISABLE switches kvskim off, so there is nothing to measure: unset it, or give --side dense")
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        installed = EngineFacts().vllm_version
    facts = EngineFacts(
        vllm_version=installed, variant=settings.variant, selector=settings.selector, page_frame=bool(settings.selector_options.get("page_frame", False))
    )
    refusal = engine_refusal(facts) or (mla_refusal(facts) if latent else None)
    if refusal is not None:
        raise KvskimError(refusal)


def run_e2e(request: Request, outputs: Outputs, earlier: Sequence[Run] = ()) -> bool:
    """Measure, print and write, earlier runs included; whether every measurement of this run succeeded."""
    from kvskim.bench.e2e_report import merge
    from kvskim.bench.e2e_run import run

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with _progress(console) as tell:
        # Written after each job: what was measured is not lost when the command is stopped.
        measured = run(request, tell, lambda so_far: outputs.write(merge([*earlier, *so_far])))
    runs = merge([*earlier, *measured])
    _print(runs)
    failures = [line for found in measured for line in found.failures]
    if outputs.plot_path is not None:
        failures += _draw(runs, outputs.plot_path)
    for line in failures:
        console.print(f"Failed: {line}", style="red", markup=False)
    return not failures


def _draw(runs: list[Run], path: Path) -> list[str]:
    """Draw the plot; a line in the list where that failed, because the figures must not be lost for it."""
    from kvskim.bench.plot import draw

    try:
        draw(runs, path)
    except KvskimError as error:
        return [f"--plot: {error}"]
    return []


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, str], None]]:
    """What is being done: a line that changes on a terminal, else a line for each phase."""
    if not console.is_terminal:
        yield lambda side, text: console.print(f"{side}: {text}", markup=False)
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("starting")
        yield lambda side, text: progress.update(task, description=f"[bold]{side}[/bold] {escape(text)}")


def _print(runs: list[Run]) -> None:
    from kvskim.bench.e2e_tables import tables

    console = Console(width=230, highlight=False)
    for found in tables(runs):
        table = Table(title=found.title, title_justify="left")
        for number, column in enumerate(found.columns):
            table.add_column(column, justify="left" if number < 2 else "right")
        for cells in found.cells:
            table.add_row(*[f"[red]{escape(cell)}[/red]" if cell.startswith("failed") else escape(cell) for cell in cells])
        console.print(table)


def plot(
    results: Annotated[Path, typer.Argument(help="A result of `kvskim bench e2e --json`.")],
    output: Annotated[Path, typer.Argument(help="The PNG file to write.")],
    selector: Annotated[str | None, typer.Option(help="Draw the cases of this selector only.")] = None,
) -> None:
    """Draw speed-up over context from a result file."""
    from kvskim.bench.e2e_report import read_results
    from kvskim.bench.plot import draw, require_matplotlib

    writable(output, "the PNG file")
    require_matplotlib()
    draw(read_results(results, "the result file"), output, selector)
