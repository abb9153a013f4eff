"""Faults that were seen elsewhere, planted one at a time into the protocol, the ledger or the actors.

Each is a context manager that patches one cell, method or rule of the production classes, and says which checker has
to find it and in which model. `tests/sim/test_mutations.py` runs them all; `docs/exploration.md` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvferry.actors.decode.decode import Decode
from kvferry.actors.leader import Leader
from kvferry.actors.leaving import Leaving
from kvferry.actors.prefill.prefill import Prefill
from kvferry.memory.ledger import PageLedger
from kvferry.protocol import receiver, room, sender
from kvferry.protocol.clocks import Clocks
from kvferry.protocol.kvpoll import STICKY
from kvferry.protocol.machine import IGNORED, Go
from kvferry.protocol.messages import Abort, Drained
from kvferry.protocol.receiver import ReceiverEvent, ReceiverMachine, ReceiverState
from kvferry.protocol.room import RoomEvent, RoomState
from kvferry.protocol.sender import SenderEvent, SenderState
from kvferry.sim.explore.bounds import Bounds

#: One room, one fault: what most of them need to be seen.
ONE = Bounds(requests=1, prompt=True, faults=1)
TWO = Bounds(requests=2, prompt=True, faults=0)
#: Both rooms are received at once.
WIDE = replace(TWO, faults=1, kinds=("clock",), source_pages=2, pages=6, rows=2)
RANKS = Bounds(requests=1, prompt=True, faults=0, ranks=2)
LATE = replace(ONE, faults=2, kinds=("break", "clock"))
DRAIN = replace(ONE, faults=0, kinds=("drain",))


@dataclass(frozen=True)
class Mutation:
    """`number` in the list of faults seen elsewhere; `checker` must fire when `plant` is active within `bounds`."""

    number: int
    title: str
    checker: str
    bounds: Bounds
    plant: Callable[[], Any]


@contextmanager
def _patched(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a class, for a while."""
    before = {name: owner.__dict__[name] for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _cells(table: Any, cells: dict[tuple[Any, Any], Any]) -> Iterator[None]:
    """Cells of a machine's table, for a while."""
    before = {(state, event): table[state][event] for state, event in cells}
    for (state, event), cell in cells.items():
        table[state][event] = cell
    try:
        yield
    finally:
        for (state, event), cell in before.items():
            table[state][event] = cell


@contextmanager
def _all(*parts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part)
        yield


def _unchecked() -> Any:
    """The ledger believes every proof about peers."""
    return _patched(PageLedger, _check_peers=staticmethod(lambda *_: None))


def _late_write() -> Any:
    """Decode's pages are free as soon as decode has aborted."""
    return _all(_unchecked(), _patched(ReceiverMachine, quiet=property(lambda _: True)))


def _ack_target_dropped() -> Any:
    """A room that the router has aborted forgets its decode before it has drained: nobody there hears of it."""

    def tell_both(self: Prefill, room: Any, message: Any) -> None:
        if not (isinstance(message, Drained) and not message.complete):
            self.network.send(room.peer.incarnation, message)
        self.tell_room(room, message)

    return _patched(Leader, tell_both=tell_both)


def _one_ack_slot() -> Any:
    """An aborted room has one place for acks: the second rank's overwrites the first one's."""

    def rank_drained(self: ReceiverMachine, rank: int, complete: bool, cause: Any = None) -> Any:
        if not complete:
            self.acks.clear()
        return drained(self, rank, complete, cause)

    drained = ReceiverMachine.rank_drained
    return _patched(ReceiverMachine, rank_drained=rank_drained)


def _no_answer_for_a_cleared_room() -> Any:
    """An abort of a room that is not here any more is not answered."""
    return _patched(Leader, unknown_room=lambda *_: None)


def _others_failures_release() -> Any:
    """Only an abort of decode's own waits for the acks: when prefill is lost, the pages are free at once."""
    lost = receiver.V.PREFILL_LOST
    freed = Go(ReceiverState.ENDED, "report_and_end")
    return _all(_unchecked(), _cells(receiver.TABLE, {(ReceiverState.RECEIVING, lost): freed}))


def _source_freed_while_read() -> Any:
    """An aborted prefill room gives its pages back while its writes still read them."""
    act = Prefill.act

    def act_and_free(self: Prefill, room: Any, commands: list[Any]) -> None:
        act(self, room, commands)
        if any(isinstance(command, sender.Cancel) for command in commands) and not room.machine.stepping:
            self.free_pages(room)

    return _all(_unchecked(), _patched(Prefill, act=act_and_free))


def _leaks_before_the_destination() -> Any:
    """A prefill room whose decode dies before its first message is kept for ever: there is no transfer to end."""
    waiting = SenderState.AWAITING_DESTINATION
    events = (SenderEvent.DECODE_LOST, SenderEvent.DECODE_EXITED, SenderEvent.ABORT)
    return _cells(sender.TABLE, {(waiting, event): IGNORED for event in events})


def _cancel_reaches_decode_alone() -> Any:
    """A client's cancel ends decode's leg; prefill, which may be done and wait, is not told."""

    def abort(self: room.RoomMachine) -> None:
        self.commands.append(room.SendLeg(room.DECODE, Abort(self.room, self._cause(), True)))
        self._resolve_failed()

    return _patched(room.RoomMachine, _abort=abort)


def _one_clock_ends_all() -> Any:
    """A request whose clock runs out takes all others of its leader along."""

    def check(self: Any, now_s: float) -> None:
        expired = [kept for kept in self.leg_rooms() if kept.clocks.expired(now_s) is not None]
        for kept in self.leg_rooms() if expired else []:
            if kept.machine.kvpoll not in STICKY:
                self.fail(kept, self.EXPIRED, "a clock ran out", kept.peer.name, "deadline_exceeded")

    return _patched(Leader, _check_clocks=check)


def _a_timer_frees() -> Any:
    """Pages that wait for proof are free after a time."""

    def check(self: Any, now_s: float) -> None:
        for kept in self.leg_rooms():
            if kept.clocks.expired(now_s) is not None:
                self.fail(kept, self.EXPIRED, "a clock ran out", kept.peer.name, "deadline_exceeded")

    freed = {(ReceiverState.RELEASING, ReceiverEvent.EXPIRED): Go(ReceiverState.ENDED, "release")}
    return _all(
        _unchecked(), _patched(Clocks, stop=lambda _: None), _patched(Leader, _check_clocks=check),
        _cells(receiver.TABLE, freed),
    )  # fmt: skip


def _decode_waits_for_ever() -> Any:
    """Prefill fails, and nobody tells decode, which waits for KV that never comes."""
    states = (RoomState.OPENING_DECODE, RoomState.BOOTSTRAPPED, RoomState.AWAITING_INPUT, RoomState.TRANSFERRING)
    events = (RoomEvent.PREFILL_FAILED, RoomEvent.PREFILL_STOPPED)
    deaf = {(state, event): IGNORED for state in states for event in events}
    short = {(ReceiverState.RECEIVING, ReceiverEvent.DRAINED_SHORT): IGNORED}
    return _all(_cells(room.TABLE, deaf), _cells(receiver.TABLE, short))


def _leaves_before_it_is_read() -> Any:
    """Prefill says that it may go although its pages are still read."""
    begun = Leaving.time_is_over
    return _patched(Leaving, time_is_over=lambda self, idle, now_s: begun(self, True, now_s))


def _waits_without_a_limit() -> Any:
    """A room that waits for pages at decode has no clock."""
    opened = Decode.leg_opened

    def leg_opened(self: Decode, room: Any) -> None:
        room.clocks.stop()
        opened(self, room)

    return _patched(Decode, leg_opened=leg_opened)


MUTATIONS = (
    Mutation(1, "a late write lands in the next room's pages", "write-in-leased-page", ONE, _late_write),
    Mutation(2, "whom to ack is forgotten before the drain", "all-end", ONE, _ack_target_dropped),
    Mutation(3, "one place for acks, which the next overwrites", "all-end", RANKS, _one_ack_slot),
    Mutation(4, "an abort of a cleared room is never acked", "all-end", ONE, _no_answer_for_a_cleared_room),
    Mutation(5, "others' failures free at once", "write-in-leased-page", ONE, _others_failures_release),
    Mutation(6, "source pages are free while they are read", "read-from-held-page", ONE, _source_freed_while_read),
    Mutation(9, "a room leaks whose decode dies first", "all-end", ONE, _leaks_before_the_destination),
    Mutation(11, "a cancel keeps the blocks of prefill", "all-end", ONE, _cancel_reaches_decode_alone),
    Mutation(14, "one time-out ends all requests", "one-room-per-clock", WIDE, _one_clock_ends_all),
    Mutation(18, "a timer frees the pages", "write-in-leased-page", LATE, _a_timer_frees),
    Mutation(19, "decode waits for what never comes", "all-end", ONE, _decode_waits_for_ever),
    Mutation(20, "prefill leaves before its pages are read", "drain-loses-nothing", DRAIN, _leaves_before_it_is_read),
    Mutation(21, "a wait for pages without a limit", "clocks-run", ONE, _waits_without_a_limit),
)
