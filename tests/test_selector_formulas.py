"""What single selectors promise: their equations, their bounds, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvskim.selectors import SELECTORS, PageTables, get_selector
from selector_data import exact, make_tables, pages, queries, run


@pytest.mark.parametrize("name", SELECTORS)
def test_head_dims_that_do_not_fill_bytes_are_refused(name: str) -> None:
    selector = get_selector(name)
    if name in ("rki4", "clse", "quad"):
        with pytest.raises(ValueError, match=rf"{name} needs .* multiple of 2; it is 65"):
            selector.record_bytes(65)
        with pytest.raises(ValueError, match="it is 65"):
            selector.encode(torch.zeros(1, 1, 16, 65), PageTables(torch.zeros(1, 65)))
    else:
        assert selector.record_bytes(65) > 0
    if name != "sketch":
        with pytest.raises(ValueError, match="it is 0"):
            selector.record_bytes(0)


@pytest.mark.parametrize("name", SELECTORS)
def test_wrong_keys_and_records_are_refused(name: str) -> None:
    selector = get_selector(name)
    keys = pages(4)
    q = queries(keys)
    tables = make_tables(selector, keys, q)
    with pytest.raises(ValueError, match="expected"):
        selector.encode(keys[:, :, :15], tables)
    with pytest.raises(ValueError, match="float dtype"):
        selector.encode(keys.int(), tables)
    if name != "sketch":
        records = selector.encode(keys, tables)
        with pytest.raises(ValueError, match="bytes each; expected"):
            selector.score(q, records[..., :-1], tables)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rki4", {"rank": 0}, "rank of the selector rki4 is 0"), ("r8", {"rank": 17}, "rank of the selector r8 is 17"),
        ("clse", {"rank": "2"}, "rank of the selector clse is '2'"), ("clse", {"rank": 3}, "rank of the selector clse is 3; it must be even"),
        ("quad", {"rank": True}, "rank of the selector quad is True"),
        ("quad", {"bits": 5}, "bits of the selector quad is 5; allowed: 4, 8"), ("minmax", {"bits": 8}, "bits of the selector minmax is 8"),
        ("mean", {"rank": 2}, "do not fit the selector 'mean'"), ("sketch", {"record_bytes": 100}, "record_bytes is 100"),
        ("nosuch", {}, "known selectors: .*rki4"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_selector(name, **options)


def test_clse_needs_a_head_dim_above_its_rank() -> None:
    with pytest.raises(ValueError, match="above its rank 4; it is 4"):
        get_selector("clse", rank=4).record_bytes(4)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("calibrated", [False, True])
def test_minmax_is_an_upper_bound_of_every_logit(bits: int, calibrated: bool) -> None:
    selector = get_selector("minmax", bits=bits)
    keys = pages(48)
    q = queries(keys)
    logits = torch.einsum("nhgd,phtd->nhpgt", q, keys)
    scores = run(selector, keys, q, make_tables(selector, keys, q, calibrated=calibrated))
    assert (scores + 1e-4 >= logits.amax(-1)).all()


def test_mean_is_a_lower_bound_of_the_log_mass() -> None:
    """Jensen: the exponential of the mean logit is at most the mean exponential; equality up to the coding of the mean."""
    selector = get_selector("mean")
    keys = pages(48)
    q = queries(keys)
    scores = run(selector, keys, q, make_tables(selector, keys, q, calibrated=True))
    coding = (scores - math.log(16) - torch.einsum("nhgd,phd->nhpg", q, keys.mean(2))).abs().amax()
    assert float(coding) < 0.25
    assert (scores <= exact(q, keys) + coding).all()


@pytest.mark.parametrize(
    ("name", "options"), [("rki4", {}), ("r8", {}), ("clse", {}), ("clse", {"rank": 4}), ("quad", {}), ("quad", {"bits": 8})]
)
def test_scores_follow_the_written_equations(name: str, options: dict[str, Any]) -> None:
    """The equations of docs/how-it-works.md in float64, one page, head and query at a time, from the decoded fields of the record."""
    selector = get_selector(name, **options)
    keys = pages(3)
    q = queries(keys, 2, 2)
    tables = make_tables(selector, keys, q, calibrated=True)
    records = selector.encode(keys, tables)
    scores = selector.score(q, records, tables)
    fields = {k: v.double() for k, v in selector.format(64).unpack(records).items()}  # type: ignore[attr-defined]
    rank = fields["vectors"].shape[2]
    for n, h, p, g in ((0, 0, 0, 0), (1, 1, 2, 1), (0, 1, 1, 0)):
        query = q[n, h, g].double()
        mean = fields["mean"][p, h] * fields["mean_scale"][p, h] + tables.offset[h].double()
        vectors = fields["vectors"][p, h] * fields["vector_scale"][p, h][:, None]
        z = vectors @ query
        if name == "quad":
            spread = sum(float(fields["energies"][p, h, k]) * float(z[k]) ** 2 for k in range(rank)) / 32 + math.log(16)
        else:
            c = fields["coordinates"][p, h] * fields["coordinate_scale"][p, h][:, None]
            spread = math.log(sum(math.exp(float(c[t] @ z)) for t in range(16)))
        if name == "clse":
            outside = max(float(query @ query - z @ z), 0.0)
            spread += outside * float(fields["residual"][p, h]) / (32 * (64 - rank))
        assert float(scores[n, h, p, g]) == pytest.approx(float(mean @ query) + spread, rel=1e-5, abs=1e-4)


def test_the_clse_correction_makes_up_for_the_energy_left_out() -> None:
    """On keys with isotropic noise the correction removes most of the bias of the rank-2 copy."""
    g = torch.Generator().manual_seed(3)
    keys = pages(64) * 0.5 + 0.6 * torch.randn(64, 2, 16, 64, generator=g)
    q = torch.randn(8, 2, 3, 64, generator=g) * 0.25
    selector = get_selector("clse")
    tables = selector.tables(2, 64)
    records = selector.encode(keys, tables)
    at = selector.format(64).offsets["residual"]  # type: ignore[attr-defined]
    without = records.clone()
    without[..., at : at + 4] = 0
    truth = exact(q, keys)
    bias, bias_without = (float((selector.score(q, r, tables) - truth).mean()) for r in (records, without))
    assert bias_without < -0.1
    assert abs(bias) < 0.35 * abs(bias_without)
