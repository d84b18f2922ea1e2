"""Records some decode steps of a running vLLM worker with torch's profiler: it waits for steps of decode rows alone, and marks where each begins."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvskim.bench.step_profile import intervals_of, step_profile

SETTLING_STEPS = 8
"""Decode steps of the whole batch before the profiler starts."""
DROPPED_STEPS = 4
"""Steps after the start of the profiler that are not counted: the GPU stood still, and the host is not ahead of it as it usually is."""
PROFILED_STEPS = 16


class TorchRecorder:
    """torch's profiler with the GPU's activities only: recording those of the host would slow it down."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def start(self) -> None:
        torch.cuda.synchronize()
        self._profile.start()

    def mark(self) -> None:
        """Launch the marker on the stream of the step."""
        torch.cuda._sleep(1)

    def stop(self) -> dict[str, Any]:
        """The trace, see `kvskim.bench.step_profile.intervals_of`."""
        torch.cuda.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="kvskim-profile-") as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            # Names of kernels come from compilers, and what they hold need not be text.
            trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        return trace


class StepProfiler:
    """Stands before ``execute_model`` of a worker until it has recorded its steps.

    Args:
        worker: of vLLM.
        requests: a step counts when it has so many, one token each.
        recorder: see `TorchRecorder`.
    """

    def __init__(self, worker: Any, requests: int, recorder: Any = None) -> None:
        self._worker, self._requests = worker, requests
        self._recorder = TorchRecorder() if recorder is None else recorder
        self._execute = worker.execute_model
        self._settled = self._marks = 0
        self._trace: dict[str, Any] | None = None
        # An attribute of the object goes before the method of its class.
        worker.execute_model = self._step

    def _step(self, scheduled: Any) -> Any:
        whole = len(scheduled.num_scheduled_tokens) == self._requests == scheduled.total_num_scheduled_tokens
        if self._marks == 0:
            self._settled = self._settled + 1 if whole else 0
            if self._settled > SETTLING_STEPS:
                self._recorder.start()
        if self._settled > SETTLING_STEPS:
            self._recorder.mark()
            self._marks += 1
            if self._marks > DROPPED_STEPS + PROFILED_STEPS:
                self.close()
                self._trace = self._recorder.stop()
            elif not whole:
                self.close()
                self._recorder.stop()
        return self._execute(scheduled)

    def close(self) -> None:
        """Give the worker its own method back."""
        if self._worker.__dict__.get("execute_model") == self._step:
            del self._worker.execute_model

    def result(self) -> dict[str, Any]:
        """See `kvskim.bench.step_profile.step_profile`.

        Raises:
            RuntimeError: the steps came to an end before all were recorded.
            ValueError: the profiler recorded nothing.
        """
        self.close()
        if self._trace is None:
            wanted = SETTLING_STEPS + DROPPED_STEPS + PROFILED_STEPS + 1
            raise RuntimeError(f"{wanted} decode steps in a row with {self._requests} requests were not seen, so there is no profile")
        return step_profile(intervals_of(self._trace), DROPPED_STEPS)
