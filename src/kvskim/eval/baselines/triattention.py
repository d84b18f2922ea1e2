"""TriAttention: evict while decoding by what the average query would attend at future distances.

W. Mao et al., "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression", arXiv:2604.04921.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvskim.eval.baselines.base import layer_rotary, top_mask
from kvskim.eval.baselines.evictor import Evictor
from kvskim.rotary import Rotary

if TYPE_CHECKING:
    from kvskim.eval.model import EvalModel

OFFSETS = tuple(2**power for power in range(17))
"""Future distances over which a score is averaged: 1, 2, 4, ... 65536 tokens."""


@dataclass(frozen=True)
class QueryCentre:
    """``mean`` ``[H, G, D]``, the mean query before the rotary embedding; ``spread`` ``[H, G, D / 2]``, per rotated pair of channels the mean length
    of the query less the length of the mean query; ``rotary`` of the layer. Float32."""

    mean: Tensor
    spread: Tensor
    rotary: Rotary


def pair_lengths(x: Tensor) -> Tensor:
    """Lengths ``[..., D / 2]`` of the pairs of channels ``(i, i + D / 2)`` that the rotary embedding turns."""
    first, second = x.float().chunk(2, -1)
    return torch.hypot(first, second)


def query_centre(queries: Tensor, positions: Tensor, rotary: Rotary, kv_heads: int) -> QueryCentre:
    """The centre of ``queries [Hq, n, D]``, cached after the rotary embedding at ``positions [n]``."""
    plain = rotary.rotate(queries.float(), -positions)
    mean = plain.mean(1)
    spread = pair_lengths(plain).mean(1) - pair_lengths(mean)
    return QueryCentre(mean.unflatten(0, (kv_heads, -1)), spread.unflatten(0, (kv_heads, -1)), rotary)


def centre_scores(centre: QueryCentre, keys: Tensor, step: int) -> Tensor:
    """Score ``[H, G, L]`` of ``keys [H, L, D]`` (after the rotary embedding) for queries from ``step`` on.

    The paper's sum over frequencies ``f``, ``|E q_f| |k_f| cos(w_f (step + o - p) + phase)`` averaged over the offsets ``o``, is the product of
    the cached key with the mean query rotated to ``step + o``, so the rotated mean queries are averaged first. To it is added
    ``sum over f of (E |q_f| - |E q_f|) |k_f|``, which weighs keys by their length where queries are not concentrated.
    """
    positions = step + torch.tensor(OFFSETS, device=keys.device)
    future = centre.rotary.rotate(centre.mean[..., None, :].expand(*centre.mean.shape[:2], len(OFFSETS), -1), positions).mean(2)
    by_distance = torch.einsum("hgd,hld->hgl", future, keys.float())
    return by_distance + torch.einsum("hgf,hlf->hgl", centre.spread, pair_lengths(keys))


class TriAttention(Evictor):
    """Keeps the last ``interval`` tokens and the highest scores of the others. The scores of a query head are brought to mean 0 and deviation 1
    over the tokens it still has; a kv head takes the largest of its group.

    Where it deviates: the mean query comes from the prompt itself, about every eighth token (the paper's from other text, once per model); the
    cache is cut every ``interval`` tokens within the budget (the paper's every 128); a prompt longer than the budget is cut when decoding
    starts, where the released code may protect prompts. Models whose rotary embedding is not known here are refused.
    """

    name = "triattention"

    def prepare_layer(self, model: EvalModel, layer: int, tokens: int) -> QueryCentre:
        queries = model.calibration_queries(layer)
        return query_centre(queries, model.calibration_positions(), layer_rotary(model, layer, self.name), model.num_kv_heads)

    def keep(self, layer: int, keys: Tensor, alive: Tensor, count: int) -> Tensor:
        step, recent = keys.shape[1], self.options["interval"]
        # Every kv head has equally many tokens, so the moments over those alive are sums over a mask.
        scores, held = centre_scores(self.prepared[layer], keys, step), alive[:, None]
        number = alive.sum(-1)[:, None, None]
        scores = scores - (scores * held).sum(-1, keepdim=True) / number
        scores = scores / ((scores.square() * held).sum(-1, keepdim=True) / number).sqrt().clamp(min=1e-12)
        best = scores.amax(1).masked_fill(~alive, -torch.inf)[:, : step - recent]
        return torch.cat([top_mask(best, count - recent), alive[:, step - recent :]], 1)
