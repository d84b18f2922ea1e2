"""How much the query heads of a group count when the query metric of a calibration is fitted."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.rules.parameters import DEFAULT_WINDOW_PAGES

SAMPLED_QUERIES = 256
"""Queries of each head that are looked at, at most: the weights are means over many pages, and every query costs a product with all keys."""
BLOCK_QUERIES = 8
"""Queries of each head at a time: bounds the memory for their logits."""


def page_ages(positions: Tensor, first: Tensor) -> Tensor:
    """Pages between that of each query (int64 ``[n]``) and each page (its first position, int64 ``[P]``), ``[n, P]``: 0 for its own, less for later ones."""
    return torch.div(positions[:, None] - first.to(positions.device), PAGE_TOKENS, rounding_mode="floor")


def head_weights(pages: Tensor, queries: Tensor, first: Tensor, positions: Tensor | None) -> Tensor:
    """Weight of every query head in its group: the squared mean concentration of its attention on the pages that can be chosen.

    The concentration of a query is ``sum_p m_p^2``, with ``m_p`` its attention mass on page p among the keys before it; the newest pages, which are always
    attended, count in the total but not in the sum. An error ``e`` in the log-mass of page p changes its mass by ``m_p e``, so for errors alike on all pages
    this is the squared change that is expected. Its mean is squared once more because of what hangs on a choice: a head that looks for a page or two loses
    all with them, and one that spreads its mass loses about as much whichever pages are chosen.

    Args:
        pages: keys ``[H, P, 16, D]`` at their own positions. Those of several texts count as of one.
        queries: ``[Hq, n, D]``, multiplied by the softmax scale.
        first: int64 ``[P]``, position of the first token of each page.
        positions: int64 ``[n]``, of the queries; None: unknown, every query sees all pages.

    Returns:
        float32 ``[Hq]``, mean 1 in every group; ones where no page lies before a query.
    """
    heads = pages.shape[0]
    stride = max(1, ceil_div(queries.shape[1], SAMPLED_QUERIES))
    sample = queries[:, ::stride].unflatten(0, (heads, -1)).float()
    at = None if positions is None else positions[::stride].to(pages.device)
    total = torch.zeros(sample.shape[:2], device=pages.device)
    for start in range(0, sample.shape[2], BLOCK_QUERIES):
        block = sample[:, :, start : start + BLOCK_QUERIES]
        logits = torch.einsum("hgnd,hptd->hgnpt", block, pages).logsumexp(-1)
        if at is None:
            mass = logits.softmax(-1)
        else:
            age = page_ages(at[start : start + BLOCK_QUERIES], first)
            # Not minus infinity: a query that sees no page would have no mass that is a number.
            mass = logits.masked_fill(age < 0, torch.finfo(torch.float32).min).softmax(-1).masked_fill(age < DEFAULT_WINDOW_PAGES, 0)
        total += mass.square().sum(-1).sum(-1)
    weights = total.square()
    mean = weights.mean(1, keepdim=True)
    return torch.where(mean > 0, weights / mean.clamp_min(1e-30), torch.ones_like(weights)).flatten()
