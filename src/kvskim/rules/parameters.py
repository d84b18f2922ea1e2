"""The numbers a rule needs, apart from the scores: what `SkimConfig.rule_parameters` hands to the operations and the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RuleName = Literal["threshold", "budget", "coverage"]
CombineName = Literal["softmax", "peak", "max"]

RULE_NAMES: tuple[RuleName, ...] = get_args(RuleName)
COMBINE_NAMES: tuple[CombineName, ...] = get_args(CombineName)

DEFAULT_TAU = 0.005
DEFAULT_COVERAGE = 0.95
DEFAULT_MIN_PAGES = 8
DEFAULT_WINDOW_PAGES = 2


@dataclass(frozen=True)
class RuleParameters:
    """Parameters of one rule, already validated by `SkimConfig`.

    Attributes:
        rule: how the scores of a (request, kv head) become a page table.
        tau: rule threshold: smallest estimated group-mean mass of a page that is attended, 0 < tau <= 1.
        budget_pages: rule budget: pages attended, counting sink and window pages; None where a fraction is used.
        budget_fraction: rule budget: share of the request's pages attended, counting sink and window pages; None where a number is used.
        coverage: rule coverage: mass that the attended pages must reach, 0 < coverage <= 1; None with another rule.
        min_pages: fewest candidate pages attended, without sink and window pages; a request with no more candidates than this attends all.
            Always 0 with rule budget.
        max_pages: most candidate pages attended, without sink and window pages; None for no limit.
        full_pages: a request of no more pages than this attends all of them, whatever the rule; sink, window and open page counted.
        combine: how the scores of the query heads of one kv head become one number per page.

    Raises:
        ValueError: the rule lacks the number it is defined by, or has two of them.
    """

    rule: RuleName = "threshold"
    tau: float = DEFAULT_TAU
    budget_pages: int | None = None
    budget_fraction: float | None = None
    coverage: float | None = None
    min_pages: int = DEFAULT_MIN_PAGES
    max_pages: int | None = None
    combine: CombineName = "softmax"
    full_pages: int = 0

    def __post_init__(self) -> None:
        if self.rule not in RULE_NAMES:
            raise ValueError(f"rule={self.rule!r} must be one of {', '.join(RULE_NAMES)}")
        if self.rule == "budget" and (self.budget_pages is None) == (self.budget_fraction is None):
            raise ValueError(
                f"rule='budget' needs exactly one of budget_pages={self.budget_pages!r} and budget_fraction={self.budget_fraction!r}"
            )
        if self.rule == "budget" and self.min_pages:
            # A budget is never exceeded, so a short request has no floor of its own under this rule.
            object.__setattr__(self, "min_pages", 0)
        if self.rule == "coverage" and self.coverage is None:
            raise ValueError("rule='coverage' needs coverage=None to be a number with 0 < coverage <= 1")
