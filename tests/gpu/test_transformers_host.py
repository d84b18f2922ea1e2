"""The transformers host on a GPU: SmolLM2 decodes the same tokens through the kernels as through the plain torch path."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvskim.calibration import Calibration
from kvskim.config import SkimConfig
from kvskim.demo.model import ModelNotFoundError, demo_model_file, load_model
from kvskim.demo.session import Session
from kvskim.engines.transformers import disable, enable
from kvskim.eval import texts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TIE = 0.15
"""Natural-log lead below which two tokens count as tied: bfloat16 logits around 20 are 0.125 apart."""
TOKENS = 64


@pytest.fixture(scope="module")
def model_file() -> str:
    given = os.environ.get("KVSKIM_TEST_MODEL")
    if given:
        return given
    try:
        return str(demo_model_file())
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def loaded(model_file: str):
    if Path(model_file).suffix == ".gguf":
        pytest.importorskip("gguf")
    return load_model(model_file, dtype=torch.bfloat16, device="cuda")


RULES: dict[str, dict[str, Any]] = {"budget": dict(rule="budget", budget_pages=16), "threshold": dict(rule="threshold")}


@dataclass(frozen=True)
class Decoded:
    """What the plain torch path made of the prompt under one rule: its tokens, their logits, and what it attended."""

    tokens: list[int]
    logits: Tensor
    rows: int
    attended_share: float


def decode(model: Any, prompt: list[int], config: SkimConfig, calibration: Calibration, tokens: list[int] | None) -> Decoded:
    """The logits of every step along ``tokens``, or along the tokens that this path chooses itself."""
    host = enable(model, config, calibration=calibration)
    try:
        if tokens is None:
            session = Session(model)
            session.prefill(prompt[:-1])
            tokens = session.answer(prompt[-1:], set(), TOKENS)
        session = Session(model)
        session.prefill(prompt[:-1])
        host.reset_statistics()
        logits = session.step_logits([prompt[-1], *tokens[:-1]]).float()
        used = host.statistics()
    finally:
        disable(model)
    return Decoded(tokens, logits, used.rows, used.attended_share)


@pytest.fixture(scope="module")
def prompt(loaded) -> list[int]:
    return texts.token_ids(loaded[1], texts.prose(), 3000)


@pytest.fixture(scope="module")
def calibration(loaded, prompt: list[int]) -> Calibration:
    host = enable(loaded[0], SkimConfig(kernels="torch", rule="threshold"))
    try:
        session = Session(loaded[0])
        session.prefill(prompt[:-1])
        # An earlier engine may have kept one for this model.
        return host.calibration() or host.fit_calibration([session.cache])
    finally:
        disable(loaded[0])


@pytest.fixture(scope="module")
def reference(loaded, prompt: list[int], calibration: Calibration) -> Callable[[str], Decoded]:
    """The torch path under a rule, run once for all kernels."""
    known: dict[str, Decoded] = {}

    def of(rule: str) -> Decoded:
        if rule not in known:
            known[rule] = decode(loaded[0], prompt, SkimConfig(kernels="torch", **RULES[rule]), calibration, None)
        return known[rule]

    return of


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_kernels_generate_the_tokens_of_the_torch_path(
    loaded, prompt: list[int], calibration: Calibration, reference: Callable[[str], Decoded], kernels: str, rule: str
) -> None:
    wanted = reference(rule)
    ours = decode(loaded[0], prompt, SkimConfig(kernels=kernels, **RULES[rule]), calibration, wanted.tokens)
    assert ours.rows == wanted.rows > 0
    assert ours.attended_share < 0.5
    assert ours.attended_share == pytest.approx(wanted.attended_share, rel=0.03)
    top = wanted.logits.topk(2, -1).values
    lead = top[:, 0] - top[:, 1]
    same = ours.logits.argmax(-1) == wanted.logits.argmax(-1)
    wrong = ~same & (lead > TIE)
    assert not wrong.any(), (wrong.nonzero()[:, 0].tolist(), lead[wrong].tolist())
    assert same.float().mean() > 0.9
