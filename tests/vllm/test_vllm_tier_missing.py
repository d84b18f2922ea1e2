"""What `tests/gpu/vllm/tier_missing.py` takes out of a hot cache while an engine decodes: between two steps of a layer, and in no one's way."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from mini_engine import Request
from test_vllm_encode_placement import give_streams
from tier_engine import VARIANTS, engine

from kvskim.engines.vllm import probe
from kvskim.engines.vllm import state as state_module

FEW = {"selector": "minmax", "rule": "budget", "budget_pages": 6}


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("triton")
    path = Path(__file__).parent.parent / "gpu/vllm/tier_missing.py"
    spec = importlib.util.spec_from_file_location("tier_missing_of_engines", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name in ("decode_step", "copy_fetched"):
        monkeypatch.setattr(state_module, name, getattr(state_module, name))
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield module


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_that_is_lost_is_missing_in_the_next_step(variant, soon, script, monkeypatch):
    """And was there to be copied in the step itself. Outputs are those of pages in GPU memory."""
    clocks = []

    def lose_all(tier, share):
        clocks.append((tier.directory.data_ptr(), int(tier.clock), int((tier.owner >= 0).sum())))
        if share:
            tier.owner.fill_(-1)
            tier.directory.zero_()

    monkeypatch.setattr(script, "lose", lose_all)
    share = script.lose_for_next_step("cpu")
    assert share.tolist() == [0]
    e, resident = engine(FEW, 60, variant), engine(FEW, variant="fast")
    streams = give_streams(e, at_once=soon)
    layers = list(e.state.layers.values())
    requests = [[Request(seed) for seed in (1, 2)] for _ in range(2)]
    for mine, x in zip(requests, (e, resident)):
        x.step([(mine[0], 200), (mine[1], 150)])
    assert clocks == []
    for step in range(16):
        share.fill_(int(step >= 8))
        streams.is_capturing = step % 8 >= 4
        clocks.clear()
        before = [layer.tier.counters.clone() for layer in layers]
        outputs = [x.step([(request, 1) for request in mine]) for mine, x in zip(requests, (e, resident))]
        assert all(torch.equal(a, b) for rows in zip(*outputs) for a, b in zip(*rows))
        # Each layer once a step, with the clock of its next step and the copies of this one made.
        assert [(place, clock) for place, clock, _ in clocks] == [(layer.tier.directory.data_ptr(), int(layer.tier.clock)) for layer in layers]
        assert all(hot > 0 for _, _, hot in clocks)
        for layer, then in zip(layers, before):
            selected, missing, copied = (layer.tier.counters - then).tolist()
            assert missing == copied
            assert (missing == selected) == (step in {0, *range(9, 16)}), step
        assert probe.untrue_copies(e.state) == dict.fromkeys(e.state.layers, 0)
    assert streams.log.count("join") == 8
    assert streams.log.count("fork") == 8 * 6, "what is lost is lost in the work that copies"
