"""The shares of a calibration that the workers of one engine have fitted, and the whole that they make.

With tensor or pipeline parallelism a worker has fitted some layers, and of them some kv heads. It writes them beside the place of the whole; the worker that
finds all shares there joins them and takes them away. What an earlier engine has left is taken away before one starts to fit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvskim.calibration import SKETCH_TENSORS, Calibration, CalibrationError, LayerCalibration, load_calibration
from kvskim.calibration_store import publish_calibration, stored_path, write_stored


@dataclass(frozen=True)
class Worker:
    """Which worker of an engine this is: its rank among the ``tensor_size`` that split every layer, and among the ``pipeline_size`` parts of the model.

    ``engine``: number of the engine among those of data parallelism, which may share a cache directory.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    engine: int = 0

    @property
    def count(self) -> int:
        """Workers of the engine."""
        return self.tensor_size * self.pipeline_size

    def all(self) -> list[Worker]:
        """The workers of the engine."""
        return [
            replace(self, tensor_rank=tensor, pipeline_rank=pipeline) for pipeline in range(self.pipeline_size) for tensor in range(self.tensor_size)
        ]

    def path(self, whole: Path) -> Path:
        """Where the share of this worker lies."""
        tensor, pipeline = f"tensor-{self.tensor_rank}-of-{self.tensor_size}", f"pipeline-{self.pipeline_rank}-of-{self.pipeline_size}"
        return whole.with_name(f"{whole.stem}-share-{tensor}-{pipeline}-engine-{self.engine}.safetensors")


def remove_share(whole: Path, worker: Worker) -> None:
    """Take away what a worker of an earlier engine has left, whose other workers never came that far: it may be of other weights."""
    worker.path(whole).unlink(missing_ok=True)


def write_share(share: Calibration, worker: Worker, total_heads: int) -> Path | None:
    """Keep what one worker has fitted, and join the shares when this is the last one.

    Args:
        share: some layers and kv heads of the model, from its ``first_head`` on.
        worker: which one this is.
        total_heads: kv heads of the model.

    Returns:
        the file of the whole, where this worker has made it; None: other shares are still to come.

    Raises:
        CalibrationError: the share is empty, the cache directory can't be written, or the shares don't make a whole.
    """
    whole = stored_path(share)
    publish_calibration(share, worker.path(whole))
    with _lock(whole.parent):
        paths = [other.path(whole) for other in worker.all()]
        if not all(path.is_file() for path in paths):
            return None
        path = write_stored(join_shares([load_calibration(path) for path in paths], total_heads))
        for taken in paths:
            taken.unlink(missing_ok=True)
        return path


def join_shares(shares: Sequence[Calibration], total_heads: int) -> Calibration:
    """The calibration of the whole model. Where several workers have the same kv head, the first one's basis counts.

    Args:
        shares: of one model, each with some layers and kv heads.
        total_heads: kv heads of the model.

    Raises:
        CalibrationError: a kv head of a layer is missing, or shares overlap in part.
    """
    first = shares[0]
    whole = Calibration(first.model, first.fingerprint)
    for index in sorted({index for share in shares for index in share.layers}):
        parts: dict[int, LayerCalibration] = {}
        for share in shares:
            if index in share.layers:
                parts.setdefault(share.first_head, share.layers[index])
        starts = sorted(parts)
        ends = [start + parts[start].mean.shape[0] for start in starts]
        if [0, *ends] != [*starts, total_heads]:
            held = ", ".join(f"{start}-{end - 1}" for start, end in zip(starts, ends))
            raise CalibrationError(f"the shares of layer {index} hold kv heads {held} of {total_heads}, which is no whole: delete the shares to start anew")
        whole.layers[index] = _join_heads([parts[start] for start in starts])
    return whole


def _join_heads(parts: Sequence[LayerCalibration]) -> LayerCalibration:
    mean = torch.cat([part.mean for part in parts])
    tables: dict[str, Any] = {name: torch.cat([getattr(part.sketch, name) for part in parts]) for name in SKETCH_TENSORS}
    return replace(parts[0], mean=mean, sketch=replace(parts[0].sketch, mean=mean, **tables))


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One worker at a time looks for the others' shares. The operating system drops the lock of a process that dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # A file system without locks: two workers may both join, and write the same file one after the other.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
