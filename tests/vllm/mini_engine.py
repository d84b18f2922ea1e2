"""A paged engine around the backend: blocks, requests, steps. The model is a table of random queries, keys and values."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvskim.engines.vllm.backend import SkimBackend
from kvskim.engines.vllm.metadata import SkimMetadataBuilder
from kvskim.engines.vllm.records import RecordsLayer
from kvskim.engines.vllm.state import SkimState

MAX_TOKENS = 2048


@dataclass
class Request:
    """``seed`` stands for the text: requests of one seed have the same tokens, as far as both are long."""

    seed: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


@functools.lru_cache(maxsize=64)
def _table(seed: int, layer: int, kind: str, num_kv_heads: int, group: int, head_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * layer + {"query": 1, "key": 2, "value": 3}[kind])
    heads = num_kv_heads * (group if kind == "query" else 1)
    table = torch.randn(MAX_TOKENS, heads, head_size, generator=generator)
    if kind == "query":
        # Each query looks for one earlier token, so that few pages carry the mass.
        keys = _table(seed, layer, "key", num_kv_heads, group, head_size).repeat_interleave(group, 1)
        wanted = torch.randint(0, 1 << 30, (MAX_TOKENS,), generator=generator) % torch.arange(1, MAX_TOKENS + 1)
        table = 0.3 * table + 2.5 * keys[wanted]
    return table


class MiniEngine:
    """Two layers of 2 kv heads with 2 query heads each, head size 64, in float32 on a CPU with the torch operations."""

    num_kv_heads, group, head_size, scale = 2, 2, 64, 0.125

    def __init__(
        self, settings: dict[str, Any], *, block_size: int = 16, num_blocks: int = 160, num_layers: int = 2, max_rows: int = 8, softcap: float | None = None,
        windows: tuple[int | None, ...] | None = None, speculative: Any = None, attn_type: str = "decoder", first_layer: int = 0,
        separate_blocks: bool = False, cache_dtype: str = "auto", connector: Any = None, **layer_arguments: Any,
    ) -> None:
        self.block_size, self.separate_blocks, self.cache_dtype, self.connector = block_size, separate_blocks, cache_dtype, connector
        self.config = self.make_config({"kvskim": {"kernels": "torch", **settings}}, max_rows, speculative)
        windows = windows or (None,) * num_layers
        self.free = list(range(num_blocks - 1, 0, -1))
        self.context = self.config.compilation_config.static_forward_context
        with self.current_config():
            self.layers = [
                Attention(
                    self.num_kv_heads * self.group, self.head_size, self.scale, self.num_kv_heads, cache_config=self.config.cache_config,
                    prefix=f"model.layers.{first_layer + i}.attn", logits_soft_cap=softcap, per_layer_sliding_window=windows[i], attn_backend=SkimBackend,
                    attn_type=attn_type, **layer_arguments,
                )
                for i in range(num_layers)
            ]
        for layer in self.layers:
            layer.process_weights_after_loading(torch.bfloat16)
        state = SkimState.find(self.context)
        assert state is not None
        self.state = state
        self._profile()
        self._bind(num_blocks)
        names = [layer.layer_name for layer in self.layers]
        self.builder = SkimMetadataBuilder(self.layers[0].get_kv_cache_spec(self.config), names, self.config, torch.device("cpu"))

    def make_config(self, additional: dict[str, Any], max_rows: int, speculative: Any) -> Any:
        """vLLM's configuration, as the stand-in has it."""
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

        return VllmConfig(
            model_config=ModelConfig(max_model_len=MAX_TOKENS),
            cache_config=CacheConfig(block_size=self.block_size, cache_dtype=self.cache_dtype),
            scheduler_config=SchedulerConfig(max_num_seqs=max_rows, disable_hybrid_kv_cache_manager=not self.separate_blocks),
            additional_config=additional,
            speculative_config=speculative,
            kv_transfer_config=self.connector,
        )

    def current_config(self) -> Any:
        """The context in which vLLM builds its layers."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.config)

    def _profile(self) -> None:
        out = torch.full((4, self.num_kv_heads * self.group, self.head_size), 7.0)
        for layer in self.layers:
            layer.impl.forward(layer, torch.zeros_like(out), None, None, layer.kv_cache, None, out)
            assert (out == 0).all()

    def _bind(self, num_blocks: int) -> None:
        # What has not been written holds NaN: a read of it shows.
        for layer in self.layers:
            shape = (num_blocks, 2, self.block_size, self.num_kv_heads, self.head_size)
            layer.kv_cache = torch.full(shape, torch.nan)
        for layer in self.records_layers():
            spec = layer.get_kv_cache_spec(self.config)
            raw = torch.full((spec.page_size_bytes * num_blocks,), 0xFF, dtype=torch.uint8)
            shape = layer.get_attn_backend().get_kv_cache_shape(num_blocks, spec.storage_block_size, spec.num_kv_heads, spec.head_size)
            layer.kv_cache = raw.view(spec.dtype).view(shape)

    def records_layers(self) -> list[RecordsLayer]:
        return [layer for layer in self.context.values() if isinstance(layer, RecordsLayer)]

    def tokens(self, seed: int, layer: int, kind: str, first: int, count: int) -> torch.Tensor:
        """Queries, keys or values of tokens ``first ..`` of the text ``seed``: ``[count, heads, D]``."""
        return _table(seed, layer, kind, self.num_kv_heads, self.group, self.head_size)[first : first + count]

    def grow(self, request: Request, count: int) -> None:
        while len(request.blocks) * self.block_size < request.computed + count:
            request.blocks.append(self.free.pop())

    def release(self, request: Request, keep: int = 0) -> None:
        """Finish, abort or preempt a request: its blocks (but the first ``keep``) are free again."""
        self.free.extend(reversed(request.blocks[keep:]))
        request.blocks = []
        request.computed = 0

    def step(self, scheduled: list[tuple[Request, int]], *, pad_rows: int = 0, dummy: bool = False) -> list[list[torch.Tensor]]:
        """Run the given number of tokens of each request; returns the output ``[tokens, Hq, D]`` of each (request, layer).

        ``pad_rows``: rows that only fill a captured graph, as vLLM makes them. ``dummy``: a run without slots, as vLLM makes to warm up.
        """
        scheduled = sorted(scheduled, key=lambda item: item[1])
        for request, count in scheduled:
            self.grow(request, count)
        common = self._common(scheduled, pad_rows, dummy)
        metadata = self.builder.build(0, common)
        total = sum(count for _, count in scheduled)
        width = total + pad_rows
        outputs: list[list[torch.Tensor]] = [[] for _ in scheduled]
        for index, layer in enumerate(self.layers):
            parts = {
                kind: torch.cat([self.tokens(r.seed, index, kind, r.computed, n) for r, n in scheduled]) for kind in ("query", "key", "value")
            }
            padded = {kind: torch.cat([t, torch.full((width - total, *t.shape[1:]), torch.nan)]) for kind, t in parts.items()}
            out = torch.full_like(padded["query"], 9.0)
            with set_forward_context({layer.layer_name: metadata}, self.config):
                layer.impl.do_kv_cache_update(layer, padded["key"], padded["value"], layer.kv_cache, common.slot_mapping)
                layer.impl.forward(layer, padded["query"], padded["key"], padded["value"], layer.kv_cache, metadata, out)
            if pad_rows:
                assert (out[total:] == 0).all(), "rows that fill a graph must give zeros"
            start = 0
            for row, (_, count) in enumerate(scheduled):
                outputs[row].append(out[start : start + count].clone())
                start += count
        for request, count in scheduled:
            request.computed += count
        self.metadata = metadata
        return outputs

    def _common(self, scheduled: list[tuple[Request, int]], pad_rows: int, dummy: bool) -> CommonAttentionMetadata:
        rows = len(scheduled) + pad_rows
        lengths = [request.computed + count for request, count in scheduled] + [0] * pad_rows
        starts = [0]
        for _, count in scheduled:
            starts.append(starts[-1] + count)
        total = starts[-1]
        starts += [total] * pad_rows
        slots: list[int] = []
        table = torch.zeros(rows, MAX_TOKENS // self.block_size, dtype=torch.int32)
        for row, (request, count) in enumerate(scheduled):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
            for position in range(request.computed, request.computed + count):
                slots.append(request.blocks[position // self.block_size] * self.block_size + position % self.block_size)
        slots = [-1] * len(slots) if dummy else slots
        slots += [-1] * pad_rows
        start_tensor = torch.tensor(starts, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=start_tensor, query_start_loc_cpu=start_tensor.clone(), seq_lens=torch.tensor(lengths, dtype=torch.int32), num_reqs=rows,
            num_actual_tokens=total + pad_rows, max_query_len=max(n for _, n in scheduled), max_seq_len=max(lengths), block_table_tensor=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
        )

    def expected(self, request: Request, layer: int, first: int, count: int, softcap: float = 0.0) -> torch.Tensor:
        """Full attention of tokens ``first ..`` of a request in float64, from the tables and not from the cache."""
        q = self.tokens(request.seed, layer, "query", first, count).double()
        k, v = (self.tokens(request.seed, layer, kind, 0, first + count).double().repeat_interleave(self.group, 1) for kind in ("key", "value"))
        logits = torch.einsum("qhd,thd->hqt", q, k) * self.scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        seen = torch.arange(first + count) <= torch.arange(first, first + count)[:, None]
        return torch.einsum("hqt,thd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v).float()

    def dense_tokens(self) -> int:
        """Query tokens that FlashAttention has computed, over all layers."""
        return sum(layer.impl.dense_tokens for layer in self.layers)
