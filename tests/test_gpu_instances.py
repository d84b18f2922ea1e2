"""What tells which kernel instances the GPU tests launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.instances import instance_name, main, never_launched
from kvskim.ops.cuda.build import RESOURCES

ROOT = Path(__file__).parent.parent
KNOWN = list(json.loads(RESOURCES.read_text(encoding="utf-8"))["kernels"])


@pytest.mark.parametrize("name", [
    "void kvskim::(anonymous namespace)::score_sketch_kernel<8, 4, true>(kvskim::(anonymous namespace)::ScoreArguments)",
    "void kvskim::(anonymous namespace)::prepare_sketch_kernel<false, 1, false>(kvskim::PrepareArguments)",
    "void kvskim::attend_kernel<128, 1, 0, true, false>(kvskim::AttendParameters)",
    "void kvskim::selection::select_kernel<8, true, false, 1>(kvskim::selection::Parameters)",
    "void kvskim::(anonymous namespace)::write_cache_kernel<false>(kvskim::(anonymous namespace)::WriteArguments)",
    "void kvskim::(anonymous namespace)::encode_sketch_few_kernel<(kvskim::ElementType)0, 128>(kvskim::(anonymous namespace)::EncodeSketch)",
])
def test_names_of_a_profile_are_those_of_the_table(name: str) -> None:
    assert instance_name(name) in KNOWN


def test_what_no_file_names_was_never_launched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="holds no names of kernels"):
        never_launched(tmp_path, KNOWN)
    for number, part in enumerate((KNOWN[:100], KNOWN[101:])):
        (tmp_path / f"gw{number}.json").write_text(json.dumps([f"void {name}(kvskim::Arguments)" for name in part]))
    assert main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [KNOWN[100], f"1 of {len(KNOWN)} instances were launched by no test"]
    (tmp_path / "main.json").write_text(json.dumps([KNOWN[100]]))
    assert main(tmp_path) == 0


def test_each_process_of_a_run_leaves_what_it_saw(tmp_path: Path) -> None:
    """The plugin in a run of its own, with a profiler that has seen one kernel for each test."""
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_one(n): pass\n")
    (tmp_path / "pretended_profiler.py").write_text("""
import os
from types import SimpleNamespace
import torch
class Profile:
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def key_averages(self): return [SimpleNamespace(key="void kvskim::a_kernel<1>(int)"), SimpleNamespace(key="void other(int)")]
torch.profiler.profile = lambda activities: Profile()
torch.cuda.synchronize = lambda: None
""")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests"), str(ROOT / "src")])}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-p", "pretended_profiler", "-p", "gpu.instances", "--instances",
         str(tmp_path / "seen"), "test_it.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    files = sorted((tmp_path / "seen").glob("*.json"))
    assert [file.name for file in files] == ["gw0.json", "gw1.json"]
    assert never_launched(tmp_path / "seen", ["kvskim::a_kernel<1>", "kvskim::a_kernel<2>"]) == ["kvskim::a_kernel<2>"]
