"""How the query heads of a group vote on a page: scores of every head to one ranking key and one mass per page."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EXPONENT_LIMIT = 83.0


class Combined(NamedTuple):
    """What a rule works on.

    Attributes:
        key: float32 [..., P], ranking key; larger is better; rankable only after ``ranking.rankable``.
        mass: float32 [..., P], estimated group-mean mass of each page. NaN where an estimate is broken.
        forced_share: float32 [...], estimated group-mean mass of the always-attended pages.
    """

    key: Tensor
    mass: Tensor
    forced_share: Tensor


def limited_exponential(exponent: Tensor) -> Tensor:
    """exp(min(exponent, 83)), but NaN for NaN and for +inf: both are broken estimates and must stay visible as such."""
    return torch.exp(torch.where(exponent > EXPONENT_LIMIT, exponent * 0.0 + EXPONENT_LIMIT, exponent))


def candidate_sums(scores: Tensor, forced: Tensor, valid: Tensor | None = None) -> Tensor:
    """sum_p exp(min(scores - forced, 83)) for every head: what the partials of the score op add up to.

    Args:
        scores: float [..., P, G], page log-masses.
        forced: float32 [..., G], log-mass of the always-attended pages.
        valid: bool [..., P], positions that hold a candidate; None: all.

    Returns:
        float32 [..., G].
    """
    terms = torch.exp((scores.float() - forced.unsqueeze(-2)).clamp_max(EXPONENT_LIMIT))
    if valid is not None:
        terms = torch.where(valid.unsqueeze(-1), terms, 0.0)
    return terms.sum(-2)


def combine(
    scores: Tensor,
    base: Tensor,
    forced: Tensor,
    how: str,
    *,
    sums: Tensor | None = None,
    valid: Tensor | None = None,
) -> Combined:
    """Combine the query heads of a group.

    With S = scores - forced and Z = 1 + sum_p exp(S): mass(p) = mean_g exp(S) / Z, forced share = mean_g 1 / Z.
    key(p) is mass(p) for ``softmax``, sum_g exp(scores - max_p scores) for ``peak`` and max_g (scores + base) for ``max``.
    The maximum of ``peak`` is taken over finite scores.

    Args:
        scores: float [..., P, G], page log-masses minus ``base``, candidates only.
        base: float32 [..., G], what was subtracted from the scores.
        forced: float32 [..., G], exact log-mass of the always-attended pages, minus ``base``.
        how: ``softmax``, ``peak`` or ``max``.
        sums: float32 [..., G], sum_p exp(min(S, 83)) if it is known already.
        valid: bool [..., P], positions that hold a candidate; None: all. Results elsewhere are arbitrary.

    Raises:
        ValueError: ``how`` is unknown.

    Source: docs/how-it-works.md.
    """
    scores = scores.float()
    if sums is None:
        sums = candidate_sums(scores, forced, valid)
    share = 1.0 / (1.0 + sums)
    mass = (limited_exponential(scores - forced.unsqueeze(-2)) * share.unsqueeze(-2)).mean(-1)
    forced_share = share.mean(-1)
    if how == "softmax":
        return Combined(mass, mass, forced_share)
    if how == "peak":
        counted = torch.isfinite(scores)
        if valid is not None:
            counted = counted & valid.unsqueeze(-1)
        peak = torch.where(counted, scores, -torch.inf).amax(-2, keepdim=True) if scores.shape[-2] else scores.new_zeros(())
        peak = torch.where(torch.isfinite(peak), peak, 0.0)
        return Combined(torch.exp(scores - peak).sum(-1), mass, forced_share)
    if how == "max":
        return Combined((scores + base.unsqueeze(-2)).amax(-1), mass, forced_share)
    raise ValueError(f"combine must be softmax, peak or max, not {how!r}")
