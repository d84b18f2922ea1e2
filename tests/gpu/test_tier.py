"""Values, or keys and values, in page-locked host memory, read and written by kernels: as with all in GPU memory, bit for bit, also in a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvskim.ops.attend import attend, required_partials
from kvskim.ops.attend_tiered import attend_tiered
from kvskim.ops.encode import encode, encoders
from kvskim.ops.fetch import copy_fetched, fetch, fetch_scratch
from kvskim.ops.stage import stage
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.store import store
from kvskim.ops.workspace import Workspace
from kvskim.rules import RuleParameters
from kvskim.tier.host_memory import HostMemory
from kvskim.tier.pages import HostTier, make_tier
from step_data import make_batch
from tier_data import JUNK, Sizes, Step, Worker, check_coherent, pages_of, poisoned_tier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = Sizes(blocks=60, block_size=32, heads=8, group=4, dim=128, requests=6, rows=8, longest=400, dtype=torch.bfloat16)


PARTS = [1, 2]
"""Values, keys and values."""


def sizes_of(parts: int) -> Sizes:
    """A tier that holds keys is a cache of blocks of 16 tokens."""
    return SIZES if parts == 1 else replace(SIZES, block_size=16, blocks=2 * SIZES.blocks)


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    taken = HostMemory(SIZES.pages * SIZES.heads * 2 * 16 * SIZES.dim * 2)
    yield taken
    torch.cuda.synchronize()
    taken.release()


def pinned_tier(memory: HostMemory, slots: int, parts: int) -> HostTier:
    shape = (SIZES.pages, SIZES.heads, parts, 16, SIZES.dim)
    host = memory.view((2 * SIZES.pages, SIZES.heads, 1, 16, SIZES.dim), SIZES.dtype).view(-1)[: math.prod(shape)].view(shape)
    host.fill_(math.nan)
    tier = make_tier(host, slots, "cuda")
    tier.hot.fill_(math.nan)
    return tier


def on_gpu(step: Step) -> Step:
    return Step(**{f.name: getattr(step, f.name).cuda() for f in fields(step)})


def on_host(tier: HostTier) -> HostTier:
    """A copy of it, once the GPU is done."""
    torch.cuda.synchronize()
    return HostTier(**{f.name: getattr(tier, f.name).cpu().clone() for f in fields(tier)})


def buffers(worker: Worker, step: Step) -> Any:
    need = required_partials(step.query, worker.keys, worker.values, step.block_table) * 64
    return SimpleNamespace(
        attend_partials=torch.full((need,), math.nan, device="cuda"), attend_tickets=torch.zeros(1024, dtype=torch.int32, device="cuda")
    )


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("slots", [1, 50, 400, 20000])
@pytest.mark.parametrize("parts", PARTS)
def test_bits_and_decisions(memory: HostMemory, slots: int, kernels: str, parts: int) -> None:
    """Every tensor of the tier is that of the definition after each step, and what is attended is what pages on the GPU give."""
    sizes = sizes_of(parts)
    worker, expected, tier = Worker(sizes, seed=slots), poisoned_tier(sizes, slots, parts), pinned_tier(memory, slots, parts)
    scratch = fetch_scratch(SIZES.rows * SIZES.heads, slots, "cuda")
    for step in worker.steps(30):
        store(expected, step.values, step.slot_mapping, keys=step.keys if parts == 2 else None, kernels="torch")
        selection = (step.block_table, step.seq_lens, step.pages, step.counts)
        fetch(expected, *selection, block_size=sizes.block_size, scratch=None, kernels="torch")
        gpu = on_gpu(step)
        rest = (gpu.block_table, gpu.seq_lens, gpu.pages, gpu.counts)
        store(tier, gpu.values, gpu.slot_mapping, keys=gpu.keys if parts == 2 else None, kernels=kernels)
        fetch(tier, *rest, block_size=sizes.block_size, scratch=scratch, kernels=kernels, copies=slots % 100 != 0)
        if slots % 100 == 0:
            copy_fetched(tier, scratch, kernels=kernels)
        torch.cuda.synchronize()  # the pool is host memory: reading it waits for nothing
        for f in fields(HostTier):
            torch.testing.assert_close(getattr(tier, f.name).cpu(), getattr(expected, f.name), rtol=0, atol=0, equal_nan=True, msg=f.name)
        outs = [torch.full_like(gpu.query, math.nan) for _ in range(2)]
        keys, values = worker.keys.cuda(), worker.values.cuda()
        common: dict[str, Any] = dict(scale=0.1, scratch=buffers(worker, step), kernels=kernels)
        attend(gpu.query, keys, values, *rest, out=outs[0], **common)
        attend_tiered(gpu.query, tier.key_cache if parts == 2 else keys, tier, *rest, out=outs[1], **common)
        assert torch.equal(outs[0], outs[1])
        assert not outs[0].isnan().any()


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_replays_of_a_graph(memory: HostMemory, kernels: str, parts: int, aside: bool) -> None:
    """One capture serves every step: no decision is taken on the host. Copies may be made on another stream, behind attention."""
    sizes = sizes_of(parts)
    worker, tier = Worker(sizes, seed=5), pinned_tier(memory, 200, parts)
    scratch = fetch_scratch(SIZES.rows * SIZES.heads, 200, "cuda")
    first = on_gpu(next(worker.steps(1)))
    store(tier, first.values, first.slot_mapping, keys=first.keys if parts == 2 else None, kernels=kernels)
    keys, out = torch.empty_like(worker.keys, device="cuda"), torch.empty_like(first.query)
    rest = (first.block_table, first.seq_lens, first.pages, first.counts)
    common: dict[str, Any] = dict(scale=0.1, scratch=buffers(worker, first), kernels=kernels)

    def step() -> None:
        # Overlapped as in an engine: attend begins while fetch still runs, and has to wait for it.
        fetch(tier, *rest, block_size=sizes.block_size, scratch=scratch, kernels=kernels, overlap_previous=kernels == "cuda", copies=not aside)
        key_cache = tier.key_cache if parts == 2 else keys
        attend_tiered(first.query, key_cache, tier, *rest, out=out, overlap_previous=kernels == "cuda", **common)
        if aside:
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                copy_fetched(tier, scratch, kernels=kernels)
            torch.cuda.current_stream().wait_stream(beside)

    keys.copy_(worker.keys)
    side, beside = torch.cuda.Stream(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = tier.counters.clone()
    for following in worker.steps(30):
        gpu = on_gpu(following)
        store(tier, gpu.values, gpu.slot_mapping, keys=gpu.keys if parts == 2 else None, kernels=kernels)
        for f in ("query", "block_table", "seq_lens", "pages", "counts"):
            getattr(first, f).copy_(getattr(gpu, f))
        keys.copy_(worker.keys)
        out.fill_(math.nan)
        graph.replay()
        expected = torch.empty_like(out)
        attend(gpu.query, keys, worker.values.cuda(), *rest, out=expected, **common)
        assert torch.equal(out, expected)
        check_coherent(on_host(tier), *(worker.keys, worker.values)[2 - parts :])
    assert bool((tier.counters > before).all())
    assert int((tier.directory > 0).sum()) == 200


def random_pages(total: Tensor, counts: Tensor, capacity: int) -> Tensor:
    """Page tables int32 ``[R, H, capacity]`` of so many random pages of each request; junk beyond."""
    pages = torch.full((*counts.shape, capacity), JUNK, dtype=torch.int32)
    for r, row in enumerate(counts.tolist()):
        for h, count in enumerate(row):
            pages[r, h, :count] = torch.randperm(int(total[r]))[:count].sort().values.int()
    return pages


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_large_fetches(kernels: str) -> None:
    """Many more entries and slots than a fetch has threads, with pages that several rows select; most of them find no slot."""
    rows, heads, columns, slots, pages = 48, 8, 160, 18_000, 9000
    memory = HostMemory(pages * heads * 16 * 16 * 2)
    try:
        host = memory.view((pages, heads, 1, 16, 16), torch.float16)
        host.copy_(torch.randn(host.shape))
        expected, tier = make_tier(host.clone(), slots, "cpu"), make_tier(host, slots, "cuda")
        for each in (expected, tier):
            each.hot.zero_()
        scratch = fetch_scratch(rows * heads, slots, "cuda")
        generator = torch.Generator().manual_seed(3)
        for _ in range(4):
            table = torch.randint(0, pages // 2, (rows, columns), generator=generator).int()
            lengths = torch.randint(0, columns * 32 + 1, (rows,), generator=generator).int()
            total = (lengths + 15) // 16
            counts = torch.minimum(torch.randint(0, 2 * columns + 1, (rows, heads), generator=generator), total[:, None]).int()
            selection = (table, lengths, random_pages(total, counts, 2 * columns), counts)
            fetch(expected, *selection, block_size=32, scratch=None, kernels="torch")
            fetch(tier, *(t.cuda() for t in selection), block_size=32, scratch=scratch, kernels=kernels)
            for f in fields(HostTier):
                torch.testing.assert_close(getattr(tier, f.name).cpu(), getattr(expected, f.name), rtol=0, atol=0, msg=f.name)
        selected, missing, fetched = tier.counters.tolist()
        assert selected > missing > fetched > slots
        torch.cuda.synchronize()
    finally:
        memory.release()


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(("dim", "group", "dtype"), [
    (64, 3, torch.bfloat16), (64, 16, torch.float16), (96, 4, torch.bfloat16), (96, 9, torch.float16), (128, 4, torch.bfloat16),
    (128, 16, torch.bfloat16), (128, 8, torch.float16), (256, 2, torch.bfloat16), (256, 16, torch.float16),
])
@pytest.mark.parametrize("requests", [1, 5, 40])
@pytest.mark.parametrize("parts", PARTS)
def test_every_shape_of_the_cuda_kernel(requests: int, dim: int, group: int, dtype: torch.dtype, everything: bool, parts: int) -> None:
    check_shape(requests, dim, group, dtype, everything=everything, parts=parts)


@pytest.mark.parametrize(("dim", "group", "dtype", "parts"), [
    (64, 8, torch.float16, 1), (64, 9, torch.bfloat16, 2), (96, 8, torch.float16, 2), (96, 16, torch.bfloat16, 1), (128, 9, torch.float16, 1),
    (256, 8, torch.float16, 2), (256, 9, torch.bfloat16, 1),
])
@pytest.mark.parametrize("requests", [5, 40])
def test_the_other_type_of_every_shape(requests: int, dim: int, group: int, dtype: torch.dtype, parts: int) -> None:
    """With the shapes above: both types in groups of up to and of more than eight, in batches that leave the GPU room and that fill it."""
    check_shape(requests, dim, group, dtype, everything=False, parts=parts)


def check_shape(requests: int, dim: int, group: int, dtype: torch.dtype, *, everything: bool, parts: int) -> None:
    """Long requests, some of whose pages are hot: the bits of pages on the GPU, in clusters, splits and whole."""
    heads, block_size, slots = 2, 48 if parts == 1 else 16, 301
    per_block = block_size // 16
    blocks = (4500 if requests == 1 else 300) // per_block
    memory = HostMemory(blocks * per_block * heads * parts * 16 * dim * 2)
    try:
        generator = torch.Generator(device="cuda").manual_seed(requests)
        keys, values = (torch.randn(blocks, block_size, heads, dim, device="cuda", generator=generator).to(dtype) for _ in range(2))
        host = memory.view((blocks * per_block, heads, parts, 16, dim), dtype)
        host.copy_(pages_of(*(keys, values)[2 - parts :]).cpu())
        tier = make_tier(host, slots, "cuda")
        of_tier = tier.key_cache if parts == 2 else keys
        lengths = torch.randint(1, blocks * block_size + 1, (requests,)).int()
        lengths[-1] = blocks * block_size - 5
        table = torch.stack([torch.randperm(blocks) for _ in range(requests)]).int().cuda()
        total = (lengths + 15) // 16
        counts = (total if everything else (total * 2 // 3 + 1).minimum(total))[:, None].repeat(1, heads)
        pages = random_pages(total, counts, blocks * per_block)
        query = torch.randn(requests, heads * group, dim, device="cuda", generator=generator).to(dtype)
        rest = (table, lengths.cuda(), pages.cuda(), counts.cuda())
        need = required_partials(query, keys, values, table)
        scratch = SimpleNamespace(
            attend_partials=torch.full((need,), math.nan, device="cuda"), attend_tickets=torch.zeros(1024, dtype=torch.int32, device="cuda")
        )
        common: dict[str, Any] = dict(scale=0.1, scratch=scratch, kernels="cuda")
        outs = [torch.full_like(query, math.nan) for _ in range(3)]
        lses = [torch.full(query.shape[:2], math.nan, device="cuda") for _ in range(3)]
        attend(query, keys, values, *rest, out=outs[0], lse=lses[0], **common)
        attend_tiered(query, of_tier, tier, *rest, out=outs[1], lse=lses[1], **common)  # nothing is hot
        fetch(tier, *rest, block_size=block_size, scratch=fetch_scratch(requests * heads, slots, "cuda"), kernels="cuda")
        attend_tiered(query, of_tier, tier, *rest, out=outs[2], lse=lses[2], **common)
        torch.cuda.synchronize()
        assert int((tier.directory > 0).sum()) == slots
        for i in (1, 2):
            assert torch.equal(outs[i], outs[0])
            assert torch.equal(lses[i], lses[0])
        assert not outs[0].isnan().any()
        tier.host.fill_(math.nan)
        attend_tiered(query, of_tier, tier, *rest, out=outs[2], **common)
        assert outs[2].isnan().any(), "pages without a slot must have been read from the host"
    finally:
        torch.cuda.synchronize()
        memory.release()


@pytest.mark.parametrize("parts", PARTS)
def test_staged_contexts(memory: HostMemory, parts: int) -> None:
    """Keys from the cache and values, or both, from the host or from the hot cache, for several rows at once."""
    tier = pinned_tier(memory, 100, parts)
    keys, values = (torch.randn(SIZES.blocks, 32, SIZES.heads, SIZES.dim).to(SIZES.dtype) for _ in range(2))
    tier.host.copy_(pages_of(*(keys, values)[2 - parts :]))
    rows, contexts = 3, torch.tensor([20 * 32 - 9, 0, 77], dtype=torch.int32)
    table = torch.stack([torch.randperm(SIZES.blocks)[:20] for _ in range(rows)]).int()
    room = torch.tensor([0, 20, 23, 26], dtype=torch.int32)
    all_pages = torch.full((rows, SIZES.heads), 40, dtype=torch.int32)
    scratch = fetch_scratch(rows * SIZES.heads, 100, "cuda")
    lengths = torch.tensor([640, 640, 640], dtype=torch.int32)
    pages = torch.zeros(rows, SIZES.heads, 40, dtype=torch.int32)
    fetch(tier, table.cuda(), lengths.cuda(), pages.cuda(), all_pages.cuda(), block_size=32, scratch=scratch, kernels="cuda")
    torch.cuda.synchronize()
    hot = torch.nonzero(tier.directory.cpu().view(-1)).view(-1)
    assert len(hot) == 100
    tier.host.view(-1, parts, 16, SIZES.dim)[hot] = math.nan
    staged = torch.full((26, 2, 32, SIZES.heads, SIZES.dim), 7.0, dtype=SIZES.dtype, device="cuda")
    stage(tier, keys.cuda() if parts == 1 else None, table.cuda(), contexts.cuda(), room.cuda(), staged, blocks=26, kernels="cuda")
    for row, context in enumerate(contexts.tolist()):
        for part, cache in enumerate((keys, values)):
            first = int(room[row])
            expected = cache[table[row].long()].flatten(0, 1)[:context]
            assert torch.equal(staged[first : int(room[row + 1]), part].flatten(0, 1)[:context].cpu(), expected)


def test_the_gpu_reads_and_writes_host_memory_as_a_tensor(memory: HostMemory) -> None:
    """Nothing is copied: each side sees what the other has written."""
    tier = pinned_tier(memory, 10, 2)
    assert tier.key_cache.is_cuda
    assert tier.key_cache.data_ptr() == tier.host.data_ptr()
    tier.host[5, 3, 0, 7] = 1.5
    assert bool((tier.key_cache[5, 7, 3] == 1.5).all())
    before = torch.cuda.memory_allocated()
    tier.key_cache[6, 8, 2] = 2.5
    torch.cuda.synchronize()
    assert bool((tier.host[6, 2, 0, 8] == 2.5).all())
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("name", ["sketch", "rki4"])
def test_whole_steps_with_keys_on_the_host(name: str, kernels: str) -> None:
    """Records and outputs are those of keys in GPU memory, whether the always-attended pages are hot or not; hot ones are not read from the host."""
    batch = make_batch(name, [1, 17, 0, 100, 333, 3000], dim=128, heads=8, group=4, block_size=16, dtype=torch.bfloat16).to("cuda")
    rule = RuleParameters(rule="budget", budget_pages=6, min_pages=0)
    pages = batch.key_cache.shape[0]
    memory = HostMemory(pages * 8 * 2 * 16 * 128 * 2)
    try:
        host = memory.view((pages, 8, 2, 16, 128), torch.bfloat16)
        host.copy_(pages_of(batch.key_cache.contiguous(), batch.value_cache.contiguous()).cpu())
        tier = make_tier(host, 4000, "cuda")
        workspace = Workspace(
            max_requests=6, num_kv_heads=8, group=4, head_dim=128, page_capacity=batch.page_capacity, rule=rule, sink_pages=1, window_pages=2,
            device="cuda", kernels=kernels,
        )
        settings = StepSettings(batch.selector, batch.tables, rule, 1, 2, batch.scale, kernels=kernels, overlap=kernels == "cuda")

        def step(key_cache: Tensor, values: Any) -> Tensor:
            out = torch.full_like(batch.query, math.nan)
            decode_step(
                settings, batch.query, key_cache, values, batch.records, batch.block_table, batch.seq_lens,
                ready=torch.ones(1, dtype=torch.int32, device="cuda"), workspace=workspace, buffers=workspace.buffers(6), out=out,
                fetching=fetch_scratch(6 * 8, tier.slots, "cuda"),
            )
            torch.cuda.synchronize()
            return out

        expected = step(batch.key_cache, batch.value_cache)
        assert torch.equal(step(tier.key_cache, tier), expected)
        assert torch.equal(step(tier.key_cache, tier), expected)
        selected, missing, fetched = tier.counters.tolist()
        assert missing == fetched == selected // 2
        ends = torch.arange(pages, device="cuda") * 16 + 15
        for encoder in encoders(batch.tables, tier.key_cache, kernels):
            fresh = torch.zeros_like(batch.records)
            encode(batch.selector, batch.tables, tier.key_cache, ends, fresh, kernels=kernels, encoder=encoder)
            again = torch.zeros_like(batch.records)
            encode(batch.selector, batch.tables, batch.key_cache, ends, again, kernels=kernels, encoder=encoder)
            assert torch.equal(fresh, again)
            assert fresh.any()
        torch.cuda.synchronize()
        tier.host.fill_(math.nan)
        assert torch.equal(step(tier.key_cache, tier), expected)
    finally:
        torch.cuda.synchronize()
        memory.release()


def test_ordinary_host_memory_is_refused() -> None:
    tier = make_tier(torch.zeros(4, 2, 1, 16, 16, device="cuda"), 2, "cuda")
    with pytest.raises(ValueError, match="pinned"):
        replace(tier, host=torch.zeros(4, 2, 1, 16, 16))
