"""The wheel carries the CUDA sources and, where one was made, the prebuilt library; an installed wheel uses that library without a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvskim.ops.cuda import build

ROOT = Path(__file__).parent.parent
PREBUILT = "kvskim/ops/cuda/prebuilt/libkvskim_sm90a"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as `make wheel` makes it, in a copy of the tree, with a library that a compiler of a few lines has written."""
    folder = tmp_path_factory.mktemp("wheel")
    tree, nvcc = folder / "tree", folder / "nvcc"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so", "prebuilt"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    nvcc.write_text(
        '#!/bin/sh\ncase "$*" in --version) echo "Build fake"; exit 0 ;; esac\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done\n'
    )
    nvcc.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "KVSKIM_NVCC": str(nvcc)}
    for command in (
        [sys.executable, "-m", "kvskim.ops.cuda.build", "--prebuilt"],
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
    ):
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return next((folder / "dist").glob("*.whl"))


def test_the_wheel_carries_sources_and_the_prebuilt_library(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        note = json.loads(archive.read(f"{PREBUILT}.json"))
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        declared = archive.read(entry_points).decode()
    assert {f"{PREBUILT}.so", f"{PREBUILT}.json", "kvskim/ops/cuda/resources.json"} <= names
    assert {f"kvskim/ops/cuda/{path.name}" for pattern in ("*.cu", "*.cuh") for path in build.FOLDER.glob(pattern)} <= names
    assert note["sources"] == build.source_hash()
    assert "vllm.general_plugins" in declared


def test_an_installed_wheel_needs_no_compiler(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    script = "from kvskim.ops.cuda import build; build.find_nvcc = lambda: None; print(build.build_library())"
    environment = {**os.environ, "PYTHONPATH": str(site), "KVSKIM_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == site / f"{PREBUILT}.so"


def test_the_source_archive_has_the_recipe_without_its_adapter(tmp_path: Path) -> None:
    tree, recipe = tmp_path / "tree", Path("benchmarks") / "long-smollm"
    (tree / "src" / "kvskim").mkdir(parents=True)
    shutil.copy(ROOT / "src" / "kvskim" / "__init__.py", tree / "src" / "kvskim")
    shutil.copytree(ROOT / recipe, tree / recipe)
    (tree / recipe / "adapter.safetensors").write_bytes(b"weights")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(recipe / "train.py"), str(recipe / "merge.py"), "NOTICE"} <= names
    assert not [name for name in names if name.endswith(".safetensors")]
