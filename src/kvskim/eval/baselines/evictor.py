"""Methods that evict tokens while decoding: a cache of bounded size whose oldest decisions cannot be undone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvskim.eval.baselines.base import Baseline, Option, key_bytes
from kvskim.layout import PAGE_TOKENS

INTERVAL = Option(PAGE_TOKENS, "tokens decoded between evictions", 1, PAGE_TOKENS)


@dataclass
class Alive:
    """Tokens of one layer that are still in the cache: bool ``[H, T]`` for the ``T`` tokens so far, ``count`` of them for every kv head."""

    mask: Tensor
    count: int


class Evictor(Baseline):
    """Keeps at most ``budget_tokens`` tokens of prompt and decoded text together, at every step.

    When the next token would be one too many, the cache is cut to ``budget_tokens - interval`` tokens, the next one not counted, so
    that it holds between ``budget_tokens - interval + 1`` and ``budget_tokens``; with an interval of 16 that is what a selector attends
    whose last page fills up. The first cut is that of the prompt.
    """

    stateful = True
    known_options: ClassVar[Mapping[str, Option]] = {"interval": INTERVAL}

    def restart(self) -> None:
        self.alive: dict[int, Alive] = {}
        self.state: dict[int, Any] = {layer: self.start(prepared) for layer, prepared in self.prepared.items()}

    def start(self, prepared: Any) -> Any:
        """What the method knows of a layer when decoding starts. ``prepared`` must not be changed: every continuation starts from it."""
        return None

    @abstractmethod
    def keep(self, layer: int, keys: Tensor, alive: Tensor, count: int) -> Tensor:
        """Choose what stays.

        Args:
            keys: ``[H, T, D]`` of all tokens so far; only those alive may be used.
            alive: bool ``[H, T]``.
            count: tokens to keep, less than are alive.

        Returns:
            bool ``[H, T]``, a part of ``alive`` with exactly ``count`` tokens per kv head.
        """

    def attended(self, layer: int, queries: Tensor, keys: Tensor, alive: Tensor, position: int) -> None:
        """See a query ``[1, H, G, D]`` that has just attended the tokens ``alive [H, L]``, its own included."""

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        heads = keys.shape[0]
        alive = self.alive.setdefault(layer, Alive(torch.ones(heads, self.tokens, dtype=torch.bool, device=keys.device), self.tokens))
        seen = alive.mask.shape[1]
        if position != seen or queries.shape[0] != 1:
            raise ValueError(
                f"{self.name} must see every token once, alone and in order: {queries.shape[0]} at position {position} came after {seen} tokens"
            )
        side_bytes = 0.0
        if alive.count >= self.budget_tokens:
            # The prompt is cut while it is prefilled; later cuts read the kept keys.
            side_bytes = key_bytes(alive.count, keys.shape[2]) if position > self.tokens else 0.0
            count = self.budget_tokens - self.options["interval"]
            alive.mask, alive.count = self.keep(layer, keys[:, :position], alive.mask, count), count
        alive.mask = torch.cat([alive.mask, alive.mask.new_ones(heads, 1)], 1)
        alive.count += 1
        selected = alive.mask[None]
        self.attended(layer, queries, keys, alive.mask, position)
        self.record(layer, queries, keys, causal, selected, side_bytes)
        return selected
