"""The CUDA kernel of latent attention on a GPU: every number of clusters and of thread blocks in them, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvskim.ops.attend import attend, serves_latent
from kvskim.ops.attend_plan import attend_scratch_sizes, latent_tickets
from kvskim.ops.latent_query import LatentQuery

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LENGTHS = [0, 1, 15, 16, 17, 333, 1009, 4100]
DTYPES = [torch.bfloat16, torch.float16]
SCALE = 576**-0.5
GUARD = 64


@dataclass
class Case:
    query: Tensor
    cache: Tensor
    table: Tensor
    lengths: Tensor
    pages: Tensor
    counts: Tensor

    def expected(self, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
        """out and lse in float64."""
        requests, query_heads, _ = self.query.shape
        heads = self.cache.shape[2]
        out, lse = torch.zeros(requests, query_heads, 512, dtype=torch.float64), torch.full((requests, query_heads), -torch.inf, dtype=torch.float64)
        size, group = self.cache.shape[1], query_heads // heads
        for r, length in enumerate(self.lengths.tolist()):
            for h in range(heads if length else 0):
                total, count = -(-length // 16), int(self.counts[r, h])
                pages = torch.arange(total) if count >= total else self.pages[r, h, : min(count, self.pages.shape[2])].cpu().long()
                token = (pages[:, None] * 16 + torch.arange(16)).flatten()
                token = token[token < length]
                rows = self.cache[self.table[r, token.to(self.table.device) // size].long(), (token % size).to(self.table.device), h].double()
                own = slice(h * group, (h + 1) * group)
                x = self.query[r, own].double() @ rows.T * SCALE
                if softcap:
                    x = softcap * torch.tanh(x / softcap)
                out[r, own], lse[r, own] = (x.softmax(-1) @ rows[:, :512]).cpu(), x.logsumexp(-1).cpu()
        return out, lse


def make_case(lengths: list[int], counts: list[int], *, group: int, dtype: torch.dtype, heads: int = 1, block_size: int = 64, seed: int = 0) -> Case:
    """Requests in blocks in any order; rows that no token fills are NaN, table entries beyond a request and beyond a count absurd."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    blocks = [-(-n // block_size) for n in lengths]
    cache = torch.full((sum(blocks) + 3, block_size, heads, 576), torch.nan, dtype=dtype, device="cuda")
    order = torch.randperm(sum(blocks) + 3, generator=generator, device="cuda").int()
    table = torch.full((len(lengths), max([*blocks, 1])), 2**30, dtype=torch.int32, device="cuda")
    capacity = max(1, *counts)
    pages = torch.full((len(lengths), heads, capacity), -(2**30), dtype=torch.int32, device="cuda")
    at = 0
    for r, n in enumerate(lengths):
        table[r, : blocks[r]] = order[at : at + blocks[r]]
        at += blocks[r]
        position = torch.arange(n, device="cuda")
        cache[table[r, position // block_size].long(), position % block_size] = torch.randn(n, heads, 576, generator=generator, device="cuda").to(dtype)
        total, count = -(-n // 16), counts[r]
        for h in range(heads if count < total else 0):  # the last page, which may be part full, is always among them
            chosen = torch.randperm(total - 1, generator=generator, device="cuda")[: max(count - 1, 0)]
            chosen = torch.cat((chosen, torch.full((min(count, 1),), total - 1, device="cuda"))).sort().values
            pages[r, h, :count] = chosen.int()
    query = torch.randn(len(lengths), heads * group, 576, generator=generator, device="cuda").mul_(2).to(dtype)
    many = torch.tensor(counts, dtype=torch.int32, device="cuda")[:, None].repeat(1, heads)
    return Case(query, cache, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), pages, many)


class Scratch:
    def __init__(self, rows: int, heads: int, group: int, clusters: int) -> None:
        self.attend_partials = torch.full((rows * heads * group * clusters * 514,), torch.nan, device="cuda")
        self.attend_tickets = torch.zeros(latent_tickets(rows, heads, group), dtype=torch.int32, device="cuda")


def check(out: Tensor, lse: Tensor, case: Case, softcap: float = 0.0) -> None:
    expected, expected_lse = case.expected(softcap)
    relative = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[case.query.dtype]
    size = expected.abs().amax(-1, keepdim=True)
    error = (out.double().cpu() - expected).abs()
    assert bool((error <= 2 * relative * size + 1e-6).all()), float((error / size.clamp_min(1e-6)).max())
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=2e-3, rtol=1e-3)


def run(
    case: Case, cluster: int, clusters: int, share: int, *, parts: bool = False, softcap: float = 0.0, settled: bool = False, full_pages: int = 0,
) -> tuple[Tensor, Tensor]:
    """The kernel itself, with guards around what it writes."""
    from kvskim.ops.cuda.attend_latent import attend_latent_cuda

    requests, query_heads, _ = case.query.shape
    heads = case.cache.shape[2]
    scratch = Scratch(requests, heads, query_heads // heads, clusters)
    memory = torch.full((requests * query_heads * 512 + 2 * GUARD,), torch.nan, dtype=case.query.dtype, device="cuda")
    out = memory[GUARD:-GUARD].view(requests, query_heads, 512)
    lse = torch.full((requests, query_heads), torch.nan, device="cuda")
    latent, rotary = case.query[..., :512], case.query[..., 512:]
    if parts:
        latent = latent.transpose(0, 1).contiguous().transpose(0, 1)
        rotary = torch.cat((torch.full_like(rotary, torch.nan), rotary), -1)[..., 64:]
    # The tickets of the first launch are those of the second. It leaves NaN in shared memory, which the second may not take for its query.
    for first, rest in ((torch.full_like(latent, torch.nan), torch.full_like(rotary, torch.nan)), (latent, rotary)):
        attend_latent_cuda(
            first, rest, case.cache, case.table, case.lengths, case.pages, case.counts, out, lse, scratch.attend_partials, scratch.attend_tickets,
            cluster, clusters, share, True, SCALE, softcap, 1.0, 1.0, settled, settled, full_pages,
        )
        torch.cuda.synchronize()  # what settled promises of the launch ahead
    assert not scratch.attend_tickets.any()
    assert memory[:GUARD].isnan().all()
    assert memory[-GUARD:].isnan().all()
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("cluster", range(1, 17))
def test_any_sharing_gives_the_same(cluster: int, dtype: torch.dtype) -> None:
    """From pages that one thread block holds in its ring to many times as many; counts at the capacity of the table, and of all pages."""
    case = make_case(LENGTHS, [0, 1, 1, 1, 1, 13, 63, 129], group=16, dtype=dtype, seed=cluster)
    for clusters, share in ((1, 16), (2, 1), (3, 16), (7, 4)):
        check(*run(case, cluster, clusters, share, parts=clusters == 2), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("group", [1, 3, 8, 9, 15, 16, 17, 32, 40, 128])
def test_any_group(group: int, dtype: torch.dtype) -> None:
    case = make_case(LENGTHS, [0, 1, 1, 1, 2, 7, 20, 257], group=group, dtype=dtype, block_size=16, seed=group)
    check(*run(case, 4, 1, 16), case)
    check(*run(case, 2, 5, 8, parts=True), case)


@pytest.mark.parametrize("count", [*range(1, 24), 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300])
def test_any_count(count: int) -> None:
    """Every number of pages around the depth of the ring, and around the 32 that are looked up together."""
    case = make_case([5000, 4999, 4801], [count, max(1, count - 1), count], group=16, dtype=torch.bfloat16, block_size=48, seed=count)
    check(*run(case, 1, 1, 16), case)
    check(*run(case, 2, 1, 16), case)


def test_every_page_of_long_requests() -> None:
    case = make_case([20000, 9000], [1250, 563], group=16, dtype=torch.bfloat16)
    for cluster, clusters in ((1, 1), (3, 2), (16, 4)):
        check(*run(case, cluster, clusters, 16), case)


@pytest.mark.parametrize("tokens", [16384, 16385, 20000])
def test_block_tables_behind_select(tokens: int) -> None:
    """Tables of as many entries as are fetched ahead of the pages (1,024) and of more, with pages for every thread block and for a few."""
    case = make_case([tokens, 40, tokens - 900], [150, 3, 7], group=16, dtype=torch.bfloat16, block_size=16, seed=tokens)
    for cluster, clusters in ((1, 1), (6, 1), (3, 2), (16, 1)):
        check(*run(case, cluster, clusters, 4, settled=True), case)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 11, 12, 13])
def test_thread_blocks_without_pages(count: int) -> None:
    """Clusters some of whose thread blocks have nothing to send but zeros, with every layout of what is sent."""
    case = make_case([3000, 2999], [count, max(1, count - 1)], group=16, dtype=torch.float16, seed=count)
    for cluster in range(2, 17):
        check(*run(case, cluster, 1, 16), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
def test_long_requests_among_more_than_the_gpu_holds(dtype: torch.dtype) -> None:
    """Where two thread blocks share a multiprocessor, and only long requests are shared by several."""
    case = make_case([3000, *([20, 0, 400] * 60), 2200], [188, *([1, 0, 9] * 60), 100], group=16, dtype=dtype)
    for clusters in (1, 3):
        check(*run(case, 1, clusters, 32), case)


def test_several_kv_heads_and_a_softcap() -> None:
    case = make_case(LENGTHS, [0, 1, 1, 1, 2, 7, 20, 60], group=5, heads=3, dtype=torch.float16, block_size=128)
    for softcap in (0.0, 2.0):
        check(*run(case, 2, 2, 4, softcap=softcap), case, softcap)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("requests", [1, 4, 13, 16, 20, 70, 132, 140])
def test_as_the_operation_shares_it_out(requests: int, dtype: torch.dtype) -> None:
    """Rows from few to more than multiprocessors: thread blocks alone on one, two on one, and in several waves."""
    lengths = [(731 * r) % 2200 for r in range(requests)]
    case = make_case(lengths, [min(-(-n // 16), 24) for n in lengths], group=16, dtype=dtype, seed=requests)
    floats, tickets = attend_scratch_sizes(requests, 1, 16, 512, case.table.shape[1] * 4, torch.cuda.get_device_properties(0).multi_processor_count)

    class OfWorkspace:
        attend_partials = torch.full((floats,), torch.nan, device="cuda")
        attend_tickets = torch.zeros(tickets, dtype=torch.int32, device="cuda")

    out = torch.full((requests, 16, 512), torch.nan, dtype=dtype, device="cuda")
    lse = torch.full((requests, 16), torch.nan, device="cuda")
    values = case.cache[..., :512]
    assert serves_latent(case.query, case.cache, values, out)
    for query in (case.query, LatentQuery(case.query[..., :512], case.query[..., 512:])):
        for overlap in (False, True):
            out.fill_(torch.nan)
            attend(
                query, case.cache, values, case.table, case.lengths, case.pages, case.counts, scale=SCALE, out=out, lse=lse, scratch=OfWorkspace,
                kernels="cuda", overlap_previous=overlap,
            )
            check(out, lse, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("group", [16, 21])
def test_query_rows_at_any_multiple_of_four_bytes(group: int, dtype: torch.dtype) -> None:
    case = make_case(LENGTHS, [0, 1, 1, 1, 2, 7, 20, 60], group=group, dtype=dtype, seed=group)
    wide = torch.full((*case.query.shape[:2], 586), torch.nan, dtype=dtype, device="cuda")
    wide[..., 2:578] = case.query
    case.query = wide[..., 2:578]
    assert case.query.data_ptr() % 16 == 4
    check(*run(case, 3, 2, 4), case)


@pytest.mark.parametrize(("cluster", "times"), [(1, 1), (4, 1), (16, 1), (1, 18)])
def test_whole_requests_need_no_count(cluster: int, times: int) -> None:
    """Where all else is settled, a request of up to so many pages is attended whole, whatever its count says; the others by their counts.

    With more requests than multiprocessors two thread blocks share one.
    """
    case = make_case(LENGTHS * times, [0, 1, 1, 1, 2, 21, 20, 60] * times, group=16, dtype=torch.bfloat16, seed=cluster)
    expected = run(case, cluster, 2, 4)
    for full_pages in (0, 1, 21, 63):
        short = (case.lengths + 15) // 16 <= full_pages
        counts = torch.where(short, 2**30, case.counts[:, 0])
        whole = Case(case.query, case.cache, case.table, case.lengths, case.pages, counts.int()[:, None])
        told = torch.where(short, -1, case.counts[:, 0]).int()[:, None]
        out, lse = run(Case(case.query, case.cache, case.table, case.lengths, case.pages, told), cluster, 2, 4, settled=True, full_pages=full_pages)
        check(out, lse, whole)
        same = (counts == case.counts[:, 0]) & (case.lengths > 0)
        assert torch.equal(out[same], expected[0][same])


def test_logits_far_apart_and_not_a_number() -> None:
    """Weights that vanish, a maximum that rises late, and a request with a NaN, which stays its own."""
    case = make_case([900, 900, 900], [57, 57, 20], group=16, dtype=torch.float16)
    case.cache.mul_(torch.linspace(0.01, 6, case.cache.shape[0], device="cuda")[:, None, None, None].to(torch.float16))
    check(*run(case, 2, 1, 16), case)
    case.cache[case.table[1, 3].long(), 5, 0, 17] = torch.nan
    out, lse = run(case, 2, 2, 4)
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert not out[[0, 2]].isnan().any()
