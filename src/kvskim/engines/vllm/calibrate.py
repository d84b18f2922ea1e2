"""Calibration inside the engine, on the first prompts that it prefills, where there is none in a file.

Keys and queries of a few thousand prefill tokens are copied aside while FlashAttention computes them; then the layers are fitted one per
engine step, on the GPU, in the engine's own order of work, so that all tensor-parallel ranks do the same in the same step and nothing
depends on timing; then all pages in the cache are encoded once and the device flag ``ready`` is set. Until then every page is attended.
Captured graphs stay valid: they read the tables and the flag from the device. There is no second fit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvskim.calibration import SPREAD_COPIES, Calibration, LayerCalibration, fit_layer
from kvskim.engines.vllm.calibration_source import keep_calibration
from kvskim.engines.vllm.parallel import queries_of_all_ranks
from kvskim.layout import PAGE_TOKENS
from kvskim.rotary import Rotary
from kvskim.selectors.base import PageTables, Selector
from kvskim.selectors.sketch import SketchTables

if TYPE_CHECKING:
    from kvskim.engines.vllm.layer_state import LayerState
    from kvskim.engines.vllm.state import SkimState

CAPTURE_TOKENS = 4096
"""Prefill tokens whose keys are read."""
QUERY_STRIDE = 4
"""One in so many of these tokens gives queries too: their second moment needs fewer of them."""
SHORTEST_ROW = 4 * PAGE_TOKENS
"""Prefill rows shorter than this are left out: vLLM's own warm-up requests are a few tokens long."""
FIT_COPIES = 12
"""Float copies of a layer's keys that a fit holds at its peak, generously counted."""
ENCODE_PAGES = 65536
"""Pages encoded by one call when all pages in the cache get their records."""


@dataclass(frozen=True)
class Segment:
    """Tokens ``start .. start + count - 1`` of a step, which go to index ``target`` of the captured tokens; ``position``: of the first in its request."""

    start: int
    count: int
    target: int
    position: int


def plan_segments(starts: Sequence[int], lengths: Sequence[int], captured: int, capacity: int) -> tuple[Segment, ...]:
    """Which tokens of a step calibration reads: whole groups of 16 tokens of every long row, without the row's first 16 tokens.

    The first page of a request is always attended, and its keys are unlike all others.

    Args:
        starts: ``[rows + 1]``, first token of each row, and the end.
        lengths: ``[rows]``, tokens of each request, those of this step counted.
        captured: tokens that earlier steps gave.
        capacity: tokens wanted in all, a multiple of 16.
    """
    segments = []
    for (start, end), length in zip(itertools.pairwise(starts), lengths):
        room = capacity - captured
        if room < PAGE_TOKENS:
            break
        if end - start < SHORTEST_ROW:
            continue
        count = min((end - start - PAGE_TOKENS) // PAGE_TOKENS * PAGE_TOKENS, room)
        segments.append(Segment(start + PAGE_TOKENS, count, captured, length - (end - start) + PAGE_TOKENS))
        captured += count
    return tuple(segments)


class Calibrator:
    """Captures the first prompts, fits the layers, and hands the tables over. Thrown away afterwards.

    Args:
        selector: the record format that is fitted.
        layers: the sparse layers of this worker, in the order of the model.
        rotary: the model's rotary embedding; None: the fit sees the captured keys at their own positions only.
        served_positions: tokens of the longest request.
    """

    def __init__(self, selector: Selector, layers: Sequence[LayerState], rotary: Rotary | None, served_positions: int) -> None:
        self._selector = selector
        self._layers = list(layers)
        self._rotary = rotary
        self._served_positions = served_positions if rotary is not None else 0
        self._captured = 0
        self._positions = torch.zeros(CAPTURE_TOKENS, dtype=torch.int64)
        self._keys: dict[str, Tensor] = {}
        self._queries: dict[str, Tensor] = {}
        self._planned: tuple[tuple[Segment, ...], int] = (), 0
        self._fitted: list[LayerCalibration] = []
        self._seconds = 0.0

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make room for the captured tokens; called in vLLM's profiling run, so that it is counted."""
        for layer in self._layers:
            queries = CAPTURE_TOKENS // QUERY_STRIDE
            self._keys[layer.name] = torch.zeros(CAPTURE_TOKENS, layer.num_kv_heads, layer.head_size, dtype=dtype, device=device)
            self._queries[layer.name] = torch.zeros(queries, layer.num_heads, layer.head_size, dtype=dtype, device=device)
        # What a fit takes for a moment shows in the peak that vLLM measures, and is free again at once.
        tokens = CAPTURE_TOKENS * (SPREAD_COPIES if self._served_positions else 1)
        torch.empty(max(FIT_COPIES * 4 * tokens * layer.num_kv_heads * layer.head_size for layer in self._layers), dtype=torch.uint8, device=device)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._keys.values(), *self._queries.values()))

    @property
    def progress(self) -> str:
        if self._captured < CAPTURE_TOKENS:
            return f"{self._captured} of {CAPTURE_TOKENS} tokens captured"
        return f"{len(self._fitted)} of {len(self._layers)} layers fitted"

    def plan(self, common: Any) -> None:
        """Choose the tokens of this step to capture, from vLLM's common metadata of the step."""
        self._planned = (), common.num_actual_tokens
        if self._captured >= CAPTURE_TOKENS or common.max_query_len < SHORTEST_ROW or not self._keys:
            return
        # This waits for the GPU, in the few prefill steps that are captured and in no other.
        starts, lengths = common.query_start_loc_cpu[: common.num_reqs + 1].tolist(), common.seq_lens[: common.num_reqs].tolist()
        segments = plan_segments(starts, lengths, self._captured, CAPTURE_TOKENS)
        # vLLM's dummy runs have no slots.
        if not segments or bool((common.slot_mapping[: segments[-1].start + 1] < 0).any()):
            return
        for s in segments:
            self._positions[s.target : s.target + s.count] = torch.arange(s.position, s.position + s.count)
        self._captured = segments[-1].target + segments[-1].count
        self._planned = segments, common.num_actual_tokens

    def planned(self, common: Any) -> tuple[Segment, ...]:
        """What `plan` chose, if it was for a step of as many tokens as this one: layers of another kind have metadata of their own."""
        segments, tokens = self._planned
        return segments if tokens == common.num_actual_tokens else ()

    def capture(self, layer: LayerState, query: Tensor, key: Tensor, segments: Sequence[Segment]) -> None:
        """Copy the keys ``[T, H, D]`` and queries ``[T, Hq, D]`` of the segments aside."""
        for s in segments:
            tokens = slice(s.start, s.start + s.count)
            self.keep(layer, query[tokens][::QUERY_STRIDE], key[tokens], s.target)

    def keep(self, layer: LayerState, queries: Tensor, keys: Tensor, target: int) -> None:
        """Copy the keys ``[n, H, D]`` of one segment and every fourth of its queries ``[n / 4, Hq, D]`` to position ``target``."""
        self._keys[layer.name][target : target + keys.shape[0]].copy_(keys)
        first = target // QUERY_STRIDE
        self._queries[layer.name][first : first + queries.shape[0]].copy_(queries)

    def advance(self, state: SkimState) -> None:
        """One step of work once enough is captured: fit the next layer, and after the last one switch to sparse."""
        if self._captured < CAPTURE_TOKENS:
            return
        if not self._fitted and not self._seconds:
            state.log(f"calibration: {CAPTURE_TOKENS} prefill tokens captured, fitting {len(self._layers)} layers, one per step")
        started = time.perf_counter()
        layer = self._layers[len(self._fitted)]
        keys = self._keys.pop(layer.name).transpose(0, 1).float()
        queries = queries_of_all_ranks(state.vllm_config, self._queries.pop(layer.name)).transpose(0, 1).float() * layer.scale
        # Ranks that share a kv head give every r-th of their queries each.
        query_positions = self._positions[:: CAPTURE_TOKENS // queries.shape[1]]
        record_bytes = self._selector.record_bytes(layer.head_size)
        fitted = fit_layer(
            keys, queries, record_bytes=record_bytes, rotary=self._rotary, served_positions=self._served_positions, key_positions=self._positions,
            query_positions=query_positions,
        )
        self._fitted.append(fitted)
        self._seconds += time.perf_counter() - started
        if len(self._fitted) == len(self._layers):
            started = time.perf_counter()
            for layer, fitted in zip(self._layers, self._fitted):
                copy_tables(layer.tables, self._selector.tables(layer.num_kv_heads, layer.head_size, fitted))
                encode_all_pages(state, layer)
            state.mark_ready()
            self._seconds += time.perf_counter() - started
            state.log(f"calibration: fitted on the first {CAPTURE_TOKENS} prefill tokens in {self._seconds:.1f} s; decode is sparse from now on")
            keep_calibration(state, {layer.index: fitted for layer, fitted in zip(self._layers, self._fitted)}, seen_later=bool(self._served_positions))


def encode_all_pages(state: SkimState, layer: LayerState) -> None:
    """Make the records of every physical page from what lies in the cache. Pages that hold nothing get records nobody reads."""
    assert layer.records.records is not None, "the records are encoded before vLLM bound its cache"
    for slots in page_slots(layer.records.records.shape[0], layer.records.records.device):
        state.encode(layer, slots)


def page_slots(num_pages: int, device: torch.device) -> Iterator[Tensor]:
    """int64 slots of the last token of each page, in runs of at most ENCODE_PAGES pages."""
    for first in range(0, num_pages, ENCODE_PAGES):
        pages = torch.arange(first, min(first + ENCODE_PAGES, num_pages), dtype=torch.int64, device=device)
        yield pages * PAGE_TOKENS + (PAGE_TOKENS - 1)


def empty_tables(selector: Selector, num_kv_heads: int, head_size: int, device: torch.device) -> Any:
    """Tables of a layer on the device, of the right shapes, to be filled later; the neutral ones where the selector has such."""
    if not selector.needs_calibration:
        return selector.tables(num_kv_heads, head_size).to(device)
    record_bytes = selector.record_bytes(head_size)
    slots = 4 * record_bytes

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_kv_heads, *shape, dtype=dtype, device=device)

    return SketchTables(
        record_bytes=record_bytes,
        mean=zeros(head_size, dtype=torch.float32),
        encode_matrix=zeros(slots, head_size, dtype=torch.bfloat16),
        query_matrix=zeros(slots, head_size, dtype=torch.bfloat16),
        coefficient_bits=zeros(slots, dtype=torch.uint8),
        coefficient_count=zeros(PAGE_TOKENS, dtype=torch.int32),
        slot_coefficient=zeros(slots, dtype=torch.int16),
        slot_digit=zeros(slots, dtype=torch.uint8),
    )


def copy_tables(target: Any, source: Any) -> None:
    """Fill the tables on the device; their addresses stay, so captured graphs see the new values."""
    for field in fields(target):
        value = getattr(target, field.name)
        if isinstance(value, Tensor):
            value.copy_(getattr(source, field.name))


def rank_tables(selector: Selector, calibration: Calibration, index: int, total_heads: int, head_size: int, first: int, count: int) -> Any:
    """Tables of kv heads ``first .. first + count - 1`` of a layer: the share of this tensor-parallel rank."""
    tables = selector.tables(total_heads, head_size, calibration.layer(index))
    if isinstance(tables, SketchTables):
        return tables.heads(first, first + count)
    return PageTables(tables.offset[first : first + count].contiguous())


def vllm_rotary(head_size: int, latent_size: int | None = None) -> Rotary | None:
    """The model's rotary embedding, taken from vLLM's; None where there is not exactly one of that head size, or it is of another kind.

    latent_size: with latent attention, the channels of a key before its rotary part.
    """
    from vllm.model_executor.layers import rotary_embedding

    first = latent_size or 0
    modules = [m for m in getattr(rotary_embedding, "_ROPE_DICT", {}).values() if getattr(m, "head_size", None) == head_size - first]
    # The kinds that only turn, at speeds that do not depend on the length of a request.
    kind = type(modules[0]).__name__ if len(modules) == 1 else ""
    if kind in ("RotaryEmbedding", "Llama3RotaryEmbedding"):
        speeds = modules[0]._compute_inv_freq(modules[0].base)
    elif kind == "DeepseekScalingRotaryEmbedding":
        speeds = modules[0]._compute_inv_freq(modules[0].scaling_factor)
    else:
        return None
    return Rotary(speeds.float().cpu(), interleaved=not modules[0].is_neox_style, first=first)
