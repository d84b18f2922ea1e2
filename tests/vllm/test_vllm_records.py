"""Records as a cache layer: what vLLM's planner is told."""

import pytest
import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport

from kvskim.engines.vllm.records import RecordsBackend, RecordsLayer, RecordsMetadataBuilder


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("record_bytes", [128, 256, 818, 1330])
def test_fault_18_bytes_are_exact(block_size, record_bytes):
    layer = RecordsLayer("model.layers.3.self_attn.attn", 8, record_bytes, torch.bfloat16)
    spec = layer.get_kv_cache_spec(VllmConfig(cache_config=CacheConfig(block_size=block_size)))
    assert spec.page_size_bytes == block_size // 16 * 8 * record_bytes
    assert spec.block_size == block_size
    shape = RecordsBackend.get_kv_cache_shape(5, spec.storage_block_size, spec.num_kv_heads, spec.head_size)
    layer.kv_cache = torch.zeros(5 * spec.page_size_bytes, dtype=torch.uint8).view(spec.dtype).view(shape)
    assert layer.records.shape == (5 * block_size // 16, 8, record_bytes)


def test_name_and_metadata_never_limit_vllm():
    layer = RecordsLayer("model.layers.3.self_attn.attn", 8, 256, torch.bfloat16)
    assert layer.layer_name == "model.layers.3.self_attn.attn.kvskim_records"
    assert layer.get_attn_backend() is RecordsBackend
    assert RecordsMetadataBuilder.get_cudagraph_support(None, None) == AttentionCGSupport.ALWAYS
    builder = RecordsMetadataBuilder(None, [], None, torch.device("cpu"))
    assert builder.reorder_batch_threshold is None
    common = object()
    assert builder.build(0, common) is common
