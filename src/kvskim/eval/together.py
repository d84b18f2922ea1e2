"""Decoding under several policies at a time, one token of each in one pass through the model.

A policy whose choice depends on what was decoded before it cannot check drafts, so each of its tokens costs a pass of its own, and a pass of one token
of a small model on a GPU costs the launch of its kernels. Such policies go through the layers as rows of a batch: they share the keys and values of
the prompt in the model's store, and each has its own of what it decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvskim.eval.policy import Policy, token_mask

if TYPE_CHECKING:
    from kvskim.eval.model import EvalModel


def goes_together(policy: Policy) -> bool:
    """Whether `Together` serves a policy: one that sees tokens one by one, and attends keys and values as they are cached."""
    kind = type(policy)
    return policy.stateful and kind.read_keys is Policy.read_keys and kind.read_values is Policy.read_values


class Together:
    """``R`` policies after the same prompt.

    Args:
        model: its store holds the first ``prefix`` tokens. What lies behind them is overwritten.
        prefix: tokens that all rows share.
        policies: one for each row, prepared for this prompt.
        room: tokens that a row may decode.
    """

    def __init__(self, model: EvalModel, prefix: int, policies: Sequence[Policy], room: int) -> None:
        self.model, self.prefix, self.policies = model, prefix, list(policies)
        shape = (len(self.policies), model.num_kv_heads, room, model.head_dim)
        self.keys = [keys.new_zeros(shape) for keys in model.keys]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.policies = [self.policies[row] for row in rows]
        index = torch.tensor(rows, device=self.model.device)
        self.keys, self.values = [keys[index] for keys in self.keys], [values[index] for values in self.values]

    def step(self, tokens: Sequence[int], position: int) -> Tensor:
        """Decode one token of each row, all at ``position``; float32 logits ``[R, vocabulary]``."""
        model = self.model
        model.together, model.position = self, position
        try:
            return model.forward_rows(torch.tensor(tokens)[:, None], torch.full((len(tokens), 1), position, device=model.device))[:, 0]
        finally:
            self.model.together = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float) -> Tensor:
        """Attention of one layer: ``query [R, Hq, 1, D]``, ``key`` and ``value`` ``[R, H, 1, D]``; the result is ``[R, 1, Hq, D]``."""
        model, prefix, position = self.model, self.prefix, self.model.position
        stop, window = position + 1, self.model.window[layer]
        own_keys, own_values = self.keys[layer][:, :, : stop - prefix], self.values[layer][:, :, : stop - prefix]
        own_keys[:, :, -1], own_values[:, :, -1] = key[:, :, 0], value[:, :, 0]
        rows = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        first = max(0, stop - window) if window else 0
        allowed = None if window else self._allowed(layer, rows * scale, own_keys, position)
        shared_keys, shared_values = model.keys[layer][:, first:prefix], model.values[layer][:, first:prefix]
        own_keys, own_values = own_keys[:, :, max(0, first - prefix) :], own_values[:, :, max(0, first - prefix) :]
        exact = rows.float()
        logits = torch.cat([torch.einsum("rhgd,hld->rhgl", exact, shared_keys.float()), torch.einsum("rhgd,rhsd->rhgs", exact, own_keys.float())], -1) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if allowed is not None:
            logits = logits.masked_fill(~allowed[:, :, None], -torch.inf)
        weights = logits.softmax(-1).to(value.dtype)
        shared = shared_keys.shape[1]
        out = torch.einsum("rhgl,hld->rhgd", weights[..., :shared], shared_values) + torch.einsum("rhgs,rhsd->rhgd", weights[..., shared:], own_values)
        return out.flatten(1, 2)[:, None]

    def _allowed(self, layer: int, queries: Tensor, own_keys: Tensor, position: int) -> Tensor:
        """Tokens that each row attends, bool ``[R, H, position + 1]``. ``queries [R, H, G, D]`` are scaled."""
        stored = self.model.keys[layer][:, : position + 1]
        causal = torch.ones(1, position + 1, dtype=torch.bool, device=queries.device)
        allowed = []
        for row, policy in enumerate(self.policies):
            # A policy looks at one sequence of keys: the place behind the prompt holds those of each row in turn.
            stored[:, self.prefix :] = own_keys[row]
            allowed.append(token_mask(policy.choose(layer, queries[row : row + 1], stored, position, causal), position + 1)[0])
        return torch.stack(allowed)


def greedy_together(
    model: EvalModel, prompt: Tensor, prefix: int, policies: Sequence[Policy], limit: int, stop: Collection[int],
    settled: Callable[[list[int]], bool],
) -> list[list[int]]:
    """Greedy answers, one for each policy; see `kvskim.eval.generation.greedy`.

    Args:
        prefix: tokens of ``prompt`` that are in the store; the others, at least one, are decoded under the policies.
    """
    rows = Together(model, prefix, policies, len(prompt) - prefix + limit)
    tokens = prompt.tolist()
    for position in range(prefix, len(prompt) - 1):
        rows.step([tokens[position]] * len(policies), position)
    answers: list[list[int]] = [[] for _ in policies]
    live, latest = list(range(len(policies))), [tokens[-1]] * len(policies)
    for position in range(len(prompt) - 1, len(prompt) - 1 + limit):
        best = rows.step(latest, position).argmax(-1).tolist()
        kept = []
        for row, token in enumerate(best):
            answer = answers[live[row]]
            if token not in stop:
                answer.append(token)
                if not settled(answer):
                    kept.append(row)
        if not kept:
            break
        if len(kept) < len(live):
            rows.keep(kept)
        latest, live = [best[row] for row in kept], [live[row] for row in kept]
    return answers
