"""A decode step of one layer as an engine runs it, on random problems of several layers: score, select and attend in a row."""

from __future__ import annotations

from typing import Any, cast

import torch

from kvskim.bench import problem
from kvskim.bench.problem import Cache, Shape
from kvskim.bench.timing import Launch
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.attend import Kernels
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace
from kvskim.rules import RuleParameters
from kvskim.selectors import Selector

SMALLEST_BYTES = 192 << 20
"""What the launches of one round read in all: several times the L2 cache, so that each finds its data in memory as a layer of a model does."""
MOST_SETS = 32
LARGEST_CACHE = 24 << 30


def workspace(shape: Shape, rule: RuleParameters, kernels: str, device: str = "cuda") -> Workspace:
    """Scratch memory for batches of this shape, one sink page and one window page."""
    return Workspace(
        max_requests=shape.requests, num_kv_heads=shape.heads, group=shape.group, head_dim=shape.value_dim, page_capacity=shape.pages, rule=rule,
        sink_pages=1, window_pages=1, device=device, kernels=kernels,
    )


class StepProblem:
    """Caches, records and page tables of several layers of one shape.

    Args:
        selector: the record format.
        shape: of the batch; keys and values apart, or latent rows.
        rule: with a page budget.
        device: where all lies.
    """

    def __init__(self, selector: Selector, shape: Shape, rule: RuleParameters, device: str = "cuda") -> None:
        if rule.budget_pages is None:
            raise ValueError("the bytes of a step are known for a page budget only")
        self.selector, self.shape, self.rule, self.device = selector, shape, rule, device
        selected = min(rule.budget_pages, shape.pages) * PAGE_TOKENS * shape.row_bytes
        self.read_bytes = shape.requests * shape.heads * (shape.pages * selector.record_bytes(shape.dim) + selected)
        """Bytes of all records and of the selected pages of one layer."""
        sets = min(MOST_SETS, ceil_div(SMALLEST_BYTES, self.read_bytes), max(1, LARGEST_CACHE // shape.kv_bytes))
        self.cache = Cache(shape, sets=sets, device=device)
        self.records = problem.record_pool(selector, shape, self.cache.pages, device)
        self.tables = problem.tables_of(selector, shape, device)
        self.query, self.lengths = problem.query(shape, device), problem.seq_lens(shape, device)
        self.out = self.query.new_empty(*self.query.shape[:2], shape.value_dim)

    def launches(self, kernels: str) -> list[Launch]:
        """One step for each layer, with the overlapped launches that engines use."""
        w, cuda = workspace(self.shape, self.rule, kernels, self.device), kernels == "cuda"
        settings = StepSettings(
            self.selector, self.tables, self.rule, 1, 1, self.shape.scale, kernels=cast(Kernels, kernels), overlap=cuda, settled=cuda
        )
        buffers, ready = w.buffers(self.shape.requests), torch.ones(1, dtype=torch.int32, device=self.device)
        more: dict[str, Any] = dict(ready=ready, workspace=w, buffers=buffers, out=self.out)

        def launch(table: torch.Tensor) -> Launch:
            return lambda: decode_step(settings, self.query, self.cache.keys, self.cache.values, self.records, table, self.lengths, **more)

        return [launch(table) for table in self.cache.block_tables]
