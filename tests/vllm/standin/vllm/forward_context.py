from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

_forward_context: Any = None


def get_forward_context() -> Any:
    assert _forward_context is not None
    return _forward_context


def is_forward_context_available() -> bool:
    return _forward_context is not None


@contextmanager
def set_forward_context(attn_metadata: Any, vllm_config: Any, *, cudagraph_runtime_mode: Any = None) -> Iterator[None]:
    global _forward_context
    before, _forward_context = _forward_context, SimpleNamespace(attn_metadata=attn_metadata, cudagraph_runtime_mode=cudagraph_runtime_mode)
    try:
        yield
    finally:
        _forward_context = before
