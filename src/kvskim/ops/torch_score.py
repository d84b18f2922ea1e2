"""`kvskim.ops.score.score` in plain torch: the selectors' own scores, request by request. For CPUs and for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.selectors.base import PageTables
from kvskim.selectors.sketch import SketchTables

EXPONENT_LIMIT = 83.0


def offset_of(tables: PageTables | SketchTables) -> Tensor:
    """float32 ``[H, D]``: the vector whose score is ``base``."""
    return tables.mean if isinstance(tables, SketchTables) else tables.offset


def gather_tokens(cache: Tensor, block_table_row: Tensor, tokens: Tensor) -> Tensor:
    """Rows ``[n, H, D]`` of logical ``tokens`` of one request from a paged cache ``[blocks, block_size, H, D]``."""
    block_size = cache.shape[1]
    blocks = block_table_row[tokens // block_size].long()
    return cache[blocks, tokens % block_size]


def physical_pages(block_table_row: Tensor, pages: Tensor, block_size: int) -> Tensor:
    """Physical page ids of logical ``pages`` of one request."""
    per_block = block_size // PAGE_TOKENS
    return block_table_row[pages // per_block].long() * per_block + pages % per_block


def score_torch(
    selector: Any, tables: Any, query: Tensor, key_cache: Tensor, records: Tensor, block_table: Tensor, seq_lens: Tensor, *, scale: float, softcap: float,
    sink_pages: int, window_pages: int, k_scale: float, scores: Tensor, base: Tensor, forced: Tensor, partials: Tensor,
) -> None:
    """Arguments as in `kvskim.ops.score.score`."""
    heads = key_cache.shape[2]
    group = query.shape[1] // heads
    chunks = partials.shape[2]
    grouped = query.float().unflatten(1, (heads, group)) * scale
    for r, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        total = ceil_div(length, PAGE_TOKENS)
        static = torch.einsum("hgd,hd->hg", grouped[r], offset_of(tables).float())
        base[r, :, :group] = static
        first_window = max(total - window_pages, 0)
        pages = torch.arange(total, device=query.device)
        is_forced = (pages < sink_pages) | (pages >= first_window)
        tokens = (pages[is_forced][:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=query.device)).flatten()
        tokens = tokens[tokens < length]
        keys = gather_tokens(key_cache, block_table[r], tokens).float() * k_scale
        logits = torch.einsum("hgd,thd->hgt", grouped[r], keys)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        forced[r, :, :group] = logits.logsumexp(-1) - static
        if first_window == 0:
            continue
        scored = pages[:first_window]
        physical = physical_pages(block_table[r], scored, key_cache.shape[1])
        estimate = selector.score(grouped[r][None], records[physical], tables)[0] - static[:, None]  # [H, P, G]
        limit = 60_000.0 if scores.dtype == torch.float16 else torch.finfo(torch.float32).max
        scores[r, :, :first_window, :group] = estimate.clamp(-limit, limit).to(scores.dtype)
        terms = torch.exp((estimate - forced[r, :, None, :group]).clamp_max(EXPONENT_LIMIT))
        terms[:, :sink_pages] = 0
        tiles = ceil_div(first_window, 16)
        padded = torch.nn.functional.pad(terms, (0, 0, 0, tiles * 16 - first_window)).unflatten(1, (tiles, 16)).sum(2)  # [H, tiles, G]
        for chunk in range(min(chunks, tiles)):
            partials[r, :, chunk, :group] = padded[:, chunk::chunks].sum(1)
