"""`mean`: the page mean alone, the cheapest record. A lower bound of the log-mass, blind to any single outstanding key."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.selectors.base import LOG_PAGE, PageTables, Selector, register
from kvskim.selectors.page_eigen import Field, RecordFormat, centred_pages, check_head_dim, code_mean, mean_logits


@register
class Mean(Selector):
    """Page mean in int8: ``S = q . mu + log 16``, the log-mass if all 16 keys were equal (a lower bound, by Jensen's inequality).

    Record: mean int8 ``[D]``, its scale bfloat16.
    """

    name = "mean"

    def format(self, head_dim: int) -> RecordFormat:
        check_head_dim(self.name, head_dim)
        return RecordFormat((Field("mean", "int8", (head_dim,)), Field("mean_scale", "bfloat16", ())))

    def record_bytes(self, head_dim: int) -> int:
        return self.format(head_dim).nbytes

    def encode(self, keys: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        mean = centred_pages(keys, tables).mean(2)
        codes, scale = code_mean(mean, torch.isfinite(mean).all(-1))
        return self.format(keys.shape[-1]).pack({"mean": codes, "mean_scale": scale})

    def score(self, queries: Tensor, records: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        fields = self.format(queries.shape[-1]).unpack(records)
        return mean_logits(queries, fields["mean"], fields["mean_scale"], tables) + LOG_PAGE
