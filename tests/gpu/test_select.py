"""The select kernels on the GPU: keys against torch within rounding, then the selection exactly, from the very keys they used."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvskim.ops.cuda.library import availability
from kvskim.ops.cuda.select import select_cuda
from kvskim.ops.select import select
from kvskim.rules import RuleParameters, apply_rule, candidate_pages, combine, covered_mass
from select_cases import FLAVOURS, POISON_FLOAT, POISON_INT, RULES, Case, make_case, true_partials

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

on_hopper = pytest.mark.skipif(not (torch.cuda.is_available() and availability()[0]), reason="needs the CUDA library and its GPU")
KERNELS = [pytest.param("cuda", marks=on_hopper), "triton"]


def check(case: Case, rule: RuleParameters, tolerance: float = 3e-6) -> None:
    assert case.guards_intact()
    requests, heads = case.rows
    sink, window = case.sink_pages, case.window_pages
    total = ((case.seq_lens.long() + 15) // 16).unsqueeze(1).expand(requests, heads)
    room = max(case.scores.shape[2] - sink, 0)
    candidates = candidate_pages(total, sink, window).clamp_max(room)
    valid = torch.arange(room, device=total.device) < candidates.unsqueeze(-1)

    tiles = (total - window + 15) // 16
    written = torch.arange(case.partials.shape[2], device=total.device) < tiles.unsqueeze(-1)
    sums = torch.where(written.unsqueeze(-1), case.partials, 0.0).sum(2)[..., : case.group]
    combined = combine(
        case.scores[:, :, sink:, : case.group], case.base[..., : case.group], case.forced[..., : case.group], rule.combine, sums=sums, valid=valid
    )
    keys = case.keys[:, :, sink:]
    used = keys if rule.combine == "softmax" else combined.mass
    selected = apply_rule(rule, keys, used, combined.forced_share, total, sink, window, limit=case.pages.shape[2] - sink - window)
    chosen = selected.sum(-1)
    whole = (chosen == candidates) | (case.ready == 0)
    # A row that is taken whole before any key is computed keeps its poison; where the rule itself took all, there are keys.
    computed = valid & (keys != POISON_FLOAT)
    assert bool((computed == valid)[~whole].all())
    assert bool((keys == POISON_FLOAT)[~valid].all())
    expected_keys = torch.where(combined.key.isnan(), torch.inf, combined.key)
    torch.testing.assert_close(torch.where(computed, keys, 0.0), torch.where(computed, expected_keys, 0.0), rtol=tolerance, atol=1e-9)

    assert torch.equal(case.counts.long(), torch.where(whole, total, chosen + sink + window))
    covered = covered_mass(selected, used, combined.forced_share, candidates)
    covered = torch.where(total == 0, 0.0, torch.where(whole, 1.0, covered))
    torch.testing.assert_close(case.covered, covered, rtol=1e-5, atol=1e-5)
    for request in range(requests):
        for head in range(heads):
            table = case.pages[request, head]
            used_entries = 0 if whole[request, head] else int(case.counts[request, head])
            if used_entries:
                end = int(total[request, head])
                middle = sink + selected[request, head].nonzero().flatten()
                expected = torch.cat([torch.arange(sink).to(middle), middle, torch.arange(end - window, end).to(middle)])
                assert torch.equal(table[:used_entries].long(), expected)
            assert bool((table[used_entries:] == POISON_INT).all())


def run(case: Case, rule: RuleParameters, kernels: str, settled: bool = False) -> None:
    select(**case.arguments(), rule=rule, kernels=kernels, overlap=settled, settled=settled)


def run_cluster(case: Case, rule: RuleParameters, cluster: int) -> None:
    select_cuda(**case.arguments(), rule=rule, cluster=cluster)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.rule}-{r.combine}-{RULES.index(r)}")
def test_rules_and_flavours(rule: RuleParameters, flavour: str, kernels: str) -> None:
    for seed, (sink, window, group, capacity) in enumerate([(1, 1, 4, 96), (0, 2, 7, 1000), (2, 3, 16, 5000), (1, 1, 1, 3000)]):
        case = make_case(
            seed, requests=3, sink_pages=sink, window_pages=window, flavour=flavour, group=group, capacity=capacity, chunks=5, device="cuda"
        )
        run(case, rule, kernels)
        check(case, rule)


WIDE = [17, 32, 33, 64, 100, 128]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", WIDE)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.rule}-{r.combine}-{RULES.index(r)}")
def test_rules_of_wide_groups(rule: RuleParameters, group: int, kernels: str) -> None:
    """A page's columns are several lanes': fresh inputs of every flavour, partial sums of few and of many chunks."""
    for seed, flavour in enumerate(FLAVOURS):
        sink, window, capacity, chunks = [(1, 1, 96, 5), (0, 2, 1000, 1), (2, 3, 3000, 66)][seed % 3]
        case = make_case(
            group + seed, requests=2, heads=1 + seed % 2, sink_pages=sink, window_pages=window, flavour=flavour, group=group, capacity=capacity, chunks=chunks,
            device="cuda",
        )
        run(case, rule, kernels)
        check(case, rule)


LENGTHS = [0, 1, 15, 16, 17, 32, 160, 161, 4000, 96 * 16, (96 + 1) * 16]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.rule}-{r.combine}-{RULES.index(r)}")
def test_every_length_up_to_capacity(rule: RuleParameters, kernels: str) -> None:
    lengths = [min(length, 97 * 16) for length in LENGTHS]
    for ready, settled in ((1, False), (1, True), (0, False), (0, True)):
        case = make_case(11, requests=len(lengths), seq_lens=lengths, group=2, heads=3, device="cuda")
        case.ready.fill_(ready)
        run(case, rule, kernels, settled)
        check(case, rule)
        assert case.counts[0].tolist() == [0, 0, 0]


@on_hopper
@pytest.mark.parametrize("capacity", [2100, 4200, 12000])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.combine == "softmax"], ids=lambda r: f"{r.rule}-{RULES.index(r)}")
def test_settled_lengths_change_no_bit(rule: RuleParameters, capacity: int) -> None:
    """Blocks of one row share it by the length, read ahead or not: lengths about the fewest pages of a block, of columns of all widths."""
    pages = [2, 511, 513, 1023, 1024, 1025, 1500, 2047, 2049, capacity]
    for group in (3, 8, 16, 40):
        results = []
        for settled in (False, True):
            case = make_case(
                group, requests=len(pages), heads=1, seq_lens=[16 * (n + 2) for n in pages[:-1]] + [16 * (capacity + 1) - 3], group=group, capacity=capacity,
                chunks=70, flavour=FLAVOURS[group % len(FLAVOURS)], device="cuda",
            )
            run(case, rule, "cuda", settled)
            check(case, rule)
            results.append([t.clone() for t in (case.pages, case.counts, case.covered.view(torch.int32), case.keys.view(torch.int32))])
        assert all(map(torch.equal, *results))


def random_rule(generator: random.Random) -> RuleParameters:
    limits: dict[str, Any] = {"min_pages": generator.choice([0, 1, 8, 40])}
    kind = generator.choice(["threshold", "budget", "fraction", "coverage"])
    if kind == "budget":
        combination: Any = generator.choice(["softmax", "softmax", "peak", "max"])
        return RuleParameters(rule="budget", budget_pages=generator.choice([0, 3, 7, 128, 1000]), combine=combination, **limits)
    if kind == "fraction":
        return RuleParameters(rule="budget", budget_fraction=generator.choice([0.01, 0.1, 0.5, 1.0]), **limits)
    limits["max_pages"] = generator.choice([None, None, 0, 5, 64, 1000])
    if kind == "threshold":
        return RuleParameters(rule="threshold", tau=generator.choice([1e-12, 1e-5, 0.001, 0.007, 0.3]), **limits)
    return RuleParameters(rule="coverage", coverage=generator.choice([0.05, 0.5, 0.9, 0.99]), **limits)


def random_case(seed: int, widest: int = 16) -> tuple[Case, RuleParameters, random.Random]:
    generator = random.Random(seed)
    capacity = generator.choice([1, 7, 33, 200, 1024, 2048, 2049, 4100, 9000, 20000])
    requests, heads = generator.randint(1, 8), generator.randint(1, 8)
    window = generator.randint(1, 3)
    lengths = [
        generator.choice([0, 1, 15, 16, 17, (capacity + window) * 16, generator.randint(0, (capacity + window) * 16), generator.randint(0, 4000)])
        for _ in range(requests)
    ]
    rule = random_rule(generator)
    sink = generator.randint(0, 2)
    table = capacity + window if rule.rule == "budget" else max(min(capacity + window, generator.choice([64, 500, 10**6])), sink + window + 40)
    case = make_case(
        seed,
        requests=requests,
        heads=heads,
        group=generator.randint(1, 16) if widest == 16 else generator.randint(17, widest),
        capacity=capacity,
        table_capacity=max(table, sink + window),
        seq_lens=[min(length, (capacity + window) * 16) for length in lengths],
        sink_pages=sink,
        window_pages=window,
        chunks=generator.choice([1, 2, 33, 200]),
        flavour=generator.choice(FLAVOURS),
        device="cuda",
    )
    return case, rule, generator


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(seed: int, kernels: str) -> None:
    case, rule, _ = random_case(1000 + seed)
    run(case, rule, kernels)
    check(case, rule)


@on_hopper
@pytest.mark.parametrize("seed", range(60))
def test_any_cluster_selects_the_same(seed: int) -> None:
    check_clusters(*random_case(2000 + seed)[:2])


@on_hopper
@pytest.mark.parametrize("seed", range(40))
def test_any_cluster_selects_the_same_for_wide_groups(seed: int) -> None:
    check_clusters(*random_case(3000 + seed, 128)[:2])


def check_clusters(case: Case, rule: RuleParameters) -> None:
    first: Case | None = None
    for cluster in (1, 2, 4, 8, 16):
        case.poison()
        run_cluster(case, rule, cluster)
        check(case, rule)
        if first is None:
            first = case.copy()
        assert torch.equal(case.pages, first.pages)
        assert torch.equal(case.counts, first.counts)
        assert torch.equal(case.keys, first.keys)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("flavour", ["plain", "ties", "narrow"])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.rule}-{r.combine}-{RULES.index(r)}")
def test_four_million_tokens(rule: RuleParameters, flavour: str, kernels: str) -> None:
    capacity = 262_144
    case = make_case(
        21, requests=2, heads=1, group=8, capacity=capacity, seq_lens=[(capacity + 1) * 16, capacity * 16 - 70_003], chunks=32, flavour=flavour, device="cuda"
    )
    run(case, rule, kernels)
    check(case, rule)


@on_hopper
@pytest.mark.parametrize(("requests", "heads", "capacity"), [(4, 8, 8_192), (4, 4, 16_384), (4, 4, 65_536), (3, 11, 8_192), (1, 8, 140_000)])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.rule}-{r.combine}-{RULES.index(r)}")
def test_rows_for_which_not_all_clusters_run_at_once(rule: RuleParameters, requests: int, heads: int, capacity: int) -> None:
    """Clusters of as many blocks as the processors would have room for do not fit their groups: smaller ones, of any number of blocks, select the same."""
    lengths = [capacity * 16, capacity * 16 - 40_003, 20_000, 70_001][:requests]
    case = make_case(23, requests=requests, heads=heads, group=4, capacity=capacity, seq_lens=lengths, chunks=16, device="cuda")
    run(case, rule, "cuda")
    check(case, rule)


@on_hopper
def test_more_pages_than_shared_memory_holds_is_refused() -> None:
    case = make_case(22, requests=1, heads=1, capacity=40_000, device="cuda")
    with pytest.raises(RuntimeError, match="invalid argument"):
        run_cluster(case, RULES[0], 1)


@on_hopper
def test_lengths_beyond_the_scores_stay_inside_every_buffer() -> None:
    """Lengths that no caller should pass: whatever is selected, nothing is read or written outside."""
    for rule in RULES:
        case = make_case(23, requests=2, capacity=64, table_capacity=30, seq_lens=[65 * 16, 65 * 16], device="cuda")
        case.seq_lens.copy_(torch.tensor([10_000_000, -5]))
        case.partials.nan_to_num_(0.1)
        run(case, rule, "cuda")
        torch.cuda.synchronize()
        assert case.guards_intact()
        assert case.counts[1].tolist() == [0, 0]


def graph_of(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rule", [RULES[0], RULES[1], RULES[4], RULES[7], RULES[9]], ids=lambda r: f"{r.rule}-{r.combine}")
def test_graph_replay_follows_new_lengths(rule: RuleParameters, kernels: str) -> None:
    case = make_case(31, requests=4, heads=2, capacity=6000, seq_lens=[6001 * 16] * 4, chunks=40, device="cuda")
    graph = graph_of(lambda: run(case, rule, kernels))
    everything = case.scores.clone()
    for lengths in ([0, 1, 16, 17], [96_016, 70_000, 160, 40_000], [0, 0, 0, 0], [33_000, 96_001, 15, 144]):
        case.seq_lens.copy_(torch.tensor(lengths))
        case.scores.copy_(everything)
        case.partials.copy_(true_partials(case.scores, case.forced, case.seq_lens, 40, 1, 1))
        case.poison()
        graph.replay()
        check(case, rule)


@on_hopper
@pytest.mark.parametrize("flavour", ["plain", "equal", "empty", "narrow", "nan"])
def test_sixteen_blocks_search_a_million_tokens(flavour: str) -> None:
    """The shape whose blocks exchange most, with one, several and the most passes of the search; and lengths that leave blocks without pages."""
    for length, chunks in ((65_537 * 16, 528), (65_537 * 16, 1056), (700_003, 577), (40_000, 528)):
        case = make_case(
            61, requests=1, heads=4, group=8, capacity=65_536, table_capacity=65_537, seq_lens=[length], chunks=chunks, flavour=flavour, device="cuda"
        )
        for rule in (
            RuleParameters(rule="budget", budget_pages=128), RuleParameters(rule="budget", budget_fraction=0.1),
            RuleParameters(rule="threshold", tau=0.5, min_pages=10), RuleParameters(rule="threshold", tau=1e-6, max_pages=300),
        ):
            case.poison()
            run(case, rule, "cuda")
            check(case, rule)


@on_hopper
def test_padded_columns_change_nothing() -> None:
    """What a padded column holds decides which way a page's mass is computed, but not a bit of it."""
    for group, rule in (
        (7, RULES[0]), (3, RULES[4]), (11, RULES[6]), (5, RULES[7]), (6, RULES[9]), (17, RULES[0]), (40, RULES[4]), (100, RULES[7]), (65, RULES[9]),
    ):
        case = make_case(71, requests=2, heads=2, group=group, capacity=5000, chunks=9, device="cuda")
        run(case, rule, "cuda")
        first = case.copy()
        case.scores[..., group:] = 0.0
        case.poison()
        run(case, rule, "cuda")
        check(case, rule)
        assert torch.equal(case.keys, first.keys)
        assert torch.equal(case.pages, first.pages)
        assert torch.equal(case.covered, first.covered)


@on_hopper
@pytest.mark.parametrize("group", [4, 24])
@pytest.mark.parametrize("rise", [60.0, 90.0, 130.0])
def test_scores_far_above_the_forced_pages_are_limited(rise: float, group: int) -> None:
    """Exponents near the limit of 83, where a rounding of the exponent itself already changes a mass by 4e-6."""
    for rule in (RULES[0], RULES[4], RULES[9]):
        case = make_case(81, requests=2, heads=1, group=group, capacity=600, chunks=9, device="cuda")
        case.forced[..., ::2] -= rise
        case.partials.copy_(true_partials(case.scores, case.forced, case.seq_lens, 9, 1, 1))
        run(case, rule, "cuda")
        check(case, rule, tolerance=1.2e-5)


@on_hopper
@pytest.mark.parametrize("group", [4, 128])
@pytest.mark.parametrize("settled", [False, True], ids=["", "settled"])
@pytest.mark.parametrize("rule", [RULES[0], RULES[4], RULES[9]], ids=lambda r: r.rule)
def test_overlapping_launches_wait_for_their_inputs(rule: RuleParameters, settled: bool, group: int) -> None:
    """Programmatic dependent launch: many launches in a row, each on scores that the kernel just ahead of it wrote."""
    shape: dict[str, Any] = dict(requests=1, heads=8, group=group, capacity=6000, seq_lens=[6001 * 16], chunks=40, device="cuda")
    case = make_case(41, **shape)
    case.keys.fill_(0.0)
    inputs = [make_case(50 + i, **shape) for i in range(8)]
    results = []
    for other in inputs:
        case.poison()
        for name in ("scores", "forced", "partials"):
            getattr(case, name).copy_(getattr(other, name))
        select(**case.arguments(), rule=rule, kernels="cuda", overlap=True, settled=settled)
        results.append(case.copy())
    for result in results:
        check(result, rule)
