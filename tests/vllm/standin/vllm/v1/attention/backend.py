from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

M = TypeVar("M")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    positions: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: Any = None


class AttentionBackend(ABC):
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @classmethod
    def validate_configuration(cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, **more) -> list[str]:
        return ["head_size not supported"] if head_size % 8 else []


class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return cls._cudagraph_support

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class AttentionImpl:
    def process_weights_after_loading(self, act_dtype):
        pass
