"""Decoding on a device that is not the CPU: torch's meta device computes nothing, but refuses to mix its tensors with those of the CPU."""

import pytest
import torch
from torch.fx.experimental import _config as symbolic

from kvskim.eval.methods import Calibrations, PromptPolicies, parse_methods, settings_of
from kvskim.eval.model import ATTENTION_NAME, EvalModel, register_attention
from kvskim.eval.side_by_side import SideBySide
from kvskim.eval.together import Together
from kvskim.selectors import SELECTORS
from tiny import CharacterTokenizer, tiny_model

TOKENS = 202
SETTINGS = settings_of("budget,threshold,coverage", [4, 6], [0.05], 0.8)


class Tables:
    """Parameters of selectors that were fitted on the CPU."""

    def __init__(self, calibrations: Calibrations) -> None:
        self.calibrations = calibrations

    def tables(self, method, tokens):
        return {layer: tables.to("meta") for layer, tables in self.calibrations.tables(method, tokens).items()}


class Tokens:
    """Stands for logits ``[A, n, vocabulary]``: the likeliest tokens of a meta tensor can't be read."""

    def __init__(self, logits) -> None:
        self.shape = logits.shape

    def argmax(self, dim):
        return self

    def tolist(self):
        return [[1] * self.shape[1]] * self.shape[0]


@pytest.fixture(scope="module")
def fitted() -> Tables:
    register_attention()
    network = tiny_model(3)
    network.set_attn_implementation(ATTENTION_NAME)
    model = EvalModel(network, CharacterTokenizer())
    model.reserve(TOKENS)
    model.prefill(torch.randint(3, 97, (TOKENS,), generator=torch.Generator().manual_seed(1)))
    return Tables(Calibrations(model, "prompt"))


@pytest.fixture
def elsewhere(monkeypatch) -> EvalModel:
    from transformers.models.llama import modeling_llama

    # What only looks at values: whether several texts are packed into one row, and which tokens a mask names.
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *args, **kwargs: None)
    monkeypatch.setattr(symbolic, "meta_nonzero_assume_all_nonzero", True)
    network = tiny_model(3).to("meta")
    network.set_attn_implementation(ATTENTION_NAME)
    model = EvalModel(network, CharacterTokenizer())
    model.reserve(TOKENS + 100)
    model.scaling = 0.25
    model.captured_positions = [torch.arange(0, TOKENS, 8, device="meta")]
    for layer in model.sparse_layers:
        model.captured[layer] = [torch.empty(model.num_heads, len(model.captured_positions[0]), model.head_dim, device="meta")]
        model.observed[layer] = torch.empty(model.num_heads, 64, model.head_dim, device="meta")
    return model


@pytest.mark.parametrize("name", [*SELECTORS, "shadowkv", "rocketkv", "snapkv", "rkv", "triattention", "lazyeviction"])
def test_nothing_stays_on_the_cpu(fitted, elsewhere, monkeypatch, name):
    policies = [policy for _, _, policy in PromptPolicies(elsewhere, TOKENS, fitted).each(parse_methods(name), SETTINGS)]
    if policies[0].stateful:
        rows = Together(elsewhere, TOKENS, policies, 60)
        for position in range(TOKENS, TOKENS + 40):
            out = rows.step([5] * len(policies), position)
        rows.keep([1])
        assert out.device.type == rows.keys[0].device.type == "meta"
        return
    assert elsewhere.decode(torch.zeros(260, dtype=torch.int64), TOKENS, 260, policies[0]).device.type == "meta"
    if name in SELECTORS:
        side_by_side = SideBySide(elsewhere, TOKENS, policies, 80)
        forward = elsewhere.forward_rows
        monkeypatch.setattr(elsewhere, "forward_rows", lambda ids, positions: Tokens(forward(ids, positions)))
        # The last rows have one token where the others have a page; pages that no prompt completed are scored in the end.
        for start, stop in ((TOKENS, 208), (208, 224), (224, 240), (240, 256), (256, 257)):
            blocks = [[5] * (stop - start)] * (len(policies) - 1) + [[5]]
            best = side_by_side.run(range(len(policies)), [start] * len(policies), blocks)
            assert [len(row) for row in best] == [len(block) for block in blocks]
        assert side_by_side.added[0][1].device.type == side_by_side.pages.device.type == "meta"
