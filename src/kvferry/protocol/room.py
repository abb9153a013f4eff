"""The room machine: one attempt's handoff, from first contact to last release.

Once decode has been opened, only decode can say that the handoff failed: a failure found elsewhere (prefill lost
or failed, a clock) makes the room *settle*, that is, ask decode, which answers Committed if it had committed.
`open_legs` are the legs that have not ended; when none is left, the room ends.

Under prefill_complete prefill computes before decode allocates: the room waits for prefill first, for admission then,
and passes prefill's word on to decode. It follows `OpenDecode` on the same link, so decode has the room when it comes;
sent from prefill to decode, it could be there first.
"""

from __future__ import annotations

from enum import auto
from typing import Any, ClassVar

import msgspec

from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Clocks, Limits, Wait, admission_wait
from kvferry.protocol.errors import Cause
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.machine import IGNORED, REFUSED, Cell, Go, Machine, Symbol, Table
from kvferry.protocol.messages import Abort, Message, OpenDecode, OpenPrefill, PrefillDone
from kvferry.protocol.rank import Member
from kvferry.protocol.request import RequestSpec

PREFILL = "prefill"
DECODE = "decode"


class RoomState(Symbol):
    NEW = auto()
    OPENING_PREFILL = auto()
    OPENING_DECODE = auto()
    BOOTSTRAPPED = auto()  # both legs hold the room; decode has not admitted it
    AWAITING_INPUT = auto()  # the destination is out; nothing has been written
    TRANSFERRING = auto()
    SETTLING = auto()  # something failed; decode's verdict is awaited
    COMMITTED = auto()  # decode has committed; prefill is still to drain
    ABORTING = auto()  # failed; a leg is still to answer
    SUCCEEDED = auto()
    FAILED = auto()


class RoomEvent(Symbol):
    START = auto()
    OPENED_PREFILL = auto()
    OPENED_DECODE = auto()
    ADMITTED = auto()
    PROGRESS = auto()
    SENDING = auto()  # a write of the room's pages is posted
    PREFILL_DONE = auto()
    PREFILL_KEPT = auto()  # prefill_complete: the prompt is computed, and decode is to be told
    DRAINED = auto()  # all source ranks have drained
    RECEIVED = auto()
    COMMITTED = auto()
    PREFILL_FAILED = auto()
    PREFILL_LOST = auto()
    PREFILL_STOPPED = auto()  # acked an abort, or does not know the room
    DECODE_FAILED = auto()
    DECODE_LOST = auto()
    DECODE_STOPPED = auto()
    ABORT_REQUESTED = auto()
    EXPIRED = auto()
    LEGS_ENDED = auto()  # internal: no leg is open any more


R, V = RoomState, RoomEvent
_FAILURES = (V.PREFILL_FAILED, V.PREFILL_LOST, V.DECODE_FAILED, V.DECODE_LOST, V.EXPIRED)
_NEWS = (V.PROGRESS, V.RECEIVED, V.PREFILL_DONE)


def _row(base: Cell[RoomState], **cells: Cell[RoomState]) -> dict[RoomEvent, Cell[RoomState]]:
    return {event: cells.get(event.name, base) for event in RoomEvent}


def _handoff(**cells: Cell[RoomState]) -> dict[RoomEvent, Cell[RoomState]]:
    """A state in which decode is open and may still commit."""
    settle, failed = Go(R.SETTLING, "settle"), Go(R.ABORTING, "decode_gone")
    common: dict[str, Cell[RoomState]] = {
        "PROGRESS": IGNORED, "RECEIVED": IGNORED, "PREFILL_DONE": IGNORED, "DRAINED": IGNORED,
        "OPENED_PREFILL": IGNORED,
        "SENDING": Go(R.TRANSFERRING, "transferring"), "COMMITTED": Go(R.COMMITTED, "succeed"),
        "PREFILL_FAILED": settle, "PREFILL_LOST": settle, "PREFILL_STOPPED": settle, "EXPIRED": settle,
        "DECODE_FAILED": failed, "DECODE_LOST": failed, "DECODE_STOPPED": failed,
        "ABORT_REQUESTED": Go(R.ABORTING, "abort"), "LEGS_ENDED": IGNORED,
    }  # fmt: skip
    return _row(REFUSED, **{**common, **cells})


_EARLY_FAIL = Go(R.ABORTING, "fail_early")
TABLE: Table[RoomState, RoomEvent] = {
    R.NEW: _row(REFUSED, START=Go(R.OPENING_PREFILL, "open_prefill")),
    R.OPENING_PREFILL: _row(
        REFUSED,
        OPENED_PREFILL=Go(R.OPENING_DECODE, "open_decode"),
        **{event.name: _EARLY_FAIL for event in _FAILURES},
        **{event.name: IGNORED for event in _NEWS},
        PREFILL_STOPPED=_EARLY_FAIL,
        ABORT_REQUESTED=_EARLY_FAIL,
    ),
    R.OPENING_DECODE: _handoff(
        OPENED_DECODE=Go(R.BOOTSTRAPPED, "bootstrapped"),
        COMMITTED=REFUSED,
        PREFILL_KEPT=Go(R.OPENING_DECODE, "pass_on"),
    ),
    R.BOOTSTRAPPED: _handoff(
        ADMITTED=Go(R.AWAITING_INPUT, "await_input"),
        OPENED_DECODE=IGNORED,
        PREFILL_KEPT=Go(R.BOOTSTRAPPED, "pass_on"),
    ),
    R.AWAITING_INPUT: _handoff(OPENED_DECODE=IGNORED),
    R.TRANSFERRING: _handoff(SENDING=IGNORED, ADMITTED=IGNORED, OPENED_DECODE=IGNORED),
    R.SETTLING: _row(
        IGNORED,
        START=REFUSED,
        COMMITTED=Go(R.COMMITTED, "succeed"),
        DECODE_FAILED=Go(R.ABORTING, "resolve_failed"),
        DECODE_LOST=Go(R.ABORTING, "resolve_failed"),
        DECODE_STOPPED=Go(R.ABORTING, "resolve_failed"),
        ABORT_REQUESTED=Go(R.ABORTING, "abort"),
        EXPIRED=Go(R.ABORTING, "abort"),
    ),
    R.COMMITTED: _row(
        IGNORED,
        START=REFUSED,
        ABORT_REQUESTED=Go(R.COMMITTED, "stop_running"),
        LEGS_ENDED=Go(R.SUCCEEDED, "end"),
        EXPIRED=Go(R.SUCCEEDED, "end"),
    ),
    R.ABORTING: _row(
        IGNORED,
        START=REFUSED,
        LEGS_ENDED=Go(R.FAILED, "end"),
        EXPIRED=Go(R.FAILED, "end"),
    ),
    R.SUCCEEDED: _row(IGNORED, START=REFUSED),
    R.FAILED: _row(IGNORED, START=REFUSED),
}

#: A room's KVPoll by its state; SETTLING keeps what it was (the failure is not decided yet).
KVPOLL: dict[RoomState, KVPoll | None] = {
    R.NEW: KVPoll.BOOTSTRAPPING,
    R.OPENING_PREFILL: KVPoll.BOOTSTRAPPING,
    R.OPENING_DECODE: KVPoll.BOOTSTRAPPING,
    R.BOOTSTRAPPED: KVPoll.BOOTSTRAPPING,
    R.AWAITING_INPUT: KVPoll.WAITING_FOR_INPUT,
    R.TRANSFERRING: KVPoll.TRANSFERRING,
    R.SETTLING: None,
    R.COMMITTED: KVPoll.SUCCESS,
    R.ABORTING: KVPoll.FAILED,
    R.SUCCEEDED: KVPoll.SUCCESS,
    R.FAILED: KVPoll.FAILED,
}

_ENDS_LEG = {
    V.DRAINED: PREFILL, V.PREFILL_FAILED: PREFILL, V.PREFILL_LOST: PREFILL, V.PREFILL_STOPPED: PREFILL,
    V.COMMITTED: DECODE, V.DECODE_FAILED: DECODE, V.DECODE_LOST: DECODE, V.DECODE_STOPPED: DECODE,
}  # fmt: skip


class SendLeg(msgspec.Struct, frozen=True):
    """Send `message` to the leader of `leg`."""

    leg: str
    message: Message


class Resolve(msgspec.Struct, frozen=True):
    """Answer the front: `cause` None means that decode has committed."""

    cause: Cause | None


class End(msgspec.Struct, frozen=True):
    """The room is over; its actor may be forgotten."""


class RoomMachine(Machine[RoomState, RoomEvent]):
    """Events in, commands (`SendLeg`, `Resolve`, `End`) out. One of `Resolve` and one of `End` per room.
    `computes_first`: the policy is prefill_complete. `sources` are prefill's ranks, where there are several.
    """

    TABLE: ClassVar[Any] = TABLE
    LOCAL = frozenset({V.START, V.ABORT_REQUESTED})

    def __init__(
        self,
        room: int,
        attempt: int,
        spec: RequestSpec,
        prefill: Address,
        decode: Address,
        limits: Limits,
        now_s: float,
        computes_first: bool = False,
        sources: tuple[Member, ...] = (),
    ) -> None:
        super().__init__(R.NEW)
        self._computes_first, self._kept = computes_first, False
        self.room, self.attempt, self.spec, self.sources = room, attempt, spec, sources
        self.prefill, self.decode = prefill, decode
        self.clocks = Clocks(limits, now_s)
        self.kvpoll = KVPoll.BOOTSTRAPPING
        self.open_legs: set[str] = set()
        self.cause: Cause | None = None
        self.now_s = now_s
        self._resolved = False

    def handle(self, event: RoomEvent, now_s: float, cause: Cause | None = None) -> list[SendLeg | Resolve | End]:
        """Apply one event. `cause` goes with failures and aborts; the first one is kept, later ones are ignored."""
        if self.refuses(event):
            return self.fire(event)
        self.now_s = now_s
        if cause is not None and self.cause is None and self.state not in (R.COMMITTED, R.SUCCEEDED):
            self.cause = cause
        self.open_legs.discard(_ENDS_LEG.get(event, ""))
        commands = self.fire(event)
        known = KVPOLL[self.state]
        self.kvpoll = self.kvpoll if known is None else known
        return commands

    def after(self) -> RoomEvent | None:
        ends = self.state in (R.COMMITTED, R.ABORTING) and not self.open_legs
        return V.LEGS_ENDED if ends else None

    def _open_prefill(self) -> None:
        self.open_legs.add(PREFILL)
        self.clocks.wait(None, self.now_s)
        self.commands.append(SendLeg(PREFILL, OpenPrefill(self.room, self.attempt, self.spec, self.decode)))

    def _open_decode(self) -> None:
        self.open_legs.add(DECODE)
        self.clocks.progress(self.now_s)
        message = OpenDecode(self.room, self.attempt, self.spec, self.prefill, self.sources)
        self.commands.append(SendLeg(DECODE, message))

    def _bootstrapped(self) -> None:
        prefill_first = self._computes_first and not self._kept
        self.clocks.wait(Wait.PREFILL if prefill_first else admission_wait(self.spec.was_admitted), self.now_s)

    def _pass_on(self) -> None:
        self._kept = True
        self.commands.append(SendLeg(DECODE, PrefillDone(self.room, 0)))
        if self.state is R.BOOTSTRAPPED:
            self._bootstrapped()

    def _await_input(self) -> None:
        self.clocks.wait(Wait.TRANSFER if self._computes_first else Wait.PREFILL, self.now_s)

    def _transferring(self) -> None:
        self.clocks.wait(Wait.TRANSFER, self.now_s)

    def _fail_early(self) -> None:
        self._abort_legs(stop_running=True)
        self._resolve_failed()

    def _settle(self) -> None:
        self.clocks.wait(None, self.now_s)
        self._abort_legs(stop_running=False)

    def _decode_gone(self) -> None:
        self._abort_legs(stop_running=False)
        self._resolve_failed()

    def _abort(self) -> None:
        self._abort_legs(stop_running=True)
        self._resolve_failed()

    def _stop_running(self) -> None:
        cause = self.cause or Cause("aborted", "the client has gone", leg="front", room=self.room)
        self.commands.append(SendLeg(DECODE, Abort(self.room, cause, stop_running=True)))

    def _abort_legs(self, stop_running: bool) -> None:
        cause = self._cause()
        for leg in sorted(self.open_legs):
            self.commands.append(SendLeg(leg, Abort(self.room, cause, stop_running)))

    def _resolve_failed(self) -> None:
        self.clocks.wait(None, self.now_s)
        self._resolve(self._cause())

    def _succeed(self) -> None:
        self.cause = None
        self.clocks.wait(None, self.now_s)
        self._resolve(None)

    def _resolve(self, cause: Cause | None) -> None:
        if not self._resolved:
            self._resolved = True
            self.commands.append(Resolve(cause))

    def _end(self) -> None:
        self.clocks.stop()
        self.commands.append(End())

    def _cause(self) -> Cause:
        return self.cause or Cause("handoff_failed", "a leg ended the room without giving a cause", room=self.room)
