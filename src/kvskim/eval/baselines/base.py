"""What the baselines share: budget and options, and the few operations on attention weights that most of them need.

A baseline is a `Policy` at a budget of tokens. Shapes as there: ``N`` queries, ``H`` kv heads, ``G`` query heads per kv head, ``L`` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvskim.errors import UnsupportedError
from kvskim.eval.policy import CACHE_ELEMENT_BYTES, Policy
from kvskim.layout import PAGE_TOKENS
from kvskim.rotary import Rotary

if TYPE_CHECKING:
    from kvskim.eval.model import EvalModel

LEAST_BUDGET = 3 * PAGE_TOKENS
"""Tokens: fewer leave no room beside the newest tokens and the attention sink."""


@dataclass(frozen=True)
class Option:
    """One option of a baseline: a number between ``least`` and ``most``, or a switch (a default that is true or false)."""

    default: int | float | bool
    meaning: str
    least: float = 0.0
    most: float = float("inf")
    odd: bool = False

    def problem(self, value: object) -> str:
        """What ``value`` must be instead, or nothing when it is right."""
        if isinstance(self.default, bool):
            return "" if isinstance(value, bool) else "true or false"
        whole = isinstance(self.default, int)
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if number and self.least <= value <= self.most and not (self.odd and value % 2 == 0):  # type: ignore[operator]
            return ""
        wanted = ("an odd whole number" if self.odd else "a whole number") if whole else "a number"
        return f"{wanted} from {self.least:g} to {self.most:g}" if self.most != float("inf") else f"{wanted} of at least {self.least:g}"


class Baseline(Policy):
    """A published method at a budget.

    Args:
        budget_tokens: tokens per kv head that it may keep or attend, a multiple of 16; a selector at ``budget_tokens / 16`` pages is its match.
        measure: also measure the exact mass that is covered.
        options: by name, see the class's ``known_options``.

    Raises:
        ValueError: a budget or an option that it cannot take; the sentence names it and what is allowed.
    """

    name: ClassVar[str]
    known_options: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, budget_tokens: int, measure: bool = False, **options: Any) -> None:
        super().__init__(measure)
        if budget_tokens < LEAST_BUDGET or budget_tokens % PAGE_TOKENS:
            raise ValueError(f"{self.name}: the budget is {budget_tokens} tokens; it must be a multiple of {PAGE_TOKENS} and at least {LEAST_BUDGET}")
        for option, value in options.items():
            if option not in self.known_options:
                known = ", ".join(self.known_options) or "none"
                raise ValueError(f"{self.name} has no option {option!r}; its options: {known}")
            problem = self.known_options[option].problem(value)
            if problem:
                raise ValueError(f"{self.name}: {option} is {value!r}; it must be {problem}")
        self.budget_tokens = budget_tokens
        self.options: dict[str, Any] = {name: option.default for name, option in self.known_options.items()} | options
        self.tokens = 0
        """Length of the prompt."""
        self.prepared: dict[int, Any] = {}
        """By layer, what was made of the prompt and does not depend on the budget."""

    def prepare(self, model: EvalModel, tokens: int) -> None:
        if self.prepared and tokens != self.tokens:
            raise ValueError(f"{self.name} shares what was prepared for a prompt of {self.tokens} tokens; this prompt has {tokens}")
        self.tokens = tokens
        for layer in model.sparse_layers:
            if layer not in self.prepared:
                self.prepared[layer] = self.prepare_layer(model, layer, tokens)
        self.restart()

    def prepare_layer(self, model: EvalModel, layer: int, tokens: int) -> Any:
        """What one layer keeps in ``prepared``."""
        raise NotImplementedError

    def share(self, other: Policy) -> None:
        """Take over what ``other``, the same method with the same options, prepared for this prompt at another budget."""
        if type(other) is not type(self) or not isinstance(other, Baseline) or other.options != self.options:
            raise ValueError(f"{self.name} can share only with another {self.name} that has the same options")
        self.prepared, self.tokens = dict(other.prepared), other.tokens


def observed_queries(model: EvalModel, layer: int, window: int) -> Tensor:
    """The last ``window`` queries of the prompt (fewer if the prompt is shorter), ``[n, H, G, D]``, multiplied by the softmax scale."""
    return model.observed[layer].unflatten(0, (model.num_kv_heads, -1)).permute(2, 0, 1, 3)[-window:]


def attention_weights(queries: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
    """``softmax(q . k)`` in float32, ``[N, H, G, L]``.

    Args:
        queries: ``[N, H, G, D]``, multiplied by the softmax scale.
        keys: ``[H, L, D]``.
        allowed: bool, broadcasts to ``[N, H, L]``.
    """
    logits = torch.einsum("nhgd,hld->nhgl", queries.float(), keys.float())
    return logits.masked_fill(~allowed[:, :, None], -torch.inf).softmax(-1)


def prompt_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Causal attention ``[n, H, G, L]`` of the last ``n`` queries ``[n, H, G, D]`` of a prompt over its keys ``[H, L, D]``."""
    count, tokens = queries.shape[0], keys.shape[1]
    rows = torch.arange(tokens - count, tokens, device=keys.device)[:, None]
    return attention_weights(queries, keys, (torch.arange(tokens, device=keys.device) <= rows)[:, None])


def pooled(scores: Tensor, kernel: int) -> Tensor:
    """Largest score within ``kernel`` (odd) neighbouring tokens, ``[H, L]``: neighbours of an important token are kept with it."""
    return F.max_pool1d(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]


def top_mask(scores: Tensor, count: int, later_first: bool = False) -> Tensor:
    """Exactly ``min(count, T)`` highest of ``scores [..., T]`` as bool; equal scores: the earlier first, or the later."""
    source = scores.flip(-1) if later_first else scores
    best = torch.sort(source, dim=-1, descending=True, stable=True).indices[..., : max(0, count)]
    mask = torch.zeros_like(source, dtype=torch.bool).scatter_(-1, best, True)
    return mask.flip(-1) if later_first else mask


def kept_positions(mask: Tensor) -> Tensor:
    """Ascending positions ``[H, count]`` of ``mask [H, T]``, which holds equally many tokens for every kv head."""
    return mask.nonzero()[:, 1].view(mask.shape[0], -1)


def gathered(keys: Tensor, positions: Tensor) -> Tensor:
    """Rows ``positions [H, count]`` of ``keys [H, L, D]``."""
    return keys.gather(1, positions[..., None].expand(-1, -1, keys.shape[2]))


def key_bytes(tokens: int, head_dim: int) -> float:
    """Bytes of ``tokens`` keys of one kv head in the cache."""
    return float(tokens * head_dim * CACHE_ELEMENT_BYTES)


def layer_rotary(model: EvalModel, layer: int, wanted_by: str) -> Rotary:
    """Rotation speeds of a layer; UnsupportedError where they are not certain."""
    from kvskim.engines.transformers_layer import rotary_of

    kinds = getattr(model.config, "layer_types", None)
    rotary = rotary_of(model.config, kinds[layer] if kinds else None)
    if rotary is None:
        kind = getattr(model.config, "model_type", "?")
        raise UnsupportedError(f"{wanted_by} undoes the rotary embedding, and that of model type {kind!r} is not known here")
    return rotary
