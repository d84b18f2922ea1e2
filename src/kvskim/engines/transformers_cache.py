"""Records beside the keys and values of a transformers cache.

The records of a layer belong to the cache layer object that holds its keys. Whatever happens to the keys (beam search reorders rows,
assisted decoding crops, a prompt cache is copied) happens to the records in the same call, and a request is never recognised by
anything but its own cache object.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvskim.layout import PAGE_TOKENS
from kvskim.selectors import Selector


class PageRecords:
    """Records of the complete pages of every row of one layer, made once per page when its last token is in the cache.

    starts: index of each row's first real token in the cache (left padding lies before it); pages are counted from there.
    counts: complete pages with a record, per row.
    """

    def __init__(self, selector: Selector, tables: Any, starts: list[int], kernels: str = "torch") -> None:
        self.selector = selector
        self.kernels = kernels
        self.tables = tables
        self.starts = list(starts)
        self.counts = [0] * len(starts)
        self.records: Tensor | None = None

    def row(self, index: int) -> Tensor:
        """Records of one row, uint8 ``[pages, H, record bytes]``."""
        assert self.records is not None
        return self.records[index, : self.counts[index]]

    def update(self, key: Tensor) -> None:
        """Encode the pages that are complete in ``key [B, H, T, D]`` and have no record yet. The open page gets none."""
        rows, heads, tokens, dim = key.shape
        complete = [(tokens - start) // PAGE_TOKENS for start in self.starts]
        self._reserve(rows, max(complete), heads, self.selector.record_bytes(dim), key.device)
        assert self.records is not None
        for row, (start, done, wanted) in enumerate(zip(self.starts, self.counts, complete)):
            if wanted > done:
                positions = PAGE_TOKENS * torch.arange(done, wanted, device=key.device)
                new = key[row, :, start + done * PAGE_TOKENS : start + wanted * PAGE_TOKENS]
                pages = new.unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
                self.records[row, done:wanted] = self._encode(pages, positions)
                self.counts[row] = wanted

    def _encode(self, pages: Tensor, positions: Tensor) -> Tensor:
        if self.kernels == "torch":
            return self.selector.encode(pages, self.tables, positions)
        from kvskim.engines.decode_kernels import encode_pages

        return encode_pages(self.selector, self.tables, pages, self.kernels)

    def _reserve(self, rows: int, pages: int, heads: int, width: int, device: torch.device) -> None:
        if self.records is not None and self.records.is_inference() and not torch.is_inference_mode_enabled():
            # Made under inference_mode, where the result of an allocation can't be written to later.
            self.records = self.records.clone()
        held = 0 if self.records is None else self.records.shape[1]
        if self.records is None or pages > held:
            grown = torch.zeros(rows, pages + max(pages // 4, 8), heads, width, dtype=torch.uint8, device=device)
            if self.records is not None:
                grown[:, :held] = self.records
            self.records = grown

    def truncate(self, tokens: int) -> None:
        """The cache now ends after ``tokens`` tokens: forget pages that are no longer complete."""
        self.counts = [min(count, max(tokens - start, 0) // PAGE_TOKENS) for start, count in zip(self.starts, self.counts)]

    def select(self, rows: list[int]) -> None:
        """Row ``i`` becomes what row ``rows[i]`` was."""
        self.starts = [self.starts[row] for row in rows]
        self.counts = [self.counts[row] for row in rows]
        if self.records is not None:
            self.records = self.records[torch.tensor(rows, device=self.records.device)]

    def __deepcopy__(self, memo: dict[int, Any]) -> PageRecords:
        # The tables belong to the model: a copied request shares them.
        twin = PageRecords(self.selector, self.tables, self.starts, self.kernels)
        twin.counts = list(self.counts)
        twin.records = None if self.records is None else self.records.clone()
        return twin


class SkimLayer(DynamicLayer):
    """A dynamic cache layer whose keys have records.

    records: None until the layer is calibrated or first used. queries: query samples of this request, kept only until a calibration is
    fitted: positions int64 ``[n]`` and float32 ``[Hq, n, D]`` each, multiplied by the softmax scale.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.records: PageRecords | None = None
        self.queries: list[tuple[Tensor, Tensor]] = []
        self._seen: Tensor | None = None

    @classmethod
    def adopt(cls, layer: DynamicLayer) -> SkimLayer:
        """A layer that takes over the keys and values (and everything else) of a plain dynamic layer."""
        adopted = cls()
        adopted.__dict__.update(layer.__dict__)
        adopted._seen = adopted.keys
        return adopted

    def forget(self) -> None:
        """Drop everything derived from the keys."""
        self.records = None
        self.queries = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is not self._seen:
            # Somebody replaced the keys without telling: the records are of other keys.
            self.forget()
        result = super().update(key_states, value_states, *args, **kwargs)
        self._seen = self.keys
        return result

    def reset(self) -> None:
        super().reset()
        # Early 5.x releases zero the keys and keep their length; an emptied cache is an empty one.
        self.keys = self.values = None
        self.is_initialized = False
        self.forget()
        self._seen = self.keys

    def offload(self) -> None:
        super().offload()
        self._seen = self.keys

    def prefetch(self) -> None:
        super().prefetch()
        self._seen = self.keys

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._follow(beam_idx.tolist())

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        self._seen = self.keys
        if self.records is not None:
            self.records.truncate(self.get_seq_length())

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.records is not None:
            self._follow([row for row in range(len(self.records.starts)) for _ in range(repeats)])
        self._seen = self.keys

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.records is not None:
            rows = torch.arange(len(self.records.starts))[indices.cpu()].tolist()
            self._follow(rows)
        self._seen = self.keys

    def _follow(self, rows: list[int]) -> None:
        if self.records is not None:
            self.records.select(rows)
        # Samples of several requests of a batch are one set: which rows they came from does not matter to a calibration.
        self._seen = self.keys
