"""Latent attention on a GPU: the step over rows of 512 + 64 channels, CUDA where it has kernels and Triton, against the torch step on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvskim.ops.attend import shares_rows
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace
from kvskim.rules import RuleParameters
from mla_data import in_parts, make_latent_batch, run_latent_step
from test_mla import BUDGET, COVERAGE, THRESHOLD, check_join, check_parts, check_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LENGTHS = [0, 1, 15, 16, 17, 333, 3000]
KERNELS = ["cuda", "triton"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", [8, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sketch_step_is_the_torch_step(kernels: str, group: int, dtype: torch.dtype) -> None:
    for rule, block_size in ((BUDGET, 16), (THRESHOLD, 64), (COVERAGE, 128)):
        batch = make_latent_batch("sketch", LENGTHS, group=group, dtype=dtype, block_size=block_size, seed=group)
        check_step(batch.to("cuda"), batch, rule, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", [3, 16, 17, 64, 128])
def test_a_query_in_parts_gives_the_same_step(kernels: str, group: int) -> None:
    for seed, selector in enumerate(("sketch", "rki4")):
        batch = make_latent_batch(selector, LENGTHS, group=group, dtype=torch.bfloat16, block_size=64, seed=seed)
        check_parts(batch.to("cuda"), BUDGET, kernels)


@pytest.mark.parametrize("full_pages", [0, 3, 400])
@pytest.mark.parametrize("group", [16, 128])
def test_parts_that_the_kernel_ahead_writes_are_seen(group: int, full_pages: int) -> None:
    """Overlapped launches may begin early, and must not read either part before the kernel ahead has written it; as little the keys of the open page.
    Attention of requests of up to ``full_pages`` pages does not even wait for select."""
    rule = replace(BUDGET, full_pages=full_pages)
    batch = make_latent_batch("sketch", [3000, 0, 40], group=group, dtype=torch.bfloat16, block_size=64).to("cuda")
    expected, _, _ = run_latent_step(batch, rule, kernels="cuda")
    workspace = Workspace(
        max_requests=3, num_kv_heads=1, group=group, head_dim=512, page_capacity=batch.page_capacity, rule=rule, sink_pages=1, window_pages=1,
        device="cuda", kernels="cuda",
    )
    settings = StepSettings(batch.selector, batch.tables, rule, 1, 1, batch.scale, overlap=True, settled=True)
    buffers, ready = workspace.buffers(3), torch.ones(1, dtype=torch.int32, device="cuda")
    whole = in_parts(batch.query, 512)
    query = in_parts(torch.full_like(batch.query, torch.nan), 512)
    outs = [torch.full_like(expected, torch.nan) for _ in range(6)]
    torch.cuda.synchronize()
    for out in outs:
        query.rotary.fill_(torch.nan)
        query.latent.fill_(torch.nan)
        query.rotary.copy_(whole.rotary)
        query.latent.copy_(whole.latent)
        decode_step(
            settings, query, batch.key_cache, batch.value_cache, batch.records, batch.block_table, batch.seq_lens, ready=ready, workspace=workspace,
            buffers=buffers, out=out,
        )
    torch.cuda.synchronize()
    for out in outs:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("selector", ["rki4", "minmax", "mean"])
@pytest.mark.parametrize("group", [16, 128])
def test_step_of_other_selectors_is_the_torch_step(kernels: str, selector: str, group: int) -> None:
    batch = make_latent_batch(selector, LENGTHS, group=group, dtype=torch.bfloat16, block_size=32)
    check_step(batch.to("cuda"), batch, BUDGET, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", [16, 128])
def test_a_whole_long_request_and_many_short_ones(kernels: str, group: int) -> None:
    """Not calibrated: all pages, in as many splits as there are; and more rows than multiprocessors."""
    for lengths in ([20000], [33, 0, 500] * 60):
        batch = make_latent_batch("sketch", lengths, group=group, dtype=torch.bfloat16, block_size=64)
        out, lse, buffers = run_latent_step(batch.to("cuda"), BUDGET, kernels=kernels, ready=0)
        expected, expected_lse, _ = run_latent_step(batch, BUDGET, kernels="torch", ready=0)
        assert torch.equal(buffers.counts.cpu()[:, 0], (batch.seq_lens + 15) // 16)
        torch.testing.assert_close(out.float().cpu(), expected.float(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.cpu(), expected_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", [16, 64, 128])
@pytest.mark.parametrize("full_pages", [0, 40])
def test_step_replays_in_a_graph_with_other_lengths(kernels: str, group: int, full_pages: int) -> None:
    rule = replace(BUDGET, full_pages=full_pages)
    batch = make_latent_batch("sketch", [700, 1200, 0, 40], group=group, dtype=torch.bfloat16).to("cuda")
    workspace = Workspace(
        max_requests=4, num_kv_heads=1, group=group, head_dim=512, page_capacity=batch.page_capacity, rule=rule, sink_pages=1, window_pages=1,
        device="cuda", kernels=kernels,
    )
    buffers = workspace.buffers(4)
    batch.query.nan_to_num_()
    out = torch.zeros(4, group, 512, dtype=torch.bfloat16, device="cuda")
    ready = torch.ones(1, dtype=torch.int32, device="cuda")
    overlap = kernels == "cuda"
    settings = StepSettings(batch.selector, batch.tables, rule, 1, 1, batch.scale, kernels=kernels, overlap=overlap, settled=overlap)  # type: ignore[arg-type]

    def step() -> None:
        decode_step(
            settings, batch.query, batch.key_cache, batch.value_cache, batch.records, batch.block_table, batch.seq_lens, ready=ready,
            workspace=workspace, buffers=buffers, out=out,
        )

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


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", [16, 64, 128])
def test_values_in_memory_of_their_own(kernels: str, group: int) -> None:
    """Values that are no part of the keys take other kernels than latent rows; both must fit the machine at 576 channels."""
    batch = make_latent_batch("mean", LENGTHS, group=group, dtype=torch.bfloat16, block_size=64)
    apart = batch.to("cuda")
    assert shares_rows(apart.key_cache, apart.value_cache)
    apart.value_cache = apart.value_cache.clone()
    assert not shares_rows(apart.key_cache, apart.value_cache)
    check_step(apart, batch, BUDGET, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("heads", [16, 128])
def test_the_parts_of_a_query_are_joined(kernels: str, heads: int) -> None:
    check_join("cuda", kernels, heads, 512, 64)


@pytest.mark.parametrize("kernels", KERNELS)
def test_encode_of_latent_rows(kernels: str) -> None:
    """Records from the kernels score as those from torch do: a digit may differ where rounding does, no more."""
    from kvskim.ops.encode import encode

    batch = make_latent_batch("sketch", [3000], group=16, dtype=torch.bfloat16, block_size=64).to("cuda")
    slots = torch.arange(15, batch.records.shape[0] * 16, 16, device="cuda")
    fresh = torch.full_like(batch.records, 0xA5)
    encode(batch.selector, batch.tables, batch.key_cache, slots, fresh, kernels=kernels)
    live = batch.block_table[0, : 3000 // 64].long()
    pages = (live[:, None] * 4 + torch.arange(4, device="cuda")).flatten()
    differing = (fresh[pages] != batch.records[pages]).float().mean()
    assert float(differing) < 0.02


@pytest.mark.parametrize("kernels", KERNELS)
def test_addresses_beyond_32_bits(kernels: str) -> None:
    """A cache of more than 2^32 elements, whose last blocks are used."""
    blocks = 2**32 // (64 * 576) + 64
    small = make_latent_batch("sketch", [250], group=16, dtype=torch.bfloat16, block_size=64)
    cache = torch.empty(blocks, 64, 1, 576, dtype=torch.bfloat16, device="cuda")
    records = torch.empty(blocks * 4, 1, 256, dtype=torch.uint8, device="cuda")
    far = small.to("cuda")
    used = torch.tensor([blocks - 1, 3, blocks - 7, blocks - 2], device="cuda")
    old = far.block_table[0, :4].long()
    cache[used] = far.key_cache[old]
    records.view(blocks, 4, 1, 256)[used] = far.records.view(-1, 4, 1, 256)[old]
    table = far.block_table.clone()
    table[0, :4] = used.int()
    moved: dict[str, Any] = dict(key_cache=cache, value_cache=cache[..., :512], records=records, block_table=table)
    far = type(far)(**{**far.__dict__, **moved})
    check_step(far, small, RuleParameters(rule="budget", budget_pages=8, min_pages=0), kernels=kernels)
