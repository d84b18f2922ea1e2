"""What the selectors that code each page by itself share: the eigen-decomposition of a page, its int8/int4 codes, the packed record.

Source of the decomposition: docs/how-it-works.md, section "Selectors". With ``x_t`` the keys of a page (minus the static offset of their
kv head), ``mu`` their mean and ``C`` the centred keys ``[16, D]``, the largest eigenpairs ``(lambda_k, u_k)`` of ``C C^T`` give
``sigma_k = sqrt(lambda_k)``, directions ``v_k = C^T u_k / sigma_k`` and coordinates ``c_tk = u_k[t] sigma_k``, so that
``x_t ~ mu + sum_k c_tk v_k``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.selectors.base import PageTables, check_keys

SMALLEST_EIGENVALUE = 1e-10
"""Floor of the eigenvalues: keeps the unit vectors of a page of equal keys finite."""

LARGEST_POWER = 100
"""Of two, by which pages are scaled before they are decomposed: float32 holds it and what it is multiplied with."""

SMALLEST_SCALE = 1e-30
"""A quantiser scale below this is stored as zero: its codes carry nothing, and the quotient that makes them would overflow."""

Kind = Literal["int8", "int4", "uint4", "bfloat16", "float32"]
_DTYPES: dict[Kind, torch.dtype] = {
    "int8": torch.int8, "int4": torch.int8, "uint4": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32,
}


@dataclass(frozen=True)
class Field:
    """One field of a record: ``shape`` values of one kind, last dimension fastest; of two 4-bit codes the even one is the low nibble."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = math.prod(self.shape)
        if self.kind in ("int4", "uint4"):
            return count // 2
        return count * _DTYPES[self.kind].itemsize


@dataclass(frozen=True)
class RecordFormat:
    """Fields of a record in memory order, little endian, then zeros up to a multiple of ``alignment`` bytes."""

    fields: tuple[Field, ...]
    alignment: int = 1

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """First byte of each field."""
        offsets, at = {}, 0
        for field in self.fields:
            offsets[field.name] = at
            at += field.nbytes
        return offsets

    @functools.cached_property
    def nbytes(self) -> int:
        return ceil_div(sum(field.nbytes for field in self.fields), self.alignment) * self.alignment

    def pack(self, values: dict[str, Tensor]) -> Tensor:
        """Records uint8 ``[..., nbytes]`` of fields ``[..., *shape]``; 4-bit codes come as int8 (two's complement) or uint8."""
        parts = []
        for field in self.fields:
            value = values[field.name].to(_DTYPES[field.kind])
            leading = value.shape[: value.dim() - len(field.shape)]
            value = value.reshape((*leading, math.prod(field.shape))).contiguous()
            parts.append(pack_nibbles(value) if field.kind in ("int4", "uint4") else value.view(torch.uint8))
        padding = self.nbytes - sum(field.nbytes for field in self.fields)
        if padding:
            parts.append(torch.zeros((*parts[0].shape[:-1], padding), dtype=torch.uint8, device=parts[0].device))
        return torch.cat(parts, -1)

    def unpack(self, records: Tensor) -> dict[str, Tensor]:
        """Fields ``[..., *shape]`` of records uint8 ``[..., nbytes]``; the inverse of `pack`."""
        if records.dtype != torch.uint8 or records.shape[-1] != self.nbytes:
            raise ValueError(f"records are {records.dtype} with {records.shape[-1]} bytes each; expected torch.uint8 with {self.nbytes}")
        values = {}
        for field in self.fields:
            start = self.offsets[field.name]
            raw = records[..., start : start + field.nbytes].clone(memory_format=torch.contiguous_format)
            nibbles = field.kind in ("int4", "uint4")
            value = unpack_nibbles(raw, signed=field.kind == "int4") if nibbles else raw.view(_DTYPES[field.kind])
            values[field.name] = value.reshape((*records.shape[:-1], *field.shape))
        return values


def pack_nibbles(codes: Tensor) -> Tensor:
    """Bytes uint8 ``[..., n / 2]`` of 4-bit codes ``[..., n]`` (int8 -8..7 or uint8 0..15), the even code in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} 4-bit codes don't fill whole bytes; their number must be even")
    nibbles = codes.to(torch.int16) & 15
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).to(torch.uint8)


def unpack_nibbles(packed: Tensor, *, signed: bool) -> Tensor:
    """4-bit codes ``[..., n]`` (int8 when signed, else uint8) of bytes ``[..., n / 2]``; the inverse of `pack_nibbles`."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return ((codes.to(torch.int16) ^ 8) - 8).to(torch.int8) if signed else codes


def quantise(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Symmetric codes with one scale per vector along the last dimension: ``value ~ code * scale``.

    The codes are computed with the scale as it is stored, so the coding of the scale costs no accuracy.

    Args:
        values: float32 ``[..., n]``, finite.
        bits: 4 or 8; codes are within ``+-(2^(bits-1) - 1)``.

    Returns:
        int8 ``[..., n]`` and bfloat16 ``[...]``.
    """
    largest = 2 ** (bits - 1) - 1
    scale = (values.abs().amax(-1) / largest).bfloat16()
    scale = torch.where(scale.float() < SMALLEST_SCALE, torch.zeros_like(scale), scale)
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    codes = (values / divisor[..., None]).round().clamp(-largest, largest)
    return torch.where(scale[..., None] == 0, 0, codes).to(torch.int8), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 ``[..., n]`` of codes ``[..., n]`` and scales ``[...]``."""
    return codes.float() * scale.float()[..., None]


def code_mean(mean: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and scale of page means; the scale of a page that is not ``finite`` is NaN, which makes its score NaN: always selected."""
    codes, scale = quantise(torch.where(finite[..., None], mean, 0), 8)
    return codes, torch.where(finite, scale, torch.full_like(scale, math.nan))


@dataclass(frozen=True)
class PageEigen:
    """Eigen-decomposition of pages. Leading dimensions ``[P, H]``; everything float32; zeros where a page is not finite."""

    finite: Tensor
    """bool ``[P, H]``: every key, and the energy of the page, is a finite number."""
    mean: Tensor
    """``[P, H, D]``"""
    vectors: Tensor
    """``[P, H, rank, D]``: unit directions v_k, largest energy first."""
    coordinates: Tensor
    """``[P, H, 16, rank]``: c_tk."""
    energies: Tensor
    """``[P, H, rank]``: lambda_k, at least `SMALLEST_EIGENVALUE`."""
    residual: Tensor
    """``[P, H]``: energy outside the kept directions, trace - sum lambda_k, never negative."""


def centred_pages(keys: Tensor, tables: PageTables) -> Tensor:
    """Keys ``[P, H, 16, D]`` of any float dtype minus the static offset of their head, float32."""
    check_keys(keys)
    return keys.float() - tables.offset.float()[:, None, :]


def decompose(keys: Tensor, tables: PageTables, rank: int) -> PageEigen:
    """Mean and ``rank`` largest principal directions over the tokens of each page; keys ``[P, H, 16, D]``."""
    x = centred_pages(keys, tables)
    mean = x.mean(2)
    centred = x - mean[:, :, None]
    gram = centred @ centred.transpose(-1, -2)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    finite = torch.isfinite(trace)
    keep = finite[..., None, None]
    centred, gram = torch.where(keep, centred, 0), torch.where(keep, gram, 0)
    # A page of equal keys leaves nothing but rounding errors, on which the decomposition of some processors' libraries does not converge: it is given numbers
    # of usual size. A power of two changes no digit.
    power = torch.frexp(torch.where(finite, trace, 0)).exponent.clamp(-LARGEST_POWER, LARGEST_POWER)
    eigenvalues, eigenvectors = torch.linalg.eigh(torch.ldexp(gram, -power[..., None, None]))
    energies = torch.ldexp(eigenvalues, power[..., None]).flip(-1)[..., :rank].clamp_min(SMALLEST_EIGENVALUE)
    u = eigenvectors.flip(-1)[..., :rank]
    sigma = energies.sqrt()[..., None, :]
    return PageEigen(
        finite=finite,
        mean=torch.where(finite[..., None], mean, 0),
        vectors=(u / sigma).transpose(-1, -2) @ centred,
        coordinates=u * sigma,
        energies=energies,
        residual=(torch.where(finite, trace, 0) - energies.sum(-1)).clamp_min(0),
    )


def check_rank(name: str, rank: int) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= PAGE_TOKENS:
        raise ValueError(f"rank of the selector {name} is {rank!r}; it must be a whole number from 1 to {PAGE_TOKENS}")
    return rank


def check_bits(name: str, bits: int, allowed: tuple[int, ...]) -> int:
    if isinstance(bits, bool) or bits not in allowed:
        raise ValueError(f"bits of the selector {name} is {bits!r}; allowed: {', '.join(map(str, allowed))}")
    return bits


def check_head_dim(name: str, head_dim: int, *, multiple: int = 1, above: int = 0) -> None:
    """Refuse head dimensions whose record would not fill whole bytes (``multiple``) or leaves no room for the rank (``above``)."""
    if head_dim < 1 or head_dim % multiple:
        raise ValueError(f"the selector {name} needs a positive head dim that is a multiple of {multiple}; it is {head_dim}")
    if head_dim <= above:
        raise ValueError(f"the selector {name} needs a head dim above its rank {above}; it is {head_dim}")


def project(queries: Tensor, vectors: Tensor) -> Tensor:
    """``z = v_k . q``: queries ``[N, H, G, D]``, vectors ``[P, H, K, D]`` -> float32 ``[N, H, P, G, K]``."""
    return torch.einsum("nhgd,phkd->nhpgk", queries.float(), vectors)


def mean_logits(queries: Tensor, codes: Tensor, scale: Tensor, tables: PageTables) -> Tensor:
    """``q . (mu + offset)``: codes int8 ``[P, H, D]``, scale ``[P, H]`` -> float32 ``[N, H, P, G]``."""
    q = queries.float()
    own = torch.einsum("nhgd,phd->nhpg", q, dequantise(codes, scale))
    return own + torch.einsum("nhgd,hd->nhg", q, tables.offset.float())[:, :, None]
