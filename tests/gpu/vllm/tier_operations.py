"""Times of the operations on pages in host memory, head size 128, 8 kv heads of 4 query heads, one layer: CUDA graphs over several layers, medians.

The hot cache has as many slots as a selection has pages, and two selections take turns that differ in a share of their pages: so that share is missing in each
fetch. "resident" is attention with all in GPU memory. In larger hot caches, through which a fetch looks for victims, a share of all copies is lost before each
fetch instead, and the time of losing them taken off.

    python tests/gpu/vllm/tier_operations.py --variant mem-kv
"""

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from common import table
from tier_missing import WHOLE, lose
from torch import Tensor

from kvskim.bench.timing import time_graph
from kvskim.ops.attend import attend, required_partials
from kvskim.ops.attend_tiered import attend_tiered
from kvskim.ops.fetch import fetch, fetch_scratch
from kvskim.tier.host_memory import HostMemory
from kvskim.tier.pages import HostTier, make_tier

HEADS, GROUP, DIM, LAYERS = 8, 4, 128, 3
CASES = {"1 x 128K": (1, 8192, 410), "8 x 32K": (8, 2048, 102), "32 x 16K": (32, 1024, 51)}
MISSING = (0.0, 0.02, 0.1, 1.0)
LARGER, LOST = (1, 8, 32), 0.02
"""Sizes of hot caches in selections, and the share of them that is lost in each step."""


class Case:
    """``rows`` requests of ``pages`` pages each, of which ``chosen`` are selected for each kv head. ``parts``: 1 with values on the host, 2 with keys too."""

    def __init__(self, rows: int, pages: int, chosen: int, parts: int) -> None:
        self.rows, self.pages, self.chosen, self.parts = rows, pages, chosen, parts
        total = rows * pages
        self.keys = torch.randn(total, 16, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.values = [torch.randn(total, 16, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.block_table = torch.randperm(total, device="cuda").int().view(rows, pages)
        self.seq_lens = torch.full((rows,), pages * 16, device="cuda", dtype=torch.int32)
        self.query = torch.randn(rows, HEADS * GROUP, DIM, device="cuda", dtype=torch.bfloat16)
        self.order = torch.rand(rows, HEADS, pages, device="cuda").argsort(-1)
        self.counts = torch.full((rows, HEADS), chosen, device="cuda", dtype=torch.int32)
        self.memory = [HostMemory(total * HEADS * parts * 16 * DIM * 2) for _ in range(LAYERS)]
        self.hosts = [memory.view((total, HEADS, parts, 16, DIM), torch.bfloat16) for memory in self.memory]
        for host, values in zip(self.hosts, self.values):
            for part, cache in enumerate((self.keys, values)[2 - parts :]):
                host[:, :, part] = cache.transpose(1, 2).cpu()
        self.scratch = fetch_scratch(rows * HEADS, max(LARGER) * rows * HEADS * chosen, "cuda")
        need = required_partials(self.query, self.keys, self.keys, self.block_table)
        self.buffers: Any = SimpleNamespace(
            attend_partials=torch.empty(need, device="cuda"), attend_tickets=torch.zeros(rows * HEADS, device="cuda", dtype=torch.int32)
        )
        self.out = torch.empty_like(self.query)

    def selection(self, first: int) -> Tensor:
        return self.order[..., first : first + self.chosen].sort(-1).values.int().contiguous()

    def tiers(self, selections: int = 1) -> list[HostTier]:
        return [make_tier(host, selections * self.rows * HEADS * self.chosen, "cuda") for host in self.hosts]

    def fetch(self, tier: HostTier, pages: Tensor, kernels: str) -> None:
        selection = (self.block_table, self.seq_lens, pages, self.counts)
        fetch(tier, *selection, block_size=16, scratch=self.scratch, kernels=kernels, overlap_previous=kernels == "cuda")

    def attend(self, values: Tensor | HostTier, pages: Tensor) -> None:
        rest = (self.block_table, self.seq_lens, pages, self.counts)
        how: dict[str, Any] = dict(scale=0.09, out=self.out, scratch=self.buffers, kernels="cuda", overlap_previous=True)
        if isinstance(values, HostTier):
            attend_tiered(self.query, values.key_cache if values.with_keys else self.keys, values, *rest, **how)
        else:
            attend(self.query, self.keys, values, *rest, **how)

    def release(self) -> None:
        for memory in self.memory:
            memory.release()


def measure(name: str, case: Case) -> list[list[str]]:
    rows = []
    one = case.selection(0)
    nbytes = case.rows * HEADS * case.chosen * case.parts * 16 * DIM * 2
    for kernels in ("cuda", "triton"):
        for share in MISSING:
            other, tiers = case.selection(round(share * case.chosen)), case.tiers()
            for tier in tiers:
                case.fetch(tier, one, kernels)
            launches = [lambda t=tier, p=pages, k=kernels: case.fetch(t, p, k) for pages in (other, one) for tier in tiers]
            time = time_graph(launches)
            before = tiers[0].counters.clone()
            for launch in launches:
                launch()
            selected, missing, _ = (tiers[0].counters - before).tolist()
            rate = f"{missing / selected * nbytes / time.median / 1e3:.1f}" if missing else ""
            rows.append([name, f"fetch, {kernels}", f"{missing / selected:.1%}", f"{time.median:.1f}", rate])
    share = torch.full((1,), round(WHOLE * LOST), dtype=torch.int32, device="cuda")
    for selections in LARGER:
        tiers = case.tiers(selections)
        for first in range(0, min(selections * case.chosen, case.pages - case.chosen + 1), case.chosen):
            for tier in tiers:
                case.fetch(tier, case.selection(first), "cuda")
        losing = time_graph([lambda t=tier: lose(t, share) for tier in tiers])
        for tier in tiers:
            case.fetch(tier, one, "cuda")
        both = time_graph([lambda t=tier: (lose(t, share), case.fetch(t, one, "cuda")) for tier in tiers])
        rows.append([name, f"fetch, cuda, {tiers[0].slots} slots", f"{LOST:.1%}", f"{both.median - losing.median:.1f}", ""])
    resident = time_graph([lambda v=values: case.attend(v, one) for values in case.values])
    rows.append([name, "attend, resident", "", f"{resident.median:.1f}", ""])
    tiers = case.tiers()
    direct = time_graph([lambda t=tier: case.attend(t, one) for tier in tiers], repetitions=3)
    rows.append([name, "attend, nothing hot", "100.0%", f"{direct.median:.1f}", f"{nbytes / direct.median / 1e3:.1f}"])
    for tier in tiers:
        case.fetch(tier, one, "cuda")
    hot = time_graph([lambda t=tier: case.attend(t, one) for tier in tiers])
    rows.append([name, "attend, all hot", "0.0%", f"{hot.median:.1f}", ""])
    both = time_graph([lambda t=tier: (case.fetch(t, one, "cuda"), case.attend(t, one)) for tier in tiers])
    rows.append([name, "fetch and attend, all hot", "0.0%", f"{both.median:.1f}", ""])
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--variant", default="mem-kv", choices=["mem-v", "mem-kv"])
    parts = {"mem-v": 1, "mem-kv": 2}[arguments.parse_args().variant]
    rows = []
    for name, sizes in CASES.items():
        case = Case(*sizes, parts)
        rows += measure(name, case)
        case.release()
    print(table(["case", "operation", "missing", "us", "GB/s from the host"], rows))


if __name__ == "__main__":
    main()
