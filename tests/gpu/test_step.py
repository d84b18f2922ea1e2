"""The whole decode step on a GPU, CUDA and Triton kernels, against the torch step in float32 on the same data."""

import pytest
import torch

from kvskim.rules import RuleParameters
from kvskim.selectors import SELECTORS
from step_data import make_batch
from test_step import BUDGET, LENGTHS, RULES, run_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")



@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("selector", [s for s in SELECTORS if s != "oracle"])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.rule)
def test_step_is_the_torch_step(kernels: str, selector: str, rule: RuleParameters) -> None:
    batch = make_batch(selector, [*LENGTHS, 3000], heads=2, group=4, dim=128, block_size=32, dtype=torch.bfloat16)
    exact = make_batch(selector, [*LENGTHS, 3000], heads=2, group=4, dim=128, block_size=32, dtype=torch.bfloat16)
    out, lse, buffers = run_step(batch.to("cuda"), rule, kernels=kernels)
    expected, expected_lse, expected_buffers = run_step(exact, rule)
    counts, expected_counts = buffers.counts.cpu(), expected_buffers.counts
    same = 0
    rows = 0
    for r in range(counts.shape[0]):
        for h in range(counts.shape[1]):
            n, m = int(counts[r, h]), int(expected_counts[r, h])
            total = -(-int(batch.seq_lens[r]) // 16)
            mine = set(range(total)) if n == total else set(buffers.pages[r, h, :n].tolist())
            theirs = set(range(total)) if m == total else set(expected_buffers.pages[r, h, :m].tolist())
            rows += 1
            same += mine == theirs
            # Scores are float16 on the GPU: pages at the very edge of the rule may differ, no others.
            assert len(mine ^ theirs) <= max(2, m // 8), (selector, r, h, sorted(mine ^ theirs))
            if mine == theirs:
                heads = slice(h * 4, h * 4 + 4)
                torch.testing.assert_close(out[r, heads].float().cpu(), expected[r, heads].float(), atol=2e-2, rtol=2e-2)
                torch.testing.assert_close(lse[r, heads].cpu(), expected_lse[r, heads], atol=2e-3, rtol=1e-3)
    assert same >= 0.7 * rows
    torch.testing.assert_close(buffers.covered.cpu(), expected_buffers.covered, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_step_replays_in_a_graph_with_other_lengths(kernels: str) -> None:
    from kvskim.ops.step import StepSettings, decode_step
    from kvskim.ops.workspace import Workspace

    batch = make_batch("sketch", [700, 1200, 0, 40], heads=2, group=4, dim=128, block_size=16, dtype=torch.bfloat16).to("cuda")
    workspace = Workspace(max_requests=4, num_kv_heads=2, group=4, head_dim=128, page_capacity=batch.page_capacity, rule=BUDGET, sink_pages=1, window_pages=1,
                          device="cuda", kernels=kernels)
    buffers = workspace.buffers(4)
    out = torch.zeros_like(batch.query)
    ready = torch.ones(1, dtype=torch.int32, device="cuda")
    settings = StepSettings(batch.selector, batch.tables, BUDGET, 1, 1, batch.scale, kernels=kernels, overlap=kernels == "cuda")  # type: ignore[arg-type]

    def step() -> None:
        decode_step(settings, batch.query, batch.key_cache, batch.value_cache, batch.records, batch.block_table, batch.seq_lens,
                    ready=ready, workspace=workspace, buffers=buffers, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    for lengths in ([700, 1200, 0, 40], [1, 33, 0, 16], [699, 0, 0, 0], [123, 456, 0, 31]):
        batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        step()
        torch.cuda.synchronize()
        torch.testing.assert_close(replayed, out, atol=0, rtol=0)
        assert torch.isfinite(out).all()
