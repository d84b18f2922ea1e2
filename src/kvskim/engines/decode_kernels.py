"""`kvskim.engines.decode.decode_attention` through the operations of `kvskim.ops`: what a GPU runs.

A row of a contiguous cache is seen as pages: block i of 16 tokens is page i. transformers makes a new tensor for every token anyway, so
the row is padded to whole pages by one more copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.encode import encode
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace
from kvskim.selectors.base import Selector

if TYPE_CHECKING:
    from kvskim.engines.decode import DecodeSettings

HEAD_DIMS = (64, 96, 128, 256)
LARGEST_GROUP = 16
LATENT_DIMS = ((576, 512), (320, 256))
"""Channels of a latent row, and those of them that are the value."""
LARGEST_LATENT_GROUP = 128


def kernel_refusal(selector: Selector, query_heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels can't serve a layer, or None. Such a layer runs in plain torch."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the cache is {dtype}; the kernels read bfloat16 or float16"
    latent = (head_dim, value_dim) in LATENT_DIMS
    if not latent and (head_dim not in HEAD_DIMS or value_dim != head_dim):
        return f"head dims {head_dim} and {value_dim} (values); the kernels are made for {', '.join(map(str, HEAD_DIMS))}"
    largest = LARGEST_LATENT_GROUP if latent else LARGEST_GROUP
    if query_heads // kv_heads > largest:
        return f"{query_heads // kv_heads} query heads per kv head; the kernels take {largest}"
    if getattr(selector, "page_frame", False):
        return "page_frame records have no kernel"
    return None


def paged(row: Tensor) -> Tensor:
    """``[H, T, D]`` as a paged cache ``[pages, 16, H, D]``, zeros after the last token."""
    missing = -row.shape[1] % PAGE_TOKENS
    whole = F.pad(row, (0, 0, 0, missing)) if missing or row.stride(-1) != 1 else row
    return whole.unflatten(1, (-1, PAGE_TOKENS)).permute(1, 2, 0, 3)


def encode_pages(selector: Selector, tables: object, pages: Tensor, kernels: str) -> Tensor:
    """Records ``[P, H, W]`` of complete pages ``[P, H, 16, D]``."""
    count, heads, _, dim = pages.shape
    records = torch.zeros(count, heads, selector.record_bytes(dim), dtype=torch.uint8, device=pages.device)
    slots = torch.arange(count, device=pages.device) * PAGE_TOKENS + PAGE_TOKENS - 1
    encode(selector, tables, pages.contiguous().transpose(1, 2), slots, records, kernels=kernels)
    return records


def attend_selected(settings: DecodeSettings, query: Tensor, key: Tensor, value: Tensor, records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One decode token of one row.

    Args:
        settings: of the layer; ``kernels`` is cuda or triton.
        query: ``[Hq, D]``. key, value: ``[H, T, D]`` and ``[H, T, Dv]``. records: uint8 ``[complete pages, H, W]``.

    Returns:
        out ``[Hq, Dv]``, pages bool ``[H, total]``, covered float32 ``[H]``.
    """
    heads, tokens, dim = key.shape
    total = ceil_div(tokens, PAGE_TOKENS)
    device = query.device
    capacity = 1 << (total - 1).bit_length()
    workspace = settings.workspaces.get(capacity)
    if workspace is None:
        settings.workspaces.clear()
        workspace = settings.workspaces[capacity] = Workspace(
            max_requests=1, num_kv_heads=heads, group=query.shape[0] // heads, head_dim=value.shape[2], page_capacity=capacity, rule=settings.rule,
            sink_pages=settings.sink_pages, window_pages=settings.window_pages, device=device, kernels=settings.kernels,
            record_bytes=settings.selector.record_bytes(dim),
        )
    buffers = workspace.buffers(1)
    out = query.new_empty(query.shape[0], value.shape[2])
    keys = paged(key)
    # The first channels of latent rows are their values, and stay so: the kernels then load each row once.
    values = keys[..., : value.shape[2]] if value.data_ptr() == key.data_ptr() else paged(value)
    step = StepSettings(
        settings.selector, settings.tables, settings.rule, settings.sink_pages, settings.window_pages, settings.scale, settings.softcap or 0.0,
        kernels=settings.kernels,  # type: ignore[arg-type]
    )
    decode_step(
        step, query[None].contiguous(), keys, values, records.contiguous(), torch.arange(total, dtype=torch.int32, device=device)[None],
        torch.full((1,), tokens, dtype=torch.int32, device=device), ready=torch.ones(1, dtype=torch.int32, device=device), workspace=workspace,
        buffers=buffers, out=out[None],
    )
    counts = buffers.counts[0][:, None]
    listed = torch.arange(workspace.table_capacity, device=device) < counts.clamp_max(workspace.table_capacity)
    places = torch.where(listed & (counts < total), buffers.pages[0], total).long()
    pages = torch.zeros(heads, total + 1, dtype=torch.bool, device=device).scatter_(1, places, True)[:, :total] | (counts == total)
    return out, pages, buffers.covered[0].clone()
