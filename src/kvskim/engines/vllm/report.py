"""What kvskim says about itself: the block at engine start, and what the last decode step of each layer attended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvskim import __version__
from kvskim.layout import PAGE_TOKENS, PageLayout
from kvskim.ops.score import scorer
from kvskim.rules import RuleParameters

if TYPE_CHECKING:
    from kvskim.engines.vllm.state import SkimState

_MIB = 2**20


def rule_text(rule: RuleParameters) -> str:
    """The rule in one phrase: "threshold: mass >= 0.005, at least 8 pages"."""
    parts = []
    if rule.rule == "threshold":
        parts.append(f"threshold: mass >= {rule.tau:g}")
    elif rule.rule == "coverage":
        parts.append(f"coverage: {rule.coverage:g} of the mass")
    elif rule.budget_pages is not None:
        parts.append(f"budget: {rule.budget_pages} pages")
    else:
        parts.append(f"budget: {rule.budget_fraction:g} of the pages")
    if rule.min_pages:
        parts.append(f"at least {rule.min_pages} pages")
    if rule.max_pages is not None:
        parts.append(f"at most {rule.max_pages} pages")
    if rule.full_pages:
        parts.append(f"all of up to {rule.full_pages} pages")
    if rule.combine != "softmax":
        parts.append(f"combine {rule.combine}")
    return ", ".join(parts)


def layer_ranges(indices: Sequence[int]) -> str:
    """Sorted layer indices as ranges: "0-3, 7, 9-12"."""
    ranges: list[list[int]] = []
    for index in sorted(set(indices)):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _other_scorer(state: SkimState) -> str:
    """Says that pages are scored by other kernels than the rest, where that is so."""
    kernels = state.kernels.kernels
    names = {scorer(state.selector, kernels, layer.head_size, layer.group, state.query_dtype) for layer in state.layers.values()}
    return "" if names <= {kernels} else f"; pages are scored by {' and '.join(sorted(names))}"


def _joined_queries(state: SkimState) -> str:
    """Says that the two parts of a latent query are put together anew in every step, where no kernel takes them as they are."""
    latent = [layer for layer in state.layers.values() if layer.latent_size is not None]
    cuda = {scorer(state.selector, state.kernels.kernels, layer.head_size, layer.group, state.query_dtype) for layer in latent} == {"cuda"}
    return "; the parts of a query are joined for score in every step" if latent and not (cuda and state.selector.name == "sketch") else ""


def start_block(state: SkimState) -> list[str]:
    """The lines that are logged when an engine starts: what is sparse, how, and what it costs."""
    config = state.config
    lines = [f"kvskim {__version__} in vLLM, variant {config.variant}"]
    if not state.layers:
        lines.append("  sparse       NO LAYER: attention is vLLM's own")
    else:
        layers = list(state.layers.values())
        first = layers[0]
        record_bytes = first.records.record_bytes
        layout = PageLayout(state.vllm_config.cache_config.block_size, first.num_kv_heads, first.head_size)
        latent = first.latent_size is not None
        # A latent row is key and value in one.
        share = record_bytes / (layout.kv_bytes_per_page() // (2 if latent else 1))
        total = len(layers) + len(state.dense)
        lines += [
            f"  sparse       {len(layers)} of {total} layers ({layer_ranges([s.index for s in layers])}), {first.num_kv_heads} kv heads of "
            f"{first.group} query heads, head size {first.head_size}{' (latent)' if latent else ''}, on this rank",
            f"  selector     {config.selector}, {record_bytes} bytes per page and kv head ({share:.1%} of {'the latent cache' if latent else 'K and V'}), "
            f"{layout.record_bytes_per_block(record_bytes)} bytes per block and layer",
            f"  rule         {rule_text(state.rule)}; always: {config.sink_pages} first and {config.window_pages} last pages",
            f"  kernels      {state.kernels.kernels}: {state.kernels.reason}{_other_scorer(state)}{_joined_queries(state)}",
            f"  calibration  {state.calibration_source or 'not needed'}",
        ]
        if config.full_pages == "auto":
            alone = state.rule_of(1, first.num_kv_heads, layout.kv_bytes_per_page() // PAGE_TOKENS, latent=latent).full_pages
            lines.append(f"  whole        a request of up to {alone} pages attends all of them; in a batch less")
        parts = "" if state.rows >= state.max_rows else f"; larger decode batches run in parts of {state.rows}"
        lines.append(
            f"  workspace    {state.rows} of {state.max_rows} rows x {state.page_capacity} pages, {state.workspace_bytes / _MIB:.1f} MiB{parts}"
        )
        if state.vllm_config.speculative_config is not None:
            lines.append("  speculation  rows with more than one query token keep full attention")
    for reason, names in _reasons(state.dense).items():
        lines.append(f"  dense        {len(names)} layers ({names[0]}{' ...' if len(names) > 1 else ''}): {reason}")
    return lines


def _reasons(dense: dict[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {reason: [] for reason in Counter(dense.values())}
    for name, reason in dense.items():
        reasons[reason].append(name)
    return reasons


@dataclass(frozen=True)
class Activity:
    """What was attended in decode: of one layer, or summed over several steps.

    ``attended`` and ``total``: pages, summed over rows and kv heads. ``covered``: estimated covered mass, summed over the same; ``count``:
    how many (row, kv head) that were.
    """

    attended: int = 0
    total: int = 0
    covered: float = 0.0
    count: int = 0

    def __add__(self, other: Activity) -> Activity:
        return Activity(
            self.attended + other.attended, self.total + other.total, self.covered + other.covered, self.count + other.count
        )

    @property
    def share(self) -> float:
        """Attended part of the pages."""
        return self.attended / max(1, self.total)

    @property
    def mean_covered(self) -> float:
        """Estimated attention mass on the attended pages."""
        return self.covered / max(1, self.count)


def measure(counts: Tensor, covered: Tensor, seq_lens: Tensor) -> Activity:
    """Activity of one decode step of one layer; waits for the GPU.

    Args:
        counts: int32 ``[R, H]``, pages attended.
        covered: float32 ``[R, H]``.
        seq_lens: int32 ``[R]``; rows of length 0 are left out.
    """
    lengths = seq_lens.to("cpu", torch.int64)
    live = lengths > 0
    pages = (lengths[live] + PAGE_TOKENS - 1) // PAGE_TOKENS
    heads = counts.shape[1]
    return Activity(
        attended=int(counts.cpu()[live].sum()),
        total=int(pages.sum()) * heads,
        covered=float(covered.cpu()[live].sum()),
        count=int(live.sum()) * heads,
    )


def last_step(state: SkimState) -> dict[str, Activity] | None:
    """Activity of the last decode step of every sparse layer, by layer name; None before the first one."""
    lengths = state.last_lengths
    if lengths is None:
        return None
    rows = lengths.shape[0]
    result = {}
    for name, layer in state.layers.items():
        if layer.counts is not None and layer.covered is not None:
            result[name] = measure(layer.counts[:rows], layer.covered[:rows], lengths)
    return result
