"""RocketKV: evict the prompt coarsely and for good, then choose finely among the survivors for every query.

P. Behnam et al., "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression", arXiv:2502.14051.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvskim.eval.baselines.base import Baseline, Option, gathered, kept_positions, key_bytes, observed_queries, top_mask
from kvskim.eval.baselines.snapkv import kept_of_prompt, kept_window, votes
from kvskim.layout import PAGE_TOKENS

if TYPE_CHECKING:
    from kvskim.eval.model import EvalModel


def split(tokens: int, budget_tokens: int) -> tuple[int, float]:
    """How the compression is divided between the two stages.

    ``c = tokens / budget``, ``r = min(0.2 + 0.06 log2 c, 0.8)``: the first stage keeps ``tokens / c^r``; the second, which must compress by
    another ``c^(1 - r)``, divides that evenly between tokens per page and channels per head.

    Returns:
        Tokens that the first stage keeps, and the factor of each half of the second.
    """
    ratio = max(1.0, tokens / budget_tokens)
    share = min(0.2 + 0.06 * math.log2(ratio), 0.8)
    kept = min(tokens, max(budget_tokens, round(tokens / ratio**share)))
    return kept, math.sqrt(max(1.0, ratio ** (1 - share)))


def page_scores(queries: Tensor, keys: Tensor, page: int, channels: int) -> Tensor:
    """Estimated attention ``[N, H, pages]``, summed over the group's query heads.

    Per page and channel the largest and the smallest key are known. A query reads the ``channels`` channels where the sum of ``|q|`` over the
    group is largest, the largest key where the group's summed ``q`` is positive and else the smallest, so that one read serves all
    query heads of the group. Logits of few channels are too small: they are divided by the root of the share of ``|q|`` that was read.

    Args:
        queries: ``[N, H, G, D]``, scaled.
        keys: ``[H, S, D]`` of the survivors.
        page: tokens per page; the last page may have fewer.
        channels: of ``D``, at least 1.
    """
    survivors, last = keys.shape[1], -keys.shape[1] % page
    high = F.pad(keys.float(), (0, 0, 0, last), value=-torch.inf).unflatten(1, (-1, page)).amax(2)
    low = F.pad(keys.float(), (0, 0, 0, last), value=torch.inf).unflatten(1, (-1, page)).amin(2)
    assert high.shape[1] == -(-survivors // page)
    wide = queries.float()
    read = top_mask(wide.abs().sum(2), channels)
    upward = wide.sum(2) >= 0
    logits = torch.einsum("nhgd,hpd->nhgp", wide * (read & upward)[:, :, None], high)
    logits += torch.einsum("nhgd,hpd->nhgp", wide * (read & ~upward)[:, :, None], low)
    share = (wide * read[:, :, None]).abs().sum(-1, keepdim=True) / wide.abs().sum(-1, keepdim=True).clamp(min=1e-30)
    return (logits / share.sqrt().clamp(min=1e-15)).softmax(-1).sum(2)


class RocketKV(Baseline):
    """First stage: SnapKV's vote with a wide pool keeps more of the prompt than the budget (`split`). Second stage: every query attends the
    ``budget_tokens`` most promising survivors (`page_scores`), newly decoded tokens being survivors too.

    Where it deviates: the page of the newest tokens is always attended, within the budget, as by the other methods here; the two
    factors of the second stage are rounded to whole tokens and channels; keys behind the page summaries are counted as bytes read in
    the cache's number format. The variant for several turns, which evicts nothing, is not built.
    """

    name = "rocketkv"
    known_options: ClassVar[Mapping[str, Option]] = {
        "window": Option(32, "queries at the end of the prompt that vote in the first stage", PAGE_TOKENS, 64),
        "kernel": Option(63, "tokens that a vote also counts for", 1, odd=True),
    }

    def prepare_layer(self, model: EvalModel, layer: int, tokens: int) -> Tensor:
        return votes(observed_queries(model, layer, self.options["window"]), model.keys[layer][:, :tokens], self.options["kernel"])

    def restart(self) -> None:
        kept, self.factor = split(self.tokens, self.budget_tokens)
        # At least one page of the window is kept, so that the heads have equally many survivors before the newest page, wherever that starts.
        window = kept_window(self.options["window"], self.budget_tokens, self.tokens)
        self.survivors = {layer: kept_positions(kept_of_prompt(scores, kept, window)) for layer, scores in self.prepared.items()}

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        newest = position // PAGE_TOKENS * PAGE_TOKENS
        prompt = self.survivors[layer]
        older = prompt[:, : prompt.shape[1] - max(0, self.tokens - newest)]
        decoded = torch.arange(self.tokens, max(self.tokens, newest), device=keys.device).expand(older.shape[0], -1)
        older = torch.cat([older, decoded], 1)
        selected = torch.zeros(*queries.shape[:2], keys.shape[1], dtype=torch.bool, device=keys.device)
        selected[..., newest:] = True
        room, side_bytes = self.budget_tokens - PAGE_TOKENS, 0.0
        where = older.expand(queries.shape[0], -1, -1)
        if older.shape[1] <= room:
            selected.scatter_(2, where, True)
        else:
            page, channels = max(1, round(self.factor)), max(1, round(keys.shape[2] / self.factor))
            scores = page_scores(queries, gathered(keys, older), page, channels)
            side_bytes = key_bytes(scores.shape[2], channels)
            selected.scatter_(2, where, top_mask(scores.repeat_interleave(page, -1)[..., : older.shape[1]], room))
        self.record(layer, queries, keys, causal, selected, side_bytes)
        return selected
