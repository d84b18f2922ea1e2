"""What a selector is: a query-independent record of a page, and a score of that record for a query.

A new selector is one file in this folder: subclass `Selector`, decorate it with `register`. The registry feeds the test matrix,
the evaluation and the command line.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS

if TYPE_CHECKING:
    from kvskim.calibration import LayerCalibration


@dataclass(frozen=True)
class PageTables:
    """Parameters of the selectors that decompose each page by itself, for one layer.

    ``offset`` float32 ``[H, D]``: a static vector per kv head, subtracted from the keys before a page mean is coded and added back to
    the score as ``q . offset``. It takes constant outlier channels (large key biases) out of the 8-bit mean. Zeros until calibrated.
    """

    offset: Tensor

    def to(self, device: torch.device | str) -> PageTables:
        return PageTables(self.offset.to(device))


class Selector(ABC):
    """A record format: how to make it of the keys of a page, and how to estimate a page's attention mass from it.

    Shapes: ``P`` pages, ``H`` kv heads, ``G`` query heads per kv head, ``N`` queries, ``D`` head dimension, ``W`` record bytes.
    """

    name: ClassVar[str]
    converges: ClassVar[bool] = False
    """True when the score tends to the exact log-mass as the record grows."""
    needs_calibration: ClassVar[bool] = False
    """True when records can't be made before a calibration was fitted."""

    @abstractmethod
    def record_bytes(self, head_dim: int) -> int:
        """Bytes of one record (one page, one kv head)."""

    def bytes_per_page(self, head_dim: int) -> int:
        """Bytes per page and kv head, everything counted that is stored per page."""
        return self.record_bytes(head_dim)

    def tables(self, num_kv_heads: int, head_dim: int, calibration: LayerCalibration | None = None) -> Any:
        """Parameters of one layer on the CPU: from its calibration, or the neutral ones."""
        if calibration is not None:
            return PageTables(calibration.mean.float())
        return PageTables(torch.zeros(num_kv_heads, head_dim))

    @abstractmethod
    def encode(self, keys: Tensor, tables: Any, page_positions: Tensor | None = None) -> Tensor:
        """Records of complete pages.

        Args:
            keys: ``[P, H, 16, D]`` in any float dtype, as cached (after RoPE).
            tables: parameters of the layer, see `tables`.
            page_positions: int64 ``[P]``, position of each page's first token; used by page-frame records only.

        Returns:
            uint8 ``[P, H, W]``, packed as it lies in memory.
        """

    @abstractmethod
    def score(self, queries: Tensor, records: Tensor, tables: Any, page_positions: Tensor | None = None) -> Tensor:
        """Estimated log attention mass of every page for every query head: ``log sum_t exp(q . k_t)``.

        Args:
            queries: ``[N, H, G, D]``, already multiplied by the softmax scale.
            records: uint8 ``[P, H, W]``.

        Returns:
            float32 ``[N, H, P, G]``, natural logarithm.
        """


_S = TypeVar("_S", bound=type[Selector])
SELECTORS: dict[str, type[Selector]] = {}


def register(cls: _S) -> _S:
    """Class decorator: put a selector into the registry under its name."""
    if cls.name in SELECTORS:
        raise ValueError(f"a selector named {cls.name!r} is already registered")
    SELECTORS[cls.name] = cls
    return cls


def get_selector(name: str, **options: Any) -> Selector:
    """The selector ``name`` with its options, e.g. ``get_selector("rki4", rank=4)``."""
    if name not in SELECTORS:
        raise ValueError(f"selector is {name!r}; known selectors: {', '.join(SELECTORS)}")
    try:
        return SELECTORS[name](**options)
    except TypeError as error:
        raise ValueError(f"selector_options {options} do not fit the selector {name!r}: {error}") from error


def check_keys(keys: Tensor) -> None:
    """Refuse anything but float keys of complete pages, ``[P, H, 16, D]``."""
    if keys.dim() != 4 or keys.shape[2] != PAGE_TOKENS:
        raise ValueError(f"keys have shape {tuple(keys.shape)}; expected [pages, kv heads, {PAGE_TOKENS}, head dim]")
    if not keys.is_floating_point():
        raise ValueError(f"keys have dtype {keys.dtype}; expected a float dtype")


LOG_PAGE = math.log(PAGE_TOKENS)
