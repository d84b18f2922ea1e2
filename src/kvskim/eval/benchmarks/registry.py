"""The benchmarks by name, with their tasks and where their files are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvskim.errors import KvskimError
from kvskim.eval.benchmarks import infinitebench, longbench, mathematics
from kvskim.eval.benchmarks.files import check_directory, data_file, hub_records, read_records
from kvskim.eval.sample import Sample, check_tasks

MakeSample = Callable[[str, Mapping[str, Any], str], Sample]


@dataclass(frozen=True)
class Benchmark:
    """``tasks``: the stems of the file of each. ``hub``: name on the hub; its configuration is the task where ``configured``."""

    make: MakeSample
    tasks: Mapping[str, tuple[str, ...]]
    hub: str
    configured: bool = False
    split: str = "test"


def _own_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    return {name: (name,) for name in names}


BENCHMARKS: dict[str, Benchmark] = {
    "longbench": Benchmark(
        longbench.sample, _own_names([*longbench.FORMS, *(f"{name}_e" for name in longbench.ENGLISH_EVEN)]), "THUDM/LongBench", configured=True
    ),
    "longbench-v2": Benchmark(longbench.sample_v2, {"longbench-v2": ("data", "longbench_v2", "LongBench-v2", "train")}, "THUDM/LongBench-v2", split="train"),
    "infinitebench": Benchmark(infinitebench.sample, _own_names(infinitebench.INFINITE_TASKS), "xinrongzhang2022/InfiniteBench"),
    "scbench": Benchmark(infinitebench.shared_sample, _own_names(infinitebench.SHARED_TASKS), "microsoft/SCBench", configured=True),
    "math-500": Benchmark(mathematics.sample, {"math-500": ("test", "math500", "math-500", "MATH-500", "math_500")}, "HuggingFaceH4/MATH-500"),
    "aime": Benchmark(
        mathematics.sample, {"aime": ("aime", "aime24", "aime25", "aime_2024", "aime_2025", "aime2024", "aime2025", "test", "train")},
        "HuggingFaceH4/aime_2024", split="train",
    ),
}


def read_benchmark(
    name: str, directory: Path | None, *, tasks: Sequence[str] = (), samples: int = 0, limit: int = 0, load: Callable[..., Any] | None = None
) -> list[Sample]:
    """Samples of a benchmark, task by task.

    Args:
        name: of `BENCHMARKS`.
        directory: with the files; None: from the hub.
        tasks: to read; none: all that the directory has, or all there are.
        samples: of each task, from the first one on; 0: all.
        limit: most tokens of an answer; 0: as the benchmark says.
        load: in the place of `datasets.load_dataset`.

    Raises:
        KvskimError: an unknown benchmark or task, a missing or damaged file, a hub that can't be reached.
    """
    if name not in BENCHMARKS:
        raise KvskimError(f"{name!r} is no benchmark; there are {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    chosen = check_tasks(tasks, list(benchmark.tasks))
    found: list[Sample] = []
    if directory is not None:
        check_directory(directory)
        files = {task: data_file(directory, benchmark.tasks[task]) for task in chosen}
        missing = [task for task, file in files.items() if file is None]
        if len(missing) == len(files) or (tasks and missing):
            names = ", ".join(f"{benchmark.tasks[task][0]}.jsonl" for task in missing[:4])
            raise KvskimError(f"--data {directory} has no file {names}{' and so on' if len(missing) > 4 else ''}, as {name} names its tasks")
        for task, file in files.items():
            if file is not None:
                found += _samples(benchmark, task, read_records(file), str(file), samples)
    else:
        for task in chosen:
            configuration = task if benchmark.configured else None
            split = task if name == "infinitebench" else benchmark.split
            found += _samples(benchmark, task, hub_records(benchmark.hub, configuration, split, load), benchmark.hub, samples)
    if limit:
        found = [replace(sample, questions=tuple(replace(q, limit=limit) for q in sample.questions)) for sample in found]
    return found


def _samples(benchmark: Benchmark, task: str, records: Iterable[Mapping[str, Any]], where: str, count: int) -> list[Sample]:
    return [benchmark.make(task, record, where) for record in islice(records, count or None)]
