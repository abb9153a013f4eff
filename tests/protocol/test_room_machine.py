"""The room machine: its table is full, KVPoll only rises or fails, and every room resolves once and ends once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Limits
from kvferry.protocol.errors import Cause, IllegalEvent
from kvferry.protocol.kvpoll import KVPoll, combined
from kvferry.protocol.machine import Verdict, as_markdown, holes
from kvferry.protocol.messages import Abort, OpenDecode, OpenPrefill, PrefillDone
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.protocol.room import DECODE, PREFILL, TABLE, End, Resolve, RoomEvent, RoomMachine, RoomState, SendLeg

LIMITS = Limits(admission_s=10, prefill_s=20, transfer_s=30, no_progress_s=5)
Command = SendLeg | Resolve | End
V, R = RoomEvent, RoomState
LATE = Cause("handoff_failed", "the test says so")

#: Anything that may reach a room after its start, in whatever order links deliver it.
NEWS = [event for event in RoomEvent if event not in (V.START, V.LEGS_ENDED)]


def address(name: str, incarnation: int) -> Address:
    return Address(name, f"sim://{name}", incarnation, "host", incarnation)


def machine(computes_first: bool = False, prefer: int = 0) -> RoomMachine:
    spec = RequestSpec(7, (1, 2, 3), Sampling(max_tokens=4), address("front", 1), prefer=prefer)
    return RoomMachine(99, 0, spec, address("prefill", 2), address("decode", 3), LIMITS, 0.0, computes_first)


class Watched:
    """A room machine whose promises are checked at every event."""

    def __init__(self) -> None:
        self.machine = machine()
        self.commands: list[Command] = []
        self.fire(V.START)

    def fire(self, event: RoomEvent, cause: Cause | None = None) -> list[Command]:
        before, had_ended = self.machine.kvpoll, self.ended
        new = list(self.machine.handle(event, 0.0, cause))
        self.commands += new
        after = self.machine.kvpoll
        assert after is KVPoll.FAILED or after >= before, (event, before, after)
        assert before not in (KVPoll.FAILED, KVPoll.SUCCESS) or after is before
        assert not (had_ended and new), "an ended room is silent"
        assert len(self.resolved) <= 1 and self.commands.count(End()) <= 1
        assert not self.ended or self.resolved, "a room answers before it ends"
        return new

    @property
    def ended(self) -> bool:
        return End() in self.commands

    @property
    def resolved(self) -> list[Cause | None]:
        return [command.cause for command in self.commands if isinstance(command, Resolve)]

    def aborts(self) -> dict[str, Abort]:
        found = [c for c in self.commands if isinstance(c, SendLeg) and isinstance(c.message, Abort)]
        return {command.leg: command.message for command in found if isinstance(command.message, Abort)}

    def to(self, *events: RoomEvent) -> Watched:
        for event in events:
            self.fire(event)
        return self


def test_every_cell_of_the_table_is_filled() -> None:
    assert holes(TABLE, RoomState, RoomEvent) == []
    printed = as_markdown(TABLE)
    assert all(state.name in printed for state in RoomState)


def test_a_room_from_start_to_success() -> None:
    room = Watched()
    assert [type(c.message) for c in room.commands if isinstance(c, SendLeg)] == [OpenPrefill]
    (opened,) = room.fire(V.OPENED_PREFILL)
    assert isinstance(opened, SendLeg) and isinstance(opened.message, OpenDecode)
    polls = [room.machine.kvpoll]
    for event in (V.OPENED_DECODE, V.ADMITTED, V.SENDING, V.PREFILL_DONE, V.DRAINED, V.RECEIVED):
        assert room.fire(event) == []
        polls.append(room.machine.kvpoll)
    assert room.fire(V.COMMITTED) == [Resolve(None), End()]
    assert polls == [KVPoll.BOOTSTRAPPING, KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT] + 4 * [KVPoll.TRANSFERRING]
    assert room.machine.state is R.SUCCEEDED and room.machine.kvpoll is KVPoll.SUCCESS


def test_commit_before_prefill_has_drained_waits_for_it() -> None:
    room = Watched().to(V.OPENED_PREFILL, V.OPENED_DECODE, V.ADMITTED, V.SENDING)
    assert room.fire(V.COMMITTED) == [Resolve(None)]
    assert room.fire(V.DRAINED) == [End()]


HANDOFF = {
    R.OPENING_DECODE: (V.OPENED_PREFILL,),
    R.BOOTSTRAPPED: (V.OPENED_PREFILL, V.OPENED_DECODE),
    R.AWAITING_INPUT: (V.OPENED_PREFILL, V.OPENED_DECODE, V.ADMITTED),
    R.TRANSFERRING: (V.OPENED_PREFILL, V.OPENED_DECODE, V.ADMITTED, V.SENDING),
}


@pytest.mark.parametrize("state", HANDOFF)
@pytest.mark.parametrize("event", [V.PREFILL_FAILED, V.PREFILL_LOST, V.PREFILL_STOPPED, V.EXPIRED])
def test_a_failure_found_elsewhere_is_settled_by_decode(state: RoomState, event: RoomEvent) -> None:
    """Only decode knows whether it had committed: the client is told nothing before it has answered."""
    room = Watched().to(*HANDOFF[state])
    assert room.machine.state is state
    poll = room.machine.kvpoll
    room.fire(event, LATE)
    assert room.machine.state is R.SETTLING and room.resolved == [] and room.machine.kvpoll is poll
    assert room.aborts()[DECODE] == Abort(99, LATE, stop_running=False)
    assert (PREFILL in room.aborts()) == (event is V.EXPIRED), "a leg that has ended is not aborted"


@pytest.mark.parametrize("event", [V.DECODE_FAILED, V.DECODE_LOST, V.DECODE_STOPPED])
def test_settling_ends_by_decodes_word(event: RoomEvent) -> None:
    room = Watched().to(*HANDOFF[R.TRANSFERRING])
    room.fire(V.PREFILL_LOST, LATE)
    room.fire(event, Cause("peer_lost", "a later cause"))
    assert room.resolved == [LATE] and room.ended, "the first cause is the client's"


def test_settling_ends_well_when_decode_had_committed() -> None:
    """Losing prefill after the last notification is no failure, whatever order the news comes in."""
    room = Watched().to(*HANDOFF[R.TRANSFERRING])
    room.fire(V.PREFILL_LOST, LATE)
    assert room.fire(V.COMMITTED) == [Resolve(None), End()]
    assert room.machine.cause is None


@pytest.mark.parametrize("state", HANDOFF)
@pytest.mark.parametrize("event", [V.DECODE_FAILED, V.DECODE_LOST, V.DECODE_STOPPED])
def test_decodes_failure_ends_prefill_at_once(state: RoomState, event: RoomEvent) -> None:
    room = Watched().to(*HANDOFF[state])
    room.fire(event, LATE)
    assert room.resolved == [LATE] and not room.ended
    assert list(room.aborts()) == [PREFILL] and room.aborts()[PREFILL].cause == LATE
    assert room.fire(V.PREFILL_STOPPED) == [End()]


def test_an_abort_after_commit_stops_the_running_request_and_keeps_success() -> None:
    room = Watched().to(*HANDOFF[R.TRANSFERRING], V.COMMITTED)
    (command,) = room.fire(V.ABORT_REQUESTED, LATE)
    assert isinstance(command, SendLeg) and command.leg == DECODE
    assert isinstance(command.message, Abort) and command.message.stop_running
    assert room.machine.kvpoll is KVPoll.SUCCESS
    assert room.fire(V.PREFILL_LOST, LATE) == [End()]
    assert room.resolved == [None]


@pytest.mark.parametrize("state", [R.OPENING_PREFILL, *HANDOFF])
def test_an_abort_by_the_client_reaches_every_open_leg(state: RoomState) -> None:
    room = Watched().to(*HANDOFF.get(state, ()))
    room.fire(V.ABORT_REQUESTED, LATE)
    legs = [PREFILL] if state is R.OPENING_PREFILL else [DECODE, PREFILL]
    assert sorted(room.aborts()) == legs and all(abort.stop_running for abort in room.aborts().values())
    assert room.resolved == [LATE]


@pytest.mark.parametrize("legs", [(V.PREFILL_STOPPED, V.DECODE_STOPPED), (V.DECODE_STOPPED, V.PREFILL_STOPPED),
                                  (V.PREFILL_LOST, V.DECODE_LOST), (V.PREFILL_FAILED, V.COMMITTED)])  # fmt: skip
@settings(deadline=None)
@given(prefix=st.lists(st.sampled_from(NEWS), max_size=14))
def test_every_room_ends_once_both_legs_have_answered(
    legs: tuple[RoomEvent, RoomEvent], prefix: list[RoomEvent]
) -> None:
    """Random news in any order, then one word of each leg: the room has resolved once and ended once."""
    room = Watched().to(*prefix)
    if V.COMMITTED in legs and room.machine.state in (R.OPENING_PREFILL, R.OPENING_DECODE):
        return  # decode can't commit what it has not opened
    room.to(*legs)
    assert room.ended and len(room.resolved) == 1
    assert room.machine.state in (R.SUCCEEDED, R.FAILED)
    assert (room.resolved == [None]) == (room.machine.state is R.SUCCEEDED)


@settings(deadline=None)
@given(prefix=st.lists(st.sampled_from(NEWS), max_size=14))
def test_every_room_ends_by_its_clocks_alone(prefix: list[RoomEvent]) -> None:
    """Legs that never answer hold nothing up: at most three limits later the room is over."""
    assert Watched().to(*prefix, V.EXPIRED, V.EXPIRED, V.EXPIRED).ended


@settings(deadline=None)
@given(prefix=st.lists(st.sampled_from(NEWS), max_size=14))
def test_a_failed_room_has_told_every_leg_that_it_opened_and_that_has_not_ended(prefix: list[RoomEvent]) -> None:
    room = Watched().to(*prefix)
    if room.machine.state in (R.ABORTING, R.SETTLING):
        assert room.machine.open_legs <= set(room.aborts())


@settings(deadline=None)
@given(
    prefix=st.lists(st.sampled_from(NEWS), max_size=14), event=st.sampled_from(sorted(RoomEvent, key=lambda e: e.name))
)
def test_what_is_ignored_or_refused_changes_no_state_and_is_counted(prefix: list[RoomEvent], event: RoomEvent) -> None:
    room = Watched().to(*prefix)
    inner = room.machine
    cell, state, legs, cause = TABLE[inner.state][event], inner.state, set(inner.open_legs), inner.cause
    if not isinstance(cell, Verdict) or event in inner.LOCAL:
        return
    counted = inner.counts[(cell, state, event)]
    inner.handle(event, 0.0, LATE)
    assert inner.counts[(cell, state, event)] == counted + 1
    if cell is Verdict.REFUSED:
        assert (inner.state, inner.open_legs, inner.cause) == (state, legs, cause)


@pytest.mark.parametrize(
    ("events", "illegal"),
    [((), V.ABORT_REQUESTED), ((V.START,), V.START), ((V.START, V.OPENED_PREFILL), V.START),
     ((V.START, V.ABORT_REQUESTED, V.PREFILL_STOPPED), V.START)],
)  # fmt: skip
def test_a_local_illegal_event_raises_and_changes_nothing(events: tuple[RoomEvent, ...], illegal: RoomEvent) -> None:
    room = machine()
    for event in events:
        room.handle(event, 1.0)
    before = (room.state, room.kvpoll, set(room.open_legs), room.cause, room.now_s, dict(room.counts), room.commands)
    with pytest.raises(IllegalEvent, match=illegal.name):
        room.handle(illegal, 2.0, LATE)
    assert before == (
        room.state, room.kvpoll, set(room.open_legs), room.cause, room.now_s, dict(room.counts), room.commands,
    )  # fmt: skip


def waits(room: RoomMachine, *events: RoomEvent) -> list[tuple[str, float]]:
    """The clocks that run out when time stands still after each event, and their limits."""
    names = []
    room.handle(V.START, 0.0)
    for at_s, event in enumerate(events, 1):
        room.handle(event, at_s)
        for probe_s in range(100):
            room.clocks.progress(at_s + probe_s)
            if expiry := room.clocks.expired(at_s + probe_s):
                names.append((expiry.clock, expiry.elapsed_s))
                break
    return names


ADMISSION, PREFILLING, TRANSFER = (
    ("waiting for admission", 10.0), ("waiting for prefill", 20.0), ("waiting for transfer", 30.0),
)  # fmt: skip


def test_the_room_waits_with_the_clock_of_its_state() -> None:
    """From OPENED_DECODE the admission limit runs, from ADMITTED prefill's, from SENDING the transfer's."""
    found = waits(machine(), V.OPENED_PREFILL, V.OPENED_DECODE, V.ADMITTED, V.SENDING)
    assert found == [ADMISSION, PREFILLING, TRANSFER]


def test_under_prefill_complete_the_clocks_run_in_the_order_of_the_work() -> None:
    """Prefill's from the beginning, admission's once the prompt is computed, then the transfer's; whether prefill was
    ready before decode was open or not. A request that decode has retracted has no limit of waiting for its place.
    """
    slow = (V.OPENED_PREFILL, V.OPENED_DECODE, V.PREFILL_KEPT, V.ADMITTED, V.SENDING)
    assert waits(machine(True), *slow) == [PREFILLING, ADMISSION, TRANSFER, TRANSFER]
    quick = (V.OPENED_PREFILL, V.PREFILL_KEPT, V.OPENED_DECODE, V.ADMITTED)
    assert waits(machine(True), *quick) == [ADMISSION, TRANSFER]
    assert waits(machine(True, prefer=3), *slow) == [PREFILLING, TRANSFER, TRANSFER]


@pytest.mark.parametrize("events", [(V.OPENED_PREFILL,), (V.OPENED_PREFILL, V.OPENED_DECODE)])
def test_prefills_word_is_passed_on_to_decode_behind_its_opening(events: tuple[RoomEvent, ...]) -> None:
    room = Watched().to(*events)
    assert room.fire(V.PREFILL_KEPT) == [SendLeg(DECODE, PrefillDone(99, 0))]
    assert room.machine.kvpoll is KVPoll.BOOTSTRAPPING
    room.to(V.OPENED_DECODE, V.SENDING, V.ADMITTED)  # prefill's link may be the quicker one
    assert room.machine.kvpoll is KVPoll.TRANSFERRING
    room.fire(V.PREFILL_LOST, LATE)
    assert room.fire(V.PREFILL_KEPT) == [], "a room that settles has asked decode for its verdict"


def test_kvpoll_of_a_handoff_from_its_two_ends() -> None:
    f, b, w, t, s = KVPoll.FAILED, KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING, KVPoll.SUCCESS
    assert [int(value) for value in (f, b, w, t, s)] == [0, 1, 2, 3, 4]
    table = {  # rows: sender; columns: receiver f b w t s
        f: (f, f, f, f, s), b: (f, b, w, t, s), w: (f, w, w, t, s), t: (f, t, t, t, s), s: (f, t, t, t, s),
    }  # fmt: skip
    for sender, row in table.items():
        assert tuple(combined(sender, receiver) for receiver in (f, b, w, t, s)) == row
