"""Dense attention over a paged cache, one request after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType


class FlashAttentionBackend(AttentionBackend):
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name():
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls():
        return FlashAttentionImpl

    @staticmethod
    def get_builder_cls():
        return FlashAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


@dataclass
class FlashAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    use_cascade: bool = False
    scheduler_metadata: torch.Tensor | None = None
    causal: Any = True


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # One buffer for all schedules, as with captured graphs.
        self.schedule = torch.zeros(64, dtype=torch.int32)
        self.schedules_made = 0

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        c = common_attn_metadata
        schedule = None
        if not fast_build:
            self.schedules_made += 1
            self.schedule[: c.num_reqs] = c.seq_lens
            self.schedule[c.num_reqs :] = 0
            schedule = self.schedule[: c.num_reqs]
        return FlashAttentionMetadata(
            num_actual_tokens=c.num_actual_tokens, max_query_len=c.max_query_len, query_start_loc=c.query_start_loc, max_seq_len=c.max_seq_len,
            seq_lens=c.seq_lens, block_table=c.block_table_tensor, slot_mapping=c.slot_mapping, scheduler_metadata=schedule, causal=c.causal,
        )

    def use_cascade_attention(self, *args, **kwargs):
        return True


class FlashAttentionImpl(AttentionImpl):
    can_return_lse_for_decode = True

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap=None,
        attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None,
    ):
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads
        self.logits_soft_cap = logits_soft_cap or 0
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.dense_tokens = 0

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        if attn_metadata is None:
            return output.fill_(0)
        m = attn_metadata
        if m.scheduler_metadata is not None:
            assert torch.equal(m.scheduler_metadata, m.seq_lens), "the schedule is that of other rows"
        key_cache, value_cache = kv_cache.unbind(1)
        starts = m.query_start_loc.tolist()
        for row, length in enumerate(m.seq_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            if begin == end:
                continue
            self.dense_tokens += end - begin
            blocks = m.block_table[row, : -(-length // key_cache.shape[1])].long()
            k = key_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(self.num_heads // self.num_kv_heads, 1)
            v = value_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(self.num_heads // self.num_kv_heads, 1)
            logits = torch.einsum("qhd,thd->hqt", query[begin:end].float(), k) * self.scale
            if self.logits_soft_cap:
                logits = self.logits_soft_cap * torch.tanh(logits / self.logits_soft_cap)
            position = torch.arange(length - (end - begin), length)
            seen = torch.arange(length) <= position[:, None]
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            output[begin:end] = torch.einsum("hqt,thd->qhd", weights, v).to(output.dtype)
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        key_cache, value_cache = kv_cache.unbind(1)
        valid = slot_mapping >= 0
        slots = slot_mapping[valid]
        block, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
        key_cache[block, offset] = key[: len(slot_mapping)][valid]
        value_cache[block, offset] = value[: len(slot_mapping)][valid]
