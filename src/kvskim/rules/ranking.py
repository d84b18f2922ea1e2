"""The order in which pages are taken: larger first, ties to the lower page index, broken estimates before everything."""

from __future__ import annotations

import torch
from torch import Tensor


def rankable(values: Tensor) -> Tensor:
    """Make values comparable: NaN and +inf become +inf, so a broken estimate is selected and never lost; -0 becomes 0.

    Args:
        values: float [..., P], one ranking key per candidate page.

    Returns:
        float32 [..., P] without NaN.
    """
    values = values.float()
    return torch.where(torch.isnan(values), torch.inf, values) + 0.0


def candidate_positions(values: Tensor, candidates: Tensor) -> Tensor:
    """Bool [..., P]: which positions of a padded row hold a candidate (position < candidates [...])."""
    return torch.arange(values.shape[-1], device=values.device) < candidates.unsqueeze(-1)


def descending(values: Tensor, candidates: Tensor) -> Tensor:
    """Positions of a padded row, best first; ties in ascending order; positions that hold no candidate come last.

    Args:
        values: rankable float32 [..., P].
        candidates: int64 [...], how many leading positions of each row are candidates.

    Returns:
        int64 [..., P].
    """
    padded = values.masked_fill(~candidate_positions(values, candidates), -torch.inf)
    return torch.sort(padded, dim=-1, descending=True, stable=True).indices


def take(order: Tensor, wanted: Tensor) -> Tensor:
    """Bool [..., P]: the positions that are among the first ``wanted`` [...] of ``order`` [..., P]."""
    ranks = torch.empty_like(order)
    steps = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    ranks.scatter_(-1, order, steps)
    return ranks < wanted.unsqueeze(-1)
