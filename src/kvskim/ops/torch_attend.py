"""Plain torch version of `kvskim.ops.attend`: the definition that the kernels are compared with, and what CPUs run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS


def attend_torch(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, *,
    scale: float, softcap: float, k_scale: float, v_scale: float, out: Tensor, lse: Tensor | None,
) -> None:
    """Same arguments and results as `kvskim.ops.attend.attend`. Computes in float32, or in float64 when the query is float64."""
    attend_rows(
        query, key_cache, lambda tokens: rows(key_cache, tokens), lambda tokens: rows(value_cache, tokens), block_table, seq_lens, pages, counts,
        scale=scale, softcap=softcap, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
    )


def attend_rows(
    query: Tensor, key_cache: Tensor, key_rows: Callable[[Tensor], Tensor], value_rows: Callable[[Tensor], Tensor], block_table: Tensor,
    seq_lens: Tensor, pages: Tensor, counts: Tensor, *, scale: float, softcap: float, k_scale: float, v_scale: float, out: Tensor, lse: Tensor | None,
) -> None:
    """`attend_torch` with keys and values from wherever they are: ``key_rows`` and ``value_rows`` give rows ``[R, H, W, ..]`` of physical tokens
    ``[R, H, W]``; ``key_cache`` is only asked for its sizes."""
    requests, query_heads, dim = query.shape
    heads = key_cache.shape[2]
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    tokens, positions = gather_tokens(block_table, seq_lens, pages, counts, key_cache.shape[1])
    width = tokens.shape[2]
    if width == 0:
        return
    live = positions < seq_lens.clamp(min=0)[:, None, None]
    keys = key_rows(tokens).to(precision).masked_fill(~live[..., None], 0.0) * k_scale
    values = value_rows(tokens).to(precision).masked_fill(~live[..., None], 0.0) * v_scale
    grouped = query.to(precision).view(requests, heads, query_heads // heads, dim)
    logits = scale * torch.einsum("rhgd,rhtd->rhgt", grouped, keys)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~live[:, :, None, :], -torch.inf)
    total = torch.logsumexp(logits, -1, keepdim=True)
    weights = torch.where(torch.isneginf(total), 0.0, torch.exp(logits - torch.where(torch.isneginf(total), 0.0, total)))
    out.copy_(torch.einsum("rhgt,rhtd->rhgd", weights, values).reshape(requests, query_heads, -1))
    if lse is not None:
        lse.copy_(total.view(requests, query_heads))


def gather_tokens(block_table: Tensor, seq_lens: Tensor, pages: Tensor, counts: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Physical token index and position of every token of the selected pages.

    Returns:
        tokens int64 ``[R, H, W]``: block * block_size + offset, and positions int64 ``[R, H, W]``. Entries that no page fills hold
        token 0 and a position beyond every request.
    """
    total = (seq_lens.clamp(min=0).long() + PAGE_TOKENS - 1) // PAGE_TOKENS
    count = counts.long().clamp(min=0).minimum(total[:, None])
    identity = count == total[:, None]
    width = int(count.max()) if count.numel() else 0
    index = torch.arange(width, device=pages.device)
    listed = torch.zeros(*counts.shape, width, dtype=torch.long, device=pages.device)
    shared = min(width, pages.shape[2])
    listed[..., :shared] = pages[..., :shared]
    live = index < count[..., None]
    page = torch.where(live, torch.where(identity[..., None], index, listed), 0)
    pages_per_block = block_size // PAGE_TOKENS
    rows = torch.arange(pages.shape[0], device=pages.device)[:, None, None]
    block = torch.where(live, block_table[rows, page // pages_per_block].long(), 0)
    token = torch.arange(PAGE_TOKENS, device=pages.device)
    tokens = (block * block_size + page % pages_per_block * PAGE_TOKENS)[..., None] + token
    positions = torch.where(live, page * PAGE_TOKENS, torch.iinfo(torch.int32).max)[..., None] + token
    return torch.where(live[..., None], tokens, 0).flatten(2), positions.flatten(2)


def rows(cache: Tensor, tokens: Tensor) -> Tensor:
    """Rows ``[R, H, W, D]`` of a cache view ``[blocks, block_size, H, D]``."""
    size = cache.shape[1]
    head = torch.arange(cache.shape[2], device=cache.device)[None, :, None]
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[tokens // size, tokens % size, head].view(cache.dtype)
    return cache[tokens // size, tokens % size, head]
