"""One write of a staging endpoint: what of it goes straight, and the pieces that are still to be begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvferry.transfer.contract import Spans, WriteHandle, WriteResult
from kvferry.transfer.staging.pieces import Piece
from kvferry.transfer.write import Write

if TYPE_CHECKING:
    from kvferry.transfer.staging.source import StagedPeer


class StagedWrite(Write):
    """`spans` are what goes straight. `open` counts what has been begun and has not ended: pieces, and writes of what
    goes straight. It is posted from the start of its first gathering on, and flushed when its last piece has been
    scattered.
    """

    def __init__(
        self,
        peer: StagedPeer,
        spans: Spans,
        pieces: Iterator[Piece],
        on_end: Callable[[WriteResult], None],
        called_s: float,
    ) -> None:
        super().__init__(spans, on_end, called_s)
        self.peer, self.pieces = peer, pieces
        self.next = next(pieces, None)
        self.waits = False  # the next piece has found no room, and has been counted
        self.straight: list[WriteHandle] = []
        self.open = 0
        self.last_flush_s: float | None = None
        self.cut_short = False  # something of it was not written
        self.broken = ""
        self.ended = False

    def take(self) -> Piece:
        piece, self.next = self.next, next(self.pieces, None)
        assert piece is not None
        self.waits = False
        return piece

    def take_all(self) -> list[Piece]:
        rest = [] if self.next is None else [self.next, *self.pieces]
        self.next, self.pieces, self.waits = None, iter(()), False
        return rest

    def drop(self) -> None:
        """No further piece is begun."""
        self.cut_short |= self.next is not None
        self.next, self.pieces = None, iter(())

    def measure(self, part: WriteResult, now_s: float) -> None:
        """A write of the endpoint within, which is a part of this one, has ended."""
        self.descriptors += part.descriptors or 0
        if part.wire_s is not None:
            first_s = max(self.called_s, now_s - part.wire_s)
            self.first_post_s = first_s if self.first_post_s is None else min(self.first_post_s, first_s)
            self.last_flush_s = now_s

    @property
    def complete(self) -> bool:
        return self.next is None and not self.open
