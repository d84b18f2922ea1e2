"""Facts about a vLLM engine in the plain form that `support` judges."""

from __future__ import annotations

from typing import Any

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

import vllm
from kvskim.config import SkimConfig
from kvskim.engines.vllm.support import EngineFacts


def engine_facts(vllm_config: VllmConfig, config: SkimConfig) -> EngineFacts:
    """The facts that hold for all layers of an engine."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    passes = getattr(vllm_config.compilation_config, "pass_config", None)
    return EngineFacts(
        vllm_version=str(vllm.__version__),
        capability=gpu_capability(),
        dtype=str(model.dtype).removeprefix("torch."),
        cache_dtype=str(cache.cache_dtype),
        block_size=cache.block_size if cache.user_specified_block_size else None,
        context_parallel=parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
        state_space_layers=bool(getattr(model, "is_hybrid", False)),
        reference_window=getattr(model, "rswa_window", None) is not None,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        connector=kv_connector(vllm_config),
        sleep_mode=bool(getattr(model, "enable_sleep_mode", False)),
        fused_mla_update=bool(getattr(passes, "fuse_rope_kvcache_cat_mla", False)),
        overlapped_batches=bool(getattr(parallel, "enable_dbo", False)),
        variant=config.variant,
        speculative=vllm_config.speculative_config is not None,
        pinned_memory=config.variant == "fast" or bool(current_platform.is_pin_memory_available()),
        dense_layers=config.dense_layers not in (0, ()),
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
    if vllm_config.speculative_config is None:
        return False
    if getattr(vllm_config.model_config, "runner_type", "") == "draft":
        return True
    # vLLM's newer runner builds a draft model under the configuration of the model that it drafts for, once that one has its weights.
    states = (getattr(getattr(layer, "impl", None), "skim_state", None) for layer in vllm_config.compilation_config.static_forward_context.values())
    return any(state.layers or state.dense for state in states if state is not None)


def decodes_alone(layer: str) -> bool:
    """Whether the step under way has decode rows of one token and no others for this layer; False where vLLM has no metadata for it.

    Also False where pieces of the model are graphs of their own: a graph of a piece holds the write of the cache and not attention, and is replayed
    for steps with other rows too.
    """
    if not is_forward_context_available():
        return False
    context = get_forward_context()
    if getattr(getattr(context, "cudagraph_runtime_mode", None), "name", "") == "PIECEWISE":
        return False
    metadata = context.attn_metadata
    found = metadata.get(layer) if isinstance(metadata, dict) else None
    return bool(getattr(found, "decodes_alone", False))


def kv_connector(vllm_config: VllmConfig) -> str | None:
    """What moves the cache in and out of this engine: the name of the connector, with its kind of store where it has several.

    None: nothing, or one of kvskim's own.
    """
    transfer: Any = vllm_config.kv_transfer_config
    name = getattr(transfer, "kv_connector", None)
    if name is None or str(getattr(transfer, "kv_connector_module_path", None) or "").startswith("kvskim."):
        return None
    store = (getattr(transfer, "kv_connector_extra_config", None) or {}).get("spec_name")
    return name if store in (None, "CPUOffloadingSpec") else f"{name} with {store}"


def layer_index(name: str) -> int:
    """Index of a layer in its model, from its name."""
    return int(extract_layer_index(name))
