"""The CUDA kernel of ``select``: one launch, one thread-block cluster per (request, kv head). See select.cu."""

from __future__ import annotations

from torch import Tensor

from kvskim.ops.cuda.library import FLOAT, INT, LONG, POINTER, STREAM, function, operator, pointer, stream
from kvskim.rules import RuleParameters
from kvskim.rules.budget import fixed_fraction
from kvskim.rules.coverage import coverage_target

RULE_CODES = {"threshold": 0, "budget": 1, "coverage": 2}
COMBINE_CODES = {"softmax": 0, "peak": 1, "max": 2}
OVERLAP_PREVIOUS = 1
LENGTHS_SETTLED = 2

_launch = function("kvskim_select", (*[POINTER] * 10, *[INT] * 9, FLOAT, INT, LONG, LONG, *[INT] * 7, STREAM))


def select_cuda(
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
    overlap: bool = False,
    settled: bool = False,
    cluster: int = 0,
) -> None:
    """`kvskim.ops.select.select` on Hopper; arguments as there, already checked.

    Args:
        cluster: thread blocks per (request, kv head): 1, 2, 4, 8 or 16; 0: chosen from the shapes. At most 32,768 pages each.

    Raises:
        RuntimeError: the launch is refused, e.g. for more than 524,288 pages.
    """
    select_rows(
        scores, base, forced, partials, seq_lens, ready, pages, counts, covered, keys, group, RULE_CODES[rule.rule], COMBINE_CODES[rule.combine],
        rule.tau, -1 if rule.budget_pages is None else rule.budget_pages, fixed_fraction(rule.budget_fraction or 0.0),
        coverage_target(rule.coverage or 0.0), rule.min_pages, -1 if rule.max_pages is None else rule.max_pages, sink_pages, window_pages,
        rule.full_pages, cluster, (OVERLAP_PREVIOUS | (LENGTHS_SETTLED if settled else 0)) if overlap else 0,
    )


@operator("cuda_select", mutates=("pages", "counts", "covered", "keys"))
def select_rows(
    scores: Tensor, base: Tensor, forced: Tensor, partials: Tensor, seq_lens: Tensor, ready: Tensor, pages: Tensor, counts: Tensor, covered: Tensor,
    keys: Tensor | None, group: int, rule: int, combine: int, tau: float, budget_pages: int, fraction: int, target: int, min_pages: int, max_pages: int,
    sink_pages: int, window_pages: int, full_pages: int, cluster: int, flags: int,
) -> None:
    """`select_cuda` with its rule in numbers: tensors as there; -1 for a budget or a limit that is not set.

    Args:
        rule, combine: RULE_CODES, COMBINE_CODES.
        fraction, target: budget fraction and coverage in fixed point, see `fixed_fraction` and `coverage_target`.
        flags: OVERLAP_PREVIOUS, LENGTHS_SETTLED.
    """
    requests, heads, page_capacity, padded_group = scores.shape
    _launch(
        *map(pointer, (scores, base, forced, partials, seq_lens, ready, pages, counts, covered, keys)), requests, heads, page_capacity, group,
        padded_group, partials.shape[2], pages.shape[2], rule, combine, tau, budget_pages, fraction, target, min_pages, max_pages, sink_pages,
        window_pages, full_pages, cluster, flags, stream(scores.device),
    )
