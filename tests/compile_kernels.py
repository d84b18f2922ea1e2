"""Compile Triton kernels for Hopper without a GPU, and say what they take: run as a script, because elsewhere in the tests Triton interprets.

    python tests/compile_kernels.py score:rki4:576:16 attend:16 attend:128

One JSON object per kernel: its name, the bytes of shared memory, registers per thread, bytes of spilled registers, and the widest access to a
record in bytes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvskim.layout import padded_group

ON_A_GPU = {"WIDE": False, "INTERPRETED": False}
"""Compile-time arguments that the operations derive from the device of their tensors."""
RECORD_LINE = re.compile(r"tl\.(load|store)\((record|ranges|pointer)\b")
"""Source lines that read or write a packed record; those of `kvskim.ops.triton.record_fields` know it as ``pointer``."""


class HopperDriver:
    """What Triton asks a driver when it compiles and does not launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def widest_record_access(ptx: str) -> int:
    """Bytes of the widest load, store or asynchronous copy whose source line names a record; 0 where there is none."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx))
    lines = {number: Path(name).read_text(encoding="utf-8").splitlines() for number, name in files.items() if Path(name).is_file()}
    source, widest = "", 0
    for text in ptx.splitlines():
        place = re.search(r"\.loc\s+(\d+)\s+(\d+)", text)
        if place:
            source = lines.get(place[1], [""] * 10**6)[int(place[2]) - 1]
        if not RECORD_LINE.search(source):
            continue
        copied = re.search(r"cp\.async\.c[ag]\.shared\.global[^,]*,[^,]*,\s*(0x[0-9a-f]+|\d+)", text)
        moved = re.search(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[busf](\d+)\s", text)
        if copied:
            widest = max(widest, int(copied[1], 0))
        elif moved:
            widest = max(widest, int(moved[1] or 1) * int(moved[2]) // 8)
    return widest


def resources(kernel: Any, folder: Path) -> tuple[int, int]:
    """Registers of a thread and bytes of its spills, from the machine code."""
    cubin = folder / f"{os.getpid()}.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([str(tool), "--dump-resource-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    cubin.unlink()
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def score_case(selector: str, dim: str, group: str) -> None:
    from kvskim.ops.triton.score_pages import score_pages
    from kvskim.selectors import PageTables, get_selector

    name, _, option = selector.partition("=")
    options = {("bits" if name in ("minmax", "quad") else "rank"): int(option)} if option else {}
    chosen, d, g = get_selector(name, **options), int(dim), int(group)
    columns = padded_group(g)
    small = torch.zeros(2, 1, columns)
    score_pages(
        chosen, PageTables(torch.zeros(1, d)), torch.zeros(2, g, d, dtype=torch.bfloat16), torch.zeros(4, 32, 1, d, dtype=torch.bfloat16),
        torch.zeros(8, 1, chosen.record_bytes(d), dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32),
        scale=0.1, softcap=0.0, sink_pages=1, window_pages=1, scores=torch.zeros(2, 1, 8, columns, dtype=torch.float16), base=small, forced=small.clone(),
        partials=torch.zeros(2, 1, 1, columns),
    )


def attend_case(group: str, values: str = "shared", overlap: str = "") -> None:
    from kvskim.ops.triton.attend import attend_triton

    g, keys = int(group), torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16)
    shared = keys[..., :512]
    table, lengths, pages = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, 128, dtype=torch.int32)
    attend_triton(
        torch.zeros(1, g, 576, dtype=torch.bfloat16), keys, shared if values == "shared" else shared.clone(), table, lengths, pages,
        torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, g, 512, dtype=torch.bfloat16), None, torch.zeros(8 * g * 514), 8, 4, 0.1, 0.0, 1.0, 1.0,
        values == "shared", bool(overlap),
    )


CASES: dict[str, Callable[..., None]] = {"score": score_case, "attend": attend_case}


def main(folder: Path) -> None:
    driver.set_active(HopperDriver())
    launch = JITFunction.run
    case = ""

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options | {k: v for k, v in ON_A_GPU.items() if k in options})
        registers, spilled = resources(kernel, folder)
        facts = dict(shared=kernel.metadata.shared, registers=registers, spilled=spilled, record_access=widest_record_access(kernel.asm["ptx"]))
        print(json.dumps(dict(case=case, kernel=self.__name__, **facts)), flush=True)
        return kernel

    JITFunction.run = compile_only  # type: ignore[method-assign]
    for case in sys.argv[1:]:
        kind, *arguments = case.split(":")
        CASES[kind](*arguments)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        os.environ["TRITON_CACHE_DIR"] = name
        main(Path(name))
