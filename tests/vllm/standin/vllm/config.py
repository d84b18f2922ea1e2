from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

_current: list[VllmConfig] = []


class CUDAGraphMode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL_AND_PIECEWISE = 3


@dataclass
class ModelConfig:
    model: str = "stand-in"
    dtype: torch.dtype = torch.bfloat16
    max_model_len: int = 1024
    is_hybrid: bool = False
    runner_type: str = "generate"
    total_kv_heads: int = 2
    head_size: int = 64
    num_layers: int = 2
    use_mla: bool = False
    hf_text_config: Any = field(default_factory=lambda: SimpleNamespace(to_dict=lambda: {"model_type": "stand-in"}))

    def get_total_num_kv_heads(self) -> int:
        return self.total_kv_heads

    def get_head_size(self) -> int:
        return self.head_size

    def get_num_layers(self, parallel_config: ParallelConfig) -> int:
        return self.num_layers


@dataclass
class CacheConfig:
    block_size: int = 16
    cache_dtype: str = "auto"
    user_specified_block_size: bool = False
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92


@dataclass
class ParallelConfig:
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


@dataclass
class SchedulerConfig:
    max_num_seqs: int = 8
    disable_hybrid_kv_cache_manager: bool = False


@dataclass
class CompilationConfig:
    static_forward_context: dict[str, Any] = field(default_factory=dict)


@dataclass
class AttentionConfig:
    backend: Any = None


@dataclass
class DeviceConfig:
    device: Any = "cpu"


@dataclass
class VllmConfig:
    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    attention_config: AttentionConfig = field(default_factory=AttentionConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    speculative_config: Any = None
    kv_transfer_config: Any = None
    additional_config: dict[str, Any] = field(default_factory=dict)


@contextmanager
def set_current_vllm_config(config: VllmConfig):
    _current.append(config)
    try:
        yield
    finally:
        _current.pop()


def get_current_vllm_config() -> VllmConfig:
    return _current[-1]
