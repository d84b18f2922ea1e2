"""SnapKV: the last queries of the prompt vote which of its tokens are kept.

Y. Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvskim.eval.baselines.base import Baseline, Option, observed_queries, pooled, prompt_weights, top_mask
from kvskim.layout import PAGE_TOKENS

if TYPE_CHECKING:
    from kvskim.eval.model import EvalModel


def votes(queries: Tensor, keys: Tensor, kernel: int) -> Tensor:
    """Score ``[H, L]`` of every prompt token.

    ``v(t) = sum over queries and the group's query heads of softmax(q . k)(t)``, then the largest ``v`` within ``kernel`` tokens. The
    queries' own tokens neither vote for each other nor lend their votes to their neighbours: they are kept anyway.

    Args:
        queries: the last ``n`` queries of the prompt, ``[n, H, G, D]``, scaled.
        keys: ``[H, L, D]`` of the whole prompt.
    """
    older = keys.shape[1] - queries.shape[0]
    given = prompt_weights(queries, keys).sum((0, 2))
    given[:, older:] = 0
    return pooled(given, kernel)


def kept_of_prompt(scores: Tensor, count: int, window: int) -> Tensor:
    """Bool ``[H, L]``: the last ``window`` tokens, and the highest ``scores [H, L]`` of the others, ``count`` tokens in all."""
    kept = top_mask(scores[:, : scores.shape[1] - window], count - window)
    return torch.cat([kept, kept.new_ones(kept.shape[0], window)], 1)


def kept_window(window: int, budget_tokens: int, tokens: int) -> int:
    """Tokens at the end of the prompt that are kept without a vote: the window, but no more than a quarter of the budget above one page."""
    return min(window, max(PAGE_TOKENS, budget_tokens // 4), tokens)


class SnapKV(Baseline):
    """Eviction once, at the end of the prompt: ``budget_tokens`` of its tokens are kept, the last ``window`` among them. Newly decoded tokens
    are all kept on top of the budget, as in the paper, and count as attended.

    Where it deviates: votes are summed over the query heads of a group, so that a kv head keeps one set of tokens (the paper has one
    per query head, which multiplies a grouped cache); with budgets under four windows the part kept without a vote shrinks to a
    quarter, so that there is something to vote on. What decides is the end of the prompt: a question asked later was not seen.
    """

    name = "snapkv"
    known_options: ClassVar[Mapping[str, Option]] = {
        "window": Option(32, "queries at the end of the prompt that vote", 1, 64),
        "kernel": Option(7, "tokens that a vote also counts for", 1, odd=True),
    }

    def prepare_layer(self, model: EvalModel, layer: int, tokens: int) -> Tensor:
        return votes(observed_queries(model, layer, self.options["window"]), model.keys[layer][:, :tokens], self.options["kernel"])

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        scores: Tensor = self.prepared[layer]
        kept = kept_of_prompt(scores, self.budget_tokens, kept_window(self.options["window"], self.budget_tokens, self.tokens))
        visible = torch.cat([kept, kept.new_ones(kept.shape[0], keys.shape[1] - self.tokens)], 1)
        selected = visible.expand(queries.shape[0], -1, -1)
        self.record(layer, queries, keys, causal, selected, 0.0)
        return selected
