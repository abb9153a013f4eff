"""The sender machine: nothing is said to be drained while anything can still be written or read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol.errors import Cause, IllegalEvent
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.machine import holes
from kvferry.protocol.sender import (
    TABLE,
    Cancel,
    Deliver,
    Enqueue,
    Release,
    Report,
    SenderCommand,
    SenderEvent,
    SenderMachine,
    SenderState,
    Strand,
    Write,
)

V, S = SenderEvent, SenderState
WHY = Cause("handoff_failed", "the test says so")
TOLD = (V.ABORT, V.ABORT_TRANSFER, V.ROOM_LOST)
FOUND = (V.FAIL, V.STOP, V.DECODE_LOST, V.DECODE_EXITED, V.FRONT_LOST, V.EXPIRED)


class Driver:
    """Does what prefill's actor does with the commands, and checks the machine's promises at every step."""

    def __init__(self, chunks: int = 3) -> None:
        self.machine = SenderMachine()
        self.chunks = chunks
        self.open = 0  # writes posted and not ended
        self.running = False  # a forward names the pages
        self.broken = False
        self.exited = False
        self.log: list[SenderCommand] = []

    def take(self, before: KVPoll, commands: list[SenderCommand]) -> None:
        after = self.machine.kvpoll
        assert after is KVPoll.FAILED or after >= before
        assert before not in (KVPoll.FAILED, KVPoll.SUCCESS) or after is before
        for command in commands:
            assert not self.over, f"{command} after the room was forgotten"
            self.log.append(command)
            match command:
                case Write(last):
                    assert not self.cancelled, "nothing is posted after the room was cancelled"
                    if last:
                        self.machine.last_posted()
                    self.machine.write_posted()
                    self.open += 1
                case Deliver():
                    assert not self.open and not self.running and not self.broken and not self.cancelled
                case Release():
                    assert not self.open and not self.running
                    assert not self.broken or self.exited, "no Drained after a write that can't say what landed"
                case Strand():
                    assert not self.open and not self.running and self.broken
                case _:
                    pass

    @property
    def over(self) -> bool:
        return Deliver() in self.log or Release() in self.log

    @property
    def cancelled(self) -> bool:
        return Cancel() in self.log

    def handle(self, event: SenderEvent) -> None:
        if not self.over:
            self.exited |= event is V.DECODE_EXITED
            self.take(self.machine.kvpoll, self.machine.handle(event, WHY if event in (*TOLD, *FOUND) else None))

    def reserve(self) -> None:
        if self.machine.state is S.QUEUED:
            self.handle(V.RESERVE)

    def start_step(self) -> None:
        if self.machine.state is S.COMPUTING and not self.running and self.chunks:
            self.running = True
            self.machine.step_started()

    def end_step(self) -> None:
        if self.running:
            self.running, self.chunks = False, self.chunks - 1
            event = V.CHUNK_COMPUTED if self.chunks else V.LAST_COMPUTED
            self.take(self.machine.kvpoll, self.machine.step_ended(event))

    def end_write(self, broken: bool = False) -> None:
        if self.open:
            self.open -= 1
            self.broken |= broken
            self.take(self.machine.kvpoll, self.machine.write_ended(broken, WHY if broken else None))

    def settle(self) -> None:
        """Whatever still runs comes to its end; a write that is broken is settled by decode's end alone."""
        self.end_step()
        while self.open:
            self.end_write()
        if self.machine.state is S.BROKEN:
            self.handle(V.DECODE_EXITED)


def computing() -> Driver:
    driver = Driver()
    driver.handle(V.DESTINATION)
    driver.reserve()
    return driver


def test_every_cell_of_the_table_is_filled() -> None:
    assert holes(TABLE, SenderState, SenderEvent) == []


def test_three_chunks_from_open_to_delivered() -> None:
    driver = Driver()
    polls = [driver.machine.kvpoll]
    for act in (lambda: driver.handle(V.DESTINATION), driver.reserve, driver.start_step, driver.end_step,
                driver.start_step, driver.end_write, driver.end_step, driver.start_step, driver.end_step,
                driver.end_write, driver.end_write):  # fmt: skip
        act()
        polls.append(driver.machine.kvpoll)
    assert driver.log == [Enqueue(), Write(False), Write(False), Write(True), Deliver()]
    b, w, t, s = KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING, KVPoll.SUCCESS
    assert polls == [b, w, w, w, t, t, t, t, t, t, t, s]


def test_a_write_that_ends_while_the_last_chunk_computes_does_not_deliver() -> None:
    driver = computing()
    driver.start_step()
    driver.end_step()
    driver.end_write()
    assert driver.machine.state is S.COMPUTING and not driver.over


@pytest.mark.parametrize("event", TOLD + FOUND)
def test_before_any_page_is_reserved_the_room_ends_at_once(event: SenderEvent) -> None:
    for opening in ((), (V.DESTINATION,)):
        driver = Driver()
        for step in opening:
            driver.handle(step)
        del driver.log[:]
        driver.handle(event)
        assert driver.log == ([Report(WHY), Release()] if event in FOUND else [Release()])


@pytest.mark.parametrize("event", TOLD + FOUND)
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("writes", [0, 2])
def test_a_room_that_computes_drains_first(event: SenderEvent, running: bool, writes: int) -> None:
    driver = computing()
    driver.chunks = 9
    for _ in range(writes):
        driver.start_step()
        driver.end_step()
    if running:
        driver.start_step()
    del driver.log[:]
    driver.handle(event)
    head: list[SenderCommand] = [Report(WHY), Cancel()] if event in FOUND else [Cancel()]
    assert driver.log == head + ([] if running or writes else [Release()])
    for _ in range(writes):
        driver.end_write()
    driver.end_step()
    assert driver.log == [*head, Release()], "a result that comes after the abort is not written"


def test_a_broken_write_says_no_drained_until_decode_has_ended() -> None:
    driver = computing()
    driver.start_step()
    driver.end_step()
    driver.end_write(broken=True)
    assert driver.log[-3:] == [Report(WHY), Cancel(), Strand()] and driver.machine.state is S.BROKEN
    for event in (V.ABORT, V.ABORT_TRANSFER, V.DECODE_LOST, V.EXPIRED, V.STOP, V.DESTINATION):
        driver.handle(event)
    assert not driver.over
    driver.handle(V.DECODE_EXITED)
    assert driver.log[-1] == Release()


@pytest.mark.parametrize("first", [V.DECODE_LOST, V.DECODE_EXITED])
def test_decodes_end_may_be_known_before_the_writes_to_it_break(first: SenderEvent) -> None:
    """kill -9 of decode in mid-transfer: the kernel is quicker than the data plane, and says it once only."""
    driver = computing()
    driver.start_step()
    driver.end_step()
    driver.handle(first)
    driver.handle(V.DECODE_EXITED)
    driver.end_write(broken=True)
    assert driver.over and driver.log[-1] == Release()


ACTS = st.lists(
    st.one_of(
        st.sampled_from(["reserve", "start_step", "end_step", "end_write", "break_write"]),
        st.sampled_from([V.DESTINATION, *TOLD, *FOUND]),
    ),
    max_size=30,
)


def play(driver: Driver, acts: list[object]) -> None:
    for act in acts:
        match act:
            case SenderEvent():
                driver.handle(act)
            case "break_write":
                driver.end_write(broken=True)
            case str():
                getattr(driver, act)()


@settings(deadline=None)
@given(acts=ACTS)
def test_a_failed_room_is_forgotten_once_everything_has_ended(acts: list[object]) -> None:
    driver = Driver()
    play(driver, acts)
    driver.handle(V.ABORT)
    driver.settle()
    assert driver.over and driver.log.count(Release()) + driver.log.count(Deliver()) == 1
    assert driver.log.count(Strand()) <= 1


@settings(deadline=None)
@given(acts=ACTS)
def test_a_room_without_failures_is_delivered(acts: list[object]) -> None:
    driver = Driver()
    play(driver, [act for act in acts if act not in (*TOLD, *FOUND, "break_write")])
    driver.handle(V.DESTINATION)
    driver.reserve()
    for _ in range(4):
        driver.end_step()
        driver.start_step()
    driver.settle()
    assert driver.log[-1] == Deliver()
    assert sum(isinstance(command, Write) for command in driver.log) == 3


@pytest.mark.parametrize(
    ("state", "events", "illegal"),
    [
        (S.AWAITING_DESTINATION, (), (V.RESERVE, V.CHUNK_COMPUTED, V.LAST_COMPUTED)),
        (S.QUEUED, (V.DESTINATION,), (V.CHUNK_COMPUTED, V.LAST_COMPUTED)),
        (S.COMPUTING, (V.DESTINATION, V.RESERVE), (V.RESERVE,)),
        (S.ENDED, (V.ABORT,), (V.RESERVE, V.CHUNK_COMPUTED, V.LAST_COMPUTED)),
    ],
)
def test_a_local_illegal_event_raises_and_changes_nothing(
    state: SenderState, events: tuple[SenderEvent, ...], illegal: tuple[SenderEvent, ...]
) -> None:
    machine = SenderMachine()
    for event in events:
        machine.handle(event)
    for event in illegal:
        with pytest.raises(IllegalEvent, match=f"{event.name}.*{state.name}"):
            machine.handle(event, WHY)
        assert (machine.state, machine.cause, machine.commands, sum(machine.counts.values())) == (state, None, [], 0)
