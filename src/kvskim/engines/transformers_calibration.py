"""Where the transformers host takes calibrations from: the file that the settings name, or the one that is kept for the model."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from kvskim.calibration import Calibration, LayerCalibration, load_calibration, model_fingerprint
from kvskim.calibration_store import read_stored, stored_record_bytes
from kvskim.engines.transformers_layer import SkimAttention
from kvskim.engines.transformers_mla import latent_shape

logger = logging.getLogger("kvskim.transformers")


def shape_of_keys(text_config: Any) -> tuple[int, int]:
    """(kv heads, head dim) of a text model; with latent attention, of its latent rows."""
    latent = latent_shape(text_config)
    if latent is not None:
        return latent
    dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return text_config.num_key_value_heads, dim


def model_name(config: Any) -> str:
    """What messages call the model of a configuration; may be empty."""
    return str(getattr(config, "_name_or_path", "") or getattr(config, "model_type", ""))


def find_calibration(name: str, text_config: Any, states: list[SkimAttention]) -> Calibration | None:
    """The calibration of these layers of a model, or None: with ``auto`` and no kept one, it is fitted on the first long prompt.

    Args:
        name: of the model, for messages.
        text_config: configuration of the text model.
        states: layers that can be sparse, at least one.

    Raises:
        CalibrationError: the file that the settings name can't be read, or is another model's.
    """
    selector, config = states[0].selector, states[0].config
    shape, fingerprint = shape_of_keys(text_config), model_fingerprint(text_config.to_dict())
    if config.calibration != "auto":
        calibration = _load_once(Path(config.calibration).expanduser())
        calibration.check(name, fingerprint, *shape)
        return calibration
    try:
        record_bytes = stored_record_bytes(selector, shape[1])
    except ValueError:
        # The layers have other head dims than the configuration says, and each says itself whether the selector fits it.
        return None
    page_frame = bool(config.selector_options.get("page_frame", False))
    layers = [state.index for state in states]
    found = read_stored(name, fingerprint, shape, layers, record_bytes=record_bytes, page_frame=page_frame, load=_load_once)
    if found is None:
        return None
    calibration, path = found
    logger.info("calibration from %s, made with %s", path, calibration.model)
    return calibration


def layer_calibration(module: nn.Module, state: SkimAttention) -> LayerCalibration | None:
    """The same for one layer of a model that `enable` was not called for."""
    text_config: Any = getattr(module, "config", None)
    if text_config is None:
        return None
    calibration = find_calibration(model_name(text_config), text_config, [state])
    return None if calibration is None else calibration.layer(state.index)


def _load_once(path: Path) -> Calibration:
    """A calibration file, read again only when it has changed: layers that are met one by one all ask for it."""
    return _load_version(path, path.stat().st_mtime_ns) if path.is_file() else load_calibration(path)


@lru_cache(maxsize=1)
def _load_version(path: Path, changed: int) -> Calibration:
    return load_calibration(path)
