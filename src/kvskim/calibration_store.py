"""Calibrations that are kept between runs: one file for each model and kind of record, in the cache directory.

``calibration: auto`` looks here before it fits anything. Files are written by `kvskim calibrate --cache`, and by the vLLM engine after it has fitted on its
first prompts. A file is found by `kvskim.calibration.model_fingerprint`, which knows a model's shapes and rotary embedding and not its weights: two models
with equal configuration, such as a model and its fine-tune, share a file. That costs accuracy of the estimates, never exactness of what is attended;
`kvskim calibrate --cache` on the model itself replaces the file. Weights are left out because hosts hold them in different forms (fused, sharded, quantised,
with permuted rows), so no digest of them is the same everywhere.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError

from kvskim.calibration import Calibration, CalibrationError, load_calibration
from kvskim.config import ConfigError, cache_directory
from kvskim.selectors.base import Selector

logger = logging.getLogger("kvskim")

MEAN_RECORD_BYTES = 256
"""Selectors that need no calibration, and only take the mean key of one, take it from files for sketch records of this size."""


def stored_record_bytes(selector: Selector, head_dim: int) -> int:
    """The record size in the name of the file that a selector uses."""
    return selector.record_bytes(head_dim) if selector.needs_calibration else MEAN_RECORD_BYTES


def calibration_path(fingerprint: str, record_bytes: int, *, page_frame: bool = False) -> Path:
    """Where the calibration of a model lies, whether or not it is there: ``<cache>/calibrations/<fingerprint>-<bytes>[-page-frame].safetensors``."""
    suffix = "-page-frame" if page_frame else ""
    return cache_directory() / "calibrations" / f"{fingerprint}-{record_bytes}{suffix}.safetensors"


def read_stored(
    model: str, fingerprint: str, shape: tuple[int, int], layers: Iterable[int], *, record_bytes: int, page_frame: bool = False,
    load: Callable[[Path], Calibration] = load_calibration,
) -> tuple[Calibration, Path] | None:
    """The kept calibration of a model and its file. A file that can't be used is named in a warning, and is as good as none.

    Args:
        model: name of the model, for messages.
        fingerprint: of the model, see `kvskim.calibration.model_fingerprint`.
        shape: (kv heads, head dim) of the whole model.
        layers: indices of the layers that need a calibration.
        record_bytes: see `stored_record_bytes`.
        page_frame: whether records are in the frame of their page.
        load: reads a file.

    Returns:
        None: there is no file, or none that fits.
    """
    try:
        path = calibration_path(fingerprint, record_bytes, page_frame=page_frame)
        if not path.is_file():
            return None
        calibration = load(path)
        calibration.check(model, fingerprint, *shape)
        for index in layers:
            calibration.layer(index).sketch_tables(record_bytes, page_frame)
    except (CalibrationError, ConfigError, OSError) as error:
        logger.warning("no kept calibration is used: %s", error)
        return None
    return calibration, path


def stored_path(calibration: Calibration) -> Path:
    """Where this calibration is kept.

    Raises:
        CalibrationError: it is empty.
    """
    if not calibration.layers:
        raise CalibrationError("the calibration holds no layer; there is nothing to keep")
    first = next(iter(calibration.layers.values()))
    return calibration_path(calibration.fingerprint, first.sketch.record_bytes, page_frame=first.page_frame)


def write_stored(calibration: Calibration) -> Path:
    """Keep a calibration, in the place of an earlier one. Readers never see half a file.

    Raises:
        CalibrationError: the calibration is empty, or the cache directory can't be written; the message names the setting.
    """
    path = stored_path(calibration)
    publish_calibration(calibration, path)
    return path


def publish_calibration(calibration: Calibration, path: Path) -> None:
    """Write a file in the cache directory so that readers never see half of it.

    Raises:
        CalibrationError: the cache directory can't be written; the message names the setting.
    """
    temporary = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        calibration.save(temporary)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CalibrationError(f"the calibration can't be kept in {path.parent} ({reason}): set KVSKIM_CACHE_DIR to a writable folder") from error
    finally:
        if temporary.is_file():
            temporary.unlink()
