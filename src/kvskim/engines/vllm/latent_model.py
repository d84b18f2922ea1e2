"""Whether a model has latent attention (MLA), from its configuration file alone: vLLM then takes kvskim under another name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_latent(settings: Mapping[str, Any]) -> bool:
    """Whether the cache of this model holds one latent row per token for all heads.

    Args:
        settings: the contents of ``config.json``.
    """
    text = settings.get("text_config") or settings
    return text.get("kv_lora_rank") is not None


def backend_name(*, latent: bool) -> str:
    """The attention backend to ask vLLM for: ``CUSTOM``, or for latent attention ``FLASH_ATTN_MLA``, whose place kvskim takes where `KVSKIM_CONFIG` is set."""
    return "FLASH_ATTN_MLA" if latent else "CUSTOM"
