"""Confidence intervals by the bootstrap (Efron 1979): percentiles of the mean of resampled groups.

Numbers that belong together (tokens of one text, samples of one task) are groups. `mean_interval` resamples groups and then inside each group, which
counts both kinds of chance; `strata_interval` keeps every group and resamples inside it, for groups that are fixed by design, as the tasks of a benchmark are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval at `LEVEL`."""

    mean: float
    low: float
    high: float

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        """``"81.2 [77.0, 85.1]"``."""
        return f"{self.mean * scale:.{digits}f} [{self.low * scale:.{digits}f}, {self.high * scale:.{digits}f}]"

    def as_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


def _arrays(groups: Sequence[Sequence[float]]) -> list[np.ndarray]:
    arrays = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if not arrays:
        raise ValueError("there are no numbers to take the mean of")
    return arrays


def _interval(mean: float, means: np.ndarray) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(mean), float(low), float(high))


def _resampled_means(array: np.ndarray, random: np.random.Generator, resamples: int) -> np.ndarray:
    means = np.empty(resamples)
    # In parts: resamples times the number of values would be large for long texts.
    for start in range(0, resamples, 100):
        count = min(100, resamples - start)
        means[start : start + count] = array[random.integers(0, len(array), (count, len(array)))].mean(1)
    return means


def mean_interval(groups: Sequence[Sequence[float]], resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Mean of the group means, both groups and the numbers in them resampled. A single group is resampled inside only."""
    arrays, random = _arrays(groups), np.random.default_rng(seed)
    inside = np.stack([_resampled_means(array, random, resamples) for array in arrays])
    picks = np.arange(len(arrays))[:, None]
    picked = random.integers(0, len(arrays), (len(arrays), resamples))
    # A group that is picked twice is resampled twice: otherwise its chance would be counted in full each time, and the interval be too wide.
    means = inside[picked, (np.arange(resamples) + picks) % resamples].mean(0)
    return _interval(np.mean([array.mean() for array in arrays]), means)


def strata_interval(groups: Sequence[Sequence[float]], resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Mean of the group means, the numbers resampled inside each group."""
    arrays, random = _arrays(groups), np.random.default_rng(seed)
    means = np.mean([_resampled_means(array, random, resamples) for array in arrays], axis=0)
    return _interval(np.mean([array.mean() for array in arrays]), means)
