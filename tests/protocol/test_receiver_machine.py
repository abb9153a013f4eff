"""The receiver machine: pages are released on proof alone, and commit comes once or never."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol.errors import Cause, IllegalEvent
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.machine import holes
from kvferry.protocol.receiver import (
    TABLE,
    AbortWriter,
    Ack,
    AnswerCommitted,
    Check,
    Commit,
    HandOut,
    LeaveBatch,
    LineUp,
    NoteReceived,
    ReceiverCommand,
    ReceiverEvent,
    ReceiverMachine,
    ReceiverState,
    Release,
    Report,
    Retract,
)

V, S = ReceiverEvent, ReceiverState
WHY = Cause("handoff_failed", "the test says so")
PROCESSES = (0xA0, 0xA1, 0xA2)  # the incarnation of each rank
TOLD = (V.ABORT, V.ABORT_RUNNING, V.ROOM_LOST)
FOUND = (V.STOP, V.FRONT_LOST, V.EXPIRED, V.FAIL, V.PREFILL_LOST, V.PREFILL_EXITED, V.REVOKED)


class Driver:
    """Does what decode's actor does, and keeps its own account of who has acked."""

    def __init__(self, ranks: int = 1, computes_first: bool = False) -> None:
        self.ranks = frozenset(range(ranks))
        self.machine = ReceiverMachine({rank: PROCESSES[rank] for rank in self.ranks}, computes_first)
        self.acked: set[int] = set()
        self.gone: set[int] = set()  # ranks whose process has ended, or whose way here has
        self.running = False  # a forward names the pages
        self.log: list[ReceiverCommand] = []

    def take(self, before: KVPoll, commands: list[ReceiverCommand]) -> None:
        after = self.machine.kvpoll
        assert after is KVPoll.FAILED or after >= before
        assert before not in (KVPoll.FAILED, KVPoll.SUCCESS) or after is before
        for command in commands:
            assert not self.over, f"{command} after the room was forgotten"
            self.log.append(command)
            if command == Commit():
                assert not self.failed and HandOut() in self.log and self.acked >= self.ranks
            if command == Release():
                assert not self.running
                proven = HandOut() not in self.log or self.acked | self.gone >= self.ranks
                assert proven, "released without proof"

    @property
    def over(self) -> bool:
        return Release() in self.log

    @property
    def failed(self) -> bool:
        return any(isinstance(command, Report | AbortWriter) for command in self.log)

    def handle(self, event: ReceiverEvent) -> None:
        if event in (V.PREFILL_EXITED, V.REVOKED):
            for rank in sorted(self.ranks):
                self.ends(rank, event)
        if event is V.UNKNOWN:
            for rank in sorted(self.ranks):
                self.unknown(rank)
        if self.over or event in (V.PREFILL_EXITED, V.REVOKED, V.UNKNOWN):
            return
        cause = WHY if event in (*TOLD, *FOUND, V.CHECK_FAILED) else None
        self.take(self.machine.kvpoll, self.machine.handle(event, cause))

    def ends(self, rank: int, event: ReceiverEvent) -> None:
        """The process of one rank, or its way here."""
        if self.over:
            return
        self.gone.add(rank)
        ends = self.machine.writer_exited if event is V.PREFILL_EXITED else self.machine.writer_revoked
        self.take(self.machine.kvpoll, ends(PROCESSES[rank], WHY))

    def admit(self) -> None:
        if self.machine.state is S.QUEUED:
            self.handle(V.ADMIT)

    def received(self, rank: int, good: bool | None = True) -> None:
        """Notifications come only once the destination is out. `good`: what the checks find; None: they take longer."""
        if rank not in self.ranks or HandOut() not in self.log or self.over:
            return
        self.acked.add(rank)
        self.take(self.machine.kvpoll, self.machine.rank_received(rank))
        if self.machine.all_received:
            self.handle(V.ALL_RECEIVED)
            if good is not None:
                self.checked(good)

    def checked(self, good: bool) -> None:
        if self.machine.state is S.CHECKING:
            self.handle(V.CHECKED if good else V.CHECK_FAILED)

    def drained(self, rank: int, complete: bool) -> None:
        if rank in self.ranks and not self.over:
            self.acked.add(rank)
            self.take(self.machine.kvpoll, self.machine.rank_drained(rank, complete, WHY))

    def unknown(self, rank: int) -> None:
        if rank in self.ranks and not self.over:
            self.acked.add(rank)
            self.take(self.machine.kvpoll, self.machine.rank_unknown(rank, WHY))

    def start_step(self) -> None:
        if self.machine.state is S.RUNNING and not self.running:
            self.running = True
            self.machine.step_started()

    def end_step(self) -> None:
        if self.running:
            self.running = False
            self.take(self.machine.kvpoll, self.machine.step_ended())

    def retract(self) -> None:
        if self.machine.state is S.RUNNING:
            self.handle(V.RETRACT)

    def finish(self) -> None:
        if self.machine.state is S.RUNNING and not self.running:
            self.handle(V.FINISHED)


def receiving(ranks: int = 1) -> Driver:
    driver = Driver(ranks)
    driver.admit()
    return driver


def running() -> Driver:
    driver = receiving()
    driver.received(0)
    return driver


def test_every_cell_of_the_table_is_filled() -> None:
    assert holes(TABLE, ReceiverState, ReceiverEvent) == []


def test_two_ranks_from_open_to_done() -> None:
    driver = receiving(2)
    driver.received(1)
    assert driver.machine.kvpoll is KVPoll.TRANSFERRING
    driver.received(1)  # once more: it counts once
    assert Commit() not in driver.log
    driver.received(0)
    driver.start_step()
    driver.end_step()
    driver.finish()
    assert driver.log == [
        HandOut(), NoteReceived(1), NoteReceived(1), NoteReceived(0), Check(), Commit(), LeaveBatch(),
        Release(),
    ]  # fmt: skip


@pytest.mark.parametrize("event", (*TOLD, *FOUND, V.UNKNOWN))
def test_a_queued_room_ends_at_once(event: ReceiverEvent) -> None:
    """Also one whose prompt is not computed yet, under prefill_complete."""
    for driver in (Driver(), Driver(computes_first=True)):
        driver.handle(event)
        assert driver.log == [Ack() if event in TOLD else Report(WHY), Release()]


def test_under_prefill_complete_a_room_is_no_candidate_until_its_prompt_is_computed() -> None:
    driver = Driver(computes_first=True)
    with pytest.raises(IllegalEvent, match=r"ADMIT.*AWAITING_PREFILL"):
        driver.machine.handle(V.ADMIT)
    for event in (V.DRAINED, V.DRAINED_SHORT, V.RECEIVED):
        driver.handle(event)
    assert driver.log == [] and driver.machine.state is S.AWAITING_PREFILL
    assert driver.machine.kvpoll is KVPoll.BOOTSTRAPPING
    driver.handle(V.PREFILL_DONE)
    driver.handle(V.PREFILL_DONE)  # once more: it counts once
    driver.admit()
    driver.handle(V.PREFILL_DONE)
    driver.received(0)
    assert driver.log == [LineUp(), HandOut(), NoteReceived(0), Check(), Commit()]


@pytest.mark.parametrize("event", (*TOLD, V.STOP, V.FRONT_LOST, V.EXPIRED, V.FAIL, V.CHECK_FAILED))
def test_a_room_that_fails_under_a_living_writer_waits_for_every_ack(event: ReceiverEvent) -> None:
    driver = receiving(2)
    driver.handle(event)
    assert driver.log == [HandOut(), Ack() if event in TOLD else Report(WHY), AbortWriter()]
    driver.drained(0, complete=True)
    driver.drained(0, complete=False)
    for late in (V.PREFILL_LOST, V.ABORT_RUNNING, V.EXPIRED, V.STOP, V.ROOM_LOST, V.FRONT_LOST):
        driver.handle(late)
    assert not driver.over, "one ack of two, lost links and clocks prove nothing"
    driver.received(1)  # a notification after the abort counts as an ack, no more
    assert driver.over and Commit() not in driver.log and driver.machine.kvpoll is KVPoll.FAILED


@pytest.mark.parametrize("proof", [V.PREFILL_EXITED, V.UNKNOWN, V.REVOKED])
def test_the_writers_end_or_ignorance_is_proof(proof: ReceiverEvent) -> None:
    driver = receiving(2)
    driver.handle(V.PREFILL_LOST)
    assert driver.log == [HandOut(), Report(WHY), AbortWriter()]
    driver.handle(proof)
    assert driver.over
    at_once = receiving(2)
    at_once.handle(proof)
    assert at_once.log == [HandOut(), Report(WHY), AbortWriter(), Release()], "the second rank is told of the first's"


def test_one_ranks_ignorance_says_nothing_about_another_rank() -> None:
    """A follower may not have been told of the room yet, or may have forgotten it, while its leader writes."""
    driver = receiving(2)
    driver.unknown(1)
    assert driver.machine.state is S.RELEASING and not driver.over and driver.machine.unproven == [0]
    driver.drained(0, complete=False)
    assert driver.over


def test_each_rank_needs_a_proof_of_its_own() -> None:
    """The end of one process says nothing about another one's writes."""
    driver = receiving(3)
    driver.ends(1, V.PREFILL_EXITED)
    driver.ends(1, V.REVOKED)
    assert driver.machine.state is S.RELEASING and not driver.over
    driver.drained(0, complete=False)
    assert not driver.over
    driver.take(KVPoll.FAILED, driver.machine.writer_exited(0xDEAD, WHY))
    assert not driver.over, "a stranger's end proves nothing"
    driver.ends(2, V.REVOKED)
    assert driver.over


def test_a_short_drain_fails_the_room_and_is_its_proof() -> None:
    driver = receiving()
    driver.drained(0, complete=False)
    assert driver.log == [HandOut(), Report(WHY), AbortWriter(), Release()]


def test_a_full_drain_without_the_notification_commits_nothing() -> None:
    driver = receiving()
    driver.drained(0, complete=True)
    assert driver.log == [HandOut()] and driver.machine.state is S.RECEIVING
    driver.received(0)
    assert driver.log[-1] == Commit()


def test_a_notification_for_a_room_that_was_not_handed_out_proves_nothing() -> None:
    """Correct peers don't send it. It is refused, and must not stand as an ack of what is handed out later."""
    driver = Driver()
    assert driver.machine.rank_received(0) == []
    driver.admit()
    driver.handle(V.ABORT)
    assert not driver.over


@pytest.mark.parametrize("event", [V.ABORT, V.ABORT_RUNNING])
@pytest.mark.parametrize("stopping", [False, True])
def test_what_the_room_says_after_commit_is_answered_committed(event: ReceiverEvent, stopping: bool) -> None:
    driver = running()
    driver.start_step()
    if stopping:
        driver.handle(V.STOP)
    del driver.log[:]
    driver.handle(event)
    assert driver.log[0] == AnswerCommitted()
    assert driver.machine.kvpoll is KVPoll.SUCCESS
    assert (driver.machine.state is S.RUNNING) == (event is V.ABORT and not stopping)


@pytest.mark.parametrize("event", [V.ROOM_LOST, V.PREFILL_LOST, V.PREFILL_EXITED, V.UNKNOWN, V.EXPIRED])
def test_a_running_request_needs_neither_room_nor_prefill(event: ReceiverEvent) -> None:
    driver = running()
    driver.handle(event)
    assert driver.machine.state is S.RUNNING


@pytest.mark.parametrize("event", [V.PREFILL_LOST, V.PREFILL_EXITED, V.REVOKED, V.UNKNOWN, V.DRAINED, V.ABORT])
def test_a_room_that_is_being_checked_needs_no_prefill(event: ReceiverEvent) -> None:
    """With the last notification all is written: losing prefill is no failure, and leaves no cause behind."""
    driver = receiving(2)
    driver.received(0)
    driver.received(1, good=None)
    assert driver.log[-1] == Check() and driver.machine.kvpoll is KVPoll.TRANSFERRING
    driver.handle(event)
    assert driver.machine.state is S.CHECKING and driver.machine.cause is None
    driver.checked(True)
    assert driver.log[-1] == Commit()


@pytest.mark.parametrize(
    "event", (V.ABORT_RUNNING, V.ROOM_LOST, V.STOP, V.FRONT_LOST, V.EXPIRED, V.FAIL, V.CHECK_FAILED)
)
def test_a_room_that_ends_while_it_is_checked_gives_its_pages_back_at_once(event: ReceiverEvent) -> None:
    """Nobody can write to them any more: every rank's notification was its ack."""
    driver = receiving(2)
    driver.received(0)
    driver.received(1, good=None)
    driver.handle(event)
    assert driver.log[-3:] == [Ack() if event in TOLD else Report(WHY), AbortWriter(), Release()]
    assert driver.machine.kvpoll is KVPoll.FAILED and Commit() not in driver.log


@pytest.mark.parametrize("event", [V.STOP, V.FRONT_LOST, V.ABORT_RUNNING])
def test_a_running_step_holds_the_pages(event: ReceiverEvent) -> None:
    driver = running()
    driver.start_step()
    driver.handle(event)
    assert driver.log[-1] == LeaveBatch() and not driver.over
    driver.end_step()
    assert driver.log[-1] == Release()


def test_a_retracted_request_gives_its_pages_back_when_no_forward_names_them() -> None:
    driver = running()
    driver.retract()
    assert driver.log[-3:] == [Retract(), LeaveBatch(), Release()] and driver.machine.kvpoll is KVPoll.SUCCESS
    stepping = running()
    stepping.start_step()
    stepping.retract()
    assert stepping.log[-2:] == [Retract(), LeaveBatch()]
    stepping.handle(V.ABORT_RUNNING)  # the client leaves meanwhile: that changes nothing
    stepping.handle(V.FRONT_LOST)
    assert stepping.log[-1] == AnswerCommitted()
    stepping.end_step()
    assert stepping.log[-1] == Release()


ACTS = st.lists(
    st.one_of(
        st.sampled_from(["admit", "start_step", "end_step", "finish", "retract"]),
        st.tuples(st.just("drained"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("received"), st.integers(0, 1), st.sampled_from([True, False, None])),
        st.tuples(st.just("checked"), st.booleans()),
        st.sampled_from([*TOLD, *FOUND, V.UNKNOWN]),
    ),
    max_size=30,
)


def play(driver: Driver, acts: list[object]) -> None:
    for act in acts:
        match act:
            case ReceiverEvent():
                driver.handle(act)
            case (str() as name, *arguments):
                getattr(driver, name)(*arguments)
            case str():
                getattr(driver, act)()


@settings(deadline=None)
@given(acts=ACTS, ranks=st.integers(1, 2), proof=st.sampled_from(["drained", "exited"]))
def test_every_room_is_forgotten_once_its_proof_has_come(acts: list[object], ranks: int, proof: str) -> None:
    driver = Driver(ranks)
    play(driver, acts)
    driver.end_step()
    driver.handle(V.ABORT_RUNNING)
    if proof == "exited":
        driver.handle(V.PREFILL_EXITED)
    for rank in sorted(driver.ranks):
        driver.drained(rank, complete=False)
    assert driver.log.count(Release()) == 1
    handed_out = HandOut() in driver.log
    assert driver.log.count(Commit()) + (handed_out and driver.failed) == handed_out


@pytest.mark.parametrize(
    ("events", "illegal"),
    [
        ((), (V.ALL_RECEIVED, V.CHECKED, V.CHECK_FAILED, V.FINISHED, V.RETRACT)),
        ((V.ADMIT,), (V.ADMIT, V.CHECKED, V.FINISHED, V.RETRACT)),
        ((V.ADMIT, V.ALL_RECEIVED), (V.ADMIT, V.ALL_RECEIVED, V.FINISHED, V.RETRACT)),
        ((V.ADMIT, V.ABORT), (V.ADMIT, V.FINISHED, V.RETRACT)),
        ((V.ABORT,), (V.ADMIT, V.FINISHED, V.RETRACT)),
    ],
)
def test_a_local_illegal_event_raises_and_changes_nothing(
    events: tuple[ReceiverEvent, ...], illegal: tuple[ReceiverEvent, ...]
) -> None:
    machine = ReceiverMachine({0: PROCESSES[0]})
    for event in events:
        machine.handle(event)
    for event in illegal:
        before = (machine.state, machine.cause, set(machine.acks), dict(machine.counts))
        with pytest.raises(IllegalEvent, match=event.name):
            machine.handle(event, WHY)
        assert before == (machine.state, machine.cause, set(machine.acks), dict(machine.counts))


def test_a_destination_that_never_left_needs_nobodys_proof() -> None:
    machine = ReceiverMachine(dict(enumerate(PROCESSES)))
    machine.handle(V.ADMIT)
    assert machine.never_given() == [] and machine.state is S.RECEIVING, "it may still leave"
    assert machine.not_quiet == set(PROCESSES)
    machine.handle(V.ABORT, WHY)
    assert machine.not_quiet == set(PROCESSES)
    assert machine.never_given() == [Release()] and machine.state is S.ENDED
