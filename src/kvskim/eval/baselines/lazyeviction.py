"""LazyEviction: evict late, and keep tokens that come back at intervals.

H. Zhang et al., "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient Long Reasoning", arXiv:2506.15969.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvskim.eval.baselines.base import Option, attention_weights, observed_queries, prompt_weights, top_mask
from kvskim.eval.baselines.evictor import INTERVAL, Evictor

if TYPE_CHECKING:
    from kvskim.eval.model import EvalModel


@dataclass(frozen=True)
class Recurrence:
    """Per token ``[H, T]``, float32: ``last``, the step at which it was last important; ``longest``, the longest interval between two such
    steps, 0 until it was important once. Steps are positions."""

    last: Tensor
    longest: Tensor

    def seen(self, weights: Tensor, step: int, least: float) -> Recurrence:
        """After the query of ``step`` gave every token the attention ``weights [H, T]``; at least ``least`` makes a token important."""
        important = weights >= least
        interval = torch.where(important, step - self.last, 0.0)
        return Recurrence(torch.where(important, float(step), self.last), torch.maximum(self.longest, interval))

    def with_token(self, step: int) -> Recurrence:
        """With the token of ``step`` behind the others, as if it had been important one step earlier."""
        last = self.last.new_full((self.last.shape[0], 1), step - 1)
        return Recurrence(torch.cat([self.last, last], 1), torch.cat([self.longest, torch.zeros_like(last)], 1))

    def scores(self, step: int) -> Tensor:
        """Likelihood of becoming important again, ``[H, T]``.

        ``2 s(-1 - (step - last) / longest) + 2 s(1 - longest)`` with the logistic function ``s``, the second term only where ``longest > 0``.
        """
        recent = 2 * torch.sigmoid(-1 - (step - self.last) / (self.longest + 1e-5))
        return recent + torch.where(self.longest > 0, 2 * torch.sigmoid(1 - self.longest), 0.0)


class LazyEviction(Evictor):
    """Keeps the last ``interval`` tokens and those of the others that are likeliest to recur (`Recurrence`); equally likely: the later.

    Where it deviates: a token is important to a kv head when any query head of its group gives it at least ``least_weight`` (the paper tracks
    every query head); the observation window is ``interval`` tokens within the budget; a prompt longer than the budget is cut when
    decoding starts, from what its own last ``observed`` queries attended, because the paper observes decoding only.
    """

    name = "lazyeviction"
    known_options: ClassVar[Mapping[str, Option]] = {
        "interval": INTERVAL,
        "least_weight": Option(0.0001, "attention weight from which a token counts as important", 0.0, 1.0),
        "observed": Option(64, "queries at the end of the prompt that are observed", 1, 64),
    }

    def prepare_layer(self, model: EvalModel, layer: int, tokens: int) -> Recurrence:
        weights = prompt_weights(observed_queries(model, layer, self.options["observed"]), model.keys[layer][:, :tokens]).amax(2)
        first = tokens - weights.shape[0]
        last = weights.new_full((weights.shape[1], first), first - 1)
        record = Recurrence(last, torch.zeros_like(last))
        for step in range(first, tokens):
            record = record.with_token(step).seen(weights[step - first, :, : step + 1], step, self.options["least_weight"])
        return record

    def start(self, prepared: Recurrence) -> Recurrence:
        return prepared

    def keep(self, layer: int, keys: Tensor, alive: Tensor, count: int) -> Tensor:
        record: Recurrence = self.state[layer]
        interval = self.options["interval"]
        older = keys.shape[1] - interval
        scores = record.scores(keys.shape[1])[:, :older].masked_fill(~alive[:, :older], -torch.inf)
        kept = top_mask(scores, count - interval, later_first=True)
        return torch.cat([kept, alive[:, older:]], 1)

    def attended(self, layer: int, queries: Tensor, keys: Tensor, alive: Tensor, position: int) -> None:
        weights = attention_weights(queries, keys, alive[None]).amax(2)[0]
        self.state[layer] = self.state[layer].with_token(position).seen(weights, position, self.options["least_weight"])
