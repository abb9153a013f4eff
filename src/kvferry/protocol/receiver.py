"""The receiver machine: one room at decode's leader, from open until its pages are free.

Commit is this machine's alone: it happens when every source rank's notification is in and the checks have passed.
With the last notification all is written, and nobody can write any more: from there on prefill may go, and the room
only waits for its checks (*checking*). What they find before that ends it at once.
A room that fails after its destination was handed out keeps its pages until there is proof about every rank that may
write to them: its ack, the end of its process, or the end of the agent that it wrote through. A running request may be
*retracted* for older ones; one that receives never is, since a peer still writes to its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import auto
from typing import Any, ClassVar

from kvferry.protocol.errors import Cause
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.machine import IGNORED, REFUSED, Cell, Go, Machine, Symbol, Table
from kvferry.protocol.receiver_commands import AbortWriter as AbortWriter
from kvferry.protocol.receiver_commands import Ack as Ack
from kvferry.protocol.receiver_commands import AnswerCommitted as AnswerCommitted
from kvferry.protocol.receiver_commands import Check as Check
from kvferry.protocol.receiver_commands import Commit as Commit
from kvferry.protocol.receiver_commands import HandOut as HandOut
from kvferry.protocol.receiver_commands import LeaveBatch as LeaveBatch
from kvferry.protocol.receiver_commands import LineUp as LineUp
from kvferry.protocol.receiver_commands import NoteReceived as NoteReceived
from kvferry.protocol.receiver_commands import ReceiverCommand as ReceiverCommand
from kvferry.protocol.receiver_commands import Release as Release
from kvferry.protocol.receiver_commands import Report as Report
from kvferry.protocol.receiver_commands import Retract as Retract


class ReceiverState(Symbol):
    AWAITING_PREFILL = auto()  # prefill_complete: the prompt is not computed; no candidate for admission
    QUEUED = auto()  # waiting for admission; nothing allocated
    RECEIVING = auto()  # the destination is out: peers may write
    CHECKING = auto()  # all is written; the checks are not all done
    RUNNING = auto()  # committed
    RELEASING = auto()  # failed; the pages wait for proof
    STOPPING = auto()  # committed, then finished, stopped or retracted; a forward may still name the pages
    DONE = auto()
    ENDED = auto()  # failed, nothing left


class ReceiverEvent(Symbol):
    PREFILL_DONE = auto()  # prefill_complete: the prompt is computed
    ADMIT = auto()
    RECEIVED = auto()  # one source rank's notification
    ALL_RECEIVED = auto()  # the last one
    CHECKED = auto()  # the checks have passed
    CHECK_FAILED = auto()
    DRAINED = auto()  # a source rank has drained having written everything
    DRAINED_SHORT = auto()  # a source rank has drained without having written everything
    UNKNOWN = auto()  # a source rank does not know the room: counts as drained
    ABORT = auto()  # by the room, for a failure elsewhere
    ABORT_RUNNING = auto()  # by the room: the client has gone
    STOP = auto()  # by the front
    ROOM_LOST = auto()
    PREFILL_LOST = auto()
    PREFILL_EXITED = auto()  # proof that a process of prefill has ended
    REVOKED = auto()  # proof that the agent which prefill writes through is gone
    FRONT_LOST = auto()
    EXPIRED = auto()
    FAIL = auto()  # the engine or the data plane refused
    FINISHED = auto()  # a stop rule holds
    RETRACT = auto()  # older requests need the pages
    PROVEN = auto()  # internal: nobody can write to the pages any more
    QUIET = auto()  # internal: no forward names the pages any more


S, V = ReceiverState, ReceiverEvent
_OPEN = (S.AWAITING_PREFILL, S.QUEUED, S.RECEIVING, S.CHECKING)
_LATE_NEWS = (V.DRAINED, V.DRAINED_SHORT, V.UNKNOWN, V.RECEIVED, V.PREFILL_LOST, V.PREFILL_EXITED, V.REVOKED)
Row = dict[ReceiverEvent, Cell[ReceiverState]]


def _row(base: Cell[ReceiverState], *rows: dict[str, Cell[ReceiverState]], **cells: Cell[ReceiverState]) -> Row:
    filled = {name: cell for row in (*rows, cells) for name, cell in row.items()}
    return {event: filled.get(event.name, base) for event in ReceiverEvent}


def _ends(to: ReceiverState, told: str, found: str) -> dict[str, Cell[ReceiverState]]:
    """`told`: the room or its router ended it. `found`: decode finds the failure and reports it."""
    tellers = (V.ABORT, V.ABORT_RUNNING, V.ROOM_LOST)
    finders = (V.STOP, V.FRONT_LOST, V.EXPIRED, V.FAIL, V.PREFILL_LOST, V.PREFILL_EXITED, V.REVOKED)
    row: dict[str, Cell[ReceiverState]] = {event.name: Go(to, told) for event in tellers}
    row.update({event.name: Go(to, found) for event in finders})
    return row


TABLE: Table[ReceiverState, ReceiverEvent] = {
    S.AWAITING_PREFILL: _row(
        REFUSED,
        _ends(S.ENDED, "ack_and_end", "report_and_end"),
        PREFILL_DONE=Go(S.QUEUED, "line_up"),
        DRAINED_SHORT=IGNORED,
        UNKNOWN=Go(S.ENDED, "report_and_end"),
    ),
    S.QUEUED: _row(
        REFUSED,
        _ends(S.ENDED, "ack_and_end", "report_and_end"),
        ADMIT=Go(S.RECEIVING, "hand_out"),
        DRAINED=IGNORED,
        DRAINED_SHORT=IGNORED,
        UNKNOWN=Go(S.ENDED, "report_and_end"),
    ),
    S.RECEIVING: _row(
        REFUSED,
        _ends(S.RELEASING, "ack_and_abort", "report_and_abort"),
        RECEIVED=Go(S.RECEIVING, "note_received"),
        ALL_RECEIVED=Go(S.CHECKING, "check"),
        CHECK_FAILED=Go(S.RELEASING, "report_and_abort"),
        DRAINED=Go(S.RECEIVING),
        # One rank's end: the others may still write, and must be told.
        DRAINED_SHORT=Go(S.RELEASING, "report_and_abort"),
        UNKNOWN=Go(S.RELEASING, "report_and_abort"),
    ),
    S.CHECKING: _row(
        REFUSED,
        _ends(S.RELEASING, "ack_and_abort", "report_and_abort"),
        # Nothing that prefill still says, and no end of it, changes what lies here.
        {event.name: IGNORED for event in _LATE_NEWS},
        ABORT=IGNORED,  # the room asks whether we have committed: what the checks find is the answer
        CHECKED=Go(S.RUNNING, "commit"),
        CHECK_FAILED=Go(S.RELEASING, "report_and_abort"),
    ),
    S.RUNNING: _row(
        IGNORED,
        ADMIT=REFUSED,
        ALL_RECEIVED=REFUSED,
        CHECKED=REFUSED,
        CHECK_FAILED=REFUSED,
        ABORT=Go(S.RUNNING, "answer_committed"),
        ABORT_RUNNING=Go(S.STOPPING, "stop_running"),
        STOP=Go(S.STOPPING, "leave_batch"),
        FRONT_LOST=Go(S.STOPPING, "leave_batch"),
        FAIL=Go(S.STOPPING, "leave_batch"),
        FINISHED=Go(S.STOPPING, "leave_batch"),
        RETRACT=Go(S.STOPPING, "retract"),
        PROVEN=REFUSED,
        QUIET=REFUSED,
    ),
    S.RELEASING: _row(
        IGNORED,
        ADMIT=REFUSED,
        FINISHED=REFUSED,
        RETRACT=REFUSED,
        ALL_RECEIVED=IGNORED,  # a notification after an abort counts as drained, no more
        CHECKED=REFUSED,
        ABORT=Go(S.RELEASING, "ack"),
        ABORT_RUNNING=Go(S.RELEASING, "ack"),
        PROVEN=Go(S.ENDED, "release"),
        QUIET=REFUSED,
    ),
    S.STOPPING: _row(
        IGNORED,
        ADMIT=REFUSED,
        RETRACT=REFUSED,
        ABORT=Go(S.STOPPING, "answer_committed"),
        ABORT_RUNNING=Go(S.STOPPING, "answer_committed"),
        QUIET=Go(S.DONE, "release"),
    ),
    S.DONE: _row(IGNORED, ADMIT=REFUSED, FINISHED=REFUSED, RETRACT=REFUSED, PROVEN=REFUSED),
    S.ENDED: _row(IGNORED, ADMIT=REFUSED, FINISHED=REFUSED, RETRACT=REFUSED, QUIET=REFUSED),
}

_KVPOLL = {
    S.AWAITING_PREFILL: KVPoll.BOOTSTRAPPING,
    S.QUEUED: KVPoll.BOOTSTRAPPING,
    S.RECEIVING: KVPoll.WAITING_FOR_INPUT,
    S.CHECKING: KVPoll.TRANSFERRING,
    S.RUNNING: KVPoll.SUCCESS,
    S.RELEASING: KVPoll.FAILED,
    S.STOPPING: KVPoll.SUCCESS,
    S.DONE: KVPoll.SUCCESS,
    S.ENDED: KVPoll.FAILED,
}


class ReceiverMachine(Machine[ReceiverState, ReceiverEvent]):
    """Events in, `ReceiverCommand`s out. `writers` are the ranks that may write (rank -> incarnation of its process);
    `acks`, `exited`, `revoked` and `stepping` are what proof depends on. `computes_first`: the policy is
    prefill_complete.
    """

    TABLE: ClassVar[Any] = TABLE
    LOCAL = frozenset({V.ADMIT, V.FINISHED, V.RETRACT, V.ALL_RECEIVED, V.CHECKED, V.CHECK_FAILED})

    def __init__(self, writers: Mapping[int, int], computes_first: bool = False) -> None:
        super().__init__(S.AWAITING_PREFILL if computes_first else S.QUEUED)
        self.writers = dict(writers)
        self.received: set[int] = set()
        self.acks: set[int] = set()
        self.exited: set[int] = set()
        self.revoked: set[int] = set()
        self.transferring = False
        self.stepping = False
        self.cause: Cause | None = None
        self._rank = 0

    @property
    def kvpoll(self) -> KVPoll:
        if self.state is S.RECEIVING and (self.transferring or self.received):
            return KVPoll.TRANSFERRING
        return _KVPOLL[self.state]

    @property
    def required_acks(self) -> frozenset[int]:
        return frozenset(self.writers)

    @property
    def not_quiet(self) -> set[int]:
        """The processes that may write, and of which there is no proof that they won't any more."""
        return {self.writers[rank] for rank in self.unproven}

    @property
    def quiet(self) -> bool:
        return not self.unproven

    def handle(self, event: ReceiverEvent, cause: Cause | None = None) -> list[ReceiverCommand]:
        """Apply an event. `cause` goes with every event that ends the room; the first is kept."""
        if self.refuses(event):
            return self.fire(event)
        changes = TABLE[self.state][event] is not IGNORED
        if cause is not None and self.cause is None and self.state in _OPEN and changes:
            self.cause = cause
        return self.fire(event)

    def writer_exited(self, incarnation: int, cause: Cause | None = None) -> list[ReceiverCommand]:
        """The kernel says that this process of prefill has ended, and the transport makes that proof."""
        self.exited.add(incarnation)
        return self.handle(V.PREFILL_EXITED, cause)

    def writer_revoked(self, incarnation: int, cause: Cause | None = None) -> list[ReceiverCommand]:
        """The agent that this process of prefill wrote through has been destroyed."""
        self.revoked.add(incarnation)
        return self.handle(V.REVOKED, cause)

    def rank_received(self, rank: int) -> list[ReceiverCommand]:
        """A source rank's notification: its last write is flushed, so it also counts as the rank's ack."""
        if self.refuses(V.RECEIVED):  # nothing was handed out, so it can't be about this room's pages
            return self.fire(V.RECEIVED)
        self.acks.add(rank)
        if rank not in self.received and self.state is S.RECEIVING:
            self.received.add(rank)
        self._rank = rank
        return self.fire(V.RECEIVED)

    def rank_drained(self, rank: int, complete: bool, cause: Cause | None = None) -> list[ReceiverCommand]:
        """A source rank says that its writes are flushed or will never be posted."""
        self.acks.add(rank)
        return self.handle(V.DRAINED if complete else V.DRAINED_SHORT, None if complete else cause)

    def rank_unknown(self, rank: int, cause: Cause | None = None) -> list[ReceiverCommand]:
        """A source rank does not know the room: its writes have ended, or there will be none."""
        self.acks.add(rank)
        return self.handle(V.UNKNOWN, cause)

    @property
    def unproven(self) -> list[int]:
        """The ranks that may still write: no ack, and no proof about their process."""
        gone = self.exited | self.revoked
        writers = sorted(self.writers.items())
        return [rank for rank, incarnation in writers if rank not in self.acks and incarnation not in gone]

    @property
    def all_received(self) -> bool:
        """Every required rank's notification is in: the caller fires ALL_RECEIVED."""
        return self.state is S.RECEIVING and self.received >= self.writers.keys()

    def never_given(self) -> list[ReceiverCommand]:
        """The destination of a room that has failed had not left: nobody has anything to drain."""
        if self.state is not S.RELEASING:
            return []
        self.acks |= self.required_acks
        return self.fire(V.PROVEN)

    def step_started(self) -> None:
        self.stepping = True

    def step_ended(self) -> list[ReceiverCommand]:
        self.stepping = False
        internal = self.after()
        return self.fire(internal) if internal is not None else []

    def after(self) -> ReceiverEvent | None:
        if self.state is S.RELEASING and self.quiet:
            return V.PROVEN
        if self.state is S.STOPPING and not self.stepping:
            return V.QUIET
        return None

    def _line_up(self) -> None:
        self.commands.append(LineUp())

    def _hand_out(self) -> None:
        self.commands.append(HandOut())

    def _note_received(self) -> None:
        self.commands.append(NoteReceived(self._rank))

    def _check(self) -> None:
        self.commands.append(Check())

    def _commit(self) -> None:
        self.commands.append(Commit())

    def _ack_and_end(self) -> None:
        self.commands += [Ack(), Release()]

    def _report_and_end(self) -> None:
        self.commands += [Report(self._cause()), Release()]

    def _ack_and_abort(self) -> None:
        self.commands += [Ack(), AbortWriter()]

    def _report_and_abort(self) -> None:
        self.commands += [Report(self._cause()), AbortWriter()]

    def _ack(self) -> None:
        self.commands.append(Ack())

    def _answer_committed(self) -> None:
        self.commands.append(AnswerCommitted())

    def _stop_running(self) -> None:
        self.commands += [AnswerCommitted(), LeaveBatch()]

    def _leave_batch(self) -> None:
        self.commands.append(LeaveBatch())

    def _retract(self) -> None:
        self.commands += [Retract(), LeaveBatch()]

    def _release(self) -> None:
        self.commands.append(Release())

    def _cause(self) -> Cause:
        return self.cause or Cause("handoff_failed", "decode ended the room without giving a cause", leg="decode")
