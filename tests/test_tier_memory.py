"""How much host memory the tier may take, from what the operating system says."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from kvskim.tier.host_memory import GIB, HostMemory, _fresh, _touch, available_host_memory, host_memory_refusal


def machine(root: Path, files: dict[str, str], group: str) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 200 kB\nMemAvailable:  {100 * 2**20} kB\nHugePages_Free: 0\n", "proc/self/cgroup": group, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("group", "files", "gib"),
    [
        ("0::/\n", {}, 100),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n"}, 100),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": f"{40 * GIB}\n", "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n"}, 39),
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/b/memory.max": f"{40 * GIB}\n", "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{20 * GIB}\n", "sys/fs/cgroup/a/memory.current": f"{5 * GIB}\n",
            },
            15,
        ),
        ("0::/outside/name\n", {"sys/fs/cgroup/memory.max": f"{8 * GIB}\n", "sys/fs/cgroup/memory.current": f"{9 * GIB}\n"}, 0),
        (
            "4:cpu:/x\n7:memory,blkio:/x\n",
            {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{30 * GIB}\n", "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{2 * GIB}\n"},
            28,
        ),
    ],
)
def test_the_smaller_of_machine_and_control_groups(tmp_path: Path, group: str, files: dict[str, str], gib: int) -> None:
    assert available_host_memory(machine(tmp_path, files, group)) == gib * GIB


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    root = machine(tmp_path, {}, "")
    (root / "proc/self/cgroup").unlink()
    assert available_host_memory(root) == 100 * GIB


def resident() -> int:
    """Bytes of memory that this process has touched."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_memory_is_zero_and_untouched_until_it_is_used() -> None:
    """Memory that is not locked is taken page by page as it is written; 90 GiB of zeros written first would take half a minute."""
    before = resident()
    memory = HostMemory(2**30, locked=False)
    assert memory.bytes is not None
    assert memory.bytes.shape == (2**30,)
    assert resident() - before < 2**27
    words = memory.view((2**10, 2**17), torch.float64)
    assert not words[::100, ::1000].any()
    words[7, 5] = 2.5
    assert memory.bytes.view(torch.float64)[7 * 2**17 + 5] == 2.5
    touched = resident()
    words[:64].fill_(1.0)
    assert resident() - touched > 2**25
    del words
    memory.release()
    assert resident() - before < 2**25
    with pytest.raises(RuntimeError, match="released"):
        memory.view((2**30,), torch.uint8)
    assert HostMemory(0).view((0, 4), torch.bfloat16).shape == (0, 4)


def pages_held(memory: torch.Tensor) -> list[bool]:
    """Of each page of this memory whether the operating system has given it."""
    held = ctypes.create_string_buffer(-(-memory.numel() // mmap.PAGESIZE))
    assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), held) == 0
    return [bool(byte & 1) for byte in held.raw]


@pytest.mark.parametrize("nbytes", [1, 4096, 2**21 + 1, 300 * 2**20 + 4097])
def test_every_page_is_taken_before_it_is_locked(nbytes: int) -> None:
    """By several threads; what they leave out the driver would take by itself, page after page."""
    memory = _fresh(nbytes)
    assert not any(pages_held(memory))
    _touch(memory)
    assert all(pages_held(memory))
    assert not memory.any()


def test_memory_that_is_made_in_inference_mode_is_taken_too() -> None:
    """It is the threads that write, and the mode is not theirs."""
    with torch.inference_mode():
        _touch(_fresh(2**22))


def test_this_machine_has_some() -> None:
    assert available_host_memory() > 0


def test_too_little_memory_is_one_sentence_with_the_number_that_fits() -> None:
    needed = 64 * GIB
    assert host_memory_refusal(needed, 68 * GIB, 1000) is None
    text = host_memory_refusal(needed, 36 * GIB, 1000)
    assert text is not None
    assert "--num-gpu-blocks-override to 500" in text
    assert "64.0 GiB" in text
    assert host_memory_refusal(needed, GIB, 1000) is not None
