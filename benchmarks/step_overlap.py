"""Which overlapped launch helps and which hurts the whole decode step, shape by shape, on a GPU.

    python benchmarks/step_overlap.py [1x1M 1x128K 8x128K 1x16K]

A launch that overlaps may begin before the kernel ahead of it has ended (programmatic dependent launch). P: query preparation, behind attend of the
step before; S: the scan of the records; E: select; A: attend. Microseconds of one step, median of 7 replays of a CUDA graph.
"""

from __future__ import annotations

import sys
import time

import torch

from kvskim.bench import problem
from kvskim.bench.kernels import BUDGET, SHAPE_1M, SHAPE_8X128K, SHAPE_16K, SHAPE_128K, THRESHOLD
from kvskim.bench.problem import Cache
from kvskim.bench.timing import time_graph
from kvskim.layout import PAGE_TOKENS
from kvskim.ops.attend import attend
from kvskim.ops.cuda import score_sketch as cuda
from kvskim.ops.select import select
from kvskim.ops.workspace import Workspace

SHAPES = {"1x1M": SHAPE_1M, "1x128K": SHAPE_128K, "8x128K": SHAPE_8X128K, "1x16K": SHAPE_16K}
BOTH = cuda.OVERLAP_PREVIOUS | cuda.RECORDS_SETTLED


class Step:
    def __init__(self, shape, rule):
        self.shape, self.rule = shape, rule
        selector = problem.selector_by_name("sketch")
        self.cache = Cache(shape)
        self.pool = problem.record_pool(selector, shape, self.cache.pages)
        self.query, self.lengths = problem.query(shape), problem.seq_lens(shape)
        self.ready, self.out = torch.ones(1, dtype=torch.int32, device="cuda"), torch.empty_like(self.query)
        tables = problem.tables_of(selector, shape)
        self.prepared = (tables.query_matrix, tables.slot_coefficient, tables.slot_digit, tables.mean)
        self.w = Workspace(
            max_requests=shape.requests, num_kv_heads=shape.heads, group=shape.group, head_dim=shape.dim, page_capacity=shape.pages, rule=rule,
            sink_pages=1, window_pages=1, device="cuda", kernels="cuda",
        )
        self.b = self.w.buffers(shape.requests)

    def launches(self, edges="", kernels="PSEA", late=False):
        """One launch function per block table. ``late``: select does not read the lengths early."""
        s, b, w = self.shape, self.b, self.w

        def launch(table):
            if "P" in kernels:
                cuda.prepare_sketch(
                    self.query, self.cache.keys, *self.prepared, table, self.lengths, w.sketch_weights, b.base, b.forced, s.scale, 0.0, 1.0, 1, 1,
                    0, BOTH if "P" in edges else 0,
                )
            if "S" in kernels:
                cuda.score_sketch(
                    self.pool, table, self.lengths, w.sketch_weights, b.forced, b.scores, b.partials, s.group, PAGE_TOKENS, 1, 1, 0,
                    BOTH if "S" in edges else 0,
                )
            if "E" in kernels:
                select(
                    b.scores, b.base, b.forced, b.partials, self.lengths, group=s.group, rule=self.rule, sink_pages=1, window_pages=1,
                    ready=self.ready, pages=b.pages, counts=b.counts, covered=b.covered, kernels="cuda", overlap="E" in edges,
                    settled=not late,
                )
            if "A" in kernels:
                attend(
                    self.query, self.cache.keys, self.cache.values, table, self.lengths, b.pages, b.counts, scale=s.scale, out=self.out, scratch=w,
                    kernels="cuda", overlap_previous="A" in edges,
                )

        return [lambda table=table: launch(table) for table in self.cache.block_tables]

    def time(self, edges="", kernels="PSEA", late=False):
        # Several copies where there is one block table: otherwise a graph of one step would hide the edge to the next.
        launches = self.launches(edges, kernels, late)
        while len(launches) < 4:
            launches = launches * 2
        return time_graph(launches, 7, smallest_us=600.0).median


def main():
    names = sys.argv[1:] or list(SHAPES)
    configurations = ["", "PSEA", "SEA", "PEA", "PSA", "PSE", "P", "S", "E", "A"]
    print(torch.cuda.get_device_name())
    for name in names:
        start = time.monotonic()
        step = Step(SHAPES[name], BUDGET)
        print(f"\n== {name}, budget 128 pages. Whole step by edges that overlap")
        print("  " + "  ".join(f"{edges or 'none':>6}" for edges in configurations))
        print("  " + "  ".join(f"{step.time(edges):6.1f}" for edges in configurations))
        print(f"  all edges, select reads the lengths late: {step.time('PSEA', late=True):.1f}")
        print("  cut short after       prepare   score  select  attend")
        for edges in ("", "PSEA"):
            row = "  ".join(f"{step.time(edges, 'PSEA'[:n]):6.1f}" for n in (1, 2, 3, 4))
            print(f"    overlap {edges or 'none':>5}:      {row}")
        step.time()  # every buffer holds a whole step's data again
        row = "  ".join(f"{step.time('', kernel):6.1f}" for kernel in "PSEA")
        print(f"    alone:               {row}")
        mass = step.b.covered.float().mean().item()
        print(f"  pages selected {step.b.counts.float().mean().item():.1f}, covered {mass:.3f}; kernels alone may find their input in the L2 cache")
        threshold = Step.__new__(Step)
        threshold.__dict__.update(step.__dict__)
        threshold.rule = THRESHOLD
        threshold.w = Workspace(
            max_requests=step.shape.requests, num_kv_heads=step.shape.heads, group=step.shape.group, head_dim=step.shape.dim,
            page_capacity=step.shape.pages, rule=THRESHOLD, sink_pages=1, window_pages=1, device="cuda", kernels="cuda",
        )
        threshold.b = threshold.w.buffers(step.shape.requests)
        threshold.time()
        print(
            f"  threshold: whole step {threshold.time(''):.1f}, all edges {threshold.time('PSEA'):.1f}, select alone {threshold.time('', 'E'):.1f}, "
            f"pages {threshold.b.counts.float().mean().item():.1f}"
        )
        print(f"  ({time.monotonic() - start:.1f} s)", flush=True)
        del step, threshold
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
