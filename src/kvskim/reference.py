"""The executable specification: paged decode attention over selected pages, in plain torch, one clear step after the other.

Every kernel and every engine is tested against this file. It loops over requests and kv heads and is made to be read, not to be fast.

    K, V of new tokens --write--> pages --encode (pages that this write completes)--> records
    q --score(records)--> page log-masses --rule--> selected pages --attend--> output, log-sum-exp

Latent attention (MLA) is the same with one kv head: the key of a token is its latent vector and its rotary part, its value the latent vector, and
the query heads are absorbed into that space. So ``D`` is 576 and ``value_dim`` 512 in the models that have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.rules import RuleParameters, apply_rule, candidate_sums, combine, covered_mass
from kvskim.rules.parameters import DEFAULT_WINDOW_PAGES
from kvskim.selectors.base import Selector


@dataclass
class RowSelection:
    """Selection of one (request, kv head).

    ``pages``: int64, ascending logical page indices, always-attended ones included. ``covered``: estimated group-mean mass of them.
    ``exact_covered``: their exact group-mean mass, computed from all keys.
    """

    pages: Tensor
    total_pages: int
    covered: float
    exact_covered: float

    @property
    def dense(self) -> bool:
        return len(self.pages) == self.total_pages


@dataclass
class DecodeResult:
    """``out`` ``[R, Hq, Dv]``, ``lse`` float32 ``[R, Hq]`` (natural log), ``rows[r][h]`` the selection of request r, kv head h."""

    out: Tensor
    lse: Tensor
    rows: list[list[RowSelection]]


def token_logits(queries: Tensor, keys: Tensor, scale: float, softcap: float) -> Tensor:
    """``scale q.k`` with the optional soft cap ``c tanh(x / c)``; ``[G, D] x [T, D] -> [G, T]``."""
    logits = queries @ keys.T * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


class ReferenceLayer:
    """Pages, records and decode attention of one layer.

    Args:
        selector: record format and score.
        tables: its parameters for this layer; None: not calibrated yet, every page is attended.
        num_pages: physical pages.
        num_kv_heads: kv heads ``H``.
        head_dim: ``D``.
        scale: softmax scale.
        parameters: the rule.
        softcap: logit soft cap, 0 for none.
        sink_pages: pages at the start that are always attended.
        window_pages: pages at the end that are always attended, the open page included; at least 1.
        dtype: of the cache.
        value_dim: dimension ``Dv`` of the values; None: ``D``.
    """

    def __init__(
        self, selector: Selector, tables: Any, *, num_pages: int, num_kv_heads: int, head_dim: int, scale: float,
        parameters: RuleParameters, softcap: float = 0.0, sink_pages: int = 1, window_pages: int = DEFAULT_WINDOW_PAGES, dtype: torch.dtype = torch.float32,
        value_dim: int | None = None,
    ) -> None:
        if window_pages < 1:
            raise ValueError(f"window_pages is {window_pages}; it must be at least 1, because the open page has no record")
        self.selector, self.tables, self.parameters = selector, tables, parameters
        self.scale, self.softcap, self.sink_pages, self.window_pages = scale, softcap, sink_pages, window_pages
        self.keys = torch.zeros(num_pages, PAGE_TOKENS, num_kv_heads, head_dim, dtype=dtype)
        self.values = torch.zeros(num_pages, PAGE_TOKENS, num_kv_heads, value_dim or head_dim, dtype=dtype)
        self.records = torch.zeros(num_pages, num_kv_heads, selector.record_bytes(head_dim), dtype=torch.uint8)

    def write(self, keys: Tensor, values: Tensor, slot_mapping: Tensor, page_positions: Tensor | None = None) -> None:
        """Store new tokens and encode the pages they complete.

        Args:
            keys, values: ``[T, H, D]`` and ``[T, H, Dv]``.
            slot_mapping: int64 ``[T]``, physical token index ``page * 16 + offset``; -1: padding.
            page_positions: int64 ``[num_pages]``, position of the first token of each physical page (page-frame records only).
        """
        kept = slot_mapping >= 0
        slots = slot_mapping[kept]
        self.keys.flatten(0, 1)[slots] = keys[kept].to(self.keys.dtype)
        self.values.flatten(0, 1)[slots] = values[kept].to(self.values.dtype)
        completed = slots[slots % PAGE_TOKENS == PAGE_TOKENS - 1] // PAGE_TOKENS
        if self.tables is not None and len(completed):
            positions = None if page_positions is None else page_positions[completed]
            self.records[completed] = self.selector.encode(self.keys[completed].transpose(1, 2), self.tables, positions)

    def select(self, queries: Tensor, page_table: Tensor, seq_len: int, head: int, page_positions: Tensor | None = None) -> RowSelection:
        """Choose pages for the query heads ``queries [G, D]`` of one kv head of a request with ``seq_len`` tokens."""
        total = ceil_div(seq_len, PAGE_TOKENS)
        physical = page_table[:total].long()
        keys = self.keys[physical, :, head].flatten(0, 1)[:seq_len].float()
        logits = token_logits(queries.float(), keys, self.scale, self.softcap)
        padded = torch.full((queries.shape[0], total * PAGE_TOKENS), -torch.inf)
        padded[:, :seq_len] = logits
        exact = padded.unflatten(1, (total, PAGE_TOKENS)).logsumexp(-1)  # [G, total]
        exact_mass = exact.softmax(-1).mean(0)
        candidates = torch.arange(self.sink_pages, max(self.sink_pages, total - self.window_pages))
        is_forced = torch.ones(total, dtype=torch.bool)
        is_forced[candidates] = False
        selected = is_forced.clone()
        covered = 1.0
        if self.tables is None:
            selected[:] = True
        elif len(candidates):
            scaled = (queries.float() * self.scale)[None, None]
            position = None if page_positions is None else page_positions[physical[candidates]]
            one_head = self._head_tables(head)
            records = self.records[physical[candidates], head : head + 1]
            scores = self.selector.score(scaled, records, one_head, position)[0, 0]  # [P, G]
            forced = exact[:, is_forced].logsumexp(-1)
            base = torch.zeros_like(forced)
            sums = candidate_sums(scores, forced)
            key, mass, share = combine(scores, base, forced, self.parameters.combine, sums=sums)
            chosen = apply_rule(self.parameters, key, mass, share, total, self.sink_pages, self.window_pages)
            selected[candidates] = chosen
            covered = float(covered_mass(chosen, mass, share, torch.tensor(len(candidates))))
        return RowSelection(selected.nonzero()[:, 0], total, covered, float(exact_mass[selected].sum()))

    def attend(self, queries: Tensor, page_table: Tensor, seq_len: int, head: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Exact attention of ``queries [G, D]`` over the tokens of ``pages``: ``(out [G, Dv], lse [G])``, float32."""
        tokens = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
        tokens = tokens[tokens < seq_len]
        physical = page_table[tokens // PAGE_TOKENS].long()
        keys = self.keys[physical, tokens % PAGE_TOKENS, head].float()
        values = self.values[physical, tokens % PAGE_TOKENS, head].float()
        logits = token_logits(queries.float(), keys, self.scale, self.softcap)
        return logits.softmax(-1) @ values, logits.logsumexp(-1)

    def decode(self, query: Tensor, page_table: Tensor, seq_lens: Tensor, page_positions: Tensor | None = None) -> DecodeResult:
        """One decode step of a batch.

        Args:
            query: ``[R, Hq, D]``, one token per request, its key and value already written.
            page_table: int ``[R, pages]``, physical page of each logical page.
            seq_lens: int ``[R]``, tokens in the cache, this one included; 0: a padded row, output 0 and lse -inf.
        """
        heads = self.keys.shape[2]
        out = query.new_zeros(*query.shape[:2], self.values.shape[3])
        lse = torch.full(query.shape[:2], -torch.inf)
        grouped, lse_grouped = out.unflatten(1, (heads, -1)), lse.unflatten(1, (heads, -1))
        rows: list[list[RowSelection]] = []
        for r, length in enumerate(seq_lens.tolist()):
            rows.append([])
            if length == 0:
                continue
            for h, queries in enumerate(query[r].unflatten(0, (heads, -1))):
                selection = self.select(queries, page_table[r], length, h, page_positions)
                o, l = self.attend(queries, page_table[r], length, h, selection.pages)  # noqa: E741
                grouped[r, h], lse_grouped[r, h] = o.to(query.dtype), l
                rows[r].append(selection)
        return DecodeResult(out, lse, rows)

    def _head_tables(self, head: int) -> Any:
        """Parameters of one kv head."""
        from kvskim.selectors.base import PageTables

        if isinstance(self.tables, PageTables):
            return PageTables(self.tables.offset[head : head + 1])
        return self.tables.heads(head, head + 1)
