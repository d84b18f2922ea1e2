"""The gains of token modes that a calibration of latent rows has, and how its modes share their axes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvskim import calibration
from kvskim.calibration import fit_layer
from kvskim.calibration_gains import GAIN_RANGE, stretch_modes
from kvskim.layout import sketch_layout
from kvskim.selectors import get_selector
from kvskim.selectors.sketch import SketchTables

DIM, PAGES, HEADS = 288, 64, 4
POSITIONS = torch.arange(64, 16 * PAGES, 16)


def rows(generator: torch.Generator) -> Tensor:
    """Keys ``[1, 16 PAGES, DIM]`` with a falling spectrum, alike within a page."""
    text = torch.randn(PAGES, 1, DIM, generator=generator) + 0.7 * torch.randn(PAGES, 16, DIM, generator=generator)
    return (text * torch.arange(1, DIM + 1).pow(-0.3)).flatten(0, 1)[None]


def seeking(keys: Tensor, generator: torch.Generator) -> Tensor:
    """Queries ``[HEADS, n, DIM]`` at POSITIONS, each along some earlier key."""
    wanted = (torch.rand(HEADS, len(POSITIONS), generator=generator) * (POSITIONS - 48)).long()
    return 0.25 * keys[0, wanted] + 0.05 * torch.randn(HEADS, len(POSITIONS), DIM, generator=generator)


def plain_and_stretched(keys: Tensor, queries: Tensor, positions: Tensor | None = POSITIONS) -> tuple[SketchTables, SketchTables]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "stretch_modes", lambda tables, *_: tables)
        plain = fit_layer(keys, queries, record_bytes=128, query_positions=positions).sketch
    return plain, fit_layer(keys, queries, record_bytes=128, query_positions=positions).sketch


def gains(plain: SketchTables, stretched: SketchTables) -> Tensor:
    """Gain of every token mode that has digits."""
    layout = sketch_layout(plain.record_bytes)
    out = []
    for start, stop in zip(layout.mode_start, layout.mode_start[1:]):
        if stop > start:
            a, b = plain.query_matrix[0, start].float(), stretched.query_matrix[0, start].float()
            out.append((a @ b) / (a @ a))
    return torch.stack(out)


def error(tables: SketchTables, keys: Tensor, queries: Tensor) -> float:
    """Squared error in the log-mass of pages, up to a constant per query, weighted by the mass."""
    selector = get_selector("sketch", record_bytes=128)
    pages = keys[0].unflatten(0, (-1, 1, 16))
    asked = queries.transpose(0, 1)[:, None]
    scores = selector.score(asked, selector.encode(pages, tables), tables)[:, 0]  # [n, P, G]
    exact = torch.einsum("ngd,ptd->npgt", asked[:, 0], pages[:, 0]).logsumexp(-1)
    mass = exact.softmax(1)
    difference = scores - exact
    difference = difference - (mass * difference).sum(1, keepdim=True)
    return float((mass * difference.square()).sum(1).mean())


def test_modes_whose_record_leaves_much_out_are_stretched_and_new_text_is_scored_better() -> None:
    generator = torch.Generator().manual_seed(1)
    keys = rows(generator)
    plain, stretched = plain_and_stretched(keys, seeking(keys, generator))
    found = gains(plain, stretched)
    assert bool((found[1:] > 1.02).all()), found
    assert bool((found <= GAIN_RANGE[1]).all())
    other = rows(generator)
    queries = seeking(other, generator)
    assert error(stretched, other, queries) < 0.97 * error(plain, other, queries)


def test_only_the_query_side_changes() -> None:
    generator = torch.Generator().manual_seed(2)
    keys = rows(generator)
    plain, stretched = plain_and_stretched(keys, seeking(keys, generator))
    for name in ("mean", "encode_matrix", "coefficient_bits", "coefficient_count", "slot_coefficient", "slot_digit"):
        assert torch.equal(getattr(plain, name), getattr(stretched, name)), name
    assert not torch.equal(plain.query_matrix, stretched.query_matrix)


def test_gains_are_those_of_a_scale_that_is_wrong() -> None:
    """Tables whose modes are made too small on purpose get the factor back, but for the pull to 1."""
    generator = torch.Generator().manual_seed(3)
    keys = rows(generator)
    queries = seeking(keys, generator)
    tables = plain_and_stretched(keys, queries)[1]
    pages, first = keys.unflatten(1, (-1, 16)), torch.arange(0, 16 * PAGES, 16)
    small = SketchTables(**{**tables.__dict__, "query_matrix": (tables.query_matrix.float() / 1.5).bfloat16()})
    before, after = (gains(t, stretch_modes(t, pages, queries, first, POSITIONS)) for t in (tables, small))
    assert bool((after > before + 0.1).all()), (before, after)


def test_queries_before_all_pages_leave_the_tables_as_they_are() -> None:
    generator = torch.Generator().manual_seed(4)
    keys = rows(generator)
    plain, stretched = plain_and_stretched(keys, seeking(keys, generator), torch.zeros(len(POSITIONS), dtype=torch.int64))
    assert torch.equal(plain.query_matrix, stretched.query_matrix)


def test_queries_of_unknown_positions_see_all_pages() -> None:
    generator = torch.Generator().manual_seed(5)
    keys = rows(generator)
    plain, stretched = plain_and_stretched(keys, seeking(keys, generator), None)
    assert bool((gains(plain, stretched)[1:] > 1.02).all())


def test_keys_of_single_heads_are_fitted_without_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> SketchTables:
        raise AssertionError("keys of up to 256 channels have no gains")

    monkeypatch.setattr(calibration, "stretch_modes", refuse)
    generator = torch.Generator().manual_seed(6)
    fit_layer(torch.randn(1, 64, 64, generator=generator), torch.randn(2, 8, 64, generator=generator), record_bytes=128)
    with pytest.raises(AssertionError, match="no gains"):
        fit_layer(torch.randn(1, 64, 288, generator=generator), torch.randn(2, 8, 288, generator=generator), record_bytes=128)


@pytest.mark.parametrize(("channels", "pages", "share"), [(64, 8, 0.5), (256, 64, 0.5), (576, 4096, 0.5), (576, 512, 0.75), (576, 256, 1.0)])
def test_modes_of_latent_rows_share_axes_where_pages_are_few(channels: int, pages: int, share: float) -> None:
    assert calibration._shrink(channels, pages) == pytest.approx(share)
