"""Public op ``select``: page scores to page tables, by a rule, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.rules import RuleParameters, apply_rule, candidate_pages, combine, covered_mass
from kvskim.rules.ranking import candidate_positions, rankable

PAGE_TOKENS = 16
TILE_PAGES = 16
PADDED_GROUPS = (4, 8, 16, 32, 64, 128)
"""Columns of scores that the kernels take."""


def select(
    scores: Tensor,
    base: Tensor,
    forced: Tensor,
    partials: Tensor,
    seq_lens: Tensor,
    *,
    group: int,
    rule: RuleParameters,
    sink_pages: int,
    window_pages: int,
    ready: Tensor,
    pages: Tensor,
    counts: Tensor,
    covered: Tensor,
    kernels: str,
    keys: Tensor | None = None,
    overlap: bool = False,
    settled: bool = False,
) -> None:
    """Choose the pages that each (request, kv head) attends, and write them as a page table.

    With S = min(scores - forced, 83) and Z_g = 1 + sum of the partials of query head g, the estimated group-mean mass of a page is
    mean_g exp(S_g) / Z_g, and that of the always-attended pages mean_g 1 / Z_g. The rule is `kvskim.rules.apply_rule`; a table
    with less room than the rule wants takes the best pages that fit. A broken score (NaN or inf) counts as "select".

    Where every page is attended (a short request, ``ready`` 0, or a rule that wants all) ``counts`` is the number of pages of the
    request and its table is not written: it stands for all pages. A row with seq_len 0 gets count 0 and covered 0.

    Args:
        scores: [R, H, page_capacity, padded group], page log-masses minus ``base``; float16, or any float with kernels="torch".
            Read only for pages sink <= p < pages of the request - window.
        base: float32 [R, H, padded group], what was subtracted from the scores.
        forced: float32 [R, H, padded group], log-mass of the always-attended pages minus ``base``.
        partials: float32 [R, H, chunks, padded group], sums of exp(S) over chunks of the candidates. Chunk c has the 16-page tiles
            c, c + chunks, ...; chunks without a tile are not read.
        seq_lens: int32 [R], tokens of each request, the one being decoded included.
        group: query heads per kv head; columns beyond it are not read.
        rule: parameters of the rule.
        sink_pages, window_pages: always-attended pages at the start and at the end; window_pages >= 1.
        ready: int32 [1]; 0: the layer is not calibrated, attend everything.
        pages: int32 [R, H, table_capacity], written: logical page indices, ascending, always-attended pages included.
        counts: int32 [R, H], written: entries of each table.
        covered: float32 [R, H], written: estimated mass of the attended pages; 1 where all are.
        kernels: "cuda", "triton" or "torch".
        keys: float32 [R, H, page_capacity] or None: receives the ranking keys of the candidates of rows that are not attended whole.
            Scratch of the Triton kernels, which allocate it when it is None.
        overlap: CUDA only: let the launch begin before the kernel ahead of it in the stream has ended (programmatic dependent launch).
        settled: with ``overlap``: the lengths were complete before the chain of overlapped launches began, so they are read while the kernel
            ahead still runs.

    Raises:
        ValueError: shapes, dtypes, devices or parameters do not fit together, or a table can't hold what the rule must select.

    Source: docs/how-it-works.md.
    """
    _check(scores, base, forced, partials, seq_lens, group, rule, sink_pages, window_pages, ready, pages, counts, covered, kernels, keys)
    if scores.shape[0] == 0 or scores.shape[1] == 0:
        return
    tensors = (scores, base, forced, partials, seq_lens, ready, pages, counts, covered, keys)
    if kernels == "cuda":
        from kvskim.ops.cuda.select import select_cuda

        select_cuda(*tensors, group=group, rule=rule, sink_pages=sink_pages, window_pages=window_pages, overlap=overlap, settled=settled)
    elif kernels != "torch":
        from kvskim.ops.triton.select import select_triton

        select_triton(*tensors, group=group, rule=rule, sink_pages=sink_pages, window_pages=window_pages)
    else:
        select_torch(*tensors, group=group, rule=rule, sink_pages=sink_pages, window_pages=window_pages)


def _check(
    scores: Tensor,
    base: Tensor,
    forced: Tensor,
    partials: Tensor,
    seq_lens: Tensor,
    group: int,
    rule: RuleParameters,
    sink_pages: int,
    window_pages: int,
    ready: Tensor,
    pages: Tensor,
    counts: Tensor,
    covered: Tensor,
    kernels: str,
    keys: Tensor | None,
) -> None:
    if kernels not in ("cuda", "triton", "torch"):
        raise ValueError(f"kernels must be cuda, triton or torch, not {kernels!r}")
    if scores.ndim != 4 or partials.ndim != 4 or pages.ndim != 3:
        raise ValueError("scores and partials must have 4 dimensions, pages 3")
    requests, heads, page_capacity, padded_group = scores.shape
    row = (requests, heads)
    expected = {
        "base": (base, torch.float32, (*row, padded_group)),
        "forced": (forced, torch.float32, (*row, padded_group)),
        "partials": (partials, torch.float32, (*row, partials.shape[2], padded_group)),
        "seq_lens": (seq_lens, torch.int32, (requests,)),
        "ready": (ready, torch.int32, (1,)),
        "pages": (pages, torch.int32, (*row, pages.shape[2])),
        "counts": (counts, torch.int32, row),
        "covered": (covered, torch.float32, row),
    }
    if keys is not None:
        expected["keys"] = (keys, torch.float32, (*row, page_capacity))
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
    for name, (tensor, _, _) in {"scores": (scores, None, None), **expected}.items():
        if tensor.device != scores.device:
            raise ValueError(f"{name} is on {tensor.device}, scores on {scores.device}")
        if kernels != "torch" and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if kernels == "torch":
        if not scores.dtype.is_floating_point:
            raise ValueError(f"scores must be floating point, not {scores.dtype}")
    elif scores.dtype != torch.float16:
        raise ValueError(f"scores must be float16 with kernels={kernels!r}, not {scores.dtype}")
    elif padded_group not in PADDED_GROUPS:
        raise ValueError(f"the padded group must be one of {', '.join(map(str, PADDED_GROUPS))} with kernels={kernels!r}, not {padded_group}")
    elif kernels == "cuda" and scores.data_ptr() % 16:
        raise ValueError("scores must be aligned to 16 bytes")
    if not 1 <= group <= padded_group:
        raise ValueError(f"group={group} must be between 1 and {padded_group}, the last dimension of scores")
    if sink_pages < 0 or window_pages < 1:
        raise ValueError(f"sink_pages={sink_pages} must be >= 0 and window_pages={window_pages} >= 1")
    if page_capacity < 1:
        raise ValueError("scores must have room for at least one page")
    if rule.combine != "softmax" and rule.rule != "budget":
        raise ValueError(f"combine={rule.combine!r} gives no mass: it works only with rule='budget', not {rule.rule!r}")
    _check_room(rule, sink_pages + window_pages, page_capacity + window_pages, pages.shape[2])


def _check_room(rule: RuleParameters, forced_pages: int, most_pages: int, table_capacity: int) -> None:
    """Refuse tables that can't hold what the rule must select in any case."""
    needed = forced_pages
    if rule.rule == "budget":
        needed = max(needed, rule.budget_pages or 0)
    else:
        needed += rule.min_pages if rule.max_pages is None else min(rule.min_pages, rule.max_pages)
    needed = max(forced_pages, min(needed, most_pages))
    if table_capacity < needed:
        raise ValueError(f"pages has room for {table_capacity} pages per (request, kv head), but the rule selects {needed}")


def select_torch(
    scores: Tensor,
    base: Tensor,
    forced: Tensor,
    partials: Tensor,
    seq_lens: Tensor,
    ready: Tensor,
    pages: Tensor,
    counts: Tensor,
    covered: Tensor,
    keys: Tensor | None,
    *,
    group: int,
    rule: RuleParameters,
    sink_pages: int,
    window_pages: int,
) -> None:
    """`select` in plain torch: all rows at once, by sorting. Arguments as there. Allocates; does not wait for the device."""
    requests, heads, page_capacity, _ = scores.shape
    forced_pages = sink_pages + window_pages
    table_capacity = pages.shape[2]
    device = scores.device

    total = torch.div(seq_lens.clamp_min(0).to(torch.int64) + (PAGE_TOKENS - 1), PAGE_TOKENS, rounding_mode="floor")
    total = total.unsqueeze(1).expand(requests, heads)
    room = max(page_capacity - sink_pages, 0)
    candidates = candidate_pages(total, sink_pages, window_pages).clamp_max(room)
    length = min(room, int(candidates.max())) if device.type == "cpu" else room

    tiles = torch.div(total - window_pages + (TILE_PAGES - 1), TILE_PAGES, rounding_mode="floor")
    written = candidate_positions(partials[..., 0], tiles).unsqueeze(-1)
    sums = torch.where(written, partials, 0.0).sum(2)[..., :group]

    valid = torch.arange(length, device=device) < candidates.unsqueeze(-1)
    candidate_scores = scores[:, :, sink_pages : sink_pages + length, :group]
    combined = combine(candidate_scores, base[..., :group], forced[..., :group], rule.combine, sums=sums, valid=valid)
    selected = apply_rule(
        rule,
        combined.key,
        combined.mass,
        combined.forced_share,
        total,
        sink_pages,
        window_pages,
        limit=table_capacity - forced_pages,
    )
    chosen = selected.sum(-1)
    whole = (chosen == candidates) | (ready == 0)
    mass = covered_mass(selected, combined.mass, combined.forced_share, candidates)
    covered.copy_(torch.where(total == 0, 0.0, torch.where(whole, 1.0, mass)))
    counts.copy_(torch.where(whole, total, chosen + forced_pages))
    if keys is not None:
        target = keys[:, :, sink_pages : sink_pages + length]
        target.copy_(torch.where(valid & ~whole.unsqueeze(-1), rankable(combined.key), target))

    # Unselected candidates go to a column that is cut off again.
    column = torch.where(selected, sink_pages + selected.cumsum(-1) - 1, table_capacity).clamp_max(table_capacity)
    table = torch.zeros(requests, heads, table_capacity + 1, dtype=torch.int64, device=device)
    table.scatter_(2, column, torch.arange(sink_pages, sink_pages + length, device=device).expand_as(column))
    place = torch.arange(table_capacity, device=device)
    behind = place - (sink_pages + chosen).unsqueeze(-1)
    table = torch.where(behind >= 0, (total - window_pages).unsqueeze(-1) + behind, table[..., :table_capacity])
    table = torch.where(place < sink_pages, place, table)
    used = (place < counts.unsqueeze(-1)) & ~whole.unsqueeze(-1)
    pages.copy_(torch.where(used, table, pages.to(torch.int64)))
