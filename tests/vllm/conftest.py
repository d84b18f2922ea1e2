"""Tests of the vLLM engine on a CPU. Where vLLM is not installed, a small stand-in takes its place (tests/vllm/standin)."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def _vllm_is_installed() -> bool:
    spec = importlib.util.find_spec("vllm")
    # A folder named vllm somewhere on the path is no package: it has no origin.
    return spec is not None and spec.origin is not None


if _vllm_is_installed():
    # These run the backend on a CPU, which vLLM's own FlashAttention can't.
    alone = (
        "encode_placement", "engine", "calibrate", "plugin", "backend", "records", "probe", "mla", "mla_write", "features", "faults", "refusals",
        "parallel", "answering", "shared_pages", "tier", "tier_missing", "tier_room", "tier_sizing",
    )
    collect_ignore = [f"test_vllm_{name}.py" for name in alone]
else:
    sys.path.insert(0, str(HERE / "standin"))
sys.path.insert(0, str(HERE))


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """A cache directory of this test, one thread, no gradients."""
    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path))
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.fixture
def small_calibration(monkeypatch, tmp_path):
    """Calibration on first prompts after 256 tokens, kept in a folder of this test."""
    from kvskim.engines.vllm import calibrate

    torch.set_num_threads(1)
    monkeypatch.setattr(calibrate, "CAPTURE_TOKENS", 256)
    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path))
    with torch.inference_mode():
        yield
