"""attend without a GPU: torch, and the Triton kernels under the interpreter, against loops in float64."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

from attend_data import Buffers, Case, check, expected, make_case, run
from kvskim.ops.attend import attend
from kvskim.ops.attend_plan import (
    MAXIMUM_CLUSTER,
    MAXIMUM_SPLITS,
    PER_MULTIPROCESSOR,
    attend_cluster,
    attend_plan,
    attend_scratch_sizes,
    latent_plan,
)

LENGTHS = [0, 1, 15, 16, 17, 31, 32, 33, 200]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
IMPLEMENTATIONS = ["torch", pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1"))]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options",
    [
        dict(dtype=torch.bfloat16, select="identity"),
        dict(dtype=torch.float16, select="with_open", layout="packed", block_size=16),
        dict(dtype=torch.bfloat16, select="without_open", layout="permuted", block_size=64, softcap=30.0, group=1),
        dict(dtype=torch.float32, select="mixed", dim=96, group=3, softcap=30.0),
        dict(dtype=torch.bfloat16, select="mixed", fp8=True, dim=128, heads=1, group=16),
        dict(dtype=torch.float16, select="mixed", fp8=True, layout="packed", logit_scale=20.0),
        dict(dtype=torch.float32, select="single", logit_scale=100.0, block_size=48, heads=1),
    ],
)
def test_equals_the_definition(kernels: str, options: dict[str, Any]) -> None:
    for seed in range(2):
        case = make_case(LENGTHS, seed=seed, **options)
        check(case, run(case, kernels), truncated=kernels == "triton")


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_several_splits_are_merged(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvskim.ops.attend.multiprocessor_count", lambda device: 8)
    case = make_case([700, 0, 40], heads=1, group=2, dtype=torch.float32, select="identity")
    columns = case.inputs["block_table"].shape[1]
    assert attend_plan(3, 1, columns * 2, 8).splits > 4
    buffers = Buffers(case)
    check(case, run(case, kernels, buffers=buffers))
    buffers.out.fill_(torch.nan)
    floats = 3 * 2 * 66 * 3  # room for three splits
    buffers.scratch.attend_partials = buffers.scratch.attend_partials[:floats]
    check(case, run(case, kernels, buffers=buffers))


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_a_count_of_zero_and_a_full_table(kernels: str) -> None:
    case = make_case([100, 100], heads=2, capacity=5, select="with_open", dtype=torch.float32)
    case.inputs["counts"][0, 0] = 0
    case.inputs["pages"][1, 1] = torch.tensor([0, 2, 3, 5, 6], dtype=torch.int32)
    case.inputs["counts"][1, 1] = 5
    buffers = run(case, kernels)
    check(case, buffers, truncated=kernels == "triton")
    assert not buffers.out[0, :4].any()


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_more_pages_than_the_table_holds_are_all_attended(kernels: str) -> None:
    case = make_case([300], select="identity", capacity=2, dtype=torch.float32)
    check(case, run(case, kernels), truncated=kernels == "triton")


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_fault_08_large_bfloat16_values_do_not_overflow(kernels: str) -> None:
    """Values beyond fp16's 65504 in a bf16 cache."""
    case = make_case([40], select="identity", dtype=torch.bfloat16)
    case.inputs["value_cache"].mul_(1e6)
    buffers = run(case, kernels)
    check(case, buffers, truncated=kernels == "triton")
    assert torch.isfinite(buffers.out).all()


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_not_a_number_is_not_hidden(kernels: str) -> None:
    case = make_case([40], select="identity", dtype=torch.float32, heads=1)
    case.inputs["query"][0, 0, 0] = torch.nan
    buffers = run(case, kernels)
    assert torch.isnan(buffers.out[0, 0]).all()
    assert torch.isfinite(buffers.out[0, 1:]).all()


def test_float64_is_exact() -> None:
    case = make_case([50, 3], dtype=torch.float64, select="mixed")
    buffers = Buffers(case)
    check(case, run(case, "torch", buffers=buffers))
    assert torch.allclose(buffers.out, expected(case)[0], rtol=0, atol=1e-10)


def _broken(**changes: Any) -> dict[str, Any]:
    case = make_case([20], dtype=torch.float32)
    buffers = Buffers(case)
    return {**case.inputs, **case.options, "out": buffers.out, "lse": buffers.lse, "scratch": None, "kernels": "torch"} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(query=torch.zeros(8, 64)), "query has shape"),
        (dict(query=torch.zeros(1, 8, 128)), "head dim"),
        (dict(query=torch.zeros(1, 7, 64)), "shared among"),
        (dict(query=torch.zeros(1, 8, 64, dtype=torch.bfloat16)), "caches of"),
        (dict(key_cache=torch.zeros(4, 32, 2, 128)[..., ::2]), "cache"),
        (dict(key_cache=torch.zeros(4, 24, 2, 64), value_cache=torch.zeros(4, 24, 2, 64)), "blocks of 24"),
        (dict(counts=torch.zeros(1, 2, dtype=torch.int64)), "counts is"),
        (dict(pages=torch.zeros(1, 3, 4, dtype=torch.int32)), "pages is"),
        (dict(seq_lens=torch.zeros(2, dtype=torch.int32)), "seq_lens is"),
        (dict(block_table=torch.zeros(2, 2, dtype=torch.int32)), "block_table is"),
        (dict(out=torch.zeros(1, 8, 64, dtype=torch.bfloat16)), "out is"),
        (dict(lse=torch.zeros(8)), "lse is"),
        (dict(softcap=-1.0), "softcap"),
        (dict(kernels="numpy"), "kernels is"),
        (dict(kernels="triton"), "scratch"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**_broken(**changes))


def test_too_little_scratch_is_refused() -> None:
    arguments = _broken(kernels="triton", scratch=Buffers(make_case([20], dtype=torch.float32)).scratch)
    arguments["scratch"].attend_partials = arguments["scratch"].attend_partials[: 8 * 66 - 1]
    with pytest.raises(ValueError, match="attend_partials"):
        attend(**arguments)


@pytest.mark.parametrize(("requests", "heads"), [(1, 1), (1, 4), (1, 8), (8, 8), (32, 8), (256, 8), (64, 1)])
def test_plan_fills_the_gpu_and_fits_the_scratch(requests: int, heads: int) -> None:
    multiprocessors = 132
    for capacity in (1, 64, 8192, 262144):
        plan = attend_plan(requests, heads, capacity, multiprocessors)
        assert 1 <= plan.splits <= MAXIMUM_SPLITS
        assert plan.splits == 1 or plan.splits <= -(-capacity // plan.pages_per_split)
        floats, tickets = attend_scratch_sizes(requests, heads, 4, 128, capacity, multiprocessors)
        for rows in range(1, requests + 1):
            assert floats >= rows * heads * attend_plan(rows, heads, capacity, multiprocessors).splits * 4 * 130
        assert tickets == requests * heads
    long = attend_plan(requests, heads, 262144, multiprocessors)
    blocks = requests * heads * long.splits
    assert blocks >= min(MAXIMUM_SPLITS, multiprocessors)
    assert requests * heads > 8 * PER_MULTIPROCESSOR * multiprocessors or blocks <= 8 * PER_MULTIPROCESSOR * multiprocessors


def test_clusters_fill_the_gpu_and_run_at_once() -> None:
    multiprocessors = 132
    for rows in range(1, 400):
        for capacity in (1, 3, 64, 8192, 262144):
            cluster = attend_cluster(rows, 1, capacity, multiprocessors)
            assert cluster in (1, 2, 4, 8, MAXIMUM_CLUSTER)
            assert cluster == attend_cluster(1, rows, capacity, multiprocessors)
            assert cluster == 1 or rows * cluster <= multiprocessors or (cluster == 2 and rows <= multiprocessors)
            assert cluster < 2 * capacity
            if capacity >= 64 and 4 < rows <= multiprocessors:
                assert 2 * rows * cluster > multiprocessors  # more than half of it
    assert attend_cluster(1, 8, 1024, multiprocessors) == 16
    assert attend_cluster(8, 8, 8192, multiprocessors) == 2
    assert attend_cluster(1, 1, 64, multiprocessors) == 16  # a short request, however few the rows
    assert attend_cluster(1, 1, 262144, multiprocessors) == 1  # needs more splits than a cluster has
    assert attend_cluster(32, 8, 8192, multiprocessors) == 1


def test_clusters_of_latent_attention_fill_the_gpu_and_fit_the_scratch() -> None:
    multiprocessors = 132
    for rows in range(1, 400):
        for capacity in (1, 3, 64, 8192, 262144):
            plan = latent_plan(rows, 1, capacity, multiprocessors)
            assert plan == latent_plan(1, rows, capacity, multiprocessors)
            assert 1 <= plan.cluster <= min(MAXIMUM_CLUSTER, capacity)
            assert plan.clusters == 1 or (plan.clusters - 1) * plan.cluster * plan.pages_per_split < capacity
            blocks = rows * plan.cluster * plan.clusters
            assert plan.crowded == (rows > multiprocessors)
            assert blocks <= multiprocessors or plan.crowded
            if capacity >= 8192 and rows <= 4 * multiprocessors:
                assert 2 * blocks > multiprocessors  # more than half of it
            floats, tickets = attend_scratch_sizes(rows, 1, 40, 512, capacity, multiprocessors)
            assert tickets == rows * 3 * MAXIMUM_CLUSTER
            assert floats >= rows * 40 * 514
    assert latent_plan(16, 1, 4096, multiprocessors).cluster == 8
    assert latent_plan(1, 1, 8192, multiprocessors).clusters == 8  # a whole long request
    assert latent_plan(300, 1, 8192, multiprocessors).clusters == 7  # long requests of a ragged batch


def test_case_generator_makes_what_it_says() -> None:
    """The page tables of the tests are ascending, within the request, and leave out the open page when they should."""
    case: Case = make_case([100, 260], select="without_open", seed=3)
    for r, length in enumerate((100, 260)):
        total = -(-length // 16)
        for h in range(2):
            count = int(case.inputs["counts"][r, h])
            listed = case.inputs["pages"][r, h, :count].tolist()
            assert listed == sorted(set(listed))
            assert all(0 <= p < total for p in listed)
            assert listed == [total - 1] or total - 1 not in listed
