"""The real vLLM's planner, allocation and binding behind one interface for all versions, with configurations that need no model and no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker import utils as worker_utils


class Settings(SimpleNamespace):
    """A part of vLLM's configuration: what was not given is None, which for vLLM is "not set"."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


def one_layout() -> bool:
    """From 0.29 on all layers lie in one buffer, in one order of layers, blocks, heads and tokens."""
    return hasattr(worker_utils, "allocate_kv_cache")


def packed() -> bool:
    """From 0.26 on K and V lie in the last dimension of one tensor of four."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    shape = getattr(FlashAttentionBackend, "get_kv_cache_shape", None)
    return shape is None or len(shape(2, 16, 2, 64)) == 4


def planning_config(block_size: int, layout: str = "LBNHC") -> Any:
    """What vLLM's planner reads. ``layout``: of vLLM's names, e.g. LBNHC; read from 0.29 on."""
    cache = Settings(block_size=block_size)
    if one_layout():
        from vllm.v1.kv_cache_layout import KVCacheLayout

        cache.get_resolved_kv_cache_layout = lambda: KVCacheLayout[layout]
    return Settings(
        cache_config=cache,
        scheduler_config=Settings(disable_hybrid_kv_cache_manager=False),
        compilation_config=Settings(static_forward_context={}),
        model_config=Settings(max_model_len=4096),
        parallel_config=Settings(decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=1),
        attention_config=Settings(),
        kv_transfer_config=None,
        num_prefill_lookahead_tokens=0,
    )


def layer_config(additional: dict[str, Any], max_rows: int, block_size: int, max_model_len: int) -> Any:
    """What vLLM's layers and metadata builders read, for a model of 4 query heads, 2 kv heads and head size 64."""
    return Settings(
        model_config=Settings(
            model="nowhere", dtype=torch.bfloat16, max_model_len=max_model_len, is_hybrid=False, runner_type="generate", is_mm_prefix_lm=False, use_mla=False,
            get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 64, get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 2,
            hf_config=Settings(model_type="none"), hf_text_config=Settings(to_dict=lambda: {"model_type": "none"}),
        ),
        cache_config=Settings(block_size=block_size, cache_dtype="auto", user_specified_block_size=False, kv_cache_dtype_skip_layers=[]),
        parallel_config=Settings(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=1, cp_kv_cache_interleave_size=1,
            data_parallel_size=1,
        ),
        scheduler_config=Settings(max_num_seqs=max_rows, max_num_batched_tokens=2048, disable_hybrid_kv_cache_manager=True),
        compilation_config=Settings(
            static_forward_context={}, max_cudagraph_capture_size=8, cudagraph_mode=Settings(has_full_cudagraphs=lambda: True)
        ),
        attention_config=Settings(flash_attn_max_num_splits_for_cuda_graph=32),
        kernel_config=Settings(),
        additional_config=additional,
    )


def planner() -> Any:
    """The module that groups specs and counts blocks."""
    from importlib import import_module

    from vllm.v1.core import kv_cache_utils

    return kv_cache_utils if hasattr(kv_cache_utils, "get_kv_cache_groups") else import_module("vllm.v1.core.kv_cache_planning")


def plans_of_workers(config: Any, specs: list[dict[str, Any]], memory: list[int]) -> list[Any]:
    """The plan of each worker of an engine, from what every one of them says of its layers and its memory."""
    module = planner()
    if hasattr(module, "get_global_kv_cache_groups"):
        return list(module.get_kv_cache_configs(config, specs, memory, module.get_global_kv_cache_groups(config, specs)))
    return list(module.get_kv_cache_configs(config, specs, memory))


def bytes_of_layers(plan: Any) -> dict[str, int]:
    """Bytes that a plan gives to each layer; nothing may overlap."""
    if not one_layout():
        return {tensor.shared_by[0]: tensor.size for tensor in plan.kv_cache_tensors}
    places = sorted((t.offset + i * t.layer_stride, t.layer_stride, name) for t in plan.kv_cache_tensors for i, name in enumerate(t.layers))
    ends = [start for start, _, _ in places[1:]] + [plan.kv_cache_tensors[0].size]
    assert all(start + size == end for (start, size, _), end in zip(places, ends)), places
    return {name: size for _, size, name in places}


def allocate(config: Any, plan: Any, specs: Mapping[str, Any], backends: Mapping[str, type], block_size: int) -> dict[str, torch.Tensor]:
    """Caches by layer, as vLLM allocates and shapes them."""
    if one_layout():
        return worker_utils.allocate_kv_cache(plan, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(), [block_size])
    from vllm.v1.worker.gpu import attn_utils

    raw = attn_utils._allocate_kv_cache(plan, {}, torch.device("cpu"))
    groups = [worker_utils.AttentionGroup(backend, [name], specs[name], 0) for name, backend in backends.items()]
    return attn_utils._reshape_kv_cache(groups, raw, "auto", [block_size], {}, plan)


class BoundLayer:
    """An attention layer to which vLLM binds its cache."""

    kv_cache: torch.Tensor

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache


def empty_keys_and_values(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, fill: float) -> torch.Tensor:
    """A layer's cache in the shape and order of this version."""
    if packed():
        return torch.full((num_blocks, block_size, num_kv_heads, 2 * head_size), fill).transpose(1, 2)
    return torch.full((num_blocks, 2, block_size, num_kv_heads, head_size), fill)
