"""Fresh random inputs of the select op, and its definition once more: one row at a time, in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvskim.layout import padded_group
from kvskim.rules import RuleParameters

GUARD = 64
POISON_INT = -987654321
POISON_FLOAT = -12345.0


def brute_force_count(rule: RuleParameters, mass: list[float], forced_share: float, total_pages: int, forced_pages: int) -> int:
    """How many candidates a rule wants, before any table limits it. ``mass`` is in the order of the rule: best first."""
    n = len(mass)
    if n <= rule.min_pages or total_pages <= rule.full_pages:
        return n
    broken = sum(not math.isfinite(m) for m in mass)
    if rule.rule == "budget":
        budget = rule.budget_pages
        if budget is None:
            exact = (round(rule.budget_fraction * 2**40) * total_pages - 2**20) / 2**40
            budget = math.ceil(exact)
        return min(max(budget - forced_pages, 0), n)
    most = n if rule.max_pages is None else min(n, rule.max_pages)
    if rule.rule == "threshold":
        tau = float(torch.tensor(rule.tau, dtype=torch.float32))
        wanted = sum(not math.isfinite(m) or m >= tau for m in mass)
    else:
        fixed = [math.floor(min(m, 1.0) * 2**31 + 0.5) if math.isfinite(m) else 0 for m in mass]
        reached = math.floor(min(forced_share, 1.0) * 2**31 + 0.5)
        wanted = 0
        while wanted < n and reached < int(rule.coverage * 2**31 + 0.5):
            reached += fixed[wanted]
            wanted += 1
        wanted = max(wanted, broken)
    return min(max(wanted, min(rule.min_pages, most)), most)


def brute_force_row(
    rule: RuleParameters, key: Tensor, mass: Tensor, forced_share: float, total_pages: int, forced_pages: int, limit: int | None = None
) -> list[int]:
    """The selected candidates of one row, ascending."""
    keys = [math.inf if math.isnan(k) else k for k in key.tolist()]
    masses = mass.tolist()
    order = sorted(range(len(keys)), key=lambda i: (-keys[i], i))
    count = brute_force_count(rule, [masses[i] for i in order], forced_share, total_pages, forced_pages)
    if limit is not None and len(keys) > rule.min_pages and total_pages > rule.full_pages:
        count = min(count, limit)
    return sorted(order[:count])


@dataclass
class Case:
    """Inputs and poisoned outputs of one call."""

    scores: Tensor
    base: Tensor
    forced: Tensor
    partials: Tensor
    seq_lens: Tensor
    ready: Tensor
    pages_storage: Tensor
    counts_storage: Tensor
    covered_storage: Tensor
    keys: Tensor
    group: int
    sink_pages: int
    window_pages: int

    @property
    def rows(self) -> tuple[int, int]:
        return self.scores.shape[0], self.scores.shape[1]

    def _inside(self, storage: Tensor, *last: int) -> Tensor:
        return storage[GUARD:-GUARD].view(*self.rows, *last)

    @property
    def pages(self) -> Tensor:
        return self._inside(self.pages_storage, -1)

    @property
    def counts(self) -> Tensor:
        return self._inside(self.counts_storage)

    @property
    def covered(self) -> Tensor:
        return self._inside(self.covered_storage)

    def arguments(self) -> dict:
        return {
            "scores": self.scores, "base": self.base, "forced": self.forced, "partials": self.partials, "seq_lens": self.seq_lens,
            "ready": self.ready, "pages": self.pages, "counts": self.counts, "covered": self.covered, "keys": self.keys,
            "group": self.group, "sink_pages": self.sink_pages, "window_pages": self.window_pages,
        }  # fmt: skip

    def poison(self) -> None:
        self.pages_storage.fill_(POISON_INT)
        self.counts_storage.fill_(POISON_INT)
        self.covered_storage.fill_(POISON_FLOAT)
        self.keys.fill_(POISON_FLOAT)

    def copy(self) -> Case:
        tensors = {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(self).items()}
        return Case(**tensors)

    def guards_intact(self) -> bool:
        return all(
            bool((storage[:GUARD] == poison).all()) and bool((storage[-GUARD:] == poison).all())
            for storage, poison in (
                (self.pages_storage, POISON_INT),
                (self.counts_storage, POISON_INT),
                (self.covered_storage, POISON_FLOAT),
            )
        )

    def total_pages(self, request: int) -> int:
        return (int(self.seq_lens[request]) + 15) // 16

    def candidates(self, request: int) -> int:
        return max(min(self.total_pages(request) - self.window_pages, self.scores.shape[2]) - self.sink_pages, 0)


def true_partials(scores: Tensor, forced: Tensor, seq_lens: Tensor, chunks: int, sink_pages: int, window_pages: int) -> Tensor:
    """What the score op hands over; chunks without a tile, which nobody may read, hold NaN."""
    requests, heads, capacity, padded = scores.shape
    partials = torch.full((requests, heads, chunks, padded), math.nan, device=scores.device)
    terms = torch.exp((scores.float() - forced.unsqueeze(2)).clamp_max(83.0))
    page = torch.arange(capacity, device=scores.device)
    for request in range(requests):
        end = min((int(seq_lens[request]) + 15) // 16 - window_pages, capacity)
        tiles = max(-(-end // 16), 0)
        for chunk in range(min(chunks, tiles)):
            mine = (page // 16 % chunks == chunk) & (page >= sink_pages) & (page < end)
            partials[request, :, chunk] = torch.where(mine[None, :, None], terms[request], 0.0).sum(1)
    return partials


def make_case(
    seed: int,
    *,
    requests: int = 2,
    heads: int = 2,
    group: int = 4,
    capacity: int = 96,
    table_capacity: int | None = None,
    seq_lens: list[int] | None = None,
    sink_pages: int = 1,
    window_pages: int = 1,
    chunks: int = 3,
    flavour: str = "plain",
    device: str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> Case:
    """Random scores. flavour: plain, ties (few distinct values), equal, nan (some pages), empty (all -inf), infinite (some pages),
    narrow (different, but all within a few percent), underflow (most pages have no mass at all).

    Everything that may not be read (padded columns, pages outside the candidates, chunks without a tile) holds NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    padded = padded_group(group)
    scores = torch.randn(requests, heads, capacity, padded, generator=generator) * 3
    scores += 4 * torch.randn(requests, heads, capacity, 1, generator=generator)
    if flavour == "ties":
        scores = torch.randint(-2, 2, (requests, heads, capacity, 1), generator=generator).float().expand_as(scores).clone()
    elif flavour == "equal":
        scores = torch.full_like(scores, 1.5)
    elif flavour == "empty":
        scores = torch.full_like(scores, -math.inf)
    elif flavour == "narrow":
        scores = 1.5 + 0.05 * torch.rand(scores.shape, generator=generator)
    elif flavour == "underflow":
        scores = torch.where(torch.rand(requests, heads, capacity, 1, generator=generator) < 0.9, -150.0, scores)
    forced = torch.randn(requests, heads, padded, generator=generator) * 2 + 5
    base = torch.randn(requests, heads, padded, generator=generator) * 5
    if seq_lens is None:
        seq_lens = torch.randint(0, (capacity + window_pages) * 16 + 1, (requests,), generator=generator).tolist()
    scores[..., group:], forced[..., group:], base[..., group:] = math.nan, math.nan, math.nan
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    for request, length in enumerate(seq_lens):
        end = (length + 15) // 16 - window_pages
        scores[request, :, : min(sink_pages, capacity)] = math.nan
        scores[request, :, max(end, 0) :] = math.nan
    scores = scores.to(dtype)
    partials = true_partials(scores, forced, lengths, chunks, sink_pages, window_pages)
    if flavour in ("nan", "infinite"):
        # Broken after the fact: the sums stay finite, as they would be for a page whose score alone is damaged.
        bad = torch.rand(requests, heads, capacity, group, generator=generator) < 0.02
        scores[..., :group][bad] = math.nan if flavour == "nan" else math.inf
    if table_capacity is None:
        table_capacity = capacity + window_pages
    rows = requests * heads
    case = Case(
        scores.contiguous(), base, forced, partials, lengths, torch.ones(1, dtype=torch.int32),
        torch.empty(rows * table_capacity + 2 * GUARD, dtype=torch.int32), torch.empty(rows + 2 * GUARD, dtype=torch.int32),
        torch.empty(rows + 2 * GUARD), torch.empty(requests, heads, capacity), group, sink_pages, window_pages,
    )  # fmt: skip
    case.poison()
    for name, value in vars(case).items():
        if isinstance(value, Tensor):
            setattr(case, name, value.to(device))
    return case


RULES = [
    RuleParameters(rule="threshold", tau=0.02, min_pages=4),
    RuleParameters(rule="threshold", tau=0.02, min_pages=2, max_pages=5),
    RuleParameters(rule="threshold", tau=0.9, min_pages=0),
    RuleParameters(rule="threshold", tau=1e-9, min_pages=3, max_pages=11),
    RuleParameters(rule="budget", budget_pages=12, min_pages=0),
    RuleParameters(rule="budget", budget_pages=2, min_pages=0),
    RuleParameters(rule="budget", budget_fraction=0.25, min_pages=3),
    RuleParameters(rule="budget", budget_pages=12, min_pages=2, combine="peak"),
    RuleParameters(rule="budget", budget_fraction=0.3, min_pages=2, combine="max"),
    RuleParameters(rule="coverage", coverage=0.8, min_pages=2),
    RuleParameters(rule="coverage", coverage=0.99999, min_pages=0, max_pages=20),
    RuleParameters(rule="coverage", coverage=0.3, min_pages=0),
    RuleParameters(rule="threshold", tau=0.9, min_pages=2, full_pages=30),
    RuleParameters(rule="budget", budget_pages=5, full_pages=40),
]
FLAVOURS = ["plain", "ties", "equal", "nan", "infinite", "empty", "narrow", "underflow"]
