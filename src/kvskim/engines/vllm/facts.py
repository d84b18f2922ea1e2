"""Facts about a vLLM engine in the plain form that `support` judges."""

from __future__ import annotations

from typing import Any

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

import vllm
from kvskim.config import SkimConfig
from kvskim.engines.vllm.support import EngineFacts


def engine_facts(vllm_config: VllmConfig, config: SkimConfig) -> EngineFacts:
    """The facts that hold for all layers of an engine."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    return EngineFacts(
        vllm_version=str(vllm.__version__),
        capability=gpu_capability(),
        dtype=str(model.dtype).removeprefix("torch."),
        cache_dtype=str(cache.cache_dtype),
        block_size=cache.block_size if cache.user_specified_block_size else None,
        context_parallel=parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
        state_space_layers=bool(getattr(model, "is_hybrid", False)),
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        overlapped_batches=bool(getattr(parallel, "enable_dbo", False)),
        variant=config.variant,
        page_frame=bool(config.selector_options.get("page_frame", False)),
        selector=config.selector,
    )


def gpu_capability() -> tuple[int, int] | None:
    """(major, minor) compute capability, None without a CUDA GPU."""
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    return None if capability is None else (capability.major, capability.minor)


def is_draft_model(vllm_config: VllmConfig) -> bool:
    """Whether the model being built is the draft model of speculative decoding, which stays dense."""
    speculative: Any = vllm_config.speculative_config
    if speculative is None:
        return False
    model = vllm_config.model_config
    return getattr(model, "runner_type", "") == "draft" or model is getattr(speculative, "draft_model_config", None)


def layer_index(name: str) -> int:
    """Index of a layer in its model, from its name."""
    return int(extract_layer_index(name))
