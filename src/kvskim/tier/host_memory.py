"""Pinned host memory of the host tier: how much a process may take, and taking it."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvskim.errors import UnsupportedError
from kvskim.layout import ceil_div

GIB = 2**30
SPARE = 4 * GIB
"""Host memory that is left to everything else: pinned memory can't be swapped out."""

LARGE_PAGE = 2**21
"""Bytes that threads share memory out by: a large page is cleared by one of them."""

TOUCHING_THREADS = 16
"""That take memory from the operating system side by side."""

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
"""There where the kernel gives large pages on demand. Locking takes time page by page."""


def available_host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: what the machine has, or what a control group leaves, whichever is less.

    root: where ``proc`` and ``sys`` are mounted.
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    left = [int(fields["MemAvailable"].split()[0]) * 1024]
    groups = root / "proc/self/cgroup"  # not there where the kernel, or what stands for one, has no control groups
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the path may be that of the machine outside; then the limit is at the root of what is mounted.
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            if (folder / limit).is_file() and (folder / usage).is_file():
                most = (folder / limit).read_text(encoding="ascii").strip()
                if most != "max":
                    left.append(int(most) - int((folder / usage).read_text(encoding="ascii")))
    return max(0, min(left))


def host_memory_refusal(needed: int, available: int, blocks: int, what: str = "values", spare: int = SPARE) -> str | None:
    """Why ``needed`` bytes for the values (or ``what``) of ``blocks`` KV cache blocks can't be had beside ``spare`` bytes, in one sentence, or None."""
    if needed == 0 or needed + spare <= available:
        return None
    fewer = max(0, available - spare) * blocks // needed
    return (
        f"the {what} of {blocks} KV cache blocks take {needed / GIB:.1f} GiB of host memory, and {max(0, available - spare) / GIB:.1f} GiB can be had "
        f"with {spare // GIB} GiB left for other use: set --num-gpu-blocks-override to {fewer} or less, or variant to 'fast'"
    )


def limit_refusal(needed: int, limit_gib: float | None, blocks: int, what: str = "values") -> str | None:
    """Why ``needed`` bytes for the values (or ``what``) of ``blocks`` blocks are more than ``host_memory_gib`` allows, in one sentence, or None."""
    if limit_gib is None or needed <= limit_gib * GIB:
        return None
    return (
        f"the {what} of {blocks} KV cache blocks take {needed / GIB:.1f} GiB of host memory, and host_memory_gib is {limit_gib:g}: "
        f"raise host_memory_gib, or set --num-gpu-blocks-override to {int(limit_gib * GIB * blocks / needed)} or less"
    )


def affordable_blocks(block_bytes: int, available: int, workers: int, limit_gib: float | None) -> int:
    """Blocks of ``block_bytes`` bytes of host memory that each of so many workers of one machine can have.

    Args:
        block_bytes: of one worker.
        available: bytes that all of them together can take, see `available_host_memory`; a twentieth of it, and no less than `SPARE`, is left to others:
            page-locked memory can't be taken back when programs that run already need more.
        workers: how many.
        limit_gib: most for each worker, or None.
    """
    share = max(0, available - max(SPARE, available // 20)) // workers
    return (share if limit_gib is None else min(share, int(limit_gib * GIB))) // block_bytes


def request_refusal(blocks: int, affordable: int, block_size: int, block_bytes: int) -> str | None:
    """Why a request of ``blocks`` blocks, the longest there may be, can't be in host memory, in one sentence, or None.

    Args:
        blocks: of the request.
        affordable: see `affordable_blocks`.
        block_size: tokens of a block.
        block_bytes: host memory of one.
    """
    if blocks <= affordable:
        return None
    return (
        f"one request of --max-model-len takes {blocks * block_bytes / GIB:.1f} GiB of host memory, and {affordable * block_bytes / GIB:.1f} GiB can be had: "
        f"set --max-model-len to {affordable * block_size} or less, raise host_memory_gib if it is set, or set variant to 'fast'"
    )


class HostMemory:
    """Zeros in host memory, which the GPU reads and writes at the addresses that they have here; page-locked until `release`.

    Memory is taken from the operating system as it is and locked afterwards, because PyTorch's own pinned allocations are rounded up to a power of two.
    The operating system gives zeros with each page, in large pages where it has such.

    Args:
        nbytes: how many.
        locked: whether to lock it; False where no GPU takes part.

    Raises:
        UnsupportedError: the driver does not lock so much memory.
    """

    def __init__(self, nbytes: int, *, locked: bool = True) -> None:
        self.bytes: Tensor | None = _fresh(nbytes)
        self._unlock: Callable[[], Any] | None = None
        if not locked or nbytes == 0:
            return
        _touch(self.bytes)
        code = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), nbytes, 0))
        if code:
            raise UnsupportedError(
                f"{nbytes / GIB:.1f} GiB of host memory can't be page-locked for the GPU (CUDA error {code}): raise the limits of the container, "
                "set a smaller --num-gpu-blocks-override, or variant to 'fast'"
            )
        # The memory lives until it is unlocked, also where nobody calls release.
        unlock = weakref.finalize(self, _unlock, self.bytes)
        unlock.atexit = False
        self._unlock = unlock

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """All of it as a tensor."""
        if self.bytes is None:
            raise RuntimeError("the host memory was released")
        return self.bytes.view(dtype).view(shape)

    def release(self) -> None:
        """Wait for the GPU and unlock the memory; no kernel may use it from now on."""
        self.bytes = None
        if self._unlock is not None:
            self._unlock()


def _fresh(nbytes: int) -> Tensor:
    """Bytes that nobody has touched yet, all zero."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if LARGE_PAGES.is_dir():
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy all of it: locked pages can't be shared until somebody writes
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping as long as it lives


def _touch(memory: Tensor) -> None:
    """Write to every page, which takes it from the operating system, so that the driver finds it there and has nothing to do but to lock it.

    The operating system clears what it gives, in the thread that asks for it; so several ask.
    """
    share = ceil_div(ceil_div(memory.numel(), TOUCHING_THREADS), LARGE_PAGE) * LARGE_PAGE
    parts = [memory[first : first + share] for first in range(0, memory.numel(), share)]

    def write(part: Tensor) -> None:
        # A mode of each thread; memory that was made in it is written in it alone.
        with torch.inference_mode():
            part[:: mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(TOUCHING_THREADS) as pool:
        list(pool.map(write, parts))


class _Exported:
    """Bytes for others to read and write where they are: the protocol by which libraries hand GPU memory to each other."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory  # lives as long as what is made of it
        self.__cuda_array_interface__ = dict(version=2, shape=(memory.numel(),), typestr="|u1", strides=None, data=(memory.data_ptr(), False))


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Page-locked host memory as a tensor of the GPU that reads it over the bus; nothing is copied.

    Args:
        host: contiguous, page-locked by this process.
        device: a GPU.

    Raises:
        UnsupportedError: the GPU sees the memory at another address than the host.
    """
    flat = host.view(-1).view(torch.uint8)
    # The first piece alone at first: were it a copy, it would be a small one.
    for part in (flat[:16], flat):
        result = torch.as_tensor(_Exported(part), device=device)
        if result.data_ptr() != host.data_ptr():
            raise UnsupportedError("this GPU does not read page-locked host memory at the addresses that the host has for it: set variant to 'fast'")
    return result.view(host.dtype).view(host.shape)


def _unlock(memory: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))
