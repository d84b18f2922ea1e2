"""Kept calibrations: where they lie, that half a file is never seen, and that what can't be used is said and left."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from kvskim.calibration import Calibration, CalibrationError, fit_layer, load_calibration
from kvskim.calibration_store import calibration_path, read_stored, stored_record_bytes, write_stored
from kvskim.selectors import get_selector

HEADS, DIM = 2, 64


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make(layers: tuple[int, ...] = (0, 1), seed: int = 0, record_bytes: int = 256, fingerprint: str = "0123456789abcdef") -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    keys, queries = torch.randn(HEADS, 128, DIM, generator=generator), torch.randn(2 * HEADS, 16, DIM, generator=generator)
    return Calibration("a model", fingerprint, {index: fit_layer(keys, queries, record_bytes=record_bytes) for index in layers})


def read(record_bytes: int = 256, layers: tuple[int, ...] = (0, 1), shape: tuple[int, int] = (HEADS, DIM), page_frame: bool = False):
    return read_stored("a model", "0123456789abcdef", shape, layers, record_bytes=record_bytes, page_frame=page_frame)


def test_the_name_of_a_file(cache: Path) -> None:
    assert calibration_path("f", 256) == cache / "calibrations" / "f-256.safetensors"
    assert calibration_path("f", 128, page_frame=True) == cache / "calibrations" / "f-128-page-frame.safetensors"


def test_what_is_written_is_found_and_nothing_else(cache: Path) -> None:
    assert read() is None
    assert not cache.exists()
    path = write_stored(make())
    assert path == calibration_path("0123456789abcdef", 256)
    found = read()
    assert found is not None
    assert found[1] == path
    assert torch.equal(found[0].layer(1).sketch.encode_matrix, make().layer(1).sketch.encode_matrix)
    assert read(record_bytes=128) is None
    assert read(page_frame=True) is None
    write_stored(make(record_bytes=128))
    assert read(record_bytes=128) is not None


def test_a_new_one_replaces_the_old_one_and_leaves_no_other_file(cache: Path) -> None:
    first = write_stored(make())
    assert write_stored(make(seed=1)) == first
    found = read()
    assert found is not None
    assert torch.equal(found[0].layer(0).mean, make(seed=1).layer(0).mean)
    assert [path.name for path in (cache / "calibrations").iterdir()] == [first.name]


@pytest.mark.parametrize("trouble", ["damaged", "layer", "shape", "other model", "other record size"])
def test_a_file_that_can_not_be_used_is_named_and_is_as_good_as_none(caplog: pytest.LogCaptureFixture, trouble: str) -> None:
    path = write_stored(make())
    arguments = {}
    if trouble == "damaged":
        path.write_bytes(path.read_bytes()[:-100])
    elif trouble == "layer":
        arguments = {"layers": (0, 1, 2)}
    elif trouble == "shape":
        arguments = {"shape": (HEADS, 2 * DIM)}
    elif trouble == "other model":
        make(fingerprint="fedcba9876543210").save(path)
    else:
        make(record_bytes=128).save(path)
    with caplog.at_level(logging.WARNING, logger="kvskim"):
        assert read(**arguments) is None
    assert [record.getMessage().startswith("no kept calibration is used: ") for record in caplog.records] == [True]


def test_a_folder_that_can_not_be_written_names_the_setting(cache: Path) -> None:
    cache.touch()
    with pytest.raises(CalibrationError, match="KVSKIM_CACHE_DIR"):
        write_stored(make())
    assert read() is None


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    path = write_stored(make())

    def full(self: Calibration, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Calibration, "save", full)
        with pytest.raises(CalibrationError, match="No space left"):
            write_stored(make(seed=1))
    assert torch.equal(load_calibration(path).layer(0).mean, make().layer(0).mean)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_selectors_without_calibration_share_the_mean_of_the_default_file() -> None:
    assert stored_record_bytes(get_selector("sketch", record_bytes=128), DIM) == 128
    assert stored_record_bytes(get_selector("rki4"), DIM) == 256
