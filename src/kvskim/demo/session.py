"""Running a model step by step: prefill in chunks, greedy decoding, going back to a common prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 256


class Session:
    """One sequence of a model and its cache. All methods run without gradients.

    model: a causal language model, with kvskim enabled or not. The cache is transformers' own dynamic cache.
    """

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        from kvskim.engines.transformers import cache_keyword

        self.model = model
        self.cache = DynamicCache(config=model.config)
        self._keyword = cache_keyword(model)
        self._last_only = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return int(self.cache.get_seq_length())

    @torch.no_grad()
    def feed(self, ids: list[int], keep: int = 1) -> Tensor:
        """Append tokens in one forward call; returns logits ``[keep, vocabulary]`` of the last ``keep`` of them, in float32."""
        tokens = torch.tensor([ids], device=self.model.device)
        arguments: dict[str, Any] = {self._keyword: self.cache, "use_cache": True}
        if self._last_only:
            arguments["logits_to_keep"] = keep
        logits: Tensor = self.model(input_ids=tokens, **arguments).logits
        return logits[0, -keep:].float()

    def prefill(self, ids: list[int], progress: Callable[[int], None] | None = None) -> None:
        """Append a prompt in chunks; ``progress`` is called with the number of tokens of each chunk when it is done."""
        for begin in range(0, len(ids), CHUNK):
            chunk = ids[begin : begin + CHUNK]
            self.feed(chunk)
            if progress is not None:
                progress(len(chunk))

    def go_back(self, length: int) -> None:
        """Forget all tokens after the first ``length``."""
        surplus = self.length - length
        if surplus > 0:
            self.cache.crop(-surplus)

    def answer(self, prompt: list[int], stop: set[int], limit: int, progress: Callable[[], None] | None = None) -> list[int]:
        """Greedy continuation of ``prompt``. Its last token goes through a decode step, so that every answer token comes from decode steps."""
        if len(prompt) > 1:
            self.feed(prompt[:-1])
        token, out = prompt[-1], []
        for _ in range(limit):
            token = int(self.feed([token])[0].argmax())
            if progress is not None:
                progress()
            if token in stop:
                break
            out.append(token)
        return out

    def step_logits(self, ids: list[int], progress: Callable[[], None] | None = None) -> Tensor:
        """Logits after each of ``ids``, fed one decode step at a time, ``[len(ids), vocabulary]``."""
        rows = []
        for token in ids:
            rows.append(self.feed([token])[0])
            if progress is not None:
                progress()
        return torch.stack(rows)
