"""What the documentation names is there: links lead to files and headings, commands of kvskim take the options they are shown with, paths exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from kvskim import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
PROGRAM: Any = typer.main.get_command(cli.app)


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them of its headings."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def broken_links(text: str, page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in headings(target))):
            broken.append(link)
    return broken


def unknown_options(text: str) -> list[str]:
    """Commands with an option or a subcommand that they don't have. What follows `kvskim serve` is vLLM's."""
    unknown = []
    # A command goes on in the next line behind a backslash.
    for line in re.findall(r"\bkvskim ([a-z][^`\n]*)", text.replace("\\\n", " ")):
        line = line.split(" #")[0]
        try:
            words = shlex.split(line)
        except ValueError:  # an apostrophe in a sentence
            words = line.split()
        command = PROGRAM
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if command is PROGRAM or command.name == "serve":
            continue
        known = {"--help", *(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))}
        wrong = [word for word in words if word.startswith("-") and word.strip("-") and word.split("=")[0].rstrip(".,;:)") not in known]
        if wrong or (words and hasattr(command, "commands")):
            unknown.append(f"kvskim {line}")
    return unknown


def missing_paths(text: str) -> list[str]:
    return [path for path in re.findall(r"(?:python |bash |`)((?:tests|benchmarks|src|docs)/[\w/.\-]+)", text) if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert broken_links(text, page) == []
    assert unknown_options(text) == []
    assert missing_paths(text) == []


def test_every_command_is_documented() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    readme = PAGES[0].read_text(encoding="utf-8")
    for name, command in PROGRAM.commands.items():
        assert re.search(rf"`{name}`|`kvskim {name}\b", readme), f"README.md does not name `kvskim {name}`"
        for part in getattr(command, "commands", {}):
            assert f"kvskim {name} {part}" in text, f"no page names `kvskim {name} {part}`"


def test_the_checks_see_what_is_wrong() -> None:
    page = ROOT / "docs" / "vllm.md"
    links = "[a](nowhere.md) [b](scaling.md#calibration) [c](#no-such-heading) [d](https://example.org)"
    assert broken_links(links, page) == ["nowhere.md", "#no-such-heading"]
    assert unknown_options("`kvskim demo --contxt 5`, `kvskim bench engines`, `kvskim serve M --any`, kvskim runs, `kvskim eval ruler M \\\n --sample 3`") == [
        "kvskim demo --contxt 5", "kvskim bench engines", "kvskim eval ruler M   --sample 3",
    ]
    assert missing_paths("`tests/nowhere.py` and `docs/vllm.md`, `python benchmarks/none.py --fast`") == ["tests/nowhere.py", "benchmarks/none.py"]
