"""What steps with prompts take of GPU memory beyond what stays, within the attention of layers and elsewhere, and what the room for prompts adds to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepPeaks:
    """Bytes beyond what was allocated before.

    Attributes:
        attention: most that was allocated at once while the attention of a layer ran.
        elsewhere: at other times.
        held: most that PyTorch's allocator held, blocks that nobody used included.
    """

    attention: int
    elsewhere: int
    held: int

    @property
    def peak(self) -> int:
        return max(self.attention, self.elsewhere)

    def added_by(self, room: int) -> int:
        """What a room of so many bytes, which is there in the attention of layers and at no other time, adds to the peak."""
        return max(0, min(room, self.attention - self.elsewhere))


def step_peaks(implementation: type[Any], run: Callable[[], object]) -> StepPeaks:
    """Peaks of what ``run`` does, in which layers attend by `forward` of ``implementation``."""
    whole = implementation.forward
    before = torch.cuda.memory_allocated()
    most = {"attention": 0, "elsewhere": 0, "held": 0}

    def note(part: str) -> None:
        most[part] = max(most[part], torch.cuda.max_memory_allocated() - before)
        most["held"] = max(most["held"], torch.cuda.max_memory_reserved() - before)
        torch.cuda.reset_peak_memory_stats()

    def watched(self: Any, *arguments: Any, **more: Any) -> Any:
        note("elsewhere")
        try:
            return whole(self, *arguments, **more)
        finally:
            note("attention")

    torch.cuda.reset_peak_memory_stats()
    implementation.forward = watched
    try:
        run()
    finally:
        implementation.forward = whole
        note("elsewhere")
    return StepPeaks(**most)
