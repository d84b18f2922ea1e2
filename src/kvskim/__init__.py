"""kvskim: decode long contexts by skimming a compact record of every KV page and attending only the pages that matter."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvskim.config import SkimConfig

try:
    __version__ = version("kvskim")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["SkimConfig", "__version__", "enable", "register"]


def register(settings: Mapping[str, Any] | SkimConfig | None = None) -> SkimConfig:
    """Switch kvskim on for vLLM engines made after this call; see `kvskim.engines.vllm.plugin.register`."""
    from kvskim.engines.vllm.plugin import register as register_with_vllm

    return register_with_vllm(settings)


def enable(model: Any, config: SkimConfig | None = None) -> Any:
    """Switch a Hugging Face model to sparse decoding; see `kvskim.engines.transformers.enable`."""
    from kvskim.engines.transformers import enable as enable_transformers

    return enable_transformers(model, config)


def __getattr__(name: str) -> Any:
    if name == "SkimConfig":  # imported when asked for, so that `import kvskim` stays light
        from kvskim.config import SkimConfig

        return SkimConfig
    raise AttributeError(f"module 'kvskim' has no attribute {name!r}")
