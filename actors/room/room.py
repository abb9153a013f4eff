"""The room actor: lives in its router's process, with a mailbox and a task of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.actors.mailbox import Mailbox
from kvferry.actors.ports import Clock, LostReason
from kvferry.actors.room.journal import Journal
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import (
    Abort,
    AbortAck,
    Address,
    Admitted,
    Committed,
    Drained,
    Failed,
    Message,
    Opened,
    PrefillDone,
    Progress,
    Received,
    UnknownRoom,
)
from kvferry.protocol.room import DECODE, PREFILL, End, Resolve, RoomEvent, RoomMachine, SendLeg

SendTo = Callable[[Address, Message], bool]


@dataclass(frozen=True)
class FromLeg:
    """Item: a message about this room, from one of its leaders (or a source rank)."""

    peer: Address
    message: Message


@dataclass(frozen=True)
class LegLost:
    peer: Address
    reason: LostReason


@dataclass(frozen=True)
class AbortRequested:
    cause: Cause


@dataclass(frozen=True)
class RoomTick:
    pass


RoomItem = FromLeg | LegLost | AbortRequested | RoomTick


class Room:
    """`send` carries a message to a leader; `resolve` is called once, with None when decode has committed."""

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
        self._ended = False
        self._refused = 0
        self._addresses = {PREFILL: machine.prefill, DECODE: machine.decode}

    def post(self, item: RoomItem) -> bool:
        """False when the mailbox is full. A lost leg and an abort always fit: they are few, and nobody repeats them."""
        if isinstance(item, LegLost | AbortRequested):
            self._mailbox.put(item)
            return True
        return self._mailbox.post(item)

    async def run(self) -> None:
        """From the first message to the last answer."""
        self.journal.poll(self.clock.now_s(), self.machine.kvpoll)
        self._handle(RoomEvent.START)
        while not self._ended:
            for item in await self._mailbox.take():
                self._receive(item)

    def crashed(self, cause: Cause) -> None:
        """Called by the supervisor when `run` raised: the client is answered, and both legs are told to stop."""
        for leg in self._addresses:
            self._send_leg(leg, Abort(self.machine.room, cause, stop_running=True))
        self.journal.outcome = {"ok": False, "cause": cause.text()}
        self._resolve(cause)

    @property
    def code(self) -> str:
        """Of the cause that the room ended by."""
        cause = self.machine.cause
        return "handoff_failed" if cause is None else cause.code

    def is_leg(self, peer: Address) -> bool:
        return any(peer.incarnation == leg.incarnation for leg in self._addresses.values())

    def _receive(self, item: RoomItem) -> None:
        match item:
            case FromLeg(peer, message):
                self._from_leg(self._leg_of(peer, message), message)
            case LegLost(peer, reason):
                for leg, address in self._addresses.items():
                    if address.incarnation == peer.incarnation:
                        self._lost(leg, peer, reason)
            case AbortRequested(cause):
                self._note("abort requested", "front", cause=cause.text())
                self._handle(RoomEvent.ABORT_REQUESTED, cause)
            case RoomTick():
                self._tick()

    def _from_leg(self, leg: str, message: Message) -> None:
        match message:
            case Opened():
                self._note("opened", leg)
                self._handle(RoomEvent.OPENED_PREFILL if leg == PREFILL else RoomEvent.OPENED_DECODE)
            case Admitted(_, pages):
                self._note("admitted", leg, pages=pages)
                self._handle(RoomEvent.ADMITTED)
            case Progress():
                self._progress(leg, message)
            case PrefillDone(_, chunks, offset_s):
                self._note("prefill done", leg, chunks=chunks, offset_s=offset_s)
                self.machine.clocks.progress(self.clock.now_s())
                self._handle(RoomEvent.PREFILL_DONE)
            case Received(_, rank):
                self._note("received", leg, rank=rank)
                self._handle(RoomEvent.RECEIVED)
            case Drained():
                self._drained(message)
            case Committed():
                self._note("committed", leg)
                self._handle(RoomEvent.COMMITTED)
            case Failed(_, _, cause):
                self._note("failed", leg, cause=cause.text())
                self._handle(RoomEvent.PREFILL_FAILED if leg == PREFILL else RoomEvent.DECODE_FAILED, cause)
            case AbortAck(_, _, rank):
                self._note("abort acked", leg, rank=rank)
                self._handle(RoomEvent.PREFILL_STOPPED if leg == PREFILL else RoomEvent.DECODE_STOPPED)
            case UnknownRoom():
                self._note("unknown room", leg)
                self._handle(RoomEvent.PREFILL_STOPPED if leg == PREFILL else RoomEvent.DECODE_STOPPED)
            case _:
                self._refused += 1

    def _progress(self, leg: str, message: Progress) -> None:
        now_s = self.clock.now_s()
        self.machine.clocks.queued(leg, message.position, message.step, message.chunk + 1, now_s)
        if message.event != "queued" or message.position:
            detail: dict[str, object] = {
                "chunk": message.chunk,
                "tokens": message.tokens or None,
                "kv_bytes": message.kv_bytes or None,
            }
            detail |= {"position": message.position or None, "offset_s": round(message.offset_s, 6)}
            self._note(message.event, leg, **detail)
        self._handle(RoomEvent.SENDING if message.event == "computed" else RoomEvent.PROGRESS)

    def _drained(self, message: Drained) -> None:
        self.journal.kv_bytes += message.kv_bytes
        self.journal.metadata_bytes += message.metadata_bytes
        self._note("drained", PREFILL, rank=message.rank, complete=message.complete, kv_bytes=message.kv_bytes)
        self._handle(RoomEvent.DRAINED if message.complete else RoomEvent.PREFILL_STOPPED)

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
        peer, state = self._addresses[leg].name, self.machine.state.name
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
        address = self._addresses[leg]
        self._note(f"-> {type(message).__name__}", leg)
        if not self._send(address, message):
            # The link is gone: its loss is news of its own, posted so that this turn ends first.
            self._mailbox.put(LegLost(address, LostReason.CLOSED))

    def _leg_of(self, peer: Address, message: Message) -> str:
        """The leg that speaks: known by who it is, or, where one unified instance is both, by what it says."""
        if self.machine.prefill.incarnation == self.machine.decode.incarnation:
            leg = getattr(message, "leg", "")
            return leg or (PREFILL if isinstance(message, PrefillDone | Drained) else DECODE)
        return PREFILL if peer.incarnation == self.machine.prefill.incarnation else DECODE

    def _note(self, event: str, leg: str, **detail: object) -> None:
        self.journal.note(self.clock.now_s(), event, leg, **detail)
