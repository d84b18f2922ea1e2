"""`mini_engine` for latent attention: 4 query heads over one row of 256 + 64 channels per token."""

from __future__ import annotations

import functools
from typing import Any

import torch
from mini_engine import MAX_TOKENS, MiniEngine, Request
from torch import nn
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import MLAAttention

from kvskim.engines.vllm.mla import SkimMlaBackend
from kvskim.engines.vllm.mla_loading import MODULE_NAME
from kvskim.engines.vllm.mla_metadata import SkimMlaMetadataBuilder
from kvskim.engines.vllm.state import SkimState

LATENT, ROTARY, PLAIN, VALUE, HEADS = 256, 64, 32, 16, 4


class Projection(nn.Linear):
    """From latent channels to the keys and values of all heads; vLLM's layers return a pair."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


@functools.lru_cache(maxsize=64)
def latents(seed: int, layer: int) -> torch.Tensor:
    """Rows ``[MAX_TOKENS, LATENT + ROTARY]`` of a text, with a falling spectrum, as latents have."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * layer + 1)
    rows = torch.randn(MAX_TOKENS, LATENT + ROTARY, generator=generator)
    rows[:, :LATENT] *= torch.arange(1, LATENT + 1).float().pow(-0.5) * 3
    return rows


@functools.lru_cache(maxsize=8)
def weights(layer: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(77 + layer)
    return torch.randn(HEADS * (PLAIN + VALUE), LATENT, generator=generator) * 0.2


@functools.lru_cache(maxsize=64)
def head_queries(seed: int, layer: int) -> torch.Tensor:
    """``[MAX_TOKENS, HEADS, PLAIN + ROTARY]``: each query looks for one earlier token, so that few pages carry the mass."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * layer + 2)
    keys, _ = expand(latents(seed, layer), layer)
    wanted = torch.randint(0, 1 << 30, (MAX_TOKENS,), generator=generator) % torch.arange(1, MAX_TOKENS + 1)
    return 0.3 * torch.randn(keys.shape, generator=generator) + 1.5 * keys[wanted]


def expand(rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[T, HEADS, PLAIN + ROTARY]`` and values ``[T, HEADS, VALUE]`` of every head."""
    plain, value = (rows[:, :LATENT] @ weights(layer).T.to(rows.dtype)).unflatten(1, (HEADS, -1)).split([PLAIN, VALUE], -1)
    return torch.cat([plain, rows[:, None, LATENT:].expand(-1, HEADS, -1)], -1), value


class MlaMiniEngine(MiniEngine):
    """Two layers in float32 on a CPU with the torch operations."""

    num_kv_heads, group, head_size, scale = 1, HEADS, LATENT + ROTARY, 0.1

    def __init__(
        self, settings: dict[str, Any], *, block_size: int = 16, num_blocks: int = 160, num_layers: int = 2, max_rows: int = 8, speculative: Any = None,
        draft: bool = False, **layer_arguments: Any,
    ) -> None:
        self.block_size = block_size
        self.config = self.make_config({"kvskim": {"kernels": "torch", **settings}}, max_rows, speculative)
        if draft:
            self.config.model_config.runner_type = "draft"
        self.free = list(range(num_blocks - 1, 0, -1))
        self.context = self.config.compilation_config.static_forward_context
        with self.current_config():
            self.layers = [self.make_layer(i, **layer_arguments) for i in range(num_layers)]
        self.load()
        self.state = SkimState.find(self.context)
        self._bind(num_blocks)
        names = [layer.layer_name for layer in self.layers]
        with self.current_config():
            self.builder = SkimMlaMetadataBuilder(self.layers[0].get_kv_cache_spec(self.config), names, self.config, torch.device("cpu"))

    def make_config(self, additional: dict[str, Any], max_rows: int, speculative: Any) -> Any:
        """vLLM's configuration, as the stand-in has it."""
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

        return VllmConfig(
            model_config=ModelConfig(max_model_len=MAX_TOKENS, use_mla=True, head_size=self.head_size, total_kv_heads=HEADS),
            cache_config=CacheConfig(block_size=self.block_size),
            scheduler_config=SchedulerConfig(max_num_seqs=max_rows, disable_hybrid_kv_cache_manager=True),
            additional_config=additional,
            speculative_config=speculative,
        )

    def make_layer(self, index: int, **arguments: Any) -> MLAAttention:
        projection = Projection(LATENT, HEADS * (PLAIN + VALUE), bias=False)
        projection.weight.data.copy_(weights(index))
        return MLAAttention(
            num_heads=HEADS, scale=self.scale, qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTARY, v_head_dim=VALUE, q_lora_rank=None, kv_lora_rank=LATENT,
            kv_b_proj=projection, cache_config=self.config.cache_config, prefix=f"model.layers.{index}.self_attn.attn", attn_backend=SkimMlaBackend,
            **arguments,
        )

    def load(self) -> None:
        """What vLLM's loader does after the weights are there, with the model's dtype as torch's default."""
        torch.set_default_dtype(torch.bfloat16)
        try:
            for hook in self.hooks():
                if hook is not None:
                    hook.quant_method.process_weights_after_loading(hook)
            for layer in self.layers:
                layer.process_weights_after_loading(torch.float32)
        finally:
            torch.set_default_dtype(torch.float32)

    def hooks(self) -> list[nn.Module]:
        return [getattr(layer.kv_b_proj, MODULE_NAME, None) for layer in self.layers]

    def _bind(self, num_blocks: int) -> None:
        for layer in self.layers:
            layer.kv_cache = torch.full((num_blocks, self.block_size, self.head_size), torch.nan)
        for layer in self.records_layers():
            spec = layer.get_kv_cache_spec(self.config)
            raw = torch.full((spec.page_size_bytes * num_blocks,), 0xFF, dtype=torch.uint8)
            shape = layer.get_attn_backend().get_kv_cache_shape(num_blocks, spec.storage_block_size, spec.num_kv_heads, spec.head_size)
            layer.kv_cache = raw.view(spec.dtype).view(shape)

    def step(self, scheduled: list[tuple[Request, int]], *, pad_rows: int = 0, dummy: bool = False) -> list[list[torch.Tensor]]:
        scheduled = sorted(scheduled, key=lambda item: item[1])
        for request, count in scheduled:
            self.grow(request, count)
        common = self._common(scheduled, pad_rows, dummy)
        self.metadata = self.builder.build(0, common)
        outputs: list[list[torch.Tensor]] = [[] for _ in scheduled]
        for index, layer in enumerate(self.layers):
            rows = torch.cat([latents(r.seed, index)[r.computed : r.computed + n] for r, n in scheduled])
            query = torch.cat([head_queries(r.seed, index)[r.computed : r.computed + n] for r, n in scheduled])
            # Padding must be inert, but vLLM's own product with the weights runs over it: no NaN there.
            rows, query = (torch.cat([t, torch.full((pad_rows, *t.shape[1:]), 5.0)]) for t in (rows, query))
            latent, rotary = rows[:, :LATENT].contiguous(), rows[:, None, LATENT:].contiguous()
            out = torch.full((len(rows), HEADS * VALUE), 9.0)
            with set_forward_context({layer.layer_name: self.metadata}, self.config):
                layer.impl.do_kv_cache_update(latent, rotary, layer.kv_cache, common.slot_mapping, layer.kv_cache_dtype, layer._k_scale)
                layer.forward_impl(query, latent, rotary, layer.kv_cache, self.metadata, output=out)
            start = 0
            for row, (_, count) in enumerate(scheduled):
                outputs[row].append(out[start : start + count].clone())
                start += count
            if pad_rows:
                assert (out[start:] == 0).all(), "rows that fill a graph must give zeros"
        for request, count in scheduled:
            request.computed += count
        return outputs

    def expected(self, request: Request, layer: int, first: int, count: int, softcap: float = 0.0) -> torch.Tensor:
        """Full attention with expanded heads in float64."""
        q = head_queries(request.seed, layer)[first : first + count].double()
        k, v = expand(latents(request.seed, layer)[: first + count].double(), layer)
        logits = torch.einsum("qhd,thd->hqt", q, k) * self.scale
        seen = torch.arange(first + count) <= torch.arange(first, first + count)[:, None]
        return torch.einsum("hqt,thd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1).float()
