"""What the host does once in every step, whatever the attention: calibration, counters, samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvskim.engines.vllm import parallel
from kvskim.engines.vllm.calibrate import Segment
from kvskim.engines.vllm.state import SkimState


def begin_step(state: SkimState, layer_names: Sequence[str], common: Any, decode_rows: int, fast_build: bool) -> tuple[Segment, ...]:
    """Called by every metadata builder with sparse layers; the builder of the first sparse layer does the work for all.

    Args:
        state: of this worker.
        layer_names: layers of the builder.
        common: vLLM's common metadata of the step.
        decode_rows: rows of the step that are decoded sparsely, the first ones.
        fast_build: vLLM builds for a draft: nothing is counted.

    Returns:
        the tokens of this step that calibration reads.
    """
    if fast_build or state.capturing:
        return ()
    state.last_lengths = common.seq_lens[:decode_rows] if decode_rows else None
    first = next(iter(state.layers)) in layer_names
    if state.calibrator is not None and first:
        state.calibrator.advance(state)
        if state.calibrator is not None:
            state.calibrator.plan(common)
    if first:
        if parallel.is_first_worker(state.vllm_config):
            # All workers have the same steps; pages and mass are of each one's own heads and layers.
            state.metrics.step(decode_rows, common.num_reqs - decode_rows, calibrated=state.calibrator is None)
        if state.sampler is not None:
            state.sampler.before_step(state.last_lengths)
    return () if state.calibrator is None else state.calibrator.planned(common)


@contextlib.contextmanager
def no_request(state: SkimState | None) -> Iterator[None]:
    """While vLLM builds a step only to capture it: `begin_step` does nothing, or the counters would start with steps that never were."""
    if state is None:
        yield
        return
    state.capturing = True
    try:
        yield
    finally:
        state.capturing = False
