"""The command `kvskim`. Commands import what they need when they run, so that `kvskim --version` is fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from kvskim import __version__, cli_bench, cli_build, cli_eval, cli_vllm
from kvskim.cli_config import config as config_command
from kvskim.cli_files import writable
from kvskim.config import ConfigError, is_disabled, load_config
from kvskim.errors import KvskimError

if TYPE_CHECKING:
    from kvskim.config import SkimConfig

app = typer.Typer(
    name="kvskim",
    help="Decode long contexts by skimming a compact record of every KV page and attending only the pages that matter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("config")(config_command)
app.command("serve", context_settings=cli_vllm.PASS_THROUGH)(cli_vllm.serve)
app.command("doctor")(cli_vllm.doctor)
app.command("build")(cli_build.build)
app.command("check")(cli_vllm.check)
app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_eval.app, name="eval")

SelectorOption = Annotated[str | None, typer.Option(help="Record format: sketch, rki4, r8, clse, quad, minmax, mean or oracle.")]
RuleOption = Annotated[str | None, typer.Option(help="How pages are chosen: threshold, budget or coverage.")]
BudgetPagesOption = Annotated[int | None, typer.Option(help="Pages attended, sink and window included; implies rule budget.")]
BudgetOption = Annotated[float | None, typer.Option(help="Share of the pages that is attended, such as 0.1, sink and window included; implies rule budget.")]
TauOption = Annotated[float | None, typer.Option(help="Rule threshold: smallest estimated mass of a page that is attended.")]
CoverageOption = Annotated[float | None, typer.Option(help="Mass the attended pages must reach; implies rule coverage.")]
TextOption = Annotated[Path | None, typer.Option("--text", help="A UTF-8 text file of your own.", metavar="FILE")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvskim {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options of the program itself."""


def _configuration(
    selector: str | None, rule: str | None, budget_pages: int | None, budget: float | None, tau: float | None, coverage: float | None
) -> SkimConfig:
    """The effective configuration of a command; a number that belongs to a rule implies the rule."""
    if rule is None and (budget_pages is not None or budget is not None):
        rule = "budget"
    elif rule is None and coverage is not None:
        rule = "coverage"
    arguments: dict[str, Any] = {"selector": selector, "rule": rule, "budget_pages": budget_pages, "budget": budget, "tau": tau, "coverage": coverage}
    loaded = load_config(arguments)
    if is_disabled():
        raise KvskimError("KVSKIM_DISABLE switches kvskim off, so there is nothing to show: unset it")
    for warning in loaded.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    return loaded.config


def _read_text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KvskimError(f"--text {path}: there is no such file") from None
    except UnicodeDecodeError:
        raise KvskimError(f"--text {path} is not a UTF-8 text file") from None
    except OSError as error:
        raise KvskimError(f"--text {path} can't be read ({error.strerror})") from None
    if not text.strip():
        raise KvskimError(f"--text {path} is empty")
    return text


@app.command()
def demo(
    context: Annotated[int, typer.Option(help="Tokens of the document.")] = 4096,
    selector: SelectorOption = None,
    rule: RuleOption = None,
    budget_pages: BudgetPagesOption = None,
    budget: BudgetOption = None,
    tau: TauOption = None,
    coverage: CoverageOption = None,
    text: TextOption = None,
    question: Annotated[list[str] | None, typer.Option(help="A question of your own; may be given several times.")] = None,
) -> None:
    """Let a small real model read a long document on the CPU and answer questions, with full attention and with kvskim, side by side."""
    settings = _configuration(selector, rule, budget_pages, budget, tau, coverage)
    own_text = _read_text(text)
    if own_text is not None and not question:
        raise KvskimError("--text needs at least one --question about it")
    if any(not words.strip() for words in question or []):
        raise KvskimError("--question is empty: ask something, or leave it out")
    from kvskim.demo.run import run_demo

    run_demo(settings, context=context, text=own_text, questions=question)


@app.command()
def inspect(
    model: Annotated[str | None, typer.Argument(help="A Hugging Face model folder or a .gguf file; default: the demo model.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write.")] = Path("kvskim-inspect.png"),
    context: Annotated[int, typer.Option(help="Tokens of the text that are prefilled.")] = 2048,
    steps: Annotated[int, typer.Option(help="Decode steps that are looked at.")] = 48,
    selector: SelectorOption = None,
    rule: RuleOption = None,
    budget_pages: BudgetPagesOption = None,
    budget: BudgetOption = None,
    tau: TauOption = None,
    coverage: CoverageOption = None,
    text: TextOption = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu or cuda.")] = "cpu",
) -> None:
    """Draw which pages each layer and head attends over time, and the attention mass covered, with the worst heads named."""
    settings = _configuration(selector, rule, budget_pages, budget, tau, coverage)
    own_text = _read_text(text)
    target = writable(output, "--output")
    from kvskim.inspection import run_inspect

    run_inspect(settings, target, model=model, context=context, steps=steps, text=own_text, device=device)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A Hugging Face model folder or a .gguf file; `demo` for the demo model.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The calibration file to write (safetensors).")] = None,
    cache: Annotated[bool, typer.Option("--cache", help="Keep it in the cache directory too, where `calibration: auto` finds it for this model.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of text to fit on.")] = 8192,
    record_bytes: Annotated[int, typer.Option(help="Size of the records: 128, 192, 256 or 384.")] = 256,
    page_frame: Annotated[bool, typer.Option("--page-frame", help="For records in the frame of their page (selector option page_frame).")] = False,
    text: TextOption = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu or cuda.")] = "cpu",
) -> None:
    """Fit the record basis of a model on a text of yours or on built-in mixed text, for the setting `calibration`."""
    if output is None and not cache:
        raise KvskimError("give the file to write with --output, or --cache to keep the calibration for `calibration: auto`, or both")
    own_text = _read_text(text)
    target = None if output is None else writable(output, "--output")
    options = {"record_bytes": record_bytes, "page_frame": page_frame}
    loaded = load_config({"selector": "sketch", "selector_options": options, "calibration": "auto"})
    for warning in loaded.warnings:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"Warning: {warning}", style="yellow", markup=False)
    from kvskim.demo.calibrate import run_calibrate

    run_calibrate(loaded.config, target, model=None if model == "demo" else model, tokens=tokens, text=own_text, device=device, keep=cache)


_UsageError: Any = typer.BadParameter.__base__
"""What the parser raises for a command line that it does not understand."""


def main() -> None:
    """Entry point: kvskim's own errors, and those of the command line, become one red sentence and exit code 2."""
    try:
        # Otherwise the parser prints its errors itself, in a box of several lines.
        code = app(prog_name="kvskim", standalone_mode=False)
    except _UsageError as error:
        words = error.format_message()
        if not words:
            # A group of commands without a command: its help has been printed.
            sys.exit(error.exit_code)
        command = error.ctx.command_path if error.ctx is not None else "kvskim"
        _fail(f"{words.rstrip('.')} (see `{command} --help`)")
    except (KvskimError, ConfigError) as error:
        _fail(str(error))
    except ValueError as error:
        from kvskim.calibration import CalibrationError

        if not isinstance(error, CalibrationError):
            raise
        _fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"Error: {message}", style="red", markup=False)
    sys.exit(2)
