"""`kvskim bench`: measure on this machine's GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvskim import cli_bench_e2e
from kvskim.cli_files import check_outputs
from kvskim.errors import KvskimError

app = typer.Typer(help="Measure on this machine's GPU.", no_args_is_help=True)
app.command("e2e")(cli_bench_e2e.e2e)
app.command("plot")(cli_bench_e2e.plot)


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


@app.command()
def kernels(
    implementation: Annotated[str, typer.Option("--kernels", help="What is measured: cuda, triton or auto.")] = "auto",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and repetitions, under a minute.")] = False,
    twin: Annotated[bool, typer.Option(help="Also measure the Triton kernels beside the CUDA ones.")] = True,
    only: Annotated[str, typer.Option(help="Measure the cases with this in their title only, such as 'whole step' or MLA.")] = "",
) -> None:
    """Every operation and shape, against its roofline, the Triton kernels, and dense FlashAttention-3 where vLLM is installed.

    Exits with 1 when a measurement failed.
    """
    check_outputs(json_path, markdown_path)
    if not run_kernels(implementation, json_path, markdown_path, quick=quick, twin=twin, only=only):
        raise typer.Exit(1)


def run_kernels(implementation: str, json_path: Path | None, markdown_path: Path | None, *, quick: bool, twin: bool = True, only: str = "") -> bool:
    """Measure, print and write; whether every measurement succeeded."""
    import torch

    console = Console(stderr=True)
    if implementation not in ("auto", "cuda", "triton"):
        raise KvskimError(f"--kernels is {implementation!r}; it must be auto, cuda or triton")
    if not torch.cuda.is_available():
        raise KvskimError("kvskim bench kernels needs a CUDA GPU; torch sees none")
    from kvskim.bench.kernels import KernelBench, markdown_table
    from kvskim.ops.dispatch import choose

    try:
        choice = choose(implementation, "cuda")
    except ValueError as error:
        raise KvskimError(str(error)) from error
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {choice.reason}")
    with console.status("measuring") as status:
        bench = KernelBench(
            choice.kernels, twin=twin, quick=quick, only=only, progress=lambda line: status.update(line) if "\n" not in line else console.print(line)
        )
        rows = bench.run()
    table = Table(title=f"copy bandwidth {bench.bandwidth / 1e12:.2f} TB/s; dense baseline: {bench.dense_reason or 'FlashAttention-3 of vLLM'}")
    for column in ("operation", "shape", "kernels"):
        table.add_column(column)
    for column in ("us", "floor us", "of bandwidth", "baseline us", "speed-up"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            r.op, r.shape, r.kernels, f"[red]{r.error}[/red]" if r.error else _number(r.us, 2), _number(r.floor_us, 2),
            "" if r.share is None else f"{100 * r.share:.0f}%", _number(r.baseline_us), "" if r.speedup is None else f"{r.speedup:.2f}x",
        )
    Console(width=200).print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(bench.report(), indent=1) + "\n")
    if markdown_path is not None:
        markdown_path.write_text(markdown_table(rows))
    failed = [r for r in rows if r.error]
    if failed:
        console.print(f"[red]{len(failed)} of {len(rows)} measurements failed.[/red]")
    return not failed


@app.command("all")
def everything(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for e2e.json, e2e.md, kernels.json, kernels.md, and e2e.png with matplotlib.")],
    model: cli_bench_e2e.ModelArgument = cli_bench_e2e.DEFAULT_MODEL,
    cases: cli_bench_e2e.CasesOption = None,
    selector: cli_bench_e2e.SelectorOption = None,
    budget_pages: cli_bench_e2e.BudgetOption = None,
    config: cli_bench_e2e.ConfigOption = None,
    quick: cli_bench_e2e.QuickOption = False,
) -> None:
    """`e2e`, then `kernels`, with their results in one folder. Exits with 1 when a measurement of either failed, or one of them can't run here."""
    if not output.is_dir():
        raise KvskimError(f"--output is {str(output)!r}, which is no folder: create it first")
    picture = output / "e2e.png" if importlib.util.find_spec("matplotlib") is not None else None
    passed = []
    # The engines first: they are other processes, and need the memory that measuring kernels takes in this one.
    for measure in (
        lambda: cli_bench_e2e.e2e(
            model, cases, selector=selector, budget_pages=budget_pages, config=config, quick=quick, json_path=output / "e2e.json",
            markdown_path=output / "e2e.md", plot_path=picture,
        ),
        lambda: kernels(json_path=output / "kernels.json", markdown_path=output / "kernels.md", quick=quick),
    ):
        try:
            measure()
        except typer.Exit as result:
            passed.append(result.exit_code == 0)
        except KvskimError as error:
            # What one of them lacks, vLLM for instance, the other may do without.
            Console(stderr=True, soft_wrap=True, highlight=False).print(f"Failed: {error}", style="red", markup=False)
            passed.append(False)
    if not all(passed):
        raise typer.Exit(1)
