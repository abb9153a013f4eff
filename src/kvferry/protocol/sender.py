"""The sender machine: one room at prefill's leader, from open until its writes are flushed and its pages free.

The machine counts what keeps it from being quiet: writes posted and not ended, and a forward that names the
room's pages. An abort never ends a room that is not quiet; it drains it.

Under the early policy a room starts in AWAITING_DESTINATION. Under prefill_complete it starts in AWAITING_PAGES, is
computed and then KEPT: its pages are cache, which may be displaced, until the destination comes. Then it goes the same
way as under early, but for two things: what was kept is not computed again, and its first token is the one that the
front has been told.
"""

from __future__ import annotations

from enum import auto
from typing import Any, ClassVar

import msgspec

from kvferry.protocol.errors import Cause
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.machine import IGNORED, REFUSED, Cell, Go, Machine, Symbol, Table


class SenderState(Symbol):
    AWAITING_PAGES = auto()  # prefill_complete: source pages not reserved
    COMPUTING_AHEAD = auto()  # prefill_complete: source pages reserved; chunks are computed, nothing is written
    KEPT = auto()  # prefill_complete: all computed, the pages are cache; waiting for the destination
    AWAITING_DESTINATION = auto()
    QUEUED = auto()  # destination known; source pages not reserved
    COMPUTING = auto()  # source pages reserved; chunks are computed and written
    FLUSHING = auto()  # all computed; writes are still on the way
    DRAINING = auto()  # failed; waiting for writes and the forward to end
    BROKEN = auto()  # failed and quiet, but no Drained can be given: a write did not say what landed
    DONE = auto()
    ENDED = auto()  # failed, nothing left


class SenderEvent(Symbol):
    DESTINATION = auto()
    RESERVE = auto()
    PIN = auto()  # the pages are reserved again, and all of the prompt is in them
    CHUNK_COMPUTED = auto()
    LAST_COMPUTED = auto()
    WRITE_ENDED = auto()
    WRITE_BROKEN = auto()
    FAIL = auto()  # the engine or the data plane refused
    ABORT = auto()  # by the room
    ABORT_TRANSFER = auto()  # by decode
    STOP = auto()  # by the front
    ROOM_LOST = auto()
    DECODE_LOST = auto()
    FRONT_LOST = auto()
    EXPIRED = auto()
    DECODE_EXITED = auto()  # proof that decode's process has ended
    UNKNOWN = auto()  # decode does not know the room: it has had its proof
    FLUSHED = auto()  # internal: all computed and no write outstanding
    QUIET = auto()  # internal: draining, no write outstanding, no forward running
    QUIET_BROKEN = auto()  # internal: as QUIET, but a write ended without saying what landed


S, V = SenderState, SenderEvent
Row = dict[SenderEvent, Cell[SenderState]]
#: Another party ended the room; it knows, so the room is only acked.
_TOLD = (V.ABORT, V.ABORT_TRANSFER, V.ROOM_LOST)
#: Prefill finds the failure itself and reports it to the room at once.
_FOUND = (V.STOP, V.DECODE_LOST, V.DECODE_EXITED, V.FRONT_LOST, V.EXPIRED, V.FAIL)


def _row(base: Cell[SenderState], *rows: dict[str, Cell[SenderState]], **cells: Cell[SenderState]) -> Row:
    filled = {name: cell for row in (*rows, cells) for name, cell in row.items()}
    return {event: filled.get(event.name, base) for event in SenderEvent}


def _ends(to: SenderState, told: str, found: str) -> dict[str, Cell[SenderState]]:
    row: dict[str, Cell[SenderState]] = {event.name: Go(to, told) for event in _TOLD}
    row.update({event.name: Go(to, found) for event in _FOUND})
    return row


_DRAIN = _ends(S.DRAINING, "drain", "fail_and_drain")
_END = _ends(S.ENDED, "end", "fail_and_end")

TABLE: Table[SenderState, SenderEvent] = {
    # Decode is a peer that asks for pages only when it has been told that the prompt is computed.
    S.AWAITING_PAGES: _row(REFUSED, _END, RESERVE=Go(S.COMPUTING_AHEAD), UNKNOWN=IGNORED),
    S.COMPUTING_AHEAD: _row(
        REFUSED,
        _DRAIN,
        UNKNOWN=IGNORED,
        CHUNK_COMPUTED=Go(S.COMPUTING_AHEAD),
        LAST_COMPUTED=Go(S.KEPT, "keep"),
    ),
    S.KEPT: _row(REFUSED, _END, DESTINATION=Go(S.QUEUED, "queue"), UNKNOWN=IGNORED),
    S.AWAITING_DESTINATION: _row(REFUSED, _END, DESTINATION=Go(S.QUEUED, "queue"), UNKNOWN=IGNORED),
    S.QUEUED: _row(
        REFUSED,
        _END,
        DESTINATION=IGNORED,
        UNKNOWN=IGNORED,
        RESERVE=Go(S.COMPUTING),
        PIN=Go(S.FLUSHING, "write_last"),
    ),
    S.COMPUTING: _row(
        REFUSED,
        _DRAIN,
        DESTINATION=IGNORED,
        UNKNOWN=IGNORED,
        CHUNK_COMPUTED=Go(S.COMPUTING, "write"),
        LAST_COMPUTED=Go(S.FLUSHING, "write_last"),
        WRITE_ENDED=Go(S.COMPUTING),
        WRITE_BROKEN=Go(S.DRAINING, "fail_and_drain"),
    ),
    S.FLUSHING: _row(
        REFUSED,
        _DRAIN,
        DESTINATION=IGNORED,
        UNKNOWN=IGNORED,
        WRITE_ENDED=Go(S.FLUSHING),
        WRITE_BROKEN=Go(S.DRAINING, "fail_and_drain"),
        FLUSHED=Go(S.DONE, "deliver"),
    ),
    # A forward that was running may still end here: its result is not written.
    S.DRAINING: _row(
        IGNORED, RESERVE=REFUSED, PIN=REFUSED, QUIET=Go(S.ENDED, "end"), QUIET_BROKEN=Go(S.BROKEN, "strand")
    ),
    S.BROKEN: _row(IGNORED, RESERVE=REFUSED, PIN=REFUSED, DECODE_EXITED=Go(S.ENDED, "end"), UNKNOWN=Go(S.ENDED, "end")),
    S.DONE: _row(IGNORED, RESERVE=REFUSED, PIN=REFUSED, CHUNK_COMPUTED=REFUSED, LAST_COMPUTED=REFUSED),
    S.ENDED: _row(IGNORED, RESERVE=REFUSED, PIN=REFUSED, CHUNK_COMPUTED=REFUSED, LAST_COMPUTED=REFUSED),
}

_KVPOLL = {
    S.AWAITING_PAGES: KVPoll.BOOTSTRAPPING,
    S.COMPUTING_AHEAD: KVPoll.BOOTSTRAPPING,
    S.KEPT: KVPoll.BOOTSTRAPPING,
    S.AWAITING_DESTINATION: KVPoll.BOOTSTRAPPING,
    S.QUEUED: KVPoll.WAITING_FOR_INPUT,
    S.COMPUTING: KVPoll.WAITING_FOR_INPUT,
    S.FLUSHING: KVPoll.TRANSFERRING,
    S.DRAINING: KVPoll.FAILED,
    S.BROKEN: KVPoll.FAILED,
    S.DONE: KVPoll.SUCCESS,
    S.ENDED: KVPoll.FAILED,
}


class Enqueue(msgspec.Struct, frozen=True):
    """The destination is known: the room may be computed when its turn comes."""


class Keep(msgspec.Struct, frozen=True):
    """The prompt is computed and has no destination: its pages become cache, and the room is told `PrefillDone`."""


class Write(msgspec.Struct, frozen=True):
    """Write what has been computed; with `last`, the rest of the pages and the metadata."""

    last: bool


class Cancel(msgspec.Struct, frozen=True):
    """Stop posting the room's writes; each still ends."""


class Report(msgspec.Struct, frozen=True):
    """Tell the room of a failure that prefill has found."""

    cause: Cause


class Deliver(msgspec.Struct, frozen=True):
    """Everything is flushed: notify on the data path, say Drained, release the source pages, forget the room."""


class Release(msgspec.Struct, frozen=True):
    """Nothing more will be written: say Drained to decode and the room, release the source pages, forget the room."""


class Strand(msgspec.Struct, frozen=True):
    """No read or write is left here, so the source pages are free; but the room stays known and no Drained is said."""


SenderCommand = Enqueue | Keep | Write | Cancel | Report | Deliver | Release | Strand


class SenderMachine(Machine[SenderState, SenderEvent]):
    """Events in, `SenderCommand`s out. `writes_open`, `stepping`, `broken` and `exited` are what QUIET depends on.
    `computes_first`: the policy is prefill_complete.
    """

    TABLE: ClassVar[Any] = TABLE
    LOCAL = frozenset({V.RESERVE, V.PIN, V.CHUNK_COMPUTED, V.LAST_COMPUTED})

    def __init__(self, computes_first: bool = False) -> None:
        super().__init__(S.AWAITING_PAGES if computes_first else S.AWAITING_DESTINATION)
        self.writes_open = 0
        self.writes_posted = 0
        self.stepping = False
        self.broken = False
        self.exited = False  # decode's process has ended; the kernel says so once, maybe before the writes break
        self.cause: Cause | None = None

    @property
    def kvpoll(self) -> KVPoll:
        if self.state is S.COMPUTING and self.writes_posted:
            return KVPoll.TRANSFERRING
        return _KVPOLL[self.state]

    def handle(self, event: SenderEvent, cause: Cause | None = None) -> list[SenderCommand]:
        """Apply an event that is no write's end. `cause` goes with every event that ends the room."""
        if self.refuses(event):
            return self.fire(event)
        if cause is not None and self.cause is None:
            self.cause = cause
        if event is V.DECODE_EXITED:
            self.exited = True
        return self.fire(event)

    def write_posted(self) -> None:
        self.writes_open += 1
        self.writes_posted += 1

    def write_ended(self, broken: bool, cause: Cause | None = None) -> list[SenderCommand]:
        """A posted write has ended. `broken`: it can't say what landed."""
        self.writes_open -= 1
        self.broken = self.broken or broken
        return self.handle(V.WRITE_BROKEN if broken else V.WRITE_ENDED, cause)

    def step_started(self) -> None:
        self.stepping = True

    def step_ended(self, event: SenderEvent) -> list[SenderCommand]:
        """The forward that named the room's pages has ended; `event` is CHUNK_COMPUTED or LAST_COMPUTED.

        A room that was aborted meanwhile ignores the result, and may be quiet now.
        """
        self.stepping = False
        return self.fire(event) if self.computing else self.settle()

    @property
    def computing(self) -> bool:
        """The result of a forward is wanted."""
        return self.state in (S.COMPUTING, S.COMPUTING_AHEAD)

    def settle(self) -> list[SenderCommand]:
        """Fire the internal event that is due, if any."""
        internal = self.after()
        return self.fire(internal) if internal is not None else []

    def after(self) -> SenderEvent | None:
        if self.writes_open or self.stepping:
            return None
        if self.state is S.DRAINING:
            return V.QUIET_BROKEN if self.broken and not self.exited else V.QUIET
        # A last chunk posts at least the metadata, so FLUSHING with nothing open means that it has all ended.
        return V.FLUSHED if self.state is S.FLUSHING and self._last_posted else None

    _last_posted = False

    def last_posted(self) -> None:
        """The actor has posted the last chunk's writes (they may even have ended)."""
        self._last_posted = True

    def _queue(self) -> None:
        self.commands.append(Enqueue())

    def _keep(self) -> None:
        self.commands.append(Keep())

    def _write(self) -> None:
        self.commands.append(Write(last=False))

    def _write_last(self) -> None:
        self.commands.append(Write(last=True))

    def _drain(self) -> None:
        self.commands.append(Cancel())

    def _fail_and_drain(self) -> None:
        self.commands += [Report(self._cause()), Cancel()]

    def _end(self) -> None:
        self.commands.append(Release())

    def _fail_and_end(self) -> None:
        self.commands += [Report(self._cause()), Release()]

    def _strand(self) -> None:
        self.commands.append(Strand())

    def _deliver(self) -> None:
        self.commands.append(Deliver())

    def _cause(self) -> Cause:
        return self.cause or Cause("handoff_failed", "prefill ended the room without giving a cause", leg="prefill")
