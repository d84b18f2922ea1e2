"""Multi-head latent attention (MLA): vLLM's FlashAttention backend for it, with another implementation and metadata builder."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend

from kvskim.config import SkimConfig
from kvskim.engines.vllm.backend import effective_config, say_reasons, say_refusal
from kvskim.engines.vllm.facts import engine_facts, is_draft_model
from kvskim.engines.vllm.mla_implementation import SkimMlaImpl
from kvskim.engines.vllm.mla_metadata import SkimMlaMetadataBuilder
from kvskim.engines.vllm.support import LayerFacts, engine_refusal, layer_refusal, mla_refusal


class SkimMlaBackend(FlashAttnMLABackend):
    """kvskim in the place of ``FLASH_ATTN_MLA``, which vLLM then takes wherever it would have taken FlashAttention for a model with MLA."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA"

    @staticmethod
    def get_impl_cls() -> type[SkimMlaImpl]:
        return SkimMlaImpl

    @staticmethod
    def get_builder_cls() -> type[SkimMlaMetadataBuilder]:
        return SkimMlaMetadataBuilder

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """vLLM's own check, after ours. A refusal stops the engine: an empty list of backends or another backend would hide it."""
        if not kwargs.get("use_mla", False):
            return super().validate_configuration(*args, **kwargs)
        config = effective_config()
        say_refusal(_refusal(config, **kwargs), config)
        return say_reasons(super().validate_configuration(*args, **kwargs))


def _refusal(config: SkimConfig, **asked: Any) -> str | None:
    """What speaks against kvskim in the arguments of vLLM's `validate_configuration`, which come as keywords."""
    vllm_config = get_current_vllm_config()
    facts = engine_facts(vllm_config, config)
    engine = engine_refusal(facts)
    if is_draft_model(vllm_config):
        return engine
    layer = LayerFacts(
        head_size=asked.get("head_size", 576), num_heads=1, num_kv_heads=1, mla=True, trained_indexer=bool(asked.get("use_sparse", False))
    )
    return layer_refusal(layer) or engine or mla_refusal(facts)
