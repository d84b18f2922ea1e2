"""The whole decode step of one layer: score, select, attend, and a fetch before that where pages are in host memory. Engines call it, the bench times it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvskim.ops.attend import Kernels, attend
from kvskim.ops.attend_tiered import attend_tiered
from kvskim.ops.fetch import FetchScratch, fetch
from kvskim.ops.latent_query import Query, joined
from kvskim.ops.score import score
from kvskim.ops.select import select
from kvskim.ops.workspace import StepBuffers, Workspace
from kvskim.rules import RuleParameters
from kvskim.selectors.base import Selector
from kvskim.tier.pages import HostTier


@dataclass(frozen=True)
class StepSettings:
    """What is the same for every step of a layer. ``softcap`` 0: none. ``overlap``: programmatic dependent launches (CUDA only).

    ``settled``: records of candidate pages, block table and lengths were complete before the chain of overlapped launches began, see `score`.
    """

    selector: Selector
    tables: Any
    rule: RuleParameters
    sink_pages: int
    window_pages: int
    scale: float
    softcap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    kernels: Kernels = "cuda"
    overlap: bool = False
    settled: bool = False


def decode_step(
    settings: StepSettings, query: Query, key_cache: Tensor, values: Tensor | HostTier, records: Tensor, block_table: Tensor, seq_lens: Tensor, *,
    ready: Tensor, workspace: Workspace, buffers: StepBuffers, out: Tensor, lse: Tensor | None = None,
    fetching: FetchScratch | None = None, selected: Callable[[], None] | None = None,
    queries_settled: bool = False,
) -> None:
    """Sparse attention of one query token per request; the selection stays in ``buffers``. Shapes as in the operations.

    values: the value cache, or the tier that holds values, or keys and values, in host memory; of a tier with keys ``key_cache`` is its own.
    fetching: of a tier, the buffers of `kvskim.ops.fetch`. None: nothing is fetched ahead of attention, which reads from the host what is not hot; the
        caller fetches without copies, beside attention or behind it, and copies when attention has ended.
    queries_settled: queries were complete before `kvskim.ops.write_cache.write_cache` ran, and nothing but `encode` was launched since, see `score`.
    selected: called when select is under way and attend is not: what the caller wants to run beside attention.

    Latent attention: one kv head, ``values`` the first channels of ``key_cache``, and the workspace made for the width of the values. The query may be
    in its two parts, a `LatentQuery`.

    Raises:
        ValueError: what the operations raise, and a tier with float8 scales.
    """
    s, b = settings, buffers
    score(
        s.selector, s.tables, query, key_cache, records, block_table, seq_lens, scale=s.scale, softcap=s.softcap, sink_pages=s.sink_pages,
        window_pages=s.window_pages, k_scale=s.k_scale, scores=b.scores, base=b.base, forced=b.forced, partials=b.partials, scratch=workspace,
        kernels=s.kernels, full_pages=s.rule.full_pages, overlap=s.overlap, settled=s.settled,
        queries_settled=queries_settled, tier=values if isinstance(values, HostTier) and values.with_keys else None,
    )
    select(
        b.scores, b.base, b.forced, b.partials, seq_lens, group=workspace.group, rule=s.rule, sink_pages=s.sink_pages, window_pages=s.window_pages,
        ready=ready, pages=b.pages, counts=b.counts, covered=b.covered, kernels=s.kernels, keys=b.keys, overlap=s.overlap,
        settled=s.settled,
    )
    if selected is not None:
        selected()
    if isinstance(values, HostTier):
        if s.k_scale != 1.0 or s.v_scale != 1.0:
            raise ValueError(f"k_scale is {s.k_scale} and v_scale {s.v_scale}; pages in host memory are not float8, so both must be 1")
        if fetching is not None:
            fetch(
                values, block_table, seq_lens, b.pages, b.counts, block_size=key_cache.shape[1], scratch=fetching, kernels=s.kernels,
                overlap_previous=s.overlap,
            )
        attend_tiered(
            joined(query, s.kernels), key_cache, values, block_table, seq_lens, b.pages, b.counts, scale=s.scale, softcap=s.softcap, out=out, lse=lse,
            scratch=workspace, kernels=s.kernels, overlap_previous=s.overlap,
        )
        return
    attend(
        query, key_cache, values, block_table, seq_lens, b.pages, b.counts, scale=s.scale, softcap=s.softcap, k_scale=s.k_scale, v_scale=s.v_scale,
        out=out, lse=lse, scratch=workspace, kernels=s.kernels, overlap_previous=s.overlap, settled=True, full_pages=s.rule.full_pages,
    )
