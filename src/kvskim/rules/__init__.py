"""Rules: from the estimated mass of every page to the pages that are attended. Plain torch, the definition the kernels follow.

One row is one (request, kv head). Its candidates are the pages between the sink and the window; the sink and window pages are
always attended and are not part of a row. Use::

    combined = combine(scores, base, forced, parameters.combine)          # scores [P, G] of the candidates -> key, mass [P], forced_share
    selected = apply_rule(parameters, combined.key, combined.mass, combined.forced_share, total_pages, sink_pages, window_pages)

``selected`` is a bool [P]: candidate i, which is page sink_pages + i, is attended. Every argument may have leading batch
dimensions; rows of different length are padded at the end, and positions beyond a row's candidates are ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .budget import budget_pages
from .combine import Combined, candidate_sums, combine
from .coverage import coverage_pages
from .parameters import RuleParameters
from .ranking import candidate_positions, descending, rankable, take
from .threshold import threshold_pages

__all__ = [
    "Combined",
    "RuleParameters",
    "apply_rule",
    "candidate_pages",
    "candidate_sums",
    "combine",
    "covered_mass",
    "rule_pages",
]


def candidate_pages(total_pages: Tensor, sink_pages: int, window_pages: int) -> Tensor:
    """How many pages of a request lie between its sink and its window: max(total - sink - window, 0), int64 [...]."""
    return (total_pages.to(torch.int64) - (sink_pages + window_pages)).clamp_min(0)


def apply_rule(
    parameters: RuleParameters,
    key: Tensor,
    mass: Tensor,
    forced_share: Tensor | float,
    total_pages: Tensor | int,
    sink_pages: int,
    window_pages: int,
    *,
    limit: int | None = None,
) -> Tensor:
    """Choose the candidates that are attended.

    Larger keys first, ties to the lower page index, NaN and +inf before everything. With n candidates and
    hi = min(n, max_pages, limit), lo = min(min_pages, hi), the number of pages is

    - ``threshold``: the number of pages with mass >= tau, clamped to lo..hi;
    - ``budget``: what budget_pages or budget_fraction leave beside the always-attended pages, at most n (and ``limit``);
    - ``coverage``: the fewest pages that, with the forced share, reach the target, clamped to lo..hi; pages with
      a broken mass are all taken.

    A row with n <= min_pages is taken whole, whatever the rule; and so is a row of a request of at most full_pages pages.

    Args:
        parameters: the rule. ``combine`` is not used here.
        key: float [..., P], ranking key of the candidates; the mass for ``combine`` softmax.
        mass: float [..., P], estimated group-mean mass of the candidates.
        forced_share: float [...], estimated group-mean mass of the always-attended pages.
        total_pages: int [...], pages of the request, forced pages and the open page counted.
        sink_pages: always-attended pages at the start.
        window_pages: always-attended pages at the end.
        limit: the most candidates a page table has room for; None: no limit.

    Returns:
        bool [..., P].

    Raises:
        ValueError: the rule is unknown or lacks a parameter.

    Source: docs/how-it-works.md.
    """
    total = torch.as_tensor(total_pages, device=key.device).to(torch.int64).expand(key.shape[:-1])
    share = torch.as_tensor(forced_share, device=key.device, dtype=torch.float32).expand(key.shape[:-1])
    candidates = candidate_pages(total, sink_pages, window_pages).clamp_max(key.shape[-1])
    key, mass = rankable(key), rankable(mass)
    order = descending(key, candidates)

    wanted = rule_pages(parameters, mass, order, share, total, candidates, sink_pages + window_pages, limit=limit)
    return take(order, wanted) & candidate_positions(key, candidates)


def rule_pages(
    parameters: RuleParameters,
    mass: Tensor,
    order: Tensor,
    share: Tensor,
    total: Tensor,
    candidates: Tensor,
    forced_pages: int,
    *,
    limit: int | None = None,
) -> Tensor:
    """How many candidates a rule takes, int64 [...], between 0 and ``candidates``; see `apply_rule`. ``budget`` looks at no mass.

    Args:
        mass: rankable float32 [..., P].
        order: int64 [..., P], candidates best first (`kvskim.rules.ranking.descending`).
        share: float32 [...], estimated group-mean mass of the always-attended pages.
        total: int64 [...], pages of the request.
        candidates: int64 [...], how many leading positions of each row are candidates.
        forced_pages: always-attended pages.

    Raises:
        ValueError: the rule is unknown or lacks a parameter.
    """
    most = candidates if limit is None else candidates.clamp_max(max(limit, 0))
    if parameters.rule == "budget":
        wanted = budget_pages(total, forced_pages, parameters.budget_pages, parameters.budget_fraction)
        least = torch.zeros_like(most)
    elif parameters.rule in ("threshold", "coverage"):
        if parameters.rule == "threshold":
            wanted = threshold_pages(mass, candidates, parameters.tau)
        else:
            wanted = coverage_pages(mass, order, candidates, share, parameters.coverage)
        if parameters.max_pages is not None:
            most = most.clamp_max(parameters.max_pages)
        least = most.clamp_max(parameters.min_pages)
    else:
        raise ValueError(f"rule must be threshold, budget or coverage, not {parameters.rule!r}")
    wanted = torch.minimum(torch.maximum(wanted, least), most)
    return torch.where((candidates <= parameters.min_pages) | (total <= parameters.full_pages), candidates, wanted)


def covered_mass(selected: Tensor, mass: Tensor, forced_share: Tensor, candidates: Tensor) -> Tensor:
    """Estimated group-mean mass of the attended pages, for metrics.

    The forced share plus the mass of the selected candidates, where a broken mass (NaN or inf) counts as 0. Exactly 1 where
    every candidate is selected.

    Args:
        selected: bool [..., P].
        mass: float32 [..., P].
        forced_share: float32 [...].
        candidates: int64 [...].

    Returns:
        float32 [...].
    """
    known = torch.where(selected & torch.isfinite(mass), mass, 0.0).sum(-1, dtype=torch.float32)
    total = known + torch.where(torch.isfinite(forced_share), forced_share, 0.0)
    return torch.where(selected.sum(-1) == candidates, 1.0, total)
