"""What `kvskim bench e2e` asks of a vLLM worker, through ``LLM.collective_rpc``: what the engine is made of, what the last decode step attended, and
where the time of a step goes.

Answers are JSON texts, which every vLLM can send between its processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from kvskim.bench.step_profiler import StepProfiler
from kvskim.engines.vllm.report import last_step, start_block
from kvskim.engines.vllm.state import SkimState


class BenchWorkerExtension:
    """Methods that vLLM adds to its worker (argument ``worker_extension_cls``)."""

    vllm_config: Any
    get_model: Any
    kvskim_bench_profiler: StepProfiler

    def kvskim_bench_facts(self) -> str:
        """Weights, attention layers, kernels; see `engine_facts`."""
        return json.dumps(engine_facts(self.vllm_config, self.get_model()))

    def kvskim_bench_activity(self) -> str:
        """What the last decode step attended; see `activity`."""
        return json.dumps(activity(_layers(self.vllm_config)))

    def kvskim_bench_profile(self, requests: int) -> str:
        """Record the next decode steps of so many requests; see `StepProfiler`."""
        self.kvskim_bench_profiler = StepProfiler(self, requests)
        return json.dumps({})

    def kvskim_bench_profile_result(self) -> str:
        """What was recorded, or ``error``: why nothing was."""
        try:
            return json.dumps(self.kvskim_bench_profiler.result())
        except (RuntimeError, ValueError) as error:
            return json.dumps({"error": str(error)})


def _layers(vllm_config: Any) -> Mapping[str, Any]:
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    return layers


def engine_facts(vllm_config: Any, model: torch.nn.Module) -> dict[str, Any]:
    """What the roofline and the report need to know of an engine.

    Returns:
        ``weight_bytes`` that a step reads (input embeddings left out, of which it reads a row for each token, unless they are the output matrix too),
        ``expert_bytes`` among them; ``layers``: kv heads, head size, window, bytes of an element, and whether one (latent) row is
        key and value for each attention layer, and ``record_bytes`` where it is sparse; ``kernels``, ``block`` (lines of kvskim about itself),
        ``graphs``, ``free_bytes`` of the GPU.
    """
    layers = _layers(vllm_config)
    state = SkimState.find(layers)
    element = torch.empty(0, dtype=vllm_config.model_config.dtype).element_size()
    described, backends = [], set()
    for name, layer in layers.items():
        if not hasattr(layer, "num_kv_heads") or not hasattr(layer, "head_size"):
            continue
        backends.add(backend_name(layer))
        sparse = None if state is None else state.layers.get(name)
        described.append(dict(
            kv_heads=int(layer.num_kv_heads), head_size=int(layer.head_size), window=getattr(layer, "sliding_window", None), element_bytes=element,
            latent=getattr(layer, "kv_lora_rank", None) is not None, record_bytes=None if sparse is None else sparse.records.record_bytes,
        ))
    return dict(
        **weights(model, tied=bool(getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False))), layers=described,
        kernels=" and ".join(sorted(backends)) if state is None else state.kernels.kernels,
        block=[] if state is None else start_block(state), graphs=str(vllm_config.compilation_config.cudagraph_mode),
        free_bytes=int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0,
    )


def backend_name(layer: Any) -> str:
    """What vLLM computes the attention of this layer with: FLASH_ATTN 3."""
    version = getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
    return f"{layer.get_attn_backend().get_name()}{f' {version}' if version else ''}"


def weights(model: torch.nn.Module, *, tied: bool) -> dict[str, int]:
    """Bytes of the weights that a decode step reads, and of experts among them, which a step reads in part."""
    total = experts = 0
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() in seen or ("embed_tokens" in name and not tied):
            continue
        seen.add(parameter.data_ptr())
        nbytes = parameter.numel() * parameter.element_size()
        total += nbytes
        experts += nbytes if "experts" in name else 0
    return dict(weight_bytes=total, expert_bytes=experts)


def activity(layers: Mapping[str, Any]) -> dict[str, Any]:
    """``calibrated``, and of the last decode step, summed over layers, rows and kv heads: pages ``attended`` and in ``total``, mass ``covered``, ``count``
    of (layer, row, kv head). Empty for a dense engine."""
    state = SkimState.find(layers)
    if state is None:
        return {}
    result: dict[str, Any] = dict(calibrated=bool(state.ready is not None and state.ready.item()), attended=0, total=0, covered=0.0, count=0)
    for step in (last_step(state) or {}).values():
        result["attended"] += step.attended
        result["total"] += step.total
        result["covered"] += step.covered
        result["count"] += step.count
    return result
