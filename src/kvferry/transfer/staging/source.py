"""The writer's side of staging, for one peer: its writes in order, and their pieces on the way.

The first piece asks the peer for a ring; where none is free, all goes straight. A piece takes room in the ring, then a
slot of our own staging memory; it is gathered there, written into the ring as one span, and announced. When the peer
has scattered it, its room is free again. Several pieces are on the way at a time, in order; one that finds no room
waits at the head of the queue, and is counted once.

A write has ended when everything that was announced has been scattered, and nothing else was. After a cancel no piece
is begun, and one that has not been announced never is.

What is done per piece is done by whoever brings the news, be it the thread that gathers or that of the endpoint within,
so that no piece waits for the loop; the sender's lock makes it one after the other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from kvferry.transfer.blocks import spans_of
from kvferry.transfer.contract import (
    Descriptor,
    Peer,
    Spans,
    TransferError,
    WriteOutcome,
    WriteResult,
)
from kvferry.transfer.spans import make_spans
from kvferry.transfer.staging.filling import Filling
from kvferry.transfer.staging.pieces import Piece
from kvferry.transfer.staging.ring import Ring, Room
from kvferry.transfer.staging.under_way import UnderWay
from kvferry.transfer.staging.wire import Lent, Ready, Scattered, encode, scatter
from kvferry.transfer.staging.write import StagedWrite

if TYPE_CHECKING:
    from kvferry.transfer.staging.sender import Sender

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def _locked(method: Callable[Concatenate[StagedPeer, P], T]) -> Callable[Concatenate[StagedPeer, P], T]:
    """Called from several threads."""

    @wraps(method)
    def one_by_one(self: StagedPeer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.sender.lock:
            return method(self, *args, **kwargs)

    return one_by_one


class StagedPeer:
    """`given` is the descriptor that was given to `connect`. `broken` says why, once it is, and that is for good."""

    def __init__(
        self, sender: Sender, inner: Peer, given: Descriptor, descriptor: Descriptor, lent: Lent, session: int
    ) -> None:
        self.inner, self.session, self.lent, self.given = inner, session, lent, given
        self.broken = ""
        self.gathering = UnderWay(sender.loop)
        self.sender, self._descriptor = sender, descriptor
        self._ring, self.place = Ring(lent.size_bytes), 0  # in the peer's staging memory
        self._ring_region = len(descriptor.regions)  # staging memory is the one behind the user's
        self._writes: deque[StagedWrite] = deque()
        self._announced: dict[int, tuple[StagedWrite, Piece, Room]] = {}
        self._numbers = 0
        self.heard = 0  # answers so far
        self._posted = 0
        self._opening = self._ready = False

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor

    @property
    def staged(self) -> bool:
        return self._opening

    @property
    def waits_for_word(self) -> bool:
        """Only the peer's word moves things on, so that its death would not be noticed."""
        waits = self._announced or (not self._ready and any(write.next is not None for write in self._writes))
        return bool(waits) and not self._posted and not self.gathering and not self.broken

    @property
    def busy(self) -> bool:
        """Pieces are on their way, or wait to be."""
        return bool(self._announced or self._posted or self.gathering) or any(w.next is not None for w in self._writes)

    # --- writes ---

    @_locked
    def write(self, straight: Spans, pieces: Iterator[Piece], on_end: Callable[[WriteResult], None]) -> StagedWrite:
        """Raises TransferError when the endpoint within refuses what is not staged."""
        write = StagedWrite(self, straight, pieces, on_end, self.sender.now_s())
        if self.broken:
            self._break(write, self.broken)
        elif len(straight) or write.next is None:
            self._go_straight(write, straight)
        self._writes.append(write)
        if not self._opening and write.next is not None:
            self._opening = True
            self.sender.greet(self)
        self._settle(write)
        self.pump()
        return write

    def _go_straight(self, write: StagedWrite, spans: Spans) -> None:
        write.straight.append(self.sender.inner.write(self.inner, spans, partial(self._straight_ended, write)))
        write.open += 1

    @_locked
    def cancel(self, write: StagedWrite) -> None:
        write.cancelled = True
        write.drop()
        for straight in write.straight:
            self.sender.inner.cancel(straight)
        self._settle(write)

    @_locked
    def _straight_ended(self, write: StagedWrite, result: WriteResult) -> None:
        write.open -= 1
        write.flushed_bytes += result.size_bytes
        write.measure(result, self.sender.now_s())
        if result.outcome is not WriteOutcome.FLUSHED:
            write.cut_short = True
        if result.outcome is WriteOutcome.BROKEN:
            self.end(result.error)
        self._settle(write)

    def _settle(self, write: StagedWrite) -> None:
        """End what has come to its end: in order, but for what was cut short."""
        if write.complete and (write.cancelled or write.broken) and not write.ended:
            self._end(write)
        while self._writes and (self._writes[0].ended or self._writes[0].complete):
            first = self._writes.popleft()
            if not first.ended:
                self._end(first)

    def _end(self, write: StagedWrite) -> None:
        write.ended = True
        outcome = WriteOutcome.CANCELLED if write.cut_short else WriteOutcome.FLUSHED
        if write.broken:
            outcome = WriteOutcome.BROKEN
        ended_s = self.sender.now_s() if write.last_flush_s is None else write.last_flush_s
        write.end(outcome, write.broken, ended_s, self.sender.tell)

    # --- pieces ---

    @_locked
    def ready(self, message: Ready) -> None:
        """The peer can answer. Its ring is what was promised, or there is none."""
        if self._ready or self.broken:
            return
        self._ready, self.place = True, message.offset
        if not message.size_bytes:
            self._do_without()
        elif message.size_bytes != self.lent.size_bytes or message.offset + message.size_bytes > self.lent.held_bytes:
            self.end(f"{self._descriptor.agent}: a ring of {message.size_bytes} bytes at {message.offset}")
        self.pump()

    def _do_without(self) -> None:
        """Nothing is staged to this peer: pieces go straight, as the spans that they are."""
        self.lent = replace(self.lent, size_bytes=0)
        for write in [write for write in self._writes if write.next is not None]:
            try:
                self._go_straight(write, spans_of(write.take_all()))
            except TransferError as refused:
                self.end(str(refused))

    @_locked
    def pump(self) -> None:
        """Begin pieces, as long as there is room for them."""
        while self._ready and not self.broken:
            write = next((write for write in self._writes if write.next is not None), None)
            if write is None or write.next is None:
                return
            room = self._ring.take(write.next.room_bytes)
            if room is None:
                if not write.waits:
                    write.waits = True
                    self.sender.counts["pieces that waited for room"] += 1
                return
            slot = self.sender.take_slot(self)
            if slot is None:
                self._ring.withdraw(room)
                return
            self._gather(write, write.take(), room, slot)

    def _gather(self, write: StagedWrite, piece: Piece, room: Room, slot: int) -> None:
        write.open += 1
        if write.first_post_s is None:
            write.first_post_s = self.sender.now_s()
        self.gathering.begin()
        try:
            self.sender.send(self, write, piece, room, slot)
        except TransferError as refused:
            self.gathering.end()
            self.end(str(refused))
            self._void(write, room, slot)

    def spans(self, piece: Piece, room: Room, slot: int) -> Spans:
        """From its slot to its room."""
        return make_spans(
            self.sender.staging_region, self._ring_region, self.sender.place_of(slot), self.place + room.offset,
            piece.size_bytes,
        )  # fmt: skip

    @_locked
    def gathered(self, filling: Filling, write: StagedWrite, piece: Piece, room: Room, slot: int, failed: str) -> None:
        """It lies in its slot, or does not."""
        self._filled(filling, piece, failed)
        if not filling.done or write.cancelled or self.broken:
            self._void(write, room, slot)
            return
        try:
            spans = self.spans(piece, room, slot)
            self.sender.inner.write(self.inner, spans, partial(self._flushed, write, piece, room, slot))
            self._posted += 1
        except TransferError as refused:
            self.end(str(refused))
            self._void(write, room, slot)

    @_locked
    def sent(
        self, filling: Filling, write: StagedWrite, piece: Piece, room: Room, slot: int, result: WriteResult
    ) -> None:
        """It lies in the ring, or was not posted, or what was posted of it came to nothing."""
        self._filled(filling, piece, "")
        if filling.done:
            self._posted += 1
            self._flushed(write, piece, room, slot, result)
            return
        if result.outcome is WriteOutcome.BROKEN:
            self.end(result.error)
        self._void(write, room, slot)

    def _filled(self, filling: Filling, piece: Piece, failed: str) -> None:
        self.gathering.end()
        if error := filling.error or failed:
            self.end(f"a piece of {piece.size_bytes} bytes was not gathered: {error}")

    def _void(self, write: StagedWrite, room: Room, slot: int) -> None:
        """A piece that is not announced: its room and slot are free, since nothing of it is under way."""
        write.open -= 1
        write.cut_short = True
        self._ring.give_back(room)
        self.sender.give_back(slot)
        self._settle(write)
        self.pump()

    @_locked
    def _flushed(self, write: StagedWrite, piece: Piece, room: Room, slot: int, result: WriteResult) -> None:
        """It lies in the ring."""
        self._posted -= 1
        write.measure(result, self.sender.now_s())
        if result.outcome is not WriteOutcome.FLUSHED:
            self.sender.spoil(self)  # what of it may still land would land in another's piece
            self.end(result.error or "a piece was cancelled")
        if write.cancelled or self.broken:
            self._void(write, room, slot)
            return
        self.sender.give_back(slot)
        number, self._numbers = self._numbers, self._numbers + 1
        self._announced[number] = (write, piece, room)
        message = scatter(piece, self._descriptor.generation, self.session, number, room.offset)
        try:
            self.sender.inner.notify(self.inner, encode(message))
        except TransferError as refused:
            self.end(str(refused))
        self.sender.watch(self)

    @_locked
    def scattered(self, message: Scattered) -> None:
        if message.number not in self._announced:
            return
        write, piece, room = self._announced.pop(message.number)
        self.heard += 1
        write.open -= 1
        self._ring.give_back(room)
        if message.error:
            write.cut_short = True
            self.end(f"{self._descriptor.agent}: {message.error}")
        else:
            write.flushed_bytes += piece.size_bytes
            write.last_flush_s = self.sender.now_s()
            self.sender.counts["pieces staged"] += 1
            self.sender.counts["staged bytes"] += piece.size_bytes
        self._settle(write)
        self.pump()

    # --- its end ---

    @_locked
    def try_path(self) -> None:
        """Write a word beside the rings: a path that has ended says so."""
        sender, region = self.sender, self.sender.staging_region
        spans = make_spans(region, self._ring_region, sender.scratch, self.lent.scratch, [8])
        self._posted += 1
        try:
            sender.inner.write(self.inner, spans, self._tried)
        except TransferError as refused:
            self._posted -= 1
            self.end(str(refused))

    @_locked
    def _tried(self, result: WriteResult) -> None:
        self._posted -= 1
        if result.outcome is not WriteOutcome.FLUSHED:
            self.end(result.error)

    @_locked
    def end(self, why: str) -> None:
        """Announce nothing more. What was announced may or may not be scattered: nobody here can say. Each write ends
        once nothing of it is being gathered or posted.
        """
        if self.broken:
            return
        self.broken = why
        self.sender.forget(self)
        for write, _, _ in self._announced.values():
            write.open -= 1
            write.cut_short = True
        self._announced.clear()
        for write in list(self._writes):
            self._break(write, why)
        for write in list(self._writes):
            self._settle(write)

    @_locked
    def abandon(self) -> None:
        """The endpoint is closed: nothing is gathered or posted any more, and what was begun will not answer."""
        for write in list(self._writes):
            write.open = 0
            self._settle(write)

    @staticmethod
    def _break(write: StagedWrite, why: str) -> None:
        write.drop()
        write.broken = why
