"""Calibration: what is fitted, what is saved, what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvskim.calibration import (
    RANGE_MARGIN,
    SPREAD_COPIES,
    Calibration,
    CalibrationError,
    LayerCalibration,
    _fit_steps,
    _spread,
    fit_layer,
    load_calibration,
    model_fingerprint,
)
from kvskim.rotary import Rotary
from kvskim.selectors import get_selector
from kvskim.selectors.sketch import UNUSED_DIGIT, encode_codes, pack_digits, slot_weights, unpack_digits


def keys_and_queries(seed: int = 0, heads: int = 2, group: int = 3, tokens: int = 512, dim: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(heads, dim, dim, generator=generator) * torch.logspace(0, -1.5, dim)
    walk = torch.randn(heads, tokens, dim, generator=generator).cumsum(1) * 0.2
    keys = (walk + torch.randn(heads, tokens, dim, generator=generator)) @ mix + 2 * torch.randn(heads, 1, dim, generator=generator)
    queries = torch.randn(heads * group, 128, dim, generator=generator) * dim**-0.5
    return keys, queries


def test_fit_is_deterministic() -> None:
    keys, queries = keys_and_queries()
    a, b = (fit_layer(keys, queries).sketch for _ in range(2))
    for name, value in a.__dict__.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(b, name)), name


def test_bases_are_each_others_inverse_within_the_kept_coefficients() -> None:
    keys, queries = keys_and_queries()
    tables = fit_layer(keys, queries).sketch
    for head in range(2):
        rows = tables.coefficient_bits[head] > 0
        for mode, (start, stop) in enumerate(zip(tables.layout.mode_start, tables.layout.mode_start[1:])):
            used = torch.arange(start, stop)[rows[start:stop]]
            assert len(used) == tables.coefficient_count[head, mode]
            back, forth = tables.query_matrix[head, used].float(), tables.encode_matrix[head, used].float()
            product = back @ forth.T
            torch.testing.assert_close(product.diagonal(), torch.ones(len(used)), atol=0.01, rtol=0)
            cosines = product / (back.norm(dim=1)[:, None] * forth.norm(dim=1))
            assert (cosines - torch.diag(cosines.diagonal())).abs().max() < 0.005  # what rounding the matrices to bfloat16 leaves


def test_every_digit_of_a_coefficient_has_its_own_slot() -> None:
    keys, queries = keys_and_queries(dim=64)
    tables = fit_layer(keys, queries).sketch
    for head in range(2):
        used = tables.slot_digit[head] != UNUSED_DIGIT
        assert used.all()  # 64 channels have more digits than the largest mode has slots
        pairs = set(zip(tables.slot_coefficient[head].tolist(), tables.slot_digit[head].tolist()))
        assert len(pairs) == tables.layout.slots
        digits = torch.bincount(tables.slot_coefficient[head].long(), minlength=tables.layout.slots)
        assert torch.equal(2 * digits, tables.coefficient_bits[head].long())


def test_small_head_dim_leaves_slots_unused() -> None:
    keys, queries = keys_and_queries(dim=16)
    tables = fit_layer(keys, queries).sketch
    unused = tables.slot_digit == UNUSED_DIGIT
    assert unused.any()
    assert (tables.coefficient_bits[tables.coefficient_bits > 0] == 8).any()
    weights = slot_weights(torch.randn(1, 2, 3, 16), tables)
    assert (weights[0].transpose(0, 1)[:, unused] == 0).all()
    records = get_selector("sketch").encode(keys.unflatten(1, (-1, 16)).transpose(0, 1), tables)
    digits = unpack_digits(records, tables.layout)
    assert (digits[:, unused] == 0).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([128, 192, 256, 384]))
def test_digits_round_trip_through_the_record(seed: int, record_bytes: int) -> None:
    from kvskim.layout import sketch_layout

    layout = sketch_layout(record_bytes)
    digits = torch.randint(0, 4, (3, layout.slots), generator=torch.Generator().manual_seed(seed))
    records = pack_digits(digits, layout)
    assert records.shape == (3, record_bytes)
    assert records.dtype == torch.uint8
    assert torch.equal(unpack_digits(records, layout).long(), digits)


def test_score_is_the_log_mass_of_the_decoded_keys() -> None:
    """The digits, weights and transform of the record, against keys decoded from the codes in float64."""
    keys, queries = keys_and_queries(tokens=256)
    tables = fit_layer(keys, queries).sketch
    pages = keys.unflatten(1, (-1, 16)).transpose(0, 1)
    codes = encode_codes(pages, tables).double()
    half = 2.0 ** (tables.coefficient_bits.double() - 1)
    used = tables.coefficient_bits > 0
    values = torch.where(used, codes - half + 0.5, torch.zeros((), dtype=torch.float64))
    q = queries.unflatten(0, (2, 3))[:, :, :5].permute(2, 0, 1, 3)
    from kvskim.layout import dct_matrix

    rows = torch.einsum("nhgd,hsd->nhgs", q.double(), tables.query_matrix.double())
    contributions = rows[:, :, None] * values.transpose(0, 1)[None, :, :, None]  # n h p g s
    modes = torch.stack([
        contributions[..., a:b].sum(-1) for a, b in zip(tables.layout.mode_start, tables.layout.mode_start[1:])
    ], -1)
    logits = modes @ dct_matrix(torch.float64).T
    expected = logits.logsumexp(-1) + torch.einsum("nhgd,hd->nhg", q.double(), tables.mean.double())[:, :, None]
    actual = get_selector("sketch").score(q, get_selector("sketch").encode(pages, tables), tables)
    spread = expected.std()
    assert (actual - expected).abs().max() < 0.1 * spread  # the int8 weights, one scale per mode
    assert (actual - expected).square().mean().sqrt() < 0.02 * spread


def test_larger_records_are_closer_to_the_exact_log_mass() -> None:
    keys, queries = keys_and_queries(tokens=1024, dim=64)
    pages = keys.unflatten(1, (-1, 16)).transpose(0, 1)
    q = queries.unflatten(0, (2, 3))[:, :, :8].permute(2, 0, 1, 3)
    exact = torch.einsum("nhgd,phtd->nhpgt", q, pages).logsumexp(-1)
    errors = []
    for size in (128, 192, 256, 384):
        selector = get_selector("sketch", record_bytes=size)
        tables = fit_layer(keys, queries, record_bytes=size).sketch
        difference = selector.score(q, selector.encode(pages, tables), tables) - exact
        errors.append(float((difference - difference.mean()).square().mean().sqrt() / exact.std()))
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.1


def test_query_metric_beats_plain_axes() -> None:
    """Queries that only look at the weakest key channels: the metric must spend its digits there."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(1, 2048, 64, generator=generator) * torch.cat([torch.full((56,), 10.0), torch.full((8,), 0.5)])
    queries = torch.randn(2, 256, 64, generator=generator) * torch.cat([torch.full((56,), 1e-3), torch.full((8,), 2.0)])
    pages = keys.unflatten(1, (-1, 16)).transpose(0, 1)
    q = queries[:, :16].unflatten(0, (1, 2)).permute(2, 0, 1, 3)
    exact = torch.einsum("nhgd,phtd->nhpgt", q, pages).logsumexp(-1)
    selector = get_selector("sketch")
    def error(fit_queries: torch.Tensor) -> float:
        tables = fit_layer(keys, fit_queries).sketch
        return float((selector.score(q, selector.encode(pages, tables), tables) - exact).std())

    assert error(queries) < 0.5 * error(torch.randn(2, 256, 64, generator=generator))


def test_a_few_long_queries_do_not_take_the_record_from_the_others() -> None:
    """One query in twenty is thirty times as long and looks elsewhere: what the record is worth to the others must not hang on its length."""
    generator = torch.Generator().manual_seed(6)
    keys = torch.randn(1, 2048, 64, generator=generator)
    queries = torch.randn(2, 400, 64, generator=generator) * torch.cat([torch.full((32,), 1e-2), torch.full((32,), 0.3)])
    few = queries.clone()
    few[:, ::20] = few[:, ::20].roll(32, -1)
    long = few.clone()
    long[:, ::20] *= 30
    pages = keys.unflatten(1, (-1, 16)).transpose(0, 1)
    q = queries[:, 1:17].unflatten(0, (1, 2)).permute(2, 0, 1, 3)
    assert score_error(fit_layer(keys, long), pages, q) == pytest.approx(score_error(fit_layer(keys, few), pages, q), rel=0.02)
    assert score_error(fit_layer(keys, few), pages, q) < 1.3 * score_error(fit_layer(keys, queries), pages, q)


def early_text_late_pages(dim: int = 32) -> tuple[Rotary, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Rotary embedding; keys and queries of a text at positions 0 to 511; pages of another text at 6000 and later, and queries there."""
    rotary = Rotary(1e4 ** (-torch.arange(0, dim, 2) / dim))
    generator = torch.Generator().manual_seed(1)
    content = torch.randn(1, 512, dim, generator=generator) * 0.5 + 3 * torch.randn(1, 1, dim, generator=generator)
    wanted = torch.randn(2, 512, dim, generator=generator) * 0.2 + torch.randn(2, 1, dim, generator=generator)
    early, late = torch.arange(512), torch.arange(512) + 6000
    text = dict(keys=rotary.rotate(content, early), queries=rotary.rotate(wanted, early))
    pages = rotary.rotate(content.flip(1), late).unflatten(1, (-1, 16)).transpose(0, 1)
    return rotary, text, pages, rotary.rotate(wanted[:, -16:], late[-16:]).unflatten(0, (1, 2)).permute(2, 0, 1, 3)


def score_error(calibration: LayerCalibration, pages: torch.Tensor, q: torch.Tensor) -> float:
    selector, tables = get_selector("sketch"), calibration.sketch
    exact = torch.einsum("nhgd,phtd->nhpgt", q, pages).logsumexp(-1)
    return float((selector.score(q, selector.encode(pages, tables), tables) - exact).std())


def test_a_fit_on_early_text_is_as_good_at_late_positions() -> None:
    """Its pages and queries are turned to all positions that requests can have; left where they are, they say nothing of late ones."""
    rotary, text, pages, q = early_text_late_pages()
    left = score_error(fit_layer(**text), pages, q)
    spread = score_error(fit_layer(**text, rotary=rotary, served_positions=8192, query_positions=torch.arange(512)), pages, q)
    there = dict(keys=rotary.rotate(text["keys"], 6000), queries=rotary.rotate(text["queries"], 6000))
    own = score_error(fit_layer(**there), pages, q)
    assert spread < 0.6 * left
    assert spread < 2 * own


def test_where_a_text_lies_makes_no_difference_to_a_fit_for_all_positions() -> None:
    rotary, text, pages, q = early_text_late_pages()
    moved = {name: rotary.rotate(value, 3000) for name, value in text.items()}
    a = fit_layer(**text, rotary=rotary, served_positions=8192, query_positions=torch.arange(512))
    b = fit_layer(**moved, rotary=rotary, served_positions=8192, key_positions=torch.arange(512) + 3000, query_positions=torch.arange(512) + 3000)
    torch.testing.assert_close(a.mean, b.mean, atol=1e-4, rtol=1e-4)
    assert score_error(b, pages, q) == pytest.approx(score_error(a, pages, q), rel=0.02)


def test_spread_positions_cover_all_that_are_served_evenly() -> None:
    rotary = Rotary(torch.tensor([2 * torch.pi / 1e6]))
    where = torch.arange(64) * 16
    x = rotary.rotate(torch.tensor([1.0, 0.0]).expand(1, 64, 16, 2), where[:, None] + torch.arange(16))
    spread = _spread(x, where, rotary, 32768)[0]
    position = torch.atan2(spread[..., 1], spread[..., 0]) / (2 * torch.pi) * 1e6
    torch.testing.assert_close(position[:, 1:] - position[:, :-1], torch.ones(position.shape[0], 15), atol=0.05, rtol=0)
    assert position.min() > -0.5
    assert position.max() < 32767.5
    assert torch.bincount((position[:, 0] / 2048).long(), minlength=16).tolist() == pytest.approx([SPREAD_COPIES * 4] * 16, abs=3)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_a_quantiser_reaches_a_part_of_the_largest_coefficient(bits: int) -> None:
    """One large coefficient among many small ones: the smallest mean squared error would clip it."""
    coefficients = torch.randn(1, 4000, 16, 4, generator=torch.Generator().manual_seed(4))
    coefficients[:, 7] = 40.0
    steps, _ = _fit_steps(coefficients)
    assert (steps[bits] * 2 ** (bits - 1) >= 40 * RANGE_MARGIN[bits] - 1e-4).all()


def test_page_frame_record_scores_with_turned_queries() -> None:
    rotary = Rotary(1e4 ** (-torch.arange(0, 32, 2) / 32))
    keys, queries = keys_and_queries(tokens=512)
    positions = torch.arange(512)
    keys, queries = rotary.rotate(keys, positions), rotary.rotate(queries, torch.arange(128) * 4)
    tables = fit_layer(keys, queries, rotary=rotary, page_frame=True)
    selector = get_selector("sketch", page_frame=True)
    pages, first = keys.unflatten(1, (-1, 16)).transpose(0, 1), torch.arange(0, 512, 16)
    records = selector.encode(pages, tables.sketch, first)
    q = queries.unflatten(0, (2, 3))[:, :, -4:].permute(2, 0, 1, 3)
    exact = torch.einsum("nhgd,phtd->nhpgt", q, pages).logsumexp(-1)
    scores = selector.score(q, records, tables.sketch, first)
    assert (scores - exact).std() < 0.15 * exact.std()
    with pytest.raises(ValueError, match="position of every page"):
        selector.score(q, records, tables.sketch)


def test_save_and_load(tmp_path: object) -> None:
    keys, queries = keys_and_queries()
    calibration = Calibration("tiny", "abc", {0: fit_layer(keys, queries), 7: fit_layer(keys + 1, queries)})
    path = tmp_path / "c.safetensors"  # type: ignore[operator]
    calibration.save(path)
    loaded = load_calibration(path)
    assert (loaded.model, loaded.fingerprint, sorted(loaded.layers)) == ("tiny", "abc", [0, 7])
    for index in (0, 7):
        for name, value in calibration.layer(index).sketch.__dict__.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, getattr(loaded.layer(index).sketch, name)), name
    share = loaded.layer(0).sketch.heads(1, 2)
    assert torch.equal(share.mean, calibration.layer(0).mean[1:2])


def test_refusals_are_one_sentence(tmp_path: object) -> None:
    keys, queries = keys_and_queries()
    calibration = Calibration("tiny", "abc", {0: fit_layer(keys, queries)})
    path = tmp_path / "c.safetensors"  # type: ignore[operator]
    with pytest.raises(CalibrationError, match="no such file: make one with `kvskim calibrate"):
        load_calibration(path)
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(CalibrationError, match="not a readable safetensors file"):
        load_calibration(path)
    calibration.save(path)
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 0xFF
    path.write_bytes(bytes(damaged))
    with pytest.raises(CalibrationError, match="damaged file"):
        load_calibration(path)
    with pytest.raises(CalibrationError, match=r"was made for the model tiny .* not for other"):
        calibration.check("other", "xyz", 2, 32)
    with pytest.raises(CalibrationError, match=r"has shape \(2, 32\).*the model has \(4, 32\)"):
        calibration.check("tiny", "abc", 4, 32)
    calibration.check("tiny", "abc", 2, 32)
    with pytest.raises(CalibrationError, match="has no layer 5"):
        calibration.layer(5)
    with pytest.raises(CalibrationError, match="made for record_bytes 256, page_frame False; selector_options ask for record_bytes 128"):
        get_selector("sketch", record_bytes=128).tables(2, 32, calibration.layer(0))
    with pytest.raises(ValueError, match="needs a calibration"):
        get_selector("sketch").tables(2, 32)
    with pytest.raises(CalibrationError, match=r"folder .* does not exist"):
        calibration.save(path.parent / "missing" / "c.safetensors")
    with pytest.raises(CalibrationError, match="needs at least 32 keys"):
        fit_layer(keys[:, :20], queries)
    with pytest.raises(CalibrationError, match="not finite"):
        fit_layer(torch.where(torch.rand_like(keys) < 0.01, torch.inf, keys), queries)
    with pytest.raises(CalibrationError, match="not a multiple of 2 kv heads"):
        fit_layer(keys, queries[:5])
    rotary = Rotary(torch.ones(16))
    with pytest.raises(CalibrationError, match="need the model's rotary embedding"):
        fit_layer(keys, queries, served_positions=100)
    with pytest.raises(CalibrationError, match="needs the positions of the queries"):
        fit_layer(keys, queries, served_positions=100, rotary=rotary)
    with pytest.raises(CalibrationError, match="512 keys and 128 queries per head; it needs one position for each"):
        fit_layer(keys, queries, served_positions=100, rotary=rotary, query_positions=torch.arange(64))


def test_fingerprint_depends_on_shapes_and_rotary_only() -> None:
    config = {"model_type": "llama", "hidden_size": 576, "rope_theta": 1e5, "torch_dtype": "bfloat16"}
    assert model_fingerprint(config) == model_fingerprint({**config, "torch_dtype": "float16", "use_cache": False})
    assert model_fingerprint(config) != model_fingerprint({**config, "rope_theta": 1e6})


def test_damaged_metadata_and_unwritable_targets_are_refused(tmp_path: object) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    keys, queries = keys_and_queries()
    path = tmp_path / "c.safetensors"  # type: ignore[operator]
    Calibration("tiny", "abc", {0: fit_layer(keys, queries)}).save(path)
    with safe_open(str(path), framework="pt") as f:
        metadata, tensors = dict(f.metadata()), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    for name, value in (("record_bytes", "100"), ("record_bytes", "128"), ("page_frame", None)):
        changed = {k: v for k, v in {**metadata, name: value}.items() if v is not None}
        save_file(tensors, str(path), metadata=changed)
        with pytest.raises(CalibrationError, match="do not fit together"):
            load_calibration(path)
    folder = tmp_path / "folder"  # type: ignore[operator]
    folder.mkdir()
    with pytest.raises(CalibrationError, match="can't be written"):
        Calibration("tiny", "abc", {0: fit_layer(keys, queries)}).save(folder)
