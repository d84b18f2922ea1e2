"""Up to which length a request attends everything: the arithmetic, and what the engine makes of it."""

import pytest
import torch
from mini_engine import MiniEngine, Request

from kvskim.engines.vllm.crossover import LATENT_SPARE_BYTES, SPARE_BYTES, whole_rule
from kvskim.rules import RuleParameters

FEW = {"selector": "minmax", "rule": "budget", "budget_pages": 6}
BUDGET = RuleParameters(rule="budget", budget_pages=128)


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def test_the_length_falls_with_the_batch_and_the_bytes_of_a_page():
    page = 16 * 512  # 128 channels of K and V in two bytes
    assert whole_rule(BUDGET, 2, 1, 8, 512, fast=True).full_pages == 128 + SPARE_BYTES // (8 * page)
    assert whole_rule(BUDGET, 2, 4, 8, 512, fast=True).full_pages == 128 + SPARE_BYTES // (32 * page)
    assert whole_rule(BUDGET, 2, 1, 8, 256, fast=True).full_pages == 128 + SPARE_BYTES // (4 * page)
    assert whole_rule(BUDGET, 2, 512, 8, 512, fast=True).full_pages == 128
    # One kv head alone does not get eight times the length.
    assert whole_rule(BUDGET, 2, 1, 1, 512, fast=True) == whole_rule(BUDGET, 2, 1, 8, 512, fast=True)
    # The one row of a token in latent attention does: its attention has splits enough.
    assert whole_rule(BUDGET, 2, 1, 1, 1152, fast=True, latent=True).full_pages == 128 + LATENT_SPARE_BYTES // (16 * 1152)
    assert whole_rule(BUDGET, 2, 16, 1, 1152, fast=True, latent=True).full_pages == 128 + LATENT_SPARE_BYTES // (16 * 16 * 1152)
    # Everything else of the rule stays.
    assert whole_rule(BUDGET, 2, 1, 8, 512, fast=True).budget_pages == 128


def test_without_fast_attention_only_what_the_rule_attends_in_any_case_is_left_unscored():
    assert whole_rule(BUDGET, 2, 1, 8, 512, fast=False).full_pages == 128
    assert whole_rule(BUDGET, 2, 1, 1, 1152, fast=False, latent=True).full_pages == 128
    assert whole_rule(RuleParameters(min_pages=8), 3, 1, 8, 512, fast=False).full_pages == 11
    assert whole_rule(RuleParameters(rule="budget", budget_fraction=0.5), 2, 1, 8, 512, fast=False).full_pages == 2


@pytest.mark.parametrize(("setting", "whole"), [({"full_pages": 20}, 20), ({"full_pages": 0}, 6), ({}, 6)])
def test_rows_up_to_full_pages_attend_all(setting, whole):
    engine = MiniEngine({**FEW, **setting})
    for length in (whole * 16, whole * 16 + 1):
        request = Request(length)
        engine.step([(request, length - 1)])
        engine.step([(request, 1)])
        for state in engine.state.layers.values():
            assert state.counts[0].tolist() == [whole if length == whole * 16 else 6] * state.num_kv_heads


def test_the_engine_asks_for_the_rows_of_each_launch(monkeypatch):
    asked = []

    def rule(rule, forced, rows, heads, row_bytes, *, fast, latent):
        asked.append((rows, fast))
        return whole_rule(rule, forced, rows, heads, row_bytes, fast=fast, latent=latent)

    monkeypatch.setattr("kvskim.engines.vllm.state.whole_rule", rule)
    engine = MiniEngine(FEW)
    requests = [Request(n) for n in range(3)]
    for request in requests:
        engine.step([(request, 200)])
    engine.step([(requests[0], 1)])
    engine.step([(request, 1) for request in requests])
    assert {rows for rows, _ in asked} == {1, 3}
    assert not any(fast for _, fast in asked), "plain torch is never as fast as FlashAttention"
