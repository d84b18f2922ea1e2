"""A policy inside a policy: measures, layer by layer and head by head, what the choice of another policy costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvskim.eval.model import EvalModel
from kvskim.eval.policy import Policy, token_mask
from kvskim.layout import PAGE_TOKENS, ceil_div


class EveryPage(Policy):
    """Full attention as a policy."""

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        selected = torch.ones(queries.shape[0], queries.shape[1], ceil_div(keys.shape[1], PAGE_TOKENS), dtype=torch.bool, device=keys.device)
        self.record(layer, queries, keys, causal, selected, 0.0)
        return selected


@dataclass
class LayerSums:
    """Sums over the queries of one layer.

    ``missed`` ``[H, G]``: attention mass outside the choice. ``error`` ``[H, G]``: norm of the change of the attention output over the norm of the exact
    output. ``gap`` ``[H]``: mass that the same number of pages, chosen by their exact mass, would cover beyond the choice.
    """

    queries: int
    missed: Tensor
    error: Tensor
    gap: Tensor


class Probe(Policy):
    """Chooses as ``inner`` does and compares each choice with full attention on the same queries, keys and values."""

    def __init__(self, inner: Policy, model: EvalModel) -> None:
        super().__init__()
        self.inner, self.model = inner, model
        self.statistics = inner.statistics
        self.stateful = inner.stateful  # type: ignore[misc]
        self.layers: dict[int, LayerSums] = {}

    def restart(self) -> None:
        self.inner.restart()

    def read_keys(self, layer: int, keys: Tensor) -> Tensor:
        return self.inner.read_keys(layer, keys)

    def read_values(self, layer: int, values: Tensor) -> Tensor:
        return self.inner.read_values(layer, values)

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        selected = self.inner.choose(layer, queries, keys, position, causal)
        values = self.model.values[layer][:, : keys.shape[1]]
        chosen = token_mask(selected, keys.shape[1]) & causal[:, None]
        exact = self._weights(queries, keys, causal[:, None, None])
        output = torch.einsum("nhgl,hld->nhgd", exact, values.float())
        weights = self._weights(queries, self.inner.read_keys(layer, keys), chosen[:, :, None])
        sparse = torch.einsum("nhgl,hld->nhgd", weights, self.inner.read_values(layer, values).float())
        missed = (1 - (exact * chosen[:, :, None]).sum(-1)).clamp_min(0)
        error = (sparse - output).norm(dim=-1) / output.norm(dim=-1).clamp_min(1e-20)
        sums = LayerSums(queries.shape[0], missed.sum(0), error.sum(0), _oracle_gap(exact.mean(2), selected, chosen).sum(0))
        before = self.layers.get(layer)
        if before is not None:
            sums = LayerSums(
                before.queries + sums.queries, before.missed + sums.missed, before.error + sums.error, before.gap + sums.gap
            )
        self.layers[layer] = sums
        return selected

    def _weights(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        logits = torch.einsum("nhgd,hld->nhgl", queries.float(), keys.float())
        if self.model.softcap:
            logits = self.model.softcap * torch.tanh(logits / self.model.softcap)
        return logits.masked_fill(~mask, -torch.inf).softmax(-1)

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means over queries, float32 on the CPU: missed mass ``[layers, Hq]``, output error ``[layers, Hq]``, oracle gap ``[layers, H]``."""
        ordered = [self.layers[layer] for layer in sorted(self.layers)]
        missed = torch.stack([(sums.missed / sums.queries).flatten() for sums in ordered])
        error = torch.stack([(sums.error / sums.queries).flatten() for sums in ordered])
        return missed.cpu(), error.cpu(), torch.stack([sums.gap / sums.queries for sums in ordered]).cpu()


def _oracle_gap(mass: Tensor, selected: Tensor, chosen: Tensor) -> Tensor:
    """``[N, H]``, not negative: group-mean mass of as many pages (or tokens, where tokens were chosen), heaviest first, minus that of the choice.

    mass: group-mean mass of tokens ``[N, H, L]``. selected: as a policy gives it. chosen: the same by tokens.
    """
    tokens = mass.shape[2]
    covered = (mass * chosen).sum(-1)
    if selected.shape[-1] == tokens:
        parts, count = mass, chosen.sum(-1)
    else:
        padded = torch.nn.functional.pad(mass, (0, selected.shape[-1] * PAGE_TOKENS - tokens))
        parts, count = padded.unflatten(-1, (-1, PAGE_TOKENS)).sum(-1), selected.sum(-1)
    best = parts.sort(-1, descending=True).values.cumsum(-1)
    return (best.gather(-1, (count - 1).clamp_min(0)[..., None])[..., 0] * (count > 0) - covered).clamp_min(0)
