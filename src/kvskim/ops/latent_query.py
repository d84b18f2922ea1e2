"""The query of latent attention in two parts, as engines compute them, and as the operations take it without joining them first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvskim.ops.join_query import join_query


@dataclass(frozen=True)
class LatentQuery:
    """Two tensors that side by side are queries ``[R, Hq, L + E]`` for rows of a latent cache.

    Args:
        latent: ``[R, Hq, L]``, the query absorbed into the latent space; any strides, last dimension contiguous.
        rotary: ``[R, Hq, E]``, the part with rotary position embedding; the same.

    Raises:
        ValueError: the parts do not fit each other.

    Example:
        >>> decode_step(settings, LatentQuery(latent, rotary), cache, cache[..., :512], records, table, lengths, ...)
    """

    latent: Tensor
    rotary: Tensor

    def __post_init__(self) -> None:
        first, second = self.latent, self.rotary
        if first.dim() != 3 or second.dim() != 3 or first.shape[:2] != second.shape[:2]:
            raise ValueError(f"the parts {list(first.shape)} and {list(second.shape)} of a query do not fit: [R, Hq, L] and [R, Hq, E] are needed")
        if first.dtype != second.dtype or first.device != second.device:
            raise ValueError(
                f"the parts of a query are {first.dtype} on {first.device} and {second.dtype} on {second.device}; they must be of one type on one device"
            )

    @property
    def shape(self) -> torch.Size:
        """``[R, Hq, L + E]``."""
        return torch.Size((*self.latent.shape[:2], self.latent.shape[2] + self.rotary.shape[2]))

    @property
    def dtype(self) -> torch.dtype:
        """Of both parts."""
        return self.latent.dtype

    @property
    def device(self) -> torch.device:
        """Of both parts."""
        return self.latent.device

    def __getitem__(self, rows: slice) -> LatentQuery:
        """Some of the requests."""
        return LatentQuery(self.latent[rows], self.rotary[rows])


Query = Tensor | LatentQuery
"""A query in one tensor, or in two parts."""


def parts_of(query: Query) -> tuple[Tensor, ...]:
    """The tensors of a query: one or two."""
    return (query.latent, query.rotary) if isinstance(query, LatentQuery) else (query,)


def rows_are_contiguous(query: Query) -> bool:
    """Whether the channels of a query head lie side by side, in each part."""
    return all(part.stride(-1) == 1 or part.shape[-1] <= 1 for part in parts_of(query))


def joined(query: Query, kernels: str) -> Tensor:
    """The query in one tensor, new where it is in parts; ``kernels`` as in `join_query`."""
    if not isinstance(query, LatentQuery):
        return query
    out = query.latent.new_empty(query.shape)
    join_query(query.latent, query.rotary, out=out, kernels=kernels)
    return out
