"""Page choice by a selector and a rule inside `EvalModel`, with the statistics that an evaluation reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.rules import RuleParameters, apply_rule, combine
from kvskim.selectors.base import Selector


def page_log_mass(queries: Tensor, keys: Tensor, causal: Tensor) -> Tensor:
    """Exact page log-masses ``[N, H, P, G]`` of ``queries [N, H, G, D]`` (scaled) over ``keys [H, L, D]``, ``causal`` bool ``[N, L]``."""
    logits = torch.einsum("nhgd,hld->nhgl", queries.float(), keys.float()).masked_fill(~causal[:, None, None], -torch.inf)
    pages = ceil_div(keys.shape[1], PAGE_TOKENS)
    logits = torch.nn.functional.pad(logits, (0, pages * PAGE_TOKENS - keys.shape[1]), value=-torch.inf)
    return logits.unflatten(-1, (pages, PAGE_TOKENS)).logsumexp(-1).transpose(2, 3)


@dataclass
class PolicyStatistics:
    """Sums over all (layer, query, kv head) of one run."""

    rows: int = 0
    pages: float = 0.0
    total_pages: float = 0.0
    covered: dict[int, list[Tensor]] = field(default_factory=dict)
    """Exact covered mass ``[N, H, G]`` of every block, by layer."""

    @property
    def mean_pages(self) -> float:
        return self.pages / max(1, self.rows)

    @property
    def share(self) -> float:
        return self.pages / max(1.0, self.total_pages)

    @property
    def mean_covered(self) -> float:
        values = [torch.cat(v).mean() for v in self.covered.values()]
        return float(torch.stack(values).mean()) if values else 1.0


class SelectorPolicy:
    """A `PageChooser`: records of the prefix are made once; records of pages that decoding completes, from the keys the run itself made."""

    def __init__(
        self, selector: Selector, tables: dict[int, Any], parameters: RuleParameters, sink_pages: int = 1, window_pages: int = 1,
        measure: bool = True,
    ) -> None:
        self.selector, self.tables, self.parameters = selector, tables, parameters
        self.sink_pages, self.window_pages, self.measure = sink_pages, window_pages, measure
        self.prefix: dict[int, Tensor] = {}
        self.added: dict[int, list[Tensor]] = {}
        self.statistics = PolicyStatistics()

    def restart(self) -> None:
        """Forget the records of pages completed while decoding; keep those of the prefix."""
        self.added = {}

    def records(self, layer: int, keys: Tensor, complete: int) -> Tensor:
        """Records of the first ``complete`` pages; pages already encoded are not encoded again."""
        if layer not in self.prefix:
            self.prefix[layer] = self._encode(layer, keys, 0, complete)
        added = self.added.setdefault(layer, [])
        have = self.prefix[layer].shape[0] + sum(a.shape[0] for a in added)
        if have < complete:
            added.append(self._encode(layer, keys, have, complete))
        return torch.cat([self.prefix[layer], *added])[:complete]

    def _encode(self, layer: int, keys: Tensor, first: int, last: int) -> Tensor:
        pages = keys[:, first * PAGE_TOKENS : last * PAGE_TOKENS].unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
        return self.selector.encode(pages, self.tables[layer], self._positions(first, last, keys))

    def _positions(self, first: int, last: int, keys: Tensor) -> Tensor:
        return torch.arange(first, last, device=keys.device) * PAGE_TOKENS

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        total = ceil_div(keys.shape[1], PAGE_TOKENS)
        complete = position // PAGE_TOKENS  # pages before the one that the block lies in
        forced = torch.zeros(total, dtype=torch.bool, device=keys.device)
        forced[: self.sink_pages] = True
        forced[total - self.window_pages :] = True
        first, last = self.sink_pages, total - self.window_pages
        selected = forced.expand(queries.shape[0], queries.shape[1], -1).clone()
        if last > first:
            records = self.records(layer, keys, complete)[first:last]
            scores = self.selector.score(queries, records, self.tables[layer], self._positions(first, last, keys))
            tokens = forced.repeat_interleave(PAGE_TOKENS)[: keys.shape[1]]
            logits = torch.einsum("nhgd,hld->nhgl", queries.float(), keys[:, tokens].float())
            forced_mass = logits.masked_fill(~causal[:, None, None, tokens], -torch.inf).logsumexp(-1)
            key, mass, share = combine(scores, torch.zeros_like(forced_mass), forced_mass, self.parameters.combine)
            selected[..., first:last] = apply_rule(self.parameters, key, mass, share, total, self.sink_pages, self.window_pages)
        statistics = self.statistics
        statistics.rows += selected.shape[0] * selected.shape[1]
        statistics.pages += float(selected.sum())
        statistics.total_pages += float(selected.numel())
        if self.measure:
            exact = page_log_mass(queries, keys, causal)
            covered = (exact.softmax(2) * selected[..., None]).sum(2)
            statistics.covered.setdefault(layer, []).append(covered)
        return selected
