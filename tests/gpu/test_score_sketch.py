"""The sketch score kernels on a GPU: CUDA (Hopper) and Triton against a float64 reference on fresh random inputs with poisoned outputs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvskim.layout import padded_group
from kvskim.ops import score as op
from kvskim.ops.write_cache import write_cache
from kvskim.selectors.sketch import Sketch
from mla_data import in_parts
from sketch_cases import SketchCase, compare

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kvskim.ops.cuda.library import availability

AVAILABLE, REASON = availability()
KERNELS = [pytest.param("cuda", marks=pytest.mark.skipif(not AVAILABLE, reason=REASON)), "triton"]
cuda_only = pytest.mark.skipif(not AVAILABLE, reason=REASON)
DEVICE = "cuda"


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def make_case(kernels: str, **settings: Any) -> SketchCase:
    lengths, heads, group = settings["lengths"], settings.get("heads", 2), settings.get("group", 4)
    capacity = max(1, -(-max(lengths) // 16)) + 3
    settings.setdefault("chunks", op.chunk_count(len(lengths), heads, group, capacity, multiprocessors(), kernels))
    return SketchCase(**settings, device=DEVICE)


def run(
    case: SketchCase, kernels: str, scratch: Any = None, out: dict[str, Tensor] | None = None, overlap: bool = False, settled: bool = False,
    full_pages: int = 0, queries_settled: bool = False,
) -> dict[str, Tensor]:
    out = case.outputs() if out is None else out
    op.score(
        Sketch(case.record_bytes), case.tables, **case.inputs, **case.settings(), **out, scratch=scratch or case.scratch(), kernels=kernels,
        overlap=overlap, settled=settled, full_pages=full_pages, queries_settled=queries_settled,
    )
    return out


def kernel_weights(case: SketchCase, scratch: Tensor) -> Tensor:
    """The int8 weights that the preparation kernel wrote, in slot order, ``[R, H, G, slots]``; layout as in score_sketch.cuh."""
    layout, columns = case.tables.layout, padded_group(case.group)
    requests, block = len(case.lengths), min(columns, 16)
    raw = scratch[: requests * case.heads * columns * 1024].view(torch.int8)
    if block == 16:  # product, column / 2, q, half, column % 2, byte
        raw = raw.view(requests, case.heads, columns // block, 32, 8, 4, 2, 2, 4).permute(0, 1, 2, 3, 4, 7, 6, 5, 8)
    else:  # product / 2, column, q, product % 2, half, byte
        raw = raw.view(requests, case.heads, 1, 16, block, 4, 2, 2, 4).permute(0, 1, 2, 3, 6, 4, 7, 5, 8)
    raw = raw.reshape(requests, case.heads, columns // block, 32, block, 32)  # block, product, column, slot of the half row
    products = [
        (mode, (word - layout.word_start[mode]) // 2)
        for parity in (0, 1) for word in range(0, 16, 2) for position in (3, 2, 1, 0) for mode in range(parity, 16, 2)
        if layout.position[mode] == position and 0 <= word - layout.word_start[mode] < 2 * layout.half_rows[mode]
    ]
    weights = torch.zeros(requests, case.heads, columns, 1024, device=raw.device)
    for n, (mode, half_row) in enumerate(products):
        start = layout.mode_start[mode] + 32 * half_row
        weights[..., start : start + 32] = raw[:, :, :, n].reshape(requests, case.heads, columns, 32).float()
    return weights[:, :, : case.group]


LENGTHS = [0, 1, 15, 16, 17, 33, 255, 256, 257, 4000, 20000]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", range(1, 17))
def test_every_group(kernels: str, group: int) -> None:
    case = make_case(kernels, lengths=LENGTHS, group=group, dim=128, seed=group, layout=("tokens", "heads", "interleaved")[group % 3])
    assert compare(case, run(case, kernels), score_tolerance=0.03) == []


@cuda_only
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 6, 8, 20])
@pytest.mark.parametrize("group", [3, 8, 16])
def test_warps_of_a_block_have_one_head_or_several(group: int, chunks: int) -> None:
    """A block of four warps has one kv head where the chunks are a multiple of four; some of its warps then have no tile."""
    case = make_case("cuda", lengths=LENGTHS, heads=3, group=group, dim=64, chunks=chunks, seed=chunks)
    assert compare(case, run(case, "cuda", overlap=True, settled=True), score_tolerance=0.03) == []


WIDE = [17, 32, 33, 64, 100, 128]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dim", [96, 128, 576])
@pytest.mark.parametrize("group", WIDE)
def test_every_wide_group(kernels: str, group: int, dim: int) -> None:
    """More query heads than a kernel takes together; padded blocks of columns, some with few query heads and some with none."""
    dtype = torch.float16 if group % 2 else torch.bfloat16
    case = make_case(kernels, lengths=LENGTHS[:-1], heads=1 if dim == 576 else 2, group=group, dim=dim, seed=group, dtype=dtype, block_size=32)
    assert compare(case, run(case, kernels), score_tolerance=0.03) == []


@cuda_only
@pytest.mark.parametrize(("group", "heads", "dim", "split"), [(16, 1, 576, 512), (3, 2, 320, 256), (40, 2, 96, 32), (128, 1, 576, 512), (17, 3, 192, 160)])
def test_a_query_in_parts_is_scored_like_one_in_one_piece(group: int, heads: int, dim: int, split: int) -> None:
    """Every bit: the products are the same, in the same order. The parts lie apart, with NaN between their rows."""
    for lengths in ([3000, 0, 40], [(37 * r + 5) % 90 for r in range(20)]):
        case = make_case("cuda", lengths=lengths, heads=heads, group=group, dim=dim, seed=group)
        wanted = run(case, "cuda")
        whole = case.inputs["query"]
        case.inputs["query"] = in_parts(whole, split)
        assert op.reads_parts(case.inputs["query"], case.tables, "cuda")
        out = run(case, "cuda")
        case.inputs["query"] = whole
        assert compare(case, out, score_tolerance=0.03) == []
        for name in out:
            assert torch.equal(out[name].nan_to_num(-7.0), wanted[name].nan_to_num(-7.0)), name


@cuda_only
def test_a_block_of_query_heads_is_scored_as_if_it_were_alone() -> None:
    case = make_case("cuda", lengths=[5000, 17, 0, 300], heads=1, group=128, dim=576, seed=3)
    out = run(case, "cuda")
    whole = case.inputs["query"]
    for first in (0, 48, 112):
        alone = make_case("cuda", lengths=case.lengths, heads=1, group=16, dim=576, seed=3, chunks=case.chunks)
        alone.tables, alone.inputs = case.tables, {**case.inputs, "query": whole[:, first : first + 16]}
        part = run(alone, "cuda")
        for name in out:
            assert torch.equal(out[name][..., first : first + 16].nan_to_num(-7.0), part[name].nan_to_num(-7.0)), (name, first)


@cuda_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [320, 576])
@pytest.mark.parametrize("group", [16, 40])
def test_long_rows_in_a_batch_are_scored_as_in_any_other(group: int, dim: int, dtype: torch.dtype) -> None:
    """Every bit, from a request to more than the GPU has room for at once: more columns are prepared by a block as the batch grows."""
    lengths = [700] + [(53 * r) % 400 for r in range(39)]
    case = make_case("cuda", lengths=lengths, heads=1, group=group, dim=dim, dtype=dtype, seed=dim + group)
    out = run(case, "cuda")
    assert compare(case, out, score_tolerance=0.03) == []
    for count in (1, 4, 12, 20):
        part = make_case("cuda", lengths=lengths[:count], heads=1, group=group, dim=dim, dtype=dtype, seed=1, chunks=case.chunks)
        own = {name: case.inputs[name][:count] for name in ("query", "block_table", "seq_lens")}
        part.tables, part.inputs = case.tables, {**case.inputs, **own}
        for name, tensor in run(part, "cuda").items():
            assert torch.equal(tensor.nan_to_num(-7.0), out[name][:count].nan_to_num(-7.0)), (name, count)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 576])
def test_every_head_dim(kernels: str, dim: int, dtype: torch.dtype) -> None:
    generator = random.Random(dim)
    lengths = [generator.choice(LENGTHS) for _ in range(5)] + [777]
    case = make_case(kernels, lengths=lengths, heads=1 if dim == 576 else 3, group=16 if dim == 576 else 7, dim=dim, dtype=dtype, block_size=64, seed=dim)
    assert compare(case, run(case, kernels), score_tolerance=0.03) == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("float8", [False, True], ids=["", "float8"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_blocks_windows_softcap(kernels: str, block_size: int, float8: bool) -> None:
    for seed, (sink, window, softcap, layout) in enumerate([(0, 1, 0.0, "heads"), (1, 1, 30.0, "tokens"), (3, 9, 0.0, "interleaved"), (40, 70, 5.0, "tokens")]):
        case = make_case(
            kernels, lengths=[0, 5, 100, 1600, 5000], group=4, dim=64, block_size=block_size, float8=float8, sink_pages=sink, window_pages=window,
            softcap=softcap, layout=layout, seed=seed,
        )
        assert compare(case, run(case, kernels), score_tolerance=0.03) == [], (sink, window, softcap, layout)


@cuda_only
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("group", [16, 40])
def test_windows_of_wide_groups(group: int, block_size: int) -> None:
    """Blocks of 16 columns have a scan of their own."""
    for seed, (sink, window, layout) in enumerate([(0, 1, "heads"), (1, 1, "tokens"), (3, 9, "interleaved"), (40, 70, "tokens")]):
        case = make_case(
            "cuda", lengths=[0, 5, 16, 17, 100, 1600, 5000], group=group, dim=64, block_size=block_size, sink_pages=sink, window_pages=window, layout=layout,
            seed=seed,
        )
        assert compare(case, run(case, "cuda", overlap=True, settled=True), score_tolerance=0.03) == [], (sink, window, layout)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", [3, 8, 12])
def test_many_requests(kernels: str, group: int) -> None:
    generator = random.Random(group)
    lengths = [generator.choice([0, 1, 16, 17, 100, 300, 3000]) for _ in range(200)]
    case = make_case(kernels, lengths=lengths, heads=4, group=group, dim=128, dtype=torch.float16 if group == 8 else torch.bfloat16, seed=group)
    assert compare(case, run(case, kernels), score_tolerance=0.03) == []


@cuda_only
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("group", [4, 8, 16, 33, 128])
def test_requests_that_are_attended_whole_are_left_alone(group: int, settled: bool) -> None:
    """Nothing is written for them, and the others get what they get without them. A CTA of weights serves several requests, here of both kinds."""
    lengths = [4000, 160, 161, 0, 17, 160, 20, 5000, 16, 160, 31]
    case = make_case("cuda", lengths=lengths, group=group, dim=128, seed=group)
    out = run(case, "cuda", overlap=settled, settled=settled, full_pages=10)
    short = [r for r, length in enumerate(lengths) if length <= 160]
    for tensor in out.values():
        assert bool(tensor[short].isnan().all())
    untouched = run(case, "cuda")
    for name, tensor in out.items():
        tensor[short] = untouched[name][short]
    assert compare(case, out, score_tolerance=0.03) == []


@pytest.mark.parametrize("record_bytes", [128, 192, 384])
def test_other_record_sizes(record_bytes: int) -> None:
    case = make_case("triton", lengths=[0, 17, 3000], group=5, dim=128, record_bytes=record_bytes)
    assert compare(case, run(case, "triton"), score_tolerance=0.03) == []


@cuda_only
@pytest.mark.parametrize("group", [1, 4, 5, 8, 11, 16, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_scores_follow_the_rounded_weights(group: int, dtype: torch.dtype) -> None:
    """Against the kernel's own int8 weights the scores are exact up to float16; the weights differ from the reference's by ties only."""
    case = make_case("cuda", lengths=[0, 40, 9000], group=group, dim=128, dtype=dtype, seed=group)
    scratch = case.scratch()
    out = run(case, "cuda", scratch)
    weights = kernel_weights(case, scratch.sketch_weights)
    rounded, scales = case.rounded_weights()
    live = [r for r in range(3) if case.scored_pages(r)]
    difference = (weights[live] - rounded[live]).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-3
    assert compare(case, out, score_tolerance=4e-3, weights=(weights, scales)) == []


@pytest.mark.parametrize("kernels", KERNELS)
def test_four_million_tokens(kernels: str) -> None:
    case = make_case(kernels, lengths=[4 * 2**20 - 5, 70000], heads=1, group=8, dim=64, block_size=128)
    out = run(case, kernels)
    rounded, scales = case.rounded_weights()
    for r in range(2):
        pages = case.scored_pages(r)
        written = out["scores"][r, :, :pages].float()
        assert written.isfinite().all()
        assert out["scores"][r, :, pages:].isnan().all()
        sample = torch.randint(0, pages, (4000,), device=DEVICE)
        sample[:2] = torch.tensor([0, pages - 1])
        wanted = case.expected_scores(r, rounded, scales, sample)
        assert (written[:, sample, :8].double() - wanted).abs().max() < 0.03
        terms = (written[:, 1:, :8].double() - out["forced"][r, :, None, :8].double()).clamp_max(83).exp().sum(1)
        sums = out["partials"][r, :, :, :8].double()
        sums = sums[:, : -(-pages // 16)].sum(1)
        assert ((sums - terms).abs() / terms).max() < 5e-3


@cuda_only
@pytest.mark.parametrize("settled", [False, True], ids=["", "settled"])
@pytest.mark.parametrize("group", [4, 8, 16, 128])
def test_graph_with_overlapped_launches_equals_eager(group: int, settled: bool) -> None:
    """Twenty layers back to back, each launch allowed to begin before the one ahead has ended, with one scratch for all."""
    cases = [make_case("cuda", lengths=[3000, 0, 17, 9000], group=group, dim=128, seed=s) for s in range(20)]
    scratch = cases[0].scratch()
    wanted = [run(case, "cuda", case.scratch()) for case in cases]
    got = [case.outputs() for case in cases]
    for case, out in zip(cases, got):
        run(case, "cuda", scratch, out, overlap=True, settled=settled)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for case, out in zip(cases, got):
            run(case, "cuda", scratch, out, overlap=True, settled=settled)
    for _ in range(3):
        for out in got:
            for tensor in out.values():
                tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for index, (a, b) in enumerate(zip(got, wanted)):
            for name in a:
                assert torch.equal(a[name].nan_to_num(-7.0), b[name].nan_to_num(-7.0)), f"{name} of layer {index} differs"


@cuda_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 5, 20])
@pytest.mark.parametrize("requests", [1, 2, 5, 9, 16, 33])
def test_every_split_of_the_preparation(requests: int, heads: int, dtype: torch.dtype) -> None:
    """One, two, four and eight column tiles a CTA, one and two requests a CTA of always-attended pages, slices that the batch does not fill."""
    check_split(requests, heads, 64, dtype)


@cuda_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 96, 128])
def test_eight_column_tiles_of_every_short_row(dim: int, dtype: torch.dtype) -> None:
    """Queries of many requests pass through shared memory; the last requests fill no block."""
    check_split(35, 9, dim, dtype)


@cuda_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("requests", [1, 9, 33])
def test_every_split_of_the_preparation_of_long_rows(requests: int, heads: int, dtype: torch.dtype) -> None:
    check_split(requests, heads, 256, dtype)


def check_split(requests: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    lengths = [(37 * r + 5) % 90 for r in range(requests)]
    case = make_case("cuda", lengths=lengths, heads=heads, group=(3, 8, 11)[requests % 3], dim=dim, dtype=dtype, seed=requests)
    assert compare(case, run(case, "cuda"), score_tolerance=0.03) == []


@cuda_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "group"), [(64, 7), (256, 7), (96, 20)])
def test_float8_keys_with_queries_of_both_types(dim: int, group: int, dtype: torch.dtype) -> None:
    """Of the pages that are always attended: rows of one load and of several, and groups in blocks."""
    case = make_case("cuda", lengths=[0, 5, 100, 1600, 33], group=group, dim=dim, dtype=dtype, float8=True, sink_pages=2, window_pages=3, seed=dim)
    assert compare(case, run(case, "cuda"), score_tolerance=0.03) == []


@cuda_only
def test_a_query_written_by_the_preceding_kernel_is_seen() -> None:
    """Queries and open keys may come from the kernel right ahead of an overlapped, settled launch; only records may be read early."""
    case = make_case("cuda", lengths=[3000, 17, 9000], group=4, dim=128)
    wanted = run(case, "cuda")
    query, keys = case.inputs["query"].clone(), case.inputs["key_cache"].clone()
    out, scratch = case.outputs(), case.scratch()
    for _ in range(5):
        case.inputs["query"].fill_(torch.nan)
        case.inputs["key_cache"].zero_()
        case.inputs["key_cache"].copy_(keys)
        case.inputs["query"].copy_(query)
        run(case, "cuda", scratch, out, overlap=True, settled=True)
        torch.cuda.synchronize()
        for name in out:
            assert torch.equal(out[name].nan_to_num(-7.0), wanted[name].nan_to_num(-7.0)), name


@cuda_only
@pytest.mark.parametrize(("group", "dim", "dtype"), [(4, 128, torch.bfloat16), (8, 128, torch.float16), (16, 576, torch.bfloat16), (40, 96, torch.bfloat16)])
def test_queries_may_be_read_while_the_keys_are_written(group: int, dim: int, dtype: torch.dtype) -> None:
    """The kernel ahead writes the newest keys, the one before that the queries; twenty steps back to back in a graph, none waits for the host."""
    lengths = [3000, 17, 9000, 0, 40]
    case = make_case("cuda", lengths=lengths, heads=1 if dim == 576 else 2, group=group, dim=dim, dtype=dtype)
    wanted = run(case, "cuda")
    query, keys = case.inputs["query"].clone(), case.inputs["key_cache"]
    live = [r for r, length in enumerate(lengths) if length]
    slots = torch.tensor(
        [int(case.inputs["block_table"][r, (lengths[r] - 1) // 16]) * 16 + (lengths[r] - 1) % 16 for r in live], dtype=torch.int64, device=DEVICE,
    )
    newest, values, scratch = keys.flatten(0, 1)[slots], torch.zeros_like(keys), case.scratch()
    outputs = [case.outputs() for _ in range(20)]

    def steps() -> None:
        for out in outputs:
            case.inputs["query"].fill_(torch.nan)
            keys.flatten(0, 1).index_fill_(0, slots, 0.0)
            case.inputs["query"].copy_(query)
            assert write_cache(newest, newest, keys, values, slots, kernels="cuda", overlap=True)
            run(case, "cuda", scratch, out, overlap=True, settled=True, queries_settled=True)

    steps()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    for _ in range(3):
        for out in outputs:
            for tensor in out.values():
                tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for index, out in enumerate(outputs):
            for name in out:
                assert torch.equal(out[name].nan_to_num(-7.0), wanted[name].nan_to_num(-7.0)), f"{name} of step {index}"


@cuda_only
def test_graph_follows_the_lengths() -> None:
    case = make_case("cuda", lengths=[5000, 3000, 8000], group=4, dim=128)
    scratch, out = case.scratch(), case.outputs()
    run(case, "cuda", scratch, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(case, "cuda", scratch, out)
    case.lengths = [0, 2999, 17]
    case.inputs["seq_lens"].copy_(torch.tensor(case.lengths, dtype=torch.int32))
    for tensor in out.values():
        tensor.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert compare(case, out, score_tolerance=0.03) == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group", [4, 8, 16, 40])
def test_nan_query_selects_instead_of_hiding(kernels: str, group: int) -> None:
    """Of its own query head alone."""
    case = make_case(kernels, lengths=[5000], group=group, dim=128)
    wanted = run(case, kernels)["scores"]
    case.inputs["query"][0, 1] = torch.nan
    scores = run(case, kernels)["scores"]
    pages = case.scored_pages(0)
    assert (scores[0, 0, :pages, 1].float() >= 60_000).all()
    others = [member for member in range(group) if member != 1]
    assert torch.equal(scores[0, 0, :pages, others], wanted[0, 0, :pages, others])
    assert torch.equal(scores[0, 1, :pages, :group], wanted[0, 1, :pages, :group])


@cuda_only
@pytest.mark.parametrize("group", [4, 8, 16])
def test_scores_are_not_off_on_average(group: int) -> None:
    """Errors of single scores may be larger, but they cancel."""
    case = make_case("cuda", lengths=[40000], group=group, dim=128, seed=group)
    scratch = case.scratch()
    out = run(case, "cuda", scratch)
    wanted = case.expected_scores(0, kernel_weights(case, scratch.sketch_weights), case.rounded_weights()[1])
    assert (out["scores"][0, :, : case.scored_pages(0), :group].double() - wanted).mean().abs() < 2.5e-4


@pytest.mark.parametrize("kernels", KERNELS)
def test_huge_logits_stay_finite(kernels: str) -> None:
    case = make_case(kernels, lengths=[2000], group=8, dim=128)
    case.inputs["query"] *= 3e4
    out = run(case, kernels)
    pages = case.scored_pages(0)
    assert out["scores"][0, :, :pages].float().abs().max() <= 60_000
    assert not out["partials"][0, :, : -(-pages // 16)].isnan().any()


def test_operators_have_fake_implementations() -> None:
    from kvskim.ops.cuda.score_sketch import score_sketch

    if not AVAILABLE:
        pytest.skip(REASON)
    case = make_case("cuda", lengths=[500], group=4, dim=128)
    scratch, out = case.scratch(), case.outputs()
    run(case, "cuda", scratch, out)
    arguments = (
        case.inputs["records"], case.inputs["block_table"], case.inputs["seq_lens"], scratch.sketch_weights, out["forced"], out["scores"],
        out["partials"], case.group, case.block_size, case.sink_pages, case.window_pages, 0, 0,
    )
    torch.library.opcheck(score_sketch, arguments, test_utils=("test_schema", "test_faketensor"))
