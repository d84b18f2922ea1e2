"""One sparse decode step over a contiguous KV cache in plain torch: score the records, select pages, attend them.

This is the one place where a host with contiguous tensors (one row of keys per request, as in transformers) meets the four
operations. The steps are those of docs/how-it-works.md; every row may start anywhere in the tensor (left padding), pages are counted
from its first real token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.rules import RuleParameters, apply_rule, combine, covered_mass
from kvskim.selectors import Selector


@dataclass(frozen=True)
class DecodeSettings:
    """What a decode step needs to know of a layer, the same at every step."""

    selector: Selector
    tables: Any
    rule: RuleParameters
    sink_pages: int
    window_pages: int
    scale: float
    softcap: float | None = None
    kernels: str = "torch"
    workspaces: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)
    """Scratch of the kernels, by page capacity; only the latest is kept."""


@dataclass(frozen=True)
class RowResult:
    """One decode step of one row.

    out ``[Hq, Dv]`` in the query's dtype; pages bool ``[H, total pages]``: which pages were attended; covered float32 ``[H]``: estimated
    group-mean attention mass of those pages; exact float32 ``[H]`` or None: the same mass computed from all keys, where it was asked
    for; sparse: whether the rule was applied (False: all pages were attended).
    """

    out: Tensor
    pages: Tensor
    covered: Tensor
    exact: Tensor | None
    sparse: bool


def soft_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(logits / softcap)``, or the logits themselves without a cap."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None, visible: Tensor | None = None) -> Tensor:
    """Softmax attention of ``query [H, G, D]`` over ``key [H, T, D]``, ``value [H, T, Dv]``; ``visible`` bool ``[H, T]``. Returns ``[H, G, Dv]``."""
    if softcap is None:
        mask = None if visible is None else visible[None, :, None]
        return torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=scale)[0]
    logits = soft_capped(scale * (query.float() @ key.float().transpose(1, 2)), softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None], -torch.inf)
    return (torch.softmax(logits, -1) @ value.float()).to(query.dtype)


def page_mass(query: Tensor, key: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """Exact group-mean attention mass of every page, float32 ``[H, pages]``; reads all keys."""
    weights = torch.softmax(soft_capped(scale * (query.float() @ key.float().transpose(1, 2)), softcap), -1).mean(1)
    missing = -weights.shape[-1] % PAGE_TOKENS
    return torch.nn.functional.pad(weights, (0, missing)).unflatten(-1, (-1, PAGE_TOKENS)).sum(-1)


def decode_attention(
    settings: DecodeSettings, query: Tensor, key: Tensor, value: Tensor, records: Tensor, first_position: int = 0, *, exact: bool = False
) -> RowResult:
    """Attend the pages of one row that matter for one decode token.

    Args:
        query: ``[Hq, D]``, not yet scaled.
        key, value: ``[H, T, D]`` and ``[H, T, Dv]``: all real tokens of the row, the one being decoded included.
        records: uint8 ``[complete pages, H, record bytes]``.
        first_position: position of the row's first token (page-frame records only).
        exact: also compute the exact mass of the attended pages, which reads all keys.
    """
    heads, tokens, _ = key.shape
    query = query.unflatten(0, (heads, -1))
    total = ceil_div(tokens, PAGE_TOKENS)
    first, last = settings.sink_pages, total - settings.window_pages
    candidates = max(last - first, 0)
    limits: Any = {"scale": settings.scale, "softcap": settings.softcap}

    if candidates <= settings.rule.min_pages or total <= settings.rule.full_pages:
        out = attention(query, key, value, **limits)
        every = torch.ones(heads, total, dtype=torch.bool, device=key.device)
        ones = torch.ones(heads, device=key.device)
        return RowResult(out.flatten(0, 1), every, ones, ones if exact else None, sparse=False)

    if settings.kernels != "torch":
        from kvskim.engines.decode_kernels import attend_selected

        out, pages, covered = attend_selected(settings, query.flatten(0, 1), key, value, records)
        mass = (page_mass(query, key, **limits) * pages).sum(-1) if exact else None
        return RowResult(out, pages, covered, mass, sparse=True)

    positions = first_position + PAGE_TOKENS * torch.arange(first, last, device=key.device)
    scaled = query.float() * settings.scale
    scores = settings.selector.score(scaled[None], records[first:last], settings.tables, positions)[0]
    forced_tokens = torch.cat([torch.arange(first * PAGE_TOKENS), torch.arange(last * PAGE_TOKENS, tokens)]).to(key.device)
    forced_logits = soft_capped(scaled @ key[:, forced_tokens].float().transpose(1, 2), settings.softcap)
    forced = torch.logsumexp(forced_logits, -1)
    combined = combine(scores, torch.zeros_like(forced), forced, settings.rule.combine)
    chosen = apply_rule(
        settings.rule, combined.key, combined.mass, combined.forced_share, total, settings.sink_pages, settings.window_pages
    )
    covered = covered_mass(chosen, combined.mass, combined.forced_share, torch.tensor(candidates, device=key.device))
    pages = torch.ones(heads, total, dtype=torch.bool, device=key.device)
    pages[:, first:last] = chosen

    # Heads attend different numbers of pages: gather as many for each as the widest takes, real pages first, and hide the rest.
    counts = pages.sum(-1)
    order = torch.sort(pages.to(torch.uint8), dim=-1, descending=True, stable=True).indices[:, : int(counts.max())]
    token = (order[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=key.device)).flatten(1)
    real = torch.arange(order.shape[1], device=key.device) < counts[:, None]
    visible = real.repeat_interleave(PAGE_TOKENS, 1) & (token < tokens)
    token = token.clamp_max(tokens - 1)
    gathered_key = key.gather(1, token[..., None].expand(-1, -1, key.shape[-1]))
    gathered_value = value.gather(1, token[..., None].expand(-1, -1, value.shape[-1]))
    out = attention(query, gathered_key, gathered_value, visible=visible, **limits)
    mass = (page_mass(query, key, **limits) * pages).sum(-1) if exact else None
    return RowResult(out.flatten(0, 1), pages, covered, mass, sparse=True)
