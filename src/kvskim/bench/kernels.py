"""`kvskim bench kernels`: every operation against its roofline, its Triton twin and dense FlashAttention-3, in CUDA graphs over rotating buffers."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from kvskim.bench import flash_attention, problem
from kvskim.bench.problem import Cache, Records, Shape
from kvskim.bench.timing import Launch, copy_bandwidth, time_eager, time_graph
from kvskim.bench.whole_step import StepProblem, workspace
from kvskim.errors import KvskimError
from kvskim.layout import PAGE_TOKENS
from kvskim.ops.attend import attend
from kvskim.ops.encode import encode, encoders
from kvskim.ops.score import score
from kvskim.ops.select import select
from kvskim.rules import RuleParameters
from kvskim.selectors.sketch import SketchTables

BUDGET = RuleParameters(rule="budget", budget_pages=128, min_pages=0)
THRESHOLD = RuleParameters(rule="threshold", tau=0.007)

SHAPE_16K, SHAPE_128K = Shape(1, 16 << 10, 8, 4), Shape(1, 128 << 10, 8, 4)
SHAPE_8X128K, SHAPE_1M = Shape(8, 128 << 10, 8, 4), Shape(1, 1 << 20, 4, 8)
SHAPE_8K, SHAPE_32X8K = Shape(1, 8 << 10, 8, 4), Shape(32, 8 << 10, 8, 4)
LATENT_SHAPES = [Shape(requests, context << 10, 1, heads, 576, 512) for heads in (16, 128) for requests, context in ((1, 128), (16, 64))]
"""Latent rows of DeepSeek V2 and V3; 16 and 128 query heads."""


MATRIX_BYTES = 96 << 20
"""Copies of encode_matrix that encode is timed with: more than the L2 cache holds."""


@dataclass
class Row:
    """One measurement; times in microseconds of one launch. ``floor_us``: its bytes at the measured copy bandwidth."""

    op: str
    shape: str
    kernels: str
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    eager_us: float | None = None
    floor_us: float | None = None
    baseline: str = ""
    baseline_us: float | None = None
    error: str = ""

    @property
    def share(self) -> float | None:
        """Share of the copy bandwidth reached."""
        return self.floor_us / self.us if self.us and self.floor_us else None

    @property
    def speedup(self) -> float | None:
        return self.baseline_us / self.us if self.us and self.baseline_us else None


class KernelBench:
    """Measures rows one by one; a case that fails becomes a row with its error.

    Args:
        kernels: cuda or triton: what is measured.
        twin: also measure the Triton twin where ``kernels`` is cuda.
        quick: fewer shapes and repetitions.
        only: measure the cases whose title contains this.
        progress: called with a line before each case.

    Raises:
        KvskimError: no case has such a title.
    """

    def __init__(
        self, kernels: str = "cuda", twin: bool = True, quick: bool = False, only: str = "", progress: Callable[[str], None] = print
    ) -> None:
        self.kernels, self.twin, self.quick, self.progress = kernels, twin, quick, progress
        titles = [title for title, _ in self.cases()]
        self.only = only
        if not any(only in title for title in titles):
            raise KvskimError(f"--only is {only!r}, and no case has it in its title; the titles are: {'; '.join(titles)}")
        self.repetitions = 5 if quick else 9
        self.bandwidth = copy_bandwidth()
        self.dense_reason = flash_attention.available()
        self.rows: list[Row] = []

    # ------------------------------------------------------------------ measuring
    def measure(self, op: str, shape: Shape, make: Callable[[str], list[Launch]], nbytes: int, *, eager: bool = False, twin: bool | None = None) -> Row | None:
        """Time ``make(kernels)`` for the kernels asked for; returns the row of the first."""
        first = None
        names = [self.kernels]
        if self.kernels == "cuda" and (self.twin if twin is None else twin):
            names.append("triton")
        for name in names:
            row = Row(op, str(shape), name, floor_us=nbytes / self.bandwidth * 1e6)
            self.progress(f"{op}, {shape}, {name}")
            try:
                launches = make(name)
                timing = time_graph(launches, self.repetitions)
                row.us, row.low_us, row.high_us = timing.median, timing.low, timing.high
                if eager:
                    row.eager_us = time_eager(launches).median
            except Exception as error:  # a case that fails is a row of the report and makes the command exit non-zero
                row.error = f"{type(error).__name__}: {error}"
                self.progress(traceback.format_exc())
            self.rows.append(row)
            first = first or row
        gc.collect()
        torch.cuda.empty_cache()
        return first

    # ------------------------------------------------------------------ operations
    def bench_score(self, shape: Shape, selector_name: str = "sketch") -> None:
        selector = problem.selector_by_name(selector_name)
        tables = problem.tables_of(selector, shape)
        records = Records(selector, shape)
        query, lengths = problem.query(shape), problem.seq_lens(shape)
        keys = torch.randn(records.pool.shape[0], PAGE_TOKENS, shape.heads, shape.dim, dtype=torch.bfloat16, device="cuda") * 0.5

        def make(kernels: str) -> list[Launch]:
            w = workspace(shape, BUDGET, kernels)
            b = w.buffers(shape.requests)

            def launch(table: torch.Tensor) -> Launch:
                return lambda: score(
                    selector, tables, query, keys, records.pool, table, lengths, scale=shape.scale, sink_pages=1, window_pages=1, scores=b.scores, base=b.base,
                    forced=b.forced, partials=b.partials, scratch=w, kernels=kernels, overlap=kernels == "cuda", settled=True,
                )

            return [launch(t) for t in records.block_tables]

        self.measure(f"score {selector_name}, query preparation included", shape, make, records.bytes_per_set)
        if selector_name == "sketch" and self.kernels == "cuda":
            self._bench_score_alone(shape, tables, query, keys, records, lengths)

    def _bench_score_alone(self, shape: Shape, tables: Any, query: torch.Tensor, keys: torch.Tensor, records: Records, lengths: torch.Tensor) -> None:
        from kvskim.ops.cuda import score_sketch as cuda

        w = workspace(shape, BUDGET, "cuda")
        b = w.buffers(shape.requests)
        prepared = (tables.query_matrix, tables.slot_coefficient, tables.slot_digit, tables.mean)
        cuda.prepare_sketch(query, keys, *prepared, records.block_tables[0], lengths, w.sketch_weights, b.base, b.forced, shape.scale, 0.0, 1.0, 1, 1, 0, 0)
        torch.cuda.synchronize()

        def launches(flags: int) -> Callable[[str], list[Launch]]:
            def launch(table: torch.Tensor) -> Launch:
                return lambda: cuda.score_sketch(
                    records.pool, table, lengths, w.sketch_weights, b.forced, b.scores, b.partials, shape.group, PAGE_TOKENS, 1, 1, 0, flags
                )

            return lambda _: [launch(t) for t in records.block_tables]

        self.measure("score sketch, scan alone", shape, launches(0), records.bytes_per_set, twin=False)
        flags = cuda.OVERLAP_PREVIOUS | cuda.RECORDS_SETTLED
        self.measure("score sketch, scan alone, overlapped", shape, launches(flags), records.bytes_per_set, twin=False)

    def bench_select(self, shape: Shape, rule: RuleParameters, near_equal: bool = False) -> None:
        sets = 8
        lengths = problem.seq_lens(shape)
        ready = torch.ones(1, dtype=torch.int32, device="cuda")

        def make(kernels: str) -> list[Launch]:
            workspaces = [workspace(shape, rule, kernels) for _ in range(sets)]
            out: list[Launch] = []
            for w in workspaces:
                b = w.buffers(shape.requests)
                problem.fill_scores(b.scores, b.base, b.forced, b.partials, near_equal)
                keys = torch.empty(*b.scores.shape[:3], dtype=torch.float32, device="cuda") if kernels == "triton" else None

                def launch(b: Any = b, keys: Any = keys) -> None:
                    select(
                        b.scores, b.base, b.forced, b.partials, lengths, group=shape.group, rule=rule, sink_pages=1, window_pages=1, ready=ready, pages=b.pages,
                        counts=b.counts, covered=b.covered, kernels=kernels, keys=keys,
                    )

                out.append(launch)
            return out

        nbytes = 2 * shape.requests * shape.heads * shape.pages * workspace(shape, rule, "cuda").columns
        self.measure(f"select {rule.rule}{', near-equal scores' if near_equal else ''}", shape, make, nbytes)

    def bench_attend(self, shape: Shape, pages: int | None) -> None:
        """``pages`` None: all pages selected, against dense FlashAttention-3."""
        cache = Cache(shape)
        query, lengths = problem.query(shape), problem.seq_lens(shape)
        out = torch.empty_like(query)
        count = shape.pages if pages is None else min(pages, shape.pages)
        rule = RuleParameters(rule="budget", budget_pages=count, min_pages=0)
        tables = []
        for _ in range(8):
            weight = torch.rand(shape.requests, shape.heads, shape.pages, device="cuda")
            tables.append(weight.topk(count, -1).indices.sort(-1).values.to(torch.int32).contiguous())
        counts = torch.full((shape.requests, shape.heads), count, dtype=torch.int32, device="cuda")

        def make(kernels: str) -> list[Launch]:
            w = workspace(shape, rule, kernels)

            def launch(i: int) -> Launch:
                block_table, table = cache.block_tables[i % len(cache.block_tables)], tables[i % len(tables)]
                return lambda: attend(
                    query, cache.keys, cache.values, block_table, lengths, table, counts, scale=shape.scale, out=out, scratch=w, kernels=kernels,  # type: ignore[arg-type]
                )

            return [launch(i) for i in range(8)]

        nbytes = shape.requests * shape.heads * count * 64 * shape.dim
        row = self.measure("attend all pages" if pages is None else f"attend {count} pages", shape, make, nbytes, twin=pages is not None)
        if row is not None and pages is None:
            self._dense_baseline(row, shape, cache, query, lengths)

    def _dense_baseline(self, row: Row, shape: Shape, cache: Cache, query: torch.Tensor, lengths: torch.Tensor) -> None:
        if self.dense_reason is not None:
            row.baseline = self.dense_reason
            return
        row.baseline = "FlashAttention-3 dense"
        # Dense launches read much more than sparse ones: a few sets are larger than the L2 cache.
        tables = cache.block_tables[:8]
        launches: list[Launch]
        if shape.latent:
            launches = [flash_attention.dense_latent_decode(query, cache.keys, shape.latent, t, lengths, shape.scale) for t in tables]
        else:
            out = torch.empty_like(query)
            launches = [flash_attention.dense_decode(query, cache.keys, cache.values, t, lengths, shape.scale, out) for t in tables]
        row.baseline_us = time_graph(launches, self.repetitions).median

    def bench_step(self, shape: Shape, rule: RuleParameters, label: str, selector_name: str = "sketch") -> None:
        """Score, select and attend in a row, against dense FlashAttention-3."""
        step = StepProblem(problem.selector_by_name(selector_name), shape, rule)
        row = self.measure(f"whole step {selector_name}, {label}", shape, step.launches, step.read_bytes, twin=False, eager=True)
        if row is not None:
            self._dense_baseline(row, shape, step.cache, step.query, step.lengths)

    def bench_encode(self, shape: Shape, selector_name: str = "sketch") -> None:
        """Record every page of a prompt of ``context`` tokens."""
        selector = problem.selector_by_name(selector_name)
        tables = problem.tables_of(selector, shape)
        cache = Cache(shape, smallest_bytes=0)
        pages = cache.block_tables[0][0].long()
        slots = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device="cuda")).flatten()[: shape.context].contiguous()
        records = torch.zeros(cache.keys.shape[0], shape.heads, selector.record_bytes(shape.dim), dtype=torch.uint8, device="cuda")

        def make(kernels: str) -> list[Launch]:
            return [lambda: encode(selector, tables, cache.keys, slots, records, kernels=kernels)] * 2

        self.measure(f"encode {selector_name}, whole prompt", shape, make, 2 * shape.context * shape.heads * shape.dim)
        if selector_name == "sketch":
            self._bench_encode_steps(shape, tables, cache, slots, records)

    def _bench_encode_steps(self, shape: Shape, tables: SketchTables, cache: Cache, prompt: torch.Tensor, records: torch.Tensor) -> None:
        """Steps of few slots with each encoder there is. encode_matrix is another one in each launch, as in the layers of a model."""
        selector = problem.selector_by_name("sketch")
        sets = MATRIX_BYTES // (2 * tables.encode_matrix.numel()) + 1
        layers = [replace(tables, encode_matrix=tables.encode_matrix.clone()) for _ in range(sets)]
        ends = prompt[PAGE_TOKENS - 1 :: PAGE_TOKENS].contiguous()
        steps = {
            "no page": [torch.full((1,), -1, dtype=torch.int64, device="cuda")], "one page": ends[:sets].split(1),
            "chunk of 256 tokens": prompt.split(256)[:sets], "64 rows, 64 pages": ends.split(64)[:sets], "256 rows, 256 pages": ends.split(256)[:sets],
        }

        def launches(slots: Sequence[torch.Tensor], encoder: str | None) -> Callable[[str], list[Launch]]:
            def launch(i: int, kernels: str) -> Launch:
                return lambda: encode(selector, layers[i], cache.keys, slots[i % len(slots)], records, kernels=kernels, encoder=encoder)

            return lambda kernels: [launch(i, kernels) for i in range(sets)]

        used = int((tables.coefficient_bits > 0).sum())
        for name, slots in steps.items():
            pages = int((slots[0] % PAGE_TOKENS == PAGE_TOKENS - 1).sum() * (slots[0][0] >= 0))
            nbytes = 2 * shape.dim * (used + pages * PAGE_TOKENS * shape.heads) if pages else 0
            for encoder in encoders(tables, cache.keys, self.kernels):
                title = f"encode sketch, {name}" + (f", encoder for {encoder}" if encoder else "")
                self.measure(title, shape, launches(slots, encoder), nbytes, twin=False)

    # ------------------------------------------------------------------ the list
    def cases(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """All cases, each with the title that `only` looks at."""
        shapes = [SHAPE_16K, SHAPE_8X128K] if self.quick else [SHAPE_16K, SHAPE_128K, SHAPE_8X128K, SHAPE_1M]
        for shape in shapes:
            yield f"score, {shape}", partial(self.bench_score, shape)
        for shape in shapes:
            for rule in (THRESHOLD, BUDGET):
                yield f"select {rule.rule}, {shape}", partial(self.bench_select, shape, rule)
                yield f"select {rule.rule}, near-equal scores, {shape}", partial(self.bench_select, shape, rule, True)
        for shape in (SHAPE_16K, SHAPE_8X128K):
            yield f"attend, {shape}", partial(self.bench_attend, shape, 128)
        for shape in (SHAPE_8K, SHAPE_32X8K):
            yield f"attend all pages, {shape}", partial(self.bench_attend, shape, None)
        for shape in [*shapes, *(LATENT_SHAPES[:1] if self.quick else LATENT_SHAPES)]:
            yield f"whole step, {shape}", partial(self.bench_step, shape, BUDGET, "128 pages")
        prompt = Shape(1, 100_000 // 16 * 16, 8, 4)
        yield f"encode, {prompt}", partial(self.bench_encode, prompt)
        if not self.quick:
            for name in ("rki4", "quad", "clse", "r8", "minmax", "mean"):
                yield f"score {name}, {SHAPE_128K}", partial(self.bench_score, SHAPE_128K, name)
                yield f"encode {name}, {SHAPE_16K}", partial(self.bench_encode, SHAPE_16K, name)

    def run(self) -> list[Row]:
        for title, case in self.cases():
            if self.only not in title:
                continue
            try:
                case()
            except Exception as error:  # setting up a case failed: the report must say so
                self.progress(traceback.format_exc())
                self.rows.append(Row(f"set-up of {title}", "", self.kernels, error=f"{type(error).__name__}: {error}"))
            gc.collect()
            torch.cuda.empty_cache()
        return self.rows

    def report(self) -> dict[str, Any]:
        return dict(
            gpu=torch.cuda.get_device_name(), torch=torch.__version__, cuda=torch.version.cuda, copy_bandwidth_tb_s=self.bandwidth / 1e12,
            dense_baseline=self.dense_reason or "FlashAttention-3 of vLLM", rows=[{**asdict(r), "share": r.share, "speedup": r.speedup} for r in self.rows],
        )


def markdown_table(rows: list[Row]) -> str:
    """The report as a Markdown table."""
    def number(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    lines = ["| operation | shape | kernels | us | floor us | share of copy bandwidth | baseline us | speed-up |", "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        share = "" if r.share is None else f"{100 * r.share:.0f}%"
        speedup = "" if r.speedup is None else f"{r.speedup:.2f}x"
        us = r.error if r.error else number(r.us, 2)
        lines.append(f"| {r.op} | {r.shape} | {r.kernels} | {us} | {number(r.floor_us, 2)} | {share} | {number(r.baseline_us, 1)} | {speedup} |")
    return "\n".join(lines) + "\n"
