"""A Hugging Face model whose KV store is ours: prefill once with full attention, then decode many times with different page choices.

The transformers model is used for everything around attention. Tokens of one page are decoded together (teacher forcing), each query
choosing its own pages, so that an evaluation costs seconds instead of minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvskim.demo.model import correct_end_token, demo_model_file, quiet_transformers, reading_model, usable_device
from kvskim.errors import KvskimError
from kvskim.eval.policy import Policy, token_mask
from kvskim.layout import PAGE_TOKENS

ATTENTION_NAME = "kvskim-eval"


OBSERVED_QUERIES = 64
"""Last queries of a prompt that are kept for policies which choose by them."""


class Rows(Protocol):
    """Sequences that go through the layers side by side, after a prompt in the model's store."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float) -> Tensor:
        """Attention of one layer: ``query [R, Hq, n, D]``, ``key`` and ``value`` ``[R, H, n, D]``; the result is ``[R, n, Hq, D]``."""
        ...


@dataclass(frozen=True)
class Shape:
    """What an evaluation needs to know of a model. ``window``: of every layer, in tokens; 0 where it sees everything."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: tuple[int, ...]

    @property
    def sparse_layers(self) -> list[int]:
        """Layers that see everything: those that a selector can make sparse."""
        return [i for i, w in enumerate(self.window) if not w]


def shape_of(config: Any) -> Shape:
    """The shape that a text model's configuration describes."""
    layers: int = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    return Shape(
        layers, config.num_attention_heads, config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        tuple(config.sliding_window if kind == "sliding_attention" else 0 for kind in kinds),
    )


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
        shape = shape_of(config)
        self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim = shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.window, self.sparse_layers = list(shape.window), shape.sparse_layers
        self.device = next(model.parameters()).device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.position = 0
        self.chooser: Policy | None = None
        self.together: Rows | None = None
        """Set while tokens of several policies go through the layers as rows of a batch."""
        self.prefilling = False
        self.query_positions: Tensor | None = None
        self.captured: dict[int, list[Tensor]] = {}
        self.captured_positions: list[Tensor] = []
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
        self.captured, self.captured_positions, self.observed = {}, [], {}

    @torch.no_grad()
    def forward(self, ids: Tensor, position: int, logits: int = 0) -> Tensor | None:
        """Run ``ids [n]`` at ``position``; logits ``[logits, vocabulary]`` of the last tokens in float32."""
        self.position = position
        positions = torch.arange(position, position + len(ids), device=self.device)[None]
        hidden = self.model.model(input_ids=ids[None].to(self.device), position_ids=positions, use_cache=False).last_hidden_state[0]
        return self._logits(hidden[-logits:]) if logits else None

    @torch.no_grad()
    def forward_rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run tokens ``ids [R, n]`` of the rows of `together` at ``positions [R, n]``; float32 logits ``[R, n, vocabulary]``."""
        return self._logits(self.model.model(input_ids=ids.to(self.device), position_ids=positions, use_cache=False).last_hidden_state)

    def _logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.model.lm_head(hidden).float()
        cap = getattr(self.config, "final_logit_softcapping", None)
        return out if not cap else cap * torch.tanh(out / cap)

    def prefill(self, ids: Tensor, chunk: int = 1024, query_stride: int = 8, progress: Callable[[int], None] | None = None) -> None:
        """Fill the store with full attention and keep every ``query_stride``-th query for calibration."""
        self.captured, self.captured_positions, self.observed = {i: [] for i in self.sparse_layers}, [], {}
        self.extend(ids, 0, len(ids), chunk, query_stride, progress)

    def extend(
        self, ids: Tensor, start: int, stop: int, chunk: int = 1024, query_stride: int = 8, progress: Callable[[int], None] | None = None
    ) -> None:
        """Go on with a prefill: the tokens ``ids[start:stop]``, with full attention, after ``start`` tokens in the store."""
        self.chooser, self.prefilling = None, True
        self.query_positions = torch.arange(start, stop, query_stride, device=self.device)
        self.captured_positions.append(self.query_positions)
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            self.forward(ids[first:last], first)
            if progress:
                progress(last)
        self.query_positions, self.prefilling = None, False

    def calibration_queries(self, layer: int) -> Tensor:
        """Captured queries ``[Hq, n, D]``, multiplied by the softmax scale."""
        return torch.cat(self.captured[layer], 1) * self.scaling

    def calibration_positions(self) -> Tensor:
        """Positions ``[n]`` of the captured queries."""
        return torch.cat(self.captured_positions)

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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    host.scaling, host.softcap = scale, softcap or 0.0
    if host.together is not None:
        return host.together.attend(layer, query, key, value, scale, host.softcap), None
    q, k, v = query[0], key[0], value[0]
    count, start = q.shape[1], host.position
    stop = start + count
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
    if softcap or count <= PAGE_TOKENS:
        # Also for few queries: a fused kernel has one program for each head then, and a GPU has a hundred times as many processors.
        # Products of two bfloat16 numbers are summed in float32, as attention kernels do.
        logits = torch.einsum("hgnd,hld->hgnl", grouped.float(), keys.float()) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        weights = logits.masked_fill(~attended, -torch.inf).softmax(-1).to(values.dtype)
        out = torch.einsum("hgnl,hld->hgnd", weights, values)
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


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_named(source: str, device: str = "cpu", dtype: str = "float32") -> EvalModel:
    """The model that a command names: a Hugging Face directory, a .gguf file, or ``demo``, on ``cpu``, ``cuda`` or one of several GPUs.

    Raises:
        KvskimError: there is no such model, device or dtype, or the files hold none.
    """
    if dtype not in DTYPES:
        raise KvskimError(f"--dtype is {dtype!r}; it must be float32, bfloat16 or float16")
    place = usable_device(device)
    if place.index is not None:
        # Also what a library allocates without being asked where belongs on this GPU.
        torch.cuda.set_device(place)
    path = demo_model_file() if source == "demo" else Path(source)
    if not path.exists():
        raise KvskimError(f"there is no model at {source}: give a Hugging Face model directory, a .gguf file, or 'demo'")
    with reading_model(source), quiet_transformers():
        if path.is_file():
            return load(str(path.parent), device, DTYPES[dtype], gguf_file=path.name)
        return load(str(path), device, DTYPES[dtype])


def load(model_path: str, device: str = "cpu", dtype: torch.dtype = torch.float32, gguf_file: str | None = None) -> EvalModel:
    """Load a Hugging Face model directory (or a GGUF file in it) for evaluation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    register_attention()
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(model_path, **extra)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation=ATTENTION_NAME, **extra)
    if extra:
        correct_end_token(tokenizer, model.config)
    placed: Any = model
    return EvalModel(placed.to(device).eval(), tokenizer)
