"""The CUDA and Triton attend kernels on a GPU against loops in float64, and against each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attend_data import Buffers, Case, check, make_case, run
from kvskim.ops.attend import attend
from kvskim.ops.torch_attend import attend_torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = [0, 1, 15, 16, 17, 31, 32, 33, 1000, 0, 250]
KERNELS = ["cuda", "triton"]
DTYPES = [torch.bfloat16, torch.float16]


def gpu_case(lengths: list[int] = LENGTHS, **options: Any) -> Case:
    return make_case(lengths, device="cuda", **options)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dims_and_dtypes(kernels: str, dim: int, fp8: bool, dtype: torch.dtype) -> None:
    for seed, (group, layout, block_size, softcap) in enumerate([(4, "split", 16, 0.0), (8, "packed", 64, 30.0), (16, "permuted", 128, 0.0)]):
        case = gpu_case(dim=dim, fp8=fp8, dtype=dtype, group=group, layout=layout, block_size=block_size, softcap=softcap, seed=seed)
        check(case, run(case, kernels))


FILLING = [17, 0, 130, 33] * 20
"""With two kv heads a thread block for each of 160 rows: more than the GPU runs at one a multiprocessor, so the kernels with short rings are launched."""


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_in_batches_that_fill_the_gpu(dim: int, fp8: bool, dtype: torch.dtype) -> None:
    for group in (7, 12):
        case = gpu_case(FILLING, dim=dim, fp8=fp8, dtype=dtype, group=group, seed=group)
        check(case, run(case, "cuda"))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", range(1, 17))
def test_groups(kernels: str, group: int) -> None:
    case = gpu_case(group=group, dim=128, heads=3, seed=group)
    check(case, run(case, kernels))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("select", ["identity", "with_open", "without_open", "single"])
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("layout", ["split", "permuted", "packed"])
def test_selections_and_layouts(kernels: str, select: str, block_size: int, layout: str) -> None:
    case = gpu_case(select=select, block_size=block_size, layout=layout, dim=128, seed=block_size)
    check(case, run(case, kernels))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits(kernels: str, softcap: float, dtype: torch.dtype) -> None:
    case = gpu_case(dtype=dtype, softcap=softcap, logit_scale=300.0, dim=128)
    check(case, run(case, kernels), lse_tolerance=5e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("lengths", [[20000], [5000, 1, 0, 30000], [33] * 300, [8000, 16] + [20] * 138], ids=["one", "ragged", "many", "unsplit"])
@pytest.mark.parametrize("select", ["identity", "with_open"])
def test_splits_and_long_requests(kernels: str, lengths: list[int], select: str) -> None:
    """From one request over the whole GPU to a batch that fills it, where a warp looks up more than a hundred pages."""
    case = gpu_case(lengths, select=select, heads=2, dim=128)
    check(case, run(case, kernels))


@pytest.mark.parametrize("cluster", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("lengths", [[0, 1, 17, 200, 3000], [100, 0, 400, 16] * 20], ids=["few", "several_waves"])
@pytest.mark.parametrize(("dim", "group", "fp8"), [(64, 4, False), (128, 4, False), (128, 16, False), (128, 5, True), (256, 16, False), (256, 16, True)])
def test_every_way_of_merging(monkeypatch: pytest.MonkeyPatch, cluster: int, lengths: list[int], dim: int, group: int, fp8: bool) -> None:
    """Through global memory (1) and in clusters; a few that get a multiprocessor for each block, and more than fit at once."""
    monkeypatch.setattr("kvskim.ops.attend.attend_cluster", lambda *_: cluster)
    case = gpu_case(lengths, dim=dim, group=group, fp8=fp8)
    buffers = Buffers(case)
    run(case, "cuda", buffers=buffers)
    check(case, buffers)
    if cluster > 1:
        assert torch.isnan(buffers.scratch.attend_partials).all()  # not used
    first = buffers.out.clone()
    for _ in range(20):
        run(case, "cuda", buffers=buffers)
    assert torch.equal(buffers.out, first)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("requests", [3, 16, 44])
def test_launches_of_few_and_many_blocks_follow_one_another(overlap: bool, requests: int) -> None:
    """Consecutive launches of different shapes, some without waiting for the one ahead, share the GPU and the scratch."""
    shapes = [[900, 17, 300] * requests, [5000], [300, 0] * requests, [64] * 300]
    cases = [gpu_case(lengths, dim=128, heads=1, select="with_open", seed=seed) for seed, lengths in enumerate(shapes)]
    buffers = [Buffers(case) for case in cases]
    names = ("attend_partials", "attend_tickets")
    shared = SimpleNamespace(**{name: max((getattr(own.scratch, name) for own in buffers), key=torch.numel) for name in names})
    for own in buffers:
        own.scratch = shared
    for _ in range(10):
        for case, own in zip(cases, buffers):
            run(case, "cuda", buffers=own, overlap_previous=overlap)
    for case, own in zip(cases, buffers):
        check(case, own)


@pytest.mark.parametrize("kernels", KERNELS)
def test_fault_08_large_bfloat16_values_do_not_overflow(kernels: str) -> None:
    """Values beyond fp16's 65504 in a bf16 cache."""
    case = gpu_case([400], select="identity")
    case.inputs["value_cache"].mul_(1e6)
    buffers = run(case, kernels)
    check(case, buffers)
    assert torch.isfinite(buffers.out).all()


@pytest.mark.parametrize("exponent", [-40, 0, 40])
def test_a_query_of_any_size_with_an_fp8_cache(exponent: int) -> None:
    """fp8 keys go through the fp16 product; the query must not overflow or vanish there."""
    case = gpu_case([300, 17], fp8=True, dim=128, select="identity")
    case.inputs["query"].mul_(2.0**exponent)
    case.options["scale"] *= 2.0**-exponent
    check(case, run(case, "cuda"))


@pytest.mark.parametrize("kernels", KERNELS)
def test_not_a_number_is_not_hidden(kernels: str) -> None:
    case = gpu_case([400], select="identity", heads=1)
    case.inputs["query"][0, 0, 0] = torch.nan
    buffers = run(case, kernels)
    assert torch.isnan(buffers.out[0, 0]).all()
    assert torch.isfinite(buffers.out[0, 1:]).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_count_of_zero_and_a_full_table(kernels: str) -> None:
    case = gpu_case([100, 100], heads=2, capacity=5, select="with_open")
    case.inputs["counts"][0, 0] = 0
    case.inputs["pages"][1, 1] = torch.tensor([0, 2, 3, 5, 6], dtype=torch.int32)
    case.inputs["counts"][1, 1] = 5
    buffers = run(case, kernels)
    check(case, buffers)
    assert not buffers.out[0, :4].any()


@pytest.mark.parametrize("kernels", KERNELS)
def test_more_pages_than_the_table_holds_are_all_attended(kernels: str) -> None:
    case = gpu_case([3000], select="identity", capacity=2)
    check(case, run(case, kernels))


def test_query_and_out_may_be_slices_of_larger_rows() -> None:
    case = gpu_case(dim=128)
    plain = run(case, "cuda")
    query = case.inputs["query"]
    rows = torch.full((query.shape[0], query.shape[1] + 4, 128), 7.0, dtype=query.dtype, device="cuda")
    rows[:, 2:-2] = query
    case.inputs["query"] = rows[:, 2:-2]
    buffers = Buffers(gpu_case(dim=128))
    wide = torch.full_like(rows, 7.0)
    buffers.out = wide[:, 2:-2]
    run(case, "cuda", buffers=buffers)
    assert torch.equal(wide[:, 2:-2], plain.out)
    assert (wide[:, :2] == 7).all()
    assert (wide[:, -2:] == 7).all()


def test_lse_is_optional() -> None:
    case = gpu_case(dim=128)
    plain, bare = run(case, "cuda"), Buffers(case)
    attend(**case.inputs, **case.options, out=bare.out, lse=None, scratch=bare.scratch, kernels="cuda")  # type: ignore[arg-type]
    assert torch.equal(bare.out, plain.out)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_triton_equals_cuda(dim: int, fp8: bool) -> None:
    case = gpu_case([3000, 0, 77, 16, 9000], dim=dim, fp8=fp8, heads=4, group=8)
    a, b = run(case, "cuda"), run(case, "triton")
    torch.testing.assert_close(a.out.float(), b.out.float(), rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(a.lse, b.lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cluster", [None, 1, 4])
def test_replay_of_a_graph_follows_new_lengths_and_counts(
    monkeypatch: pytest.MonkeyPatch, kernels: str, overlap: bool, cluster: int | None
) -> None:
    """Lengths, counts and tables change between replays of one graph; the tickets come back to zero each time. cluster None: as planned."""
    if (overlap or cluster) and kernels == "triton":
        pytest.skip("CUDA only")
    if cluster:
        monkeypatch.setattr("kvskim.ops.attend.attend_cluster", lambda *_: cluster)
    options: dict[str, Any] = dict(dim=128, block_size=64, capacity=250)
    cases = [gpu_case([4000, 1000, 64, 0], seed=seed, select=select, **options) for seed, select in enumerate(("identity", "with_open", "mixed"))]
    keywords = dict(overlap_previous=True) if overlap else {}
    live = Case({name: tensor.clone() for name, tensor in cases[0].inputs.items()}, cases[0].options)
    live.inputs["key_cache"], live.inputs["value_cache"] = torch.empty_like(_whole(cases[0])).unbind(1)
    buffers = Buffers(live)
    _copy(live, cases[0])
    run(live, kernels, buffers=buffers, **keywords)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # one after the other through the same scratch
            run(live, kernels, buffers=buffers, **keywords)
    for case in [*cases, cases[0]]:
        _copy(live, case)
        buffers.out.fill_(torch.nan)
        buffers.lse.fill_(torch.nan)
        buffers.scratch.attend_partials.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(case, buffers)
    live.inputs["seq_lens"].copy_(torch.tensor([17, 0, 0, 0], dtype=torch.int32))
    live.inputs["counts"].copy_(torch.tensor([[2, 2], [9, 9], [9, 9], [9, 9]], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert not buffers.out[1:].any()
    assert torch.isneginf(buffers.lse[1:]).all()
    check(Case({name: tensor.clone() for name, tensor in live.inputs.items()}, live.options), buffers)


def _whole(case: Case) -> torch.Tensor:
    key = case.inputs["key_cache"]
    blocks, size, heads, dim = key.shape
    return key.as_strided((blocks, 2, size, heads, dim), (key.stride(0), size * heads * dim, heads * dim, dim, 1), 0)


def _copy(live: Case, case: Case) -> None:
    for name, tensor in case.inputs.items():
        live.inputs[name].copy_(tensor)


@pytest.mark.parametrize("kernels", KERNELS)
def test_addresses_beyond_32_bits(kernels: str) -> None:
    """A cache of more than 2^32 elements, whose last blocks are used."""
    heads, dim, size = 8, 128, 64
    blocks = 2**32 // (2 * size * heads * dim) + 64
    cache = torch.empty(blocks, 2, size, heads, dim, dtype=torch.bfloat16, device="cuda")
    used = torch.tensor([blocks - 1, 3, blocks - 7, blocks - 2], device="cuda")
    cache[used] = torch.randn(4, 2, size, heads, dim, device="cuda").to(torch.bfloat16)
    small = make_case([250], heads=heads, dim=dim, block_size=size, select="identity", device="cuda")
    small.inputs["block_table"][0, :4] = used.int()
    small.inputs["key_cache"], small.inputs["value_cache"] = cache.unbind(1)
    got = run(small, kernels)
    near = Case(dict(small.inputs), small.options)
    near.inputs["block_table"] = torch.arange(5, dtype=torch.int32, device="cuda")[None]
    near.inputs["key_cache"], near.inputs["value_cache"] = cache[used].unbind(1)
    check(near, got)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("everything", [True, False])
def test_four_million_tokens(kernels: str, everything: bool) -> None:
    tokens, dim, size = 2**22, 64, 128
    blocks = tokens // size
    cache = torch.randn(blocks, 2, size, 1, dim, device="cuda").to(torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(1)
    total = tokens // 16
    chosen = torch.randperm(total, device="cuda", generator=generator)[:3000].sort().values.int()
    chosen[-1] = total - 1
    case = make_case([16], heads=1, dim=dim, block_size=size, select="identity", device="cuda")
    case.inputs["key_cache"], case.inputs["value_cache"] = cache.unbind(1)
    case.inputs["block_table"] = torch.randperm(blocks, device="cuda", generator=generator).int()[None]
    case.inputs["seq_lens"].fill_(tokens - 3)
    case.inputs["pages"] = chosen[None, None].contiguous()
    case.inputs["counts"].fill_(total if everything else 3000)
    got = run(case, kernels)
    wide = {name: tensor.float() if name in ("query", "key_cache", "value_cache") else tensor for name, tensor in case.inputs.items()}
    out, lse = torch.empty_like(wide["query"]), torch.empty_like(got.lse)
    attend_torch(**wide, **case.options, out=out, lse=lse)
    torch.testing.assert_close(got.out.float(), out, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(got.lse, lse, rtol=0, atol=2e-3)
    got.check_guards()
