"""The whole decode step with values in host memory: the same selection, and the same bits, as with values in GPU memory."""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import replace

import pytest
import torch

from kvskim.ops.fetch import fetch_scratch
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace
from kvskim.rules import RuleParameters
from kvskim.tier.values import ValueTier, make_tier
from step_data import Batch, make_batch
from tier_data import pages_of

LENGTHS = [1, 17, 0, 100, 333]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
BUDGET = RuleParameters(rule="budget", budget_pages=5, min_pages=0)
THRESHOLD = RuleParameters(tau=0.02, min_pages=2)


def run(batch: Batch, values: torch.Tensor | ValueTier, rule: RuleParameters, kernels: str, **changes: float) -> tuple[torch.Tensor, torch.Tensor]:
    """out and pages per (row, kv head); a selector of plain means keeps it fast."""
    heads = batch.key_cache.shape[2]
    workspace = Workspace(
        max_requests=len(LENGTHS), num_kv_heads=heads, group=2, head_dim=64, page_capacity=batch.page_capacity, rule=rule, sink_pages=1, window_pages=1,
        device="cpu", kernels=kernels,
    )
    out = torch.full_like(batch.query, math.nan)
    buffers = workspace.buffers(len(LENGTHS))
    settings = replace(StepSettings(batch.selector, batch.tables, rule, 1, 1, batch.scale, kernels=kernels), **changes)  # type: ignore[arg-type]
    decode_step(
        settings, batch.query, batch.key_cache, values, batch.records, batch.block_table, batch.seq_lens,
        ready=torch.ones(1, dtype=torch.int32), workspace=workspace, buffers=buffers, out=out,
        fetching=fetch_scratch(len(LENGTHS) * heads, values.slots, "cpu") if isinstance(values, ValueTier) else None,
    )
    return out, buffers.counts


def tier_of(batch: Batch, slots: int) -> ValueTier:
    return make_tier(pages_of(batch.value_cache.contiguous()).contiguous(), slots, "cpu")


@pytest.mark.parametrize(
    ("kernels", "slots", "rule"),
    [
        ("torch", 1, BUDGET), ("torch", 9, THRESHOLD), ("torch", 100, BUDGET),
        pytest.param("triton", 9, BUDGET, marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")),
    ],
)
def test_a_step_with_a_tier_is_the_step_without(kernels: str, slots: int, rule: RuleParameters) -> None:
    batch = make_batch("mean", LENGTHS, block_size=32)
    expected, counts = run(batch, batch.value_cache, rule, kernels)
    tier = tier_of(batch, slots)
    for _ in range(2):
        out, own_counts = run(batch, tier, rule, kernels)
        assert torch.equal(out, expected)
        assert torch.equal(own_counts, counts)
    selected, missing, fetched = tier.counters.tolist()
    pages = (batch.seq_lens + 15) // 16
    assert selected == 2 * int(torch.where(batch.seq_lens[:, None] > 0, counts, 0).sum())
    assert selected < 2 * 2 * int(pages.sum()), "the case must be sparse"
    if slots == 100:
        assert missing == fetched == selected // 2  # the second step finds all that the first has fetched
    else:
        assert missing > fetched > 0


def test_scales_of_float8_values_are_refused() -> None:
    batch = make_batch("mean", LENGTHS, block_size=32)
    with pytest.raises(ValueError, match=r"v_scale 0\.5"):
        run(batch, tier_of(batch, 4), RuleParameters(), "torch", v_scale=0.5)
