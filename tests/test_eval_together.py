"""Policies that decode as rows of one batch: every row is what its policy decodes alone, and what is settled or over the limit ends."""

import pytest
import torch

from kvskim.eval.generation import greedy, never
from kvskim.eval.methods import Calibrations, PromptPolicies, parse_methods, settings_of
from kvskim.eval.model import EvalModel
from kvskim.eval.policy import Policy, PolicyStatistics
from kvskim.eval.sample import Question
from kvskim.eval.text_metrics import string_match_all, token_f1
from kvskim.eval.together import Together, goes_together, greedy_together
from kvskim.layout import PAGE_TOKENS
from tiny import tiny_eval_model

LIMIT = 30


@pytest.fixture(scope="module")
def model() -> EvalModel:
    return tiny_eval_model(3)


@pytest.fixture
def prompt(model) -> torch.Tensor:
    ids = torch.randint(3, 97, (203,), generator=torch.Generator().manual_seed(1))
    model.reserve(300)
    model.prefill(ids[:-1], chunk=64)
    return ids


def policies_of(model, tokens, names="rkv,triattention,lazyeviction", budgets=(3, 6)):
    settings = settings_of("budget", budgets, [0.007], 0.95)
    return [policy for _, _, policy in PromptPolicies(model, tokens, Calibrations(model, "prompt")).each(parse_methods(names), settings)]


def alone(model, prompt, policies, **more):
    """Answer and mean pages of each policy by itself; the policies are as new again afterwards."""
    out = []
    for policy in policies:
        answer = greedy(model, prompt, policy, LIMIT, **more)
        out.append((answer, policy.statistics.mean_pages, policy.statistics.mean_bytes(model.head_dim)))
        policy.restart()
        policy.statistics = PolicyStatistics()
    return out


def seen(policies, answers, model):
    return [(answer, p.statistics.mean_pages, p.statistics.mean_bytes(model.head_dim)) for p, answer in zip(policies, answers)]


def test_a_row_is_what_its_policy_decodes_alone(model, prompt):
    policies = policies_of(model, len(prompt) - 1)
    expected = alone(model, prompt, policies)
    assert len({tuple(answer) for answer, *_ in expected}) > 2
    answers = greedy_together(model, prompt, len(prompt) - 1, policies, LIMIT, (), never)
    assert seen(policies, answers, model) == expected


def test_rows_that_end_leave_the_others_as_they_are(model, prompt):
    policies = policies_of(model, len(prompt) - 1)
    answers = [answer for answer, *_ in alone(model, prompt, policies)]
    stop = {answers[0][4]}
    expected = alone(model, prompt, policies, stop=stop)
    lengths = {len(answer) for answer, *_ in expected}
    assert len(lengths) > 1
    together = greedy_together(model, prompt, len(prompt) - 1, policies, LIMIT, stop, never)
    assert [len(answer) for answer in together] == [len(answer) for answer, *_ in expected]
    assert together == [answer for answer, *_ in expected]


def test_the_rest_of_a_prompt_is_decoded_under_the_policies_too(model, prompt):
    before = len(prompt) - 21
    model.reserve(300)
    model.prefill(prompt[:before], chunk=64)
    policies = policies_of(model, before)
    expected = []
    for policy in policies:
        model.decode(prompt, before, len(prompt) - 1, policy)
        expected.append(greedy(model, prompt, policy, LIMIT))
        policy.restart()
    assert greedy_together(model, prompt, before, policies, LIMIT, (), never) == expected


def test_sliding_layers_have_their_window(model, prompt, monkeypatch):
    monkeypatch.setattr(model, "window", [40, 0])
    monkeypatch.setattr(model, "sparse_layers", [1])
    # The window ends within the prompt first, and within what was decoded later.
    policies = policies_of(model, len(prompt) - 1)
    expected = []
    for policy in policies:
        expected.append(greedy(model, prompt, policy, 60))
        policy.restart()
    assert greedy_together(model, prompt, len(prompt) - 1, policies, 60, (), never) == expected


def test_a_soft_cap_is_applied(model, prompt):
    (policy,) = policies_of(model, len(prompt) - 1, "rkv", (14,))
    rows = Together(model, len(prompt) - 1, [policy], 4)
    model.position = len(prompt) - 1
    query, key, value = (torch.randn(1, heads, 1, 16, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2, 2))
    capped = rows.attend(0, query, key, value, 0.25, 1.5)
    keys, values = torch.cat([model.keys[0][:, :202], key[0]], 1), torch.cat([model.values[0][:, :202], value[0]], 1)
    logits = 1.5 * torch.tanh(0.25 * query[0].unflatten(0, (2, 3))[:, :, 0] @ keys.transpose(1, 2) / 1.5)
    torch.testing.assert_close(capped[0, 0].unflatten(0, (2, 3)), logits.softmax(-1) @ values, atol=1e-5, rtol=1e-5)


def test_only_policies_that_see_tokens_one_by_one_and_attend_the_cache_as_it_is():
    class Plain(Policy):
        def choose(self, layer, queries, keys, position, causal):
            raise NotImplementedError

    class OneByOne(Plain):
        stateful = True

    class OtherKeys(OneByOne):
        def read_keys(self, layer, keys):
            return 2 * keys

    assert [goes_together(kind()) for kind in (Plain, OneByOne, OtherKeys)] == [False, True, False]


def test_an_answer_ends_when_nothing_can_change_its_score(model, prompt):
    policies = policies_of(model, len(prompt) - 1)
    for answers in (
        greedy_together(model, prompt, len(prompt) - 1, policies, LIMIT, (), lambda answer: len(answer) == 5),
        [greedy(model, prompt, None, LIMIT, settled=lambda answer: len(answer) == 5)],
        [greedy(model, prompt, None, LIMIT, drafts=[greedy(model, prompt, None, LIMIT)], settled=lambda answer: len(answer) == 5)],
    ):
        assert {len(answer) for answer in answers} == {5}
    assert PAGE_TOKENS > 5  # the draft was longer
    found = Question("", ("12", "7"), string_match_all, 9)
    assert [found.settled(text) for text in ("12", "it is 12 or 17", "")] == [False, True, False]
    # Words that follow lower this score.
    assert not Question("", ("12",), token_f1, 9).settled("12")


def test_positions_of_the_captured_queries(model, prompt):
    model.reserve(300)
    model.prefill(prompt[:150], chunk=64)
    model.extend(prompt, 150, 171)
    places = model.calibration_positions()
    assert places.tolist() == [*range(0, 150, 8), 150, 158, 166]
    captured = model.calibration_queries(0)
    model.reserve(300)
    model.prefill(prompt[:171], query_stride=1)
    torch.testing.assert_close(captured, model.calibration_queries(0)[:, places], atol=1e-5, rtol=1e-4)
