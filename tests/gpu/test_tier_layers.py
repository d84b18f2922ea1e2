"""Several layers with pages in page-locked host memory, replayed as one CUDA graph: in every step the bits of pages in GPU memory, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from kvskim.tier.host_memory import HostMemory
from kvskim.tier.pages import HostTier, make_tier
from tier_data import Step, Worker, check_coherent
from tier_layers import Layers, differences, most_tokens, sizes_of_engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COUNT = 4


class Graph:
    """The layers of a worker, captured after a first step; what may run beside the rest does so on a stream of its own, and is joined at the end."""

    def __init__(self, layers: Callable[..., Layers], first: Step) -> None:
        self.side = torch.cuda.Stream()
        self.marked = torch.cuda.Event()
        self.layers = layers(
            beside=self.beside, join=lambda: torch.cuda.current_stream().wait_stream(self.side), mark=lambda: self.marked.record(self.side),
            wait=lambda: torch.cuda.current_stream().wait_event(self.marked),
        )
        self.layers.take(first)
        before = torch.cuda.Stream()
        before.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(before):
            self.layers.run()  # what a graph launches must have been loaded before
        torch.cuda.current_stream().wait_stream(before)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.layers.run()

    def beside(self, work: Callable[[], None]) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            work()

    def step(self, step: Step) -> None:
        self.layers.take(step)
        self.graph.replay()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("slots", [34, 900, 9000])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_step_of_every_layer_is_that_of_pages_on_the_gpu(slots: int, parts: int, together: bool) -> None:
    """A hot cache that has no room for a step, one that replaces pages in every step, and one with room for all."""
    sizes = sizes_of_engine(parts, blocks=704, requests=30, rows=32, longest=400, decoded=60, eager=0.9, dtype=torch.bfloat16)
    shape = (sizes.pages, sizes.heads, parts, 16, sizes.dim)
    memories = [HostMemory(math.prod(shape) * 2) for _ in range(COUNT)]
    try:
        tiers = [make_tier(memory.view(shape, sizes.dtype).fill_(math.nan), slots, "cuda") for memory in memories]
        for tier in tiers:
            tier.hot.fill_(math.nan)

        def layers(tiers: list[HostTier]) -> Callable[..., Layers]:
            return lambda **streams: Layers(sizes, COUNT, tiers, most_tokens=most_tokens(sizes), kernels="cuda", device="cuda", together=together, **streams)

        worker = Worker(sizes, seed=slots)
        first = next(worker.steps(1))
        tiered, resident = Graph(layers(tiers), first), Graph(layers([]), first)
        for number, step in enumerate(worker.steps(80)):
            for each in (tiered, resident):
                each.step(step)
            assert differences(tiered.layers, resident.layers) == [], f"in step {number}"
        torch.cuda.synchronize()
        for a, b in zip(tiered.layers.layers, resident.layers.layers):
            assert a.tier is not None
            on_host = HostTier(**{f.name: getattr(a.tier, f.name).cpu().clone() for f in fields(HostTier)})
            check_coherent(on_host, *(b.keys.cpu(), b.values.cpu())[2 - parts :])
            selected, missing, copied = a.tier.counters.tolist()
            assert selected > missing > 0
            assert (copied == missing) == (slots > 34)
        assert worker.shared > 20
        assert worker.reused > 100
    finally:
        torch.cuda.synchronize()
        for memory in memories:
            memory.release()
