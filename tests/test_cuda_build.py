"""Building the CUDA library: found, built once, never half-written, and no kernel grows in registers or spills."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvskim.ops.cuda import build

FAKE_NVCC = """#!/bin/sh
case "$*" in
  --version) echo "release 0"; echo "Build fake_1"; exit 0 ;;
esac
echo "$*" >> "{log}"
sleep {delay}
out=""; previous=""
for argument in "$@"; do
  if [ "$previous" = "-o" ]; then out="$argument"; fi
  previous="$argument"
done
case "$*" in *broken.cu*) echo "broken.cu(1): error: what is this" >&2; exit 1 ;; esac
echo "object of $*" > "$out"
"""


@pytest.fixture
def fake_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two sources, an nvcc that only writes files, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cu").write_text("// one")
    (folder / "two.cu").write_text("// two")
    (folder / "shared.cuh").write_text("// shared")
    use_fake_nvcc(tmp_path, monkeypatch)
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setattr(build, "PREBUILT", folder / "prebuilt")
    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def use_fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: float = 0) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(FAKE_NVCC.format(log=tmp_path / "calls", delay=delay))
    nvcc.chmod(0o755)
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc)


def calls(tmp_path: Path) -> list[str]:
    log = tmp_path / "calls"
    return log.read_text().splitlines() if log.exists() else []


def test_every_source_is_compiled_once_and_found_again(fake_tree: Path) -> None:
    lines: list[str] = []
    library = build.build_library(progress=lines.append)
    assert library.parent == fake_tree / "cache" / "cuda"
    assert library.name.startswith("libkvskim_")
    assert library.name.endswith("_sm90a.so")
    commands = calls(fake_tree)
    assert len(commands) == 3
    assert sum("one.cu" in c for c in commands) == 1
    assert sum("two.cu" in c for c in commands) == 1
    assert "one.o" in commands[-1]
    assert "two.o" in commands[-1]
    assert len(lines) == 2
    assert build.build_library(progress=lines.append) == library
    assert calls(fake_tree) == commands
    assert len(lines) == 2
    assert not list(library.parent.glob("build-*"))


def test_changed_source_or_header_means_another_library(fake_tree: Path) -> None:
    first = build.build_library()
    (fake_tree / "sources" / "shared.cuh").write_text("// changed")
    second = build.build_library()
    assert second != first
    assert len(calls(fake_tree)) == 6


@pytest.mark.parametrize("damage", ["truncated", "altered", "no sidecar", "broken sidecar"])
def test_damaged_library_is_rebuilt(fake_tree: Path, damage: str) -> None:
    library = build.build_library()
    sidecar = library.with_suffix(".json")
    content = library.read_bytes()
    if damage == "truncated":
        library.write_bytes(content[:-3])
    elif damage == "altered":
        library.write_bytes(b"x" + content[1:])
    elif damage == "no sidecar":
        sidecar.unlink()
    else:
        sidecar.write_text('{"size":')
    assert build.find_library() is None
    assert build.build_library() == library
    assert len(calls(fake_tree)) == 6
    assert build.find_library() == library


def test_two_processes_build_once(fake_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_nvcc(fake_tree, monkeypatch, delay=1)
    script = (
        "from pathlib import Path; from kvskim.ops.cuda import build\n"
        f"build.FOLDER = Path({str(fake_tree / 'sources')!r}); build.PREBUILT = build.FOLDER / 'prebuilt'\n"
        f"build.find_nvcc = lambda: Path({str(fake_tree / 'nvcc')!r})\n"
        "import sys; sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.readline()\n"
        "print(build.build_library(progress=print))\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert outputs[0][-1] == outputs[1][-1]
    assert len(calls(fake_tree)) == 3
    assert sorted(len(lines) for lines in outputs) == [2, 3]  # "waiting", path; "compiling", "compiled", path


def test_a_builder_that_was_killed_leaves_nothing_that_is_used(fake_tree: Path) -> None:
    wanted = build.build_library()
    content = wanted.read_bytes()
    # What is there when a process dies between the two renames: a new library beside an old note.
    wanted.write_bytes(content + b"of another build")
    assert build.find_library() is None
    assert build.build_library().read_bytes() != content + b"of another build"


def test_folder_that_cannot_be_written_names_the_setting(fake_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_tree / "file").write_text("")
    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(fake_tree / "file" / "below"))
    with pytest.raises(build.BuildError, match="KVSKIM_CACHE_DIR") as caught:
        build.build_library()
    assert len(str(caught.value).splitlines()) == 1


def test_without_compiler(fake_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.build_library()
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.build_library() == library, "a library of these sources serves although its compiler is gone"
    (fake_tree / "sources" / "one.cu").write_text("// changed")
    with pytest.raises(build.BuildError, match="nvcc was not found"):
        build.build_library()


def test_source_that_does_not_compile_shows_the_compiler_message(fake_tree: Path) -> None:
    (fake_tree / "sources" / "broken.cu").write_text("?")
    with pytest.raises(build.BuildError, match=r"compiling broken\.cu failed(.|\n)*what is this"):
        build.build_library()
    assert build.find_library() is None


def test_prebuilt_library_serves_only_its_own_sources(fake_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.main(["--prebuilt"])
    prebuilt = fake_tree / "sources" / "prebuilt" / "libkvskim_sm90a.so"
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.build_library() == prebuilt
    (fake_tree / "sources" / "two.cu").write_text("// changed")
    with pytest.raises(build.BuildError):
        build.build_library()


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="sm_90a"):
        build.source_hash("sm_80")


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN6kvskim4fastILi4ELb1EEEvPKf' for 'sm_90a'
ptxas info    : Function properties for _ZN6kvskim4fastILi4ELb1EEEvPKf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 8192 bytes smem
ptxas info    : Compile time = 1.0 ms
ptxas info    : Compiling entry function '_ZN6kvskim4slowEv' for 'sm_90a'
ptxas info    : Function properties for _ZN6kvskim4slowEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
"""


def test_report_of_ptxas_is_read() -> None:
    assert build.parse_resources(LOG) == {
        "kvskim::fast<4, true>": build.Resources(168, 4, 12, 8192),
        "kvskim::slow": build.Resources(32, 0, 0, 0),
    }


def test_names_lose_their_parameters_only() -> None:
    assert build.without_parameters("void kvskim::(anonymous namespace)::run<(kvskim::Type)0, 4>(int (&)[4], float)") == "kvskim::run<(kvskim::Type)0, 4>"


def test_growth_is_told() -> None:
    table = {"a": build.Resources(32, 0, 0, 0), "gone": build.Resources(32, 0, 0, 0)}
    assert build.resource_growth({"a": build.Resources(32, 0, 0, 0)}, {"a": table["a"]}) == []
    assert build.resource_growth({"a": build.Resources(30, 0, 0, 0)}, {"a": table["a"]}) == []
    lines = build.resource_growth({"a": build.Resources(33, 0, 8, 0), "new": build.Resources(1, 0, 0, 0)}, table)
    assert [line.split(":")[0] for line in lines] == ["a", "a", "new", "gone"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float]:
    nvcc = build.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    target = tmp_path_factory.mktemp("library") / "libkvskim_test_sm90a.so"
    started = time.monotonic()
    log = build.compile_library(target, nvcc, "sm_90a")
    return target, log, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.xdist_group("nvcc")
def test_all_sources_compile_within_their_registers(compiled: tuple[Path, str, float]) -> None:
    _, log, _ = compiled
    nvcc = build.find_nvcc()
    assert nvcc is not None
    committed_with = json.loads(build.RESOURCES.read_text())["compiler"]
    if build.nvcc_version(nvcc) != committed_with:
        pytest.skip(f"the table was made with {committed_with}")
    measured = build.parse_resources(log)
    assert measured
    assert build.resource_growth(measured, build.committed_resources()) == []


@pytest.mark.slow
@pytest.mark.xdist_group("nvcc")
def test_library_loads_without_a_gpu_and_has_its_functions(compiled: tuple[Path, str, float]) -> None:
    library = ctypes.CDLL(str(compiled[0]))
    library.kvskim_error_string.restype = ctypes.c_char_p
    assert library.kvskim_error_string(0) == b"no error"
    assert library.kvskim_error_string(1) == b"invalid argument"
    # One wave of 132 multiprocessors: 12, 16 or 8 warps on each, never more chunks than tiles of 16 pages, never none.
    assert library.kvskim_score_sketch_chunks(8, 8, 4, 8192, 132) == 132 * 12 // 64
    assert library.kvskim_score_sketch_chunks(1, 4, 8, 65536, 132) == 132 * 16 // 4
    assert library.kvskim_score_sketch_chunks(1, 2, 16, 100, 132) == 7
    assert library.kvskim_score_sketch_chunks(1, 8, 4, 65536, 132) == 196, "of 198 as many as fill blocks of four warps"
    assert library.kvskim_score_sketch_chunks(1, 4, 8, 100, 132) == 8, "of seven tiles too"
    assert library.kvskim_score_sketch_chunks(4096, 8, 4, 65536, 132) == 1


@pytest.mark.slow
@pytest.mark.xdist_group("nvcc")
def test_build_takes_less_than_thirty_seconds_on_sixteen_cores(compiled: tuple[Path, str, float]) -> None:
    cores = os.cpu_count() or 1
    if cores < 16:
        pytest.skip(f"{cores} cores here")
    assert compiled[2] < 30
