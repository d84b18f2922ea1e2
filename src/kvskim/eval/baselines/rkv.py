"""R-KV: evict while decoding what is unimportant or says again what a later token says.

Z. Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv:2505.24133.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvskim.eval.baselines.base import Option, gathered, kept_positions, observed_queries, pooled, top_mask
from kvskim.eval.baselines.evictor import INTERVAL, Evictor

if TYPE_CHECKING:
    from kvskim.eval.model import EvalModel

ROW_CHUNK = 128
"""Rows of the similarity matrix that exist at one time."""


def importance(queries: Tensor, keys: Tensor, kernel: int) -> Tensor:
    """Attention ``[H, S]`` that ``keys [H, S, D]`` get of the observing ``queries [n, H, G, D]`` (scaled), all of which are later.

    Logits of a group are replaced by their largest, softmax over the tokens, mean over the queries, largest within ``kernel`` tokens.
    """
    logits = torch.einsum("nhgd,hld->nhgl", queries.float(), keys.float()).amax(2)
    return pooled(logits.softmax(-1).mean(0), kernel)


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    """How much each of ``keys [H, S, D]`` repeats others, ``[H, S]``, a distribution over the tokens.

    Cosine similarities ``c(i, j)``; for every ``i`` the latest ``j`` with ``c(i, j) > threshold``, or ``i`` itself if it is later, is forgiven
    (zeroed), so that of several like tokens the latest is kept; ``c(i, i)`` is zeroed; mean over ``i``; softmax over ``j``.
    """
    unit = F.normalize(keys.float(), dim=-1)
    tokens = keys.shape[1]
    # 32 bits: on a GPU this function takes as long as it takes to move these matrices.
    column = torch.arange(tokens, device=keys.device, dtype=torch.int32)
    total = torch.zeros(keys.shape[:2], device=keys.device)
    for first in range(0, tokens, ROW_CHUNK):
        rows = slice(first, first + ROW_CHUNK)
        like = torch.einsum("hid,hjd->hij", unit[:, rows], unit)
        itself = column[rows, None] == column
        latest = torch.where((like > threshold) | itself, column, -1).amax(-1, keepdim=True)
        like.masked_fill_((column == latest) | itself, 0.0)
        total += like.sum(1)
    return (total / tokens).softmax(-1)


def cut_scores(queries: Tensor, keys: Tensor, kernel: int, threshold: float, mix: float) -> Tensor:
    """``Z = mix importance - (1 - mix) redundancy`` of the tokens before the observing ones: ``[H, S - n]`` for ``keys [H, S, D]``."""
    older = keys.shape[1] - queries.shape[0]
    return mix * importance(queries, keys[:, :older], kernel) - (1 - mix) * redundancy(keys, threshold)[:, :older]


class RKV(Evictor):
    """Keeps the last ``window`` tokens and the highest ``Z`` (`cut_scores`) of the others; a kv head of a group decides by the largest logit of its
    query heads.

    Where it deviates: the paper's cache grows by a buffer of 128 tokens above its budget between evictions; here the buffer is
    ``interval`` tokens within the budget. The paper compresses what was decoded after short prompts; here a prompt longer than the
    budget is cut the same way when decoding starts, by its own last queries. The released code leaves a token out when it seeks the
    latest of its likes, so that a pair of equal tokens is forgiven altogether; here the earlier of a pair is redundant, as the paper intends.
    """

    name = "rkv"
    known_options: ClassVar[Mapping[str, Option]] = {
        "interval": INTERVAL,
        "window": Option(8, "last queries that observe; their tokens are kept", 1, 16),
        "kernel": Option(7, "tokens that an observation also counts for", 1, odd=True),
        "threshold": Option(0.5, "cosine similarity from which two tokens are alike", 0.0, 1.0),
        "mix": Option(0.1, "weight of importance against redundancy", 0.0, 1.0),
    }

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        return cut_scores(queries, keys, self.options["kernel"], self.options["threshold"], self.options["mix"])

    def prepare_layer(self, model: EvalModel, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        queries = observed_queries(model, layer, self.options["window"])
        return queries, self._scores(queries, model.keys[layer][:, :tokens])

    def start(self, prepared: tuple[Tensor, Tensor]) -> Tensor:
        return prepared[0]

    def keep(self, layer: int, keys: Tensor, alive: Tensor, count: int) -> Tensor:
        queries: Tensor = self.state[layer]
        window = queries.shape[0]
        whole_prompt = keys.shape[1] == self.tokens
        positions = kept_positions(alive)
        scores = self.prepared[layer][1] if whole_prompt else self._scores(queries, gathered(keys, positions))
        kept = top_mask(scores, count - window)
        kept = torch.cat([kept, kept.new_ones(kept.shape[0], window)], 1)
        return torch.zeros_like(alive).scatter_(1, positions, kept)

    def attended(self, layer: int, queries: Tensor, keys: Tensor, alive: Tensor, position: int) -> None:
        self.state[layer] = torch.cat([self.state[layer], queries])[-self.options["window"] :]
