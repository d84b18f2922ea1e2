"""Rule ``budget``: attend exactly so many pages, sink and window pages counted."""

from __future__ import annotations

import torch
from torch import Tensor

FRACTION_BITS = 40
FRACTION_SLACK = 1 << 20


def fixed_fraction(fraction: float) -> int:
    """A fraction in units of 2^-40, the form that every implementation multiplies with."""
    return round(fraction * (1 << FRACTION_BITS))


def fraction_pages(fraction: float, total_pages: Tensor) -> Tensor:
    """ceil(fraction * total_pages), in integers.

    The fraction is rounded to a multiple of 2^-40, and a product less than 2^-20 above a whole number is that number, so that
    0.1 of 30 pages is 3, which floating point would make 4.

    Args:
        fraction: 0 to 1.
        total_pages: int64 [...], at most 2^20.

    Returns:
        int64 [...].
    """
    numerator = total_pages.to(torch.int64) * fixed_fraction(fraction)
    return (numerator + ((1 << FRACTION_BITS) - 1 - FRACTION_SLACK)) >> FRACTION_BITS


def budget_pages(total_pages: Tensor, forced_pages: int, pages: int | None, fraction: float | None) -> Tensor:
    """How many candidates a budget leaves room for, beside the always-attended pages.

    k = pages - forced_pages, or max(ceil(fraction * total_pages), forced_pages) - forced_pages; never negative.

    Args:
        total_pages: int64 [...], pages of each request.
        forced_pages: sink plus window pages.
        pages: absolute budget; wins over ``fraction``.
        fraction: budget as a part of all pages.

    Returns:
        int64 [...].

    Raises:
        ValueError: neither ``pages`` nor ``fraction`` is given.

    Source: docs/how-it-works.md.
    """
    if pages is not None:
        return torch.full_like(total_pages, max(pages - forced_pages, 0))
    if fraction is None:
        raise ValueError("rule budget needs budget_pages or budget_fraction")
    return (fraction_pages(fraction, total_pages) - forced_pages).clamp_min(0)
