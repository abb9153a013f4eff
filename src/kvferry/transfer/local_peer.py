"""A connected target of the `local` backend, and the thread that copies for all of them.

Each peer's writes are copied strictly in order, in turns of bounded size, so that a large one keeps nobody else's
waiting. A cancel, or the end of a peer, is a flag that the copying looks at before each span: it need not wait for a
turn. Only this thread touches a peer's memory, so when it says that a peer's has been let go, nothing is under way.
"""

from __future__ import annotations

import ctypes
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.contract import Descriptor, Region, Spans, WriteOutcome, WriteResult
from kvferry.transfer.copying import Copy
from kvferry.transfer.shared import Window
from kvferry.transfer.spans import addresses, cut
from kvferry.transfer.write import Write

#: What one peer's turn copies at most.
TURN_BYTES = 32 * 1024 * 1024

_log = logging.getLogger(__name__)


class LocalWrite(Write):
    """`stop` and `cancelled` belong to the loop and the thread both. `descriptors` are the spans that lie there."""

    def __init__(self, spans: Spans, on_end: Callable[[WriteResult], None], called_s: float) -> None:
        super().__init__(spans, on_end, called_s)
        self.stop = ctypes.c_int32(0)
        self.columns: tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]] | None = None
        self.ends: NDArray[np.int64] = np.empty(0, np.int64)  # bytes up to and with each span

    def placed(self, spans: int) -> None:
        """So many more of them."""
        self.descriptors += spans
        self.flushed_bytes = int(self.ends[self.descriptors - 1]) if self.descriptors else 0


class LocalPeer:
    """`broken` says why, once it is, and that is for good. A new connection is a new object."""

    def __init__(self, descriptor: Descriptor, name: str, connection: socket.socket, windows: Sequence[Window]) -> None:
        self._descriptor, self.name, self.connection = descriptor, name, connection
        self._windows = windows
        self._moved = moved(descriptor.regions, windows)
        self.notes: deque[bytes] = deque()  # not yet sent; the loop's
        self.work: deque[LocalWrite] = deque()  # the thread's
        self.current: LocalWrite | None = None  # being copied
        self.broken = ""

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor

    @property
    def regions(self) -> Sequence[Region]:
        """The target's, at their addresses here."""
        return self._moved

    def end(self, why: str) -> None:
        """Post nothing more. What is being copied stops before its next span."""
        self.broken = self.broken or why
        if (write := self.current) is not None:
            write.stop.value = 1

    def unmap(self) -> None:
        for window in self._windows:
            window.close()
        self._windows = ()


def moved(regions: Sequence[Region], windows: Sequence[Window]) -> tuple[Region, ...]:
    """`regions` of another process at the addresses that they have in this one; each lies in one of the windows."""
    found = []
    for r in regions:
        size = r.item_bytes * r.items
        window = next(w for w in windows if w.there <= r.base and r.base + size <= w.there + w.size_bytes)
        found.append(msgspec.structs.replace(r, base=window.here + r.base - window.there))
    return tuple(found)


class Copyist:
    """All methods but `run` are commands, put into `commands` and called by `run` on its thread."""

    def __init__(
        self,
        name: str,
        regions: tuple[Region, ...],
        batch_bytes: int,
        copy: Copy,
        now_s: Callable[[], float],
        deliver: Callable[[Callable[[], None]], None],
    ) -> None:
        self.commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._name, self._regions, self._batch_bytes = name, regions, batch_bytes
        self._copy, self._now_s, self._deliver = copy, now_s, deliver
        self._busy: deque[LocalPeer] = deque()
        self._closing = False

    def run(self) -> None:
        """The thread's whole life. Without work it sleeps in the queue."""
        while not self._closing or self._busy:
            self._take_commands(wait=not self._busy)
            if self._busy:
                peer = self._busy[0]
                self._turn(peer)
                self._busy.rotate(-1)
                if not peer.work:
                    self._busy.remove(peer)

    def _take_commands(self, wait: bool) -> None:
        try:
            if wait:
                self.commands.get()()
            while True:
                self.commands.get_nowait()()
        except Empty:
            return

    # --- commands ---

    def write(self, peer: LocalPeer, write: LocalWrite) -> None:
        if not peer.work:
            self._busy.append(peer)
        peer.work.append(write)

    def cancel(self, write: LocalWrite) -> None:
        """One that waits behind others has nothing to wait for."""
        for peer in list(self._busy):
            if write in peer.work and peer.work[0] is not write:
                peer.work.remove(write)
                self._end(write, WriteOutcome.CANCELLED)

    def let_go(self, peer: LocalPeer, on_done: Callable[[], None]) -> None:
        """`peer` has been ended: its writes are told, and its memory is no longer mapped here."""
        while peer.work:
            self._end(peer.work.popleft(), WriteOutcome.BROKEN, peer.broken)
        if peer in self._busy:
            self._busy.remove(peer)
        peer.unmap()
        self._deliver(on_done)

    def close(self) -> None:
        self._closing = True

    # --- copying ---

    def _turn(self, peer: LocalPeer) -> None:
        write = peer.work[0]
        try:
            if not peer.broken and not write.cancelled:
                self._copy_some(peer, write)
        except Exception as error:  # noqa: BLE001  (whatever it is, its owner must hear of it, and others be served)
            _log.exception("%s: copying to %s failed", self._name, peer.descriptor.agent)
            peer.end(f"{type(error).__name__}: {error}")
        finally:
            peer.current = None
        if write.columns is not None and write.descriptors == len(write.ends):
            outcome = WriteOutcome.FLUSHED
        elif peer.broken:
            outcome = WriteOutcome.BROKEN
        elif write.cancelled:
            outcome = WriteOutcome.CANCELLED
        else:
            return
        peer.work.popleft()
        self._end(write, outcome, peer.broken if outcome is WriteOutcome.BROKEN else "")

    def _copy_some(self, peer: LocalPeer, write: LocalWrite) -> None:
        if write.columns is None:
            self._prepare(peer, write)
        assert write.columns is not None
        peer.current = write
        if peer.broken:  # since the caller looked: whoever says so looks at `current` afterwards
            return
        first = write.descriptors
        after = int(np.searchsorted(write.ends, write.flushed_bytes + TURN_BYTES, side="right"))
        part = slice(first, max(after, first + 1))
        to, source, size = write.columns
        if len(size):
            write.placed(self._copy(to[part], source[part], size[part], write.stop))

    def _prepare(self, peer: LocalPeer, write: LocalWrite) -> None:
        """Addresses of the whole write; a span above the bound is cut, so that a stop is never far away."""
        write.first_post_s = self._now_s()
        spans = cut(write.spans, self._batch_bytes)
        write.ends = np.cumsum(spans["length"])
        write.columns = (
            addresses(spans, peer.regions, "target"),
            addresses(spans, self._regions, "source"),
            np.ascontiguousarray(spans["length"]),
        )

    def _end(self, write: LocalWrite, outcome: WriteOutcome, error: str = "") -> None:
        write.columns = None
        write.end(outcome, error, self._now_s(), self._deliver)
