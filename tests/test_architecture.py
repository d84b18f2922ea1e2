"""Rules that hold for the whole tree: who reads the environment, who imports vLLM, an answer to every known kind of fault, and groups of tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "kvskim"
FAULTS = range(1, 30)
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MAY_IMPORT_VLLM = ("engines/vllm", "bench")


def sources() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 50
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def environment_reads(module: ast.AST) -> Iterator[int]:
    """Lines that touch the environment: ``os.environ``, ``from os import getenv``, and the like."""
    for node in ast.walk(module):
        attribute = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
        imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any(alias.name in (*ENVIRONMENT, "*") for alias in node.names)
        if attribute or imported:
            yield node.lineno


def vllm_imports(module: ast.AST) -> Iterator[int]:
    """Lines that import vLLM, wherever in the module, or by `importlib`."""
    for node in ast.walk(module):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = [str(node.args[0].value)] if called in ("import_module", "__import__") else []
        if any(name.split(".")[0] == "vllm" for name in names):
            yield node.lineno


def test_only_the_configuration_reads_the_environment() -> None:
    reads = {str(path.relative_to(PACKAGE)): list(environment_reads(tree(path))) for path in sources()}
    assert reads.pop("config.py")
    assert {name: lines for name, lines in reads.items() if lines} == {}


def test_vllm_is_imported_by_its_engine_and_the_benchmarks_only() -> None:
    imports = {path.relative_to(PACKAGE).as_posix(): list(vllm_imports(tree(path))) for path in sources()}
    assert any(lines for name, lines in imports.items() if name.startswith("engines/vllm/"))
    allowed = tuple(f"{folder}/" for folder in MAY_IMPORT_VLLM)
    assert {name: lines for name, lines in imports.items() if lines and not name.startswith(allowed)} == {}


@pytest.mark.parametrize("text", [
    "import os\nos.environ['A']", "from os import environ", "import os as o\no.getenv('A')", "from os import *",
    "def f():\n    import os\n    os.environ.get('A')",
])
def test_every_way_to_read_the_environment_is_seen(text: str) -> None:
    assert list(environment_reads(ast.parse(text)))


@pytest.mark.parametrize("text", [
    "import vllm", "import vllm.envs as e", "from vllm import LLM", "def f():\n    from vllm.config import VllmConfig",
    "import importlib\nimportlib.import_module('vllm.config')", "__import__('vllm')",
])
def test_every_way_to_import_vllm_is_seen(text: str) -> None:
    assert list(vllm_imports(ast.parse(text)))


def test_words_that_only_look_like_it_are_not_seen() -> None:
    module = ast.parse("import kvskim.engines.vllm.support\nfrom . import vllm\nimport vllm_other\nos = 1\n")
    assert not list(vllm_imports(module))
    assert not list(environment_reads(module))


def fault_rows() -> dict[int, tuple[list[str], str]]:
    """Tests and remark of every row of the table in docs/faults.md."""
    rows: dict[int, tuple[list[str], str]] = {}
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].isdigit():
            assert len(cells) == 4, line
            assert int(cells[0]) not in rows, f"fault {cells[0]} has two rows"
            assert cells[1], f"fault {cells[0]} is not described"
            rows[int(cells[0])] = re.findall(r"`(tests[/:][^`]+)`", cells[2]), cells[3]
    return rows


@cache
def names_of_tests() -> frozenset[str]:
    """Every test of the tree as ``folder::name``: a test may move to another file of its folder."""
    return frozenset(
        f"{path.parent.relative_to(ROOT).as_posix()}::{node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def fault_of(name: str) -> int | None:
    """The number in a test's name: 1 of ``test_fault_01_...``."""
    match = re.search(r"(?:^|_)fault_0*(\d+)(?:_|$)", name)
    return int(match[1]) if match else None


def test_every_kind_of_fault_has_a_row_with_a_test_or_a_reason() -> None:
    rows = fault_rows()
    assert list(rows) == list(FAULTS)
    assert [number for number, (tests, remark) in rows.items() if not tests and not remark] == []


def test_the_tests_that_the_table_names_exist() -> None:
    named = {entry for tests, _ in fault_rows().values() for entry in tests}
    assert len(named) > 60
    assert sorted(named - names_of_tests()) == []


def test_every_test_that_is_named_after_a_fault_is_in_its_row() -> None:
    rows = fault_rows()
    numbered = {name: fault_of(name) for name in names_of_tests()}
    assert sum(number is not None for number in numbered.values()) > 20
    assert sorted(name for name, number in numbered.items() if number is not None and name not in rows.get(number, ([], ""))[0]) == []


@pytest.mark.xdist_group("one")
def test_groups_of_tests_are_kept_on_one_worker(request: pytest.FixtureRequest) -> None:
    """xdist marks a grouped test in its name; a pytest that it does not know leaves the mark out, and every worker then makes what a group shares."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@one")
