"""Keys, queries and exact answers that the selector tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvskim.calibration import LayerCalibration, fit_layer
from kvskim.rotary import Rotary
from kvskim.selectors import Selector


def pages(count: int = 24, heads: int = 2, dim: int = 64, seed: int = 0) -> Tensor:
    """Keys ``[P, H, 16, D]``: page vector, drift over the tokens and token noise, with a falling spectrum in a random basis per head."""
    g = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, dim + 1).float().pow(-0.7) * 2.5
    basis = torch.linalg.qr(torch.randn(heads, dim, dim, generator=g)).Q
    page = torch.randn(count, heads, 1, dim, generator=g)
    drift = torch.randn(count, heads, 1, dim, generator=g) * torch.linspace(-0.8, 0.8, 16)[:, None]
    token = torch.randn(count, heads, 16, dim, generator=g)
    return (page + drift + token) * spectrum @ basis[None]


def queries(keys: Tensor, count: int = 8, group: int = 3, seed: int = 1) -> Tensor:
    """Scaled queries ``[N, H, G, D]`` in the directions that the keys use, logits of a few nats."""
    g = torch.Generator().manual_seed(seed)
    flat = keys.float().transpose(0, 1).flatten(1, 2)
    flat = flat - flat.mean(1, keepdim=True)
    pick = torch.randint(flat.shape[1], (keys.shape[1], count * group), generator=g)
    q = flat.gather(1, pick[..., None].expand(-1, -1, flat.shape[-1]))
    q = q + torch.randn(q.shape, generator=g) * q.square().mean().sqrt().clamp_min(1e-3)
    q = q / q.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    reach = (q @ flat.transpose(1, 2)).std().clamp_min(1e-3)
    return (q * (2.5 / reach)).unflatten(1, (count, group)).transpose(0, 1).contiguous()


def exact(q: Tensor, keys: Tensor) -> Tensor:
    """Exact page log-masses, float64 ``[N, H, P, G]``."""
    return torch.logsumexp(torch.einsum("nhgd,phtd->nhpgt", q.double(), keys.double()), -1)


def positions(keys: Tensor) -> Tensor:
    return torch.arange(keys.shape[0]) * 16


def calibrate(selector: Selector, keys: Tensor, q: Tensor) -> LayerCalibration:
    page_frame = getattr(selector, "page_frame", False)
    dim = keys.shape[-1]
    rotary = Rotary(1e4 ** (-torch.arange(0, dim, 2).float() / dim)) if page_frame else None
    return fit_layer(
        keys.float().transpose(0, 1).flatten(1, 2), q.permute(1, 2, 0, 3).flatten(0, 1), rotary=rotary, page_frame=page_frame,
        record_bytes=selector.record_bytes(dim) if selector.name == "sketch" else 256,
    )


def make_tables(selector: Selector, keys: Tensor, q: Tensor, *, calibrated: bool = False) -> Any:
    """Neutral tables, or calibrated ones where the selector needs them or the test asks for them."""
    heads, dim = keys.shape[1], keys.shape[-1]
    if calibrated or selector.needs_calibration:
        return selector.tables(heads, dim, calibrate(selector, keys, q))
    return selector.tables(heads, dim)


def run(selector: Selector, keys: Tensor, q: Tensor, tables: Any) -> Tensor:
    return selector.score(q, selector.encode(keys, tables, positions(keys)), tables, positions(keys))


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Mean Spearman correlation over pages of ``[N, H, P, G]``."""
    ra, rb = (x.argsort(2).argsort(2).double() for x in (a, b))
    ra, rb = ra - ra.mean(2, keepdim=True), rb - rb.mean(2, keepdim=True)
    return float(((ra * rb).sum(2) / (ra.norm(dim=2) * rb.norm(dim=2))).mean())
