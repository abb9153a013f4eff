"""A connected target of the `mooncake` backend: the engine that writes to it and nobody else, and its queue of work.

The work is done strictly in order. Only the first write is posted, with at most `batch_bytes` and `WINDOW` spans under
way, each a transfer of its own: Mooncake's answer about many is one that blocks. What has been posted is asked after
until it has ended. When anything fails the engine goes, which ends all of it, and only then are the writes told. All of
it happens on the driver's thread but the opening, which asks the target who it is and may take long.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Thread

import numpy as np

from kvferry.transfer.contract import Descriptor, Region, Spans, WriteOutcome, WriteResult
from kvferry.transfer.mooncake_agent import MooncakeAgent, MooncakeMetadata
from kvferry.transfer.mooncake_mail import (
    HEAD_WORDS,
    SLOTS,
    TAKEN_AT,
    TAKEN_BYTES,
    letter_bytes,
    mark,
    mark_at,
    signed,
    slot_at,
)
from kvferry.transfer.queued_peer import Deliver, QueuedPeer
from kvferry.transfer.spans import addresses, cut
from kvferry.transfer.write import Write

#: Transfers under way at a time, and what one has at most: a longer span is cut, so that its parts go by several
#: connections.
WINDOW, SPAN_BYTES = 128, 1024 * 1024
#: What `transfer_check_status` says.
_DONE, _FAILED = 1, -1
#: What takes the place of a transfer's number when it was refused: -1, and the same in 64 bits without a sign.
_REFUSED = (-1, 2**64 - 1)

_log = logging.getLogger(__name__)


class MooncakeWrite(Write):
    def __init__(self, spans: Spans, on_end: Callable[[WriteResult], None], called_s: float) -> None:
        super().__init__(spans, on_end, called_s)
        self.rows: deque[tuple[int, int, int]] | None = None  # (source, target, bytes), not posted; None: not cut yet


class MooncakePeer(QueuedPeer[MooncakeWrite, MooncakeAgent]):
    """Once it is `broken` its engine is gone, or goes when the thread `opening` ends, which reads no region."""

    def __init__(
        self,
        descriptor: Descriptor,
        metadata: MooncakeMetadata,
        agent: MooncakeAgent,
        regions: tuple[Region, ...],
        batch_bytes: int,
        now_s: Callable[[], float],
        deliver: Deliver,
        put: Callable[[Callable[[], None]], None],
    ) -> None:
        """`put` has a call made soon on the driver's thread."""
        super().__init__(descriptor, agent, now_s, deliver)
        self._metadata, self._regions, self._batch_bytes, self._put = metadata, regions, batch_bytes, put
        self._posted: deque[tuple[int, int]] = deque()  # (transfer, bytes), oldest first
        self._under_way_bytes = 0
        self._letter: deque[tuple[np.ndarray, int]] | None = None  # of the first notification: not posted; (data, at)
        self._held: list[np.ndarray] = []  # what its posted part reads from
        self._sent = self._taken = 0  # notifications of this session
        self._told = np.zeros(HEAD_WORDS, np.int64)
        self._ready = False
        self.opening = Thread(target=self._open, args=(agent.engine,), name=f"{agent.name}-open", daemon=True)
        self.opening.start()

    # --- the opening -----------------------------------------------------------------------------------------

    def _open(self, engine: object) -> None:
        """On a thread of its own: read who is there."""
        there = np.zeros(HEAD_WORDS, np.int64)
        server, mailbox = self._metadata.server, self._metadata.mailbox
        status = engine.transfer_sync_read(server, there.ctypes.data, mailbox, there.nbytes)  # type: ignore[attr-defined]
        incarnation, generation, _ = there.tolist()
        del engine  # the driver's thread deletes it, if it is still there to do so
        self._put(lambda: self._opened(status, incarnation, generation))

    def _opened(self, status: int, incarnation: int, generation: int) -> None:
        here = self._descriptor
        if status != 0:
            self.end(f"{here.agent}: {self._metadata.server} does not answer (status {status})")
        elif (incarnation, generation) != (signed(here.incarnation), here.generation):
            self.end(f"{here.agent}: another process answers at {self._metadata.server}")
        self._ready = True

    # --- a turn ----------------------------------------------------------------------------------------------

    def serve(self) -> bool:
        """One turn: reap, post what fits, end. True when anything moved. Call it while `busy`."""
        if not self._ready or self.broken or not self._work:
            return False
        first = self._work[0]
        try:
            moved = self._reap(first)
            return (self._note(first) if isinstance(first, bytes) else self._write(first)) or moved
        except _TransferFailed as failure:
            self.end(f"{self._descriptor.agent}: {failure}")
            return True

    def _write(self, write: MooncakeWrite) -> bool:
        if write.rows is None:
            write.rows = self._cut(write.spans)
        moved = False
        while write.rows and not write.cancelled and len(self._posted) < WINDOW:
            source, target, size_bytes = write.rows[0]
            if self._posted and self._under_way_bytes + size_bytes > self._batch_bytes:
                break
            if write.first_post_s is None:
                write.first_post_s = self._now_s()
            self._post(source, target, size_bytes)
            write.rows.popleft()
            write.descriptors += 1
            moved = True
        if not self._posted and (write.cancelled or not write.rows):
            self._work.popleft()
            self._end(write, WriteOutcome.CANCELLED if write.rows else WriteOutcome.FLUSHED)
            return True
        return moved

    def _cut(self, spans: Spans) -> deque[tuple[int, int, int]]:
        pieces = cut(spans, max(1, min(self._batch_bytes, SPAN_BYTES)))
        source = addresses(pieces, self._regions, "source")
        target = addresses(pieces, self._descriptor.regions, "target")
        return deque(zip(source.tolist(), target.tolist(), pieces["length"].tolist(), strict=True))

    def _note(self, payload: bytes) -> bool:
        """Wait for a free slot, write the message, then its mark: each when what was before it is flushed."""
        if self._posted:
            return False
        self._taken = max(self._taken, int(self._told[2]))
        if self._letter is None and self._sent - self._taken >= SLOTS:
            self._told[2] = 0
            self._posted.append((self._ask_taken(), 0))
            return False
        if self._letter is None:
            letter = np.frombuffer(letter_bytes(self.agent.name, payload), np.uint8)
            number = np.array([mark(self.agent.generation, self._sent)], np.int64)
            self._letter = deque([(letter, slot_at(self._sent)), (number, mark_at(self._sent))])
        if self._letter:
            data, at = self._letter.popleft()
            self._held = [data]
            self._post(data.ctypes.data, self._metadata.mailbox + at, data.nbytes)
        else:
            self._work.popleft()
            self._letter = None
            self._sent += 1
        return True

    # --- transfers -------------------------------------------------------------------------------------------

    def _post(self, source: int, target: int, size_bytes: int) -> None:
        number = self.agent.engine.transfer_submit_write(self._metadata.server, source, target, size_bytes)
        if number in _REFUSED:
            raise _TransferFailed("a transfer is refused")
        self._posted.append((number, size_bytes))
        self._under_way_bytes += size_bytes

    def _ask_taken(self) -> int:
        here, there = self._told[2:].ctypes.data, self._metadata.mailbox + TAKEN_AT
        number: int = self.agent.engine.batch_transfer_async_read(self._metadata.server, [here], [there], [TAKEN_BYTES])
        if number == 0:
            raise _TransferFailed("a transfer is refused")
        return number

    def _reap(self, first: MooncakeWrite | bytes) -> bool:
        """Take what has ended, oldest first: they end nearly in order."""
        ended = 0
        for number, size_bytes in self._posted:
            status = self.agent.engine.transfer_check_status(number)
            if status == _FAILED:
                raise _TransferFailed("a transfer has failed")
            if status != _DONE:
                break
            ended += 1
            self._under_way_bytes -= size_bytes
            if not isinstance(first, bytes):
                first.flushed_bytes += size_bytes
        for _ in range(ended):
            self._posted.popleft()
        return ended > 0

    def end(self, why: str) -> None:
        """Delete the engine, which ends whatever is under way; only then are the writes told."""
        if self.broken:
            return
        self.broken = why
        _log.info("%s: no longer connected to %s: %s", self.agent.name, self._descriptor.agent, why)
        self._posted.clear()
        self.agent.delete()
        self._held.clear()
        self._end_all(why)


class _TransferFailed(Exception):
    """One transfer of the engine; what is left of it is for `end`."""
