"""Several layers, decoded step after step as an engine does it, with and without a host tier: the same requests, and every bit compared in every step.

Each layer writes the keys and values of the step, makes the records of completed pages beside attention, scores, selects, fetches and attends, and the
copies of what was fetched run beside the layers that follow. On a GPU all of it is one CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvskim.layout import ceil_div
from kvskim.ops.encode import encode
from kvskim.ops.fetch import FetchScratch, copy_fetched, fetch, fetch_scratch
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.store import store
from kvskim.ops.workspace import Workspace
from kvskim.ops.write_cache import write_cache
from kvskim.rules import RuleParameters
from kvskim.selectors import PageTables, get_selector
from kvskim.tier.pages import HostTier
from tier_data import Sizes, Step

SINK, WINDOW = 1, 2


@dataclass
class Layer:
    """``tier`` None: all of it in ``keys`` and ``values`` on the device."""

    tables: PageTables
    records: Tensor
    keys: Tensor
    values: Tensor
    counts: Tensor
    covered: Tensor
    out: Tensor
    tier: HostTier | None = None
    fetching: FetchScratch | None = None


class Layers:
    """The layers of a worker with the tiers given, or with none.

    Args:
        sizes: of the worker. Of its tokens, layer l has the channels turned by l.
        count: of layers.
        tiers: of each layer, or empty.
        most_tokens: of a step; slots are padded to so many.
        selector: of the records.
        together: `write_cache` writes keys and values of a tier in one launch; else `store` writes what is in host memory.
        beside: runs work beside what follows, which ``join`` waits for, and ``wait`` for what there was at the last ``mark``; by default as late as it
            may come.
    """

    def __init__(
        self, sizes: Sizes, count: int, tiers: list[HostTier], *, most_tokens: int, kernels: str, device: str, selector: str = "rki4", together: bool = False,
        beside: Callable[[Callable[[], None]], None] | None = None, join: Callable[[], None] | None = None,
        mark: Callable[[], None] | None = None, wait: Callable[[], None] | None = None,
    ) -> None:
        self.sizes, self.kernels, self.device, self._together = sizes, kernels, device, together
        self._late: list[Callable[[], None]] = []
        self._marked = 0
        self._beside, self._join = beside or self._late.append, join or self._run_late
        self._mark, self._wait = mark or self._mark_late, wait or self._run_marked
        rule = RuleParameters(rule="budget", budget_pages=6, min_pages=0)
        chosen = get_selector(selector)
        heads, dim = sizes.heads, sizes.dim
        self.workspace = Workspace(
            max_requests=sizes.rows, num_kv_heads=heads, group=sizes.group, head_dim=dim, page_capacity=sizes.columns * sizes.block_size // 16, rule=rule,
            sink_pages=SINK, window_pages=WINDOW, device=device, kernels=kernels,
        )
        generator = torch.Generator().manual_seed(1)

        def new(*shape: int, dtype: torch.dtype = sizes.dtype, fill: float = math.nan) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        cache = (sizes.blocks, sizes.block_size, heads, dim)
        self.layers = [
            Layer(
                PageTables(torch.randn(heads, dim, generator=generator).to(device)),
                new(sizes.pages, heads, chosen.record_bytes(dim), dtype=torch.uint8, fill=0), new(*cache), new(*cache),
                new(sizes.rows, heads, dtype=torch.int32, fill=0), new(sizes.rows, heads, dtype=torch.float32, fill=0),
                new(sizes.rows, heads * sizes.group, dim),
            )
            for _ in range(count)
        ]
        for layer, tier in zip(self.layers, tiers):
            layer.tier, layer.fetching = tier, fetch_scratch(sizes.rows * heads, tier.slots, device)
        self.ready = torch.ones(1, dtype=torch.int32, device=device)
        self.settings = StepSettings(chosen, None, rule, SINK, WINDOW, 0.5, kernels=kernels, overlap=kernels == "cuda", settled=kernels == "cuda")  # type: ignore[arg-type]
        # Where a step's arguments are, because a graph reads them there.
        self.slots = torch.full((most_tokens,), -1, dtype=torch.int64, device=device)
        self.rows = new(2, most_tokens, heads, dim, fill=0)
        self.query = new(sizes.rows, heads * sizes.group, dim, fill=0)
        self.block_table = torch.zeros(sizes.rows, sizes.columns, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(sizes.rows, dtype=torch.int32, device=device)

    def take(self, step: Step) -> None:
        """The arguments of the next step."""
        tokens = step.slot_mapping.shape[0]
        self.slots.fill_(-1)
        self.slots[:tokens] = step.slot_mapping
        self.rows[:, :tokens] = torch.stack([step.keys[:tokens], step.values[:tokens]])
        for name in ("query", "block_table", "seq_lens"):
            getattr(self, name).copy_(getattr(step, name))

    def run(self) -> None:
        """All layers, of the step taken."""
        for index, layer in enumerate(self.layers):
            keys, values = (part.roll(index, -1) for part in self.rows)
            if index and layer.tier is not None:
                self._wait()  # all layers have one selection table, which is read to decide what is fetched
            self._write(layer, keys, values, overlap=index == 0)
            self._decode(layer, self.query.roll(index, -1))
            if layer.tier is not None:
                self._beside(lambda layer=layer: copy_fetched(layer.tier, layer.fetching, kernels=self.kernels))  # type: ignore[misc]
        self._join()

    def _write(self, layer: Layer, keys: Tensor, values: Tensor, *, overlap: bool) -> None:
        tier = layer.tier
        if tier is not None and self._together:
            key_cache = tier.key_cache if tier.with_keys else layer.keys
            assert write_cache(keys, values, key_cache, tier, self.slots, kernels=self.kernels, overlap=overlap)
            return
        if tier is None or not tier.with_keys:
            _write(layer.keys, keys, self.slots)
        if tier is None:
            _write(layer.values, values, self.slots)
        else:
            store(tier, values, self.slots, keys=keys if tier.with_keys else None, kernels=self.kernels)

    def _decode(self, layer: Layer, query: Tensor) -> None:
        tier = layer.tier
        key_cache = tier.key_cache if tier is not None and tier.with_keys else layer.keys
        buffers = replace(self.workspace.buffers(self.sizes.rows), counts=layer.counts, covered=layer.covered)
        settings = replace(self.settings, tables=layer.tables)

        def records() -> None:
            encode(settings.selector, layer.tables, key_cache, self.slots, layer.records, kernels=self.kernels)

        def selected() -> None:
            self._beside(records)
            if tier is not None:
                self._beside(decide)
                self._mark()

        def decide() -> None:
            assert tier is not None
            fetch(
                tier, self.block_table, self.seq_lens, buffers.pages, buffers.counts, block_size=key_cache.shape[1], scratch=layer.fetching,
                kernels=self.kernels, copies=False,
            )

        decode_step(
            settings, query, key_cache, layer.values if tier is None else tier, layer.records, self.block_table, self.seq_lens, ready=self.ready,
            workspace=self.workspace, buffers=buffers, out=layer.out, selected=selected,
        )

    def _run_late(self) -> None:
        self._mark_late()
        self._run_marked()

    def _mark_late(self) -> None:
        self._marked = len(self._late)

    def _run_marked(self) -> None:
        for work in self._late[: self._marked]:
            work()
        del self._late[: self._marked]
        self._marked = 0


def _write(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows into a cache, without a look at the number of slots, which a graph has not; block 0, where padding goes, is no request's."""
    cache.view(-1, *cache.shape[2:])[slots.clamp(min=0)] = torch.where((slots >= 0)[:, None, None], rows, cache.view(-1, *cache.shape[2:])[:1])


def most_tokens(sizes: Sizes) -> int:
    """Of a step: every request is new, or decodes, and the padding of `tier_data`."""
    return sizes.requests * sizes.longest + 2


def differences(tiered: Layers, resident: Layers) -> list[str]:
    """What of the step that both have run is not equal in all bits."""
    found = []
    for index, (a, b) in enumerate(zip(tiered.layers, resident.layers)):
        live = resident.seq_lens > 0
        for name in ("counts", "covered", "out"):
            x, y = (getattr(layer, name)[live] for layer in (a, b))
            if not torch.equal(x, y) or x.isnan().any():
                found.append(f"layer {index}: {name}")
        if not torch.equal(a.records, b.records):
            found.append(f"layer {index}: records of {int((a.records != b.records).any(-1).sum())} pages")
    return found


def sizes_of_engine(parts: int, **changes: Any) -> Sizes:
    """As SmolLM2's layers: three kv heads of three query heads, 64 channels."""
    sizes = replace(Sizes(blocks=120, block_size=16, heads=3, group=3, dim=64, requests=6, rows=8, longest=300), **changes)
    return sizes if parts == 2 else replace(sizes, block_size=32, blocks=ceil_div(sizes.blocks, 2))
