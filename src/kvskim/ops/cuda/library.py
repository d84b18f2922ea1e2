"""Load the CUDA library with ctypes, call its functions, register torch operators on top of them.

The library is plain C: pointers, sizes, a stream, and an error code back. A kernel file in Python declares what it calls once,

    score = function("kvskim_score_sketch", (POINTER, POINTER, INT, FLOAT, STREAM))

and calls ``score(pointer(records), ...)``. `operator` makes a torch operator of a function that only writes into its arguments.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvskim.ops.cuda.build import BuildError, Progress, build_library

POINTER = ctypes.c_void_p
STREAM = ctypes.c_void_p
INT = ctypes.c_int
LONG = ctypes.c_int64
FLOAT = ctypes.c_float

CAPABILITY = (9, 0)
"""Device capability the library is compiled for (``sm_90a`` code runs on no other)."""


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The library, found or compiled, loaded once per process.

    Raises:
        BuildError: it can't be found, compiled or loaded.
    """
    try:
        library = ctypes.CDLL(str(build_library()))
    except OSError:
        # Whole, but made on another system (a newer C library, say): one made here will load.
        path = build_library(fresh=True)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"the CUDA library {path} can't be loaded: {error}") from error
    library.kvskim_error_string.argtypes = [ctypes.c_int]
    library.kvskim_error_string.restype = ctypes.c_char_p
    return library


def availability(device: torch.device | str | int | None = None, progress: Progress | None = None) -> tuple[bool, str]:
    """Whether the CUDA kernels serve a device, and the reason in words. Compiles them when that is still to be done."""
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        return False, f"device capability {capability[0]}.{capability[1]}; the CUDA kernels are written for {CAPABILITY[0]}.{CAPABILITY[1]}"
    try:
        build_library(progress=progress)
        load()
    except BuildError as error:
        return False, str(error)
    return True, f"device capability {capability[0]}.{capability[1]}"


def function(name: str, argtypes: Sequence[Any]) -> Callable[..., None]:
    """A launch function of the library that returns a CUDA error code; the library is loaded at the first call.

    Raises (at a call):
        RuntimeError: the code is not 0; with CUDA's text for it.
    """

    @functools.lru_cache(maxsize=1)
    def bound() -> Any:
        call = getattr(load(), name)
        call.argtypes = list(argtypes)
        call.restype = ctypes.c_int
        return call

    def checked(*arguments: Any) -> None:
        code = bound()(*arguments)
        if code:
            raise RuntimeError(f"{name}: {load().kvskim_error_string(code).decode()} (CUDA error {code})")

    checked.__name__ = name
    return checked


def value_function(name: str, argtypes: Sequence[Any], restype: Any = ctypes.c_int64) -> Callable[..., int]:
    """A function of the library that returns a number instead of an error code."""

    @functools.lru_cache(maxsize=1)
    def bound() -> Any:
        call = getattr(load(), name)
        call.argtypes = list(argtypes)
        call.restype = restype
        return call

    def value(*arguments: Any) -> int:
        return int(bound()(*arguments))

    value.__name__ = name
    return value


def pointer(tensor: Tensor | None) -> int | None:
    """Device address of a tensor's first element; a null pointer for None."""
    return None if tensor is None else tensor.data_ptr()


def stream(device: torch.device) -> int:
    """Handle of the current stream of a device."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def operator(name: str, mutates: Sequence[str]) -> Callable[[Callable[..., None]], Any]:
    """Decorator: register a function as the torch operator ``kvskim::<name>`` for CUDA tensors.

    The function must be fully annotated, return None, and write only into the arguments named in ``mutates``; so its fake
    implementation, for torch.compile and export, does nothing.
    """

    def decorate(implementation: Callable[..., None]) -> Any:
        registered = torch.library.custom_op(f"kvskim::{name}", implementation, mutates_args=tuple(mutates), device_types="cuda")
        registered.register_fake(lambda *arguments, **keywords: None)
        return registered

    return decorate
