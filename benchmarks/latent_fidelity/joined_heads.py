"""The attention of a real model with few kv heads, written as latent attention: one row per token and layer, one kv head, all query heads on it.

The row of a token is the values of its kv heads side by side, then their rotated keys; the query of a head is its own in the place of its kv head's keys, and
zero elsewhere. Scores and outputs are those of the model, exactly. So keys, queries and attention are a trained model's, and one record covers a row that
several heads share. What differs from a model that was trained with latent attention: the rotary part is all of the keys instead of 64 channels, and a query
sees only the channels of its kv head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvskim.calibration import LayerCalibration, fit_layer
from kvskim.demo.text import tokenize
from kvskim.eval.baselines.base import layer_rotary
from kvskim.eval.methods import CALIBRATION_TOKENS
from kvskim.eval.model import EvalModel
from kvskim.eval.texts import other_text, prose
from kvskim.layout import PAGE_TOKENS
from kvskim.rotary import Rotary

QUERIES = PAGE_TOKENS
LAYER_STRIDE = 3
"""One in so many layers is measured."""


def joined_rows(keys: Tensor, values: Tensor) -> Tensor:
    """Rows ``[T, 2 H D]`` of keys and values ``[H, T, D]``."""
    return torch.cat([values, keys]).transpose(0, 1).flatten(1)


def joined_queries(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Queries ``[Hq, n, 2 H D]`` on joined rows, of queries ``[Hq, n, D]``."""
    grouped = queries.unflatten(0, (num_kv_heads, -1))
    _, group, count, dim = grouped.shape
    out = grouped.new_zeros(num_kv_heads, group, count, 2 * num_kv_heads, dim)
    for head in range(num_kv_heads):
        out[head, :, :, num_kv_heads + head] = grouped[head]
    return out.flatten(0, 1).flatten(-2)


@dataclass
class JoinedLayer:
    """One layer: pages ``[P, 1, 16, 2 H D]`` of a text but its last page, and the scaled queries ``[16, 1, Hq, 2 H D]`` of that last page.

    ``calibration``: fitted for records of so many bytes.
    """

    pages: Tensor
    queries: Tensor
    calibration: Callable[[int], LayerCalibration]


@dataclass(frozen=True)
class JoinedRotary(Rotary):
    """Turns the keys of each of ``heads`` kv heads in joined rows or queries, and leaves the values before them alone."""

    heads: int = 1

    def rotate(self, x: Tensor, offset: Tensor | int) -> Tensor:
        values, keys = x.chunk(2, -1)
        place = torch.as_tensor(offset, device=x.device)[..., None]
        return torch.cat([values, super().rotate(keys.unflatten(-1, (self.heads, -1)), place).flatten(-2)], -1)


def _fit_on_store(model: EvalModel, layer: int, stop: int, served: int) -> Callable[[int], LayerCalibration]:
    """The fit of a layer on the first ``stop`` tokens of the text in the store, but the first page: it is always attended, and like no other.

    served: tokens of the longest text that the fit is for; 0: those that it was made on.
    """
    positions = model.calibration_positions()
    kept = positions < stop
    keys, values = (cache[layer][:, PAGE_TOKENS:stop].clone() for cache in (model.keys, model.values))
    queries, rotary = model.calibration_queries(layer)[:, kept], layer_rotary(model, layer, "the calibration")

    def fit(record_bytes: int) -> LayerCalibration:
        return fit_layer(
            joined_rows(keys, values)[None], joined_queries(queries, len(keys)), record_bytes=record_bytes,
            rotary=JoinedRotary(rotary.inverse_frequency, rotary.interleaved, rotary.first, heads=len(keys)), served_positions=served,
            key_positions=torch.arange(PAGE_TOKENS, stop), query_positions=positions[kept],
        )

    return functools.cache(fit)


def other_text_fits(model: EvalModel, longest: int) -> dict[int, Callable[[int], LayerCalibration]]:
    """By measured layer: fits on prose and code that share nothing with what is measured, for positions up to ``longest``."""
    half = CALIBRATION_TOKENS // 2
    parts = [tokenize(model.tokenizer, text)[:half] for text in (other_text()[: 12 * half], prose()[-12 * half :])]
    ids = torch.tensor(parts[0] + parts[1])
    model.reserve(len(ids))
    model.prefill(ids, query_stride=4)
    return {layer: _fit_on_store(model, layer, len(ids), longest) for layer in model.sparse_layers[::LAYER_STRIDE]}


def layers_of_text(model: EvalModel, ids: list[int], fits: dict[int, Callable[[int], LayerCalibration]]) -> Iterator[tuple[JoinedLayer, JoinedLayer]]:
    """Layers of a text, each with a fit on this very text, but its last page, and with the one of ``fits``, on another text."""
    model.reserve(len(ids))
    model.prefill(torch.tensor(ids))
    stop = len(ids) - PAGE_TOKENS
    for layer, other in fits.items():
        rows = joined_rows(model.keys[layer], model.values[layer])
        queries = joined_queries(model.observed[layer][:, -QUERIES:], model.num_kv_heads)
        own = _fit_on_store(model, layer, stop, 0)
        pages, asked = rows[:stop].unflatten(0, (-1, PAGE_TOKENS))[:, None], queries.transpose(0, 1)[:, None]
        yield JoinedLayer(pages, asked, own), JoinedLayer(pages, asked, other)
