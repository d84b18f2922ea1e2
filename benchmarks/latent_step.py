"""What a decode step of latent attention (MLA) costs, operation by operation, beside FlashAttention-3 as vLLM calls it for such models, on a GPU.

    python benchmarks/latent_step.py [1x4K 1x16K 1x128K 16x64K] [--heads 16] [--splits] [--layers]

Microseconds of one launch, median of 5 replays of a CUDA graph over rotating pages. ``--splits``: also other shapes of the attention kernel.
``--layers``: instead, layers as an engine has them: the products that take the queries into the latent space and the results out of it, which know
nothing of programmatic launches, and between them the write of the newest rows and the step, one operation after the other added; and records on a side
stream, where no page is complete, forked in every layer or in every 16th.
"""

from __future__ import annotations

import argparse
import time

import torch

from kvskim.bench.flash_attention import dense_latent_decode
from kvskim.bench.problem import Cache, Shape, record_pool, sketch_tables
from kvskim.bench.timing import copy_bandwidth, time_graph
from kvskim.layout import PAGE_TOKENS
from kvskim.ops.attend import attend
from kvskim.ops.attend_plan import latent_tickets
from kvskim.ops.cuda import score_sketch as cuda
from kvskim.ops.cuda.attend_latent import attend_latent_cuda
from kvskim.ops.encode import encode
from kvskim.ops.join_query import join_query
from kvskim.ops.latent_query import LatentQuery
from kvskim.ops.score import score
from kvskim.ops.select import select
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.triton.attend import attend_triton
from kvskim.ops.workspace import Workspace
from kvskim.ops.write_cache import write_cache
from kvskim.rules import RuleParameters
from kvskim.selectors import get_selector

LATENT, DIM, BLOCK_SIZE, SCALE = 512, 576, 64, 192**-0.5
OVERLAP = cuda.OVERLAP_PREVIOUS | cuda.RECORDS_SETTLED
BUDGET = RuleParameters(rule="budget", budget_pages=128, min_pages=0)
THRESHOLD = RuleParameters(rule="threshold", tau=0.007)


class Problem:
    def __init__(self, requests, context, heads):
        self.requests, self.context, self.heads = requests, context, heads
        self.pages = pages = context // PAGE_TOKENS
        shape = Shape(requests, context, 1, heads, DIM, LATENT)
        self.selector, self.sketch = get_selector("sketch"), sketch_tables(1, DIM)
        cache = Cache(shape, sets=max(2, min(32, -(-(256 << 20) // shape.kv_bytes))), block_size=BLOCK_SIZE)
        self.cache, self.tables, self.records = cache.keys, cache.block_tables, record_pool(self.selector, shape, cache.pages)
        self.query = torch.randn(requests, heads, DIM, dtype=torch.bfloat16, device="cuda")
        self.latent = torch.randn(heads, requests, LATENT, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
        self.rotary = torch.randn(requests, heads, 192, dtype=torch.bfloat16, device="cuda")[..., 128:]
        self.parts = LatentQuery(self.latent, self.rotary)
        self.lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")
        self.out = torch.empty(requests, heads, LATENT, dtype=torch.bfloat16, device="cuda")
        self.ready = torch.ones(1, dtype=torch.int32, device="cuda")
        self.w = self.workspace(BUDGET)
        self.b = self.w.buffers(requests)
        chosen = [torch.rand(requests, 1, pages, device="cuda").topk(min(128, pages), -1).indices.sort(-1).values.int().contiguous() for _ in self.tables]
        self.chosen, self.counts = chosen, torch.full((requests, 1), min(128, pages), dtype=torch.int32, device="cuda")

    def workspace(self, rule):
        return Workspace(
            max_requests=self.requests, num_kv_heads=1, group=self.heads, head_dim=LATENT, page_capacity=self.pages, rule=rule, sink_pages=1,
            window_pages=1, device="cuda", kernels="cuda",
        )

    def each(self, launch):
        """``launch(table, i)`` for every block table, at least four."""
        count = max(4, len(self.tables))
        return [lambda i=i: launch(self.tables[i % len(self.tables)], i % len(self.tables)) for i in range(count)]

    def step(self, rule, overlap=True, joined=False):
        w = self.workspace(rule)
        b = w.buffers(self.requests)
        settings = StepSettings(self.selector, self.sketch, rule, 1, 1, SCALE, kernels="cuda", overlap=overlap, settled=overlap)
        query = self.query if joined else self.parts

        def launch(table, _):
            if joined:
                join_query(self.latent, self.rotary, out=self.query, kernels="cuda")
            decode_step(
                settings, query, self.cache, self.cache[..., :LATENT], self.records, table, self.lengths, ready=self.ready, workspace=w, buffers=b,
                out=self.out,
            )

        return self.each(launch), b


class Layers:
    """A row of layers: the two products of each, and what is between them."""

    WINDOW, LAYERS, PLAIN, VALUE = 2, 16, 128, 128

    def __init__(self, problem):
        p, heads = problem, problem.heads
        self.p, self.b = p, p.w.buffers(p.requests)
        bf16 = dict(dtype=torch.bfloat16, device="cuda")
        self.plain, self.into = torch.randn(heads, p.requests, self.PLAIN, **bf16), torch.randn(heads, self.PLAIN, LATENT, **bf16) * 0.1
        self.latent, self.out_of = torch.empty(heads, p.requests, LATENT, **bf16), torch.randn(heads, LATENT, self.VALUE, **bf16) * 0.05
        self.values = torch.empty(heads, p.requests, self.VALUE, **bf16)
        self.rows = torch.randn(p.requests, 1, LATENT, **bf16), torch.randn(p.requests, 1, DIM - LATENT, **bf16)
        self.query = LatentQuery(self.latent.transpose(0, 1), p.rotary)
        # Of the last token but one: no page is complete.
        self.slots = [(t[:, (p.context - 2) // BLOCK_SIZE].long() * BLOCK_SIZE + (p.context - 2) % BLOCK_SIZE).contiguous() for t in p.tables]
        self.side = torch.cuda.Stream()

    def layer(self, i, upto, fork):
        p, b, table, slots = self.p, self.b, self.p.tables[i % len(self.p.tables)], self.slots[i % len(self.p.tables)]
        sketch, values = p.sketch, p.cache[..., :LATENT]
        torch.bmm(self.plain, self.into, out=self.latent)
        if upto >= 1:
            write_cache(*self.rows, values, p.cache[..., LATENT:], slots, kernels="cuda", overlap=True)
        if upto >= 2:
            cuda.prepare_sketch(
                self.query.latent, p.cache, sketch.query_matrix, sketch.slot_coefficient, sketch.slot_digit, sketch.mean, table, p.lengths,
                p.w.sketch_weights, b.base, b.forced, SCALE, 0.0, 1.0, 1, self.WINDOW, 0, OVERLAP | cuda.QUERIES_SETTLED, rest=self.query.rotary,
            )
        if upto >= 3:
            cuda.score_sketch(
                p.records, table, p.lengths, p.w.sketch_weights, b.forced, b.scores, b.partials, p.heads, BLOCK_SIZE, 1, self.WINDOW, 0, OVERLAP)
        if upto >= 4:
            select(
                b.scores, b.base, b.forced, b.partials, p.lengths, group=p.heads, rule=BUDGET, sink_pages=1, window_pages=self.WINDOW, ready=p.ready,
                pages=b.pages, counts=b.counts, covered=b.covered, kernels="cuda", keys=b.keys, overlap=True, settled=True,
            )
        if fork and (i + 1) % fork == 0:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                encode(p.selector, sketch, p.cache, slots, p.records, kernels="cuda")
        if upto >= 5:
            attend(
                self.query, p.cache, values, table, p.lengths, b.pages, b.counts, scale=SCALE, out=p.out, scratch=p.w, kernels="cuda",
                overlap_previous=True, settled=True,
            )
        torch.bmm(p.out.transpose(0, 1), self.out_of, out=self.values)
        if fork and i == self.LAYERS - 1:
            torch.cuda.current_stream().wait_stream(self.side)

    def time(self, upto, fork=0):
        return time_graph([lambda i=i: self.layer(i, upto, fork) for i in range(self.LAYERS)], 5).median


def run_layers(name, problem):
    layers = Layers(problem)
    print(f"\n== {name}, {problem.heads} heads, {Layers.LAYERS} layers in a row: a layer, and what it is more than the one above")
    before = 0.0
    for upto, label in enumerate(("the two products", "write of the newest rows", "prepare", "scan", "select budget 128", "attend 128 pages")):
        us = layers.time(upto)
        print(f"  {us:8.2f}  {us - before:+8.2f}  {label}")
        before = us
    for fork, label in ((1, "records forked in every layer"), (Layers.LAYERS, f"records forked in one of {Layers.LAYERS}")):
        us = layers.time(5, fork)
        print(f"  {us:8.2f}  {us - before:+8.2f}  with {label}")


def run(name, problem, splits):
    p, b = problem, problem.b
    values = p.cache[..., :LATENT]
    rows = []

    def measure(label, launches):
        try:
            rows.append((label, time_graph(launches, 5).median))
        except Exception as error:  # one row that fails must not hide the others
            rows.append((f"{label}: {type(error).__name__}: {str(error)[:90]}", float("nan")))

    def dense(block):
        cache = p.cache.view(-1, block, 1, DIM)
        per = BLOCK_SIZE // block
        tables = [(t[:, :, None] * per + torch.arange(per, dtype=torch.int32, device="cuda")).flatten(1).contiguous() for t in p.tables]
        calls = [dense_latent_decode(p.query, cache, LATENT, t, p.lengths, SCALE) for t in tables]
        return calls * (-(-4 // len(calls)))

    measure("dense FlashAttention, blocks of 64", dense(64))
    measure("dense FlashAttention, blocks of 16", dense(16))
    small = p.cache.view(-1, PAGE_TOKENS, 1, DIM)
    few = torch.full((p.requests,), 16 * int(p.counts[0, 0]), dtype=torch.int32, device="cuda")
    physical = [torch.randint(0, small.shape[0], (p.requests, int(few[0]) // 16), dtype=torch.int32, device="cuda") for _ in range(8)]
    measure("FlashAttention of 128 pages, were their lengths known ahead", [dense_latent_decode(p.query, small, LATENT, t, few, SCALE) for t in physical])
    measure("joining the two parts of the query", [lambda: join_query(p.latent, p.rotary, out=p.query, kernels="cuda")] * 8)
    prepared = (p.sketch.query_matrix, p.sketch.slot_coefficient, p.sketch.slot_digit, p.sketch.mean)
    for label, query, rest in (("", p.latent, p.rotary), (", query in one piece", p.query, None)):
        measure(f"prepare{label}, overlapped", p.each(lambda t, _, query=query, rest=rest: cuda.prepare_sketch(
            query, p.cache, *prepared, t, p.lengths, p.w.sketch_weights, b.base, b.forced, SCALE, 0.0, 1.0, 1, 1, 0, OVERLAP, rest=rest)))
    measure("scan, overlapped", p.each(lambda t, _: cuda.score_sketch(
        p.records, t, p.lengths, p.w.sketch_weights, b.forced, b.scores, b.partials, p.heads, BLOCK_SIZE, 1, 1, 0, OVERLAP)))
    measure("score (prepare and scan)", p.each(lambda t, _: score(
        p.selector, p.sketch, p.parts, p.cache, p.records, t, p.lengths, scale=SCALE, sink_pages=1, window_pages=1, scores=b.scores, base=b.base,
        forced=b.forced, partials=b.partials, scratch=p.w, kernels="cuda", overlap=True, settled=True)))
    measure("select budget 128, overlapped", p.each(lambda t, _: select(
        b.scores, b.base, b.forced, b.partials, p.lengths, group=p.heads, rule=BUDGET, sink_pages=1, window_pages=1, ready=p.ready, pages=b.pages,
        counts=b.counts, covered=b.covered, kernels="cuda", keys=b.keys, overlap=True, settled=True)))
    for overlap in (False, True):
        measure(f"attend 128 pages{', overlapped' if overlap else ''}", p.each(lambda t, i, overlap=overlap: attend(
            p.parts, p.cache, values, t, p.lengths, p.chosen[i], p.counts, scale=SCALE, out=p.out, scratch=p.w, kernels="cuda", overlap_previous=overlap)))
    measure("attend 128 pages, overlapped, the same again and again: from the L2 cache", [lambda: attend(
        p.parts, p.cache, values, p.tables[0], p.lengths, p.chosen[0], p.counts, scale=SCALE, out=p.out, scratch=p.w, kernels="cuda",
        overlap_previous=True)] * 4)
    all_pages = torch.full_like(p.counts, p.pages)
    measure("attend all pages, overlapped", p.each(lambda t, i: attend(
        p.parts, p.cache, values, t, p.lengths, p.chosen[i], all_pages, scale=SCALE, out=p.out, scratch=p.w, kernels="cuda", overlap_previous=True)))
    launches, _ = p.step(BUDGET)
    measure("whole step, budget 128", launches)
    measure("whole step, budget 128, after joining the parts of the query", p.step(BUDGET, joined=True)[0])
    measure("whole step, budget 128, nothing overlapped", p.step(BUDGET, overlap=False)[0])
    launches, used = p.step(THRESHOLD)
    measure("whole step, threshold", launches)
    pages = float(used.counts.float().mean())
    whole = RuleParameters(rule="budget", budget_pages=128, min_pages=0, full_pages=p.pages)
    measure("whole step, all attended because short", p.step(whole)[0])
    if splits:
        scratch = torch.empty(16 * p.requests * p.heads * (LATENT + 2), dtype=torch.float32, device="cuda")
        tickets = torch.zeros(latent_tickets(p.requests, 1, p.heads), dtype=torch.int32, device="cuda")
        for cluster in (1, 2, 4, 6, 7, 8, 11, 16):
            for clusters, share in ((1, 16), (2, 16), (16, 16)):
                for label, counts in (("128", p.counts), ("all", all_pages)):
                    measure(f"  attend {label}: clusters of at most {cluster}, up to {clusters} of them", p.each(
                        lambda t, i, plan=(cluster, clusters, share), counts=counts: attend_latent_cuda(
                            p.latent, p.rotary, p.cache, t, p.lengths, p.chosen[i], counts, p.out, None, scratch, tickets, *plan, False, SCALE, 0.0, 1.0,
                            1.0, True)))
        partials = torch.empty(64 * p.requests * p.heads * (LATENT + 2), dtype=torch.float32, device="cuda")
        most = max(1, min(64, 264 // p.requests))
        measure(f"  attend 128, Triton, {most} splits", p.each(
            lambda t, i: attend_triton(
                p.query, p.cache, values, t, p.lengths, p.chosen[i], p.counts, p.out, None, partials, most, 4, SCALE, 0.0, 1.0, 1.0, True, True)))
    print(f"\n== {name}, {p.heads} heads; threshold selects {pages:.0f} pages of {p.pages}")
    for label, us in rows:
        print(f"  {us:8.2f}  {label}")
    torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=["1x4K", "1x16K", "1x128K", "16x64K"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--splits", action="store_true")
    parser.add_argument("--layers", action="store_true")
    arguments = parser.parse_args()
    start = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, copy {copy_bandwidth() / 1e12:.2f} TB/s")
    for name in arguments.shapes:
        requests, context = name.removesuffix("K").split("x")
        problem = Problem(int(requests), int(context) << 10, arguments.heads)
        if arguments.layers:
            run_layers(name, problem)
        else:
            run(name, problem, arguments.splits)
        del problem
        torch.cuda.empty_cache()
        print(f"  ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
