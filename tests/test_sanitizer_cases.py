"""The cases that tests/gpu/sanitize.sh names exist: a name that chooses nothing would let the sanitizer pass on nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "gpu" / "sanitize.sh"
PRETENDED_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
from kvskim.ops.cuda import library
library.availability = lambda *arguments, **keywords: (True, "")
"""


def cases() -> list[str]:
    return re.findall(r"'(test_\w+\.py::[^']+)'", SCRIPT.read_text(encoding="utf-8"))


def test_every_operation_has_cases() -> None:
    files = {case.split("::")[0] for case in cases()}
    assert {"test_attend.py", "test_select.py", "test_score_sketch.py", "test_encode.py", "test_step.py"} <= files
    assert any("triton" in case for case in cases())


def test_an_operation_that_it_does_not_have_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, tmp_path / "logs", "select", "scan"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "there is no operation scan; use attend latent select score encode step\n")
    assert not (tmp_path / "logs").exists()


def test_every_case_exists(tmp_path: Path) -> None:
    (tmp_path / "pretended_gpu.py").write_text(PRETENDED_GPU)
    names = [f"tests/gpu/{case}" for case in cases()]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "pretended_gpu", *names], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert sorted(line for line in done.stdout.splitlines() if "::" in line) == sorted(names)
