"""`oracle`: the exact log-mass, from the keys themselves. The yardstick of every other selector, not a way to save anything."""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.selectors.base import PageTables, Selector, check_keys, register
from kvskim.selectors.page_eigen import Field, RecordFormat, check_head_dim


@register
class Oracle(Selector):
    """``S = log sum_t exp(q . k_t)``. Record: the keys in float32 ``[16, D]``, exact for every cache dtype; the offset is not used."""

    name = "oracle"
    converges = True

    def format(self, head_dim: int) -> RecordFormat:
        check_head_dim(self.name, head_dim)
        return RecordFormat((Field("keys", "float32", (PAGE_TOKENS, head_dim)),))

    def record_bytes(self, head_dim: int) -> int:
        return self.format(head_dim).nbytes

    def encode(self, keys: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        check_keys(keys)
        return self.format(keys.shape[-1]).pack({"keys": keys.float()})

    def score(self, queries: Tensor, records: Tensor, tables: PageTables, page_positions: Tensor | None = None) -> Tensor:
        keys = self.format(queries.shape[-1]).unpack(records)["keys"]
        logits = torch.einsum("nhgd,phtd->nhpgt", queries.float(), keys)
        return torch.logsumexp(logits, -1)
