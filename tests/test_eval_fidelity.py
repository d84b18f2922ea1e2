"""Fidelity: full attention has none to lose, and every number for a choice is what plain attention gives for it."""

import json
import math

import pytest
import torch

from kvskim.errors import KvskimError
from kvskim.eval import fidelity
from kvskim.eval.fidelity import divergence_of, measure_window, run_fidelity, summary, text_windows
from kvskim.eval.methods import Calibrations, Method, parse_methods, settings_of
from kvskim.eval.model import ATTENTION_NAME, EvalModel, register_attention
from kvskim.eval.policy import Policy
from kvskim.eval.probe import EveryPage, Probe
from kvskim.layout import PAGE_TOKENS, ceil_div
from tiny import CharacterTokenizer, tiny_model


class Tokenizer(CharacterTokenizer):
    bos_token_id = 1


@pytest.fixture(scope="module")
def model() -> EvalModel:
    register_attention()
    network = tiny_model()
    with torch.no_grad():
        for layer in network.model.layers:
            # Random weights attend to everything alike; pages must differ for a choice to matter.
            layer.self_attn.q_proj.weight *= 400
    network.set_attn_implementation(ATTENTION_NAME)
    return EvalModel(network, Tokenizer())


@pytest.fixture(scope="module")
def window() -> list[int]:
    return torch.randint(3, 97, (280,), generator=torch.Generator().manual_seed(3)).tolist()


class Fixed(Policy):
    """Always the same pages, or the same tokens."""

    def __init__(self, pages: tuple[int, ...], by_token: bool = False) -> None:
        super().__init__()
        self.pages, self.by_token = pages, by_token

    def choose(self, layer, queries, keys, position, causal):
        selected = torch.zeros(queries.shape[0], queries.shape[1], ceil_div(keys.shape[1], PAGE_TOKENS), dtype=torch.bool)
        selected[..., list(self.pages)] = True
        if self.by_token:
            selected = selected.repeat_interleave(PAGE_TOKENS, -1)[..., : keys.shape[1]]
        self.record(layer, queries, keys, causal, selected, 0.0)
        return selected


def rows_of(model, windows, methods, rules="budget", budgets=(4,), decoded=24):
    settings = settings_of(rules, budgets, [0.007], 0.95)
    result = run_fidelity(model, windows, decoded, parse_methods(methods), settings, Calibrations(model, "prompt"), log=lambda _: None)
    return result, {(row["method"], row["setting"]): row for row in result["rows"]}


def test_full_attention_and_a_budget_of_everything_lose_nothing(model, window):
    _, rows = rows_of(model, {"t": [window]}, "full,oracle,mean", budgets=(100,))
    assert set(rows) == {("full", "all"), ("oracle", "1600 tokens"), ("mean", "1600 tokens")}
    for row in rows.values():
        assert row["kl"]["mean"] == pytest.approx(0, abs=1e-7)
        assert row["top1"]["mean"] == 1.0
        assert row["divergence"]["mean"] == 23
        assert row["missed"]["mean"] == pytest.approx(0, abs=1e-6)
        assert row["error"]["mean"] == pytest.approx(0, abs=1e-5)
        assert row["oracle_gap"]["mean"] == pytest.approx(0, abs=1e-6)
        assert row["share"] == 1.0
    assert rows["full", "all"]["kl"]["high"] == 0.0


def test_a_small_budget_loses_and_the_oracle_has_no_gap(model, window):
    result, rows = rows_of(model, {"a": [window], "b": [window[::-1]]}, "full,oracle,mean", rules="budget,threshold", budgets=(6, 8))
    mean, oracle = rows["mean", "96 tokens"], rows["oracle", "96 tokens"]
    for row in (mean, oracle):
        assert row["kl"]["low"] < row["kl"]["mean"] < row["kl"]["high"]
        assert row["pages"] == 6.0
        assert 0.1 < row["missed"]["mean"] < 0.9
    assert rows["mean", "128 tokens"]["missed"]["mean"] < mean["missed"]["mean"]
    # The oracle takes sink and window whatever their mass, so that it is near its yardstick and not on it.
    assert 0 <= oracle["oracle_gap"]["mean"] < 0.5 * mean["oracle_gap"]["mean"]
    assert oracle["missed"]["mean"] < mean["missed"]["mean"]
    assert mean["bytes_per_step"] > 4 * (6 * 2 * 16 * 16 * 2)
    page = fidelity.markdown(json.loads(json.dumps(result)))
    assert "2 windows of 280 tokens (a, b), the last 24 decoded" in page
    assert page.count("\n| ") == 8
    assert f"layer {mean['worst']['layer']} head {mean['worst']['head']}: {100 * mean['worst']['missed']:.1f}" in page


def test_divergence_of_known_logits():
    full, sparse = torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([[math.log(3), 0.0], [3.0, 0.0]])
    kl, agree = divergence_of(full, sparse)
    assert kl[0] == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), abs=1e-6)
    assert (kl[1], agree) == (0.0, [1.0, 1.0])
    assert divergence_of(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))[1] == [0.0]


@pytest.mark.parametrize("by_token", [False, True])
def test_the_probe_measures_what_attention_over_the_choice_gives(model, window, by_token):
    """Missed mass, output error and oracle gap of one layer, computed again head by head."""
    ids, position, pages = torch.tensor(window), 200, (0, 5, 12)
    model.reserve(280)
    model.prefill(ids[:position])
    probe = Probe(Fixed(pages, by_token), model)
    queries = torch.randn(3, 2, 3, 16, generator=torch.Generator().manual_seed(0))
    tokens = position + 3
    keys, values = model.keys[1][:, :tokens], model.values[1][:, :tokens]
    keys[:, position:], values[:, position:] = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    causal = torch.ones(3, tokens, dtype=torch.bool).tril(position)
    probe.choose(1, queries, keys, position, causal)
    probe.choose(1, queries, keys, position, causal)
    missed, error, gap = probe.means()
    assert missed.shape == error.shape == (1, 6)
    chosen = torch.zeros(tokens, dtype=torch.bool)
    for page in pages:
        chosen[page * 16 : page * 16 + 16] = True
    for h in range(2):
        gaps, shares = [], []
        for n in range(3):
            weights = torch.stack([(keys[h] @ queries[n, h, g]).masked_fill(~causal[n], -torch.inf).softmax(0) for g in range(3)])
            shares.append(weights[:, chosen].sum(1))
            group = weights.mean(0)
            if by_token:
                best = group.sort(descending=True).values[: int((chosen & causal[n]).sum())].sum()
            else:
                padded = torch.nn.functional.pad(group, (0, -tokens % 16)).unflatten(0, (-1, 16)).sum(1)
                best = padded.sort(descending=True).values[:3].sum()
            gaps.append(best - group[chosen].sum())
        torch.testing.assert_close(missed[0, 3 * h : 3 * h + 3], 1 - torch.stack(shares).mean(0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(gap[0, h], torch.stack(gaps).mean(), atol=1e-5, rtol=1e-4)
        for g in range(3):
            expected = []
            for n in range(3):
                logits = (keys[h] @ queries[n, h, g]).masked_fill(~causal[n], -torch.inf)
                exact = logits.softmax(0) @ values[h]
                sparse = logits.masked_fill(~chosen, -torch.inf).softmax(0) @ values[h]
                expected.append((sparse - exact).norm() / exact.norm())
            torch.testing.assert_close(error[0, 3 * h + g], torch.stack(expected).mean(), atol=1e-5, rtol=1e-4)
    assert torch.all(gap >= 0)
    assert probe.layers[1].queries == 6


def test_the_probe_sees_keys_in_the_form_that_the_method_keeps(model, window):
    class Rounded(EveryPage):
        def read_keys(self, layer, keys):
            return torch.zeros_like(keys)

    ids = torch.tensor(window)
    model.reserve(280)
    model.prefill(ids[:200])
    probe = Probe(Rounded(), model)
    sparse = model.decode(ids, 200, 210, probe)
    missed, error, _ = probe.means()
    assert float(missed.max()) < 1e-5
    assert float(error.min()) > 1e-3
    assert not torch.allclose(sparse, model.decode(ids, 200, 210, None), atol=1e-3)


def test_the_worst_head_is_named_by_its_layer_in_the_model():
    missed = torch.tensor([[0.1, 0.2], [0.05, 0.7]])
    found = fidelity.Measured([[0.1]], [[1.0]], [3], [missed], [missed / 2], [torch.zeros(2, 1)], [4.0], [0.5], [100.0])
    row = summary("m", "s", found, layers=[5, 11], heads=2)
    assert row["worst"] == {"layer": 11, "head": 1, "missed": pytest.approx(0.7), "error": pytest.approx(0.35)}
    assert row["missed"]["mean"] == pytest.approx(0.2625)
    assert list(row["missed_by_layer_and_head"]) == ["5", "11"]
    assert row["bytes_per_step"] == 200.0


def test_first_divergence_counts_greedy_tokens(model, window):
    from kvskim.eval.generation import greedy
    from kvskim.eval.methods import PromptPolicies

    methods, settings = [Method("mean", "mean")], settings_of("budget", [3], [0.007], 0.95)
    results = measure_window(model, window, 24, methods, settings, Calibrations(model, "prompt"))
    prompt = torch.tensor(window[:257])
    full = greedy(model, prompt, None, 23)
    (_, _, policy), = PromptPolicies(model, 256, Calibrations(model, "prompt")).each(methods, settings)
    sparse = greedy(model, prompt, policy, 23)
    expected = next((i for i, (a, b) in enumerate(zip(full, sparse)) if a != b), 23)
    assert results["mean", "48 tokens"].divergence == [expected]


def test_a_policy_starts_again_for_the_greedy_tokens(model, window, monkeypatch):
    """The text's own continuation must leave nothing behind when the model's is decoded."""
    events = []

    class Noting(EveryPage):
        def __init__(self, budget_tokens):
            super().__init__()

        def prepare(self, model, tokens):
            events.append(f"prepare {tokens}")

        def restart(self):
            events.append("restart")

        def choose(self, layer, queries, keys, position, causal):
            if events[-1] != "choose":
                events.append("choose")
            return super().choose(layer, queries, keys, position, causal)

    monkeypatch.setattr("kvskim.eval.baselines.BASELINES", {"noting": Noting})
    result, _ = rows_of(model, {"t": [window]}, "noting")
    assert events == ["prepare 256", "choose", "restart", "choose"]
    # Each of the two passes has its own statistics: 18 pages at the end, of 17 to 18 on the way.
    assert 17 <= result["rows"][0]["pages"] <= 18


def test_windows_of_a_text():
    tokenizer = Tokenizer()
    text = "".join(chr(33 + i % 60) for i in range(1000))
    first, second, third = text_windows(tokenizer, text, 101, 3)
    assert first == [1, *tokenizer(text[:100])["input_ids"]]
    assert second[1:] == tokenizer(text[100:200])["input_ids"]
    assert third[1:] == tokenizer(text[200:300])["input_ids"]
    near = text_windows(tokenizer, text[:150], 101, 2)
    assert near[1][1:] == tokenizer(text[50:150])["input_ids"]
    assert text_windows(tokenizer, text[:100], 101, 3) == [first]  # one text, one observation
    with pytest.raises(KvskimError, match="notes has 99 tokens, fewer than the 101 of --tokens"):
        text_windows(tokenizer, text[:99], 101, 1, "notes")


def test_the_command(model, tmp_path, monkeypatch, capsys):
    from kvskim import cli

    (tmp_path / "mine.txt").write_text("".join(chr(33 + (i * i) % 60) for i in range(400)), encoding="utf-8")
    monkeypatch.setattr("kvskim.cli_eval._load", lambda *arguments: model)
    monkeypatch.setattr("sys.argv", ["kvskim", "eval", "fidelity", "demo", "--text", str(tmp_path / "mine.txt"), "--tokens", "200", "--decoded", "20",
                                     "--seeds", "2", "--selectors", "full,oracle,mean", "--budgets", "4p", "--tau", "0.2,0.007", "--calibration", "prompt",
                                     "--json", str(tmp_path / "f.json"), "--markdown", str(tmp_path / "f.md"), "--plot", str(tmp_path / "f.png")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    result = json.loads((tmp_path / "f.json").read_text())
    assert result["texts"] == {str(tmp_path / "mine.txt"): 2}
    pages = {(row["method"], row["setting"]): row["pages"] for row in result["rows"]}
    settings = ["64 tokens", "threshold 0.2", "threshold 0.007"]
    assert list(pages) == [("full", "all"), *(("oracle", setting) for setting in settings), *(("mean", setting) for setting in settings)]
    # Sink, window and the least that a threshold takes of the others.
    assert pages["oracle", "threshold 0.2"] == 1 + 2 + 8 < pages["oracle", "threshold 0.007"] <= pages["full", "all"]
    assert pages["mean", "threshold 0.2"] <= pages["mean", "threshold 0.007"]
    assert "| mean | threshold 0.007 |" in (tmp_path / "f.md").read_text()
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "f.md").read_text().startswith("# Fidelity\n\nMade by `kvskim eval fidelity demo")
    assert "| mean | 64 tokens |" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "words"), [
    (["--text", "/nowhere/x"], "--text /nowhere/x: there is no such file"), (["--tokens", "200"], "--tokens is 200; it must be at least 256"),
    (["--tau", "0.01,0"], "--tau has '0'; a threshold is"), (["--tau", "0.01,0.010"], "--tau has '0.01' and '0.010', which are both"),
    (["--decoded", "1"], "--decoded is 1"), (["--seeds", "0"], "--seeds is 0"),
    (["--engine", "cuda"], "--engine is 'cuda'; it must be transformers or vllm"),
    (["--engine", "vllm", "--plot", "x.png"], "--plot needs --engine transformers"), (["--engine", "vllm", "--selectors", "snapkv"], "--selectors has snapkv"),
    (["--engine", "vllm", "--calibration", "prompt"], "--calibration is prompt"),
    (["--engine", "vllm", "--selectors", "full,oracle"], "--selectors has oracle"),
    (["--engine", "vllm", "--dtype", "bfloat16"], "--dtype is 'bfloat16'; --engine vllm takes"),
    (["--engine", "vllm"], "needs a Hugging Face model directory, and demo is none"),
])
def test_a_wrong_option_is_one_sentence(arguments, words, refused):
    refused(words, "eval", "fidelity", *arguments)


def test_through_vllm(monkeypatch, tmp_path):
    """The engines are played by results of known agreement; settings and prompts are those that a real engine would get."""
    from kvskim.config import SkimConfig
    from kvskim.eval import fidelity_vllm

    calls = []

    def engine(llm, prompts, *, settings, max_tokens, warm_prompt=(), activity=False):
        calls.append((settings, len(prompts), {len(p) for p in prompts}, max_tokens))
        changed = settings is not None and settings["selector"] == "mean"
        outputs = [
            {"tokens": [1, 2, 3, 9 if changed and i else 4], "logprobs": [-1.0] * 4, "likeliest": [{"4": -1.0}] * 4} for i in range(len(prompts))
        ]
        return {"outputs": outputs, "activity": {"attended": 1, "total": 4, "covered": 1.8, "count": 2}, "ready": not changed}

    monkeypatch.setattr(fidelity_vllm, "run_engine", engine)
    monkeypatch.setattr(fidelity_vllm, "find_spec", lambda name: name)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *a, **k: Tokenizer())
    result = fidelity_vllm.run(
        str(tmp_path), {"t": "x" * 5000}, tokens=200, decoded=20, seeds=2, methods=parse_methods("full,mean,rki4:rank=4"),
        settings=settings_of("budget,threshold,coverage", [8], [0.01, 0.002], 0.9), calibration="text", log=lambda _: None,
    )
    assert [call[1:] for call in calls] == [(2, {180}, 20)] * 9
    given = [SkimConfig(**call[0]) for call in calls[1:]]
    assert calls[0][0] is None
    assert [(c.selector, c.rule) for c in given[4:]] == [("rki4", "budget"), ("rki4", "threshold"), ("rki4", "threshold"), ("rki4", "coverage")]
    assert (given[4].budget_pages, given[5].tau, given[6].tau, given[7].coverage, given[4].selector_options["rank"]) == (8, 0.01, 0.002, 0.9, 4)
    assert [row["setting"] for row in result["rows"][:4]] == ["128 tokens", "threshold 0.01", "threshold 0.002", "coverage 0.9"]
    mean, rki4 = result["rows"][0], result["rows"][4]
    assert (mean["equal"], mean["tokens"], rki4["equal"], rki4["tokens"]) == (1, 7 / 8, 2, 1.0)
    assert (mean["share"], mean["covered"]) == (0.25, 0.9)
    assert result["texts"] == {"t": 2}
    page = fidelity_vllm.markdown(result)
    assert "| mean | 128 tokens (not calibrated: full attention) | 1/2 | 87.5% | 0.000 | 25.0% | 90.0% |" in page
    assert "| rki4:rank=4 | 128 tokens | 2/2 | 100.0% |" in page


def test_a_folder_without_a_tokenizer_and_a_machine_without_vllm_are_one_sentence(monkeypatch, tmp_path):
    from kvskim.eval import fidelity_vllm

    def run():
        fidelity_vllm.run(
            str(tmp_path), {"t": "x"}, tokens=200, decoded=20, seeds=1, methods=parse_methods("full,mean"), settings=settings_of("budget", [8], [0.01], 0.9),
            calibration="text",
        )

    monkeypatch.setattr(fidelity_vllm, "find_spec", lambda name: None)
    with pytest.raises(KvskimError, match=r"vllm is not installed here; install it with"):
        run()
    monkeypatch.setattr(fidelity_vllm, "find_spec", lambda name: name)
    with pytest.raises(KvskimError, match=r"the model at .* can't be read") as error:
        run()
    assert "\n" not in str(error.value)
