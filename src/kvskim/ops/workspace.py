"""Scratch memory of a decode step: allocated once, shared by all layers, sized by the batch that is served."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvskim.layout import padded_group
from kvskim.ops.attend_plan import attend_scratch_sizes
from kvskim.ops.score import chunk_count, sketch_scratch_bytes
from kvskim.rules import RuleParameters


@dataclass(frozen=True)
class StepBuffers:
    """Views of a `Workspace` for one batch; shapes as in `kvskim.ops.score` and `kvskim.ops.select`."""

    scores: Tensor
    base: Tensor
    forced: Tensor
    partials: Tensor
    pages: Tensor
    counts: Tensor
    covered: Tensor
    keys: Tensor | None = None
    """Ranking keys; only the Triton kernels of select work in them."""


def table_capacity(rule: RuleParameters, page_capacity: int, sink_pages: int, window_pages: int) -> int:
    """Entries that a page table needs so that the rule is never cut short.

    The threshold rule selects at most ``1 / tau`` pages beside its floor, because masses sum to at most 1; a table that equals all
    pages is never written.
    """
    forced = sink_pages + window_pages
    if rule.rule == "budget":
        wanted = rule.budget_pages if rule.budget_pages is not None else int((rule.budget_fraction or 1.0) * page_capacity) + 1
    elif rule.rule == "threshold":
        wanted = max(rule.min_pages, int(1.0 / rule.tau) + 1) + forced
    else:
        wanted = page_capacity
    if rule.rule != "budget" and rule.max_pages is not None:
        wanted = min(wanted, rule.max_pages + forced)
    return max(forced + 1, min(page_capacity, wanted))


class Workspace:
    """Buffers for batches of up to ``max_requests`` rows with up to ``page_capacity`` pages each.

    Args:
        max_requests: most rows of a step.
        num_kv_heads: kv heads of a layer (of this rank).
        group: query heads per kv head.
        head_dim: dimension of the values.
        page_capacity: most pages of a request.
        rule: decides how long a page table can be.
        sink_pages, window_pages: always-attended pages.
        device: where everything lives.
        kernels: cuda, triton or torch.
        record_bytes: of a sketch record; other selectors don't use it.
    """

    def __init__(
        self, *, max_requests: int, num_kv_heads: int, group: int, head_dim: int, page_capacity: int, rule: RuleParameters, sink_pages: int,
        window_pages: int, device: torch.device | str, kernels: str, record_bytes: int = 256,
    ) -> None:
        device = torch.device(device)
        self.max_requests, self.num_kv_heads, self.group, self.page_capacity, self.kernels = max_requests, num_kv_heads, group, page_capacity, kernels
        columns = padded_group(group)
        self.columns = columns
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        rows = max_requests * num_kv_heads
        self.table_capacity = table_capacity(rule, page_capacity, sink_pages, window_pages)
        chunks = max(self._chunks(r) * r for r in range(1, max_requests + 1)) * num_kv_heads
        dtype = torch.float32 if kernels == "torch" else torch.float16
        self._scores = torch.empty(rows * page_capacity * columns, dtype=dtype, device=device)
        self._small = torch.empty(2 * rows * columns, dtype=torch.float32, device=device)
        self._partials = torch.empty(chunks * columns, dtype=torch.float32, device=device)
        keys = rows * page_capacity if kernels == "triton" else 0
        self._keys = torch.empty(keys, dtype=torch.float32, device=device)
        self._pages = torch.empty(rows * self.table_capacity, dtype=torch.int32, device=device)
        self._counts = torch.empty(rows, dtype=torch.int32, device=device)
        self._covered = torch.empty(rows, dtype=torch.float32, device=device)
        self.sketch_weights = torch.empty(
            sketch_scratch_bytes(max_requests, num_kv_heads, group, record_bytes), dtype=torch.uint8, device=device
        )
        partial_size, tickets = attend_scratch_sizes(max_requests, num_kv_heads, group, head_dim, page_capacity, self.multiprocessors)
        self.attend_partials = torch.empty(partial_size, dtype=torch.float32, device=device)
        self.attend_tickets = torch.zeros(tickets, dtype=torch.int32, device=device)

    def _chunks(self, requests: int) -> int:
        return chunk_count(requests, self.num_kv_heads, self.group, self.page_capacity, self.multiprocessors, self.kernels)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.numel() * t.element_size() for t in self.__dict__.values() if isinstance(t, Tensor))

    def buffers(self, requests: int, page_capacity: int | None = None) -> StepBuffers:
        """Views for a batch of ``requests`` rows; ``page_capacity`` may be smaller than the workspace's."""
        pages = self.page_capacity if page_capacity is None else page_capacity
        if requests > self.max_requests or pages > self.page_capacity:
            raise ValueError(
                f"a step of {requests} requests with up to {pages} pages does not fit a workspace for {self.max_requests} requests with up to "
                f"{self.page_capacity} pages"
            )
        heads, columns = self.num_kv_heads, self.columns
        rows = requests * heads
        small = (requests, heads, columns)
        chunks = self._chunks(requests)
        return StepBuffers(
            scores=self._scores[: rows * pages * columns].view(requests, heads, pages, columns),
            base=self._small[: rows * columns].view(small),
            forced=self._small[self._small.numel() // 2 :][: rows * columns].view(small),
            partials=self._partials[: rows * chunks * columns].view(requests, heads, chunks, columns),
            pages=self._pages[: rows * self.table_capacity].view(requests, heads, self.table_capacity),
            counts=self._counts[:rows].view(requests, heads),
            covered=self._covered[:rows].view(requests, heads),
            keys=self._keys[: rows * pages].view(requests, heads, pages) if self._keys.numel() else None,
        )
