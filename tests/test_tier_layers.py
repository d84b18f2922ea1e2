"""Several layers with a host tier, step after step: masses, outputs and records are those of pages in GPU memory, bit for bit, in every step."""

from __future__ import annotations

import pytest
import torch

from kvskim.ops.store import store
from tier_data import Worker, check_coherent, poisoned_tier
from tier_layers import Layers, differences, most_tokens, sizes_of_engine

COUNT = 2


def pair(slots: int, parts: int, *, together: bool) -> tuple[Layers, Layers]:
    sizes = sizes_of_engine(parts, longest=200)
    tiers = [poisoned_tier(sizes, slots, parts) for _ in range(COUNT)]
    common = dict(most_tokens=most_tokens(sizes), kernels="torch", device="cpu", selector="mean")  # the cheapest to make
    return Layers(sizes, COUNT, tiers, together=together, **common), Layers(sizes, COUNT, [], **common)  # type: ignore[arg-type]


@pytest.mark.parametrize(("slots", "steps"), [(30, 15), (5000, 30)])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_step_of_every_layer_is_that_of_pages_on_the_gpu(slots: int, steps: int, parts: int) -> None:
    torch.set_num_threads(1)
    tiered, resident = pair(slots, parts, together=slots == 30)
    worker = Worker(tiered.sizes, seed=slots)
    sparse = 0
    for step in worker.steps(steps):
        for each in (tiered, resident):
            each.take(step)
            each.run()
        assert differences(tiered, resident) == []
        live = step.seq_lens > 0
        sparse += int((resident.layers[0].counts[live] < (step.seq_lens[live, None] + 15) // 16).sum())
    assert sparse > 30
    for a, b in zip(tiered.layers, resident.layers):
        assert a.tier is not None
        check_coherent(a.tier, *(b.keys, b.values)[2 - parts :])
        selected, missing, copied = a.tier.counters.tolist()
        assert selected > missing > 0
        assert (copied == missing) == (slots == 5000)
    assert worker.shared > 3
    assert worker.reused > 5


def test_a_copy_that_lacks_a_row_is_seen_in_the_step_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison is for: the host has the new rows, and hot copies don't."""
    tiered, resident = pair(5000, 2, together=False)

    def store_to_the_host_alone(tier: object, *arguments: object, **more: object) -> None:
        hot = tier.hot.clone()  # type: ignore[attr-defined]
        store(tier, *arguments, **more)  # type: ignore[arg-type]
        tier.hot.copy_(hot)  # type: ignore[attr-defined]

    monkeypatch.setattr("tier_layers.store", store_to_the_host_alone)
    found = []
    for step in Worker(tiered.sizes, seed=2).steps(8):
        for each in (tiered, resident):
            each.take(step)
            each.run()
        found.append(differences(tiered, resident))
    assert found[0] == []
    assert any("out" in text for texts in found for text in texts)
