"""RULER through a model made by hand that looks values up: full attention is right, and a policy is right exactly where it keeps the page that matters."""

import json

import pytest
import torch

from eval_lookup import lookup_model
from kvskim.errors import KvskimError
from kvskim.eval.answers import ModelAnswerer, score_samples, stop_tokens
from kvskim.eval.methods import Calibrations, parse_methods, settings_of
from kvskim.eval.policy import Policy
from kvskim.eval.ruler import make_samples
from kvskim.eval.ruler.run import in_turn, plot, run_ruler
from kvskim.eval.sample import PromptFormat
from kvskim.layout import PAGE_TOKENS, ceil_div


class Edges(Policy):
    """Sink and window only: drops every page where a needle can be."""

    def __init__(self, budget_tokens: int) -> None:
        super().__init__()
        self.prepared: list[int] = []

    def prepare(self, model, tokens):
        self.prepared.append(tokens)

    def choose(self, layer, queries, keys, position, causal):
        selected = torch.zeros(queries.shape[0], queries.shape[1], ceil_div(keys.shape[1], PAGE_TOKENS), dtype=torch.bool)
        selected[..., 0] = selected[..., -1] = True
        self.record(layer, queries, keys, causal, selected, 0.0)
        return selected


class OneByOne(Edges):
    stateful = True


@pytest.fixture
def edges(monkeypatch):
    monkeypatch.setattr("kvskim.eval.baselines.BASELINES", {"edges": Edges, "one-by-one": OneByOne})


def answerer_of(model, methods, rules="budget", budgets=(4,), taus=(0.007,), **more):
    settings = settings_of(rules, budgets, taus, 0.95)
    return ModelAnswerer(model, PromptFormat(model.tokenizer), parse_methods(methods), settings, Calibrations(model, "prompt"), **more)


def share_at_the_edges(prompts, samples):
    """Share of the questions whose pair lies in the first or the last page of the prompt."""
    found = []
    for sample in samples:
        for question in sample.questions:
            before, after = prompts.parts(sample, question)
            (place,) = prompts.tokenizer(f"{question.answer_prefix} {question.references[0]}")["input_ids"]
            found.append(before.index(place) // PAGE_TOKENS in (0, (len(before) + len(after) - 1) // PAGE_TOKENS))
    return sum(found) / len(found)


@pytest.mark.parametrize("sparse_from", ["answer", "question"])
def test_a_policy_that_drops_the_needle_scores_zero_and_the_oracle_everything(edges, sparse_from):
    model = lookup_model()
    answerer = answerer_of(model, "full,oracle,edges,one-by-one", sparse_from=sparse_from)
    result, page = run_ruler(
        in_turn(answerer, answerer.prompts), tasks=["kv_recall"], contexts=[512], samples=2, seeds=[0], heads=1, log=lambda _: None
    )
    scores = {(c["method"], c["setting"]): c["score"]["mean"] for c in result["tables"]["512"]}
    kept = share_at_the_edges(answerer.prompts, make_samples("kv_recall", 512, 2, answerer.prompts))
    assert kept <= 0.25
    assert scores == {("full", "all"): 1.0, ("oracle", "64 tokens"): 1.0, ("edges", "64 tokens"): kept, ("one-by-one", "64 tokens"): kept}
    cells = {c["method"]: c for c in result["tables"]["512"]}
    assert cells["oracle"]["pages"] == 4
    assert cells["edges"]["pages"] == 2
    # Pairs are single tokens here, so that the context has about as many pages as it has sixteen pairs.
    assert cells["full"]["share"] == 1.0
    assert cells["full"]["pages"] * cells["edges"]["share"] == pytest.approx(2, rel=0.05)
    assert cells["edges"]["difference"]["mean"] == kept - 1.0
    assert f"| edges | {100 * kept:.1f} [" in page
    assert all(row["text"] == row["text"].strip() for row in result["answers"])


def test_the_context_is_prefilled_once_for_all_policies_and_questions(edges):
    model = lookup_model()
    answerer = answerer_of(model, "full,oracle,mean,edges", budgets=(4, 5))
    (sample,) = make_samples("kv_recall", 600, 1, answerer.prompts)
    model.model.fed.clear()
    rows = list(answerer.answers(sample))
    assert len(rows) == 4 * (1 + 3 * 2)
    before, _ = answerer.prompts.parts(sample, sample.questions[0])
    assert [len(fed) for fed in model.model.fed if len(fed) > PAGE_TOKENS] == [len(before)]


def test_what_a_policy_sees_of_the_prompt_ends_before_the_first_sparse_token(edges, monkeypatch):
    seen = {}

    class Noting(Edges):
        def prepare(self, model, tokens):
            seen[sparse_from] = (tokens, model.observed[0][:, -1].clone(), sum(part.shape[1] for part in model.captured[0]))

    monkeypatch.setattr("kvskim.eval.baselines.BASELINES", {"edges": Noting})
    for sparse_from in ("answer", "question"):
        model = lookup_model()
        answerer = answerer_of(model, "edges", sparse_from=sparse_from)
        # A question of two tokens: its first is dense with `answer`, sparse with `question`.
        (sample,) = make_samples("kv_recall", 512, 1, answerer.prompts)
        question = sample.questions[0]
        longer = type(question)("filler", question.references, question.metric, 4, question.answer_prefix)
        before, after = answerer.prompts.parts(sample, longer)
        assert len(after) == 2
        list(answerer.answers(type(sample)("t", sample.context, (longer,))))
        assert seen[sparse_from][0] == len(before) + (1 if sparse_from == "answer" else 0)
    assert seen["answer"][2] == seen["question"][2] + 1


def test_restarting_a_question_does_not_carry_over(edges):
    """The same question three times gives three equal answers from every method."""
    model = lookup_model()
    answerer = answerer_of(model, "full,oracle,mean,edges")
    (sample,) = make_samples("kv_recall", 512, 1, answerer.prompts)
    thrice = type(sample)("t", sample.context, (sample.questions[1],) * 3)
    texts = {}
    for index, _, _, answer in answerer.answers(thrice):
        texts.setdefault(answer.method, {})[index] = answer.text
    assert set(texts) == {"full", "oracle", "mean", "edges"}
    assert all(len(set(found.values())) == 1 and len(found) == 3 for found in texts.values())


def test_progress_says_the_scores(edges):
    model, lines = lookup_model(), []
    answerer = answerer_of(model, "full,edges")
    score_samples(make_samples("kv_recall", 512, 1, answerer.prompts), answerer, lines.append)
    assert lines == ["kv_recall 512 tokens, sample 0: full all 100, edges 64 tokens 0"]


def test_stop_tokens_are_gathered_from_everywhere():
    model = lookup_model()
    assert stop_tokens(model) == {1}
    model.model.generation_config = type("G", (), {"eos_token_id": [1, 7]})()
    assert stop_tokens(model) == {1, 7}


def test_a_wrong_start_is_one_sentence(edges):
    with pytest.raises(KvskimError, match=r"--sparse-from is 'prompt'; it must be answer or question"):
        answerer_of(lookup_model(), "edges", sparse_from="prompt")


def test_the_plot_is_a_picture(edges, tmp_path):
    model = lookup_model()
    answerer = answerer_of(model, "full,oracle,edges", budgets=(4, 5))
    result, _ = run_ruler(in_turn(answerer, answerer.prompts), tasks=["kv_recall"], contexts=[512], samples=1, seeds=[0], heads=1, log=lambda _: None)
    plot(json.loads(json.dumps(result)), tmp_path / "p.png", "RULER")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KvskimError, match=r"--plot .* can't be written"):
        plot(result, tmp_path / "none" / "p.png", "RULER")


def test_the_command(edges, tmp_path, monkeypatch, capsys):
    from kvskim import cli

    model = lookup_model()
    monkeypatch.setattr("kvskim.cli_eval._load", lambda *arguments: model)
    arguments = ["ruler", "demo", "--tasks", "kv_recall", "--contexts", "512,600", "--samples", "1", "--selectors", "full,oracle,edges", "--budgets", "64",
                 "--rule", "budget", "--calibration", "prompt", "--seeds", "2", "--first-seed", "3",
                 "--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
    monkeypatch.setattr("sys.argv", ["kvskim", "eval", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["tables"]["600"][1]["score"]["mean"] == 1.0
    assert result["seeds"] == [3, 4]
    assert result["counts"]["600"] == {"kv_recall": 2}
    page = (tmp_path / "r.md").read_text()
    assert page.startswith("# RULER\n\nMade by `kvskim eval ruler demo --tasks kv_recall")
    assert "| oracle | 100.0 [100.0, 100.0] |" in page
    assert capsys.readouterr().out.count("| edges | 0.0 [0.0, 0.0] |") == 2


def test_thresholds_side_by_side_answer_as_each_does_alone(tmp_path):
    model = lookup_model()

    def cells_under(*taus):
        answerer = answerer_of(model, "full,mean,oracle", rules="budget,threshold", taus=taus)
        answered = in_turn(answerer, answerer.prompts)
        result, page = run_ruler(answered, tasks=["kv_recall"], contexts=[512], samples=2, seeds=[0], heads=1, log=lambda _: None)
        plot(result, tmp_path / "p.png", "RULER")
        return {(cell["method"], cell["setting"]): cell for cell in result["tables"]["512"]}, page

    (both, page), (large, _), (small, _) = cells_under(0.3, 0.001), cells_under(0.3), cells_under(0.001)
    assert both == large | small
    assert [setting for method, setting in both if method == "mean"] == ["64 tokens", "threshold 0.3", "threshold 0.001"]
    assert "| method | 64 tokens | threshold 0.3 | threshold 0.001 |" in page
    for method in ("mean", "oracle"):
        few, many = both[method, "threshold 0.3"], both[method, "threshold 0.001"]
        assert few["pages"] <= many["pages"]
        assert few["bytes_per_step"] <= many["bytes_per_step"]
    assert both["mean", "threshold 0.3"]["pages"] < both["mean", "threshold 0.001"]["pages"]


@pytest.mark.parametrize(("arguments", "words"), [
    (["--tasks", "niah"], "--tasks names 'niah'; the tasks are"), (["--contexts", "12"], "--contexts is '12'; it must be a comma list of whole numbers"),
    (["--contexts", "1k"], "--contexts is '1k'"), (["--samples", "0"], "--samples is 0"), (["--seeds", "-1"], "--seeds is -1"),
    (["--first-seed", "-1"], "--first-seed is -1; it must be at least 0"),
    (["--budgets", "17"], "--budgets has '17'"), (["--selectors", "no"], "--selectors names 'no'"), (["--rule", "no"], "--rule has 'no'"),
    (["--tau", "0.007,x"], "--tau has 'x'; a threshold is a number greater than 0 and at most 1"), (["--tau", "1.5"], "--tau has '1.5'"),
    (["--tau", "0.005,0.005"], "--tau has '0.005' and '0.005', which are both the setting 'threshold 0.005': leave one of them out"),
    (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder"), (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png: the folder"),
    (["--dtype", "int3"], "--dtype is 'int3'"), (["--device", "tpu"], "--device is 'tpu'"), (["--chat", "maybe"], "--chat is 'maybe'"),
    (["--sparse-from", "no"], "--sparse-from is 'no'"),
])
def test_a_wrong_option_is_one_sentence_before_any_work(arguments, words, refused, monkeypatch):
    if arguments[0] in ("--chat", "--sparse-from"):
        monkeypatch.setattr("kvskim.cli_eval._load", lambda *_: lookup_model())
    refused(words, "eval", "ruler", *arguments)
