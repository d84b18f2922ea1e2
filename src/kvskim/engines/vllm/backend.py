"""The backend classes that vLLM selects. They are vLLM's FlashAttention with another implementation and metadata builder."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from kvskim.config import SkimConfig, load_config
from kvskim.engines.vllm.facts import engine_facts, is_draft_model
from kvskim.engines.vllm.implementation import SkimImpl
from kvskim.engines.vllm.metadata import SkimMetadataBuilder
from kvskim.engines.vllm.support import LayerFacts, engine_refusal, layer_refusal
from kvskim.errors import UnsupportedError

logger = logging.getLogger("vllm.kvskim")
_warned: set[str] = set()

MLA_ELSEWHERE = (
    "this backend of kvskim is not for latent attention (MLA): leave --attention-backend out and set KVSKIM_CONFIG, "
    "then kvskim takes the place of FLASH_ATTN_MLA"
)


class SkimBackend(FlashAttentionBackend):
    """kvskim as the backend ``CUSTOM``: ``--attention-backend CUSTOM``."""

    # Some versions let a fused operation write K and V past do_kv_cache_update where a backend allows it: records would not be made.
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_name() -> str:
        # vLLM looks this name up among its members: it must be the one the class is registered for.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SkimImpl]:
        return SkimImpl

    @staticmethod
    def get_builder_cls() -> type[SkimMetadataBuilder]:
        return SkimMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Which rows decode is read from the query lengths on the host.
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """vLLM's own check, after ours. A refusal stops the engine: an empty list of backends or another backend would hide it."""
        config = effective_config()
        if kwargs.get("use_mla", False):
            raise UnsupportedError(MLA_ELSEWHERE)
        say_refusal(_refusal(config, **kwargs), config)
        return say_reasons(super().validate_configuration(*args, **kwargs))


class SkimFlashAttentionBackend(SkimBackend):
    """kvskim in the place of ``FLASH_ATTN``, which vLLM then takes wherever it would have taken FlashAttention."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """As for ``CUSTOM``; says so where vLLM prefers another backend on this GPU by itself."""
        reasons = super().validate_configuration(*args, **kwargs)
        capability = kwargs.get("device_capability")
        if capability is not None and capability.major == 10 and get_current_vllm_config().attention_config.backend is None:
            warn_once("vLLM prefers FlashInfer on this GPU, so attention is NOT sparse: add --attention-backend CUSTOM")
        return reasons


def effective_config() -> SkimConfig:
    """The configuration of the engine that vLLM is building."""
    additional = get_current_vllm_config().additional_config
    return load_config(additional.get("kvskim") if isinstance(additional, dict) else None).config


def _refusal(config: SkimConfig, **asked: Any) -> str | None:
    """What speaks against kvskim in the arguments of vLLM's `validate_configuration`, which come as keywords."""
    vllm_config = get_current_vllm_config()
    engine = engine_refusal(engine_facts(vllm_config, config))
    if is_draft_model(vllm_config):
        return engine
    facts = LayerFacts(
        head_size=asked.get("head_size", 128),
        num_heads=1,
        num_kv_heads=1,
        attention_type=str(getattr(asked.get("attn_type"), "value", asked.get("attn_type") or "decoder")),
        sinks=bool(asked.get("has_sink", False)),
        bidirectional=bool(asked.get("use_mm_prefix", False) or asked.get("use_non_causal", False)),
        per_head_scales=bool(asked.get("use_per_head_quant_scales", False)),
    )
    return layer_refusal(facts) or engine


def say_refusal(refusal: str | None, config: SkimConfig) -> None:
    """Stop the engine with what speaks against kvskim, or warn of it where the configuration wants full attention then."""
    if refusal is None:
        return
    if config.on_unsupported == "refuse":
        raise UnsupportedError(refusal)
    warn_once(f"attention is vLLM's own: {refusal}")


def say_reasons(reasons: list[str]) -> list[str]:
    """Warn where vLLM itself has reasons against FlashAttention, and give them back."""
    if reasons:
        warn_once(f"vLLM does not take FlashAttention here ({'; '.join(reasons)}), so attention is NOT sparse")
    return reasons


def warn_once(text: str) -> None:
    """Log a warning the first time that it occurs in this process."""
    if text not in _warned:
        _warned.add(text)
        logger.warning("kvskim: %s", text)
