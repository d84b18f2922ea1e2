"""The Triton kernels of ``select``: the portable twin of select.cu.

Two launches: the ranking keys of all candidates, in parallel over pages; then one program per (request, kv head) that finds the
cut digit by digit, 4 bits at a time (the same descent as select_descent.cuh), and writes the table. Combine "peak" needs one more,
for the largest score of every query head. Work follows the live length of each request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvskim.rules import RuleParameters
from kvskim.rules.budget import fixed_fraction
from kvskim.rules.coverage import coverage_target

RULE_CODES = {"threshold": 0, "budget": 1, "coverage": 2}
COMBINE_CODES = {"softmax": 0, "peak": 1, "max": 2}
KEY_BLOCK = 256
ROW_BLOCK = 1024
"""Pages at a time; fewer where the scores of a wide group are read along, to stay in registers."""

# Enumerations of the kernels; named constants because a jitted function may read no other globals.
BUDGET = tl.constexpr(1)
COVERAGE = tl.constexpr(2)
SOFTMAX = tl.constexpr(0)
PEAK = tl.constexpr(1)
MAXIMUM = tl.constexpr(2)
EXPONENT_LIMIT = tl.constexpr(83.0)
MASS_ONE = tl.constexpr(2147483648.0)
ABOVE_ALL_BITS = tl.constexpr(1 << 33)


@triton.jit
def _total_pages(seq_lens, request):
    return (tl.maximum(tl.load(seq_lens + request), 0) + 15) // 16


@triton.jit
def _shares(partials, row, chunks, tiles, GROUP: tl.constexpr, PADDED: tl.constexpr):
    """1 / (1 + sum of the valid partials) of every query head; 0 in padded columns."""
    head = tl.arange(0, PADDED)
    chunk = tl.arange(0, 32)
    sums = tl.zeros([32, PADDED], tl.float32)
    valid = tl.minimum(chunks, tiles)
    for first in range(0, valid, 32):
        inside = ((first + chunk) < valid)[:, None] & (head < GROUP)[None, :]
        offset = (row.to(tl.int64) * chunks + first + chunk)[:, None] * PADDED + head[None, :]
        sums += tl.load(partials + offset, mask=inside, other=0.0)
    return tl.where(head < GROUP, 1.0 / (1.0 + tl.sum(sums, 0)), 0.0)


@triton.jit
def _load_scores(scores, row, page, inside, page_capacity, GROUP: tl.constexpr, PADDED: tl.constexpr):
    head = tl.arange(0, PADDED)
    offset = (row.to(tl.int64) * page_capacity + page)[:, None] * PADDED + head[None, :]
    return tl.load(scores + offset, mask=inside[:, None] & (head < GROUP)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _weighted(score, offset, weight):
    """sum_g weight_g exp(min(score_g - offset_g, 83)); NaN for a NaN or infinite score, which is broken."""
    exponent = score - offset[None, :]
    exponent = tl.where(exponent > EXPONENT_LIMIT, exponent * 0.0 + EXPONENT_LIMIT, exponent)
    return tl.sum(tl.exp(exponent) * weight[None, :], 1)


@triton.jit
def _bits(key, IS_SIGNED: tl.constexpr):
    """Integers of 32 bits that order like the keys."""
    bits = key.to(tl.int32, bitcast=True).to(tl.int64)
    if IS_SIGNED:
        bits = tl.where(bits >= 0, bits + 2147483648, -1 - bits)
    return bits


@triton.jit
def _fixed_mass(key):
    """floor(mass * 2^31 + 0.5) of a mass clamped to 0..1; 0 for a broken mass."""
    known = tl.where(key < float("inf"), tl.minimum(key, 1.0), 0.0)
    return (known.to(tl.float64) * MASS_ONE + 0.5).to(tl.int64)


@triton.jit
def _peak_kernel(
    scores, peaks, seq_lens, heads, page_capacity, sink, window, GROUP: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    candidates = tl.minimum(_total_pages(seq_lens, row // heads) - window, page_capacity) - sink
    head = tl.arange(0, PADDED)
    peak = tl.full([PADDED], float("-inf"), tl.float32)
    for first in range(0, candidates, BLOCK):
        index = first + tl.arange(0, BLOCK)
        score = _load_scores(scores, row, sink + index, index < candidates, page_capacity, GROUP, PADDED)
        finite = (score > float("-inf")) & (score < float("inf")) & (index < candidates)[:, None]
        peak = tl.maximum(peak, tl.max(tl.where(finite, score, float("-inf")), 0))
    tl.store(peaks + row * PADDED + head, tl.where(peak > float("-inf"), peak, 0.0))


@triton.jit
def _key_kernel(
    scores,
    base,
    forced,
    partials,
    peaks,
    seq_lens,
    keys,
    heads,
    page_capacity,
    chunks,
    sink,
    window,
    min_pages,
    full_pages,
    COMBINE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    total = _total_pages(seq_lens, row // heads)
    candidates = tl.minimum(total - window, page_capacity) - sink
    first = tl.program_id(1) * BLOCK
    if (candidates > min_pages) & (total > full_pages) & (first < candidates):
        index = first + tl.arange(0, BLOCK)
        inside = index < candidates
        head = tl.arange(0, PADDED)
        is_head = head < GROUP
        score = _load_scores(scores, row, sink + index, inside, page_capacity, GROUP, PADDED)
        if COMBINE == SOFTMAX:
            share = _shares(partials, row, chunks, (total - window + 15) // 16, GROUP, PADDED)
            offset = tl.load(forced + row * PADDED + head, mask=is_head, other=0.0)
            key = _weighted(score, offset, share / GROUP)
        elif COMBINE == PEAK:
            offset = tl.load(peaks + row * PADDED + head, mask=is_head, other=0.0)
            key = _weighted(score, offset, tl.where(is_head, 1.0, 0.0))
        else:
            shift = tl.load(base + row * PADDED + head, mask=is_head, other=0.0)
            absolute = score + shift[None, :]
            broken = tl.sum(tl.where((absolute != absolute) & is_head[None, :], 1, 0), 1) > 0
            absolute = tl.where((absolute == absolute) & is_head[None, :], absolute, float("-inf"))
            key = tl.where(broken, float("inf"), tl.max(absolute, 1) + 0.0)
        key = tl.where(key < float("inf"), key, float("inf"))
        if COMBINE != MAXIMUM:
            key = tl.where(key > 0.0, key, 0.0)
        tl.store(keys + row.to(tl.int64) * page_capacity + sink + index, key, mask=inside)


@triton.jit
def _row_kernel(
    scores,
    forced,
    partials,
    seq_lens,
    ready,
    keys,
    pages,
    counts,
    covered,
    heads,
    page_capacity,
    table_capacity,
    chunks,
    sink,
    window,
    min_pages,
    full_pages,
    limit,
    budget_pages,
    fraction,
    target,
    tau,
    RULE: tl.constexpr,
    COMBINE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    total = _total_pages(seq_lens, row // heads)
    candidates = tl.minimum(total - window, page_capacity) - sink
    most = tl.minimum(candidates, limit)
    budget = most
    if RULE == BUDGET:
        wanted = tl.zeros([], tl.int64) + budget_pages
        if budget_pages < 0:
            wanted = (total.to(tl.int64) * fraction + 1099510579199) >> 40
        budget = tl.minimum(tl.maximum(wanted - sink - window, 0), most).to(tl.int32)
    whole = (total == 0) | (candidates <= min_pages) | (total <= full_pages) | (tl.load(ready) == 0)
    if RULE == BUDGET:
        whole = whole | (budget == candidates)
    if whole:
        tl.store(counts + row, total)
        tl.store(covered + row, tl.where(total > 0, 1.0, 0.0))
    else:
        share = _shares(partials, row, chunks, (total - window + 15) // 16, GROUP, PADDED)
        forced_share = tl.sum(share, 0) / GROUP
        forced_share = tl.where(forced_share < float("inf"), forced_share, 0.0)
        row_keys = keys + row.to(tl.int64) * page_capacity + sink
        lanes = tl.arange(0, BLOCK)

        # Selected are the keys with bits above `cut`, and the first `equals` of those equal to it: nothing, for now.
        nothing = most * 0
        cut = tl.zeros([], tl.int64) + ABOVE_ALL_BITS
        equals = nothing
        chosen = nothing
        least = tl.minimum(nothing + min_pages, most)
        goal_mass = tl.zeros([], tl.int64)
        mass = tl.zeros([], tl.int64)
        search = total > 0
        if RULE == BUDGET:
            least = budget
            most = budget
        else:
            # A threshold counts the pages that reach it; coverage the broken ones, which it takes in any case.
            start = tl.full([], float("inf"), tl.float32)
            if RULE != COVERAGE:
                start = tl.zeros([], tl.float32) + tau
            reached = nothing
            for first in range(0, candidates, BLOCK):
                index = first + lanes
                key = tl.load(row_keys + index, mask=index < candidates, other=float("-inf"))
                reached += tl.sum((key >= start).to(tl.int32), 0)
            if RULE == COVERAGE:
                least = tl.minimum(tl.maximum(least, reached), most)
                goal_mass = goal_mass + target
                mass = (tl.minimum(forced_share, 1.0).to(tl.float64) * MASS_ONE + 0.5).to(tl.int64)
            else:
                search = (reached < least) | (reached > most)
                if search:
                    least = tl.minimum(tl.maximum(reached, least), most)
                    most = least
                else:
                    cut = start.to(tl.int32, bitcast=True).to(tl.int64) - 1
                    chosen = reached
        met_by_none = (most <= 0) | ((least <= 0) & (mass >= goal_mass))
        if search & ~met_by_none:
            above = nothing
            prefix = tl.zeros([], tl.int64)
            digits = tl.arange(0, 16)
            for step in range(0, 8):
                shift = 28 - 4 * step
                bin_count = tl.zeros([16], tl.int32)
                bin_mass = tl.zeros([16], tl.int64)
                for first in range(0, candidates, BLOCK):
                    index = first + lanes
                    key = tl.load(row_keys + index, mask=index < candidates, other=0.0)
                    bits = _bits(key, COMBINE == MAXIMUM)
                    inside = (index < candidates) & ((bits >> (shift + 4)) == prefix)
                    hit = inside[:, None] & (((bits >> shift) & 15)[:, None] == digits[None, :])
                    bin_count += tl.sum(hit.to(tl.int32), 0)
                    if RULE == COVERAGE:
                        bin_mass += tl.sum(tl.where(hit, _fixed_mass(key)[:, None], 0), 0)
                end_count = above + tl.cumsum(bin_count, 0, reverse=True)
                end_mass = mass + tl.cumsum(bin_mass, 0, reverse=True)
                start_count = end_count - bin_count
                start_mass = end_mass - bin_mass
                met_before = (start_count >= most) | ((start_count >= least) & (start_mass >= goal_mass))
                met = (end_count >= most) | ((end_count >= least) & (end_mass >= goal_mass))
                crossing = met & ~met_before
                prefix = prefix * 16 + tl.sum(tl.where(crossing, digits, 0), 0)
                above = tl.sum(tl.where(crossing, start_count, 0), 0)
                mass = tl.sum(tl.where(crossing, start_mass, 0), 0)
            cut = prefix
            equals = least - above
            if RULE == COVERAGE:
                each = _fixed_mass(cut.to(tl.int32).to(tl.float32, bitcast=True))
                # A page without mass brings the target no nearer: then it is `most` that ends the selection.
                needed = tl.where(each > 0, (goal_mass - mass + each - 1) // tl.maximum(each, 1), most)
                needed = tl.minimum(tl.where(mass < goal_mass, needed, 0), most).to(tl.int32)
                equals = tl.maximum(equals, needed)
            equals = tl.minimum(equals, most - above)
            chosen = above + equals
        if chosen == candidates:
            tl.store(counts + row, total)
            tl.store(covered + row, 1.0)
        else:
            table = pages + row.to(tl.int64) * table_capacity
            for first in range(0, sink, 16):
                place = first + tl.arange(0, 16)
                tl.store(table + place, place, mask=place < sink)
            for first in range(0, window, 16):
                place = first + tl.arange(0, 16)
                tl.store(table + sink + chosen + place, total - window + place, mask=place < window)
            tl.store(counts + row, sink + chosen + window)
            offset = tl.load(forced + row * PADDED + tl.arange(0, PADDED), mask=tl.arange(0, PADDED) < GROUP, other=0.0)
            written = nothing
            selected_mass = tl.zeros([], tl.float32)
            for first in range(0, candidates, BLOCK):
                index = first + lanes
                inside = index < candidates
                key = tl.load(row_keys + index, mask=inside, other=0.0)
                bits = _bits(key, COMBINE == MAXIMUM)
                is_equal = inside & (bits == cut)
                equal_rank = tl.cumsum(is_equal.to(tl.int32), 0)
                selected = (inside & (bits > cut)) | (is_equal & (equal_rank <= equals))
                place = sink + written + tl.cumsum(selected.to(tl.int32), 0) - 1
                tl.store(table + place, sink + index, mask=selected)
                written += tl.sum(selected.to(tl.int32), 0)
                equals = tl.maximum(equals - tl.sum(is_equal.to(tl.int32), 0), 0)
                of_page = key
                if COMBINE != SOFTMAX:
                    score = _load_scores(scores, row, sink + index, selected, page_capacity, GROUP, PADDED)
                    of_page = _weighted(score, offset, share / GROUP)
                selected_mass += tl.sum(tl.where(selected & (of_page < float("inf")), of_page, 0.0), 0)
            tl.store(covered + row, forced_share + selected_mass)


def select_triton(
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
    """`kvskim.ops.select.select` in Triton; arguments as there, already checked. Allocates what ``keys`` does not give it."""
    requests, heads, page_capacity, padded_group = scores.shape
    rows = requests * heads
    if keys is None:
        keys = torch.empty(requests, heads, page_capacity, dtype=torch.float32, device=scores.device)
    room = pages.shape[2] - sink_pages - window_pages
    limit = room if rule.rule == "budget" or rule.max_pages is None else min(room, rule.max_pages)
    peaks = base
    narrower = max(1, padded_group // 16)
    key_block = KEY_BLOCK // narrower
    if rule.combine == "peak":
        peaks = torch.empty_like(base)
        _peak_kernel[(rows,)](
            scores, peaks, seq_lens, heads, page_capacity, sink_pages, window_pages, GROUP=group, PADDED=padded_group, BLOCK=key_block
        )
    _key_kernel[(rows, triton.cdiv(page_capacity, key_block))](
        scores,
        base,
        forced,
        partials,
        peaks,
        seq_lens,
        keys,
        heads,
        page_capacity,
        partials.shape[2],
        sink_pages,
        window_pages,
        rule.min_pages,
        rule.full_pages,
        COMBINE=COMBINE_CODES[rule.combine],
        GROUP=group,
        PADDED=padded_group,
        BLOCK=key_block,
    )
    _row_kernel[(rows,)](
        scores,
        forced,
        partials,
        seq_lens,
        ready,
        keys,
        pages,
        counts,
        covered,
        heads,
        page_capacity,
        pages.shape[2],
        partials.shape[2],
        sink_pages,
        window_pages,
        rule.min_pages,
        rule.full_pages,
        limit,
        -1 if rule.budget_pages is None else rule.budget_pages,
        fixed_fraction(rule.budget_fraction or 0.0),
        coverage_target(rule.coverage or 0.0),
        rule.tau,
        RULE=RULE_CODES[rule.rule],
        COMBINE=COMBINE_CODES[rule.combine],
        GROUP=group,
        PADDED=padded_group,
        BLOCK=ROW_BLOCK if rule.combine == "softmax" else ROW_BLOCK // narrower,
        num_warps=8,
    )
