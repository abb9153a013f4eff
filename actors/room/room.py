"""The room actor: lives in its router's process, with a mailbox and a task of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvferry.actors.mailbox import Mailbox
from kvferry.actors.ports import Clock, LostReason
from kvferry.actors.room.journal import Journal
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import (
    Abort,
    AbortAck,
    Admitted,
    Committed,
    DataPath,
    Drained,
    Failed,
    Message,
    Opened,
    PrefillDone,
    Progress,
    Received,
    Released,
    UnknownRoom,
)
from kvferry.protocol.rank import LEADER
from kvferry.protocol.room import DECODE, PREFILL, End, Resolve, RoomEvent, RoomMachine, SendLeg

SendTo = Callable[[Address, Message], bool]


class FromLeg(msgspec.Struct, frozen=True, gc=False):
    """Item: a message about this room, from one of its leaders (or a source rank)."""

    peer: Address
    message: Message


class LegLost(msgspec.Struct, frozen=True, gc=False):
    peer: Address
    reason: LostReason


class AbortRequested(msgspec.Struct, frozen=True, gc=False):
    cause: Cause


class RoomTick(msgspec.Struct, frozen=True, gc=False):
    pass


RoomItem = FromLeg | LegLost | AbortRequested | RoomTick


class Room:
    """`send` carries a message to a leader; `resolve` is called once, with None when decode has committed."""

    __slots__ = (
        "_ended", "_legs", "_mailbox", "_refused", "_resolve", "_send", "clock", "front_link", "journal", "machine"
    )  # fmt: skip

    def __init__(
        self,
        machine: RoomMachine,
        journal: Journal,
        clock: Clock,
        send: SendTo,
        resolve: Callable[[Cause | None], None],
        mailbox: int,
    ) -> None:
        self.machine, self.journal, self.clock = machine, journal, clock
        self._send, self._resolve = send, resolve
        self._mailbox: Mailbox[RoomItem] = Mailbox(mailbox)
        self.front_link = 0  # the session over which decode sends its tokens
        self._ended = False
        self._refused = 0
        self._legs = {machine.prefill.incarnation: PREFILL, machine.decode.incarnation: DECODE}

    def post(self, item: RoomItem) -> bool:
        """False when the mailbox is full. A lost leg and an abort always fit: they are few, and nobody repeats them."""
        if type(item) is FromLeg or type(item) is RoomTick:
            return self._mailbox.post(item)
        self._mailbox.put(item)
        return True

    def is_due(self, now_s: float) -> bool:
        """A clock has run out: post a RoomTick. Asked of every live room several times a second."""
        return self.machine.clocks.is_due(now_s)

    async def run(self) -> None:
        """From the first message to the last answer."""
        self.begin()
        while not self.ended:
            self.turn(await self._mailbox.take())

    def begin(self) -> None:
        """Open the first leg."""
        self.journal.poll(self.clock.now_s(), self.machine.kvpoll)
        self._handle(RoomEvent.START)

    def turn(self, items: Iterable[RoomItem]) -> None:
        """Take items in, in order."""
        for item in items:
            self._receive(item)

    def waiting_items(self) -> list[RoomItem]:
        """What lies in the mailbox, for a host that gives the room its turns itself instead of running it."""
        return self._mailbox.drain()

    @property
    def ended(self) -> bool:
        """The last answer is in."""
        return self._ended

    def crashed(self, cause: Cause) -> None:
        """Called by the supervisor when `run` raised: the client is answered, and both legs are told to stop."""
        for leg in (PREFILL, DECODE):
            self._send_leg(leg, Abort(self.machine.room, cause, stop_running=True))
        self.journal.outcome = {"ok": False, "cause": cause.text()}
        self._resolve(cause)

    @property
    def code(self) -> str:
        """Of the cause that the room ended by."""
        cause = self.machine.cause
        return "handoff_failed" if cause is None else cause.code

    def is_leg(self, peer: Address) -> bool:
        return peer.incarnation in self._legs

    def _receive(self, item: RoomItem) -> None:
        match item:
            case FromLeg(peer, message):
                self._from_leg(self._leg_of(peer, message), message)
            case LegLost(peer, reason):
                for leg in (PREFILL, DECODE):
                    if self._address(leg).incarnation == peer.incarnation:
                        self._lost(leg, peer, reason)
            case AbortRequested(cause):
                self._note("abort requested", "front", cause=cause.text())
                self._handle(RoomEvent.ABORT_REQUESTED, cause)
            case RoomTick():
                self._tick()

    def _from_leg(self, leg: str, message: Message) -> None:
        heard = HEARD.get(type(message))
        if heard is None:
            self._refused += 1
        else:
            heard(self, leg, message)

    def _opened(self, leg: str, message: Opened) -> None:
        if leg == DECODE:
            self.front_link = message.front_link
        self._note("opened", leg)
        self._handle(RoomEvent.OPENED_PREFILL if leg == PREFILL else RoomEvent.OPENED_DECODE)

    def _admitted(self, leg: str, message: Admitted) -> None:
        self._note("admitted", leg, pages=message.pages)
        self._handle(RoomEvent.ADMITTED)

    def _progress(self, leg: str, message: Progress) -> None:
        now_s = self.clock.now_s()
        if message.event == "written":
            self.machine.clocks.written(leg, message.chunk, now_s)
        else:
            self.machine.clocks.queued(leg, message.position, message.step, message.chunk + 1, now_s)
        if message.event == "queued":
            if message.position:
                self.journal.queued(now_s, leg, message.position, message.offset_s)
        else:
            self.journal.note(
                now_s, message.event, leg, chunk=message.chunk, tokens=message.tokens or None,
                kv_bytes=message.kv_bytes or None, position=message.position or None, offset_s=message.offset_s,
            )  # fmt: skip
        self._handle(RoomEvent.SENDING if message.event in ("computed", "sending") else RoomEvent.PROGRESS)

    def _prefill_done(self, leg: str, message: PrefillDone) -> None:
        self._note("prefill done", leg, chunks=message.chunks, offset_s=message.offset_s)
        self.machine.clocks.progress(self.clock.now_s())
        self._handle(RoomEvent.PREFILL_KEPT if message.awaits_destination else RoomEvent.PREFILL_DONE)

    def _received(self, leg: str, message: Received) -> None:
        self._note("received", leg, rank=message.rank)
        self._handle(RoomEvent.RECEIVED)

    def _drained(self, _leg: str, message: Drained) -> None:
        self.journal.drained(message)
        self._note("drained", PREFILL, rank=message.rank, complete=message.complete, kv_bytes=message.kv_bytes)
        if message.rank != LEADER:
            return  # the leader's comes when all ranks have drained
        self._handle(RoomEvent.DRAINED if message.complete else RoomEvent.PREFILL_STOPPED)

    def _committed(self, leg: str, _message: Committed) -> None:
        self._note("committed", leg)
        self._handle(RoomEvent.COMMITTED)

    def _failed(self, leg: str, message: Failed) -> None:
        self._note("failed", leg, cause=message.cause.text())
        self._handle(RoomEvent.PREFILL_FAILED if leg == PREFILL else RoomEvent.DECODE_FAILED, message.cause)

    def _abort_acked(self, leg: str, message: AbortAck) -> None:
        self._note("abort acked", leg, rank=message.rank)
        self._stopped(leg)

    def _data_path(self, leg: str, message: DataPath) -> None:
        self.journal.backend = message.backend
        self._note("data path", leg, backend=message.backend, why=message.why)

    def _released(self, leg: str, message: Released) -> None:
        self.journal.released(self.clock.now_s(), message)

    def _unknown(self, leg: str, _message: UnknownRoom) -> None:
        self._note("unknown room", leg)
        self._stopped(leg)

    def _stopped(self, leg: str) -> None:
        self._handle(RoomEvent.PREFILL_STOPPED if leg == PREFILL else RoomEvent.DECODE_STOPPED)

    def _lost(self, leg: str, peer: Address, reason: LostReason) -> None:
        now_s = self.clock.now_s()
        text = f"the link to {peer.name} ended: {reason.value}"
        state, elapsed_s = self.machine.state.name, now_s - self.journal.began_s
        cause = Cause("peer_lost", text, leg, 0, peer.name, self.machine.room, state, elapsed_s)
        self._note("link lost", leg, reason=reason.value)
        self._handle(RoomEvent.PREFILL_LOST if leg == PREFILL else RoomEvent.DECODE_LOST, cause)

    def _tick(self) -> None:
        now_s = self.clock.now_s()
        expiry = self.machine.clocks.expired(now_s)
        if expiry is None:
            return
        text = f"{expiry.clock} for {expiry.elapsed_s:.1f} s; the limit is {expiry.limit_s:g} s"
        leg = DECODE if expiry.clock == "waiting for admission" else PREFILL
        peer, state = self._address(leg).name, self.machine.state.name
        elapsed_s = now_s - self.journal.began_s
        cause = Cause("deadline_exceeded", text, leg, 0, peer, self.machine.room, state, elapsed_s)
        self._note("clock ran out", "router", clock=expiry.clock)
        self._handle(RoomEvent.EXPIRED, cause)

    def _handle(self, event: RoomEvent, cause: Cause | None = None) -> None:
        now_s = self.clock.now_s()
        commands = self.machine.handle(event, now_s, cause)
        self.journal.poll(now_s, self.machine.kvpoll)
        for command in commands:
            match command:
                case SendLeg(leg, message):
                    self._send_leg(leg, message)
                case Resolve(reason):
                    self.journal.outcome = {"ok": reason is None, "cause": reason.text() if reason else None}
                    self._resolve(reason)
                case End():
                    self._note("ended", "router")
                    self._ended = True

    def _send_leg(self, leg: str, message: Message) -> None:
        address = self._address(leg)
        self._note(f"-> {type(message).__name__}", leg)
        if not self._send(address, message):
            # The link is gone: its loss is news of its own, posted so that this turn ends first.
            self._mailbox.put(LegLost(address, LostReason.CLOSED))

    def _leg_of(self, peer: Address, message: Message) -> str:
        """The leg that speaks: known by who it is, or, where one unified instance is both, by what it says."""
        if len(self._legs) == 1:
            leg: str = getattr(message, "leg", "")
            return leg or (PREFILL if isinstance(message, PrefillDone | Drained) else DECODE)
        return self._legs[peer.incarnation]

    def _address(self, leg: str) -> Address:
        return self.machine.prefill if leg == PREFILL else self.machine.decode

    def _note(self, event: str, leg: str, **detail: object) -> None:
        self.journal.note(self.clock.now_s(), event, leg, **detail)


#: What a room hears from its legs; its router takes these messages in for it.
HEARD: dict[type[Message], Callable[[Room, str, Any], None]] = {
    Opened: Room._opened, Admitted: Room._admitted, Progress: Room._progress, PrefillDone: Room._prefill_done,
    Received: Room._received, Drained: Room._drained, Committed: Room._committed, Failed: Room._failed,
    AbortAck: Room._abort_acked, UnknownRoom: Room._unknown, Released: Room._released,
    DataPath: Room._data_path,
}  # fmt: skip
