"""The baselines: each on an attention pattern whose right answer is known, then what all of them must hold at any budget."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvskim.errors import UnsupportedError
from kvskim.eval.baselines import BASELINES, Baseline
from kvskim.eval.baselines.base import pooled, prompt_weights, top_mask
from kvskim.eval.baselines.lazyeviction import Recurrence
from kvskim.eval.baselines.rkv import cut_scores, importance, redundancy
from kvskim.eval.baselines.rocketkv import page_scores, split
from kvskim.eval.baselines.shadowkv import low_rank_keys
from kvskim.eval.baselines.triattention import OFFSETS, centre_scores, query_centre
from kvskim.eval.model import ATTENTION_NAME, EvalModel, register_attention
from kvskim.eval.policy import token_mask
from kvskim.eval.selector_table import BASELINE_CANDIDATES, Candidate, TableRun, fidelity, known_candidates, recall_gap, retrieval
from kvskim.eval.selectors_report import markdown
from kvskim.eval.texts import Question
from kvskim.rotary import Rotary
from tiny import tiny_model

D = 8
HEADS, GROUP = 2, 2
PROMPT = 160
EVICTORS = ("rkv", "triattention", "lazyeviction")


def axis(index: int, size: float = 1.0) -> Tensor:
    return torch.eye(D)[index] * size


class Toy:
    """One layer with chosen keys and queries: what a baseline sees of a prefilled model."""

    def __init__(self, keys: Tensor, observed: Tensor | None = None, queries: Tensor | None = None) -> None:
        heads = keys.shape[0]
        self.num_kv_heads, self.head_dim, self.sparse_layers = heads, D, [0]
        self.keys, self.values = [keys], [torch.zeros_like(keys)]
        self.observed = {0: torch.zeros(heads * GROUP, 64, D) if observed is None else observed}
        self.queries = self.observed[0] if queries is None else queries
        self.config = SimpleNamespace(
            model_type="llama", rope_parameters=dict(rope_type="default", rope_theta=10000.0), head_dim=D, hidden_size=D * heads, num_attention_heads=heads,
        )

    def calibration_queries(self, layer: int) -> Tensor:
        return self.queries

    def calibration_positions(self) -> Tensor:
        return 8 * torch.arange(self.queries.shape[1])


def plain_keys(tokens: int = PROMPT, seed: int = 0) -> Tensor:
    """Unremarkable keys: small, in the channels from 4 on."""
    keys = torch.zeros(HEADS, tokens, D)
    keys[..., 4:] = 0.1 * torch.randn(HEADS, tokens, 4, generator=torch.Generator().manual_seed(seed))
    return keys


def observing(direction: Tensor, count: int = 64) -> Tensor:
    return direction.expand(HEADS * GROUP, count, D).clone()


def step(policy: Baseline, toy: Toy, position: int, query: Tensor, new: Tensor | None = None) -> Tensor:
    """Decode one token whose key is ``new``; returns the tokens that it may attend, ``[H, position + 1]``."""
    if toy.keys[0].shape[1] <= position:
        key = (torch.zeros(D) if new is None else new).expand(HEADS, 1, D)
        toy.keys[0] = torch.cat([toy.keys[0], key], 1)
    keys = toy.keys[0][:, : position + 1]
    selected = policy.choose(0, query.expand(1, HEADS, GROUP, D), keys, position, torch.ones(1, position + 1, dtype=torch.bool))
    return token_mask(selected, position + 1)[0]


def prepared(name: str, toy: Toy, budget: int, **options: Any) -> Baseline:
    policy = BASELINES[name](budget_tokens=budget, **options)
    policy.prepare(toy, toy.keys[0].shape[1])  # type: ignore[arg-type]
    return policy


# The operations that several methods use.


def test_top_mask_takes_exactly_the_count_and_breaks_ties_as_asked() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    assert top_mask(scores, 2).tolist() == [[False, True, True, False, False]]
    assert top_mask(scores, 2, later_first=True).tolist() == [[False, False, True, False, True]]
    assert top_mask(scores, 9).all()
    assert not top_mask(scores, 0).any()


def test_pooled_lends_a_score_to_its_neighbours() -> None:
    assert pooled(torch.tensor([[0.0, 0, 0, 5, 0, 0, 0]]), 3).tolist() == [[0, 0, 5, 5, 5, 0, 0]]


def test_prompt_weights_are_causal_softmax() -> None:
    keys, queries = torch.randn(1, 5, D), torch.randn(2, 1, 1, D)
    weights = prompt_weights(queries, keys)
    assert weights[0, 0, 0, 4] == 0
    torch.testing.assert_close(weights[0, 0, 0, :4], (keys[0, :4] @ queries[0, 0, 0]).softmax(0))
    torch.testing.assert_close(weights[1, 0, 0], (keys[0] @ queries[1, 0, 0]).softmax(0))


# SnapKV.


def test_snapkv_keeps_what_the_window_attends_with_its_neighbours_and_drops_the_rest() -> None:
    keys = plain_keys()
    keys[0, 50], keys[1, 70] = axis(0, 6), axis(0, 6)
    policy = prepared("snapkv", Toy(keys, observing(axis(0, 2))), 48, window=16, kernel=7)
    visible = step(policy, Toy(keys), PROMPT, axis(1))
    assert visible[0, 47:54].all()
    assert visible[1, 67:74].all()
    assert visible[:, PROMPT - 16 :].all()
    assert visible[:, :PROMPT].sum(1).tolist() == [48, 48]
    # A token that only a later question asks for is gone: the choice never sees the new query.
    keys[0, 100] = axis(1, 6)
    policy = prepared("snapkv", Toy(keys, observing(axis(0, 2))), 48, window=16, kernel=7)
    assert not step(policy, Toy(keys), PROMPT, axis(1, 9))[0, 100]


def test_snapkv_sums_votes_over_the_query_heads_of_a_group_and_the_window() -> None:
    """Query head 0 sees token 30 a little in every query, head 1 sees token 90 much in one query of 32: the sum must decide."""
    keys = plain_keys()
    keys[:, 30], keys[:, 90] = axis(0, 4), axis(1, 4)
    queries = torch.zeros(HEADS, GROUP, 64, D)
    queries[:, 0, :, 0], queries[:, 1, -1, 1] = 1.0, 4.0
    policy = prepared("snapkv", Toy(keys, queries.flatten(0, 1)), 48, window=32, kernel=1)
    votes = policy.prepared[0][0]
    assert votes[30] > votes[90] > 2 * votes[31]


def test_snapkv_votes_of_the_window_for_itself_are_not_lent_to_its_neighbours() -> None:
    keys = plain_keys()
    keys[:, PROMPT - 16 :] = axis(0, 4)
    votes = prepared("snapkv", Toy(keys, observing(axis(0, 2))), 48, window=16, kernel=7).prepared[0]
    assert (votes < 0.01).all()


def test_snapkv_keeps_everything_decoded_on_top_of_its_budget() -> None:
    toy = Toy(plain_keys(), observing(axis(0)))
    policy = prepared("snapkv", toy, 48)
    for position in range(PROMPT, PROMPT + 40):
        visible = step(policy, toy, position, axis(0))
    assert visible[:, PROMPT:].all()
    assert visible.sum(1).tolist() == [48 + 40] * 2


# ShadowKV.


def test_shadowkv_keeps_the_chunk_whose_keys_differ_and_chooses_by_mean_keys() -> None:
    keys = plain_keys()
    keys[..., 1] = 1.0
    keys[:, 42, 1] = -1.0  # one key of chunk 5 points away from the others
    keys[:, 80:88, 0] = 1.0  # chunk 10 as a whole points to channel 0
    policy = prepared("shadowkv", Toy(keys), 48, exact_keys=True)
    for query in (axis(0, 5), axis(5, 5), axis(1, -5)):
        assert step(policy, Toy(keys), PROMPT, query)[:, 40:48].all()
    assert step(policy, Toy(keys), PROMPT, axis(0, 5))[:, 80:88].all()
    assert not step(policy, Toy(keys), PROMPT, axis(0, -5))[:, 80:88].any()


def test_shadowkv_takes_the_largest_of_the_group() -> None:
    """Three chunks are free. Query head 0 gives chunk 3 two fifths and chunks 10 to 12 a fifth each, head 1 these a third each: the sum prefers
    them, the largest prefers chunk 3."""
    keys = axis(4).repeat(HEADS, PROMPT, 1)
    keys[:, 24:32], keys[:, 80:104] = axis(0), axis(1)
    keys[:, 3] *= -1  # chunk 0 is the outlier
    policy = prepared("shadowkv", Toy(keys), 48, exact_keys=True)
    queries = torch.stack([axis(0, 12 + math.log(2)) + axis(1, 12), axis(1, 12)]).expand(1, HEADS, GROUP, D)
    chosen = policy.choose(0, queries, torch.cat([keys, keys[:, :1]], 1), PROMPT, torch.ones(1, PROMPT + 1, dtype=torch.bool))[0]
    assert chosen[:, :8].all()
    assert chosen[:, 24:32].all()
    assert chosen[:, 80:96].all()
    assert not chosen[:, 96:104].any()


def test_shadowkv_reads_low_rank_keys_of_the_prompt_except_outliers_and_the_end() -> None:
    rotary = Rotary(1.0 / 10000.0 ** (torch.arange(0, D, 2) / D))
    basis = torch.randn(3, HEADS * D, generator=torch.Generator().manual_seed(1))
    matrix = torch.randn(PROMPT, 3, generator=torch.Generator().manual_seed(2)) @ basis
    plain = matrix.unflatten(1, (HEADS, D)).transpose(0, 1)
    keys = rotary.rotate(plain, torch.arange(PROMPT))
    policy = prepared("shadowkv", Toy(keys), 48, rank=3)
    torch.testing.assert_close(policy.read_keys(0, keys), keys, atol=1e-4, rtol=1e-4)
    # Rank 1 cannot hold three directions, but what must be exact is.
    policy = prepared("shadowkv", Toy(keys), 48, rank=1)
    step(policy, Toy(keys), PROMPT, axis(0))
    longer = torch.cat([keys, torch.randn(HEADS, 2, D)], 1)
    wrong = (policy.read_keys(0, longer) - longer).norm(dim=-1) > 1e-3
    exact = policy.outliers[0].repeat_interleave(8, -1)  # type: ignore[attr-defined]
    assert not wrong[:, PROMPT - 32 :].any()
    assert exact.sum(1).tolist() == [8, 8]
    assert not wrong[:, :PROMPT][exact].any()
    assert wrong[:, : PROMPT - 32][~exact[:, : PROMPT - 32]].float().mean() > 0.9


def test_low_rank_keys_are_the_truncated_singular_value_decomposition() -> None:
    keys = torch.randn(HEADS, 40, D)
    u, s, v = torch.linalg.svd(keys.transpose(0, 1).flatten(1), full_matrices=False)
    expected = (u[:, :5] * s[:5] @ v[:5]).unflatten(1, (HEADS, D)).transpose(0, 1)
    torch.testing.assert_close(low_rank_keys(keys, 5), expected, atol=1e-4, rtol=1e-4)


def test_shadowkv_refuses_a_model_whose_rotary_embedding_is_unknown() -> None:
    toy = Toy(plain_keys())
    toy.config.model_type = "unheard-of"
    with pytest.raises(UnsupportedError, match="shadowkv without exact_keys undoes the rotary embedding, and that of model type 'unheard-of' is not known"):
        prepared("shadowkv", toy, 48)


# RocketKV.


def test_rocketkv_divides_the_compression_by_its_formula() -> None:
    kept, factor = split(8192, 128)  # c = 64, r = 0.56
    assert kept == round(8192 / 64**0.56)
    assert factor == pytest.approx(math.sqrt(64**0.44))
    assert split(100, 128) == (100, 1.0)
    assert split(2**24, 64)[0] == round(2**24 / (2**18) ** 0.8)  # r is at most 0.8


def test_rocketkv_finds_the_needle_among_the_survivors_only() -> None:
    keys = plain_keys(640)
    keys[:, 200] = axis(1, 5) + axis(0, 5)  # the window votes for it by channel 0, the query asks by channel 1
    keys[:, 400] = axis(1, 9)  # nobody votes for it
    toy = Toy(keys, observing(axis(0, 4)))
    policy = prepared("rocketkv", toy, 48, kernel=1)
    survivors = policy.survivors[0]  # type: ignore[attr-defined]
    kept, _ = split(640, 48)
    assert survivors.shape[1] == kept > 48
    assert (survivors == 200).any(1).all()
    assert not (survivors == 400).any()
    visible = step(policy, toy, 640, axis(1, 6))
    assert visible[:, 200].all()
    assert not visible[:, 400].any()
    assert visible.sum(1).tolist() == [48 - 16 + 1] * 2
    # Another query leaves the needle out: the second stage chooses anew.
    assert not step(policy, toy, 640, axis(1, -6))[:, 200].any()


def test_rocketkv_page_scores_use_the_extreme_that_the_groups_query_points_to() -> None:
    keys = torch.tensor([[1.0, 9], [3.0, 8], [-2.0, 7], [0.0, 6], [5.0, 5]])[None]  # [1, 5, 2]: pages {0, 1}, {2, 3}, {4}
    queries = torch.tensor([[[[1.0, 0.1], [0.5, -0.1]]]])
    first, second = 1.0 / math.sqrt(1.0 / 1.1), 0.5 / math.sqrt(0.5 / 0.6)  # the query, over the root of the share of it that is read
    high = torch.tensor([3.0, 0.0, 5.0])
    expected = (first * high).softmax(0) + (second * high).softmax(0)
    torch.testing.assert_close(page_scores(queries, keys, 2, 1)[0, 0], expected)
    low = torch.tensor([1.0, -2.0, 5.0])
    expected = (-first * low).softmax(0) + (-second * low).softmax(0)
    torch.testing.assert_close(page_scores(-queries, keys, 2, 1)[0, 0], expected)


@pytest.mark.parametrize("tokens", [641, 648, 655])
def test_rocketkv_prompts_that_end_inside_a_page(tokens: int) -> None:
    toy = Toy(torch.randn(HEADS, tokens, D, generator=torch.Generator().manual_seed(3)), torch.randn(HEADS * GROUP, 64, D))
    policy = prepared("rocketkv", toy, 64)
    for position in range(tokens, tokens + 40):
        visible = step(policy, toy, position, torch.randn(D, generator=torch.Generator().manual_seed(position)))
        assert visible.sum(1).tolist() == [64 - 16 + position % 16 + 1] * 2
        assert visible[:, position // 16 * 16 :].all()


# R-KV.


def test_redundancy_blames_the_earlier_of_two_like_tokens() -> None:
    keys = torch.eye(D)[:6].clone()
    keys[4] = 3 * keys[1]  # the same direction, later
    scores = redundancy(keys[None], 0.5)[0]
    assert scores.argmax() == 1
    assert scores[4] == scores[0]
    assert scores.sum() == pytest.approx(1.0)
    strict = redundancy(keys[None] / 2, 1.5)[0]  # nothing is alike, nothing forgiven: both are blamed
    assert strict[1] == strict[4] > strict[0]


def test_redundancy_in_chunks_equals_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(HEADS, 50, D, generator=torch.Generator().manual_seed(4))
    whole = redundancy(keys, 0.5)
    monkeypatch.setattr("kvskim.eval.baselines.rkv.ROW_CHUNK", 7)
    torch.testing.assert_close(redundancy(keys, 0.5), whole)


def test_rkv_importance_is_the_largest_logit_of_the_group() -> None:
    keys = torch.stack([axis(0), axis(1), axis(2)])[None]
    queries = torch.stack([axis(0, 3), axis(1, 3)])[None, None]
    expected = torch.tensor([3.0, 3.0, 0.0]).softmax(0)
    torch.testing.assert_close(importance(queries, keys, 1)[0], expected)


def test_rkv_weighs_importance_against_redundancy() -> None:
    keys, queries = torch.randn(HEADS, 20, D), torch.randn(3, HEADS, GROUP, D)
    expected = 0.3 * importance(queries, keys[:, :17], 5) - 0.7 * redundancy(keys, 0.4)[:, :17]
    torch.testing.assert_close(cut_scores(queries, keys, 5, 0.4, 0.3), expected)


def test_rkv_observes_the_latest_decoded_queries() -> None:
    """Even importance keeps the earliest tokens; token 45, in the window at the first cut, lives through the second only if it was looked for."""
    for query, kept in ((axis(0, 9), True), (torch.zeros(D), False)):
        keys = torch.zeros(HEADS, 48, D)
        keys[:, 45] = axis(0)
        toy = Toy(keys)
        policy = prepared("rkv", toy, 48, mix=1.0, kernel=1)
        for position in range(48, 65):
            visible = step(policy, toy, position, query if position >= 56 else torch.zeros(D))
        assert visible[:, 45].all() == kept
        assert visible.sum(1).tolist() == [33, 33]


def test_rkv_drops_one_of_two_duplicates_and_keeps_the_important() -> None:
    """Tokens 10 and 20 are equal, the others come in opposite pairs, so that nothing repeats them; one token must go for the one decoded."""
    keys = torch.zeros(HEADS, 48, D)
    others = [t for t in range(48) if t not in (10, 20)]
    half = torch.randn(HEADS, 23, D - 1, generator=torch.Generator().manual_seed(5))
    keys[:, others, 1:] = torch.cat([half, -half], 1)
    keys[:, [10, 20]] = axis(0)
    policy = prepared("rkv", Toy(keys), 48, threshold=0.99, interval=1)
    visible = step(policy, Toy(keys), 48, torch.zeros(D))
    assert (~visible).nonzero().tolist() == [[0, 10], [1, 10]]
    # By importance alone both stay: the window looks for them.
    policy = prepared("rkv", Toy(keys, observing(axis(0, 9))), 48, threshold=0.99, mix=1.0, interval=1, kernel=1)
    assert step(policy, Toy(keys), 48, torch.zeros(D))[:, [10, 20]].all()


# LazyEviction.


def test_recurrence_follows_the_definition() -> None:
    record = Recurrence(torch.full((1, 3), -1.0), torch.zeros(1, 3))
    for now, weights in ((0, [0.5, 0.0, 0.2]), (3, [0.0, 0.0, 0.2]), (4, [0.5, 0.0, 0.0])):
        record = record.seen(torch.tensor([weights]), now, 0.1)
    assert record.last.tolist() == [[4.0, -1.0, 3.0]]
    assert record.longest.tolist() == [[4.0, 0.0, 3.0]]
    newer = record.with_token(5)
    assert newer.last.tolist() == [[4.0, -1.0, 3.0, 4.0]]
    assert newer.longest.tolist() == [[4.0, 0.0, 3.0, 0.0]]
    scores = record.scores(5)[0]

    def logistic(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    assert scores[0] == pytest.approx(2 * logistic(-1 - 1 / 4) + 2 * logistic(1 - 4), rel=1e-4)
    assert scores[1] == 0
    assert scores[2] == pytest.approx(2 * logistic(-1 - 2 / 3) + 2 * logistic(1 - 3), rel=1e-4)


def test_lazyeviction_keeps_a_recurring_token_through_its_silence() -> None:
    """Tokens 5 to 19 are attended together every 12 steps, token 40 in between, that of position 50 once; the cache of 48 has room for 16 beside
    the newest."""
    keys = torch.zeros(HEADS, 48, D)
    keys[:, 5:20], keys[:, 40] = axis(0, 9), axis(2, 9)
    toy = Toy(keys, observing(axis(0, 3), 1))
    policy = prepared("lazyeviction", toy, 48, least_weight=0.05, observed=1)
    for position in range(48, 160):
        query = axis(0, 3) if position % 12 == 0 else axis(2, 3) if position % 12 == 6 else axis(1, 3) if position == 55 else torch.zeros(D)
        visible = step(policy, toy, position, query, axis(1, 9) if position == 50 else None)
        assert visible[:, 5:20].all(), position
        assert visible[:, 40].all(), position
        if position >= 50:
            # Among the newest at the first cut; at the next, it was attended once, long ago.
            assert visible[:, 50].all() == (position < 80)
        assert visible[:, -16:].all()


def test_lazyeviction_prefers_the_later_of_equals_and_any_head_of_the_group_counts() -> None:
    toy = Toy(plain_keys(), torch.zeros(HEADS * GROUP, 64, D))
    policy = prepared("lazyeviction", toy, 48, least_weight=0.6)
    assert step(policy, toy, PROMPT, torch.zeros(D))[:, PROMPT - 32 : PROMPT].all()  # nothing was important: the latest stay
    keys = torch.cat([toy.keys[0], torch.zeros(HEADS, 1, D)], 1)
    keys[:, PROMPT - 20] = axis(0, 9)
    queries = torch.stack([axis(0, 9), torch.zeros(D)]).expand(1, HEADS, GROUP, D)
    policy.choose(0, queries, keys, PROMPT + 1, torch.ones(1, PROMPT + 2, dtype=torch.bool))
    assert policy.state[0].last[:, PROMPT - 20].tolist() == [PROMPT + 1] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", EVICTORS)
def test_what_was_evicted_never_comes_back(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    toy = Toy(torch.randn(HEADS, PROMPT, D, generator=generator), torch.randn(HEADS * GROUP, 64, D, generator=generator))
    policy = prepared(name, toy, 48, **({"least_weight": 0.3} if name == "lazyeviction" else {}))
    before = torch.ones(HEADS, PROMPT, dtype=torch.bool)
    for position in range(PROMPT, PROMPT + 200):
        new, query = torch.randn(D, generator=generator), torch.randn(D, generator=generator)
        visible = step(policy, toy, position, 2 * query, new)
        assert not (visible[:, :position] & ~before).any()
        before = visible


def test_lazyeviction_observes_the_end_of_the_prompt() -> None:
    keys = plain_keys()
    keys[:, 33] = axis(0, 9)
    toy = Toy(keys, observing(axis(0, 3)))
    policy = prepared("lazyeviction", toy, 48, least_weight=0.3)
    record: Recurrence = policy.prepared[0]
    assert record.last[0, 33] == PROMPT - 1
    assert record.longest[0, 33] == 1
    assert record.longest[0, 34] == 0
    assert step(policy, toy, PROMPT, axis(2))[:, 33].all()


# TriAttention.


def test_triattention_scores_are_the_trigonometric_series_of_the_paper() -> None:
    rotary = Rotary(1.0 / 100.0 ** (torch.arange(0, D, 2) / D))
    generator = torch.Generator().manual_seed(6)
    positions = torch.arange(5) * 8
    plain_queries, plain = torch.randn(HEADS * GROUP, 5, D, generator=generator), torch.randn(HEADS, 7, D, generator=generator)
    centre = query_centre(rotary.rotate(plain_queries, positions), positions, rotary, HEADS)
    now = 30
    scores = centre_scores(centre, rotary.rotate(plain, torch.arange(7)), now)
    pairs_q = torch.complex(plain_queries[..., : D // 2], plain_queries[..., D // 2 :])
    pairs_k = torch.complex(plain[..., : D // 2], plain[..., D // 2 :])
    head, group, token = 1, 0, 4
    mean, key = pairs_q[head * GROUP + group].mean(0), pairs_k[head, token]
    phase = mean.angle() - key.angle()
    by_distance = [
        (mean.abs() * key.abs() * torch.cos(rotary.inverse_frequency * (now + offset - token) + phase)).sum() for offset in OFFSETS
    ]
    spread = ((pairs_q[head * GROUP + group].abs().mean(0) - mean.abs()) * key.abs()).sum()
    torch.testing.assert_close(scores[head, group, token], torch.stack(by_distance).mean() + spread, atol=1e-4, rtol=1e-4)


def test_triattention_keeps_what_the_average_query_looks_for() -> None:
    """Channel 3 turns slowest: a key along it keeps its product with a query along it at every near distance."""
    rotary = Rotary(1.0 / 10000.0 ** (torch.arange(0, D, 2) / D))
    keys = plain_keys()
    keys[:, 40], keys[:, 90] = axis(3, 4), axis(3, -4)
    queries = rotary.rotate(axis(3, 2).expand(HEADS * GROUP, 20, D), torch.arange(20) * 8)
    toy = Toy(rotary.rotate(keys, torch.arange(PROMPT)), queries=queries)
    visible = step(prepared("triattention", toy, 48), toy, PROMPT, axis(0))
    assert visible[:, 40].all()
    assert not visible[:, 90].any()
    assert visible[:, PROMPT - 16 :].all()


# All of them.


@pytest.fixture(scope="module")
def model() -> EvalModel:
    register_attention()
    network = tiny_model()
    network.set_attn_implementation(ATTENTION_NAME)
    model = EvalModel(network, None)
    model.reserve(520)
    return model


IDS = torch.randint(3, 97, (520,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("prefix", [400, 405])
@pytest.mark.parametrize("name", BASELINES)
def test_budget_determinism_and_restart(model: EvalModel, name: str, prefix: int) -> None:
    model.prefill(IDS[:prefix])
    prompt = model.keys[0][:, :prefix].clone()
    policy = BASELINES[name](budget_tokens=64, measure=True)
    policy.prepare(model, prefix)
    seen: list[Tensor] = []
    choose = policy.choose

    def watched(layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        chosen = choose(layer, queries, keys, position, causal)
        seen.append((token_mask(chosen, keys.shape[1]) & causal[:, None]).sum(-1))
        return chosen

    policy.choose = watched  # type: ignore[method-assign]
    first = model.decode(IDS, prefix, prefix + 50, policy)
    visible = torch.cat(seen).flatten()
    if name == "snapkv":
        assert visible.min() == 65
        assert visible.max() == 64 + 50
    else:
        assert visible.max() == 64
        assert visible.min() == 64 - 16 + 1
    assert policy.statistics.mean_pages == pytest.approx(float(visible.float().mean()) / 16, rel=1e-4)
    assert 0 < policy.statistics.mean_covered < 1
    policy.restart()
    assert torch.equal(model.decode(IDS, prefix, prefix + 50, policy), first)
    # Another continuation, then the first again: nothing of it may remain.
    policy.restart()
    model.decode(IDS.flip(0), prefix, prefix + 50, policy)
    policy.restart()
    assert torch.equal(model.decode(IDS, prefix, prefix + 50, policy), first)
    assert torch.equal(model.keys[0][:, :prefix], prompt)


@pytest.mark.parametrize("name", BASELINES)
def test_a_budget_of_the_whole_text_is_full_attention(model: EvalModel, name: str) -> None:
    model.prefill(IDS[:300])
    full = model.decode(IDS, 300, 340, None)
    policy = BASELINES[name](budget_tokens=352)
    policy.prepare(model, 300)
    torch.testing.assert_close(model.decode(IDS, 300, 340, policy), full, atol=1e-5, rtol=1e-5)
    small = BASELINES[name](budget_tokens=64)
    small.prepare(model, 300)
    assert (model.decode(IDS, 300, 340, small) - full).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in BASELINES if name not in EVICTORS])
def test_a_choice_without_state_does_not_depend_on_how_many_tokens_are_decoded_together(model: EvalModel, name: str) -> None:
    assert not BASELINES[name].stateful
    model.prefill(IDS[:400])
    policy = BASELINES[name](budget_tokens=64)
    policy.prepare(model, 400)
    together = model.decode(IDS, 400, 430, policy)
    alone = torch.cat([model.decode(IDS, p, p + 1, policy) for p in range(400, 430)])
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BASELINES)
def test_budgets_share_what_the_prompt_gives(model: EvalModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model.prefill(IDS[:400])
    first = BASELINES[name](budget_tokens=96)
    first.prepare(model, 400)
    alone = BASELINES[name](budget_tokens=64)
    alone.prepare(model, 400)
    expected = model.decode(IDS, 400, 440, alone)
    sharing = BASELINES[name](budget_tokens=64)
    sharing.share(first)
    monkeypatch.setattr(BASELINES[name], "prepare_layer", lambda *_: pytest.fail("prepared again"))
    sharing.prepare(model, 400)
    assert torch.equal(model.decode(IDS, 400, 440, sharing), expected)
    with pytest.raises(ValueError, match="prepared for a prompt of 400 tokens; this prompt has 300"):
        sharing.prepare(model, 300)


class Tokenizer:
    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[3 + ord(c) % 90 for c in text])


def test_the_selector_table_has_rows_of_baselines() -> None:
    assert {c.selector for c in BASELINE_CANDIDATES} == set(BASELINES)
    assert known_candidates()[-len(BASELINES) :] == BASELINE_CANDIDATES
    register_attention()
    network = tiny_model()
    network.set_attn_implementation(ATTENTION_NAME)
    run = TableRun(EvalModel(network, Tokenizer()), IDS[:336].tolist(), 320, log=lambda _: None)
    rows = [Candidate("oracle", "oracle"), Candidate("R-KV", "rkv"), Candidate("SnapKV", "snapkv")]
    fidelities = fidelity(run, rows, (4, 6), 0.01)
    assert [r["rule"] for r in fidelities if r["candidate"] == "R-KV"] == ["4 pages", "6 pages"]  # no threshold
    answers = retrieval(run, [Question("ab", "c")], rows, (4, 6), 0.01)
    result = dict(
        budgets=[4, 6], tau=0.01, decoded=16, tokens=336, seeds=1, needle_tokens=320, bytes={c.name: c.page_bytes(16) for c in rows},
        fidelity={"prose": fidelities}, recall_gap={"prose": recall_gap(run, rows)}, retrieval=[answers],
    )
    kl = {(r["candidate"], r["rule"]): r["kl"] for r in fidelities}
    page = markdown(result)
    assert f"| R-KV | - | - | {kl['R-KV', '4 pages']:.4f} (3.5 pages) | {kl['R-KV', '6 pages']:.4f} (5.5 pages) | - |" in page
    assert f"| SnapKV | - | - | {kl['SnapKV', '4 pages']:.4f} (4.5 pages) |" in page
    assert "| oracle | 512 | 0.00 |" in page
    assert page.count("\n| R-KV |") == 2


def test_sharing_between_different_methods_or_options_is_refused() -> None:
    with pytest.raises(ValueError, match="snapkv can share only with another snapkv that has the same options"):
        BASELINES["snapkv"](64).share(BASELINES["rkv"](64))
    with pytest.raises(ValueError, match="same options"):
        BASELINES["snapkv"](64).share(BASELINES["snapkv"](64, kernel=5))


@pytest.mark.parametrize("name", EVICTORS)
def test_evictors_refuse_tokens_out_of_order(name: str) -> None:
    toy = Toy(plain_keys(), observing(axis(0)))
    policy = prepared(name, toy, 48)
    step(policy, toy, PROMPT, axis(0))
    with pytest.raises(ValueError, match=f"{name} must see every token once, alone and in order: 1 at position {PROMPT} came after {PROMPT + 1} tokens"):
        step(policy, toy, PROMPT, axis(0))


@pytest.mark.parametrize(("name", "options", "sentence"), [
    ("snapkv", {"budget_tokens": 50}, "snapkv: the budget is 50 tokens; it must be a multiple of 16 and at least 48"),
    ("snapkv", {"budget_tokens": 32}, "snapkv: the budget is 32 tokens; it must be a multiple of 16 and at least 48"),
    ("snapkv", {"windows": 3}, "snapkv has no option 'windows'; its options: window, kernel"),
    ("snapkv", {"window": 65}, "snapkv: window is 65; it must be a whole number from 1 to 64"),
    ("snapkv", {"kernel": 4}, "snapkv: kernel is 4; it must be an odd whole number of at least 1"),
    ("snapkv", {"kernel": 5.0}, "snapkv: kernel is 5.0; it must be an odd whole number of at least 1"),
    ("rkv", {"mix": "much"}, "rkv: mix is 'much'; it must be a number from 0 to 1"),
    ("shadowkv", {"exact_keys": 1}, "shadowkv: exact_keys is 1; it must be true or false"),
    ("lazyeviction", {"interval": 17}, "lazyeviction: interval is 17; it must be a whole number from 1 to 16"),
])
def test_bad_input_is_one_clear_sentence(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        BASELINES[name](**({"budget_tokens": 64} | options))
    assert str(error.value) == sentence
