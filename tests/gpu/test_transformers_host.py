"""The transformers host on a GPU: SmolLM2 decodes the same tokens through the kernels as through the plain torch path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvskim.config import SkimConfig
from kvskim.demo.model import ModelNotFoundError, demo_model_file, load_model
from kvskim.demo.session import Session
from kvskim.engines.transformers import disable, enable
from kvskim.eval import texts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TIE = 0.15
"""Natural-log lead below which two tokens count as tied: bfloat16 logits around 20 are 0.125 apart."""
TOKENS = 96


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


@pytest.mark.parametrize("rule", [dict(rule="budget", budget_pages=16), dict(rule="threshold")], ids=["budget", "threshold"])
@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_kernels_generate_the_tokens_of_the_torch_path(loaded, kernels: str, rule: dict) -> None:
    model, tokenizer = loaded
    prompt = texts.token_ids(tokenizer, texts.prose(), 3000)
    logits, used = {}, {}
    reference: list[int] = []
    calibration = None
    for name in ("torch", kernels):
        host = enable(model, SkimConfig(kernels=name, **rule), calibration=calibration)
        session = Session(model)
        session.prefill(prompt[:-1])
        if calibration is None:
            # An earlier engine may have kept one for this model.
            calibration = host.calibration() or host.fit_calibration([session.cache])
        if name == "torch":
            reference = session.answer(prompt[-1:], set(), TOKENS)
            session = Session(model)
            session.prefill(prompt[:-1])
        host.reset_statistics()
        logits[name] = session.step_logits([prompt[-1], *reference[:-1]]).float()
        used[name] = host.statistics()
        disable(model)
    assert used[kernels].rows == used["torch"].rows > 0
    assert used[kernels].attended_share < 0.5
    assert used[kernels].attended_share == pytest.approx(used["torch"].attended_share, rel=0.03)
    top = logits["torch"].topk(2, -1).values
    lead = top[:, 0] - top[:, 1]
    same = logits[kernels].argmax(-1) == logits["torch"].argmax(-1)
    wrong = ~same & (lead > TIE)
    assert not wrong.any(), (wrong.nonzero()[:, 0].tolist(), lead[wrong].tolist())
    assert same.float().mean() > 0.9
