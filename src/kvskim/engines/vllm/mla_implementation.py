"""Latent attention of one layer: vLLM's own for prefill rows, the four operations for decode rows.

vLLM keeps one row of latent and rotary channels per token, hands decode rows over with their queries absorbed into that space, and projects
the result out of it. So there is one kv head, every query head of the rank is in its group, and a request has one page table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLAImpl

from kvskim.engines.vllm.calibrate import QUERY_STRIDE
from kvskim.engines.vllm.facts import decodes_alone, engine_facts, is_draft_model, layer_index
from kvskim.engines.vllm.layer_state import LayerState
from kvskim.engines.vllm.mla_loading import call_after_loading, plain_defaults
from kvskim.engines.vllm.mla_metadata import SkimMlaMetadata
from kvskim.engines.vllm.state import SkimState
from kvskim.engines.vllm.support import LayerFacts, engine_refusal, layer_refusal, mla_refusal
from kvskim.ops.latent_query import LatentQuery


class SkimMlaImpl(FlashAttnMLAImpl):
    """One layer. Sparse, unless a reason speaks against it, in which case it is vLLM's FlashAttention and nothing else.

    Raises:
        UnsupportedError: the layer can't be sparse, and ``on_unsupported`` is ``refuse``.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **mla_args,
        )
        self._vllm_config = get_current_vllm_config()
        self.skim_state = SkimState.of(self._vllm_config)
        self.skim_layer: LayerState | None = None
        self.dense_because: str | None = None
        self._held: Callable[..., None] | None = None
        if is_draft_model(self._vllm_config):
            self.dense_because = "draft model"
            return
        facts = LayerFacts(
            head_size=head_size, num_heads=num_heads, num_kv_heads=num_kv_heads, mla=True, trained_indexer=mla_args.get("indexer") is not None
        )
        # A checkpoint may ask for another type of cache than the engine was started with.
        engine = replace(engine_facts(self._vllm_config, self.skim_state.config), cache_dtype=str(kv_cache_dtype))
        self.dense_because = self.skim_state.refuse(engine_refusal(engine) or layer_refusal(facts) or mla_refusal(engine))
        self.skim_state.loading += 1
        call_after_loading(mla_args["kv_b_proj"], self._loaded)

    def _loaded(self) -> None:
        """Find out which layer this is, and put its records beside it. vLLM calls this once per layer after loading, or again on a reload."""
        state, layers = self.skim_state, self._vllm_config.compilation_config.static_forward_context
        name, module = next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        if self.skim_layer is not None or name in state.dense:
            return
        index = layer_index(name)
        if self.dense_because is None and state.config.is_dense(index):
            self.dense_because = "dense_layers"
        if self.dense_because is not None:
            state.dense[name] = self.dense_because
        else:
            self.skim_layer = state.add_layer(
                self._vllm_config.model_config.dtype, name=name, index=index, num_heads=self.num_heads, num_kv_heads=1, head_size=self.head_size,
                scale=self.scale, softcap=0.0, module=module, latent_size=self.kv_lora_rank,
            )
        state.loading -= 1
        if state.loading == 0:
            # vLLM's profiling run passes no implementation of latent attention, so what decode needs is made now and counted with the weights.
            state.report_if_all_dense()
            with plain_defaults():
                state.allocate(torch.device(self._vllm_config.device_config.device), self._vllm_config.model_config.dtype)

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale: Tensor
    ) -> None:
        """Write the latent rows, then the records of the pages that this completes; in a step of decode rows alone when attention has its queries."""
        held, self._held = self._held, None  # what a step that failed has left is no concern of those after the next
        if held is not None:
            assert self.skim_layer is not None
            raise RuntimeError(
                f"rows of {self.skim_layer.name} were held back for the attention of a decode step, which did not follow, or that step failed"
            )
        write = partial(self._write, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
        alone = self.skim_layer is not None and kv_cache.numel() > 0 and decodes_alone(self.skim_layer.name)
        if alone:
            # Between vLLM's call of this and attention its products take the queries into the latent space. Behind them the write costs the step
            # nothing: the kernels that follow begin while it runs, and have their queries.
            self._held = write
        else:
            write(alone=False)

    def _write(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale: Tensor, *, alone: bool
    ) -> None:
        sparse = self.skim_layer
        rows = kv_c_normed[:, None], k_pe.flatten(1)[:, None]
        if not (alone and sparse is not None and self.skim_state.write_latent(sparse, *rows, kv_cache, slot_mapping.flatten())):
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
        if sparse is not None and kv_cache.numel() > 0:
            self.skim_state.keys_written(sparse, slot_mapping.flatten(), alone=alone)

    def forward_mha(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, k_scale: Tensor, output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Prefill rows: vLLM's own, after calibration has copied what it wants of them."""
        if self.skim_layer is not None and self.skim_state.calibrator is not None:
            self._capture(q, kv_c_normed, k_pe, attn_metadata)
        super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)

    def _capture(self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, metadata: Any) -> None:
        """Keep the rows of the planned tokens, and every fourth of their queries, absorbed as decode will see them."""
        layer, calibrator = self.skim_layer, self.skim_state.calibrator
        assert layer is not None
        assert calibrator is not None
        assert isinstance(metadata, SkimMlaMetadata)
        absorb = layer.module.W_UK_T  # [query heads, head channels, latent channels]
        for segment in metadata.capture:
            start = segment.start - metadata.num_decode_tokens
            tokens = slice(start, start + segment.count)
            plain, rotary = q[tokens][::QUERY_STRIDE].split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
            latent = torch.bmm(plain.transpose(0, 1), absorb).transpose(0, 1)
            keys = torch.cat([kv_c_normed[tokens], k_pe[tokens].flatten(1)], -1)
            calibrator.keep(layer, torch.cat([latent, rotary], -1), keys[:, None], segment.target)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Decode rows, token i for row i, where each has one query token; otherwise vLLM's own.

        Args:
            q: ``[R, query heads, head size]``, or its latent and its rotary part.
            kv_c_and_k_pe_cache: ``[blocks, block_size, head size]``.

        Returns:
            ``[R, query heads, latent size]`` and no log-sum-exp.
        """
        sparse = self.skim_layer
        if sparse is None and self.dense_because is None:
            raise RuntimeError("vLLM has not processed the weights of a latent attention layer after loading, so kvskim does not know it")
        decode = attn_metadata.decode
        if sparse is None or decode.max_query_len > 1:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        query = LatentQuery(*q) if isinstance(q, tuple) else q.contiguous()
        held, self._held = self._held, None
        if held is not None:
            held(alone=True)
        rows = query.shape[0]
        out = torch.empty(rows, self.num_heads, self.kv_lora_rank, dtype=query.dtype, device=query.device)
        self.skim_state.decode(
            sparse, query, kv_c_and_k_pe_cache, decode.block_table[:rows], decode.seq_lens[:rows], out, alone=attn_metadata.num_prefills == 0
        )
        return out, None
