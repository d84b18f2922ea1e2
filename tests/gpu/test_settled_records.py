"""Records that the kernel ahead makes while score is already allowed to read records: a prompt found in the prefix cache as another row fills its page."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvskim.ops.cuda.library import availability
from kvskim.ops.encode import encode
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace
from kvskim.rules import RuleParameters
from step_data import make_batch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
AVAILABLE, REASON = availability()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=REASON)

BUDGET = RuleParameters(rule="budget", budget_pages=6, min_pages=0)


@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize("pages", [7, 16, 17, 400])
def test_a_page_that_another_row_completes_in_this_step_has_its_record(pages: int, group: int) -> None:
    """Row 0 writes the last token of a page; row 1 has the same pages and one token more, in a block of its own."""
    heads = 8
    batch = make_batch("sketch", [pages * 16, pages * 16 + 1], heads=heads, group=group, dim=128, block_size=16, dtype=torch.bfloat16).to("cuda")
    batch.block_table[1, :pages] = batch.block_table[0, :pages]
    shared = int(batch.block_table[0, pages - 1])
    settings = StepSettings(batch.selector, batch.tables, BUDGET, 1, 1, batch.scale, kernels="cuda")
    workspace = Workspace(
        max_requests=2, num_kv_heads=heads, group=group, head_dim=128, page_capacity=batch.page_capacity, rule=BUDGET, sink_pages=1, window_pages=1,
        device="cuda", kernels="cuda",
    )
    buffers = workspace.buffers(2)
    ready = torch.ones(1, dtype=torch.int32, device="cuda")
    slots = torch.tensor([shared * 16 + 15, int(batch.block_table[1, pages]) * 16], device="cuda")

    out = torch.empty_like(batch.query)

    def step(overlap: bool) -> None:
        batch.records[shared] = 0
        encode(batch.selector, batch.tables, batch.key_cache, slots, batch.records, kernels="cuda", overlap=overlap)
        decode_step(
            replace(settings, overlap=overlap, settled=overlap), batch.query, batch.key_cache, batch.value_cache, batch.records, batch.block_table,
            batch.seq_lens, ready=ready, workspace=workspace, buffers=buffers, out=out,
        )

    step(overlap=False)
    torch.cuda.synchronize()
    scores, expected = buffers.scores[1, :, :pages, :group].clone(), out.clone()
    # Only launches of a graph follow one another closely enough to overlap.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(overlap=True)
    for _ in range(50):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(buffers.scores[1, :, :pages, :group], scores)
        assert torch.equal(out, expected)
