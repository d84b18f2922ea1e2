"""What the Triton kernels become on Hopper, compiled without a GPU: no access to a packed record wider than its alignment, and nothing too large."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvskim.selectors import get_selector

SHARED_BYTES = 227 << 10
"""Shared memory that a thread block may have on Hopper."""

SCORED = ("mean:576", "rki4:576", "clse:96", "quad:576")
"""Selectors and head dims whose records begin at odd multiples of a few bytes. One kv head: then Triton has the most to infer about addresses."""

ATTENDED = ("16", "64:shared:overlap", "64:apart")


def compiled(*cases: str) -> list[dict[str, int | str]]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run([sys.executable, str(script), *cases], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_records_are_never_read_wider_than_they_are_aligned() -> None:
    kernels = [k for k in compiled(*(f"score:{case}:16" for case in SCORED)) if k["kernel"] == "_score_kernel"]
    assert len(kernels) == len(SCORED)
    for kernel in kernels:
        _, name, dim, _ = str(kernel["case"]).split(":")
        alignment = math.gcd(get_selector(name).record_bytes(int(dim)), 16)
        assert 1 <= int(kernel["record_access"]) <= alignment, (kernel, alignment)


def test_latent_attention_fits_a_multiprocessor() -> None:
    kernels = [k for k in compiled(*(f"attend:{case}" for case in ATTENDED)) if k["kernel"] != "_merge_kernel"]
    assert [k["kernel"] for k in kernels] == ["latent_split_kernel"] * 2 + ["_split_kernel"]
    for kernel in kernels:
        assert int(kernel["shared"]) <= SHARED_BYTES, kernel
        assert int(kernel["spilled"]) <= 256, kernel
