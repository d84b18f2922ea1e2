"""`clse`: a low-rank copy of the keys of a page, and a Gaussian correction for the energy the copy leaves out."""

from __future__ import annotations

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


@register
class Clse(Selector):
    """Corrected log-sum-exp: ``S = q . mu + log sum_t exp(sum_k c_tk z_k) + max(|q|^2 - sum_k z_k^2, 0) rho / (32 (D - rank))``.

    ``z_k = q . v_k``; ``rho`` is the energy outside the kept directions, taken as spread evenly over the other ``D - rank``.
    Record: mean int8 ``[D]``, scale bfloat16; directions int4 ``[rank, D]``, scale bfloat16 ``[rank]``; coordinates int4 ``[16, rank]``,
    scale bfloat16 ``[16]``; rho float32; zeros up to a multiple of 4 bytes. Decomposition: `kvskim.selectors.page_eigen`.
    """

    name = "clse"

    def __init__(self, rank: int = 2) -> None:
        self.rank = check_rank(self.name, rank)
        if rank % 2:
            raise ValueError(f"rank of the selector clse is {rank}; it must be even, so that the int4 coordinates of a token fill whole bytes")

    def format(self, head_dim: int) -> RecordFormat:
        check_head_dim(self.name, head_dim, multiple=2, above=self.rank)
        return RecordFormat((
            Field("mean", "int8", (head_dim,)),
            Field("mean_scale", "bfloat16", ()),
            Field("vectors", "int4", (self.rank, head_dim)),
            Field("vector_scale", "bfloat16", (self.rank,)),
            Field("coordinates", "int4", (PAGE_TOKENS, self.rank)),
            Field("coordinate_scale", "bfloat16", (PAGE_TOKENS,)),
            Field("residual", "float32", ()),
        ), alignment=4)

    def record_bytes(self, head_dim: int) -> int:
        return self.format(head_dim).nbytes

    def encode(self, keys: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        page = decompose(keys, tables, self.rank)
        mean, mean_scale = code_mean(page.mean, page.finite)
        vectors, vector_scale = quantise(page.vectors, 4)
        coordinates, coordinate_scale = quantise(page.coordinates, 4)
        return self.format(keys.shape[-1]).pack({
            "mean": mean, "mean_scale": mean_scale, "vectors": vectors, "vector_scale": vector_scale,
            "coordinates": coordinates, "coordinate_scale": coordinate_scale, "residual": page.residual,
        })

    def score(self, queries: Tensor, records: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        head_dim = queries.shape[-1]
        fields = self.format(head_dim).unpack(records)
        z = project(queries, dequantise(fields["vectors"], fields["vector_scale"]))
        coordinates = dequantise(fields["coordinates"], fields["coordinate_scale"])
        deviation = torch.logsumexp(torch.einsum("nhpgk,phtk->nhpgt", z, coordinates), -1)
        outside = (queries.float().square().sum(-1)[:, :, None] - z.square().sum(-1)).clamp_min(0)
        spread = fields["residual"].transpose(0, 1)[None, :, :, None] / (2 * PAGE_TOKENS * (head_dim - self.rank))
        return mean_logits(queries, fields["mean"], fields["mean_scale"], tables) + deviation + outside * spread
