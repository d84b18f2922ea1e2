"""The whole decode step with values, or keys and values, in host memory: the same selection, and the same bits, as with all in GPU memory."""

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
from kvskim.tier.pages import HostTier, make_tier
from step_data import Batch, make_batch
from tier_data import pages_of

LENGTHS = [1, 17, 0, 100, 333]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")
BUDGET = RuleParameters(rule="budget", budget_pages=5, min_pages=0)
THRESHOLD = RuleParameters(tau=0.02, min_pages=2)


def run(
    batch: Batch, values: torch.Tensor | HostTier, rule: RuleParameters, kernels: str, **changes: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, pages per (row, kv head) and the exact mass of the always-attended pages of live rows; a selector of plain means keeps it fast."""
    heads = batch.key_cache.shape[2]
    workspace = Workspace(
        max_requests=len(LENGTHS), num_kv_heads=heads, group=2, head_dim=64, page_capacity=batch.page_capacity, rule=rule, sink_pages=1, window_pages=1,
        device="cpu", kernels=kernels,
    )
    out = torch.full_like(batch.query, math.nan)
    buffers = workspace.buffers(len(LENGTHS))
    key_cache = values.key_cache if isinstance(values, HostTier) and values.with_keys else batch.key_cache
    settings = replace(StepSettings(batch.selector, batch.tables, rule, 1, 1, batch.scale, kernels=kernels), **changes)  # type: ignore[arg-type]
    decode_step(
        settings, batch.query, key_cache, values, batch.records, batch.block_table, batch.seq_lens,
        ready=torch.ones(1, dtype=torch.int32), workspace=workspace, buffers=buffers, out=out,
        fetching=fetch_scratch(len(LENGTHS) * heads, values.slots, "cpu") if isinstance(values, HostTier) else None,
    )
    return out, buffers.counts, buffers.forced[batch.seq_lens > 0][..., :2]


def tier_of(batch: Batch, slots: int, parts: int = 1) -> HostTier:
    return make_tier(pages_of(*(cache.contiguous() for cache in (batch.key_cache, batch.value_cache)[2 - parts :])), slots, "cpu")


@pytest.mark.parametrize(
    ("kernels", "slots", "rule", "parts"),
    [
        ("torch", 1, BUDGET, 1), ("torch", 9, THRESHOLD, 1), ("torch", 100, BUDGET, 1), ("torch", 9, THRESHOLD, 2), ("torch", 100, BUDGET, 2),
        pytest.param("triton", 9, BUDGET, 1, marks=needs_triton), pytest.param("triton", 9, BUDGET, 2, marks=needs_triton),
    ],
)
def test_a_step_with_a_tier_is_the_step_without(kernels: str, slots: int, rule: RuleParameters, parts: int) -> None:
    batch = make_batch("mean", LENGTHS, block_size=32 if parts == 1 else 16)
    expected, counts, forced = run(batch, batch.value_cache, rule, kernels)
    tier = tier_of(batch, slots, parts)
    for _ in range(2):
        out, own_counts, own_forced = run(batch, tier, rule, kernels)
        assert torch.equal(out, expected)
        assert torch.equal(own_counts, counts)
        assert torch.equal(own_forced, forced)
    selected, missing, fetched = tier.counters.tolist()
    pages = (batch.seq_lens + 15) // 16
    assert selected == 2 * int(torch.where(batch.seq_lens[:, None] > 0, counts, 0).sum())
    assert selected < 2 * 2 * int(pages.sum()), "the case must be sparse"
    if slots == 100:
        assert missing == fetched == selected // 2  # the second step finds all that the first has fetched
    else:
        assert missing > fetched > 0


@needs_triton
@pytest.mark.parametrize("selector", ["mean", "sketch"])
def test_always_attended_pages_that_are_hot_are_not_read_from_the_host(selector: str) -> None:
    batch = make_batch(selector, LENGTHS, block_size=16)
    tier = tier_of(batch, 100, parts=2)
    expected, counts, forced = run(batch, tier, BUDGET, "triton")
    tier.host.fill_(math.nan)
    out, own_counts, own_forced = run(batch, tier, BUDGET, "triton")
    assert torch.equal(own_forced, forced)
    assert torch.equal(own_counts, counts)
    assert torch.equal(out, expected)
    tier.directory.zero_()
    assert run(batch, tier, BUDGET, "triton")[2].isnan().all(), "what is not hot is read from the host"


def test_scales_of_float8_values_are_refused() -> None:
    batch = make_batch("mean", LENGTHS, block_size=32)
    with pytest.raises(ValueError, match=r"v_scale 0\.5"):
        run(batch, tier_of(batch, 4), RuleParameters(), "torch", v_scale=0.5)
