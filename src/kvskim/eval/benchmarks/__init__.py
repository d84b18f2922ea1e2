"""Published long-context and mathematics benchmarks: their files, read from a directory or the hub, asked in our words, scored by their own metrics."""

from kvskim.eval.benchmarks.registry import BENCHMARKS, Benchmark, read_benchmark
from kvskim.eval.benchmarks.run import run_benchmark

__all__ = ["BENCHMARKS", "Benchmark", "read_benchmark", "run_benchmark"]
