"""The select op on the CPU: torch against the rules row by row, and Triton (in its interpreter) against torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from kvskim.ops.select import select
from kvskim.rules import RuleParameters, combine
from select_cases import FLAVOURS, GUARD, POISON_INT, RULES, Case, brute_force_row, make_case

torch.set_num_threads(1)

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs under TRITON_INTERPRET=1")


def check_against_rules(case: Case, rule: RuleParameters) -> None:
    """The outputs of a case against brute force, row by row."""
    assert case.guards_intact()
    limit = case.pages.shape[2] - case.sink_pages - case.window_pages
    for request in range(case.rows[0]):
        total, n = case.total_pages(request), case.candidates(request)
        page = slice(case.sink_pages, case.sink_pages + n)
        for head in range(case.rows[1]):
            tiles = max(-(-(total - case.window_pages) // 16), 0)
            sums = case.partials[request, head, :tiles, : case.group].sum(0)
            group = slice(0, case.group)
            combined = combine(
                case.scores[request, head, page, group], case.base[request, head, group], case.forced[request, head, group], rule.combine, sums=sums
            )
            chosen = brute_force_row(
                rule, combined.key, combined.mass, float(combined.forced_share), total, case.sink_pages + case.window_pages, limit
            )
            count, table = int(case.counts[request, head]), case.pages[request, head]
            if total == 0 or len(chosen) == n or not int(case.ready):
                assert count == total
                assert bool((table == POISON_INT).all())
                assert float(case.covered[request, head]) == (1.0 if total else 0.0)
                continue
            expected = [*range(case.sink_pages), *(case.sink_pages + i for i in chosen), *range(total - case.window_pages, total)]
            assert table[:count].tolist() == expected
            assert bool((table[count:] == POISON_INT).all())
            mass = combined.mass[chosen]
            covered = float(combined.forced_share) + float(mass[mass.isfinite()].sum())
            assert float(case.covered[request, head]) == pytest.approx(covered, abs=1e-5)


def run(case: Case, rule: RuleParameters, kernels: str = "torch", **changes: Any) -> None:
    select(**{**case.arguments(), **changes}, rule=rule, kernels=kernels)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.rule}-{r.combine}-{RULES.index(r)}")
def test_torch_op_follows_the_rules(rule: RuleParameters, flavour: str) -> None:
    for seed, (sink, window, dtype) in enumerate([(0, 1, torch.float16), (1, 1, torch.float32), (2, 3, torch.float16)]):
        case = make_case(seed, requests=3, sink_pages=sink, window_pages=window, flavour=flavour, group=seed + 1, dtype=dtype)
        run(case, rule)
        check_against_rules(case, rule)


LENGTHS = [0, 1, 15, 16, 17, 160, 161, (96 + 1) * 16]


@pytest.mark.parametrize("rule", [RULES[0], RULES[4], RULES[9]], ids=lambda r: r.rule)
def test_every_length_up_to_capacity(rule: RuleParameters) -> None:
    case = make_case(3, requests=len(LENGTHS), seq_lens=LENGTHS, group=2)
    run(case, rule)
    check_against_rules(case, rule)
    assert case.counts[0].tolist() == [0, 0]


@pytest.mark.parametrize("rule", [RULES[0], RULES[4], RULES[9]], ids=lambda r: r.rule)
def test_a_layer_that_is_not_calibrated_attends_everything(rule: RuleParameters) -> None:
    case = make_case(4, seq_lens=[1500, 0])
    case.ready.zero_()
    run(case, rule)
    assert case.counts.tolist() == [[94, 94], [0, 0]]
    assert case.covered.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert bool((case.pages == POISON_INT).all())


@pytest.mark.parametrize("rule", RULES[:1] + RULES[6:7] + RULES[9:10], ids=lambda r: r.rule)
def test_a_table_with_little_room_takes_the_best_pages(rule: RuleParameters) -> None:
    case = make_case(5, table_capacity=9, seq_lens=[1500, 300], flavour="ties")
    run(case, rule)
    check_against_rules(case, rule)
    assert int(case.counts.max()) <= 9


def test_refusals() -> None:
    case = make_case(6)
    rule = RULES[0]
    with pytest.raises(ValueError, match="kernels must be"):
        run(case, rule, kernels="metal")
    with pytest.raises(ValueError, match="pages has room for 11"):
        run(make_case(6, table_capacity=11), RULES[4])
    with pytest.raises(ValueError, match="pages has room for 5"):
        run(make_case(6, table_capacity=5), rule)
    with pytest.raises(ValueError, match="counts must be"):
        run(case, rule, counts=case.counts.long())
    with pytest.raises(ValueError, match="forced must be"):
        run(case, rule, forced=case.forced[..., :2])
    with pytest.raises(ValueError, match="group=5"):
        run(case, rule, group=5)
    with pytest.raises(ValueError, match="window_pages=0"):
        run(case, rule, window_pages=0)
    with pytest.raises(ValueError, match="works only with"):
        run(case, RuleParameters(rule="threshold", combine="peak"))
    with pytest.raises(ValueError, match="float16"):
        run(case, rule, kernels="triton", scores=case.scores.float())
    with pytest.raises(ValueError, match="contiguous"):
        run(case, rule, kernels="triton", scores=case.scores.transpose(0, 1).contiguous().transpose(0, 1))


def test_the_guards_of_these_tests_notice_a_stray_write() -> None:
    case = make_case(7)
    assert case.guards_intact()
    case.pages_storage[GUARD - 1] = 3
    assert not case.guards_intact()


def assert_same(case: Case, expected: Case) -> None:
    assert case.guards_intact()
    assert case.counts.tolist() == expected.counts.tolist()
    assert case.pages.tolist() == expected.pages.tolist()
    torch.testing.assert_close(case.covered, expected.covered, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.rule}-{r.combine}-{RULES.index(r)}")
def test_triton_equals_torch(rule: RuleParameters, flavour: str) -> None:
    seed = (RULES.index(rule) + FLAVOURS.index(flavour)) % 3
    sink, window, group = [(1, 1, 4), (0, 2, 3), (2, 1, 9)][seed]
    case = make_case(seed, sink_pages=sink, window_pages=window, flavour=flavour, group=group, chunks=2 + seed)
    expected = case.copy()
    run(expected, rule)
    run(case, rule, kernels="triton")
    assert_same(case, expected)


@interpreted
@pytest.mark.parametrize("rule", [RULES[1], RULES[4], RULES[7], RULES[9]], ids=lambda r: f"{r.rule}-{r.combine}")
def test_triton_over_several_blocks_and_at_every_length(rule: RuleParameters) -> None:
    for seq_lens, capacity, flavour in ([LENGTHS, 96, "plain"], [[2400 * 16, 1100 * 16 + 3], 2400, "ties"], [[2401 * 16, 1100 * 16 + 3], 2400, "plain"]):
        case = make_case(8, requests=len(seq_lens), heads=1, seq_lens=seq_lens, capacity=capacity, flavour=flavour, table_capacity=97, chunks=64)
        expected = case.copy()
        run(expected, rule)
        run(case, rule, kernels="triton", keys=None)
        assert_same(case, expected)
    case.ready.zero_()
    case.poison()
    run(case, rule, kernels="triton")
    assert case.counts.flatten().tolist() == [2401, 1101]
