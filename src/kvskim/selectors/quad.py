"""`quad`: page mean and the energy along its largest principal directions; no coordinates of tokens."""

from __future__ import annotations

from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.selectors.base import LOG_PAGE, PageTables, Selector, register
from kvskim.selectors.page_eigen import (
    Field,
    RecordFormat,
    check_bits,
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
class Quad(Selector):
    """Second-order cumulant of the logits of a page, the log moment generating function of Gaussian keys.

    ``S = q . mu + (1 / 32) sum_k lambda_k (q . v_k)^2 + log 16``. Record: mean int8 ``[D]``, scale bfloat16; directions int4 or int8
    ``[rank, D]``, scale bfloat16 ``[rank]``; lambda bfloat16 ``[rank]``. Decomposition: `kvskim.selectors.page_eigen`.
    """

    name = "quad"

    def __init__(self, rank: int = 2, bits: int = 4) -> None:
        self.rank = check_rank(self.name, rank)
        self.bits = check_bits(self.name, bits, (4, 8))

    def format(self, head_dim: int) -> RecordFormat:
        check_head_dim(self.name, head_dim, multiple=8 // self.bits)
        return RecordFormat((
            Field("mean", "int8", (head_dim,)),
            Field("mean_scale", "bfloat16", ()),
            Field("vectors", "int4" if self.bits == 4 else "int8", (self.rank, head_dim)),
            Field("vector_scale", "bfloat16", (self.rank,)),
            Field("energies", "bfloat16", (self.rank,)),
        ))

    def record_bytes(self, head_dim: int) -> int:
        return self.format(head_dim).nbytes

    def encode(self, keys: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        page = decompose(keys, tables, self.rank)
        mean, mean_scale = code_mean(page.mean, page.finite)
        vectors, vector_scale = quantise(page.vectors, self.bits)
        return self.format(keys.shape[-1]).pack({
            "mean": mean, "mean_scale": mean_scale, "vectors": vectors, "vector_scale": vector_scale, "energies": page.energies,
        })

    def score(self, queries: Tensor, records: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        fields = self.format(queries.shape[-1]).unpack(records)
        z = project(queries, dequantise(fields["vectors"], fields["vector_scale"]))
        spread = (z.square() * fields["energies"].float().transpose(0, 1)[None, :, :, None]).sum(-1) / (2 * PAGE_TOKENS)
        return mean_logits(queries, fields["mean"], fields["mean_scale"], tables) + spread + LOG_PAGE
