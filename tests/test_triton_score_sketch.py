"""The Triton sketch scorer against the torch reference, under the CPU interpreter or on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from kvskim.ops import score as op
from kvskim.ops.triton import score_sketch as kernel
from kvskim.ops.workspace import Workspace
from kvskim.rules import RuleParameters
from kvskim.selectors.sketch import Sketch
from sketch_cases import Scratch, SketchCase, compare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(case: SketchCase) -> dict[str, torch.Tensor]:
    out = case.outputs()
    op.score(Sketch(case.record_bytes), case.tables, **case.inputs, **case.settings(), **out, scratch=case.scratch(), kernels="triton")
    return out


CASES: list[dict[str, Any]] = [
    dict(lengths=[0, 1, 15, 16, 17, 33, 200], group=4, dim=64),
    dict(lengths=[330, 40], group=1, dim=96, block_size=32, layout="heads", sink_pages=0),
    dict(lengths=[290], heads=1, group=6, dim=128, block_size=64, dtype=torch.float16, sink_pages=2, window_pages=3, softcap=20.0),
    dict(lengths=[100, 290], heads=1, group=16, dim=64, block_size=128, layout="interleaved", chunks=1, sink_pages=0),
    dict(lengths=[130], group=13, dim=256, heads=1, float8=True),
    dict(lengths=[90], group=9, dim=576, heads=1),
    dict(lengths=[190], heads=1, group=3, dim=64, record_bytes=128),
    dict(lengths=[190], heads=1, group=8, dim=64, record_bytes=192),
    dict(lengths=[190], group=2, dim=64, record_bytes=384),
]


@pytest.mark.parametrize("settings", CASES, ids=lambda s: "-".join(str(v).removeprefix("torch.") for k, v in s.items() if k != "lengths"))
def test_scores_equal_the_reference(settings: dict[str, Any]) -> None:
    case = SketchCase(**settings, seed=len(str(settings)), device=DEVICE)
    assert compare(case, run(case), score_tolerance=0.015) == []


def test_comparison_sees_a_wrong_weight() -> None:
    """The reference must not be so loose that one wrong half row of weights passes."""
    case = SketchCase([200], group=2, dim=64, device=DEVICE)
    rounded, scales = case.rounded_weights()
    rounded[..., 96:128] = 0
    assert any("scores" in line for line in compare(case, run(case), weights=(rounded, scales)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_query_selects_instead_of_hiding() -> None:
    case = SketchCase([200], group=4, dim=64, device=DEVICE)
    case.inputs["query"][0, 1] = torch.nan
    out = run(case)
    pages = case.scored_pages(0)
    assert (out["scores"][0, 0, :pages, 1].float() >= 60_000).all()
    assert (out["scores"][0, 0, :pages, 0].float() < 60_000).all()


@pytest.mark.parametrize("record_bytes", [128, 192, 256, 384])
def test_scratch_of_a_workspace_suffices(record_bytes: int) -> None:
    rule = RuleParameters(rule="budget", budget_pages=8, min_pages=0)
    workspace = Workspace(
        max_requests=3, num_kv_heads=2, group=5, head_dim=64, page_capacity=20, rule=rule, sink_pages=1, window_pages=1, device="cpu", kernels="triton",
        record_bytes=record_bytes,
    )
    assert workspace.sketch_weights.numel() >= kernel.weight_bytes(3, 2, 5, record_bytes)


def test_scratch_that_is_too_small_is_refused() -> None:
    case = SketchCase([200], group=4, dim=64, device=DEVICE)
    size = kernel.weight_bytes(1, 2, 4, 256)
    with pytest.raises(ValueError, match=str(size)):
        kernel.score_sketch(
            case.tables, **case.inputs, **case.settings(), **case.outputs(), scratch=Scratch(torch.zeros(size - 1, dtype=torch.uint8, device=DEVICE)),
        )
