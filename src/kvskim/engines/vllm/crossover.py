"""Up to which length a request attends all of its pages because choosing would take as long."""

from __future__ import annotations

from dataclasses import replace

from kvskim.layout import PAGE_TOKENS
from kvskim.rules import RuleParameters

SPARE_BYTES = 20 << 20
"""K and V that attention reads in the time that preparing a query, scoring and selecting take: an estimate from docs/benchmarks/kernels.md.

That time hardly depends on the batch size, the K and V of all pages do: so the length at which choosing starts to pay falls with the batch.
"""

LATENT_SPARE_BYTES = 24 << 20
"""The same for the rows of latent attention, from docs/benchmarks/latent-step.txt: for one row, attending all of 1,500 pages takes about as long as the step
that chooses 128 of them. For more than 16 query heads both take longer, choosing and attending all, and the same length is an estimate."""

LEAST_SHARES = 8
"""Fewer pairs of row and kv head than this count as so many; not with latent attention, whose one kv head is shared out in more splits."""


def whole_rule(
    rule: RuleParameters, forced_pages: int, rows: int, kv_heads: int, row_bytes: int, *, fast: bool, latent: bool = False
) -> RuleParameters:
    """The rule for a launch of so many rows where the configuration leaves ``full_pages`` to the engine.

    Args:
        rule: as configured.
        forced_pages: sink and window pages.
        rows: of the launch; with graphs, of the captured batch.
        kv_heads: of this rank.
        row_bytes: bytes of K and V of one token and kv head.
        fast: attention of all pages is as fast as FlashAttention's, which holds where the CUDA kernels are used.
        latent: of latent attention.

    Returns:
        The rule with ``full_pages`` = what it attends in any case + ``SPARE_BYTES`` / (max(rows x kv_heads, 8) x bytes of a page); for latent
        attention ``LATENT_SPARE_BYTES`` and no minimum.
    """
    certain = rule.budget_pages if rule.budget_pages is not None else forced_pages + rule.min_pages
    # Few (row, kv head) leave most of the GPU idle, however long they are, and attention is not as fast as FlashAttention's then.
    shares = max(rows * kv_heads, 1 if latent else LEAST_SHARES)
    spare = (LATENT_SPARE_BYTES if latent else SPARE_BYTES) // (shares * PAGE_TOKENS * row_bytes) if fast else 0
    return replace(rule, full_pages=certain + spare)
