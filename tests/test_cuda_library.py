"""Calling the CUDA library from Python: error codes become exceptions, operators have fake implementations."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvskim.ops.cuda import library
from kvskim.ops.cuda.build import BuildError


class FakeFunction:
    """Stands for a C function: remembers its arguments, returns a code."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, []
        self.argtypes: list[object] = []
        self.restype: object = None

    def __call__(self, *arguments: object) -> int:
        self.calls.append(arguments)
        return self.code


@pytest.fixture
def fake_library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(
        kvskim_good=FakeFunction(0), kvskim_bad=FakeFunction(700), kvskim_size=FakeFunction(48),
        kvskim_error_string=lambda code: b"an illegal memory access",
    )
    monkeypatch.setattr(library, "load", lambda: made)
    return made


def test_arguments_reach_the_function_with_their_types(fake_library: SimpleNamespace) -> None:
    call = library.function("kvskim_good", (library.POINTER, library.INT))
    call(None, 3)
    call(5, 4)
    assert fake_library.kvskim_good.calls == [(None, 3), (5, 4)]
    assert fake_library.kvskim_good.argtypes == [ctypes.c_void_p, ctypes.c_int]
    assert fake_library.kvskim_good.restype is ctypes.c_int


def test_error_code_is_raised_with_its_text(fake_library: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match=r"kvskim_bad: an illegal memory access \(CUDA error 700\)"):
        library.function("kvskim_bad", ())()


def test_number_is_returned(fake_library: SimpleNamespace) -> None:
    assert library.value_function("kvskim_size", (library.INT,))(1) == 48


def test_nothing_is_loaded_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> ctypes.CDLL:
        raise BuildError("must not be loaded")

    monkeypatch.setattr(library, "load", fail)
    call = library.function("kvskim_late", ())
    with pytest.raises(BuildError):
        call()


def test_pointer_of_a_view_is_its_first_element() -> None:
    x = torch.zeros(4, 4, dtype=torch.float32)
    assert library.pointer(x[1:, 2:]) == x.data_ptr() + 4 * 6
    assert library.pointer(None) is None


def test_availability_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert library.availability() == (False, "no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    usable, reason = library.availability()
    assert not usable
    assert "8.6" in reason
    assert "9.0" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def no_compiler(**_: object) -> None:
        raise BuildError("nvcc was not found")

    monkeypatch.setattr(library, "build_library", no_compiler)
    assert library.availability() == (False, "nvcc was not found")


def test_operator_does_nothing_on_fake_tensors() -> None:
    def implementation(x: Tensor, out: Tensor, scale: float) -> None:
        raise AssertionError("ran on a fake tensor")

    operator = library.operator("test_scale_into", mutates=("out",))(implementation)
    assert operator(torch.empty(3, device="meta"), torch.empty(3, device="meta"), 2.0) is None
    assert operator._opoverload._schema.arguments[1].alias_info.is_write
    with pytest.raises(NotImplementedError, match="CPU"):
        operator(torch.empty(3), torch.empty(3), 2.0)


def test_sketch_operators_are_registered() -> None:
    import kvskim.ops.cuda.score_sketch  # noqa: F401

    for name, written in (("cuda_prepare_sketch", {"weights", "base", "forced"}), ("cuda_score_sketch", {"scores", "partials"})):
        schema = getattr(torch.ops.kvskim, name).default._schema
        assert {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write} == written


def test_library_that_cannot_be_loaded_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def build(fresh: bool = False) -> Path:
        asked.append(fresh)
        path = tmp_path / "libkvskim.so"
        path.write_bytes(b"not a library")
        return path

    monkeypatch.setattr(library, "build_library", build)
    library.load.cache_clear()
    with pytest.raises(BuildError, match="can't be loaded"):
        library.load()
    assert asked == [False, True]
