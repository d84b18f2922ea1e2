"""Greedy decoding under several settings of one selector at a time: rows of one batch, each of which checks a draft of its own.

A pass of a small model on a GPU costs the launch of its kernels, whatever the number of rows. The settings of a selector differ only in how many pages
they take: one pass scores the pages for the queries of all rows, and only what a row decoded itself is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from kvskim.eval.generation import accept, draft
from kvskim.eval.model import EvalModel, page_blocks
from kvskim.eval.policy import Policy, SelectorPolicy, token_mask
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.rules import RuleParameters, combine, rule_pages
from kvskim.rules.ranking import descending, rankable, take

MOST_LOGITS = 1 << 28
"""Attention logits of one layer in one pass: with more, fewer rows go at a time."""


def go_side_by_side(policies: Sequence[Policy], prefix: int) -> TypeGuard[Sequence[SelectorPolicy]]:
    """Whether `SideBySide` serves these policies of one method after a prompt of ``prefix`` tokens."""
    first = policies[0]
    return len(policies) > 1 and isinstance(first, SelectorPolicy) and not first.measure and prefix >= first.sink_pages * PAGE_TOKENS


@dataclass(frozen=True)
class Pass:
    """One pass of ``A`` rows with ``n`` places each, all in one page. Rows with fewer tokens have places at their end that are not ``valid [A, n]``.

    ``rows [A]``; ``offsets [A, n]`` behind the prefix; ``visible`` bool ``[A, n, L]``: the tokens up to the end of the page that a place may see;
    ``fixed`` int64 ``[A]``: candidates that a row takes, where that depends on nothing but the length; ``varying``: places and rules of the other rows.
    """

    page: int
    rows: Tensor
    offsets: Tensor
    valid: Tensor
    visible: Tensor
    fixed: Tensor
    varying: list[tuple[int, RuleParameters]]


class SideBySide:
    """``R`` settings of one selector after the same prompt.

    Args:
        model: its store holds the first ``prefix`` tokens.
        prefix: tokens that all rows share.
        policies: one for each row: the same selector and tables, prepared for this prompt.
        room: tokens that a row may decode.
    """

    def __init__(self, model: EvalModel, prefix: int, policies: Sequence[SelectorPolicy], room: int) -> None:
        self.model, self.prefix, self.policies, self.like = model, prefix, list(policies), policies[0]
        # Behind the last token there may be places of a page that are not valid.
        shape = (len(self.policies), model.num_kv_heads, room + 2 * PAGE_TOKENS, model.head_dim)
        self.keys = [keys.new_zeros(shape) for keys in model.keys]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.added: dict[int, list[Tensor]] = {layer: [] for layer in model.sparse_layers}
        """Records ``[R, H, W]`` of the pages that no prompt completes."""
        self.pages = torch.zeros(len(self.policies), dtype=torch.int64, device=model.device)
        self.current: Pass | None = None

    def run(self, rows: Sequence[int], position: Sequence[int], blocks: Sequence[Sequence[int]]) -> list[list[int]]:
        """Decode a block of tokens of each of these rows, from its position on, all within one page; the likeliest next token after each.

        Every row that will be run again must have decoded all pages before this one.
        """
        model, like = self.model, self.like
        page, width = position[0] // PAGE_TOKENS, max(map(len, blocks))
        total = page + 1
        places = torch.tensor(position)[:, None] + torch.arange(width)
        lengths = torch.tensor([len(block) for block in blocks])
        ids = torch.tensor([[*block, *[block[-1]] * (width - len(block))] for block in blocks])
        columns = torch.arange(total * PAGE_TOKENS, device=model.device)
        positions = places.to(model.device)
        self.current = Pass(
            page, torch.tensor(rows, device=model.device), positions - self.prefix, (torch.arange(width) < lengths[:, None]).to(model.device),
            columns <= positions[..., None], torch.tensor([self._fixed(row, total) for row in rows], device=model.device),
            [(place, self.policies[row].parameters) for place, row in enumerate(rows) if self.policies[row].parameters.rule != "budget"],
        )
        model.together = self
        try:
            best = model.forward_rows(ids, positions).argmax(-1).tolist()
        finally:
            model.together = None
        candidates = max(0, total - like.window_pages - like.sink_pages)
        for row, block in zip(rows, blocks):
            # What is equal for all layers is counted here, pages that are chosen in `_selected`.
            statistics, queries = self.policies[row].statistics, len(block) * model.num_kv_heads * len(model.sparse_layers)
            statistics.rows += queries
            statistics.total_pages += queries * total
            statistics.side_bytes += queries * candidates * like.record_bytes(model.head_dim)
        return [row[: len(block)] for row, block in zip(best, blocks)]

    def _fixed(self, row: int, total: int) -> int:
        """Candidates that a budget takes of a request of ``total`` pages; 0 for the other rules, which look at the masses."""
        parameters = self.policies[row].parameters
        candidates = max(0, total - self.like.sink_pages - self.like.window_pages)
        if parameters.rule != "budget":
            return 0
        none, pages = torch.zeros(1, candidates), torch.tensor([total])
        return int(rule_pages(parameters, none, none.long(), none[:, 0], pages, torch.tensor([candidates]), self.like.sink_pages + self.like.window_pages))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float) -> Tensor:
        """Attention of one layer: ``query [A, Hq, n, D]``, ``key`` and ``value`` ``[A, H, n, D]``; the result is ``[A, n, Hq, D]``."""
        assert self.current is not None
        now, model, prefix, window = self.current, self.model, self.prefix, self.model.window[layer]
        stop = (now.page + 1) * PAGE_TOKENS
        at = (now.rows[:, None], slice(None), now.offsets)
        self.keys[layer][at], self.values[layer][at] = key.transpose(1, 2), value.transpose(1, 2)
        own_keys, own_values = self.keys[layer][now.rows, :, : stop - prefix], self.values[layer][now.rows, :, : stop - prefix]
        rows = query.unflatten(1, (key.shape[1], -1))  # [A, H, G, n, D]
        first = 0
        if window:
            first = max(0, now.page * PAGE_TOKENS - window + 1)
            distance = (now.offsets + prefix)[..., None] - torch.arange(first, stop, device=query.device)
            mask = (now.visible[..., first:] & (distance < window))[:, :, None]
        else:
            scaled = (rows * scale).permute(0, 3, 1, 2, 4).flatten(0, 1)
            mask = now.visible[:, :, None] & token_mask(self._selected(layer, scaled, own_keys), stop).unflatten(0, now.offsets.shape)
        shared_keys, shared_values = model.keys[layer][:, first:prefix], model.values[layer][:, first:prefix]
        own_keys, own_values = own_keys[:, :, max(0, first - prefix) :], own_values[:, :, max(0, first - prefix) :]
        by_head = rows.transpose(0, 1).float()
        shape = by_head.shape[1:4]
        logits = scale * torch.cat([
            (by_head.flatten(1, 3) @ shared_keys.float().transpose(1, 2)).unflatten(1, shape), torch.einsum("hagnd,ahsd->hagns", by_head, own_keys.float()),
        ], -1)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        weights = logits.masked_fill(~mask.permute(2, 0, 1, 3)[:, :, None], -torch.inf).softmax(-1).to(value.dtype)
        shared = shared_keys.shape[1]
        out = (weights[..., :shared].flatten(1, 3) @ shared_values).unflatten(1, shape)
        out = out + torch.einsum("hagns,ahsd->hagnd", weights[..., shared:], own_values)
        return out.permute(1, 3, 0, 2, 4).flatten(2, 3)

    def _selected(self, layer: int, queries: Tensor, own_keys: Tensor) -> Tensor:
        """Pages that each query attends, bool ``[A n, H, pages]``; as `SelectorPolicy.choose`. ``queries [A n, H, G, D]`` are scaled."""
        assert self.current is not None
        now, like = self.current, self.like
        total = now.page + 1
        first, last = like.sink_pages, max(0, total - like.window_pages)
        selected = torch.ones(*queries.shape[:2], total, dtype=torch.bool, device=queries.device)
        if last > first:
            scores = self._scores(layer, queries, first, last)
            forced = self._forced_mass(layer, queries, own_keys, first * PAGE_TOKENS, last * PAGE_TOKENS)
            key, mass, share = combine(scores, torch.zeros_like(forced), forced, like.parameters.combine)
            selected[..., first:last] = self._ruled(key, mass, share, total, last - first)
        counted = selected.unflatten(0, now.valid.shape) & now.valid[:, :, None, None]
        self.pages.index_add_(0, now.rows, counted.sum((1, 2, 3)))
        return selected

    def _scores(self, layer: int, queries: Tensor, first: int, last: int) -> Tensor:
        """Scores ``[A n, H, last - first, G]`` of the pages from ``first`` to ``last``: of the prompt, and of each row's own behind it."""
        assert self.current is not None
        now, like, device = self.current, self.like, queries.device
        prompt = self.prefix // PAGE_TOKENS
        shared = like.prefix[layer][first : min(last, prompt)]
        scores = like.selector.score(queries, shared, like.tables[layer], torch.arange(first, first + len(shared), device=device) * PAGE_TOKENS)
        if last <= prompt:
            return scores
        added = self.added[layer]
        while prompt + len(added) < last:
            added.append(self._encoded(layer, prompt + len(added)))
        # All rows' own pages are scored for all queries, few as they are; each row keeps its own.
        count, (rows, width) = last - prompt, now.offsets.shape
        records = torch.stack(added[:count], 1)[now.rows].flatten(0, 1)
        places = torch.arange(prompt, last, device=device).repeat(rows) * PAGE_TOKENS
        every = like.selector.score(queries, records, like.tables[layer], places).unflatten(2, (rows, count)).unflatten(0, (rows, width))
        own = every.diagonal(dim1=0, dim2=3).movedim(-1, 0).flatten(0, 1)
        return torch.cat([scores, own], 2)

    def _encoded(self, layer: int, page: int) -> Tensor:
        """Records ``[R, H, W]`` of a page that all rows have decoded the end of."""
        start = page * PAGE_TOKENS - self.prefix
        keys = self.keys[layer][:, :, max(0, start) : start + PAGE_TOKENS]
        if start < 0:
            keys = torch.cat([self.model.keys[layer][None, :, start + self.prefix : self.prefix].expand(len(keys), -1, -1, -1), keys], 2)
        return self.like.selector.encode(keys, self.like.tables[layer], torch.full((len(keys),), page * PAGE_TOKENS, device=keys.device))

    def _forced_mass(self, layer: int, queries: Tensor, own_keys: Tensor, sink: int, window: int) -> Tensor:
        """Log-mass ``[A n, H, G]`` of the tokens before ``sink`` and of those from ``window`` on."""
        assert self.current is not None
        now, stored = self.current, self.model.keys[layer]
        shared = torch.cat([stored[:, :sink], stored[:, window : self.prefix]], 1).float()
        own = own_keys[:, :, max(0, window - self.prefix) :].float()
        rows = queries.float().unflatten(0, now.offsets.shape)
        logits = torch.cat([torch.einsum("anhgd,hld->anhgl", rows, shared), torch.einsum("anhgd,ahsd->anhgs", rows, own)], -1)
        seen = torch.cat([now.visible[..., :sink], now.visible[..., window:]], -1)
        return logits.masked_fill(~seen[:, :, None, None], -torch.inf).logsumexp(-1).flatten(0, 1)

    def _ruled(self, key: Tensor, mass: Tensor, share: Tensor, total: int, count: int) -> Tensor:
        """The rule of every row for its queries: bool ``[A n, H, count]``, as `kvskim.rules.apply_rule`, with one order for all rows."""
        assert self.current is not None
        now, like = self.current, self.like
        candidates = torch.full(key.shape[:-1], count, device=key.device)
        key, mass = rankable(key), rankable(mass)
        order = descending(key, candidates)
        wanted = now.fixed[:, None, None].expand(*now.offsets.shape, key.shape[1])
        if now.varying:
            wanted, width = wanted.clone(), now.offsets.shape[1]
            for place, parameters in now.varying:
                part = slice(place * width, (place + 1) * width)
                wanted[place] = rule_pages(
                    parameters, mass[part], order[part], share[part], torch.full_like(candidates[part], total), candidates[part],
                    like.sink_pages + like.window_pages,
                )
        return take(order, wanted.flatten(0, 1))


def greedy_side_by_side(
    model: EvalModel, prompt: Tensor, prefix: int, policies: Sequence[SelectorPolicy], limit: int, stop: Collection[int],
    drafts: Sequence[Sequence[int]], settled: Callable[[list[int]], bool],
) -> list[list[int]]:
    """Greedy answers, one for each policy; see `kvskim.eval.generation.greedy`.

    Args:
        prefix: tokens of ``prompt`` that are in the store; the others, at least one, are decoded under the policies.
    """
    rows = SideBySide(model, prefix, policies, len(prompt) - prefix + limit)
    tokens, every = prompt.tolist(), list(range(len(policies)))
    for first, end in page_blocks(prefix, len(tokens) - 1):
        for some in _at_a_time(model, every, end):
            rows.run(some, [first] * len(some), [tokens[first:end]] * len(some))
    answers: list[list[int]] = [[] for _ in policies]
    live, position = every, [len(tokens) - 1] * len(policies)
    while live:
        # A row that is a page ahead waits, so that all rows of a pass have the same candidates.
        page = min(position[row] for row in live) // PAGE_TOKENS
        some = _at_a_time(model, [row for row in live if position[row] // PAGE_TOKENS == page], (page + 1) * PAGE_TOKENS)[0]
        blocks = []
        for row in some:
            answer = answers[row]
            room = min(PAGE_TOKENS - 1 - position[row] % PAGE_TOKENS, limit - len(answer) - 1)
            blocks.append([answer[-1] if answer else tokens[-1], *draft(answer, drafts, room, answers)])
        for row, block, best in zip(some, blocks, rows.run(some, [position[row] for row in some], blocks)):
            before = len(answers[row])
            if accept(answers[row], best, block[1:], limit, stop, settled):
                live = [other for other in live if other != row]
            position[row] += len(answers[row]) - before
    for row, policy in enumerate(policies):
        policy.statistics.pages = policy.statistics.pages + rows.pages[row]
    return answers


def _at_a_time(model: EvalModel, rows: Sequence[int], tokens: int) -> list[list[int]]:
    """The rows in parts that the memory has room for."""
    most = max(1, MOST_LOGITS // (PAGE_TOKENS * model.num_heads * ceil_div(tokens, PAGE_TOKENS) * PAGE_TOKENS))
    return [list(rows[first : first + most]) for first in range(0, len(rows), most)]
