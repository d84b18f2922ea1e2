"""Where an engine takes its calibration from, and where it keeps the one it has fitted itself."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvskim.calibration import Calibration, CalibrationError, LayerCalibration, load_calibration, model_fingerprint
from kvskim.calibration_shares import remove_share, write_share
from kvskim.calibration_store import calibration_path, read_stored, stored_record_bytes, write_stored
from kvskim.config import ConfigError, SkimConfig
from kvskim.engines.vllm import parallel
from kvskim.selectors.base import Selector

if TYPE_CHECKING:
    from kvskim.engines.vllm.state import SkimState

logger = logging.getLogger("vllm.kvskim")

THREAD_NAME = "kvskim-keep-calibration"


def model_settings(model_config: Any) -> dict[str, Any]:
    """The text model's configuration as `kvskim calibrate` sees it: as transformers reads it, without what vLLM changes in its own copy."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(model_config.model), local_files_only=True, trust_remote_code=bool(getattr(model_config, "trust_remote_code", False))
        ).get_text_config()
    except (OSError, ValueError):
        config = model_config.hf_text_config
    settings = dict(config.to_dict())
    if getattr(model_config, "use_mla", False):
        # Elsewhere the same model is calibrated with the keys of its heads; here with its latent rows.
        settings["model_type"] = f"{settings.get('model_type')}, latent rows"
    return settings


def find_calibration(config: SkimConfig, selector: Selector, vllm_config: Any, layers: Iterable[int]) -> tuple[Calibration | None, str]:
    """The calibration of this model and where it is from in words; None: the engine fits its own, or needs none.

    Args:
        config: its setting ``calibration`` names a file, or is ``auto``: the kept one, if there is one.
        selector: the record format.
        vllm_config: of the engine.
        layers: indices of the sparse layers.

    Raises:
        CalibrationError: the file named in the configuration can't be used for this model.
    """
    model = vllm_config.model_config
    fingerprint = model_fingerprint(model_settings(model))
    # With latent attention the model has many heads and its cache one.
    shape = 1 if getattr(model, "use_mla", False) else model.get_total_num_kv_heads(), model.get_head_size()
    if config.calibration != "auto":
        file = Path(config.calibration).expanduser()
        calibration = load_calibration(file)
        calibration.check(str(model.model), fingerprint, *shape)
        return calibration, str(file)
    found = read_stored(str(model.model), fingerprint, shape, layers, record_bytes=stored_record_bytes(selector, shape[1]))
    if parallel.all_ranks_agree(vllm_config, found is not None) and found is not None:
        return found[0], f"{found[1]} (made with {found[0].model})"
    worker = parallel.worker(vllm_config)
    if selector.needs_calibration and worker.count > 1:
        # Where the cache directory can't be used, `keep_calibration` says so.
        with contextlib.suppress(OSError, ConfigError):
            remove_share(calibration_path(fingerprint, stored_record_bytes(selector, shape[1])), worker)
    return None, "none: this selector works without"


def keep_calibration(state: SkimState, layers: Mapping[int, LayerCalibration], *, seen_later: bool) -> None:
    """Keep what this worker has fitted, for the next engine with this model; written by a thread of its own, and one line in the log.

    Several workers write shares, which the last one of them joins, so that one file serves engines of any number of workers.

    Args:
        state: of this worker.
        layers: by index in the model.
        seen_later: the fit went through later positions, up to the longest request of this engine.
    """
    reason = _reason_not_to_keep(state.vllm_config, seen_later)
    if reason is not None:
        state.log(f"calibration: not kept for other engines, because {reason}; `kvskim calibrate` makes one for all")
        return
    model = state.vllm_config.model_config

    worker = parallel.worker(state.vllm_config)
    total_heads, first_head, _ = parallel.heads_of_this_rank(state.vllm_config)

    def write() -> None:
        calibration = Calibration(str(model.model), model_fingerprint(model_settings(model)), dict(layers), first_head)
        try:
            path = write_stored(calibration) if worker.count == 1 else write_share(calibration, worker, total_heads)
        except (CalibrationError, ConfigError) as error:
            logger.warning("kvskim: calibration: not kept for other engines: %s", error)
            return
        if path is not None:
            # Said by the worker that has written the last share, whichever it is.
            logger.info("kvskim: calibration: kept in %s; delete the file to fit anew", path)

    threading.Thread(target=write, name=THREAD_NAME).start()


def _reason_not_to_keep(vllm_config: Any, seen_later: bool) -> str | None:
    model = vllm_config.model_config
    reach = getattr(model.hf_text_config, "max_position_embeddings", None)
    if seen_later and reach is not None and model.max_model_len < reach:
        # An engine for longer requests would take it for its own.
        return f"--max-model-len {model.max_model_len} is less than the {reach} tokens that the model allows"
    return None
