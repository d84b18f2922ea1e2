"""`rki4`: page mean in int8, the largest principal directions in int4, the coordinates of every token in int8."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.selectors.base import PageTables, Selector, register
from kvskim.selectors.page_eigen import (
    Field,
    RecordFormat,
    check_head_dim,
    check_rank,
    code_mean,
    decompose,
    dequantise,
    mean_logits,
    project,
    quantise,
)


class PrincipalKeys(Selector):
    """Low-rank copy of the 16 keys of a page: ``k_t ~ mu + sum_k c_tk v_k`` and ``S = log sum_t exp(q . k_t)`` of that copy.

    Record: mean int8 ``[D]``, scale bfloat16; directions int8 or int4 ``[rank, D]``, scale bfloat16 ``[rank]``; coordinates int8
    ``[16, rank]``, scale bfloat16 ``[16]``. Decomposition: `kvskim.selectors.page_eigen`.
    """

    vector_bits: ClassVar[Literal[4, 8]]

    def __init__(self, rank: int = 8) -> None:
        self.rank = check_rank(self.name, rank)

    def format(self, head_dim: int) -> RecordFormat:
        check_head_dim(self.name, head_dim, multiple=8 // self.vector_bits)
        return RecordFormat((
            Field("mean", "int8", (head_dim,)),
            Field("mean_scale", "bfloat16", ()),
            Field("vectors", "int4" if self.vector_bits == 4 else "int8", (self.rank, head_dim)),
            Field("vector_scale", "bfloat16", (self.rank,)),
            Field("coordinates", "int8", (PAGE_TOKENS, self.rank)),
            Field("coordinate_scale", "bfloat16", (PAGE_TOKENS,)),
        ))

    def record_bytes(self, head_dim: int) -> int:
        return self.format(head_dim).nbytes

    def encode(self, keys: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        page = decompose(keys, tables, self.rank)
        mean, mean_scale = code_mean(page.mean, page.finite)
        vectors, vector_scale = quantise(page.vectors, self.vector_bits)
        coordinates, coordinate_scale = quantise(page.coordinates, 8)
        return self.format(keys.shape[-1]).pack({
            "mean": mean, "mean_scale": mean_scale, "vectors": vectors, "vector_scale": vector_scale,
            "coordinates": coordinates, "coordinate_scale": coordinate_scale,
        })

    def score(self, queries: Tensor, records: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        fields = self.format(queries.shape[-1]).unpack(records)
        z = project(queries, dequantise(fields["vectors"], fields["vector_scale"]))
        coordinates = dequantise(fields["coordinates"], fields["coordinate_scale"])
        deviation = torch.logsumexp(torch.einsum("nhpgk,phtk->nhpgt", z, coordinates), -1)
        return mean_logits(queries, fields["mean"], fields["mean_scale"], tables) + deviation


@register
class Rki4(PrincipalKeys):
    """Directions in int4: 818 bytes at rank 8 and head dim 128."""

    name = "rki4"
    vector_bits = 4
