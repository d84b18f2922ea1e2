"""Which kernels serve a device, said in one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvskim.ops import dispatch
from kvskim.ops.cuda import library
from kvskim.ops.cuda.build import BuildError


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    dispatch._choose.cache_clear()
    yield
    dispatch._choose.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of capability 9.0 whose library is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capable(monkeypatch, (9, 0))
    monkeypatch.setattr(library, "build_library", lambda **_: None)
    monkeypatch.setattr(library, "load", lambda: None)
    return monkeypatch


def capable(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def broken(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def build(**_: object) -> None:
        raise BuildError(message)

    monkeypatch.setattr(library, "build_library", build)


def test_hopper_gets_the_cuda_kernels(gpu: pytest.MonkeyPatch) -> None:
    assert dispatch.choose("auto", "cuda") == dispatch.Choice("cuda", "CUDA kernels (device capability 9.0)")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_get_triton_and_one_line_says_so(gpu: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    capable(gpu, capability)
    chosen = dispatch.choose("auto", "cuda")
    assert chosen.kernels == "triton"
    version = f"{capability[0]}.{capability[1]}"
    assert chosen.reason == f"Triton kernels (device capability {version}; the CUDA kernels are written for 9.0)"
    with pytest.raises(ValueError, match=f"kernels is 'cuda'.*{version}.*use auto or triton") as caught:
        dispatch.choose("cuda", "cuda")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("message", "said"), [
    (
        "no prebuilt library matches these sources and nvcc was not found; install the CUDA toolkit",
        "no prebuilt library matches these sources and nvcc was not found; install the CUDA toolkit",
    ),
    ("compiling attend.cu failed:\nattend.cu(3): error\n1 error detected", "compiling attend.cu failed; `kvskim build` shows why"),
])
def test_without_a_usable_library_triton_serves_and_one_line_says_why(gpu: pytest.MonkeyPatch, message: str, said: str) -> None:
    broken(gpu, message)
    assert dispatch.choose("auto", "cuda") == dispatch.Choice("triton", f"Triton kernels ({said})")


def test_neither_kernels(gpu: pytest.MonkeyPatch) -> None:
    capable(gpu, (8, 0))
    gpu.setattr(dispatch, "triton_available", lambda: False)
    with pytest.raises(ValueError, match="install triton"):
        dispatch.choose("auto", "cuda")


def test_a_cpu_gets_torch_and_nothing_else() -> None:
    assert dispatch.choose("auto", "cpu").kernels == "torch"
    for asked in ("cuda", "triton"):
        with pytest.raises(ValueError, match=f"kernels is '{asked}', which needs a GPU"):
            dispatch.choose(asked, "cpu")


def test_unknown_kernels() -> None:
    with pytest.raises(ValueError, match="'fast'; use auto, cuda, triton or torch"):
        dispatch.choose("fast", "cpu")
