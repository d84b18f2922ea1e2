"""Compile the CUDA sources of this folder into one shared library, once per machine.

Every ``*.cu`` file here is torch-free CUDA C++ with ``extern "C"`` launch functions. nvcc alone compiles each to an object, in parallel,
and links them with a static CUDA runtime, so the library depends on neither torch nor an installed toolkit. It is looked for in this
order: the prebuilt one of the package (when it was made of these very sources), the user's cache, a fresh build into that cache.

``python -m kvskim.ops.cuda.build`` builds; ``--update-resources`` also rewrites the committed table of registers and spills;
``--prebuilt`` writes the library that a wheel carries.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kvskim.config import cache_directory, nvcc_path

FOLDER = Path(__file__).resolve().parent
PREBUILT = FOLDER / "prebuilt"
RESOURCES = FOLDER / "resources.json"
ARCHITECTURES = {"sm_90a": "arch=compute_90a,code=sm_90a"}
"""Architectures the kernels are written for, with nvcc's name of each."""

FLAGS = ("-O3", "-std=c++17", "-Xptxas", "-v", "-Xcompiler", "-fPIC", "-cudart", "static")

Progress = Callable[[str], None]


class BuildError(RuntimeError):
    """The library can't be had: no compiler, a source that does not compile, or nowhere to write."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel: registers per thread, bytes spilled, bytes of static shared memory."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared: int


def sources() -> list[Path]:
    """The ``.cu`` files that make up the library."""
    return sorted(FOLDER.glob("*.cu"))


def find_nvcc() -> Path | None:
    """The configured nvcc, or the one in the toolkit's usual place; None when there is none."""
    usual = Path("/usr/local/cuda/bin/nvcc")
    return nvcc_path() or (usual if os.access(usual, os.X_OK) else None)


@functools.lru_cache
def nvcc_version(nvcc: Path) -> str:
    """Last line of ``nvcc --version``: it names the exact build of the compiler."""
    done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def _check_architecture(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}; the CUDA kernels are written for {', '.join(ARCHITECTURES)}")


def source_hash(arch: str = "sm_90a") -> str:
    """Hash of all sources, headers and flags: what a library must have been made of to be usable."""
    _check_architecture(arch)
    digest = hashlib.sha256(repr((ARCHITECTURES[arch], FLAGS)).encode())
    for path in sorted([*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")]):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _sidecar(library: Path) -> Path:
    return library.with_suffix(".json")


def is_intact(library: Path, sources_hash: str) -> bool:
    """Whether a library was written completely, by its sidecar of size and hash, and made of the given sources."""
    try:
        note = json.loads(_sidecar(library).read_text())
        content = library.read_bytes()
    except (OSError, ValueError):
        return False
    if not isinstance(note, dict):
        return False
    return note.get("sources") == sources_hash and note.get("size") == len(content) and note.get("sha256") == hashlib.sha256(content).hexdigest()


def find_library(arch: str = "sm_90a", output_directory: Path | None = None) -> Path | None:
    """A usable library that exists already: prebuilt, else from the cache; None when one must be built."""
    wanted = source_hash(arch)
    if output_directory is None:
        prebuilt = PREBUILT / _prebuilt_name(arch)
        if is_intact(prebuilt, wanted):
            return prebuilt
    # The compiler's version is part of the name, so that a new toolkit builds anew; without a compiler any build of these sources serves.
    nvcc = find_nvcc()
    directory = _directory(output_directory)
    pattern = _library_name(arch, nvcc) if nvcc is not None else f"libkvskim_{wanted}-*_{arch.replace('_', '')}.so"
    return next((path for path in sorted(directory.glob(pattern)) if is_intact(path, wanted)), None)


def _directory(output_directory: Path | None) -> Path:
    return Path(output_directory) if output_directory is not None else cache_directory() / "cuda"


def _library_name(arch: str, nvcc: Path) -> str:
    compiler = hashlib.sha256(nvcc_version(nvcc).encode()).hexdigest()[:8]
    return f"libkvskim_{source_hash(arch)}-{compiler}_{arch.replace('_', '')}.so"


def _prebuilt_name(arch: str) -> str:
    return f"libkvskim_{arch.replace('_', '')}.so"


def _writable(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise BuildError(
            f"the CUDA kernels can't be stored in {directory} ({error.strerror or error}); set KVSKIM_CACHE_DIR to a folder that can be written"
        ) from error
    return directory


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """One builder at a time. The operating system drops the lock of a process that dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is compiling the CUDA kernels")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks: both processes build, and the atomic replace lets the last one win.
            pass
        yield


def _run(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{what} failed:\n" + "\n".join((done.stderr or done.stdout).strip().splitlines()[-40:]))
    return done.stderr


def compile_objects(directory: Path, nvcc: Path, arch: str = "sm_90a") -> tuple[list[Path], str]:
    """Compile every source into ``directory``; returns the objects and what ptxas said of the kernels."""
    files = sources()
    if not files:
        raise BuildError(f"no CUDA sources in {FOLDER}")

    def compile_one(source: Path) -> tuple[Path, str]:
        target = directory / f"{source.stem}.o"
        command = [str(nvcc), *FLAGS, f"-gencode={ARCHITECTURES[arch]}", "-c", str(source), "-o", str(target)]
        return target, _run(command, f"compiling {source.name}")

    with ThreadPoolExecutor(max_workers=min(len(files), os.cpu_count() or 1)) as pool:
        results = list(pool.map(compile_one, files))
    return [target for target, _ in results], "\n".join(log for _, log in results)


def build_library(
    arch: str = "sm_90a", output_directory: Path | None = None, progress: Progress | None = None, *, fresh: bool = False
) -> Path:
    """Path of the library; compiles it when no intact one of these sources exists.

    Args:
        arch: ``sm_90a`` (Hopper).
        output_directory: where to look and to write; the versioned user cache when None.
        progress: called with one line of text when something takes long.
        fresh: compile even if there is one; for a library that can't be loaded.

    Raises:
        BuildError: no nvcc, a source does not compile, or the folder can't be written.
    """
    say: Progress = progress or (lambda line: None)
    existing = None if fresh else find_library(arch, output_directory)
    if existing is not None:
        return existing
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("no prebuilt library matches these sources and nvcc was not found; install the CUDA toolkit")
    directory = _writable(_directory(output_directory))
    target = directory / _library_name(arch, nvcc)
    with _lock(target.with_suffix(".lock"), say):
        if fresh or not is_intact(target, source_hash(arch)):
            started = time.monotonic()
            say(f"compiling {len(sources())} CUDA sources for {arch} into {directory} (once per machine)")
            compile_library(target, nvcc, arch)
            say(f"compiled the CUDA kernels in {time.monotonic() - started:.0f} s")
    return target


def compile_library(target: Path, nvcc: Path, arch: str) -> str:
    """Compile, link and publish; the library and then its sidecar appear by atomic renames. Returns ptxas' report."""
    wanted = source_hash(arch)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as name:
        scratch = Path(name)
        objects, log = compile_objects(scratch, nvcc, arch)
        library, note = scratch / target.name, scratch / _sidecar(target).name
        command = [str(nvcc), "-shared", "-cudart", "static", f"-gencode={ARCHITECTURES[arch]}", *map(str, objects), "-o", str(library)]
        _run(command, "linking the CUDA kernels")
        content = library.read_bytes()
        note.write_text(json.dumps({
            "sources": wanted, "size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "compiler": nvcc_version(nvcc),
        }, indent=1) + "\n")
        os.replace(library, target)
        os.replace(note, _sidecar(target))
    return log


def demangle(names: Sequence[str]) -> list[str]:
    """C++ names without their parameter lists, e.g. ``score_sketch_kernel<4>``; needs c++filt of the host compiler."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [without_parameters(line) for line in done.stdout.splitlines()]


def without_parameters(name: str) -> str:
    depth = 0
    for end in range(len(name) - 1, -1, -1):
        depth += (name[end] == ")") - (name[end] == "(")
        if name[end] == "(" and depth == 0 and name.endswith(")"):
            name = name[:end]
            break
    return name.removeprefix("void ").replace("(anonymous namespace)::", "")


def parse_resources(log: str) -> dict[str, Resources]:
    """Kernel name -> what ``ptxas -v`` reported of it."""
    found: dict[str, Resources] = {}
    mangled: list[str] = []
    values: list[Resources] = []
    spills = (0, 0)
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            mangled.append(match[1])
            spills = (0, 0)
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = (int(match[1]), int(match[2]))
        elif (match := re.search(r"Used (\d+) registers", line)) and len(values) < len(mangled):
            shared = re.search(r"(\d+) bytes smem", line)
            values.append(Resources(int(match[1]), *spills, int(shared[1]) if shared else 0))
    for name, value in zip(demangle(mangled), values):
        if name in found:
            raise BuildError(f"two kernels are named {name}")
        found[name] = value
    return dict(sorted(found.items()))


def measure_resources(arch: str = "sm_90a") -> dict[str, Resources]:
    """Compile all sources in a temporary folder and report every kernel."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc was not found")
    with tempfile.TemporaryDirectory() as name:
        return parse_resources(compile_objects(Path(name), nvcc, arch)[1])


def committed_resources() -> dict[str, Resources]:
    """The committed table that registers and spills may not exceed."""
    return {name: Resources(**entry) for name, entry in json.loads(RESOURCES.read_text())["kernels"].items()}


def resource_growth(measured: dict[str, Resources], committed: dict[str, Resources]) -> list[str]:
    """One line for every kernel that needs more than the table says, is not in it, or is no longer there."""
    lines = []
    for name, now in measured.items():
        before = committed.get(name)
        if before is None:
            lines.append(f"{name}: not in the table")
            continue
        for field in ("registers", "spill_stores", "spill_loads", "shared"):
            if getattr(now, field) > getattr(before, field):
                lines.append(f"{name}: {field} {getattr(before, field)} -> {getattr(now, field)}")
    return lines + [f"{name}: in the table, but there is no such kernel" for name in committed if name not in measured]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvskim.ops.cuda.build", description="Compile the CUDA kernels.")
    parser.add_argument("--arch", default="sm_90a", choices=sorted(ARCHITECTURES))
    parser.add_argument("--output", type=Path, help="folder for the library (default: the user cache)")
    parser.add_argument("--prebuilt", action="store_true", help="write the library that a wheel carries")
    parser.add_argument("--update-resources", action="store_true", help="rewrite the committed table of registers and spills")
    options = parser.parse_args(arguments)
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit("nvcc was not found; install the CUDA toolkit")
    if options.update_resources:
        table = {"compiler": nvcc_version(nvcc), "kernels": {name: asdict(value) for name, value in measure_resources(options.arch).items()}}
        RESOURCES.write_text(json.dumps(table, indent=1) + "\n")
        print(f"wrote {RESOURCES}")
        return
    if options.prebuilt:
        PREBUILT.mkdir(exist_ok=True)
        final = PREBUILT / _prebuilt_name(options.arch)
        compile_library(final, nvcc, options.arch)
        print(final)
        return
    print(build_library(options.arch, options.output, print))


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        raise SystemExit(str(error)) from error
