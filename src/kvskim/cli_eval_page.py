"""`kvskim eval page`: one page of several results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvskim.cli_files import check_outputs
from kvskim.errors import KvskimError

_UsageError: Any = typer.BadParameter.__base__
ResultsOption = list[str] | None
Named = tuple[str, str, dict[str, Any]]
"""Name, file and contents of a result."""
ONLY_MORE_SAMPLES = {
    "contexts", "samples", "seeds", "first_seed", "time_limit", "workers", "gpu_memory", "device", "json_path", "markdown_path", "plot_path",
}  # fmt: skip
"""Parameters of `kvskim eval ruler` in which runs may differ that are joined."""


def page(
    ruler: Annotated[ResultsOption, typer.Option("--ruler", help="NAME=FILE: model and result of `eval ruler --json`; files of one NAME are joined.")] = None,
    fidelity: Annotated[ResultsOption, typer.Option("--fidelity", help="NAME=FILE: the same of `eval fidelity`.")] = None,
    default: Annotated[str, typer.Option(help="The method whose scores are given task by task.")] = "sketch",
    compared: Annotated[str, typer.Option(help="The method that it is compared with, question by question.")] = "rki4",
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="The page. What stands above its mark is kept if it is there already.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="All tables, without the single answers.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="PNG: score over bytes read per step, of the last --ruler result.")] = None,
) -> None:
    """Tables of several results, with paired differences and ratios to the oracle; also of a run that was stopped."""
    from kvskim.demo.model import require_packages
    from kvskim.eval import quality_page
    from kvskim.eval.ruler.run import plot, with_tables

    if not ruler and not fidelity:
        raise KvskimError("there is nothing to put on a page: give --ruler NAME=FILE or --fidelity NAME=FILE")
    if plot_path is not None and not ruler:
        raise KvskimError("--plot draws a result of --ruler, and none is given")
    require_packages(*(["matplotlib"] if plot_path else []))
    check_outputs(json_path, markdown_path, plot_path)
    read = [("fidelity", name, result) for name, _, result in (_result(text, "--fidelity", "by_text") for text in fidelity or [])]
    read += [("ruler", name, with_tables(result)) for name, result in _by_name([_result(text, "--ruler", "answers") for text in ruler or []])]
    sections = [
        quality_page.fidelity_section(name, result) if kind == "fidelity" else quality_page.ruler_section(name, result, default, compared)
        for kind, name, result in read
    ]
    kept = markdown_path.read_text(encoding="utf-8") if markdown_path is not None and markdown_path.exists() else ""
    text = quality_page.page(kept, sections)
    if json_path is not None:
        kinds: dict[str, dict[str, Any]] = {}
        for kind, name, result in read:
            kinds.setdefault(kind, {})[name] = quality_page.without_answers(result)
        json_path.write_text(json.dumps(kinds, indent=1) + "\n", encoding="utf-8")
    if markdown_path is not None:
        markdown_path.write_text(text, encoding="utf-8")
    if plot_path is not None:
        plot(read[-1][2], plot_path, f"RULER, {read[-1][1]}")
    print("\n\n".join(sections))


def _by_name(found: Sequence[Named]) -> list[tuple[str, dict[str, Any]]]:
    """One result for each name: where several files have it, their samples together."""
    from kvskim.eval.ruler.join import join_runs

    runs: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, file, result in found:
        runs.setdefault(name, []).append((file, result))
    for (first, base), *others in runs.values():
        wanted = _settings(first, base) if others else {}
        for file, result in others:
            asked = _settings(file, result)
            for key in asked:
                if asked[key] != wanted[key]:
                    option = "the model" if key == "model" else f"--{key.replace('_', '-')}"
                    raise KvskimError(f"{file} was made with {option} {asked[key]}, {first} with {option} {wanted[key]}: give it a name of its own")
    return [(name, several[0][1] if len(several) == 1 else join_runs(several)) for name, several in runs.items()]


def _settings(file: str, result: dict[str, Any]) -> dict[str, Any]:
    """What the command of a result says about its answers, defaults included: all that joined runs must have in common."""
    from kvskim.cli_eval import app
    from kvskim.eval.methods import parse_taus

    program: Any = typer.main.get_command(app)
    words = shlex.split(result["command"])
    try:
        if words[:3] != ["kvskim", "eval", "ruler"]:
            raise typer.BadParameter(result["command"])
        asked = program.commands["ruler"].make_context("ruler", words[3:]).params
        # However they are written, and in whatever order.
        asked["tau"] = ",".join(f"{tau:g}" for tau in sorted(parse_taus(asked["tau"]), reverse=True))
    except (_UsageError, KvskimError) as error:
        said = str(error) if isinstance(error, KvskimError) else error.format_message()
        raise KvskimError(f"{file} can't be joined with another file: its command is none of `kvskim eval ruler` ({said})") from error
    return {key: value for key, value in asked.items() if key not in ONLY_MORE_SAMPLES}


def _result(text: str, option: str, needed: str) -> Named:
    """Name, file and contents of ``NAME=FILE``."""
    name, sign, file = text.partition("=")
    if not sign or not name or not file:
        raise KvskimError(f"{option} is {text!r}; it must be NAME=FILE")
    try:
        result = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KvskimError(f"{option} {file} can't be read ({error}): give a file that `kvskim eval {option[2:]} --json` wrote") from error
    if not isinstance(result, dict) or needed not in result:
        raise KvskimError(f"{option} {file} is no result of `kvskim eval {option[2:]} --json`: it has no {needed!r}")
    return name, file, result
