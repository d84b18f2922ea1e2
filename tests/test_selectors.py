"""Every selector of the registry through every property. A new selector is picked up by its name; extra options are listed in OPTIONS."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvskim.layout import sketch_layout
from kvskim.selectors import SELECTORS, get_selector
from kvskim.selectors.sketch import pack_digits, unpack_digits
from selector_data import exact, make_tables, pages, positions, queries, rank_correlation, run

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "rki4": [{"rank": 2}, {"rank": 4}, {"rank": 6}, {"rank": 16}],
    "r8": [{"rank": 16}],
    "quad": [{"bits": 8}],
    "clse": [{"rank": 4}],
    "minmax": [{"bits": 4}],
    "sketch": [{"record_bytes": 128}, {"record_bytes": 192}, {"record_bytes": 384}, {"page_frame": True}],
}
CASES = [(name, options) for name in SELECTORS for options in [{}, *OPTIONS.get(name, [])]]
DEFAULTS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in SELECTORS]
HEAD_DIMS = (64, 96, 128, 256, 576)

# Least mean rank correlation of scores with exact page log-masses on `pages`: what each format reaches there, less a margin.
LEAST_CORRELATION = {"oracle": 0.9999, "r8": 0.99, "rki4": 0.985, "clse": 0.97, "quad": 0.93, "minmax": 0.83, "mean": 0.91, "sketch": 0.985}


def case_id(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}{v}" for k, v in value.items())


every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=case_id)
every_selector = pytest.mark.parametrize("name", SELECTORS)


def test_the_registry_has_every_selector_of_the_design() -> None:
    assert set(SELECTORS) >= {"sketch", "rki4", "r8", "clse", "quad", "minmax", "mean", "oracle"}
    assert all(name in LEAST_CORRELATION for name in SELECTORS), "give a new selector its least rank correlation"


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("rki4", {}, 818), ("quad", {}, 266), ("quad", {"bits": 8}, 394), ("clse", {}, 316), ("r8", {}, 1330), ("sketch", {}, 256),
        ("mean", {}, 130), ("minmax", {}, 512), ("minmax", {"bits": 4}, 136), ("oracle", {}, 8192),
    ],
)
def test_bytes_at_head_dim_128(name: str, options: dict[str, Any], size: int) -> None:
    assert get_selector(name, **options).bytes_per_page(128) == size


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("name", "options"), [c for c in CASES if c != ("sketch", {"page_frame": True})])
def test_bytes_per_page_is_the_packed_size_at_every_head_dim(name: str, options: dict[str, Any], dim: int) -> None:
    selector = get_selector(name, **options)
    keys = pages(4, 1 if dim == 576 else 2, dim)
    q = queries(keys, 2, 2)
    tables = make_tables(selector, keys, q)
    records = selector.encode(keys, tables)
    assert records.dtype == torch.uint8
    assert records.is_contiguous()
    assert records.shape == (4, keys.shape[1], selector.bytes_per_page(dim))
    assert selector.record_bytes(dim) == selector.bytes_per_page(dim)
    scores = selector.score(q, records, tables)
    assert scores.dtype == torch.float32
    assert scores.shape == (2, keys.shape[1], 4, 2)
    assert torch.isfinite(scores).all()


@every_case
def test_no_pages_give_no_scores(name: str, options: dict[str, Any]) -> None:
    selector = get_selector(name, **options)
    keys = pages(4)
    q = queries(keys)
    tables = make_tables(selector, keys, q)
    records = selector.encode(keys[:0], tables, positions(keys)[:0])
    assert records.shape == (0, 2, selector.record_bytes(64))
    assert selector.score(q, records, tables, positions(keys)[:0]).shape == (8, 2, 0, 3)


@pytest.mark.parametrize(("name", "options"), DEFAULTS)
def test_scores_rank_pages_as_the_exact_masses_do(name: str, options: dict[str, Any]) -> None:
    selector = get_selector(name, **options)
    keys = pages(48)
    q = queries(keys)
    assert rank_correlation(run(selector, keys, q, make_tables(selector, keys, q)), exact(q, keys)) >= LEAST_CORRELATION[name]


@pytest.mark.parametrize(
    ("name", "options", "dim", "tolerance"),
    [("r8", {"rank": 16}, 64, 0.08), ("sketch", {"record_bytes": 384}, 16, 0.2), ("oracle", {}, 64, 1e-4)],
)
def test_converges_to_the_exact_log_mass_at_high_rate(name: str, options: dict[str, Any], dim: int, tolerance: float) -> None:
    selector = get_selector(name, **options)
    keys = pages(32, dim=dim)
    q = queries(keys)
    error = (run(selector, keys, q, make_tables(selector, keys, q, calibrated=True)) - exact(q, keys)).abs()
    assert float(error.mean()) < tolerance
    assert float(error.max()) < 10 * tolerance


def test_every_converging_selector_has_a_high_rate_case() -> None:
    assert {name for name, cls in SELECTORS.items() if cls.converges} == {"r8", "sketch", "oracle"}


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("rki4", [{"rank": r} for r in (1, 2, 4, 6, 8)]), ("r8", [{"rank": r} for r in (1, 2, 4, 8, 16)]),
        ("sketch", [{"record_bytes": b} for b in (128, 192, 256, 384)]),
    ],
)
def test_error_falls_with_the_rate(name: str, rates: list[dict[str, Any]]) -> None:
    keys = pages(48)
    q = queries(keys)
    errors = []
    for options in rates:
        selector = get_selector(name, **options)
        errors.append(float((run(selector, keys, q, make_tables(selector, keys, q)) - exact(q, keys)).abs().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.6 * errors[0]


@every_case
def test_permuted_pages_give_permuted_scores(name: str, options: dict[str, Any]) -> None:
    selector = get_selector(name, **options)
    keys = pages()
    q = queries(keys)
    tables = make_tables(selector, keys, q)
    order = torch.randperm(keys.shape[0], generator=torch.Generator().manual_seed(5))
    at = positions(keys)
    straight = selector.score(q, selector.encode(keys, tables, at), tables, at)
    permuted = selector.score(q, selector.encode(keys[order], tables, at[order]), tables, at[order])
    torch.testing.assert_close(permuted, straight[:, :, order], rtol=1e-4, atol=1e-4)
    assert straight.std(2).min() > 1e-3


@every_case
def test_encoding_is_deterministic_and_page_by_page(name: str, options: dict[str, Any]) -> None:
    selector = get_selector(name, **options)
    keys = pages(6)
    q = queries(keys)
    tables = make_tables(selector, keys, q)
    at = positions(keys)
    records = selector.encode(keys, tables, at)
    assert torch.equal(records, selector.encode(keys.clone(), tables, at))
    single = torch.cat([selector.encode(keys[p : p + 1], tables, at[p : p + 1]) for p in range(6)])
    torch.testing.assert_close(selector.score(q, single, tables, at), selector.score(q, records, tables, at), rtol=1e-3, atol=2e-2)


@every_selector
def test_fault_04_outlier_channels_do_not_wipe_out_the_mean(name: str) -> None:
    """Three channels with a constant bias of +-100: a calibrated offset must leave the ranking of pages as it is without them."""
    selector = get_selector(name)
    keys = pages(48)
    q = queries(keys)
    biased = keys.clone()
    biased[..., [3, 17, 40]] += torch.tensor([100.0, -100.0, 100.0])
    plain = rank_correlation(run(selector, keys, q, make_tables(selector, keys, q, calibrated=True)), exact(q, keys))
    outliers = rank_correlation(run(selector, biased, q, make_tables(selector, biased, q, calibrated=True)), exact(q, biased))
    assert outliers > plain - 0.02


def test_fault_04_needs_the_offset() -> None:
    """The test above can fail: without the offset one int8 scale for the whole mean does wipe it out."""
    selector = get_selector("mean")
    keys = pages(48)
    q = queries(keys)
    biased = keys.clone()
    biased[..., [3, 17, 40]] += torch.tensor([100.0, -100.0, 100.0])
    truth = exact(q, biased)
    with_offset = rank_correlation(run(selector, biased, q, make_tables(selector, biased, q, calibrated=True)), truth)
    assert rank_correlation(run(selector, biased, q, make_tables(selector, biased, q)), truth) < with_offset - 0.03


@pytest.mark.parametrize("calibrated", [False, True])
@every_case
def test_fault_03_large_key_bias_does_not_overflow(name: str, options: dict[str, Any], calibrated: bool) -> None:
    """Biases of 3e4, and channels whose energy is far above the largest float16, in a bfloat16 cache: scores stay finite."""
    selector = get_selector(name, **options)
    keys = pages()
    keys[..., [1, 9]] += 3e4
    keys[..., 5] *= 2000
    keys = keys.bfloat16()
    assert float((keys[..., 5].float() ** 2).sum(-1).max()) > 65504
    q = queries(keys) * 1e-2
    scores = run(selector, keys, q, make_tables(selector, keys, q, calibrated=calibrated))
    assert torch.isfinite(scores).all()
    assert scores.std(2).min() > 0


@every_case
def test_constant_keys(name: str, options: dict[str, Any]) -> None:
    """Sixteen equal keys: every format but the page-frame one, which turns them, must be exact up to the coding of one vector."""
    selector = get_selector(name, **options)
    keys = pages()[:, :, :1].expand(-1, -1, 16, -1)
    q = queries(keys)
    tables = make_tables(selector, keys, q)
    scores = run(selector, keys, q, tables)
    assert torch.isfinite(scores).all()
    if options.get("page_frame"):
        return
    bias = math.log(16) if name == "minmax" else 0.0
    error = (scores + bias - exact(q, keys)).abs().mean()
    # Codes of 15 levels, rounded outwards, are up to a step off in every channel.
    limit = 1.5 if options.get("bits") == 4 and name == "minmax" else 0.3
    assert float(error) < limit


def test_a_page_of_zeros_has_mass_sixteen() -> None:
    keys = torch.zeros(2, 2, 16, 64)
    q = queries(pages())
    for name in ("rki4", "r8", "quad", "clse", "mean", "oracle"):
        selector = get_selector(name)
        torch.testing.assert_close(run(selector, keys, q, selector.tables(2, 64)), torch.full((8, 2, 2, 3), math.log(16)))


@every_case
def test_one_hot_keys(name: str, options: dict[str, Any]) -> None:
    """A single token with a single large channel: its page is the most massive one for the query that looks for it."""
    selector = get_selector(name, **options)
    keys = 0.1 * pages()
    keys[7, 0, 5] = 0
    keys[7, 0, 5, 20] = 12.0
    q = torch.zeros(1, 2, 1, 64)
    q[0, 0, 0, 20] = 1.0
    q[0, 1, 0, 3] = 1.0
    fit = torch.cat([queries(keys), q.expand(1, 2, 3, 64)])
    scores = run(selector, keys, q, make_tables(selector, keys, fit))
    assert torch.isfinite(scores).all()
    assert int(scores[0, 0, :, 0].argmax()) == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_case
def test_half_precision_caches(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Arithmetic is in float32 whatever the cache holds: the record is that of the same numbers in float32."""
    selector = get_selector(name, **options)
    keys = pages().to(dtype)
    q = queries(keys)
    tables = make_tables(selector, keys, q)
    at = positions(keys)
    assert torch.equal(selector.encode(keys, tables, at), selector.encode(keys.float(), tables, at))
    half_q = q.to(dtype)
    records = selector.encode(keys, tables, at)
    assert torch.equal(selector.score(half_q, records, tables, at), selector.score(half_q.float(), records, tables, at))


@every_case
def test_packed_bytes_round_trip(name: str, options: dict[str, Any]) -> None:
    selector = get_selector(name, **options)
    keys = pages()
    q = queries(keys)
    tables = make_tables(selector, keys, q)
    records = selector.encode(keys, tables, positions(keys))
    if name == "sketch":
        layout = sketch_layout(selector.record_bytes(64))
        repacked = pack_digits(unpack_digits(records, layout).long(), layout)
    else:
        layout = selector.format(64)  # type: ignore[attr-defined]
        repacked = layout.pack(layout.unpack(records))
    assert torch.equal(repacked, records)


@every_case
def test_every_byte_matters(name: str, options: dict[str, Any]) -> None:
    """Changing any byte of the record, padding and the last digits of a float32 apart, changes a score."""
    selector = get_selector(name, **options)
    dim = 128
    keys = pages(heads=1, dim=dim)
    q = queries(keys)
    tables = make_tables(selector, keys, q)
    records = selector.encode(keys[:1], tables, positions(keys)[:1])
    width = selector.record_bytes(dim)
    if name == "oracle":
        at = torch.arange(3, width, 4)[::16]
    else:
        padding = 2 if name == "clse" and not options else 0
        at = torch.arange(width - padding)
    changed = records.repeat(len(at), 1, 1)
    changed[torch.arange(len(at)), 0, at] ^= 255
    where = torch.zeros(len(at), dtype=torch.long)
    before = selector.score(q, records, tables, where[:1])
    after = selector.score(q, changed, tables, where)
    same = (after == before).all(-1).all(1).all(0)
    # A large sketch record has a few digits whose weight rounds to zero in int8 for these queries.
    allowed = 0.03 * width if name == "sketch" and selector.record_bytes(dim) == 384 else 0
    assert int(same.sum()) <= allowed, f"bytes {at[same].tolist()} of {width} change nothing"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_selector
def test_keys_that_are_not_finite_are_seen(name: str, bad: float) -> None:
    """A broken page scores NaN or +inf, which rules count as "select"; never a silently small number. Other pages are untouched."""
    selector = get_selector(name)
    keys = pages()
    q = queries(keys)
    tables = make_tables(selector, keys, q)
    clean = run(selector, keys, q, tables)
    keys[4, 1, 9, 30] = bad
    scores = run(selector, keys, q, tables)
    broken = scores[:, 1, 4]
    untouched = torch.ones(24, 2, dtype=torch.bool)
    untouched[4, 1] = False
    torch.testing.assert_close(
        scores.permute(2, 1, 0, 3)[untouched], clean.permute(2, 1, 0, 3)[untouched], rtol=1e-4, atol=1e-4
    )
    if name == "sketch":
        # Two-bit digits have no code for a broken number: the page keeps a record, and its score must at least be a number.
        assert torch.isfinite(broken).all()
        return
    if name == "oracle" and not math.isnan(bad):
        # Exact, infinities included: the logit of that token is +-inf and the page mass follows.
        assert torch.equal(broken, torch.logsumexp(torch.einsum("nhgd,td->nhgt", q, keys[4, 1]), -1)[:, 1])
        return
    assert (broken.isnan() | (broken == math.inf)).all()
