"""Latent attention over a paged cache, one request after the other: prefill rows with expanded heads, decode rows absorbed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder


class FlashAttnMLABackend(AttentionBackend):
    @staticmethod
    def get_name():
        return "FLASH_ATTN_MLA"

    @staticmethod
    def get_impl_cls():
        return FlashAttnMLAImpl

    @staticmethod
    def get_builder_cls():
        return FlashAttnMLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, block_size, head_size)

    @classmethod
    def is_mla(cls):
        return True


@dataclass
class FlashAttnMLADecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    scheduler_metadata: torch.Tensor | None = None


@dataclass
class PrefillMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


@dataclass
class FlashAttnMLAMetadata:
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    head_dim: int | None = None
    prefill: PrefillMetadata | None = None
    decode: FlashAttnMLADecodeMetadata | None = None


class FlashAttnMLAMetadataBuilder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int = 512

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.metadata_cls = FlashAttnMLAMetadata
        speculative = vllm_config.speculative_config
        if speculative is not None:
            self.reorder_batch_threshold = max(self.reorder_batch_threshold, 1 + speculative.num_speculative_tokens)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        assert common_attn_metadata.max_query_len <= self.reorder_batch_threshold
        return self.build(0, common_attn_metadata)

    def _schedule_decode(self, num_reqs, cu_query_lens, max_query_len, seqlens, max_seq_len, causal, max_num_splits):
        return seqlens.clone()

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        c = common_attn_metadata
        counts = torch.diff(c.query_start_loc_cpu).tolist()
        decodes = next((row for row, count in enumerate(counts) if count > self.reorder_batch_threshold), len(counts))
        tokens = sum(counts[:decodes])
        decode = prefill = None
        if decodes < len(counts):
            prefill = PrefillMetadata(c.block_table_tensor[decodes:], c.seq_lens[decodes:], c.query_start_loc[decodes:] - c.query_start_loc[decodes])
        if decodes:
            starts, most = c.query_start_loc[: decodes + 1], max(counts[:decodes])
            schedule = self._schedule_decode(decodes, starts, most, c.seq_lens[:decodes], c.max_seq_len, True, 0)
            decode = FlashAttnMLADecodeMetadata(c.block_table_tensor[:decodes], c.seq_lens[:decodes], starts, most, schedule)
        return self.metadata_cls(
            num_reqs=c.num_reqs, max_query_len=c.max_query_len, max_seq_len=c.max_seq_len, num_actual_tokens=c.num_actual_tokens,
            query_start_loc=c.query_start_loc, slot_mapping=c.slot_mapping, num_decodes=decodes,
            num_decode_tokens=c.num_actual_tokens if prefill is None else tokens, num_prefills=len(counts) - decodes, prefill=prefill, decode=decode,
        )


class FlashAttnMLAImpl:
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
        kv_sharing_target_layer_name, **mla_args,
    ):
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_b_proj"):
            setattr(self, name, mla_args[name])
        self.dense_tokens = 0

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale):
        if kv_cache.numel() == 0:
            return
        valid = slot_mapping >= 0
        slots = slot_mapping[valid]
        rows = torch.cat([kv_c_normed, k_pe.squeeze(1)], -1)[: len(slot_mapping)]
        kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = rows[valid]

    def forward_mha(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None):
        m = attn_metadata.prefill
        starts = m.query_start_loc.tolist()
        for row, length in enumerate(m.seq_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            latent, rotary = _rows(kv_c_and_k_pe_cache, m.block_table[row], length).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
            plain, v = self.kv_b_proj(latent)[0].view(length, self.num_heads, -1).split([self.qk_nope_head_dim, self.v_head_dim], -1)
            k = torch.cat([plain, rotary[:, None].expand(-1, self.num_heads, -1)], -1)
            output[begin:end] = _causal(q[begin:end], k, v, self.scale).flatten(1)

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        q = torch.cat(q, -1) if isinstance(q, tuple) else q
        m = attn_metadata.decode
        assert m.scheduler_metadata is not None, "FlashAttention needs its schedule"
        out = torch.zeros(q.shape[0], self.num_heads, self.kv_lora_rank)
        starts = m.query_start_loc.tolist()
        for row, length in enumerate(m.seq_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            self.dense_tokens += end - begin
            if end > begin:
                rows = _rows(kv_c_and_k_pe_cache, m.block_table[row], length)[:, None].expand(-1, self.num_heads, -1)
                out[begin:end] = _causal(q[begin:end], rows, rows[..., : self.kv_lora_rank], self.scale)
        return out, None


def _rows(cache: Any, table: torch.Tensor, length: int) -> torch.Tensor:
    return cache[table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q ``[n, heads, D]``, the last n tokens of k ``[T, heads, D]``, v ``[T, heads, Dv]``."""
    logits = torch.einsum("qhd,thd->hqt", q, k) * scale
    seen = torch.arange(len(k)) <= torch.arange(len(k) - len(q), len(k))[:, None]
    return torch.einsum("hqt,thd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)
