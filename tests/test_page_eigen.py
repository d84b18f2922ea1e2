"""Packing, quantisers and the decomposition shared by the eigen selectors."""

from __future__ import annotations

import math

import pytest
import torch

from kvskim.selectors import PageTables
from kvskim.selectors.minmax import ceil_bfloat16, floor_bfloat16
from kvskim.selectors.page_eigen import Field, RecordFormat, decompose, dequantise, pack_nibbles, quantise, unpack_nibbles


def test_nibbles_low_is_the_even_code() -> None:
    packed = pack_nibbles(torch.tensor([[3, -2, -8, 7]], dtype=torch.int8))
    assert packed.tolist() == [[0xE3, 0x78]]
    assert unpack_nibbles(packed, signed=True).tolist() == [[3, -2, -8, 7]]
    assert unpack_nibbles(packed, signed=False).tolist() == [[3, 14, 8, 7]]
    with pytest.raises(ValueError, match="must be even"):
        pack_nibbles(torch.zeros(3, dtype=torch.int8))


def test_record_format_is_little_endian_in_field_order_and_padded() -> None:
    fields = (Field("a", "int8", (2,)), Field("b", "bfloat16", ()), Field("c", "float32", (1,)), Field("d", "uint4", (2,)))
    layout = RecordFormat(fields, alignment=4)
    record = layout.pack({
        "a": torch.tensor([1, -1]), "b": torch.tensor(1.0), "c": torch.tensor([1.0]), "d": torch.tensor([2, 15], dtype=torch.uint8),
    })
    assert record.tolist() == [1, 255, 0x80, 0x3F, 0, 0, 0x80, 0x3F, 0xF2, 0, 0, 0]
    assert layout.offsets == {"a": 0, "b": 2, "c": 4, "d": 8}
    values = layout.unpack(record)
    assert values["a"].tolist() == [1, -1]
    assert values["b"].shape == ()
    assert float(values["b"]) == 1.0
    assert values["d"].tolist() == [2, 15]


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_made_with_the_scale_as_stored(bits: int) -> None:
    values = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 500)[:, None]
    codes, scale = quantise(values, bits)
    largest = 2 ** (bits - 1) - 1
    assert scale.dtype == torch.bfloat16
    assert int(codes.abs().max()) == largest
    error = (dequantise(codes, scale) - values).abs() / scale.float()[:, None]
    # Half a step for every code; a value above the largest code may be further off by the rounding of the scale to 8 significant bits.
    assert float(error[codes.abs() < largest].max()) <= 0.5001
    assert float(error.max()) <= 0.5 + largest / 256 + 1e-3


def test_zeros_and_tiny_values_have_scale_zero() -> None:
    codes, scale = quantise(torch.tensor([[0.0, 0.0], [1e-35, -1e-36]]), 8)
    assert codes.tolist() == [[0, 0], [0, 0]]
    assert scale.tolist() == [0.0, 0.0]


def test_decomposition_at_full_rank_is_exact_and_ordered() -> None:
    keys = torch.randn(5, 2, 16, 48, generator=torch.Generator().manual_seed(1)) * 3 + 1
    offset = torch.randn(2, 48, generator=torch.Generator().manual_seed(2))
    page = decompose(keys, PageTables(offset), 16)
    copy = page.mean[:, :, None] + page.coordinates @ page.vectors + offset[:, None]
    torch.testing.assert_close(copy, keys, rtol=1e-4, atol=1e-4)
    assert (page.energies.diff(dim=-1) <= 0).all()
    assert (page.energies >= 1e-10).all()
    assert float(page.residual.max()) < 1e-2
    torch.testing.assert_close(page.vectors[:, :, :15].norm(dim=-1), torch.ones(5, 2, 15), rtol=1e-4, atol=1e-4)


def test_residual_is_the_energy_outside_the_kept_directions() -> None:
    keys = torch.randn(5, 2, 16, 48, generator=torch.Generator().manual_seed(1))
    page = decompose(keys, PageTables(torch.zeros(2, 48)), 3)
    rest = keys - page.mean[:, :, None] - page.coordinates @ page.vectors
    torch.testing.assert_close(page.residual, rest.square().sum((-1, -2)), rtol=1e-4, atol=1e-3)


def test_outward_rounding_to_bfloat16() -> None:
    values = torch.cat([
        torch.randn(2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 2000),
        torch.tensor([0.0, 1.0, -1.0, 3.4028e38, -3.4028e38, math.inf, -math.inf]),
    ])
    low, high = floor_bfloat16(values), ceil_bfloat16(values)
    assert (low.float() <= values).all()
    assert (high.float() >= values).all()
    exact = values == values.bfloat16().float()
    assert torch.equal(low[exact].float(), values[exact])
    assert torch.equal(high[exact].float(), values[exact])
    nearest = values.bfloat16()
    assert ((low == nearest) | (high == nearest)).all()
    assert floor_bfloat16(torch.tensor([math.nan])).isnan().all()
    assert ceil_bfloat16(torch.tensor([math.nan])).isnan().all()


def test_pages_are_decomposed_at_the_same_size_whatever_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On numbers as small as the rounding errors of a page of equal keys, LAPACK does not converge on every processor."""
    seen = []
    solve = torch.linalg.eigh

    def eigh(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(matrices.diagonal(dim1=-2, dim2=-1).sum(-1))
        return solve(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    keys = torch.randn(3, 2, 16, 8, generator=torch.Generator().manual_seed(5))
    tables = PageTables(torch.zeros(2, 8))
    expected = decompose(keys, tables, 3)
    for power in (-10, 40):
        found = decompose(keys * 2.0**power, tables, 3)
        assert torch.equal(found.vectors, expected.vectors)
        assert torch.equal(found.coordinates, expected.coordinates * 2.0**power)
        assert torch.equal(found.energies, expected.energies * 4.0**power)
    decompose(keys[:, :, :1].expand(-1, -1, 16, -1).contiguous() / 3, tables, 3)
    for trace in seen:
        assert bool(((trace == 0) | ((trace >= 0.5) & (trace < 1))).all()), trace
