"""Public op ``encode``: records of the pages that a step completes, recomputed from the paged keys.

It is driven by the slots that were just written and by nothing else. A slot with ``slot % 16 == 15`` is the last token of physical page
``slot // 16``: now all 16 keys are there, and the record is (re)made. So chunked prefill, rejected speculative tokens, block reuse and prefix
hits need no bookkeeping: a page that is written again is recorded again.

Source: docs/how-it-works.md, section "Records".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.selectors.base import PageTables, Selector
from kvskim.selectors.sketch import SketchTables

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def encode(
    selector: Selector, tables: Any, key_cache: Tensor, slot_mapping: Tensor, records: Tensor, *, k_scale: float = 1.0, kernels: str,
    overlap: bool = False, encoder: str | None = None,
) -> None:
    """Write the records of all pages that the tokens of ``slot_mapping`` complete; no other record is touched.

    Args:
        selector: the `Selector` whose records they are.
        tables: its parameters for the layer, on the device.
        key_cache: ``[blocks, block_size, H, D]``, any strides, last dimension contiguous; bfloat16, float16, float32 or float8_e4m3fn.
            Stored elements times ``k_scale`` are the keys; 1.0 unless they are float8.
        slot_mapping: int64 ``[T]``, ``block * block_size + token in block``; -1: padding. The keys of these tokens are in the cache.
        records: uint8 ``[N, H, W]``, contiguous, by physical page.
        kernels: cuda, triton or torch. What the CUDA kernels are not compiled for (record sizes but 256, other head dims, float32 caches,
            rows that are not 16-byte aligned, the oracle) the Triton kernels code under "cuda" too.
        overlap: CUDA only: launch before the preceding kernel has ended (programmatic dependent launch).
        encoder: one of `encoders`, for comparisons; by default the number of slots decides. Both are true to the keys, but codes next to a
            boundary may differ.

    Raises:
        ValueError: shapes, dtypes or options do not fit; one sentence.

    Nothing is allocated and nothing is read on the host, except with torch.

    Example:
        >>> encode(selector, tables, key_cache, slot_mapping, records, kernels="cuda")
    """
    _check(selector, tables, key_cache, slot_mapping, records, k_scale, kernels)
    if encoder is not None and encoder not in (choice := encoders(tables, key_cache, kernels)):
        raise ValueError(f"encoder is {encoder!r}; for these records, this cache and kernels {kernels!r} it can be one of {choice}")
    if slot_mapping.shape[0] == 0:
        return
    if kernels == "torch":
        encode_torch(selector, tables, key_cache, slot_mapping, records, k_scale=k_scale)
        return
    if isinstance(tables, SketchTables):
        if tables.rotary is not None:
            raise ValueError("page_frame records have no GPU kernel; use kernels 'torch'")
        if kernels == "cuda":
            from kvskim.ops.cuda import encode as cuda

            if cuda.sketch_kernel_serves(tables, key_cache):
                cuda.encode_sketch(
                    key_cache, slot_mapping, tables.mean, tables.encode_matrix, tables.coefficient_bits, tables.coefficient_count,
                    tables.slot_coefficient, tables.slot_digit, records, k_scale, cuda.ENCODERS.index(encoder or "by tokens"),
                    cuda.OVERLAP_PREVIOUS if overlap else 0,
                )
                return
        from kvskim.ops.triton.encode_sketch import encode_sketch

        encode_sketch(tables, key_cache, slot_mapping, records, k_scale=k_scale)
        return
    if kernels == "cuda":
        from kvskim.ops.cuda import encode as cuda

        if cuda.pages_kernel_serves(selector, key_cache):
            cuda.encode_pages(
                key_cache, slot_mapping, tables.offset, records, *cuda.page_record_form(selector), k_scale, cuda.OVERLAP_PREVIOUS if overlap else 0
            )
            return
    from kvskim.ops.triton.encode_pages import encode_pages

    encode_pages(selector, tables, key_cache, slot_mapping, records, k_scale=k_scale)


@dataclass(frozen=True)
class EncodeLayer:
    """What `encode` is told of one layer: arguments of the same names."""

    tables: Any
    key_cache: Tensor
    slot_mapping: Tensor
    records: Tensor
    k_scale: float = 1.0


def encoded_together(layer: EncodeLayer, kernels: str) -> bool:
    """Whether `encode_layers` makes the records of such a layer in one launch with those of others: the CUDA kernel of sketch records for few slots."""
    if kernels != "cuda" or not isinstance(layer.tables, SketchTables) or layer.tables.rotary is not None:
        return False
    from kvskim.ops.cuda import encode as cuda

    return cuda.sketch_kernel_serves(layer.tables, layer.key_cache) and layer.slot_mapping.shape[0] <= cuda.FEW_SLOTS


def encode_layers(selector: Selector, layers: Sequence[EncodeLayer], *, kernels: str, overlap: bool = False) -> None:
    """`encode` for several layers of a model: the same records, with fewer launches.

    Args:
        selector, kernels: as for `encode`.
        layers: in any order. Those that are `encoded_together` and have caches and records of one form, and as many slots, share launches, 48 of them
            each; the others have theirs.
        overlap: as for `encode`, of the first launch.

    Raises:
        ValueError: what `encode` raises, before anything is launched.

    Example:
        >>> encode_layers(selector, [EncodeLayer(tables, key_cache, slot_mapping, records) for ...], kernels="cuda")
    """
    together: dict[Any, list[EncodeLayer]] = {}
    for layer in layers:
        _check(selector, layer.tables, layer.key_cache, layer.slot_mapping, layer.records, layer.k_scale, kernels)
        cache = layer.key_cache
        form = (cache.shape, cache.stride(), cache.dtype, cache.device, layer.records.shape, layer.slot_mapping.shape)
        together.setdefault(form if encoded_together(layer, kernels) else id(layer), []).append(layer)
    for group in together.values():
        first = group[0]
        if first.slot_mapping.shape[0] == 0:
            continue
        if encoded_together(first, kernels):
            from kvskim.ops.cuda import encode as cuda

            cuda.encode_sketch_layers(
                [layer.tables for layer in group], [layer.key_cache for layer in group], [layer.slot_mapping for layer in group],
                [layer.records for layer in group], [layer.k_scale for layer in group], cuda.OVERLAP_PREVIOUS if overlap else 0,
            )
        else:
            encode(selector, first.tables, first.key_cache, first.slot_mapping, first.records, k_scale=first.k_scale, kernels=kernels, overlap=overlap)
        overlap = kernels == "cuda"  # behind the first launch there is nothing else to wait for


def encoders(tables: Any, key_cache: Tensor, kernels: str) -> tuple[str | None, ...]:
    """What `encode` may choose among, by the number of slots, to make such records from such a cache.

    ``("few", "many")`` where the CUDA kernels of sketch records serve, ``(None,)`` otherwise.
    """
    if kernels == "cuda" and isinstance(tables, SketchTables) and tables.rotary is None:
        from kvskim.ops.cuda import encode as cuda

        if cuda.sketch_kernel_serves(tables, key_cache):
            return ("few", "many")
    return (None,)


def completed_pages(slot_mapping: Tensor, num_pages: int) -> Tensor:
    """Physical pages, int64, that the slots complete, in the order of the slots."""
    complete = (slot_mapping >= 0) & (slot_mapping % PAGE_TOKENS == PAGE_TOKENS - 1) & (slot_mapping < num_pages * PAGE_TOKENS)
    return slot_mapping[complete] // PAGE_TOKENS


def page_keys(key_cache: Tensor, pages: Tensor, k_scale: float = 1.0) -> Tensor:
    """Keys of physical pages, float32 ``[P, H, 16, D]``."""
    per_block = key_cache.shape[1] // PAGE_TOKENS
    token = (pages % per_block * PAGE_TOKENS)[:, None] + torch.arange(PAGE_TOKENS, device=pages.device)
    block = (pages // per_block)[:, None]
    if key_cache.dtype == torch.float8_e4m3fn:  # not every device can index it
        keys = key_cache.view(torch.uint8)[block, token].view(torch.float8_e4m3fn).float() * k_scale
    else:
        keys = key_cache[block, token].float()
    return keys.transpose(1, 2)


def encode_torch(
    selector: Selector, tables: Any, key_cache: Tensor, slot_mapping: Tensor, records: Tensor, *, k_scale: float = 1.0
) -> None:
    """The op in plain torch, on any device; the number of completed pages is read on the host."""
    pages = completed_pages(slot_mapping, records.shape[0])
    if len(pages):
        records[pages] = selector.encode(page_keys(key_cache, pages, k_scale), tables)


def _check(selector: Selector, tables: Any, key_cache: Tensor, slot_mapping: Tensor, records: Tensor, k_scale: float, kernels: str) -> None:
    if kernels not in ("cuda", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}; use 'cuda', 'triton' or 'torch'")
    if key_cache.dim() != 4 or key_cache.stride(-1) != 1:
        raise ValueError(f"key_cache must be [blocks, block_size, H, D] with a contiguous last dimension, not {list(key_cache.shape)}")
    _, block_size, heads, dim = key_cache.shape
    if key_cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"key_cache is {key_cache.dtype}; it must be bfloat16, float16, float32 or float8_e4m3fn")
    if key_cache.dtype != torch.float8_e4m3fn and k_scale != 1.0:
        raise ValueError(f"k_scale is {k_scale} with a {key_cache.dtype} cache; only float8 keys are scaled")
    if block_size % PAGE_TOKENS:
        raise ValueError(f"block_size is {block_size}; it must be a multiple of {PAGE_TOKENS}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [tokens], not {slot_mapping.dtype} {list(slot_mapping.shape)}")
    width = selector.record_bytes(dim)
    if records.dtype != torch.uint8 or records.dim() != 3 or tuple(records.shape[1:]) != (heads, width) or not records.is_contiguous():
        raise ValueError(f"records must be contiguous uint8 [pages, {heads}, {width}], not {records.dtype} {list(records.shape)}")
    if records.shape[0] > key_cache.shape[0] * (block_size // PAGE_TOKENS):
        raise ValueError(f"there are {records.shape[0]} records for {key_cache.shape[0]} blocks of {block_size // PAGE_TOKENS} pages")
    if isinstance(tables, SketchTables):
        parameters = tables.mean
    elif isinstance(tables, PageTables):
        parameters = tables.offset
    else:
        raise ValueError(f"tables are {type(tables).__name__}; the selectors have SketchTables or PageTables")
    if tuple(parameters.shape) != (heads, dim) or not parameters.is_contiguous():
        raise ValueError(f"tables are for {list(parameters.shape)} [kv heads, head dim]; the cache has {[heads, dim]}")
    if isinstance(tables, SketchTables) and tables.record_bytes != width:
        raise ValueError(f"tables are for records of {tables.record_bytes} bytes; the selector's have {width}")
