"""Scores of the selectors that code each page by itself, on a GPU against torch on the CPU: group sizes, head dims and types that kernels could get wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvskim.layout import padded_group
from kvskim.ops.score import chunk_count, score, scorer
from kvskim.selectors import get_selector
from step_data import make_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
LENGTHS = [0, 1, 15, 16, 17, 33, 700, 2600]
SHAPES = [(1, 64), (2, 64), (3, 96), (4, 128), (5, 128), (6, 256), (7, 64), (8, 128), (9, 96), (12, 128), (15, 64), (16, 256), (16, 576)]
CUDA_SHAPES = [(3, 256), (10, 64), (11, 128), (13, 256)]
"""With the others: both types of query at every head dim of the CUDA kernel, in groups of up to and of more than eight."""
FORMATS = [
    ("mean", {}), ("minmax", {}), ("minmax", {"bits": 4}), ("r8", {}), ("r8", {"rank": 6}), ("rki4", {}), ("rki4", {"rank": 2}), ("quad", {}), ("clse", {}),
]


@pytest.mark.parametrize(
    ("group", "dim", "kernels"), [*((*shape, kernels) for kernels in ("cuda", "triton") for shape in SHAPES), *((*shape, "cuda") for shape in CUDA_SHAPES)]
)
@pytest.mark.parametrize(("selector", "options"), FORMATS, ids=str)
def test_scores_of_every_group_and_head_dim(selector: str, options: dict[str, int], group: int, dim: int, kernels: str) -> None:
    if scorer(get_selector(selector, **options), kernels, dim, group, (torch.bfloat16, torch.float16)[group % 2]) != kernels:
        pytest.skip("scored by Triton")
    heads = 1 if dim == 576 else 3
    dtype = (torch.bfloat16, torch.float16)[group % 2]
    batch = make_batch(selector, LENGTHS, heads=heads, group=group, dim=dim, block_size=32, dtype=dtype, seed=group, **options)
    # The CUDA kernel takes caches of a multiple of 16 bytes; the records that fill this one up belong to nobody.
    spare = batch.records.new_full((-batch.records.shape[0] % 16, *batch.records.shape[1:]), 255)
    batch = replace(batch, records=torch.cat((batch.records, spare)))
    capacity, columns = batch.page_capacity, padded_group(group)
    results = []
    for device, used, scores_dtype in (("cpu", "torch", torch.float32), (DEVICE, kernels, torch.float16)):
        there = batch.to(device)
        rows = (len(LENGTHS), heads)
        chunks = min(7, chunk_count(*rows, group, capacity, 132, "triton"))
        out = dict(
            scores=torch.full((*rows, capacity, columns), math.nan, dtype=scores_dtype, device=device),
            base=torch.full((*rows, columns), math.nan, device=device),
            forced=torch.full((*rows, columns), math.nan, device=device),
            partials=torch.full((*rows, chunks, columns), math.nan, device=device),
        )
        score(
            there.selector, there.tables, there.query, there.key_cache, there.records, there.block_table, there.seq_lens, scale=there.scale, sink_pages=1,
            window_pages=1, **out, scratch=None, kernels=used,
        )
        results.append({name: tensor[..., :group].float().cpu() for name, tensor in out.items()})
    wanted, got = results
    # Some chunks have several tiles of pages, some one.
    for r, length in enumerate(LENGTHS):
        pages = max(0, -(-length // 16) - 1)
        assert bool(got["scores"][r, :, pages:].isnan().all()), "scores of pages in the window were written"
        if length:
            torch.testing.assert_close(got["forced"][r], wanted["forced"][r], atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(got["base"][r], wanted["base"][r], atol=2e-3, rtol=1e-3)
        expected = wanted["scores"][r, :, :pages]
        error = (got["scores"][r, :, :pages] - expected).abs() - expected.abs() * 2.0**-10
        assert bool((error <= 0.02).all()), f"request of {length} tokens: scores differ by {float(error.max()):.3f}"
        tiles = min(chunks, -(-pages // 16))
        for chunk in range(tiles):
            terms = (got["scores"][r, :, :pages] - got["forced"][r, :, None]).clamp_max(83).exp()
            mine = [p for p in range(1, pages) if p // 16 % chunks == chunk]
            torch.testing.assert_close(got["partials"][r, :, chunk], terms[:, mine].sum(1), atol=1e-6, rtol=5e-3)
