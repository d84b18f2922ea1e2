"""A Hugging Face model whose KV store is ours: prefill once with full attention, then decode many times with different page choices.

The transformers model is used for everything around attention. Tokens of one page are decoded together (teacher forcing), each query
choosing its own pages, so that an evaluation costs seconds instead of minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvskim.errors import KvskimError
from kvskim.eval.policy import Policy, token_mask
from kvskim.layout import PAGE_TOKENS

ATTENTION_NAME = "kvskim-eval"


OBSERVED_QUERIES = 64
"""Last queries of a prompt that are kept for policies which choose by them."""


class EvalModel:
    """One sequence at a time on any Llama-like or hybrid transformers model.

    Args:
        model: loaded with ``attn_implementation=ATTENTION_NAME`` (see `load`).
        tokenizer: its tokenizer.

    Raises:
        KvskimError: a layer with other attention: latent (MLA), linear, or with one projection for queries, keys and values.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        config = model.config.get_text_config()
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.num_layers
        self.window = [config.sliding_window if kind == "sliding_attention" else 0 for kind in kinds]
        self.sparse_layers = [i for i, w in enumerate(self.window) if not w]
        self.device = next(model.parameters()).device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.position = 0
        self.chooser: Policy | None = None
        self.prefilling = False
        self.query_positions: Tensor | None = None
        self.captured: dict[int, list[Tensor]] = {}
        self.observed: dict[int, Tensor] = {}
        """Last queries of the prompt by sparse layer, ``[Hq, n, D]``, multiplied by the softmax scale; ``n`` is at most `OBSERVED_QUERIES`."""
        self.scaling = 0.0
        self.softcap = 0.0
        reached = set()
        for module in model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "q_proj"):
                module.kvskim_eval = self
                reached.add(module.layer_idx)
        if getattr(config, "kv_lora_rank", None) or not reached.issuperset(range(self.num_layers)):
            raise KvskimError(
                f"models of the type {config.model_type!r} can't be evaluated: every layer must have attention with keys and values of its own and a "
                "projection q_proj, and this model has latent, linear or fused ones"
            )

    def reserve(self, tokens: int) -> None:
        """Forget everything and make room for ``tokens`` tokens."""
        dtype = next(self.model.parameters()).dtype
        shape = (self.num_kv_heads, tokens, self.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(self.num_layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.captured, self.observed = {}, {}

    @torch.no_grad()
    def forward(self, ids: Tensor, position: int, logits: int = 0) -> Tensor | None:
        """Run ``ids [n]`` at ``position``; logits ``[logits, vocabulary]`` of the last tokens in float32."""
        self.position = position
        positions = torch.arange(position, position + len(ids), device=self.device)[None]
        hidden = self.model.model(input_ids=ids[None].to(self.device), position_ids=positions, use_cache=False).last_hidden_state[0]
        if not logits:
            return None
        out: Tensor = self.model.lm_head(hidden[-logits:]).float()
        cap = getattr(self.config, "final_logit_softcapping", None)
        return out if not cap else cap * torch.tanh(out / cap)

    def prefill(self, ids: Tensor, chunk: int = 1024, query_stride: int = 8, progress: Callable[[int], None] | None = None) -> None:
        """Fill the store with full attention and keep every ``query_stride``-th query for calibration."""
        self.captured, self.observed = {i: [] for i in self.sparse_layers}, {}
        self.extend(ids, 0, len(ids), chunk, query_stride, progress)

    def extend(
        self, ids: Tensor, start: int, stop: int, chunk: int = 1024, query_stride: int = 8, progress: Callable[[int], None] | None = None
    ) -> None:
        """Go on with a prefill: the tokens ``ids[start:stop]``, with full attention, after ``start`` tokens in the store."""
        self.chooser, self.prefilling = None, True
        self.query_positions = torch.arange(start, stop, query_stride, device=self.device)
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            self.forward(ids[first:last], first)
            if progress:
                progress(last)
        self.query_positions, self.prefilling = None, False

    def calibration_queries(self, layer: int) -> Tensor:
        """Captured queries ``[Hq, n, D]``, multiplied by the softmax scale."""
        return torch.cat(self.captured[layer], 1) * self.scaling

    def decode(self, ids: Tensor, start: int, stop: int, chooser: Policy | None) -> Tensor:
        """Teacher-forced logits of the tokens ``ids[start:stop]``, float32 ``[stop - start, vocabulary]``."""
        self.chooser = chooser
        out = []
        blocks = single_tokens(start, stop) if chooser is not None and chooser.stateful else page_blocks(start, stop)
        for a, b in blocks:
            block = self.forward(ids[a:b], a, b - a)
            assert block is not None
            out.append(block)
        self.chooser = None
        return torch.cat(out)


def page_blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split ``[start, stop)`` at page boundaries."""
    while start < stop:
        end = min(stop, (start // PAGE_TOKENS + 1) * PAGE_TOKENS)
        yield start, end
        start = end


def single_tokens(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` one token at a time."""
    for position in range(start, stop):
        yield position, position + 1


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, scaling: float | None = None,
    softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:
    host = module.kvskim_eval
    layer: int = module.layer_idx  # type: ignore[assignment]
    assert isinstance(host, EvalModel)
    q, k, v = query[0], key[0], value[0]
    count, start = q.shape[1], host.position
    stop = start + count
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    host.scaling, host.softcap = scale, softcap or 0.0
    host.keys[layer][:, start:stop] = k
    host.values[layer][:, start:stop] = v
    if host.query_positions is not None and layer in host.captured:
        wanted = host.query_positions[(host.query_positions >= start) & (host.query_positions < stop)] - start
        host.captured[layer].append(q[:, wanted].clone())
    if host.prefilling and layer in host.captured:
        latest = q[:, -OBSERVED_QUERIES:] * scale
        earlier = host.observed.get(layer, latest[:, :0])
        host.observed[layer] = torch.cat([earlier, latest], 1)[:, -OBSERVED_QUERIES:]
    window = host.window[layer]
    first = max(0, start - window + 1) if window else 0
    keys, values = host.keys[layer][:, first:stop], host.values[layer][:, first:stop]
    rows = torch.arange(start, stop, device=q.device)[:, None]
    columns = torch.arange(first, stop, device=q.device)[None]
    mask = columns <= rows
    if window:
        mask &= rows - columns < window
    group = q.shape[0] // keys.shape[0]
    attended = mask[None, None]
    if host.chooser is not None and not window:
        scaled = (q.unflatten(0, (-1, group)) * scale).permute(2, 0, 1, 3)
        chosen = host.chooser.choose(layer, scaled, keys, start, mask)
        attended = (mask[:, None] & token_mask(chosen, stop)).transpose(0, 1)[:, None]  # [H, 1, N, L]
        keys, values = host.chooser.read_keys(layer, keys), host.chooser.read_values(layer, values)
    grouped = q.unflatten(0, (-1, group))
    if softcap:
        logits = torch.einsum("hgnd,hld->hgnl", grouped, keys) * scale
        logits = (softcap * torch.tanh(logits / softcap)).masked_fill(~attended, -torch.inf)
        out = torch.einsum("hgnl,hld->hgnd", logits.softmax(-1), values)
    else:
        out = F.scaled_dot_product_attention(
            grouped, keys[:, None].expand(-1, group, -1, -1), values[:, None].expand(-1, group, -1, -1), attn_mask=attended, scale=scale
        )
    return out.flatten(0, 1).transpose(0, 1)[None], None


def register_attention() -> None:
    """Make the attention function of this module known to transformers (idempotent)."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


def load(model_path: str, device: str = "cpu", dtype: torch.dtype = torch.float32, gguf_file: str | None = None) -> EvalModel:
    """Load a Hugging Face model directory (or a GGUF file in it) for evaluation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    register_attention()
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(model_path, **extra)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation=ATTENTION_NAME, **extra)
    placed: Any = model
    return EvalModel(placed.to(device).eval(), tokenizer)
