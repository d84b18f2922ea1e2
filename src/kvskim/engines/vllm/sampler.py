"""A look at what decode steps attend, every few seconds, that never makes the host wait for the GPU.

The step that is looked at leaves its counts on the device; before the next step a few small operations sum them up and copy five numbers to pinned
memory, on the stream of the steps; a later step finds them there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.metrics import Sample, SkimMetrics

if TYPE_CHECKING:
    from kvskim.engines.vllm.layer_state import LayerState

SAMPLE_SECONDS = 10.0
TIER_NUMBERS = 4
"""Of layers with values in host memory; see `fetched`."""


class ActivitySampler:
    """Samples the decode steps of the sparse layers of a worker.

    Args:
        layers: with their ``counts`` and ``covered``.
        device: where these are.
        metrics: what the numbers go to.
        clock: seconds.
    """

    def __init__(self, layers: Iterable[LayerState], device: torch.device, metrics: SkimMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._layers = list(layers)
        self._metrics = metrics
        self._clock = clock
        self._due = clock()
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(5 + TIER_NUMBERS, dtype=torch.float64, pin_memory=on_gpu)
        self._fetched = [0.0] * TIER_NUMBERS
        self._copied = torch.cuda.Event() if on_gpu else None
        self._under_way = False
        self._lengths: Tensor | None = None

    def before_step(self, seq_lens: Tensor | None) -> None:
        """Called before each step: take up the last sample, copy the next one, or choose this step for it.

        Args:
            seq_lens: int32 ``[R]`` on the device, lengths of the rows that this step decodes; None: it decodes none.
        """
        if self._lengths is None and not self._under_way and self._clock() < self._due:
            return
        if self._copied is not None and torch.cuda.is_current_stream_capturing():
            return
        if self._under_way and (self._copied is None or self._copied.query()):
            self._under_way = False
            numbers = self._host.tolist()
            self._metrics.sampled(Sample(*numbers[:5]))
            if any(layer.tier is not None for layer in self._layers):
                # The layers count on and on.
                self._metrics.fetched(*(now - before for now, before in zip(numbers[5:], self._fetched)))
                self._fetched = numbers[5:]
        if self._lengths is not None:
            self._host.copy_(torch.cat([sums(self._layers, self._lengths), fetched(self._layers, self._lengths.device)]), non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            self._under_way, self._lengths = True, None
        elif seq_lens is not None and not self._under_way and self._clock() >= self._due:
            self._due = self._clock() + SAMPLE_SECONDS
            # vLLM writes the lengths of the next step to the same place.
            self._lengths = seq_lens.clone()


def fetched(layers: Iterable[LayerState], device: torch.device) -> Tensor:
    """Selected pages, those not in the hot cache, those among them that found no room there, and the bytes of those not in it: since the start, summed
    over layers, float64 ``[4]`` on the device."""
    total = torch.zeros(TIER_NUMBERS, dtype=torch.float64, device=device)
    for layer in layers:
        if layer.tier is not None:
            selected, missing, copied = layer.tier.counters.double().unbind()
            total += torch.stack([selected, missing, missing - copied, missing * (layer.tier.hot[0].numel() * layer.tier.hot.element_size())])
    return total


def sums(layers: Iterable[LayerState], seq_lens: Tensor) -> Tensor:
    """The fields of `Sample` for the last decode step, float64 ``[5]`` on the device.

    Args:
        layers: sparse layers, whose last step had these rows.
        seq_lens: int32 ``[R]``; rows of length 0 are left out.
    """
    rows = seq_lens.shape[0]
    live = (seq_lens > 0)[:, None]
    pages = ((seq_lens + (PAGE_TOKENS - 1)) // PAGE_TOKENS)[:, None]
    total = torch.zeros(5, dtype=torch.float64, device=seq_lens.device)
    by_heads: dict[int, list[LayerState]] = {}
    for layer in layers:
        by_heads.setdefault(layer.num_kv_heads, []).append(layer)
    for alike in by_heads.values():
        counts = torch.stack([layer.counts[:rows] for layer in alike if layer.counts is not None])
        covered = torch.stack([layer.covered[:rows] for layer in alike if layer.covered is not None])
        here, there = live.expand_as(counts), pages.expand_as(counts)
        # A counter would never forget a value that is no number.
        mass = torch.where(here, covered, 0.0).nan_to_num(0.0, 0.0, 0.0).clamp_min(0.0)
        parts = (counts * here, there * here, mass, here, (counts == there) & here)
        total += torch.stack([part.sum(dtype=torch.float64) for part in parts])
    return total
