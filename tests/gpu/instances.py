"""Which instances of the CUDA kernels the tests launch: a fault of one that none launches is not found.

    PYTHONPATH=src:tests pytest -n 22 tests/gpu -p gpu.instances --instances FOLDER     # each process leaves the names that it has seen
    PYTHONPATH=src python tests/gpu/instances.py FOLDER                                 # those that nobody has launched; exit status 1 if there are any
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from kvskim.ops.cuda.build import RESOURCES

seen: set[str] = set()


def instance_name(kernel: str) -> str:
    """A kernel's name as a profiler gives it, without result type, parameters and unnamed namespaces: as in the table of resources."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    depth = 0
    for at, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            return name[:at]
    return name


def never_launched(folder: Path, instances: Iterable[str]) -> list[str]:
    """The instances that are in no file of the folder.

    Raises:
        ValueError: there is no file, so nothing was recorded.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{folder} holds no names of kernels; run the tests with -p gpu.instances --instances {folder} first")
    launched = {instance_name(name) for file in files for name in json.loads(file.read_text(encoding="utf-8"))}
    return [name for name in instances if name not in launched]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--instances", metavar="FOLDER", help="where to leave the names of the kernels that were launched")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if item.config.getoption("--instances") is None:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
        torch.cuda.synchronize()
    seen.update(event.key for event in profile.key_averages() if "kvskim::" in event.key)


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = session.config.getoption("--instances")
    if folder is not None and seen:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json").write_text(json.dumps(sorted(seen)), encoding="utf-8")


def main(folder: Path) -> int:
    instances = list(json.loads(RESOURCES.read_text(encoding="utf-8"))["kernels"])
    missing = never_launched(folder, instances)
    print("\n".join([*missing, f"{len(missing)} of {len(instances)} instances were launched by no test"]))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
