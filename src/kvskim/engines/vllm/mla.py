"""Multi-head latent attention (MLA): refused in one sentence, until it can be made sparse."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend

from kvskim.engines.vllm.backend import effective_config, warn_once
from kvskim.engines.vllm.support import LayerFacts, layer_refusal
from kvskim.errors import UnsupportedError


class RefusedMlaBackend(FlashAttnMLABackend):
    """In the place of ``FLASH_ATTN_MLA``: says that MLA models are not sparse, instead of running them dense under kvskim's name."""

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        refusal = layer_refusal(LayerFacts(mla=True))
        assert refusal is not None
        if kwargs.get("use_mla", False):
            if effective_config().on_unsupported == "refuse":
                raise UnsupportedError(refusal)
            warn_once(f"attention is vLLM's own: {refusal}")
        return super().validate_configuration(*args, **kwargs)
