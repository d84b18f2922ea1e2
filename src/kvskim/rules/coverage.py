"""Rule ``coverage``: attend the fewest pages whose estimated mass, with the always-attended ones, reaches a target."""

from __future__ import annotations

import torch
from torch import Tensor

from .ranking import candidate_positions

MASS_ONE = 1 << 31


def fixed_mass(mass: Tensor) -> Tensor:
    """Mass in units of 2^-31: floor(mass * 2^31 + 0.5) with mass clamped to 0..1, so that sums do not depend on their order.

    A broken mass (NaN or +inf) counts as 0: its page is selected anyway and must not stand for mass that nobody measured.

    Args:
        mass: float32 [...].

    Returns:
        int64 [...].
    """
    finite = torch.where(torch.isfinite(mass), mass, 0.0).clamp(0.0, 1.0)
    return torch.floor(finite.double() * MASS_ONE + 0.5).to(torch.int64)


def coverage_target(coverage: float) -> int:
    """The target in units of 2^-31: floor(coverage * 2^31 + 0.5)."""
    return int(coverage * MASS_ONE + 0.5)


def coverage_pages(mass: Tensor, order: Tensor, candidates: Tensor, forced_share: Tensor, coverage: float | None) -> Tensor:
    """The fewest candidates, taken in order, whose mass and the forced share together reach the target.

    Every page with a broken mass is among them. If no number of pages reaches the target: all candidates.

    Args:
        mass: rankable float32 [..., P], estimated group-mean mass.
        order: int64 [..., P], candidates best first.
        candidates: int64 [...], how many leading positions of each row are candidates.
        forced_share: float32 [...], estimated group-mean mass of the always-attended pages.
        coverage: target, 0 to 1.

    Returns:
        int64 [...].

    Raises:
        ValueError: no target is given.

    Source: docs/how-it-works.md.
    """
    if coverage is None:
        raise ValueError("rule coverage needs coverage")
    valid = candidate_positions(mass, candidates)
    reached = fixed_mass(mass).masked_fill(~valid, 0).gather(-1, order).cumsum(-1) + fixed_mass(forced_share).unsqueeze(-1)
    target = coverage_target(coverage)
    fewest = ((reached < target) & valid).sum(-1) + 1
    fewest = torch.where(fixed_mass(forced_share) >= target, 0, fewest)
    broken = (torch.isinf(mass) & (mass > 0) & valid).sum(-1)
    return torch.minimum(torch.maximum(fewest, broken), candidates)
