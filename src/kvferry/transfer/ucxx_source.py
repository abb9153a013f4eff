"""A connected target of the `ucxx` backend: the agent that sends to it and nobody else, and its queue of work.

The work is done strictly in order. A batch is gathered into memory of ours, announced and sent; it has ended when the
target says that it is placed. So nothing but `serve` reads the regions, on the driver's thread, and after `leave`
nothing does; what has been gathered may still be placed. Nothing here times out: the end of a write to a target that
stands still is its answer, its death, or `leave`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.transfer.contract import Descriptor, Spans, TransferError, WriteOutcome, WriteResult
from kvferry.transfer.pack import Bytes, RegionMemory
from kvferry.transfer.queued_peer import Deliver, QueuedPeer
from kvferry.transfer.spans import split, total_bytes
from kvferry.transfer.ucxx_agent import UcxxAgent
from kvferry.transfer.ucxx_wire import (
    ANSWER,
    CONTROL,
    DATA,
    PIECE_SPANS,
    PIECES,
    Batch,
    Hello,
    Note,
    UcxxMetadata,
    decode_placed,
    encoder,
    tag,
)
from kvferry.transfer.write import Write

_log = logging.getLogger(__name__)


class UcxxWrite(Write):
    def __init__(self, spans: Spans, on_end: Callable[[WriteResult], None], called_s: float) -> None:
        super().__init__(spans, on_end, called_s)
        self.rest = spans  # what has not been cut into pieces yet
        self.pieces: deque[Spans] = deque()  # not yet sent
        self.sent: deque[tuple[int, int]] = deque()  # (number, bytes) of what is not placed yet, oldest first

    def cut(self, piece_bytes: int) -> None:
        """Have the next pieces, if there are any. A part of the table at a time: it may be long. No piece has more
        spans than that part, because what is cut out of a span's middle fills a piece by itself.
        """
        if not self.pieces and len(self.rest):
            self.pieces.extend(split(self.rest[:PIECE_SPANS], piece_bytes))
            self.rest = self.rest[PIECE_SPANS:]


class UcxxPeer(QueuedPeer[UcxxWrite, UcxxAgent]):
    """Serve it until it is `gone`, which it is when it is `broken` and nothing of it is under way: then its agent can
    be deleted.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        metadata: UcxxMetadata,
        agent: UcxxAgent,
        memory: RegionMemory,
        batch_bytes: int,
        now_s: Callable[[], float],
        deliver: Deliver,
    ) -> None:
        """Raises one of the agent's `errors` when there is no way to that address."""
        super().__init__(descriptor, agent, now_s, deliver)
        self._memory = memory
        self._piece_bytes = max(1, min(batch_bytes // PIECES, metadata.piece_bytes))
        self._buffers: list[tuple[Any, Bytes]] = []  # (the send that has it, or None; memory)
        self._number = 0
        self.gone = False
        agent.open_peer(metadata.address)
        self._say(Hello(agent.name, agent.address))

    def serve(self) -> bool:
        """One turn: hear what was placed, send one piece, end. True when anything moved."""
        moved = self.agent.progress()
        try:
            self.agent.check()
            while (message := self.agent.message(ANSWER)) is not None:
                moved = True
                if not self.broken:
                    self._placed(message[1])
            moved |= self._worked()
        except (TransferError, self.agent.errors) as error:
            self.leave(f"{type(error).__name__}: {error}")
        self.gone = bool(self.broken) and self.agent.idle
        return moved

    def _worked(self) -> bool:
        if not self._work:
            return False
        first = self._work[0]
        if isinstance(first, bytes):
            self._say(Note(first))
            self._work.popleft()
            return True
        first.cut(self._piece_bytes)
        buffer = self._buffer() if first.pieces and not first.cancelled and len(first.sent) < PIECES else None
        if buffer is not None:
            self._send(first, first.pieces.popleft(), buffer)
        left = bool(first.pieces) or len(first.rest) > 0
        if not first.sent and (first.cancelled or not left):
            self._work.popleft()
            self._end(first, WriteOutcome.CANCELLED if left else WriteOutcome.FLUSHED)
            return True
        return buffer is not None

    def _send(self, write: UcxxWrite, piece: Spans, buffer: Bytes) -> None:
        number, size_bytes = self._number, total_bytes(piece)
        self._number = (number + 1) % 2**32
        if write.first_post_s is None:
            write.first_post_s = self._now_s()
        self._say(Batch(number, piece.tobytes()))
        self._memory.gather(piece, buffer)
        request = self.agent.send(tag(DATA, self.agent.generation, number), buffer[:size_bytes])
        self._buffers.append((request, buffer))
        write.sent.append((number, size_bytes))
        write.descriptors += len(piece)

    def _buffer(self) -> Bytes | None:
        """Memory for a piece that no send has any more; None while all of it is under way."""
        for at, (request, buffer) in enumerate(self._buffers):
            if request.completed:
                del self._buffers[at]
                return buffer
        return np.empty(self._piece_bytes, np.uint8) if len(self._buffers) < PIECES else None

    def _placed(self, data: bytes) -> None:
        placed = decode_placed(data)
        if placed.error:
            raise TransferError(f"refused there: {placed.error}")
        first = self._work[0] if self._work else None
        if not isinstance(first, UcxxWrite) or not first.sent or first.sent[0][0] != placed.number:
            raise TransferError(f"batch {placed.number} is said to be placed, and is not the one that is next")
        first.flushed_bytes += first.sent.popleft()[1]

    def _say(self, message: Hello | Batch | Note) -> None:
        self.agent.send_message(tag(CONTROL, self.agent.generation), encoder.encode(message))

    def leave(self, why: str) -> None:
        """Nothing is read any more, and the writes are told so."""
        if self.broken:
            return
        self.broken = why
        _log.info("%s: no longer connected to %s: %s", self.agent.name, self._descriptor.agent, why)
        self._buffers.clear()
        self._end_all(why)
