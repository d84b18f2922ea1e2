"""What the kernels ahead write while later ones may already read: records of a page that a prompt found in the prefix cache as another row fills it,
and the newest keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvskim.ops.cuda.library import availability
from kvskim.ops.encode import encode
from kvskim.ops.fetch import copy_fetched, fetch, fetch_scratch
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace
from kvskim.ops.write_cache import write_cache
from kvskim.rules import RuleParameters
from kvskim.tier.host_memory import HostMemory
from kvskim.tier.pages import make_tier
from step_data import make_batch
from tier_data import pages_of

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


WHOLE = RuleParameters(rule="budget", budget_pages=6, min_pages=0, full_pages=40)


def check_replay(graph: torch.cuda.CUDAGraph, step: Callable[[], None], out: Tensor, forced: Tensor) -> None:
    """What the replay of a step leaves is what ``step``, in which no launch begins early, leaves."""
    graph.replay()
    torch.cuda.synchronize()
    ours = out.clone(), forced.clone()
    step()
    torch.cuda.synchronize()
    assert torch.equal(ours[0], out)
    assert torch.equal(ours[1].nan_to_num(), forced.nan_to_num())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize("requests", [1, 12])
def test_a_step_sees_the_tokens_that_the_write_ahead_of_it_writes(dim: int, group: int, requests: int) -> None:
    """The kernels behind the write begin while it runs, as it begins while the kernel ahead of it runs: what makes its keys and values here."""
    heads = 8
    lengths = ([1, 15, 16, 17, 33, 400, 639, 640, 641, 1500, 16 * 20, 16 * 20 + 1] if requests > 1 else [640])[:requests]
    batch = make_batch("sketch", lengths, heads=heads, group=group, dim=dim, block_size=16, dtype=torch.bfloat16).to("cuda")
    if requests > 1:
        batch.block_table[11, :20] = batch.block_table[10, :20]
    settings = StepSettings(batch.selector, batch.tables, WHOLE, 1, 2, batch.scale, kernels="cuda")
    workspace = Workspace(
        max_requests=requests, num_kv_heads=heads, group=group, head_dim=dim, page_capacity=batch.page_capacity, rule=WHOLE, sink_pages=1, window_pages=2,
        device="cuda", kernels="cuda",
    )
    buffers = workspace.buffers(requests)
    ready = torch.ones(1, dtype=torch.int32, device="cuda")
    last = torch.tensor(lengths, device="cuda") - 1
    blocks, places = batch.block_table.long().gather(1, (last // 16)[:, None])[:, 0], last % 16
    fresh = torch.randn(2, requests, heads, dim, device="cuda", dtype=torch.bfloat16)
    rows, places_of_rows = torch.empty_like(fresh), torch.arange(requests, device="cuda")
    slots = blocks * 16 + places
    out = torch.empty_like(batch.query)

    def step(overlap: bool) -> None:
        # A kernel that lets the one behind it in at once, as no kernel of torch does.
        assert write_cache(fresh[0], fresh[1], rows[0].unsqueeze(1), rows[1].unsqueeze(1), places_of_rows, kernels="cuda", overlap=overlap)
        assert write_cache(rows[0], rows[1], batch.key_cache, batch.value_cache, slots, kernels="cuda", overlap=overlap)
        decode_step(
            replace(settings, overlap=overlap, settled=overlap), batch.query, batch.key_cache, batch.value_cache, batch.records, batch.block_table,
            batch.seq_lens, ready=ready, workspace=workspace, buffers=buffers, out=out,
        )

    step(overlap=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(overlap=True)
    for _ in range(30):
        fresh.normal_()
        # Read too early, these show.
        rows.fill_(1e3)
        batch.key_cache[blocks, places] = 30.0
        batch.value_cache[blocks, places] = 1e4
        out.fill_(torch.nan)
        check_replay(graph, lambda: step(overlap=False), out, buffers.forced)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("requests", [1, 12])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_sees_the_tokens_that_the_write_ahead_of_it_writes_to_host_memory(parts: int, requests: int, dim: int, waits: bool) -> None:
    """The same with values, or keys and values, in host memory, some of which are hot, and queries that are read while the write runs.

    waits: the write is an ordinary launch behind work on another stream, as a layer has it whose predecessor decides beside attention what to fetch.
    """
    heads, group = 8, 4
    lengths = [1, 15, 16, 17, 33, 400, 639, 640, 641, 1500, 320, 321] if requests > 1 else [640]
    batch = make_batch("sketch", lengths, heads=heads, group=group, dim=dim, block_size=16, dtype=torch.bfloat16).to("cuda")
    memory = HostMemory(batch.key_cache.nbytes * parts)
    try:
        host = memory.view((batch.key_cache.shape[0], heads, parts, 16, dim), torch.bfloat16)
        host.copy_(pages_of(*(cache.cpu().contiguous() for cache in (batch.key_cache, batch.value_cache)[2 - parts :])))
        tier = make_tier(host, 20 * requests, "cuda")
        key_cache = tier.key_cache if parts == 2 else batch.key_cache
        settings = StepSettings(batch.selector, batch.tables, BUDGET, 1, 2, batch.scale, kernels="cuda")
        workspace = Workspace(
            max_requests=requests, num_kv_heads=heads, group=group, head_dim=dim, page_capacity=batch.page_capacity, rule=BUDGET, sink_pages=1,
            window_pages=2, device="cuda", kernels="cuda",
        )
        buffers, ready = workspace.buffers(requests), torch.ones(1, dtype=torch.int32, device="cuda")
        scratch = fetch_scratch(requests * heads, tier.slots, "cuda")
        last = torch.tensor(lengths, device="cuda") - 1
        slots = batch.block_table.long().gather(1, (last // 16)[:, None])[:, 0] * 16 + last % 16
        fresh = torch.randn(2, requests, heads, dim, device="cuda", dtype=torch.bfloat16)
        rows, places = torch.empty_like(fresh), torch.arange(requests, device="cuda")
        out = torch.empty_like(batch.query)
        selection = (batch.block_table, batch.seq_lens, buffers.pages, buffers.counts)
        side, counted = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")

        def step(overlap: bool) -> None:
            assert write_cache(fresh[0], fresh[1], rows[0].unsqueeze(1), rows[1].unsqueeze(1), places, kernels="cuda", overlap=overlap)
            if waits:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    counted.add_(1)
                torch.cuda.current_stream().wait_stream(side)
            assert write_cache(rows[0], rows[1], key_cache, tier, slots, kernels="cuda", overlap=overlap and not waits)
            decode_step(
                replace(settings, overlap=overlap, settled=overlap), batch.query, key_cache, tier, batch.records, batch.block_table, batch.seq_lens,
                ready=ready, workspace=workspace, buffers=buffers, out=out, queries_settled=overlap,
            )

        step(overlap=False)
        fetch(tier, *selection, block_size=16, scratch=scratch, kernels="cuda", copies=False)
        copy_fetched(tier, scratch, kernels="cuda")
        torch.cuda.synchronize()
        hot = tier.directory[slots // 16] > 0
        assert hot.any()
        assert not hot.all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(overlap=True)
        for _ in range(30):
            fresh.normal_()
            batch.query.normal_()
            # Read too early, these show: in the pool, in hot copies, and where they come from.
            rows.fill_(30.0)
            assert write_cache(rows[0], rows[1], key_cache, tier, slots, kernels="cuda")
            rows.fill_(1e3)
            out.fill_(torch.nan)
            check_replay(graph, lambda: step(overlap=False), out, buffers.forced)
            assert not out.isnan().any()
    finally:
        torch.cuda.synchronize()
        memory.release()
