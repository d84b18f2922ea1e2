"""A decode step of latent attention as vLLM's layers have it: a product makes the queries, then the new rows are written, then the four operations run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvskim.ops.cuda.library import availability
from kvskim.ops.latent_query import LatentQuery
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace
from kvskim.ops.write_cache import write_cache
from kvskim.rules import RuleParameters
from mla_data import LATENT, ROTARY, make_latent_batch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
AVAILABLE, REASON = availability()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=REASON)

RULE = RuleParameters(rule="budget", budget_pages=6, min_pages=0, full_pages=40)
CHANNELS = 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [16, 17, 128])
@pytest.mark.parametrize("requests", [1, 11])
def test_queries_are_read_early_and_the_new_rows_are_not(requests: int, group: int, dtype: torch.dtype) -> None:
    lengths = [640] if requests == 1 else [1, 15, 16, 17, 33, 400, 639, 641, 1500, 16 * 20, 16 * 20 + 1]
    batch = make_latent_batch("sketch", lengths, group=group, block_size=64, dtype=dtype).to("cuda")
    settings = StepSettings(batch.selector, batch.tables, RULE, 1, 2, batch.scale, kernels="cuda")
    workspace = Workspace(
        max_requests=requests, num_kv_heads=1, group=group, head_dim=LATENT, page_capacity=batch.page_capacity, rule=RULE, sink_pages=1,
        window_pages=2, device="cuda", kernels="cuda",
    )
    buffers, ready = workspace.buffers(requests), torch.ones(1, dtype=torch.int32, device="cuda")
    last = torch.tensor(lengths, device="cuda") - 1
    slots = batch.block_table.long().gather(1, (last // 64)[:, None])[:, 0] * 64 + last % 64
    fresh = torch.empty(requests, 1, LATENT + ROTARY, device="cuda", dtype=dtype)
    plain = torch.empty(group, requests, CHANNELS, device="cuda", dtype=dtype)
    absorb = torch.randn(group, CHANNELS, LATENT, device="cuda").to(dtype) / CHANNELS
    latent = torch.empty(group, requests, LATENT, device="cuda", dtype=dtype)
    rotary = torch.empty(requests, group, ROTARY, device="cuda", dtype=dtype)
    out = torch.empty(requests, group, LATENT, device="cuda", dtype=dtype)
    places = batch.key_cache[..., :LATENT], batch.key_cache[..., LATENT:]

    def step(overlap: bool) -> None:
        torch.bmm(plain, absorb, out=latent)
        assert write_cache(fresh[..., :LATENT], fresh[..., LATENT:], *places, slots, kernels="cuda", overlap=overlap)
        decode_step(
            replace(settings, overlap=overlap, settled=overlap), LatentQuery(latent.transpose(0, 1), rotary), batch.key_cache, batch.value_cache,
            batch.records, batch.block_table, batch.seq_lens, ready=ready, workspace=workspace, buffers=buffers, out=out, queries_settled=overlap,
        )

    fresh.normal_(), plain.normal_(), rotary.normal_()
    step(overlap=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(overlap=True)
    for _ in range(30):
        fresh.normal_(), plain.normal_(), rotary.normal_()
        # Read too early, these show.
        batch.key_cache[slots // 64, slots % 64] = 30.0
        latent.fill_(torch.nan), out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        ours, forced = out.clone(), buffers.forced.clone()
        step(overlap=False)
        torch.cuda.synchronize()
        assert not out.isnan().any()
        assert torch.equal(ours, out)
        assert torch.equal(forced.nan_to_num(), buffers.forced.nan_to_num())
