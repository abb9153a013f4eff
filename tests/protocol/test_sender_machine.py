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
    Keep,
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
    """Does what prefill's actor does with the commands, and checks the machine's promises at every step. `ahead`: the
    policy is prefill_complete; `displaced` chunks are lost while the prompt is kept.
    """

    def __init__(self, chunks: int = 3, ahead: bool = False, displaced: int = 0) -> None:
        self.machine = SenderMachine(ahead)
        self.chunks = chunks
        self.displaced = displaced
        self.open = 0  # writes posted and not ended
        self.running = False  # a forward names the pages
        self.broken = False
        self.exited = False
        self.directed = False
        self.log: list[SenderCommand] = []

    def take(self, before: KVPoll, commands: list[SenderCommand]) -> None:
        after = self.machine.kvpoll
        assert after is KVPoll.FAILED or after >= before
        assert before not in (KVPoll.FAILED, KVPoll.SUCCESS) or after is before
        for command in commands:
            assert not self.over, f"{command} after the room was forgotten"
            self.log.append(command)
            match command:
                case Keep():
                    assert not self.open and not self.running and not self.cancelled and not self.directed
                    self.chunks = self.displaced
                case Enqueue():
                    self.directed = True
                case Write(last):
                    assert self.directed, "nothing is posted before the destination is known"
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
            no_need = event is V.UNKNOWN and self.machine.state is S.BROKEN  # decode has had another proof
            self.exited |= event is V.DECODE_EXITED or no_need
            self.take(self.machine.kvpoll, self.machine.handle(event, WHY if event in (*TOLD, *FOUND) else None))

    def reserve(self) -> None:
        if self.machine.state in (S.QUEUED, S.AWAITING_PAGES):
            self.handle(V.RESERVE if self.chunks else V.PIN)

    def start_step(self) -> None:
        if self.machine.computing and not self.running and self.chunks:
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


def kept(displaced: int = 0) -> Driver:
    driver = Driver(ahead=True, displaced=displaced)
    driver.reserve()
    for _ in range(3):
        driver.start_step()
        driver.end_step()
    assert driver.machine.state is S.KEPT
    return driver


def queued_again() -> Driver:
    driver = kept(displaced=1)
    driver.handle(V.DESTINATION)
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


def test_under_prefill_complete_three_chunks_are_computed_kept_and_then_written_at_once() -> None:
    driver = Driver(ahead=True)
    polls = [driver.machine.kvpoll]
    for act in (driver.reserve, driver.start_step, driver.end_step, driver.start_step, driver.end_step,
                driver.start_step, driver.end_step, lambda: driver.handle(V.DESTINATION), driver.reserve,
                driver.end_write):  # fmt: skip
        act()
        polls.append(driver.machine.kvpoll)
    assert driver.log == [Keep(), Enqueue(), Write(True), Deliver()]
    b, w, t, s = KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING, KVPoll.SUCCESS
    assert polls == [b] * 8 + [w, t, s]


def test_under_prefill_complete_what_was_displaced_is_computed_again_and_written_as_under_early() -> None:
    driver = kept(displaced=2)
    driver.handle(V.DESTINATION)
    driver.handle(V.DESTINATION)  # once more: it counts once
    driver.reserve()
    for _ in range(2):
        driver.start_step()
        driver.end_step()
    driver.settle()
    assert driver.log == [Keep(), Enqueue(), Write(False), Write(True), Deliver()]


@pytest.mark.parametrize("steps", range(6))
def test_under_prefill_complete_no_destination_counts_before_the_prompt_is_computed(steps: int) -> None:
    """Decode asks for nothing before it has been told; whatever comes earlier is refused and changes nothing."""
    driver = Driver(ahead=True)
    for act in (driver.reserve, *(driver.start_step, driver.end_step) * 2)[:steps]:
        act()
    state = driver.machine.state
    driver.handle(V.DESTINATION)
    assert driver.machine.state is state and driver.log == []


@pytest.mark.parametrize("event", TOLD + FOUND)
def test_under_prefill_complete_a_room_that_waits_ends_at_once_and_one_that_computes_after_its_forward(
    event: SenderEvent,
) -> None:
    told: list[SenderCommand] = [Report(WHY)] if event in FOUND else []
    for driver in (Driver(ahead=True), kept(), kept(displaced=3), queued_again()):
        del driver.log[:]
        driver.handle(event)
        assert driver.log == [*told, Release()]
    driver = Driver(ahead=True)
    driver.reserve()
    driver.start_step()
    driver.handle(event)
    assert driver.log == [*told, Cancel()]
    driver.end_step()
    assert driver.log == [*told, Cancel(), Release()]


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


@pytest.mark.parametrize("end", [V.DECODE_EXITED, V.UNKNOWN])
def test_a_broken_write_says_no_drained_until_decode_has_ended_or_needs_none(end: SenderEvent) -> None:
    driver = computing()
    driver.start_step()
    driver.end_step()
    driver.end_write(broken=True)
    assert driver.log[-3:] == [Report(WHY), Cancel(), Strand()] and driver.machine.state is S.BROKEN
    for event in (V.ABORT, V.ABORT_TRANSFER, V.DECODE_LOST, V.EXPIRED, V.STOP, V.DESTINATION):
        driver.handle(event)
    assert not driver.over
    driver.handle(end)
    assert driver.log[-1] == Release()


def test_that_decode_does_not_know_the_room_is_news_only_where_a_write_broke() -> None:
    driver = computing()
    driver.start_step()
    driver.end_step()
    before = list(driver.log)
    driver.handle(V.UNKNOWN)
    assert driver.log == before and driver.machine.state is S.COMPUTING
    driver.handle(V.ABORT)
    driver.handle(V.UNKNOWN)
    assert driver.machine.state is S.DRAINING, "its own write still reads the pages"
    driver.end_write()
    assert driver.over


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
@given(acts=ACTS, ahead=st.booleans(), displaced=st.integers(0, 3))
def test_a_failed_room_is_forgotten_once_everything_has_ended(acts: list[object], ahead: bool, displaced: int) -> None:
    driver = Driver(3, ahead, displaced)
    play(driver, acts)
    driver.handle(V.ABORT)
    driver.settle()
    assert driver.over and driver.log.count(Release()) + driver.log.count(Deliver()) == 1
    assert driver.log.count(Strand()) <= 1


@settings(deadline=None)
@given(acts=ACTS, ahead=st.booleans(), displaced=st.integers(0, 3))
def test_a_room_without_failures_is_delivered(acts: list[object], ahead: bool, displaced: int) -> None:
    driver = Driver(3, ahead, displaced)
    play(driver, [act for act in acts if act not in (*TOLD, *FOUND, "break_write")])
    for _ in range(2):  # under prefill_complete: once ahead, once for the destination
        driver.reserve()
        for _ in range(4):
            driver.end_step()
            driver.start_step()
        driver.handle(V.DESTINATION)
        driver.reserve()
    for _ in range(4):
        driver.end_step()
        driver.start_step()
    driver.settle()
    assert driver.log[-1] == Deliver()
    assert sum(isinstance(command, Write) for command in driver.log) == (max(1, displaced) if ahead else 3)
    assert driver.log.count(Keep()) == ahead


@pytest.mark.parametrize(
    ("state", "events", "illegal"),
    [
        (S.AWAITING_DESTINATION, (), (V.RESERVE, V.PIN, V.CHUNK_COMPUTED, V.LAST_COMPUTED)),
        (S.QUEUED, (V.DESTINATION,), (V.CHUNK_COMPUTED, V.LAST_COMPUTED)),
        (S.COMPUTING, (V.DESTINATION, V.RESERVE), (V.RESERVE,)),
        (S.ENDED, (V.ABORT,), (V.RESERVE, V.PIN, V.CHUNK_COMPUTED, V.LAST_COMPUTED)),
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
