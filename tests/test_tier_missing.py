"""What the GPU scripts take away from a hot cache, to time misses: the share that was asked for, other slots in each step, and nothing untrue is left."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvskim.tier.pages import make_tier

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tier_missing", Path(__file__).parent / "gpu/vllm/tier_missing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tier_missing"] = module  # where the interpreter looks for the source of a kernel
    spec.loader.exec_module(module)
    return module


def test_a_share_of_the_slots_is_lost_at_random(script: ModuleType) -> None:
    slots, empty = 3000, 10
    tier = make_tier(torch.zeros(5000, 2, 2, 16, 16), slots, "cpu")
    keys = torch.randperm(10_000)[:slots]
    keys[-empty:] = -1
    share = torch.tensor([round(0.066 * script.WHOLE)], dtype=torch.int32)
    lost = []
    for clock in range(1, 21):
        tier.clock.fill_(clock)
        tier.owner.copy_(keys)
        tier.directory.zero_()
        tier.directory.view(-1)[keys[:-empty]] = torch.arange(1, slots - empty + 1, dtype=torch.int32)
        script.lose(tier, share)
        gone = tier.owner[:-empty] < 0
        assert torch.equal(tier.owner[:-empty][~gone].long(), keys[:-empty][~gone])
        assert torch.equal(tier.directory.view(-1)[keys[:-empty]] == 0, gone)
        assert int((tier.directory > 0).sum()) == slots - empty - int(gone.sum())
        lost.append(gone)
    shares = torch.stack(lost).double()
    assert abs(float(shares.mean()) - 0.066) < 0.005
    assert float((shares[:-1] * shares[1:]).mean()) < 0.012, "a slot is not lost again and again"
    assert float(shares.mean(0).max()) < 0.45
    share.zero_()
    before = tier.owner.clone()
    script.lose(tier, share)
    assert torch.equal(tier.owner, before)
