"""A prefill rank that is not the leader: it writes its slice of each prompt, and answers for its writes itself.

Each of its rooms has a sender machine of its own: the leader's orders are its events, and decode's leader, who owns the
target pages, hears from it when nothing of it is on the way any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.actors.parts import Parts
from kvferry.actors.ports import LostReason
from kvferry.actors.prefill.data_plane import Connected, DataPlane, WriteEnded
from kvferry.actors.prefill.sending import Part, RankWrite, Sending, WritePlanner
from kvferry.actors.prefill.writer import WritingRank
from kvferry.actors.ranks.follower import Follower
from kvferry.actors.ranks.rank import PROGRESS_EVERY_S
from kvferry.protocol import sender
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.instance import (
    AbortConfirmed,
    CancelRoom,
    ConfirmAbort,
    RankFailed,
    WriteChunk,
    WriteTo,
    Wrote,
)
from kvferry.protocol.messages import AbortTransfer, Drained, Draining, Reconcile, UnknownRoom
from kvferry.protocol.sender import SenderEvent, SenderMachine, SenderState
from kvferry.transfer.chunk import Chunk
from kvferry.transfer.contract import TransferError, WriteOutcome, decode_descriptor


@dataclass
class _Chunk:
    """A chunk that was ordered: how many writes of it are open, and what has become of the others."""

    open: int
    kv_bytes: int = 0
    error: str = ""


@dataclass
class SliceRoom:
    """A room's record at a follower. `pages` are the prompt's at each target; `orders` have come before the targets
    were connected.
    """

    sending: Sending
    owner: Address
    prompt_tokens: int
    pages: tuple[int, ...]
    machine: SenderMachine = field(default_factory=SenderMachine)
    connected: bool = False
    orders: list[WriteChunk] = field(default_factory=list)
    chunks: dict[int, _Chunk] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return self.sending.room


class PrefillFollower(WritingRank, Follower):
    """`rooms` are those that it writes for. `asking`: rooms that are not here, with those who wait to hear so until the
    leader has confirmed it.
    """

    role = "prefill"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.rooms: dict[int, SliceRoom] = {}
        self.asking: dict[int, set[int]] = {}
        self._say_at_s = 0.0
        incarnation = self.network.address.incarnation
        self._planner = WritePlanner(self.engine)
        rank, post = self.info.rank, self._mailbox.put
        self._data_plane = DataPlane(self.endpoint, self.digests, rank, incarnation, self.spawn, post)
        orders: dict[Any, Callable[[Any], None]] = {
            WriteTo: self._write_to, WriteChunk: self._chunk, CancelRoom: self._cancelled,
            AbortConfirmed: self._abort_confirmed,
        }  # fmt: skip
        self._on_message |= {kind: self._obey(do) for kind, do in orders.items()}
        self._on_message |= {
            AbortTransfer: self._abort_transfer, Reconcile: self._reconcile, UnknownRoom: self._unknown,
        }  # fmt: skip

    def _obey(self, do: Callable[[Any], None]) -> Callable[[Address, Any], None]:
        def handler(peer: Address, message: Any) -> None:
            if self.is_leader(peer):
                do(message)

        return handler

    # --- the leader's orders ---

    def _write_to(self, message: WriteTo) -> None:
        room = self.rooms[message.room] = SliceRoom(
            Sending(message.room, message.owner.incarnation), message.owner, message.prompt_tokens, message.pages
        )
        for event in (SenderEvent.DESTINATION, SenderEvent.RESERVE):  # pages are the leader's business
            room.machine.handle(event)
        try:
            agents = zip(message.targets, message.agents, strict=True)
            targets = {rank: decode_descriptor(agent) for rank, agent in agents}
            self._planner.check(message.owner.incarnation, targets, message.prompt_tokens, message.pages)
        except TransferError as error:
            return self._fail(room, SenderEvent.FAIL, str(error))
        return self._data_plane.connect(message.room, message.owner.incarnation, targets)

    def _connected(self, item: Connected) -> None:
        room = self.rooms.get(item.room)
        self._data_plane.connected(item, self.network.is_up(item.owner))
        if room is None or room.machine.state is not SenderState.COMPUTING:
            return
        if item.targets is None:
            self._fail(room, SenderEvent.FAIL, item.error)
            return
        room.connected, room.sending.targets = True, item.targets
        orders, room.orders = room.orders, []
        for order in orders:
            self._chunk(order)

    def _chunk(self, order: WriteChunk) -> None:
        room = self.rooms.get(order.room)
        if room is None or room.machine.state is not SenderState.COMPUTING:
            self._answer(order.room, order.chunk, _Chunk(0, error="the room is over at this rank"))
        elif not room.connected:
            room.orders.append(order)
        else:
            self._post(room, order)

    def _post(self, room: SliceRoom, order: WriteChunk) -> None:
        try:
            tokens = Chunk(order.first, order.first + order.tokens, room.prompt_tokens)
            every = self._planner.writes(room.sending, tokens, order.pages, room.pages)
        except TransferError as error:
            self._answer(room.room, order.chunk, _Chunk(0, error=str(error)))
            self._fail(room, SenderEvent.FAIL, str(error))
        else:
            self._write(room, Part(order.chunk, tokens), every)

    def _write(self, room: SliceRoom, part: Part, every: list[RankWrite]) -> None:
        writes = [write for write in every if write.blocks]
        chunk = room.chunks[part.chunk] = _Chunk(len(writes), sum(write.kv_bytes for write in writes))
        last = part.tokens.last
        room.machine.handle(SenderEvent.LAST_COMPUTED if last else SenderEvent.CHUNK_COMPUTED)
        if last:
            room.machine.last_posted()
        for _ in writes:
            room.machine.write_posted()
        for write in every:
            self._data_plane.write(room.sending, part, write)
        if not writes:
            del room.chunks[part.chunk]
            self._act(room, room.machine.settle())
            self._answer(room.room, part.chunk, chunk)

    def _write_ended(self, item: WriteEnded) -> None:
        room = self.rooms[item.room]  # a room outlives each of its writes
        self._data_plane.ended(room.sending, item)
        chunk, outcome = room.chunks[item.chunk], item.result.outcome
        chunk.open -= 1
        if outcome is not WriteOutcome.FLUSHED:
            chunk.error = item.result.error or outcome.value
        broken = outcome is WriteOutcome.BROKEN
        cause = self._cause(room, f"a write failed: {item.result.error}") if broken else None
        # Decode and the room hear that we have drained before the leader may forget the room.
        self._act(room, room.machine.write_ended(broken, cause))
        if not chunk.open:
            del room.chunks[item.chunk]
            self._answer(room.room, item.chunk, chunk)

    def _answer(self, room: int, number: int, chunk: _Chunk) -> None:
        self.tell_leader(Wrote(room, number, not chunk.error, chunk.kv_bytes, chunk.error))

    def _cancelled(self, message: CancelRoom) -> None:
        room = self.rooms.get(message.room)
        if room is not None:
            self._act(room, room.machine.handle(SenderEvent.ABORT, message.cause))

    # --- decode, who owns the pages ---

    def _abort_transfer(self, peer: Address, message: AbortTransfer) -> None:
        """A room that is not here may be on its way here: whether it is, only the leader knows."""
        room = self.rooms.get(message.room)
        if room is not None and room.sending.owner == peer.incarnation:
            self._act(room, room.machine.handle(SenderEvent.ABORT_TRANSFER, message.cause))
        elif room is not None:
            self.counts["aborts from a stranger"] += 1
        elif self.ending:
            self._unknown_here(message.room, peer.incarnation)
        else:
            self.asking.setdefault(message.room, set()).add(peer.incarnation)
            self.tell_leader(ConfirmAbort(message.room, message.cause))

    def _abort_confirmed(self, message: AbortConfirmed) -> None:
        """The leader has ended the room, and what it had said of it before is here. If the room is here now, its own
        end answers decode.
        """
        asking, room = self.asking.pop(message.room, set()), self.rooms.get(message.room)
        if room is not None:
            cause = self._cause(room, "decode has aborted the room")
            self._act(room, room.machine.handle(SenderEvent.ABORT_TRANSFER, cause))
            return
        for incarnation in asking:
            self._unknown_here(message.room, incarnation)

    def _unknown_here(self, room: int, incarnation: int) -> None:
        self.counts["messages for unknown rooms"] += 1
        self.network.send(incarnation, UnknownRoom(room, self.role))

    def _reconcile(self, peer: Address, message: Reconcile) -> None:
        """An answer for each room: the leader is asked, it has drained by this very question, or it still drains."""
        cause = Cause("peer_lost", f"{peer.name} has given the room up", "decode", peer=peer.name)
        for room_id in message.rooms:
            self._abort_transfer(peer, AbortTransfer(room_id, cause))
            room = self.rooms.get(room_id)
            if room is not None and room.sending.owner == peer.incarnation:
                self._say_draining(room)

    def _say_draining(self, room: SliceRoom) -> None:
        broken = room.machine.state is SenderState.BROKEN
        self.network.send(room.sending.owner, Draining(room.room, self.info.rank, broken))

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        if now_s < self._say_at_s:
            return
        self._say_at_s = now_s + PROGRESS_EVERY_S
        for room in self.rooms.values():
            if room.machine.state is SenderState.BROKEN:  # until decode has found another proof
                self.network.dial(room.owner)
                self._say_draining(room)

    def _unknown(self, peer: Address, message: UnknownRoom) -> None:
        """Decode has ended the room before our ack came; that is normal. Where one of our writes broke, it has found
        its proof without us.
        """
        self.counts["told of an unknown room"] += 1
        room = self.rooms.get(message.room)
        if room is not None and room.sending.owner == peer.incarnation:
            self._act(room, room.machine.handle(SenderEvent.UNKNOWN))

    # --- losing each other ---

    def decode_lost(self, peer: Address, reason: LostReason) -> None:
        self.fail_rooms_of(peer, SenderEvent.DECODE_LOST, f"the link to {peer.name} ended: {reason.value}")
        self._data_plane.link_lost(peer.incarnation)

    def forget_decode(self, incarnation: int) -> None:
        self._planner.forget(incarnation)
        self._data_plane.disconnect(incarnation)

    def fail_rooms_of(self, decode: Address, event: SenderEvent, text: str) -> None:
        for room in list(self.rooms.values()):
            if room.sending.owner == decode.incarnation:
                self._fail(room, event, text, "peer_lost")

    def leader_lost(self, leader: Address, why: str) -> None:
        for room in list(self.rooms.values()):
            self._fail(room, SenderEvent.ROOM_LOST, why, "peer_lost")
        for room_id, asking in self.asking.items():  # no plan can come any more
            for incarnation in asking if room_id not in self.rooms else ():
                self._unknown_here(room_id, incarnation)
        self.asking.clear()

    @property
    def quiet(self) -> bool:
        return not any(room.sending.open for room in self.rooms.values())

    # --- commands ---

    def _act(self, room: SliceRoom, commands: list[Any]) -> None:
        for command in commands:
            match command:
                case sender.Cancel():
                    self._stop_posting(room)
                case sender.Report(cause):
                    self.tell_leader(RankFailed(room.room, cause))
                case sender.Deliver():
                    self._data_plane.notify(room.sending)
                    self._drained(room, complete=True)
                case sender.Release():
                    self._drained(room, complete=False)
                case sender.Strand():  # the room stays known, and no Drained is said
                    self._say_draining(room)
                # Enqueue, Write: the orders are the leader's.

    def _stop_posting(self, room: SliceRoom) -> None:
        self._data_plane.cancel(room.sending)
        orders, room.orders = room.orders, []
        for order in orders:
            self._answer(room.room, order.chunk, _Chunk(0, error="cancelled"))

    def _drained(self, room: SliceRoom, complete: bool) -> None:
        sending = room.sending
        cause = None if complete else room.machine.cause
        word = Drained(
            room.room, self.info.rank, complete, sending.kv_bytes, sending.metadata_bytes, cause,
            sending.backend, sending.measured,
        )  # fmt: skip
        self.network.send(sending.owner, word)
        self.tell_leader(word)
        del self.rooms[room.room]

    def _fail(self, room: SliceRoom, event: SenderEvent, text: str, code: str = "handoff_failed") -> None:
        self._act(room, room.machine.handle(event, self._cause(room, text, code)))

    def _cause(self, room: SliceRoom, text: str, code: str = "handoff_failed") -> Cause:
        return Cause(code, text, self.role, self.info.rank, "", room.room, room.machine.state.name)
