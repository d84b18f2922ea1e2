"""The evaluation on a tiny random model: every number against one computed another way."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvskim.errors import KvskimError
from kvskim.eval import texts
from kvskim.eval.model import ATTENTION_NAME, EvalModel, page_blocks, register_attention
from kvskim.eval.policy import SelectorPolicy, page_log_mass
from kvskim.eval.selector_table import Candidate, TableRun, agreement, fidelity, recall_gap, retrieval
from kvskim.eval.selectors_report import markdown, run_table
from kvskim.rules import RuleParameters
from kvskim.selectors import PageTables, get_selector
from tiny import tiny_model


class Tokenizer:
    bos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[3 + ord(c) % 90 for c in text])


@pytest.fixture(scope="module")
def model() -> EvalModel:
    register_attention()
    network = tiny_model()
    network.set_attn_implementation(ATTENTION_NAME)
    return EvalModel(network, Tokenizer())


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(3, 97, (400,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("kind", ["Phi3Config", "DeepseekV2Config"])
def test_a_model_with_other_attention_is_refused_in_one_sentence(kind: str) -> None:
    import transformers

    config = getattr(transformers, kind)(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        n_routed_experts=2, pad_token_id=0,
    )
    network = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(KvskimError, match="can't be evaluated: every layer must have attention with keys and values of its own"):
        EvalModel(network, Tokenizer())


def test_page_blocks_stay_inside_pages() -> None:
    assert list(page_blocks(30, 50)) == [(30, 32), (32, 48), (48, 50)]
    assert list(page_blocks(32, 48)) == [(32, 48)]
    assert list(page_blocks(5, 5)) == []


def test_prefill_and_decode_give_the_logits_of_the_stock_model(model: EvalModel, ids: list[int]) -> None:
    sequence = torch.tensor(ids)
    model.reserve(len(ids))
    model.prefill(sequence[:300], chunk=128)
    mine = model.decode(sequence, 300, 340, None)
    stock = tiny_model()(sequence[None, :340]).logits[0, 300:]
    torch.testing.assert_close(mine, stock, atol=1e-4, rtol=1e-4)
    assert model.calibration_queries(0).shape == (6, 38, 16)


def test_a_budget_of_everything_changes_nothing_and_a_small_one_does(model: EvalModel, ids: list[int]) -> None:
    run = TableRun(model, ids, 320, log=lambda _: None)
    oracle = [Candidate("oracle", "oracle"), Candidate("mean", "mean")]
    everything, small = 100, 12
    rows = {(r["candidate"], r["rule"]): r for r in fidelity(run, oracle, (everything, small), None)}
    for name in ("oracle", "mean"):
        assert rows[(name, "100 pages")]["kl"] == pytest.approx(0, abs=1e-9)
        assert rows[(name, "100 pages")]["top1"] == 1.0
        assert rows[(name, "100 pages")]["covered"] == pytest.approx(1.0, abs=1e-5)
        assert rows[(name, "12 pages")]["pages"] == 12.0
        assert rows[(name, "12 pages")]["kl"] > 1e-6
    assert rows[("oracle", "12 pages")]["covered"] > rows[("mean", "12 pages")]["covered"]


def test_policy_takes_the_heaviest_pages_of_a_known_pattern() -> None:
    """Keys of page 3 point where the query looks: the budget must take page 3, beside sink and window."""
    keys = torch.zeros(1, 16 * 8, 4)
    keys[:, 48:64, 0] = 5.0
    queries = torch.tensor([[[[3.0, 0, 0, 0]]]])
    rule = RuleParameters(rule="budget", budget_pages=3, min_pages=0)
    policy = SelectorPolicy(get_selector("oracle"), {0: PageTables(torch.zeros(1, 4))}, rule, window_pages=1)
    chosen = policy.choose(0, queries, keys, 127, torch.ones(1, 128, dtype=torch.bool))
    assert chosen[0, 0].nonzero()[:, 0].tolist() == [0, 3, 7]
    assert policy.statistics.mean_pages == 3
    exact = page_log_mass(queries, keys, torch.ones(1, 128, dtype=torch.bool)).softmax(2)[0, 0, :, 0]
    assert policy.statistics.mean_covered == pytest.approx(float(exact[[0, 3, 7]].sum()), abs=1e-6)


def test_records_of_decoded_pages_are_made_once_and_forgotten_on_restart(model: EvalModel, ids: list[int]) -> None:
    run = TableRun(model, ids, 320, log=lambda _: None)
    policy = run.policy(Candidate("mean", "mean"), RuleParameters(rule="budget", budget_pages=4, min_pages=0))
    model.decode(run.ids, 320, 380, policy)
    assert policy.prefix[0].shape[0] == 20
    assert sum(a.shape[0] for a in policy.added[0]) == 3
    expected = policy.selector.encode(model.keys[0][:, 320:368].unflatten(1, (-1, 16)).transpose(0, 1), policy.tables[0])
    assert torch.equal(torch.cat(policy.added[0]), expected)
    policy.restart()
    assert policy.added == {}


def test_recall_gap_of_the_oracle_is_zero_and_of_others_is_not_negative(model: EvalModel, ids: list[int]) -> None:
    run = TableRun(model, [*ids, *ids, *ids], 1100, log=lambda _: None)
    gaps = recall_gap(run, [Candidate("oracle", "oracle"), Candidate("mean", "mean"), Candidate("minmax", "minmax")])
    assert gaps["oracle"] == 0
    assert gaps["mean"] > 0
    assert gaps["minmax"] > 0


def test_retrieval_counts_right_answers(model: EvalModel, ids: list[int]) -> None:
    run = TableRun(model, ids, 320, log=lambda _: None)
    prompt = "ab"
    sequence = torch.cat([run.ids[:320], torch.tensor(Tokenizer()("\n" + prompt).input_ids)])
    best = int(model.decode(sequence, 320, len(sequence), None)[-1].argmax())
    answer = next(chr(c) for c in range(32, 126) if 3 + c % 90 == best) if best >= 3 else None
    if answer is None:
        pytest.skip("the random model prefers a special token here")
    wrong = "z" if answer != "z" else "y"
    rows = retrieval(run, [texts.Question(prompt, answer), texts.Question(prompt, wrong)], [], (8,), None)
    assert (rows[0]["right"], rows[0]["asked"]) == (1, 2)


def test_agreement_of_known_distributions() -> None:
    a = torch.tensor([[0.0, 0.0]]).log_softmax(-1)
    b = torch.tensor([[1.0, 0.0]])
    expected = sum(0.5 * (torch.log(torch.tensor(0.5)) - b.log_softmax(-1)[0, i]) for i in range(2))
    assert agreement(a, b)["kl"] == pytest.approx(float(expected), abs=1e-6)
    assert agreement(b, b) == {"kl": 0.0, "kl_p95": 0.0, "top1": 1.0}


def test_planted_facts_are_in_the_context() -> None:
    tokenizer = Tokenizer()
    ids, questions = texts.planted_facts(tokenizer, 20_000, seed=1)
    assert len(questions) == 12
    assert len({q.answer for q in questions}) == 12
    assert abs(len(ids) - 20_000) < 400
    joined = ",".join(map(str, ids))
    for q in questions:
        assert ",".join(map(str, tokenizer(f"{q.prompt}{q.answer}.\n").input_ids)) in joined
    assert texts.planted_facts(tokenizer, 20_000, seed=1)[0] == ids
    assert texts.planted_facts(tokenizer, 20_000, seed=2)[0] != ids


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="the text gives only 101 tokens; 500 are needed"):
        texts.token_ids(Tokenizer(), "x" * 100, 500, skip=0)


def test_report_has_a_row_for_every_selector(model: EvalModel) -> None:
    result = run_table(model, tokens=320, decoded=16, budgets=(8,), needle_tokens=6000, seeds=1, only=("sketch 256 B", "mean"), log=lambda _: None)
    page = markdown(json.loads(json.dumps(result)))
    assert "| sketch 256 B | 256 |" in page
    assert page.count("\n| mean |") == 2
    assert "of 12 (1 contexts" in page


def test_published_methods_are_run_when_they_are_asked_for(model: EvalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvskim.eval.selectors_report.recall_gap", lambda *_: {})
    monkeypatch.setattr("kvskim.eval.selectors_report.fidelity", lambda *_: [])
    monkeypatch.setattr("kvskim.eval.selectors_report.retrieval", lambda *_: [])

    def rows(**asked: Any) -> list[str]:
        return list(run_table(model, tokens=320, decoded=16, needle_tokens=6000, seeds=1, log=lambda _: None, **asked)["bytes"])

    selectors, everything = rows(), rows(baselines=True)
    assert "sketch 256 B" in selectors
    assert everything == [*selectors, "ShadowKV", "RocketKV", "SnapKV", "R-KV", "TriAttention", "LazyEviction"]
    assert rows(only=["mean", "R-KV"]) == ["oracle", "mean", "R-KV"]
    assert rows(only=["mean"], baselines=True) == ["oracle", "mean", *everything[len(selectors) :]]
