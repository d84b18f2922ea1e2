"""A request that finds in the prefix cache a page which another request completes in the same decode step."""

import pytest
import torch
from mini_engine import MiniEngine, Request

from kvskim.ops.step import decode_step

FEW = {"selector": "rki4", "rule": "budget", "budget_pages": 6, "full_pages": 0}


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("block_size", [16, 64])
def test_fault_10_a_page_that_another_row_completes_in_the_same_step_is_scored_by_its_own_record(monkeypatch, block_size, window):
    """Scores, selection and output are those of a later step, in which all records are old."""
    engine = MiniEngine({**FEW, "window_pages": window}, block_size=block_size)
    seen = []

    def step(settings, *tensors, buffers, **more):
        decode_step(settings, *tensors, buffers=buffers, **more)
        candidates = 192 // 16 + 1 - window
        selected = [table[:count].clone() for table, count in zip(buffers.pages[-1], buffers.counts[-1].tolist())]
        seen.append((buffers.scores[-1, :, :candidates, : engine.group].clone(), torch.stack(selected)))

    monkeypatch.setattr("kvskim.engines.vllm.state.decode_step", step)
    first = Request(1)
    engine.step([(first, 191)])
    second = Request(1, computed=192, blocks=first.blocks[: 192 // block_size])
    at_once = engine.step([(first, 1), (second, 1)])[1]
    again = Request(1, computed=192, blocks=first.blocks[: 192 // block_size])
    later = engine.step([(again, 1)])[0]
    layers = len(engine.state.layers)
    assert len(seen) == 2 * layers
    for layer in range(layers):
        for now, then in zip(seen[layer], seen[layers + layer]):
            torch.testing.assert_close(now, then, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(at_once[layer], later[layer], rtol=1e-5, atol=1e-5)
