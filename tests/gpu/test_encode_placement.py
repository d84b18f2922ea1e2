"""Two layers in a CUDA graph whose records are made on a side stream: results and records are those of eager steps that make them at once."""

from __future__ import annotations

import functools

import pytest
import torch

from kvskim.engines.vllm.encode_placement import CudaStreams, EncodeOrder
from kvskim.ops.cuda.library import availability
from kvskim.ops.encode import EncodeLayer, encode, encode_layers, encoded_together
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace
from kvskim.rules import RuleParameters
from step_data import Batch, make_batch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
AVAILABLE, REASON = availability()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=REASON)

BUDGET = RuleParameters(rule="budget", budget_pages=8, min_pages=0)
HEADS, WINDOW, BLOCK = 4, 2, 16
LENGTHS = [1001, 40, 333, 512]
STEPS = 34


@functools.lru_cache(maxsize=8)
def prepared(selector: str, layer: int) -> Batch:
    return make_batch(selector, [n + STEPS + 1 for n in LENGTHS], heads=HEADS, group=8, dim=128, block_size=BLOCK, dtype=torch.bfloat16, seed=layer)


class Model:
    """Layers of attention over caches that grow by a token of each request in every step. The queries of a layer depend on the output of the one before."""

    def __init__(self, selector: str, *, aside: bool, together: bool = False) -> None:
        self.layers = [prepared(selector, layer).to("cuda") for layer in range(2)]
        first = self.layers[0]
        for batch in self.layers:
            batch.block_table.copy_(first.block_table)
            # Pages that the steps complete have no record yet: one that is never made shows.
            for row, length in enumerate(LENGTHS):
                batch.records[batch.block_table[row, length // BLOCK : (length + STEPS) // BLOCK].long()] = 0xAA
        self.seq_lens = first.seq_lens.new_tensor(LENGTHS)
        self.slots = torch.full((len(LENGTHS),), -1, device="cuda", dtype=torch.int64)
        self.new = torch.zeros(len(LENGTHS), HEADS, 128, device="cuda", dtype=torch.bfloat16)
        self.hidden = torch.zeros_like(first.query)
        self.out = torch.zeros_like(first.query)
        self.ready = torch.ones(1, dtype=torch.int32, device="cuda")
        self.workspace = Workspace(
            max_requests=len(LENGTHS), num_kv_heads=HEADS, group=8, head_dim=128, page_capacity=first.page_capacity, rule=BUDGET, sink_pages=1,
            window_pages=WINDOW, device="cuda", kernels="cuda",
        )
        self.buffers = self.workspace.buffers(len(LENGTHS))
        self.together = together
        self.order = EncodeOrder(WINDOW, lambda layers: encode_layers(first.selector, layers, kernels="cuda"))
        if aside:
            self.order.streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))

    def settings(self, batch: Batch) -> StepSettings:
        return StepSettings(batch.selector, batch.tables, BUDGET, 1, WINDOW, batch.scale, kernels="cuda", overlap=True, settled=True)

    def forward(self) -> None:
        self.out.copy_(self.hidden)
        for index, batch in enumerate(self.layers):
            name = f"layer {index}"
            query = batch.query + 0.1 * self.out
            # As vLLM writes the cache: by slots, which are less than zero for padding.
            kept = self.slots.clamp_min(0)
            batch.key_cache[kept // BLOCK, kept % BLOCK] = self.new + index
            batch.value_cache[kept // BLOCK, kept % BLOCK] = self.new - index
            self.order.written(
                name,
                lambda aside, batch=batch: encode(
                    batch.selector, batch.tables, batch.key_cache, self.slots, batch.records, kernels="cuda", overlap=not aside
                ),
                alone=True,
                together=lambda batch=batch: EncodeLayer(batch.tables, batch.key_cache, self.slots, batch.records) if self.together else None,
            )
            decode_step(
                self.settings(batch), query, batch.key_cache, batch.value_cache, batch.records, batch.block_table, self.seq_lens,
                ready=self.ready, workspace=self.workspace, buffers=self.buffers, out=self.out, selected=self.order.selected,
            )
            self.order.attended(name)
        # What follows the last layer in a model; it must not start before the side stream was joined.
        self.hidden.copy_(self.out * 0.5)

    def next_step(self, step: int) -> None:
        lengths = [n + step + 1 for n in LENGTHS]
        self.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        positions = torch.tensor(lengths, device="cuda") - 1
        blocks = self.layers[0].block_table[torch.arange(len(lengths), device="cuda"), positions // BLOCK].long()
        self.slots.copy_(blocks * BLOCK + positions % BLOCK)
        self.new.copy_(torch.randn(self.new.shape, generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize(("selector", "together"), [("sketch", True), ("sketch", False), ("rki4", False)])
def test_graphs_with_records_aside_give_what_eager_steps_give(selector: str, together: bool) -> None:
    """Forked in every layer, or once for all layers."""
    eager, captured = Model(selector, aside=False), Model(selector, aside=True, together=together)
    first = captured.layers[0]
    assert encoded_together(EncodeLayer(first.tables, first.key_cache, captured.slots, first.records), "cuda") == (selector == "sketch")
    # Two graphs of the same step, as an engine has graphs of several sizes; a pass that warms up tells which layer is the last.
    captured.forward()
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.forward()
        assert captured.order.forked == 2
        graphs.append(graph)
    eager.forward()
    captured.hidden.zero_()
    eager.hidden.zero_()
    for step in range(STEPS):
        for model in (eager, captured):
            model.next_step(step)
        eager.forward()
        graphs[step % 2].replay()
        torch.cuda.synchronize()
        assert torch.isfinite(eager.hidden).all()
        assert torch.equal(captured.hidden, eager.hidden), f"step {step}"
    for left, right in zip(eager.layers, captured.layers):
        made = [left.block_table[row, n // BLOCK : (n + STEPS) // BLOCK].long() for row, n in enumerate(LENGTHS)]
        pages = torch.cat(made)
        assert len(pages) >= 2 * len(LENGTHS)
        assert (left.records[pages] != 0xAA).any(-1).all(), "every completed page has a record"
        assert torch.equal(left.records, right.records)
