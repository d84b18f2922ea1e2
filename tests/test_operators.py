"""Every CUDA kernel is a torch operator that says what it writes, and does nothing where tensors are only shapes."""

from __future__ import annotations

import importlib

import pytest
import torch

from kvskim.ops.cuda import library, select
from kvskim.rules import RuleParameters

OPERATORS = {
    ("score_sketch", "cuda_prepare_sketch"): {"weights", "base", "forced"},
    ("score_sketch", "cuda_score_sketch"): {"scores", "partials"},
    ("score_pages", "cuda_score_pages"): {"scores", "partials"},
    ("select", "cuda_select"): {"pages", "counts", "covered", "keys"},
    ("attend", "attend"): {"out", "lse", "partials", "tickets"},
    ("attend_latent", "attend_latent"): {"out", "lse", "partials", "tickets"},
    ("encode", "cuda_encode_sketch"): {"records"},
    ("encode", "cuda_encode_pages"): {"records"},
}


@pytest.mark.parametrize(("module", "name"), OPERATORS)
def test_operators_name_what_they_write(module: str, name: str) -> None:
    importlib.import_module(f"kvskim.ops.cuda.{module}")
    schema = getattr(torch.ops.kvskim, name).default._schema
    assert {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write} == OPERATORS[module, name]
    assert not schema.returns


@pytest.mark.parametrize("rule", [
    RuleParameters(), RuleParameters(rule="budget", budget_pages=7), RuleParameters(rule="budget", budget_fraction=0.25, combine="peak"),
    RuleParameters(rule="coverage", coverage=0.9, max_pages=9),
], ids=lambda rule: f"{rule.rule}-{rule.combine}")
@pytest.mark.parametrize("with_keys", [False, True])
def test_select_hands_every_setting_to_its_operator(monkeypatch: pytest.MonkeyPatch, rule: RuleParameters, with_keys: bool) -> None:
    """Its arguments fit the schema, for tensors that are shapes only: nothing is launched."""
    monkeypatch.setattr(library, "load", lambda: pytest.fail("the library was loaded"))
    meta = torch.device("meta")

    def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=meta)

    select.select_cuda(
        shape(2, 3, 40, 4, dtype=torch.float16), shape(2, 3, 4), shape(2, 3, 4), shape(2, 3, 5, 4), shape(2, dtype=torch.int32), shape(1, dtype=torch.int32),
        shape(2, 3, 20, dtype=torch.int32), shape(2, 3, dtype=torch.int32), shape(2, 3), shape(2, 3, 40) if with_keys else None,
        group=4, rule=rule, sink_pages=1, window_pages=1, overlap=True, settled=True,
    )
