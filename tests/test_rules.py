"""Rules against their definition in plain Python, on rows that hypothesis makes up."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvskim.rules import RuleParameters, apply_rule, candidate_sums, combine, covered_mass
from kvskim.rules.budget import fraction_pages
from select_cases import brute_force_row

torch.set_num_threads(1)

MASSES = st.one_of(
    st.sampled_from([0.0, 1e-30, 0.001, 0.007, 0.1, 0.5, 1.0, 2.0, math.nan, math.inf]),
    st.floats(0.0, 1.0, width=32),
)


@st.composite
def rules(draw: st.DrawFn) -> RuleParameters:
    full = draw(st.just(0) | st.integers(0, 20))
    limits = {"min_pages": draw(st.integers(0, 6)), "max_pages": draw(st.none() | st.integers(0, 12)), "full_pages": full}
    kind = draw(st.sampled_from(["threshold", "budget_pages", "budget_fraction", "coverage"]))
    if kind == "threshold":
        return RuleParameters(rule="threshold", tau=draw(st.sampled_from([0.001, 0.007, 0.1, 0.5])), **limits)
    if kind == "budget_pages":
        return RuleParameters(rule="budget", budget_pages=draw(st.integers(0, 30)), min_pages=limits["min_pages"], full_pages=full)
    if kind == "budget_fraction":
        return RuleParameters(rule="budget", budget_fraction=draw(st.floats(0.01, 1.0)), min_pages=limits["min_pages"], full_pages=full)
    return RuleParameters(rule="coverage", coverage=draw(st.sampled_from([0.1, 0.5, 0.9, 1.0])), **limits)


@settings(max_examples=300, deadline=None)
@given(rules(), st.lists(MASSES, max_size=24), st.floats(0.0, 1.0, width=32), st.integers(0, 2), st.integers(1, 3), st.none() | st.integers(0, 9))
def test_rule_is_its_definition(
    rule: RuleParameters, masses: list[float], forced_share: float, sink: int, window: int, limit: int | None
) -> None:
    mass = torch.tensor(masses, dtype=torch.float32)
    total = len(masses) + sink + window
    selected = apply_rule(rule, mass, mass, forced_share, total, sink, window, limit=limit)
    expected = brute_force_row(rule, mass, mass, forced_share, total, sink + window, limit)
    assert selected.nonzero().flatten().tolist() == expected


@settings(max_examples=60, deadline=None)
@given(rules(), st.lists(st.lists(MASSES, max_size=12), min_size=1, max_size=4), st.integers(0, 2))
def test_padded_batch_equals_single_rows(rule: RuleParameters, rows: list[list[float]], sink: int) -> None:
    longest = max(map(len, rows))
    padded = torch.tensor([row + [math.nan] * (longest - len(row)) for row in rows], dtype=torch.float32).view(len(rows), longest)
    totals = torch.tensor([len(row) + sink + 1 for row in rows])
    shares = torch.linspace(0.0, 0.5, len(rows))
    together = apply_rule(rule, padded, padded, shares, totals, sink, 1)
    for i, row in enumerate(rows):
        mass = torch.tensor(row, dtype=torch.float32)
        alone = apply_rule(rule, mass, mass, shares[i], len(row) + sink + 1, sink, 1)
        assert together[i, : len(row)].tolist() == alone.tolist()
        assert not together[i, len(row) :].any()


def test_fault_05_ties_at_the_cut_go_to_the_lower_page_and_never_exceed_the_budget() -> None:
    mass = torch.full((61,), 0.01)
    rule = RuleParameters(rule="budget", budget_pages=7, min_pages=0)
    assert apply_rule(rule, mass, mass, 0.1, 63, 1, 1).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_a_row_no_longer_than_min_pages_is_attended_whole() -> None:
    mass = torch.zeros(8)
    for rule in (
        RuleParameters(rule="threshold", tau=0.5, min_pages=8, max_pages=2),
        RuleParameters(rule="coverage", coverage=0.1, min_pages=8),
    ):
        assert apply_rule(rule, mass, mass, 0.9, 10, 1, 1).all()


def test_a_request_of_at_most_full_pages_is_attended_whole() -> None:
    mass = torch.zeros(2, 8)
    for rule in (
        RuleParameters(rule="threshold", tau=0.5, min_pages=0, full_pages=10),
        RuleParameters(rule="coverage", coverage=0.1, min_pages=0, full_pages=10),
        RuleParameters(rule="budget", budget_pages=3, full_pages=10),
    ):
        selected = apply_rule(rule, mass, mass, 0.9, torch.tensor([9, 10]), 1, 1, limit=2)
        assert selected.sum(-1).tolist() == [7, 8]
        selected = apply_rule(rule, mass, mass, 0.9, 11, 1, 1, limit=2)
        assert not selected.all(-1).any()


def test_coverage_follows_its_target_and_the_shape_of_the_mass() -> None:
    sharp = torch.tensor([0.01, 0.6, 0.01, 0.2, 0.01, 0.01])
    flat = torch.full((6,), 0.14)

    def size(mass: torch.Tensor, coverage: float) -> int:
        rule = RuleParameters(rule="coverage", coverage=coverage, min_pages=0)
        return int(apply_rule(rule, mass, mass, 0.1, 8, 1, 1).sum())

    assert [size(sharp, c) for c in (0.05, 0.5, 0.85, 0.935)] == [0, 1, 2, 6]
    assert [size(flat, c) for c in (0.05, 0.5, 0.85, 0.935)] == [0, 3, 6, 6]


def test_budget_counts_sink_and_window_for_numbers_and_fractions_alike() -> None:
    mass = torch.rand(96)
    for rule in (
        RuleParameters(rule="budget", budget_pages=10, min_pages=0),
        RuleParameters(rule="budget", budget_fraction=0.1, min_pages=0),
    ):
        for sink, window in ((0, 1), (1, 1), (2, 2)):
            candidates = 100 - sink - window
            chosen = apply_rule(rule, mass[:1].expand(candidates), mass[:1].expand(candidates), 0.0, 100, sink, window)
            assert int(chosen.sum()) + sink + window == 10


@given(st.integers(1, 1000), st.integers(1, 300))
def test_a_decimal_fraction_of_a_whole_number_of_pages_is_exact(thousandths: int, thousands: int) -> None:
    total = torch.tensor(1000 * thousands)
    assert int(fraction_pages(thousandths / 1000, total)) == thousandths * thousands


@given(st.floats(0.001, 1.0), st.integers(0, 1 << 18))
def test_fraction_is_the_ceiling(fraction: float, total: int) -> None:
    pages = int(fraction_pages(fraction, torch.tensor(total)))
    assert pages - 1 - 1e-5 < fraction * total < pages + 1e-5


@pytest.mark.parametrize("group", [1, 3, 8])
def test_softmax_combination_is_the_group_mean_of_softmaxes(group: int) -> None:
    torch.manual_seed(group)
    scores, forced, base = torch.randn(30, group).double() * 3, torch.randn(group).double(), torch.randn(group)
    probability = torch.cat([forced[None], scores]).softmax(0).mean(-1)
    combined = combine(scores.float(), base, forced.float(), "softmax")
    torch.testing.assert_close(combined.mass, probability[1:].float(), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(combined.forced_share, probability[0].float(), rtol=1e-5, atol=1e-8)
    sums = candidate_sums(scores.float(), forced.float())
    known = combine(scores.float(), base, forced.float(), "softmax", sums=sums)
    torch.testing.assert_close(known.mass, combined.mass)


def test_peak_and_max_by_hand() -> None:
    scores = torch.tensor([[0.0, 1.0], [2.0, -1.0], [1.0, 0.5]])
    base, forced = torch.tensor([10.0, 20.0]), torch.zeros(2)
    peak = combine(scores, base, forced, "peak").key
    expected = [math.exp(-2) + 1.0, 1.0 + math.exp(-2), math.exp(-1) + math.exp(-0.5)]
    torch.testing.assert_close(peak, torch.tensor(expected))
    assert combine(scores, base, forced, "max").key.tolist() == [21.0, 19.0, 20.5]
    with pytest.raises(ValueError, match="softmax, peak or max"):
        combine(scores, base, forced, "mean")


@pytest.mark.parametrize("how", ["softmax", "peak", "max"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_score_is_selected(how: str, bad: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(40, 4)
    sums = candidate_sums(scores, torch.zeros(4))
    scores[17, 2] = bad
    combined = combine(scores, torch.zeros(4), torch.zeros(4), how, sums=sums)
    rule = RuleParameters(rule="budget", budget_pages=3, min_pages=0, combine=how)  # type: ignore[arg-type]
    assert apply_rule(rule, combined.key, combined.mass, combined.forced_share, 42, 1, 1).nonzero().flatten().tolist() == [17]


def test_all_scores_broken_selects_everything_with_threshold_and_coverage() -> None:
    scores = torch.full((40, 4), math.nan)
    combined = combine(scores, torch.zeros(4), torch.zeros(4), "softmax")
    for rule in (RuleParameters(rule="threshold"), RuleParameters(rule="coverage", coverage=0.5)):
        assert apply_rule(rule, combined.key, combined.mass, combined.forced_share, 42, 1, 1).all()


def test_covered_mass_is_the_mass_of_what_is_selected() -> None:
    mass = torch.tensor([0.1, math.nan, 0.2, 0.3])
    selected = torch.tensor([True, True, False, True])
    covered = covered_mass(selected, mass, torch.tensor(0.25), torch.tensor(4))
    torch.testing.assert_close(covered, torch.tensor(0.65))
    assert covered_mass(torch.ones(4, dtype=torch.bool), mass, torch.tensor(0.25), torch.tensor(4)) == 1.0


def test_rules_without_their_number_and_unknown_rules_are_refused() -> None:
    mass = torch.rand(20)
    rule = RuleParameters()
    for field, value in (("rule", "coverage"), ("rule", "budget"), ("rule", "everything")):
        broken = RuleParameters()
        object.__setattr__(broken, field, value)
        with pytest.raises(ValueError, match=value if value != "everything" else "rule must be"):
            apply_rule(broken, mass, mass, 0.1, 22, 1, 1)
    assert apply_rule(rule, mass, mass, 0.1, 22, 1, 1).any()


def test_a_budget_has_no_floor_even_when_one_is_given() -> None:
    parameters = RuleParameters(rule="budget", budget_pages=4, min_pages=8)
    assert parameters.min_pages == 0
    mass = torch.rand(7)
    chosen = apply_rule(parameters, mass, mass, 0.1, 9, 1, 1)
    assert int(chosen.sum()) == 2
