"""Where a decode step makes the records of completed pages: in a row with attention, or beside it on a stream of their own.

In a step of decode rows alone a row completes one page at most, and that is in its own window, which is attended in any case. Another row may share
the page: the prefix cache gives a block away in the step that fills it, and a prompt that is in such blocks but for its last token is a decode row. For
it the page is the last but one. So with a window of two pages or more no record of a page that a step completes is read in that step: it may be made
any time after the keys are in the cache and before the next step. Captured steps of that kind make records on a side stream, forked behind select and
joined behind attention of the last layer, so that no kernel of the main stream waits for them. Forked earlier they would take
room on the multiprocessors from the scan of the records, which wants every register; attention leaves some. A fork costs a layer about a microsecond,
whether a page is complete or not. So where one launch can make the records of all layers, there is one fork, in the last layer; else every layer has its
own. Eager steps, steps with prefills and smaller windows make records at once.

What attention has read from host memory is copied into the hot cache in the same way: behind attention of its layer, beside what follows. What is
copied where is decided beside attention. That reads the selection, and the layers have one table for it: the next layer writes nothing before it is done,
nor before what the side stream had ahead of it: there records and copies of earlier layers are waited for after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvskim.ops.encode import EncodeLayer

SMALLEST_WINDOW = 2
"""With fewer pages in the window a record may be read in the step that makes it."""


class Streams(Protocol):
    """The streams of a device; a stand-in in tests."""

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""

    def fork(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the side stream, behind what is on the current stream so far."""

    def mark(self) -> None:
        """Remember how much work the side stream has."""

    def wait(self) -> None:
        """Let what comes next on the current stream wait for the work that the side stream had at the last mark."""

    def join(self) -> None:
        """Let what comes next on the current stream wait for the side stream."""


class CudaStreams:
    """`Streams` of a GPU.

    Only work on memory that outlives the graph may be forked: the caching allocator is not told of the side stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._marked = torch.cuda.Event()

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def fork(self, work: Callable[[], None]) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            work()

    def mark(self) -> None:
        self._marked.record(self._side)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._marked)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)


class EncodeOrder:
    """Makes the records of each layer of a pass of the model, at once or forked, runs other work of a layer on the same side stream, and joins.

    A pass calls `begins`, `written`, `selected` and `attended`, for one layer after the other; `begins` matters where something is decided beside attention.
    Which layer is the last one is learnt from the pass before (vLLM warms up before it captures); until it is known, and behind a layer where the side
    stream was joined, nothing is forked: a graph with a stream that is not joined can't be captured.

    Args:
        window_pages: pages at the end of a request that are always attended.
        encode_together: makes the records of several layers, on the side stream.
    """

    def __init__(self, window_pages: int, encode_together: Callable[[Sequence[EncodeLayer]], None] | None = None) -> None:
        self._window_pages = window_pages
        self._encode_together = encode_together
        self.streams: Streams | None = None
        """Of the device; None where there are none to choose from, so that records are made at once."""
        self.forked = 0
        """Layers whose records were forked in the last pass."""
        self._first: str | None = None
        self._previous: str | None = None
        self._last: str | None = None
        self._joined = False
        self._pending = False
        self._held: Callable[[], None] | None = None
        self._gathered: list[EncodeLayer] = []
        self._deciding = False

    def begins(self, layer: str) -> bool:
        """Nothing of a layer is on the current stream yet: what comes next waits for what was decided beside attention of the layer ahead.

        Returns:
            whether there is anything to wait for. Then the kernel that comes next must be launched as an ordinary one, which begins when all that is
            ahead of it has ended, on either stream; those behind it may begin early.
        """
        # What a pass that failed has left is no concern of the next one.
        waits, self._deciding = self._deciding and layer != self._first, False
        if waits:
            assert self.streams is not None
            self.streams.wait()
        return waits

    def written(self, layer: str, encode: Callable[[bool], None], *, alone: bool, together: Callable[[], EncodeLayer | None] | None = None) -> None:
        """The keys of a layer are in the cache: make its records.

        Args:
            layer: its name.
            encode: makes the records; its argument says whether on the side stream.
            alone: the step has decode rows of one token and no others, and attention of the layer follows in the same graph if there is one.
            together: gives what ``encode_together`` makes the records from, or None where it can't make them with those of other layers in one launch. Only
                asked where records are forked.

        Raises:
            RuntimeError: the pass before this one was captured and did not come to the layer that makes the records of all layers. It failed, or its graph
                lacks them; from here both look the same. Said once, when the next pass begins: a graph that has ended can't be looked into.
        """
        self._enter(layer)
        if self._window_pages >= SMALLEST_WINDOW and self.may_fork(alone=alone):
            self.forked += 1
            work = together() if together is not None and self._encode_together is not None else None
            if work is not None:
                self._gathered.append(work)
            else:
                self._held = lambda: encode(True)
        else:
            encode(False)

    def may_fork(self, *, alone: bool) -> bool:
        """Whether work that nothing of its own layer waits for may run on the side stream; ``alone`` as in `written`."""
        joins = self._last is not None and not self._joined
        return alone and joins and self.streams is not None and self.streams.capturing()

    def fork(self, work: Callable[[], None]) -> None:
        """Run it on the side stream, behind what is on the current stream so far; only where `may_fork` says so, and before `attended`."""
        assert self.streams is not None
        self._pending = True
        self.streams.fork(work)

    def selected(self, decide: Callable[[], None] | None = None) -> None:
        """The pages of a layer, or of its first rows, are selected on the current stream: what `written` has held back may run beside attention.

        Args:
            decide: reads the selection, beside attention; only where `may_fork` says so.
        """
        held, self._held = self._held, None
        if (held is not None or self._gathered) and (self.streams is None or not self.streams.capturing()):
            # Made now they would be made once, and never again by the graph that holds the write.
            self._gathered = []
            raise RuntimeError("the write of a layer was captured in a CUDA graph and its attention is not; its records would be missing")
        if held is not None:
            self.fork(held)
        if self._gathered and self._previous == self._last:
            assert self._encode_together is not None
            gathered, self._gathered, encode_together = self._gathered, [], self._encode_together
            self.fork(lambda: encode_together(gathered))
        if decide is not None:
            assert self.streams is not None
            self.fork(decide)
            self.streams.mark()
            self._deciding = True

    def attended(self, layer: str) -> None:
        """Attention of a layer is on the current stream, and all other work of it under way."""
        self.selected()
        if self._pending and not self._joined and layer == self._last:
            assert self.streams is not None
            self.streams.join()
            self._joined, self._deciding = True, False

    def _enter(self, layer: str) -> None:
        if self._first is None:
            self._first = layer
        elif layer == self._first:
            self._last = self._previous
            # What a pass that failed has left does not concern this one, but for records that a graph may lack.
            self.forked, self._joined, self._pending, self._held = 0, False, False, None
            if self._gathered:
                self._gathered = []
                raise RuntimeError(
                    "the pass of the model before this one was captured and did not come to the layer that makes the records of all layers: it failed "
                    "(see the error ahead of this one), or its graph would never make them"
                )
        self._previous = layer
