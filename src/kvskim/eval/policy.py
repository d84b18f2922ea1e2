"""Page choice inside `EvalModel`: what every method offers, the choice by a selector and a rule, and the statistics an evaluation reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.rules import RuleParameters, apply_rule, combine
from kvskim.rules.parameters import DEFAULT_WINDOW_PAGES
from kvskim.selectors.base import Selector

if TYPE_CHECKING:
    from kvskim.eval.model import EvalModel

CACHE_ELEMENT_BYTES = 2
"""Bytes are counted as if the cache were bfloat16, whatever the evaluation computes in."""


def page_log_mass(queries: Tensor, keys: Tensor, causal: Tensor) -> Tensor:
    """Exact page log-masses ``[N, H, P, G]`` of ``queries [N, H, G, D]`` (scaled) over ``keys [H, L, D]``, ``causal`` bool ``[N, L]``."""
    logits = torch.einsum("nhgd,hld->nhgl", queries.float(), keys.float()).masked_fill(~causal[:, None, None], -torch.inf)
    pages = ceil_div(keys.shape[1], PAGE_TOKENS)
    logits = torch.nn.functional.pad(logits, (0, pages * PAGE_TOKENS - keys.shape[1]), value=-torch.inf)
    return logits.unflatten(-1, (pages, PAGE_TOKENS)).logsumexp(-1).transpose(2, 3)


def token_mask(selected: Tensor, tokens: int) -> Tensor:
    """A choice of pages ``[N, H, ceil(tokens / 16)]`` or of tokens ``[N, H, tokens]`` as a choice of tokens, bool."""
    if selected.shape[-1] == tokens:
        return selected
    return selected.repeat_interleave(PAGE_TOKENS, -1)[..., :tokens]


@dataclass
class PolicyStatistics:
    """Sums over all (layer, query, kv head) of one run. The sums stay on the device until they are asked for."""

    rows: int = 0
    pages: Tensor | float = 0.0
    """Pages attended; a choice of tokens counts tokens / 16."""
    total_pages: float = 0.0
    side_bytes: float = 0.0
    """Bytes read besides the keys and values attended: records, summaries, or keys read only to choose."""
    covered: dict[int, list[Tensor]] = field(default_factory=dict)
    """Exact covered mass ``[N, H, G]`` of every block, by layer."""

    @property
    def mean_pages(self) -> float:
        return float(self.pages) / max(1, self.rows)

    @property
    def share(self) -> float:
        return float(self.pages) / max(1.0, self.total_pages)

    @property
    def mean_covered(self) -> float:
        values = [torch.cat(v).mean() for v in self.covered.values()]
        return float(torch.stack(values).mean()) if values else 1.0

    def mean_bytes(self, head_dim: int) -> float:
        """Bytes read for one (layer, query, kv head): keys and values of the attended pages, and what is read beside them."""
        page = 2 * PAGE_TOKENS * head_dim * CACHE_ELEMENT_BYTES
        return self.mean_pages * page + self.side_bytes / max(1, self.rows)


class Policy(ABC):
    """What a decode step attends, for one prompt at one budget.

    The prompt is prefilled with full attention, then `prepare` is called once, then `choose` for every sparse layer of every decode block.
    Shapes: ``N`` queries, ``H`` kv heads, ``G`` query heads per kv head, ``D`` head dimension, ``L`` tokens.
    """

    stateful: ClassVar[bool] = False
    """True when a choice depends on the queries decoded before it: such a policy sees every token once, alone and in order."""

    def __init__(self, measure: bool = False) -> None:
        self.measure = measure
        """Also measure the exact mass that is covered, which reads all keys."""
        self.statistics = PolicyStatistics()

    def prepare(self, model: EvalModel, tokens: int) -> None:  # noqa: B027 (a policy may need nothing)
        """Look at the prefilled prompt: the first ``tokens`` tokens of ``model.keys`` and ``model.values``, and ``model.observed``."""

    def restart(self) -> None:  # noqa: B027
        """Forget what was decoded since `prepare`: another continuation of the same prompt follows."""

    @abstractmethod
    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        """Choose for a block of queries that all lie in one page.

        Args:
            queries: ``[N, H, G, D]``, multiplied by the softmax scale.
            keys: ``[H, L, D]`` as cached, the block's own keys last.
            position: position of the first query; ``L = position + N``.
            causal: bool ``[N, L]``.

        Returns:
            bool ``[N, H, ceil(L / 16)]`` for pages, or bool ``[N, H, L]`` for tokens.
        """

    def read_keys(self, layer: int, keys: Tensor) -> Tensor:
        """The keys ``[H, L, D]`` that attention uses, for a method that keeps them in another form."""
        return keys

    def read_values(self, layer: int, values: Tensor) -> Tensor:
        """The values ``[H, L, D]`` that attention uses."""
        return values

    def record(self, layer: int, queries: Tensor, keys: Tensor, causal: Tensor, selected: Tensor, side_bytes: float) -> None:
        """Add a choice to the statistics. ``side_bytes``: see `PolicyStatistics`, for one query and kv head."""
        statistics, tokens = self.statistics, keys.shape[1]
        rows = selected.shape[0] * selected.shape[1]
        pages = ceil_div(tokens, PAGE_TOKENS)
        by_token = selected.shape[-1] == tokens
        statistics.rows += rows
        statistics.pages = statistics.pages + ((selected & causal[:, None]).sum() / PAGE_TOKENS if by_token else selected.sum())
        statistics.total_pages += float(rows * pages)
        statistics.side_bytes += rows * side_bytes
        if self.measure:
            statistics.covered.setdefault(layer, []).append(covered_mass(queries, keys, causal, selected))


def covered_mass(queries: Tensor, keys: Tensor, causal: Tensor, selected: Tensor) -> Tensor:
    """Exact attention mass ``[N, H, G]`` of the chosen pages or tokens; arguments as in `Policy.choose`."""
    logits = torch.einsum("nhgd,hld->nhgl", queries.float(), keys.float()).masked_fill(~causal[:, None, None], -torch.inf)
    return (logits.softmax(-1) * token_mask(selected, keys.shape[1])[:, :, None]).sum(-1)


class SelectorPolicy(Policy):
    """Choice by a selector and a rule. Records of the prefix are made once; records of pages that decoding completes, from the run's own keys."""

    def __init__(
        self, selector: Selector, tables: dict[int, Any], parameters: RuleParameters, sink_pages: int = 1,
        window_pages: int = DEFAULT_WINDOW_PAGES, measure: bool = True,
    ) -> None:
        super().__init__(measure)
        self.selector, self.tables, self.parameters = selector, tables, parameters
        self.sink_pages, self.window_pages = sink_pages, window_pages
        self.prefix: dict[int, Tensor] = {}
        self.added: dict[int, list[Tensor]] = {}

    def prepare(self, model: EvalModel, tokens: int) -> None:
        for layer in model.sparse_layers:
            if layer not in self.prefix:
                self.prefix[layer] = self._encode(layer, model.keys[layer], 0, tokens // PAGE_TOKENS)

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
        pages = keys[:, first * PAGE_TOKENS : last * PAGE_TOKENS].unflatten(1, (last - first, PAGE_TOKENS)).transpose(0, 1)
        return self.selector.encode(pages, self.tables[layer], self._positions(first, last, keys))

    def _positions(self, first: int, last: int, keys: Tensor) -> Tensor:
        return torch.arange(first, last, device=keys.device) * PAGE_TOKENS

    def record_bytes(self, head_dim: int) -> int:
        """Bytes that a choice reads of every candidate page and kv head."""
        # The oracle keeps no record: it reads the keys, as they are cached.
        if self.selector.name == "oracle":
            return PAGE_TOKENS * head_dim * CACHE_ELEMENT_BYTES
        return self.selector.bytes_per_page(head_dim)

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        total = ceil_div(keys.shape[1], PAGE_TOKENS)
        complete = position // PAGE_TOKENS  # pages before the one that the block lies in
        forced = torch.zeros(total, dtype=torch.bool, device=keys.device)
        first, last = self.sink_pages, max(0, total - self.window_pages)
        forced[:first] = True
        forced[last:] = True
        selected = forced.expand(queries.shape[0], queries.shape[1], -1).clone()
        if last > first:
            records = self.records(layer, keys, complete)[first:last]
            scores = self.selector.score(queries, records, self.tables[layer], self._positions(first, last, keys))
            # Slices, not a boolean index: that would wait for the GPU.
            sink, window = slice(first * PAGE_TOKENS), slice(last * PAGE_TOKENS, None)
            logits = torch.einsum("nhgd,hld->nhgl", queries.float(), torch.cat([keys[:, sink], keys[:, window]], 1).float())
            seen = torch.cat([causal[:, sink], causal[:, window]], 1)
            forced_mass = logits.masked_fill(~seen[:, None, None], -torch.inf).logsumexp(-1)
            key, mass, share = combine(scores, torch.zeros_like(forced_mass), forced_mass, self.parameters.combine)
            selected[..., first:last] = apply_rule(self.parameters, key, mass, share, total, self.sink_pages, self.window_pages)
        self.record(layer, queries, keys, causal, selected, max(0, last - first) * self.record_bytes(keys.shape[2]))
        return selected
