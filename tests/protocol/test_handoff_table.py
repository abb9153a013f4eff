"""The three machines side by side: an undisturbed handoff goes through the rows of the table, under either policy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Limits
from kvferry.protocol.handoff import HANDOFF
from kvferry.protocol.kvpoll import KVPoll, combined
from kvferry.protocol.messages import OpenDecode, PrefillDone
from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.protocol.receiver import ReceiverEvent, ReceiverMachine
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.protocol.room import DECODE, RoomEvent, RoomMachine, SendLeg
from kvferry.protocol.sender import SenderEvent, SenderMachine

LIMITS = Limits(admission_s=10, prefill_s=20, transfer_s=30, no_progress_s=1000)


def address(name: str, incarnation: int) -> Address:
    return Address(name, f"sim://{name}", incarnation, "host", incarnation)


class Three:
    """One handoff; each method is one thing that happens, with its news delivered at once. Two chunks."""

    def __init__(self, policy: str) -> None:
        self.first = policy == PREFILL_COMPLETE
        spec = RequestSpec(7, (1, 2, 3), Sampling(max_tokens=4), address("front", 1))
        self.room = RoomMachine(99, 0, spec, address("prefill", 2), address("decode", 3), LIMITS, 0.0, self.first)
        self.sender: SenderMachine | None = None
        self.receiver: ReceiverMachine | None = None
        self.tell(RoomEvent.START)

    def tell(self, event: RoomEvent) -> None:
        for command in self.room.handle(event, 0.0):
            if isinstance(command, SendLeg) and isinstance(command.message, OpenDecode):
                self.receiver = ReceiverMachine({0: 2}, self.first)
            if isinstance(command, SendLeg) and isinstance(command.message, PrefillDone):
                assert command.leg == DECODE and self.receiver is not None
                self.receiver.handle(ReceiverEvent.PREFILL_DONE)

    def prefill(self) -> SenderMachine:
        assert self.sender is not None
        return self.sender

    def decode(self) -> ReceiverMachine:
        assert self.receiver is not None
        return self.receiver

    def prefill_opens(self) -> None:
        self.sender = SenderMachine(self.first)
        self.tell(RoomEvent.OPENED_PREFILL)

    def decode_opens(self) -> None:
        self.tell(RoomEvent.OPENED_DECODE)

    def admit(self) -> None:
        self.decode().handle(ReceiverEvent.ADMIT)
        self.tell(RoomEvent.ADMITTED)
        self.prefill().handle(SenderEvent.DESTINATION)

    def reserve(self) -> None:
        self.prefill().handle(SenderEvent.RESERVE)

    def chunk(self, last: bool = False, written: bool = True) -> None:
        self.prefill().step_started()
        self.prefill().step_ended(SenderEvent.LAST_COMPUTED if last else SenderEvent.CHUNK_COMPUTED)
        if written:
            self.write(last)

    def write(self, last: bool) -> None:
        self.prefill().write_posted()
        self.decode().transferring = True
        self.tell(RoomEvent.SENDING)
        if last:
            self.prefill().last_posted()

    def all_computed(self) -> None:
        self.chunk(last=True, written=False)
        self.tell(RoomEvent.PREFILL_KEPT)

    def pin(self) -> None:
        self.prefill().handle(SenderEvent.PIN)
        self.write(last=True)

    def flush(self) -> None:
        while self.prefill().writes_open:
            self.prefill().write_ended(broken=False)
        self.tell(RoomEvent.DRAINED)

    def receive(self) -> None:
        self.decode().rank_received(0)
        self.decode().handle(ReceiverEvent.ALL_RECEIVED)

    def check(self) -> None:
        self.decode().handle(ReceiverEvent.CHECKED)
        self.tell(RoomEvent.COMMITTED)

    def clock(self) -> str:
        """Which wait runs: the limit that is over first tells it."""
        due = next((s for s in (10, 20, 30) if self.room.clocks.is_due(s)), 0)
        return {0: "", 10: "admission", 20: "prefill", 30: "transfer"}[due]

    def row(self) -> tuple[object, ...]:
        sender, receiver = self.sender, self.receiver if self.room.state.name != "OPENING_DECODE" else None
        states = (self.room.state, sender and sender.state, receiver and receiver.state)
        legs = KVPoll.BOOTSTRAPPING if sender is None else sender.kvpoll, KVPoll.BOOTSTRAPPING
        poll = combined(legs[0], receiver.kvpoll if receiver is not None else legs[1])
        assert self.room.kvpoll is poll
        return (*states, poll, self.clock())


Step = Callable[[Three], None]
EARLY_STEPS: list[Step] = [
    Three.prefill_opens, Three.decode_opens, Three.admit, Three.reserve, Three.chunk, lambda t: t.chunk(last=True),
    Three.flush, Three.receive, Three.check,
]  # fmt: skip
AHEAD_STEPS: list[Step] = [Three.prefill_opens, Three.decode_opens, Three.reserve, Three.all_computed, Three.admit]
AGAIN_STEPS: list[Step] = [
    Three.reserve, Three.chunk, lambda t: t.chunk(last=True), Three.flush, Three.receive, Three.check,
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "steps", "left_out"),
    [
        (EARLY, EARLY_STEPS, ()),
        (PREFILL_COMPLETE, AHEAD_STEPS + AGAIN_STEPS, ()),
        (
            PREFILL_COMPLETE,
            [*AHEAD_STEPS, Three.pin, Three.flush, Three.receive, Three.check],
            (6, 7),
        ),  # nothing was displaced
    ],
)
def test_a_handoff_goes_through_the_rows(policy: str, steps: list[Step], left_out: tuple[int, ...]) -> None:
    three = Three(policy)
    rows = [three.row()]
    for step in steps:
        step(three)
        rows.append(three.row())
    phases = [phase for at, phase in enumerate(HANDOFF[policy]) if at not in left_out]
    assert rows == [(p.room, p.sender, p.receiver, p.kvpoll, p.waits_for) for p in phases]
    assert all(a.kvpoll <= b.kvpoll for a, b in pairwise(phases))
