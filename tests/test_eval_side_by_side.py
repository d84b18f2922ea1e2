"""Settings of a selector that decode as rows of one batch: every row is what its policy decodes alone, whatever the drafts."""

import pytest
import torch

from kvskim.eval import generation, side_by_side
from kvskim.eval.generation import accept, greedy, never
from kvskim.eval.methods import Calibrations, PromptPolicies, parse_methods, settings_of
from kvskim.eval.model import EvalModel
from kvskim.eval.side_by_side import go_side_by_side, greedy_side_by_side
from kvskim.layout import PAGE_TOKENS
from tiny import tiny_eval_model

LIMIT = 50
"""Long enough that pages which decoding completed become candidates."""


@pytest.fixture(scope="module")
def model() -> EvalModel:
    return tiny_eval_model(3)


@pytest.fixture
def prompt(model) -> torch.Tensor:
    return prefilled(model, 203)


def prefilled(model, tokens) -> torch.Tensor:
    ids = torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(1))
    model.reserve(400)
    model.prefill(ids[:-1], chunk=64)
    return ids


def policies_of(model, tokens, name, rules="budget,threshold,coverage", budgets=(4, 6, 9)):
    settings = settings_of(rules, budgets, [0.05], 0.8)
    return [policy for _, _, policy in PromptPolicies(model, tokens, Calibrations(model, "prompt")).each(parse_methods(name), settings)]


def alone(model, prompt, prefix, policies, limit=LIMIT, **more):
    out = []
    for policy in policies:
        if prefix < len(prompt) - 1:
            model.decode(prompt, prefix, len(prompt) - 1, policy)
        out.append(greedy(model, prompt, policy, limit, **more))
    return out


def read_of(policies, model):
    return [(p.statistics.rows, p.statistics.mean_pages, p.statistics.share, p.statistics.mean_bytes(model.head_dim)) for p in policies]


@pytest.mark.parametrize(
    ("name", "tokens", "limit", "rules"), [
        ("oracle", 203, LIMIT, "budget,threshold"), ("sketch", 203, LIMIT, "budget,threshold"), ("rki4", 203, LIMIT, "budget,threshold,coverage"),
        ("rki4", 209, LIMIT, "budget,coverage"), ("minmax", 203, LIMIT, "budget"), ("sketch:page_frame=true", 79, 24, "budget"),
    ],
)  # fmt: skip
def test_a_row_is_what_its_policy_decodes_alone(model, monkeypatch, name, tokens, limit, rules):
    """A prompt of 203 tokens ends in a page that decoding completes, one of 209 with a page; positions count in page-frame records."""
    # Without drafts, so that both decode the same tokens and what they read can be compared.
    monkeypatch.setattr(generation, "LEAST_REPEAT", 99)
    prompt, prefix = prefilled(model, tokens), tokens - 1
    expected, policies = policies_of(model, prefix, name, rules), policies_of(model, prefix, name, rules)
    answers = alone(model, prompt, prefix, expected, limit)
    assert len({tuple(answer) for answer in answers}) > 1
    assert greedy_side_by_side(model, prompt, prefix, policies, limit, (), [], never) == answers
    assert read_of(policies, model) == read_of(expected, model)


def test_drafts_change_the_number_of_passes_and_not_the_answers(model, prompt, monkeypatch):
    prefix = len(prompt) - 1
    answers = alone(model, prompt, prefix, policies_of(model, prefix, "rki4"))
    passes = []
    forward = model.forward_rows
    monkeypatch.setattr(model, "forward_rows", lambda ids, positions: passes.append(ids.shape) or forward(ids, positions))
    drafts = [answers[0], answers[2][:20] + answers[1][20:], greedy(model, prompt, None, LIMIT)]
    policies = policies_of(model, prefix, "rki4")
    assert greedy_side_by_side(model, prompt, prefix, policies, LIMIT, (), drafts, never) == answers
    # Places of a pass that only longer drafts of other rows have are not counted.
    assert [policy.statistics.mean_pages for policy in policies[:3]] == [4, 6, 9]
    assert len(passes) < LIMIT
    assert 1 < max(shape[1] for shape in passes) <= PAGE_TOKENS
    passes.clear()
    exact = policies_of(model, prefix, "rki4", "budget", (4, 6))
    assert greedy_side_by_side(model, prompt, prefix, exact, LIMIT, (), answers[:2], never) == answers[:2]
    # One pass for each page where every row's own answer is among the drafts, unless the other's begins alike.
    assert len(passes) <= 2 * (LIMIT // PAGE_TOKENS + 2)


def test_stop_tokens_and_settled_answers_end_a_row_and_leave_the_others(model, prompt):
    prefix = len(prompt) - 1
    answers = alone(model, prompt, prefix, policies_of(model, prefix, "rki4"))
    stop = {answers[0][9]}
    expected = alone(model, prompt, prefix, policies_of(model, prefix, "rki4"), stop=stop)
    assert len({len(answer) for answer in expected}) > 1
    assert greedy_side_by_side(model, prompt, prefix, policies_of(model, prefix, "rki4"), LIMIT, stop, answers, never) == expected
    short = greedy_side_by_side(model, prompt, prefix, policies_of(model, prefix, "rki4"), LIMIT, (), answers, lambda answer: len(answer) == 5)
    assert short == [answer[:5] for answer in answers]


def test_the_rest_of_a_prompt_is_decoded_under_the_policies_too(model, prompt, monkeypatch):
    monkeypatch.setattr(generation, "LEAST_REPEAT", 99)
    before = len(prompt) - 45
    model.reserve(400)
    model.prefill(prompt[:before], chunk=64)
    expected, policies = policies_of(model, before, "rki4"), policies_of(model, before, "rki4")
    answers = alone(model, prompt, before, expected, limit=9)
    assert greedy_side_by_side(model, prompt, before, policies, 9, (), [], never) == answers
    assert read_of(policies, model) == read_of(expected, model)


def test_sliding_layers_have_their_window(model, prompt, monkeypatch):
    monkeypatch.setattr(model, "window", [40, 0])
    monkeypatch.setattr(model, "sparse_layers", [1])
    prefix = len(prompt) - 1
    answers = alone(model, prompt, prefix, policies_of(model, prefix, "rki4"))
    assert greedy_side_by_side(model, prompt, prefix, policies_of(model, prefix, "rki4"), LIMIT, (), [], never) == answers


def test_fewer_rows_at_a_time_where_memory_is_short(model, prompt, monkeypatch):
    prefix = len(prompt) - 1
    answers = alone(model, prompt, prefix, policies_of(model, prefix, "rki4"))
    monkeypatch.setattr(side_by_side, "MOST_LOGITS", 2 * PAGE_TOKENS * model.num_heads * 300)
    forward, sizes = model.forward_rows, set()
    monkeypatch.setattr(model, "forward_rows", lambda ids, positions: sizes.add(len(ids)) or forward(ids, positions))
    assert greedy_side_by_side(model, prompt, prefix, policies_of(model, prefix, "rki4"), LIMIT, (), [], never) == answers
    assert max(sizes) == 2


def test_a_soft_cap_is_applied(model, prompt):
    prefix = len(prompt) - 1
    rows = side_by_side.SideBySide(model, prefix, policies_of(model, prefix, "oracle", "budget", (40, 50)), 20)
    seen = {}
    attend = rows.attend

    def capped(layer, query, key, value, scale, softcap):
        if layer == 0:
            seen["out"] = attend(layer, query, key, value, 0.25, 1.5)
            seen["inputs"] = query, key, value
        return attend(layer, query, key, value, scale, softcap)

    rows.attend = capped
    rows.run([0, 1], [prefix, prefix], [[5], [7]])
    query, key, value = (part[1] for part in seen["inputs"])
    keys, values = torch.cat([model.keys[0][:, :prefix], key], 1), torch.cat([model.values[0][:, :prefix], value], 1)
    logits = 1.5 * torch.tanh(0.25 * query.unflatten(0, (2, 3))[:, :, 0] @ keys.transpose(1, 2) / 1.5)
    torch.testing.assert_close(seen["out"][1, 0].unflatten(0, (2, 3)), logits.softmax(-1) @ values, atol=1e-5, rtol=1e-5)


def test_which_policies_go_side_by_side(model, prompt):
    prefix = len(prompt) - 1
    found = policies_of(model, prefix, "rki4")
    assert go_side_by_side(found, prefix)
    assert not go_side_by_side(found[:1], prefix)
    assert not go_side_by_side(found, PAGE_TOKENS - 1)
    found[0].measure = True
    assert not go_side_by_side(found, prefix)
    assert not go_side_by_side(policies_of(model, prefix, "snapkv"), prefix)


def test_what_a_draft_is_accepted_for():
    answer = [1]
    assert not accept(answer, [2, 3, 4], [2, 9], 10, (), never)
    assert answer == [1, 2, 3]
    assert accept(answer, [4, 5], [4], 5, (), never)
    assert answer == [1, 2, 3, 4, 5]
    assert accept(answer, [7], [], 10, {7}, never)
    assert answer == [1, 2, 3, 4, 5]
    assert accept(answer, [8], [], 10, (), lambda tokens: tokens[-1] == 8)
