"""Which launches of a decode step may begin before the kernel ahead of them has ended: the flags that the CUDA kernels are launched with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvskim.ops.cuda import attend as cuda_attend
from kvskim.ops.cuda import score_sketch
from kvskim.ops.cuda import select as cuda_select
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace
from kvskim.rules import RuleParameters
from step_data import make_batch

BUDGET = RuleParameters(rule="budget", budget_pages=5, min_pages=0)
OVERLAP, SETTLED = score_sketch.OVERLAP_PREVIOUS, score_sketch.RECORDS_SETTLED


@pytest.fixture
def launched(monkeypatch):
    """Names and flags of the launches, in their order; nothing runs."""
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(score_sketch, "prepare_sketch", lambda *arguments: seen.append(("prepare", arguments[17])))
    monkeypatch.setattr(score_sketch, "score_sketch", lambda *arguments: seen.append(("score", arguments[-1])))
    monkeypatch.setattr(
        cuda_select, "select_cuda",
        lambda *tensors, overlap, settled, **rest: seen.append(("select", OVERLAP | (SETTLED if settled else 0) if overlap else 0)),
    )
    monkeypatch.setattr(cuda_attend, "attend_cuda", lambda *arguments: seen.append(("attend", OVERLAP if arguments[-1] else 0)))
    return seen


def run_step(rule: RuleParameters, changes: dict[str, bool]) -> None:
    """One step of two requests whose CUDA launches are recorded, see `launched`."""
    batch = make_batch("sketch", [300, 40], heads=2, group=4, dim=128, dtype=torch.bfloat16)
    workspace = Workspace(
        max_requests=2, num_kv_heads=2, group=4, head_dim=128, page_capacity=batch.page_capacity, rule=rule, sink_pages=1, window_pages=1, device="cpu",
        kernels="triton",
    )
    settings = replace(StepSettings(batch.selector, batch.tables, rule, 1, 1, batch.scale, kernels="cuda"), **changes)
    decode_step(
        settings, batch.query, batch.key_cache, batch.value_cache, batch.records, batch.block_table, batch.seq_lens,
        ready=torch.ones(1, dtype=torch.int32), workspace=workspace, buffers=workspace.buffers(2), out=torch.empty_like(batch.query),
    )


@pytest.mark.parametrize(
    ("changes", "others", "last"),
    [
        (dict(), 0, 0),
        (dict(settled=True), 0, 0),
        (dict(overlap=True), OVERLAP, OVERLAP),
        (dict(overlap=True, settled=True), OVERLAP | SETTLED, OVERLAP),
    ],
)
def test_launch_flags_follow_the_settings_of_the_step(launched, changes, others, last):
    run_step(BUDGET, changes)
    assert launched == [("prepare", others), ("score", others), ("select", others), ("attend", last)]
