"""An evaluation spread over processes, each with a copy of the model: a small model leaves a GPU idle between its launches.

Every process answers whole samples, so that all methods and settings answer the same ones. What does not depend on the sample, the calibration on
built-in text, is fitted once and handed over.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvskim.errors import KvskimError

J = TypeVar("J")
R = TypeVar("R")
_state: dict[str, Any] = {}
"""Of a worker process: how it sets itself up, and the function that does its jobs once it has."""


@dataclass(frozen=True)
class Setup(Generic[J, R]):
    """``make(device, *arguments)`` loads what a process needs and returns the function from a job to its result. Both are sent to the process."""

    make: Callable[..., Callable[[J], R]]
    arguments: tuple[Any, ...]


def worker_devices(device: str, workers: int) -> list[str]:
    """One device for each worker: ``cuda`` means all GPUs in turn, ``cuda:1`` that one."""
    if device == "cuda":
        import torch

        return [f"cuda:{worker % torch.cuda.device_count()}" for worker in range(workers)]
    return [device] * workers


def _start(setup: bytes, devices: Any) -> None:
    # Nothing that can fail happens here: an error of an initializer would be reported as a broken pool.
    _state.update(setup=setup, device=devices.get())


def _work(job: bytes) -> bytes:
    if "run" not in _state:
        import torch

        # As many processes as cores are the rule: more threads would only wait for each other.
        torch.set_num_threads(1)
        setup: Setup[Any, Any] = pickle.loads(_state.pop("setup"))
        _state["run"] = setup.make(_state["device"], *setup.arguments)
    # As bytes, because torch would send each tensor through a file descriptor of its own.
    return pickle.dumps(_state["run"](pickle.loads(job)))


def run_jobs(
    setup: Setup[J, R], jobs: Iterable[J], keep_going: Callable[[], bool] = lambda: True, *, device: str, workers: int
) -> Iterator[tuple[J, R]]:
    """Jobs and their results, as they are done.

    Args:
        setup: of the processes.
        jobs: begun in this order.
        keep_going: asked before a job is begun; jobs that were begun are finished.
        device: see `worker_devices`.
        workers: number of processes.

    Raises:
        KvskimError: what a worker raised, or a worker was killed.
    """
    context = multiprocessing.get_context("spawn")
    devices = context.Queue()
    for name in worker_devices(device, workers):
        devices.put(name)
    waiting, pending = iter(jobs), dict[Future[bytes], J]()
    with ProcessPoolExecutor(workers, context, _start, (pickle.dumps(setup), devices)) as pool:
        try:
            while True:
                while len(pending) < workers and keep_going():
                    job = next(waiting, None)
                    if job is None:
                        break
                    pending[pool.submit(_work, pickle.dumps(job))] = job
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield pending.pop(future), pickle.loads(future.result())
        except BrokenProcessPool as error:
            raise KvskimError(f"a worker process ended before its time ({error}): use fewer --workers, the memory may not be enough for {workers}") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
