"""The transformers host on a GPU: SmolLM2 decodes the same tokens through the kernels as through the plain torch path."""

from __future__ import annotations

import functools
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
def load(model_file: str) -> Callable[[torch.dtype], Any]:
    """Model and tokenizer in a type, once."""
    if Path(model_file).suffix == ".gguf":
        pytest.importorskip("gguf")
    return functools.cache(lambda dtype: load_model(model_file, dtype=dtype, device="cuda"))


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
def prompt(load) -> list[int]:
    return texts.token_ids(load(torch.float32)[1], texts.prose(), 3000)


@pytest.fixture(scope="module")
def calibration(load, prompt: list[int]) -> Calibration:
    model = load(torch.float32)[0]
    host = enable(model, SkimConfig(kernels="torch", rule="threshold"))
    try:
        session = Session(model)
        session.prefill(prompt[:-1])
        # An earlier engine may have kept one for this model.
        return host.calibration() or host.fit_calibration([session.cache])
    finally:
        disable(model)


@pytest.fixture(scope="module")
def reference(load, prompt: list[int], calibration: Calibration) -> Callable[[torch.dtype, str], Decoded]:
    """The torch path in a type under a rule, along the tokens that it chooses in float32."""

    @functools.cache
    def of(dtype: torch.dtype, rule: str) -> Decoded:
        tokens = None if dtype == torch.float32 else of(torch.float32, rule).tokens
        return decode(load(dtype)[0], prompt, SkimConfig(kernels="torch", **RULES[rule]), calibration, tokens)

    return of


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("kernels", "dtype"), [("cuda", torch.bfloat16), ("cuda", torch.float16), ("triton", torch.bfloat16)])
def test_kernels_generate_the_tokens_of_the_torch_path(
    load, prompt: list[int], calibration: Calibration, reference: Callable[[torch.dtype, str], Decoded], kernels: str, dtype: torch.dtype, rule: str
) -> None:
    """Beside float32: errors like those of the torch path in the same 16-bit type, and the same tokens wherever they lead by more than its largest error."""
    exact, wanted = reference(torch.float32, rule), reference(dtype, rule)
    ours = decode(load(dtype)[0], prompt, SkimConfig(kernels=kernels, **RULES[rule]), calibration, exact.tokens)
    assert ours.rows == wanted.rows > 0
    assert ours.attended_share < 0.5
    assert ours.attended_share == pytest.approx(wanted.attended_share, rel=0.03)
    best = exact.logits.topk(2, -1)
    lead = best.values[:, 0] - best.values[:, 1]

    def lead_error(decoded: Decoded) -> Tensor:
        pair = decoded.logits.gather(-1, best.indices)
        return pair[:, 0] - pair[:, 1] - lead

    assert lead_error(ours).square().mean() < 2 * lead_error(wanted).square().mean()
    assert (ours.logits - exact.logits).square().mean() < 1.5 * (wanted.logits - exact.logits).square().mean()
    tied = lead <= lead_error(wanted).abs().max()
    wrong = (ours.logits.argmax(-1) != best.indices[:, 0]) & ~tied
    assert not wrong.any(), (wrong.nonzero()[:, 0].tolist(), lead[wrong].tolist())
    assert tied.float().mean() < 0.5
