"""Batches made ahead by worker processes, and which length of document comes when."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import documents
import numpy as np

from kvskim.demo.model import reading_model

STAGES: tuple[tuple[float, dict[int, float]], ...] = (
    (0.22, {1024: 0.3, 2048: 0.4, 4096: 0.3}),
    (0.42, {4096: 0.4, 8192: 0.6}),
    (0.85, {4096: 0.1, 8192: 0.15, 16384: 0.65, 32768: 0.1}),
    (1.00, {4096: 0.1, 16384: 0.6, 32768: 0.3}),
)
"""Up to which part of the time which share of the steps has documents of which length: short ones teach the task at many steps a second, long ones
to do it at any distance."""
SHORT_STEP, LONG_STEP = 32768, 65536
"""Tokens of a step with documents up to 8192 tokens, and with longer ones."""

_encoder: documents.Encoder | None = None


def _read_encoder(folder: str) -> documents.Encoder:
    from transformers import AutoTokenizer

    with reading_model(folder):
        return documents.Encoder(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def _start_worker(folder: str) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = _read_encoder(folder)


def _batch(seed: int, number: int, length: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    assert _encoder is not None
    return documents.make_batch(_encoder, seed, number, length, tokens)


def _held_out(task: str, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    assert _encoder is not None
    return documents.held_out(_encoder, task, length, count)


def length_at(fraction: float, random_: random.Random, longest: int) -> int:
    """Length of the documents of a step at a part of the time; where ``longest`` is below the table's 32768, all lengths shrink with it, to 1024 at least."""
    shares = next((shares for end, shares in STAGES if fraction < end), STAGES[-1][1])
    length = random_.choices(list(shares), list(shares.values()))[0]
    return min(longest, max(1024, length * longest // 32768))


@dataclass(frozen=True)
class Batch:
    """``ids`` int32 and ``roles`` uint8, ``[documents, length]``."""

    number: int
    length: int
    ids: np.ndarray
    roles: np.ndarray


class _Inline(Executor):
    """Does the work at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Feed:
    """Batches in their order, made ahead in ``workers`` processes; without any, in this one.

    Args:
        folder: of the tokenizer.
        fraction: gives the part of the time that is over; it decides on the lengths.
        scale: of the tokens of a step.

    Raises:
        KvskimError: the tokenizer can't be read, or is not one for this recipe; no worker is started then.
    """

    def __init__(self, folder: str, workers: int, seed: int, longest: int, fraction: Callable[[], float], scale: float = 1.0) -> None:
        self.pool: Executor
        # A tokenizer that the recipe can't use is refused here, in one sentence, and not by every worker.
        _read_encoder(folder)
        if workers:
            self.pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (folder,))
        else:
            _start_worker(folder)
            self.pool = _Inline()
        self.seed, self.longest, self.fraction, self.scale = seed, longest, fraction, scale
        self.ahead, self.number = workers + 4 if workers else 1, 0
        self.pending: deque[tuple[int, int, Future[Any]]] = deque()

    def held_out(self, task: str, length: int, count: int) -> Future[Any]:
        return self.pool.submit(_held_out, task, length, count)

    def fill(self) -> None:
        while len(self.pending) < self.ahead:
            length = length_at(self.fraction(), random.Random(f"{self.seed}/{self.number}"), self.longest)
            tokens = int((SHORT_STEP if length <= 8192 else LONG_STEP) * self.scale)
            self.pending.append((self.number, length, self.pool.submit(_batch, self.seed, self.number, length, tokens)))
            self.number += 1

    def next(self) -> Batch:
        self.fill()
        number, length, future = self.pending.popleft()
        ids, roles = future.result()
        return Batch(number, length, ids, roles)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
