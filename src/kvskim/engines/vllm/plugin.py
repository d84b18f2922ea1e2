"""The entry point that vLLM calls in each of its processes: it tells vLLM where the backends are, and does nothing else.

It is idempotent, takes milliseconds, touches no GPU and does not import the backends. Installed and not configured, kvskim leaves vLLM
as it is: only the name CUSTOM, which vLLM keeps for others, gets a meaning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvskim.config import SkimConfig, configured_by, is_disabled, load_config, publish, share_with_ray
from kvskim.engines.vllm.support import version_refusal
from kvskim.errors import UnsupportedError
from kvskim.metrics import metrics

CUSTOM_BACKEND = "kvskim.engines.vllm.backend.SkimBackend"
FLASH_ATTENTION_BACKEND = "kvskim.engines.vllm.backend.SkimFlashAttentionBackend"
MLA_BACKEND = "kvskim.engines.vllm.mla.SkimMlaBackend"

logger = logging.getLogger("vllm.kvskim")


def register_plugin() -> None:
    """Register the backends with vLLM (entry point ``vllm.general_plugins``).

    With `KVSKIM_CONFIG` (or a predecessor's variable) set, vLLM's FlashAttention backends become kvskim's, so that a model is sparse
    wherever vLLM would have taken FlashAttention. Without it only ``CUSTOM`` is kvskim's. With `KVSKIM_DISABLE`, nothing is.

    Raises:
        ConfigError: the configuration in the environment is wrong; vLLM stops, instead of running without kvskim unnoticed.
        UnsupportedError: kvskim is configured, and this vLLM version is not supported.
    """
    if is_disabled():
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, CUSTOM_BACKEND)
    if configured_by() is None:
        return
    config = load_config().config
    refusal = version_refusal(_vllm_version())
    if refusal is not None:
        if config.on_unsupported == "refuse":
            raise UnsupportedError(refusal)
        logger.warning("kvskim is OFF, attention is vLLM's own: %s", refusal)
        metrics().unsupported(refusal)
        return
    share_with_ray()
    register_backend(AttentionBackendEnum.FLASH_ATTN, FLASH_ATTENTION_BACKEND)
    register_backend(AttentionBackendEnum.FLASH_ATTN_MLA, MLA_BACKEND)


def register(settings: Mapping[str, Any] | SkimConfig | None = None) -> SkimConfig:
    """Switch kvskim on from Python, before `vllm.LLM(...)` is made: ``kvskim.register({"tau": 0.01})``.

    The configuration goes into the variable `KVSKIM_CONFIG`, because vLLM's workers are other processes.

    Args:
        settings: settings of `SkimConfig`; what is not given comes from the environment, then from the defaults.

    Returns:
        the effective configuration.

    Raises:
        ConfigError: a setting is wrong.
    """
    config = settings if isinstance(settings, SkimConfig) else load_config(settings).config
    publish("KVSKIM_CONFIG", config.model_dump_json())
    register_plugin()
    return config


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
