"""The whole decode step of one layer: score, select, attend. What engines call and what the bench times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvskim.ops.attend import Kernels, attend
from kvskim.ops.score import score
from kvskim.ops.select import select
from kvskim.ops.workspace import StepBuffers, Workspace
from kvskim.rules import RuleParameters
from kvskim.selectors.base import Selector


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
    settings: StepSettings, query: Tensor, key_cache: Tensor, value_cache: Tensor, records: Tensor, block_table: Tensor, seq_lens: Tensor, *,
    ready: Tensor, workspace: Workspace, buffers: StepBuffers, out: Tensor, lse: Tensor | None = None,
) -> None:
    """Sparse attention of one query token per request; the selection stays in ``buffers``. Shapes as in the three operations.

    Latent attention: one kv head, ``value_cache`` the first channels of ``key_cache``, and the workspace made for the width of the values.
    """
    s, b = settings, buffers
    score(
        s.selector, s.tables, query, key_cache, records, block_table, seq_lens, scale=s.scale, softcap=s.softcap, sink_pages=s.sink_pages,
        window_pages=s.window_pages, k_scale=s.k_scale, scores=b.scores, base=b.base, forced=b.forced, partials=b.partials, scratch=workspace,
        kernels=s.kernels, full_pages=s.rule.full_pages, overlap=s.overlap, settled=s.settled,
    )
    select(
        b.scores, b.base, b.forced, b.partials, seq_lens, group=workspace.group, rule=s.rule, sink_pages=s.sink_pages, window_pages=s.window_pages,
        ready=ready, pages=b.pages, counts=b.counts, covered=b.covered, kernels=s.kernels, keys=b.keys, overlap=s.overlap,
        settled=s.settled,
    )
    attend(
        query, key_cache, value_cache, block_table, seq_lens, b.pages, b.counts, scale=s.scale, softcap=s.softcap, k_scale=s.k_scale, v_scale=s.v_scale,
        out=out, lse=lse, scratch=workspace, kernels=s.kernels, overlap_previous=s.overlap,
    )
