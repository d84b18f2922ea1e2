"""How far the query tables of a sketch are stretched, token mode by token mode, so that the pages that count get the scores they have."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvskim.calibration_heads import page_ages
from kvskim.layout import PAGE_TOKENS, ceil_div, dct_matrix
from kvskim.rules.parameters import DEFAULT_WINDOW_PAGES
from kvskim.selectors.sketch import SketchTables, encode_codes

SAMPLED_QUERIES = 128
"""Queries of each head that are looked at, at most: they fit 16 numbers."""
BLOCK_QUERIES = 4
"""Queries of each head at a time: bounds the memory for their logits."""
RIDGE = 0.3
"""Pull of the gains to 1, as a share of the second moment of each mode's part."""
GAIN_RANGE = (0.5, 2.0)
"""Limits of the gains, for a fit on next to nothing."""


def stretch_modes(tables: SketchTables, pages: Tensor, queries: Tensor, first: Tensor, positions: Tensor | None) -> SketchTables:
    """Tables whose query matrix is multiplied by one gain per (kv head, token mode).

    A query attends the pages that lie along it, and of these a sketch sees too little: what it leaves out of a page is part of what the query looks for. How
    much differs between modes, as their digits do, so modes would count too little beside one another. The gains are those of least squared error in the
    log-mass of a page, to first order (each token counts by its share of the page's attention), up to a constant per query, which changes no choice.
    Pages count by the square root of their attention mass: not only the heaviest ones, which every choice has, but those at the edge of one too. The newest
    pages, always attended, don't count.

    Args:
        tables: of H kv heads, not in the page frame.
        pages: keys ``[H, P, 16, D]`` at their own positions.
        queries: ``[Hq, n, D]``, multiplied by the softmax scale.
        first: int64 ``[P]``, position of the first token of each page.
        positions: int64 ``[n]``, of the queries; None: unknown, every query sees all pages.
    """
    heads = pages.shape[0]
    device = pages.device
    layout, transform = tables.layout, dct_matrix(device=device)
    stride = max(1, ceil_div(queries.shape[1], SAMPLED_QUERIES))
    sample = queries[:, ::stride].unflatten(0, (heads, -1)).float()
    at = None if positions is None else positions[::stride].to(device)
    local = tables.to(device)
    half = 2.0 ** (local.coefficient_bits.float() - 1)
    used = local.coefficient_bits > 0
    # Middle of each code's interval, in steps; [H, P, S].
    values = torch.where(used[:, None], encode_codes(pages.transpose(0, 1), local).transpose(0, 1) - half[:, None] + 0.5, 0.0)
    query_matrix = local.query_matrix.float()
    moment, target = torch.zeros(heads, PAGE_TOKENS, PAGE_TOKENS, device=device), torch.zeros(heads, PAGE_TOKENS, device=device)
    for start in range(0, sample.shape[2], BLOCK_QUERIES):
        block = sample[:, :, start : start + BLOCK_QUERIES].flatten(1, 2)  # [H, N, D]
        group = sample.shape[1]
        logits = torch.einsum("hnd,hptd->hnpt", block, pages) - torch.einsum("hnd,hd->hn", block, local.mean)[..., None, None]
        weights = block @ query_matrix.transpose(1, 2)
        estimate = torch.stack([
            weights[..., a:b] @ values[..., a:b].transpose(1, 2) for a, b in zip(layout.mode_start, layout.mode_start[1:])
        ], -1)  # [H, N, P, 16]
        log_mass = logits.logsumexp(-1)
        if at is not None:
            age = page_ages(at[start : start + BLOCK_QUERIES], first).repeat(group, 1)
            log_mass = log_mass.masked_fill(age < 0, torch.finfo(torch.float32).min)
        importance = (0.5 * log_mass.log_softmax(-1)).exp()
        if at is not None:
            importance = importance.masked_fill(age < DEFAULT_WINDOW_PAGES, 0)
        importance = importance / importance.sum(-1, keepdim=True).clamp_min(1e-30)
        share = logits.softmax(-1) @ transform
        parts = share * estimate
        missing = (share * (logits @ transform)).sum(-1) - parts.sum(-1)
        parts = parts - (importance[..., None] * parts).sum(2, keepdim=True)
        missing = missing - (importance * missing).sum(2, keepdim=True)
        weighted = (importance[..., None] * parts).flatten(1, 2)
        moment += weighted.transpose(1, 2) @ parts.flatten(1, 2)
        target += (weighted * missing.flatten(1, 2)[..., None]).sum(1)
    diagonal = moment.diagonal(dim1=1, dim2=2)
    # A mode without digits, or no page before any query: nothing to solve, gain 1.
    pulled = moment + torch.diag_embed(RIDGE * diagonal + (diagonal <= 0))
    gains = (1 + torch.linalg.solve(pulled.double(), target.double()).float()).clamp(*GAIN_RANGE)
    stretched = query_matrix * gains[:, layout.slot_mode.to(device), None]
    return replace(tables, query_matrix=stretched.bfloat16().to(tables.query_matrix.device))
