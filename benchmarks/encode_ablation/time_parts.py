"""What each part of the sketch encoder for many slots costs: builds it with a part left out or changed, and times it on a prompt of 97K tokens, 8 kv heads.

    python benchmarks/encode_ablation/time_parts.py

Needs a Hopper GPU, nvcc and `patch`. The builds with a part left out write wrong records; they are for time only. `parts.patch` puts the switches into
a copy of the sources. Also timed: the first 8K tokens of the prompt, a step that completes one page, and one that completes none. Microseconds of a
launch, four of them in a CUDA graph, mean of ten replays; the keys are the same each time and larger than the L2 cache.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from kvskim.bench import problem
from kvskim.ops.cuda.build import FOLDER
from kvskim.ops.cuda.encode import ENCODERS
from kvskim.ops.cuda.library import FLOAT, INT, LONG, POINTER, STREAM
from kvskim.selectors import get_selector

BUILDS = {
    "as it is": "", "no prefetch to L2": "-DABL_NO_ASK", "prefetch of every other line": "-DABL_ASK_LINES", "prefetch 2 batches ahead": "-DABL_AHEAD=2",
    "prefetch 8 batches ahead": "-DABL_AHEAD=8", "all warps transform first": "-DABL_ALL_EARLY", "without the first product": "-DABL_NO_MODES",
    "keys not loaded": "-DABL_NO_FETCH", "without the second product": "-DABL_UNITS=0", "half of the second product": "-DABL_UNITS=2",
    "records not written": "-DABL_NO_RECORDS", "transform in one 16-bit part": "-DABL_ONE_PART", "only the matrix brought in": "-DABL_SETUP_ONLY",
}
TYPES = [POINTER, INT, LONG, LONG, LONG, INT, POINTER, INT, *[POINTER] * 7, LONG, INT, INT, FLOAT, INT, INT, STREAM]
MANY = ENCODERS.index("many")


def build(folder: Path) -> dict[str, ctypes.CDLL]:
    """One library for each of `BUILDS`, compiled side by side."""
    sources = folder / "sources"
    shutil.copytree(FOLDER, sources)
    subprocess.run(["patch", "-p1", "-s", "-i", str(Path(__file__).with_name("parts.patch"))], cwd=sources, check=True)
    command = ["nvcc", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "--shared", "-Xcompiler", "-fPIC", str(sources / "encode_sketch.cu")]
    running = {
        name: (folder / f"{i}.so", subprocess.Popen([*command, *flags.split(), "-o", str(folder / f"{i}.so")]))
        for i, (name, flags) in enumerate(BUILDS.items())
    }
    for name, (_, process) in running.items():
        if process.wait():
            raise SystemExit(f"nvcc failed for the build '{name}'")
    return {name: ctypes.CDLL(str(path)) for name, (path, _) in running.items()}


def main() -> None:
    shape = problem.Shape(1, 100_000 // 16 * 16, 8, 4)
    tables = problem.tables_of(get_selector("sketch"), shape)
    cache = problem.Cache(shape, smallest_bytes=0)
    keys = cache.keys
    pages = cache.block_tables[0][0].long()
    prompt = (pages[:, None] * 16 + torch.arange(16, device="cuda")).flatten()[: shape.context].contiguous()
    steps = {"prompt": prompt, "8K tokens": prompt[:8192], "one page": prompt[15:16], "no page": torch.full_like(prompt[:1], -1)}
    records = torch.zeros(keys.shape[0], 8, 256, dtype=torch.uint8, device="cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    print(" " * 32 + "".join(f"{name:>11s}" for name in steps))
    with tempfile.TemporaryDirectory() as folder:
        for name, library in build(Path(folder)).items():
            encode = library.kvskim_encode_sketch
            encode.argtypes = TYPES

            def launch(slots: torch.Tensor) -> None:
                code = encode(  # noqa: B023
                    keys.data_ptr(), 0, *keys.stride()[:3], 16, slots.data_ptr(), slots.shape[0], tables.mean.data_ptr(), tables.encode_matrix.data_ptr(),
                    tables.coefficient_bits.data_ptr(), tables.coefficient_count.data_ptr(), tables.slot_coefficient.data_ptr(),
                    tables.slot_digit.data_ptr(), records.data_ptr(), records.shape[0], 8, 128, 1.0, MANY, 0, torch.cuda.current_stream().cuda_stream,
                )
                if code:
                    raise SystemExit(f"the launch failed with CUDA error {code}")

            times = []
            for slots in steps.values():
                launch(slots)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(4):
                        launch(slots)
                graph.replay()
                torch.cuda.synchronize()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(10):
                    graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 40 * 1000)
            print(f"{name:32s}" + "".join(f"{time:11.1f}" for time in times), flush=True)


if __name__ == "__main__":
    main()
