"""Greedy decoding with drafts gives what one token at a time gives; methods, budgets and policies come out of what the command line says."""

import pytest
import torch

from eval_lookup import lookup_model
from kvskim.calibration import CalibrationError, fit_layer
from kvskim.errors import KvskimError
from kvskim.eval.generation import draft, first_divergence, greedy
from kvskim.eval.methods import Calibrations, Method, PromptPolicies, parse_budgets, parse_methods, parse_taus, settings_of
from kvskim.eval.model import ATTENTION_NAME, EvalModel, register_attention
from kvskim.eval.policy import Policy
from kvskim.eval.statistics import mean_interval, strata_interval
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.rotary import Rotary
from tiny import CharacterTokenizer, tiny_model


class Tokenizer(CharacterTokenizer):
    bos_token_id = 1


@pytest.fixture(scope="module")
def model() -> EvalModel:
    register_attention()
    network = tiny_model()
    network.set_attn_implementation(ATTENTION_NAME)
    return EvalModel(network, Tokenizer())


@pytest.fixture(scope="module")
def prompt(model: EvalModel) -> torch.Tensor:
    ids = torch.randint(3, 97, (203,), generator=torch.Generator().manual_seed(1))
    model.reserve(300)
    model.prefill(ids[:-1], chunk=64)
    return ids


class Every(Policy):
    """Attends everything, page by page, and notes what it is asked for."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self.wide = wide

    def choose(self, layer, queries, keys, position, causal):
        if layer == 0:
            self.seen.append((position, queries.shape[0]))
        width = keys.shape[1] if self.wide else ceil_div(keys.shape[1], PAGE_TOKENS)
        selected = torch.ones(queries.shape[0], queries.shape[1], width, dtype=torch.bool)
        self.record(layer, queries, keys, causal, selected, 0.0)
        return selected


class OneByOne(Every):
    stateful = True


def policy_of(model, tokens, budget=4):
    methods, settings = [Method("mean", "mean")], settings_of("budget", [budget], [0.007], 0.95)
    return next(iter(PromptPolicies(model, tokens, Calibrations(model, "prompt")).each(methods, settings)))[2]


def slow(model, prompt, policy, limit):
    """Greedy, one token at a time."""
    sequence = prompt
    for _ in range(limit):
        logits = model.decode(sequence, len(sequence) - 1, len(sequence), policy)
        sequence = torch.cat([sequence, logits.argmax(-1)])
    return sequence[len(prompt) :].tolist()


def test_a_draft_goes_on_where_the_answer_does():
    assert draft([], [[5, 6, 7]], 2) == [5, 6]
    assert draft([5], [[5, 6, 7]], 9) == [6, 7]
    assert draft([1, 2, 3], [[9, 2, 3, 4, 5]], 1) == [4]
    assert draft([1, 2, 3], [[9, 3, 8], [9, 2, 3, 4]], 1) == [4]
    assert draft([1], [[2, 3]], 4) == []
    assert draft([1], [[1, 2]], 0) == []
    # An answer beside this one, or itself, needs a longer part in common.
    again = [1, 2, 3, 4, 1, 2, 3]
    assert draft(again, [], 2, [again]) == [4, 1]
    assert draft(again[:-1], [], 2, [again[:-1]]) == []
    assert draft(again, [[3, 9]], 2, [again]) == [4, 1]
    assert draft([1, 2, 3], [], 1, [[8, 1, 2, 3, 5]]) == [5]


@pytest.mark.parametrize("make", [lambda m, n: None, lambda m, n: policy_of(m, n)])
def test_drafts_do_not_change_the_answer(model, prompt, make):
    limit = 40
    expected = slow(model, prompt, make(model, len(prompt) - 1), limit)
    wrong_in_places = [token if i % 5 else 3 for i, token in enumerate(expected)]
    for drafts in ([], [expected], [wrong_in_places], [[4] * 50]):
        assert greedy(model, prompt, make(model, len(prompt) - 1), limit, drafts=drafts) == expected


def test_a_good_draft_is_decoded_a_page_at_a_time_and_a_stateful_policy_never_sees_two_tokens(model, prompt):
    expected = greedy(model, prompt, None, 20)
    start = len(prompt) - 1
    policy = Every()
    assert greedy(model, prompt, policy, 20, drafts=[expected]) == expected
    assert policy.seen == [(202, 6), (208, 14)]
    single = OneByOne()
    assert greedy(model, prompt, single, 20, drafts=[expected]) == expected
    assert single.seen == [(start + i, 1) for i in range(20)]
    forced = OneByOne()
    model.decode(torch.tensor([*prompt.tolist(), *expected]), start, start + 10, forced)
    assert forced.seen == single.seen[:10]


def test_an_answer_ends_before_a_stop_token(model, prompt):
    expected = greedy(model, prompt, None, 12)
    end = next(token for i, token in enumerate(expected) if token not in expected[:i] and i > 0)
    for drafts in ([], [expected]):
        assert greedy(model, prompt, None, 12, {end}, drafts) == expected[: expected.index(end)]


def test_first_divergence_is_where_two_answers_part(model, prompt):
    full = slow(model, prompt, None, 30)
    sparse = slow(model, prompt, policy_of(model, len(prompt) - 1, 3), 30)
    same = next(i for i, (a, b) in enumerate(zip(full, sparse)) if a != b)
    assert first_divergence(model, prompt, policy_of(model, len(prompt) - 1, 3), full) == same < 30
    assert first_divergence(model, prompt, Every(), full) == 30


def test_tokens_may_be_chosen_in_the_place_of_pages(model, prompt):
    tokens, pages = Every(wide=True), Every()
    a = model.decode(prompt, 202, 203, tokens)
    b = model.decode(prompt, 202, 203, pages)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert tokens.statistics.mean_pages == pytest.approx(203 / 16)
    assert pages.statistics.mean_pages == 13

    class Half(Every):
        def choose(self, layer, queries, keys, position, causal):
            selected = super().choose(layer, queries, keys, position, causal)
            selected[..., : keys.shape[1] // 2] = False
            return selected

    assert not torch.allclose(model.decode(prompt, 202, 203, Half(wide=True)), b, atol=1e-4)


def test_the_last_queries_of_a_prompt_are_kept_scaled(model, prompt):
    sequence = torch.cat([prompt, prompt])
    model.reserve(500)
    model.prefill(sequence[:150], chunk=64, query_stride=1)
    every = model.calibration_queries(0)
    torch.testing.assert_close(model.observed[0], every[:, -64:])
    model.extend(sequence, 150, 170)
    assert model.observed[1].shape == (6, 64, 16)
    whole = EvalModel(model.model, Tokenizer())
    whole.reserve(500)
    whole.prefill(sequence[:170], query_stride=1)
    torch.testing.assert_close(model.observed[0], whole.calibration_queries(0)[:, -64:], atol=1e-5, rtol=1e-4)
    for module in model.model.modules():
        if hasattr(module, "kvskim_eval"):
            module.kvskim_eval = model
    model.reserve(300)
    model.prefill(prompt[:-1], chunk=64)


def test_records_of_the_prompt_are_shared_by_budgets_and_hold_no_decoded_page(model, prompt):
    methods, settings = [Method("mean", "mean")], settings_of("budget", [3, 8], [0.007], 0.95)
    policies = []
    for _, _, policy in PromptPolicies(model, 202, Calibrations(model, "prompt")).each(methods, settings):
        greedy(model, prompt, policy, 30)
        policies.append(policy)
    assert policies[0].prefix is policies[1].prefix
    assert policies[0].prefix[0].shape[0] == 202 // 16
    assert policies[0].statistics.mean_pages == 3
    assert policies[1].statistics.mean_pages == 8


def test_bytes_count_keys_values_and_records(model, prompt):
    policy = policy_of(model, 202, 4)
    model.decode(prompt, 202, 203, policy)
    page = 2 * 16 * 16 * 2
    assert policy.statistics.mean_bytes(16) == 4 * page + (13 - 1 - policy.window_pages) * policy.selector.bytes_per_page(16)


def test_methods_of_a_list():
    found = parse_methods("full, sketch:record_bytes=128, rki4:rank=4,rki4:rank=4,snapkv")
    assert [(m.name, m.options) for m in found] == [("full", ()), ("sketch", (("record_bytes", 128),)), ("rki4", (("rank", 4),)), ("snapkv", ())]
    assert [m.is_baseline for m in found] == [False, False, False, True]
    assert parse_methods("sketch:record_bytes=256+page_frame=true")[0].options == (("record_bytes", 256), ("page_frame", True))


@pytest.mark.parametrize(("text", "words"), [
    ("skech", "names 'skech'; known are full, "), ("rki4:rank", "options are written NAME:OPTION=VALUE"), ("full:a=1", "full has none"),
    ("rki4:colour=1", "has 'rki4:colour=1': selector_options"), ("snapkv:colour=1", "has 'snapkv:colour=1': "), (" , ", "must name at least one"),
])
def test_a_wrong_method_is_one_sentence(text, words):
    with pytest.raises(KvskimError, match=r"--selectors") as error:
        parse_methods(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_budgets_and_rules_of_a_list():
    assert parse_budgets("64, 8p,128") == [4, 8]
    settings = settings_of("budget,threshold,coverage", [4], [0.01], 0.9)
    assert [(s.label, s.budget_tokens) for s in settings] == [("64 tokens", 64), ("threshold 0.01", None), ("coverage 0.9", None)]
    assert settings[0].parameters.budget_pages == 4
    assert settings[1].parameters.tau == 0.01
    assert settings[2].parameters.coverage == 0.9
    for text in ("32", "2p", "100", "x", "", "64,-64", "p"):
        with pytest.raises(KvskimError, match="--budgets has"):
            parse_budgets(text)
    for rules, coverage, words in (("lottery", 0.9, "--rule has 'lottery'"), ("", 0.9, "--rule is ''"), ("budget", 1.5, "--coverage is 1.5")):
        with pytest.raises(KvskimError, match=words):
            settings_of(rules, [4], [0.1], coverage)


def test_every_threshold_of_a_list_is_a_setting_of_its_own():
    assert parse_taus("0.005, 7e-3,1") == [0.005, 0.007, 1.0]
    settings = settings_of("threshold,budget", [4], parse_taus("0.005,7e-3"), 0.9)
    assert [s.label for s in settings] == ["threshold 0.005", "threshold 0.007", "64 tokens"]
    assert [s.parameters.tau for s in settings[:2]] == [0.005, 0.007]


@pytest.mark.parametrize(("text", "words"), [
    *(
        (f"0.1,{word}", f"--tau has {word!r}; a threshold is a number greater than 0 and at most 1, such as ")
        for word in ("0", "1.5", "-0.1", "x", "nan", "inf", "")
    ),
    ("0.005,0.01,0.005", "--tau has '0.005' and '0.005', which are both the setting 'threshold 0.005': leave one of them out"),
    ("0.01,1e-2", "--tau has '0.01' and '1e-2', which are both the setting 'threshold 0.01'"),
    # Tables know settings by their labels, which would be the same.
    ("0.005,0.0050000001", "--tau has '0.005' and '0.0050000001', which are both the setting 'threshold 0.005'"),
])
def test_a_wrong_threshold_is_one_sentence(text, words):
    with pytest.raises(KvskimError) as error:
        parse_taus(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_baseline_has_budgets_only(model, prompt):
    methods, settings = parse_methods("full,snapkv,oracle"), settings_of("budget,threshold", [4, 8], [0.007], 0.95)
    found = PromptPolicies(model, 202, Calibrations(model, "prompt")).each(methods, settings)
    assert [(method.name, setting.label) for method, setting, _ in found] == [
        ("snapkv", "64 tokens"), ("snapkv", "128 tokens"), ("oracle", "64 tokens"), ("oracle", "128 tokens"), ("oracle", "threshold 0.007"),
    ]


def test_calibration_on_text_is_made_once_and_on_the_prompt_each_time(model, prompt, monkeypatch):
    methods = parse_methods("full,sketch,mean")
    once = Calibrations(model, "text")
    assert not once.needs_text(parse_methods("full,snapkv"))
    assert once.needs_text(methods)
    with pytest.raises(CalibrationError, match="was not read"):
        once.tables(methods[1], 200)
    monkeypatch.setattr("kvskim.eval.methods.CALIBRATION_TOKENS", 256)
    once.read_text(methods)
    assert not once.needs_text(methods)
    tables = once.tables(methods[1], 200)
    model.reserve(300)
    model.prefill(prompt[:-1], chunk=64)
    once.new_prompt()
    assert once.tables(methods[1], 200) is tables
    each = Calibrations(model, "prompt")
    own = each.tables(methods[1], 202)
    assert not torch.equal(own[0].mean, tables[0].mean)
    rotary = Rotary(1 / 10000 ** (torch.arange(0, model.head_dim, 2) / model.head_dim))
    expected = fit_layer(
        model.keys[0][:, 16:192], model.calibration_queries(0), rotary=rotary, served_positions=4096, key_positions=torch.arange(16, 192),
        query_positions=model.calibration_positions(),
    )
    torch.testing.assert_close(own[0].mean, expected.mean, atol=1e-5, rtol=1e-5)
    each.new_prompt()
    assert each.tables(methods[1], 202) is not own


def test_calibration_on_text_covers_positions_that_the_text_does_not_reach(model, monkeypatch):
    """As in `kvskim calibrate`: what is measured is what users get."""
    monkeypatch.setattr("kvskim.eval.methods.CALIBRATION_TOKENS", 384)
    fits, samples, fit = [], [], fit_layer
    monkeypatch.setattr("kvskim.eval.methods.fit_layer", lambda keys, queries, **options: fits.append(options) or fit(keys, queries, **options))
    monkeypatch.setattr("kvskim.eval.methods.calibration_ids", lambda tokenizer, tokens: samples.append(tokens) or [[5] * 130, list(range(90))])
    Calibrations(model).read_text(parse_methods("sketch"))
    assert samples == [384]
    assert len(fits) == len(model.sparse_layers)
    assert fits[0]["served_positions"] == model.config.max_position_embeddings > 1000
    # Whole pages of each text but its first, and every eighth query, at the positions that they have in their text.
    assert fits[0]["key_positions"].tolist() == [*range(16, 128), *range(16, 80)]
    assert fits[0]["query_positions"].tolist() == [*range(0, 130, 8), *range(0, 90, 8)]


def test_a_calibration_file_of_nowhere_is_refused(model):
    with pytest.raises(CalibrationError, match="no such file"):
        Calibrations(model, "nowhere.safetensors")


def test_the_lookup_model_finds_what_it_is_asked_for():
    model = lookup_model()
    ids = torch.tensor([0, *model.tokenizer("one: 11 a b two: 22 c two:")["input_ids"]])
    model.reserve(40)
    model.prefill(ids[:-1])
    answer = greedy(model, ids, None, 5, {1})
    assert model.tokenizer.decode(answer) == "22"


def test_intervals():
    assert mean_interval([[2.0, 2.0], [2.0]]).as_dict() == {"mean": 2.0, "low": 2.0, "high": 2.0}
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)).tolist()
    interval = mean_interval([values])
    half = 1.96 * torch.tensor(values).std().item() / 20
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.12)
    assert interval.low < interval.mean < interval.high
    # Groups that are all alike inside but differ: only resampling whole groups sees it.
    groups = [[0.0] * 50, [1.0] * 50]
    assert strata_interval(groups).as_dict() == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert (mean_interval(groups).low, mean_interval(groups).high) == (0.0, 1.0)
    # Groups of equal means: what is left is the chance inside them and the spread of their resampled means.
    noise = [torch.randn(100, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    noise = [((g - g.mean()) / g.std(correction=0)).tolist() for g in noise]
    interval = mean_interval(noise, resamples=8000)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 / 400**0.5, rel=0.06)
    # Every task weighs the same, however many samples it has.
    assert strata_interval([[1.0] * 99, [0.0]]).mean == 0.5
    assert mean_interval(groups).text(0, 100) == "50 [0, 100]"
    with pytest.raises(ValueError, match="no numbers"):
        mean_interval([[], []])
