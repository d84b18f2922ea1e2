"""Runs the processes of `kvskim bench e2e` one after the other, follows what they report, and keeps what they measured."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvskim.bench.e2e_plan import DENSE, Job, Model, engine_arguments
from kvskim.bench.geometries import write_geometry
from kvskim.config import cache_directory
from kvskim.errors import KvskimError

Progress = Callable[[str, str], None]
"""Called with the side and a few words."""
COMMAND: tuple[str, ...] = (sys.executable, "-m", "kvskim.bench.e2e_worker")
OUTPUT = "output.txt"
CLEAN_UP_SECONDS = 20.0
_CAUSE = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (.+)")
_ECHOES = ("EngineDeadError", "Engine core initialization failed", "Engine core proc")


@dataclass(frozen=True)
class Request:
    """All that a run of `kvskim bench e2e` needs.

    ``settings``: of kvskim, complete. ``random_calibration``: make one for the model, because it has no weights to calibrate on.
    """

    model: Model
    jobs: tuple[Job, ...]
    sides: tuple[str, ...]
    settings: Mapping[str, Any]
    real: bool = False
    repetitions: int = 3
    memory: float = 0.9
    blocks: int | None = None
    random_calibration: bool = True
    tensor_parallel: int = 1
    timeout: float = 1800.0
    log: Path | None = None

    @property
    def name(self) -> str:
        """Of the model in tables; times on several GPUs are compared with such times only."""
        return self.model.name if self.tensor_parallel == 1 else f"{self.model.name} on {self.tensor_parallel} GPUs"


@dataclass
class Run:
    """One side of one model with one configuration: what its engine is, and the figures of each job, or why there are none."""

    side: str
    model: str
    weights: str
    settings: dict[str, Any] | None
    machine: dict[str, Any]
    arguments: dict[str, Any]
    """Of `vllm.LLM`, without the model."""
    engine: dict[str, Any] | None = None
    error: str = ""
    jobs: list[dict[str, Any]] = field(default_factory=list)
    """Fields of the job, with ``value`` (figures or None) and ``error``."""

    def add(self, job: Job, value: dict[str, Any] | None, error: str) -> None:
        self.jobs.append({"job": asdict(job), "value": value, "error": error})

    @property
    def failures(self) -> list[str]:
        """A line for each job without figures."""
        return [f"{self.side}, {Job(**entry['job']).title}: {entry['error']}" for entry in self.jobs if entry["value"] is None]


class ProcessError(KvskimError):
    """A process of the bench ended without doing its work; the message is the cause as its output tells it."""


class TimeLimitError(ProcessError):
    """A process of the bench took longer than it may."""


def run(request: Request, progress: Progress, keep: Callable[[list[Run]], None] = lambda _: None) -> list[Run]:
    """Measure all sides, each in a process of its own, one after the other.

    Args:
        request: what to measure.
        progress: told what is being done.
        keep: called with all that there is so far, after each job.

    Raises:
        KvskimError: what both sides need could not be prepared. What fails later is in the runs.
    """
    with tempfile.TemporaryDirectory(prefix="kvskim-bench-") as name:
        folder, kept = Path(name), _kept_folder()
        model = request.model.folder or write_geometry(request.model.name, kept)
        record_bytes = request.settings.get("selector_options", {}).get("record_bytes", 256)
        wanted = request.random_calibration and set(request.sides) != {DENSE}
        calibration = kept / f"{request.model.name}-random-{record_bytes}.safetensors" if wanted else None
        machine: dict[str, Any] = {}
        prepared = dict(task="prepare", model=str(model), calibration=None if calibration is None else str(calibration), record_bytes=record_bytes)
        for event in follow(prepared, folder, request.timeout, request.log):
            if event["event"] == "machine":
                machine = {name: value for name, value in event.items() if name != "event"}
            elif event["event"] == "phase":
                progress("machine", event["text"])
        settings = dict(request.settings, **({} if calibration is None else {"calibration": str(calibration)}))
        runs: list[Run] = []
        for side in request.sides:
            arguments = engine_arguments(
                request.jobs, real=request.real, memory=request.memory, blocks=request.blocks, tensor_parallel=request.tensor_parallel
            )
            shown = None if side == DENSE else dict(request.settings)
            runs.append(Run(side, request.name, "real" if request.real else "dummy", shown, machine, arguments))
            _measure(request, runs[-1], settings, str(model), folder, progress, lambda: keep(runs))
        return runs


def _kept_folder() -> Path:
    """Where geometries and their random calibrations lie: always the same place, because vLLM keeps compiled code under the paths of its arguments, and
    an engine that starts for the second time should find it."""
    folder = cache_directory() / "bench"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvskimError(f"the folder {folder} can't be made ({error.strerror}): set KVSKIM_CACHE_DIR to a folder of yours") from error
    return folder


def _measure(
    request: Request, found: Run, settings: dict[str, Any], model: str, folder: Path, progress: Progress, keep: Callable[[], None]
) -> None:
    """Fill in the run of one side. After a job that brings its engine down, the jobs that are left get a new one."""
    side = found.side
    left = {job.key: job for job in request.jobs}
    while left:
        spec = dict(
            task="measure", side=side, settings=None if side == DENSE else settings, llm=dict(found.arguments, model=model), real=request.real,
            repetitions=request.repetitions, latent=request.model.latent, jobs=[asdict(job) for job in left.values()],
        )
        before, current = len(left), ""
        try:
            for event in follow(spec, folder, request.timeout, request.log):
                if event["event"] == "phase":
                    progress(side, event["text"])
                elif event["event"] == "job":
                    current = event["job"]
                elif event["event"] == "engine":
                    # The first start is the one that counts: a second one finds everything compiled.
                    found.engine = found.engine or {name: value for name, value in event.items() if name != "event"}
                elif event["event"] == "result":
                    found.add(left.pop(event["job"]), event["value"], _explained(event["error"], folder))
                    current = ""
                    keep()
            if len(left) == before:
                raise ProcessError("the engine's process ended without a result")
        except ProcessError as failure:
            found.error = found.error or str(failure)
            # An engine that does not start would not do so for the other jobs either; one that dies in a job is that job's fault.
            blamed = [current] if current and not isinstance(failure, TimeLimitError) else list(left)
            for key in blamed:
                found.add(left.pop(key), None, str(failure))
            keep()


def follow(spec: Mapping[str, Any], folder: Path, timeout: float, log: Path | None = None) -> Iterator[dict[str, Any]]:
    """Run one process as the spec says, and give its events as they come.

    Args:
        folder: for its files.
        timeout: seconds until it is ended.
        log: a file to which all that it prints is appended.

    Raises:
        ProcessError: it ended before it was done, or took too long.
    """
    spec_file, events, output = folder / "spec.json", folder / "events.jsonl", folder / OUTPUT
    spec_file.write_text(json.dumps(spec), encoding="utf-8")
    events.write_text("", encoding="utf-8")
    with output.open("wb") as sink:
        process = subprocess.Popen([*COMMAND, str(spec_file), str(events)], stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + timeout
    done = False
    try:
        with events.open(encoding="utf-8") as lines, output.open("rb") as printed:
            rest = ""
            while True:
                ended = process.poll() is not None
                # Copied as it comes: when the command is stopped from outside, the log says what it was at.
                _append(log, printed.read())
                rest += lines.read()
                *whole, rest = rest.split("\n")
                for line in whole:
                    event = json.loads(line)
                    if event["event"] == "done":
                        # All is measured: what goes wrong while it cleans up does not matter.
                        done, deadline = True, time.monotonic() + CLEAN_UP_SECONDS
                    else:
                        yield event
                if ended or (done and time.monotonic() > deadline):
                    break
                if time.monotonic() > deadline:
                    raise TimeLimitError(f"the engine took more than {timeout:g} seconds, the limit of --timeout")
                time.sleep(0.1)
        if not done:
            text = output.read_text(encoding="utf-8", errors="replace")
            raise ProcessError(root_cause(text) or f"the process ended with status {process.returncode}; {_last_line(text)}")
    finally:
        _end(process)


def _append(log: Path | None, text: bytes) -> None:
    if log is not None and text:
        with log.open("ab") as file:
            file.write(text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started: vLLM's engine is a process too, and holds the memory of the GPU."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _explained(error: str, folder: Path) -> str:
    """The error, or where it only points to another one in the output of the process that runs, that one."""
    if any(echo in error for echo in _ECHOES):
        return root_cause((folder / OUTPUT).read_text(encoding="utf-8", errors="replace")) or error
    return error


def root_cause(text: str) -> str:
    """The last exception that the output of a process names, one that only points to another left out; empty where there is none."""
    causes = [f"{match[1]}: {match[2].strip()}" for match in map(_CAUSE.search, text.splitlines()) if match]
    real = [cause for cause in causes if not any(echo in cause for echo in _ECHOES)]
    return real[-1] if real else causes[-1] if causes else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"its last line was: {lines[-1]}" if lines else "it printed nothing"
