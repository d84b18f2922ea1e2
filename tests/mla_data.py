"""Latent attention: batches whose values are the first channels of their keys, in the shapes of `kvskim.ops`, and a step over them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kvskim.calibration import LayerCalibration, fit_layer
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.latent_query import LatentQuery, Query
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import StepBuffers, Workspace
from kvskim.rules import RuleParameters
from kvskim.selectors import get_selector
from step_data import Batch

LATENT, ROTARY = 512, 64
RANK = 24
"""Directions in which the latent rows of a test vary strongly: real latents are far from isotropic."""


class LatentBatch(Batch):
    """A batch whose values stay the first channels of its keys, in the same memory, on whatever device it is moved to."""

    def to(self, device: str) -> Batch:
        moved = super().to(device)
        moved.value_cache = moved.key_cache[..., : self.value_cache.shape[3]]
        return LatentBatch(**moved.__dict__)


def latent_basis(latent: int, rotary: int) -> Tensor:
    """Mixing of the channels, ``[latent + rotary, latent + rotary]``, with a falling spectrum; the rotary part is apart."""
    generator = torch.Generator().manual_seed(99)
    basis = torch.zeros(latent + rotary, latent + rotary)
    basis[:latent, :latent] = torch.linalg.qr(torch.randn(latent, latent, generator=generator)).Q * torch.arange(1, latent + 1).float().pow(-0.6)[:, None]
    basis[latent:, latent:] = torch.linalg.qr(torch.randn(rotary, rotary, generator=generator)).Q * 0.6
    return basis


def latent_rows(tokens: int, latent: int, rotary: int, generator: torch.Generator) -> Tensor:
    """Cache rows ``[T, latent + rotary]``: topics that last some pages, drift within, and noise per token, in the common basis."""
    dim = latent + rotary
    count = max(tokens, 1)
    topics = torch.randn(ceil_div(count, 48) + 1, dim, generator=generator)
    topic = torch.arange(count) // 48
    drift = torch.randn(count, dim, generator=generator).cumsum(0) * 0.08
    rows = topics[topic] + drift + 0.7 * torch.randn(count, dim, generator=generator)
    return ((rows * 1.5) @ latent_basis(latent, rotary) + 0.3)[:tokens]


def latent_queries(count: int, rows: Tensor, generator: torch.Generator, *, sharpness: float = 3.0) -> Tensor:
    """Scaled queries ``[count, dim]`` that point at some of the rows, with logits of ``sharpness`` standard deviation."""
    centred = rows - rows.mean(0)
    picked = centred[torch.randint(len(rows), (count,), generator=generator)]
    query = picked / picked.norm(dim=1, keepdim=True) + 0.5 * torch.randn(count, rows.shape[1], generator=generator) / rows.shape[1] ** 0.5
    return query * (sharpness / (query @ centred.T).std().clamp_min(1e-3))


@functools.lru_cache
def calibration(latent: int, rotary: int, record_bytes: int = 256) -> LayerCalibration:
    """Fitted on other rows and queries of the same kind."""
    generator = torch.Generator().manual_seed(5)
    rows = latent_rows(1024, latent, rotary, generator)
    return fit_layer(rows[None], latent_queries(256, rows, generator)[None], record_bytes=record_bytes)


def make_latent_batch(
    selector: str, lengths: list[int], *, group: int, latent: int = LATENT, rotary: int = ROTARY, block_size: int = 16, dtype: torch.dtype = torch.float32,
    seed: int = 0, **options: Any,
) -> Batch:
    """Random requests in randomly placed blocks of a latent cache; rows that no token fills are NaN, block-table entries beyond a request absurd."""
    generator = torch.Generator().manual_seed(seed)
    chosen = get_selector(selector, **options)
    dim = latent + rotary
    scale = dim**-0.5
    blocks = [ceil_div(n, block_size) for n in lengths]
    total = sum(blocks) + 3
    order = torch.randperm(total, generator=generator).to(torch.int32)
    table = torch.full((len(lengths), max([*blocks, 1])), 2**30, dtype=torch.int32)
    cache = torch.full((total, block_size, 1, dim), torch.nan, dtype=dtype)
    query = torch.full((len(lengths), group, dim), torch.nan, dtype=dtype)
    at = 0
    for r, n in enumerate(lengths):
        table[r, : blocks[r]] = order[at : at + blocks[r]]
        at += blocks[r]
        if n == 0:
            continue
        rows = latent_rows(n, latent, rotary, generator)
        position = torch.arange(n)
        cache[table[r, position // block_size].long(), position % block_size, 0] = rows.to(dtype)
        query[r] = (latent_queries(group, latent_rows(64, latent, rotary, generator) if n < 2 else rows, generator) / scale).to(dtype)
    fitted = None if selector == "oracle" else calibration(latent, rotary, chosen.record_bytes(dim) if selector == "sketch" else 256)
    tables: Any = chosen.tables(1, dim, fitted)
    pages = cache.reshape(-1, PAGE_TOKENS, 1, dim).transpose(1, 2)
    records = chosen.encode(pages, tables).contiguous()
    return LatentBatch(chosen, tables, query, cache, cache[..., :latent], records, table, torch.tensor(lengths, dtype=torch.int32), scale)


def in_parts(query: Tensor, latent: int) -> LatentQuery:
    """The same query as an engine has it: the latent part by heads, the rotary part behind channels that are not rotated. What lies between is NaN."""
    requests, heads, dim = query.shape
    first = torch.full((heads, requests, latent + 8), torch.nan, dtype=query.dtype, device=query.device)[..., :latent].transpose(0, 1)
    second = torch.full((requests, heads, 128 + dim - latent), torch.nan, dtype=query.dtype, device=query.device)[..., 128:]
    first.copy_(query[..., :latent])
    second.copy_(query[..., latent:])
    return LatentQuery(first, second)


def run_latent_step(
    batch: Batch, rule: RuleParameters, *, kernels: str, ready: int = 1, sink_pages: int = 1, window_pages: int = 1, parts: bool = False,
    overlap: bool = False,
) -> tuple[Tensor, Tensor, StepBuffers]:
    """out ``[R, G, latent]``, lse and the selection of one decode step, from a workspace full of NaN. parts: the query in two tensors."""
    group, latent, device = batch.query.shape[1], batch.value_cache.shape[3], batch.query.device
    workspace = Workspace(
        max_requests=batch.query.shape[0] + 1, num_kv_heads=1, group=group, head_dim=latent, page_capacity=batch.page_capacity, rule=rule,
        sink_pages=sink_pages, window_pages=window_pages, device=device, kernels=kernels, record_bytes=batch.records.shape[2],
    )
    for tensor in workspace.__dict__.values():
        if isinstance(tensor, Tensor) and tensor is not workspace.attend_tickets:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 113)
    buffers = workspace.buffers(batch.query.shape[0])
    out = torch.full((*batch.query.shape[:2], latent), float("nan"), dtype=batch.query.dtype, device=device)
    lse = torch.full(batch.query.shape[:2], float("nan"), device=device)
    settings = StepSettings(
        batch.selector, batch.tables, rule, sink_pages, window_pages, batch.scale, kernels=kernels, overlap=overlap, settled=overlap,  # type: ignore[arg-type]
    )
    query: Query = in_parts(batch.query, latent) if parts else batch.query
    decode_step(
        settings, query, batch.key_cache, batch.value_cache, batch.records, batch.block_table, batch.seq_lens,
        ready=torch.full((1,), ready, dtype=torch.int32, device=device), workspace=workspace, buffers=buffers, out=out, lse=lse,
    )
    return out, lse, buffers
