"""What attention to selected pages costs in several shapes; with --host also with a share of the values in host memory. On a GPU.

    python benchmarks/attend_shapes.py [--host]

Microseconds of one launch, median of replays of a CUDA graph over rotating buffers, and bytes of K and V per second. ``--host`` needs the
repository: it uses `tests/gpu/vllm/tier_operations.py` and `tier_missing.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvskim.bench.timing import Timing, time_graph
from kvskim.layout import PAGE_TOKENS
from kvskim.ops.attend import attend, required_partials

SHAPES = (
    # requests, pages of each, selected, kv heads, query heads of each, head dim
    (1, 8192, 128, 8, 4, 128), (8, 4096, 128, 8, 4, 128), (8, 2048, 32, 8, 4, 128), (32, 1024, 128, 8, 4, 128), (1, 16384, 128, 4, 8, 128),
    (4, 16384, 128, 2, 16, 128), (1, 256, 256, 8, 4, 128), (32, 256, 256, 8, 4, 128), (8, 2048, 128, 8, 4, 64), (8, 2048, 128, 4, 4, 256),
)
FLOAT8 = (8, 2048, 128, 8, 4, 128)
BUFFER_BYTES = 40 << 30
"""Of all caches that take turns."""
LOST = (0.0, 0.01, 0.03, 0.066, 0.12, 0.25, 1.0)
"""Shares of a hot cache that are lost."""


def measure(requests: int, pages: int, selected: int, kv_heads: int, group: int, dim: int, dtype: torch.dtype) -> tuple[Timing, int]:
    """Time of attention, and the bytes of K and V that it reads."""
    total = requests * pages
    count = max(2, min(6, BUFFER_BYTES // (total * PAGE_TOKENS * kv_heads * dim * 4)))

    def cache() -> Tensor:
        return torch.randn(total, PAGE_TOKENS, kv_heads, dim, device="cuda").to(dtype)

    caches = [(cache(), cache()) for _ in range(count)]
    block_table = torch.randperm(total, device="cuda").int().view(requests, pages)
    lengths = torch.full((requests,), pages * PAGE_TOKENS, device="cuda", dtype=torch.int32)
    query = torch.randn(requests, kv_heads * group, dim, device="cuda", dtype=torch.bfloat16)
    tables = [
        torch.rand(requests, kv_heads, pages, device="cuda").argsort(-1)[..., :selected].sort(-1).values.int().contiguous() for _ in range(count)
    ]
    counts = torch.full((requests, kv_heads), selected, device="cuda", dtype=torch.int32)
    scratch: Any = SimpleNamespace(
        attend_partials=torch.empty(required_partials(query, *caches[0], block_table), device="cuda"),
        attend_tickets=torch.zeros(requests * kv_heads, device="cuda", dtype=torch.int32),
    )
    out = torch.empty_like(query)

    def launch(keys: Tensor, values: Tensor, table: Tensor) -> None:
        attend(query, keys, values, block_table, lengths, table, counts, scale=dim**-0.5, out=out, scratch=scratch, kernels="cuda", overlap_previous=True)

    time = time_graph([lambda k=keys, v=values, t=table: launch(k, v, t) for (keys, values), table in zip(caches, tables)])
    return time, requests * kv_heads * selected * PAGE_TOKENS * dim * 2 * caches[0][0].element_size()


def measure_host() -> None:
    """Attention of 8 requests to 32 of 2,048 pages each, whose values are in host memory, by how many of them are not hot."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/gpu/vllm"))
    import tier_operations
    from tier_missing import WHOLE, lose

    from kvskim.ops.fetch import fetch

    case = tier_operations.Case(8, 2048, 32, parts=1)
    pages = case.selection(0)
    resident = time_graph([lambda v=values: case.attend(v, pages) for values in case.values])
    print(f"values in GPU memory: {resident.median:.1f} us")
    page_bytes = PAGE_TOKENS * tier_operations.DIM * 2
    for lost in LOST:
        tiers = case.tiers(2)
        share = torch.full((1,), round(WHOLE * lost), device="cuda", dtype=torch.int32)
        for tier in tiers:
            case.fetch(tier, pages, "cuda")
            lose(tier, share)
        time = time_graph([lambda t=tier: case.attend(t, pages) for tier in tiers]).median
        missing = []
        for tier in tiers:
            before = tier.counters.clone()
            fetch(
                tier, case.block_table, case.seq_lens, pages, case.counts, block_size=PAGE_TOKENS, scratch=case.scratch, kernels="cuda", copies=False,
            )
            missing.append(int((tier.counters - before)[1]))
        mean = sum(missing) / len(missing)
        print(f"{mean:.0f} of {pages.numel()} pages missing, {mean * page_bytes / 1e6:.2f} MB: {time:.1f} us")
    case.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="values in host memory instead of the shapes")
    if parser.parse_args().host:
        measure_host()
        return
    for shape, dtype in (*((shape, torch.bfloat16) for shape in SHAPES), (FLOAT8, torch.float8_e4m3fn)):
        requests, pages, selected, kv_heads, group, dim = shape
        time, nbytes = measure(*shape, dtype)
        print(
            f"{requests} requests, {selected} of {pages} pages, {kv_heads} kv heads of {group} query heads, head dim {dim}, {dtype}: "
            f"{time.median:.2f} us, {nbytes / time.median / 1e6:.2f} TB/s", flush=True,
        )


if __name__ == "__main__":
    main()
