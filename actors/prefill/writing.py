"""The half of prefill's leader that writes: destinations, chunks at every rank, and the ends of both.

Not here: which prompts are computed, and when (prefill.py).
"""

from __future__ import annotations

from kvferry.actors.leader import Leader
from kvferry.actors.parts import Parts
from kvferry.actors.ports import LostReason
from kvferry.actors.prefill.data_plane import Connected, WriteEnded
from kvferry.actors.prefill.room import PrefillRoom
from kvferry.actors.prefill.source_ranks import SourceRanks
from kvferry.actors.prefill.writer import WritingRank
from kvferry.memory.proof import NeverGiven, Quiescent, Quiet, Stepped
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Wait
from kvferry.protocol.errors import Cause
from kvferry.protocol.instance import AbortConfirmed, ConfirmAbort, RankFailed, Wrote
from kvferry.protocol.messages import AbortAck, AbortTransfer, DataPath, Drained, Draining, Reconcile, UnknownRoom
from kvferry.protocol.rank import LEADER
from kvferry.protocol.sender import SenderEvent, SenderState
from kvferry.transfer.contract import TransferError, WriteOutcome


class Writing(WritingRank, Leader[PrefillRoom]):
    """Base of `Prefill`. `act` carries out the machine's commands."""

    role = "prefill"
    STOP, EXPIRED, FRONT_LOST = SenderEvent.STOP, SenderEvent.EXPIRED, SenderEvent.FRONT_LOST
    ROOM_LOST, PEER_LOST, FAIL = SenderEvent.ROOM_LOST, SenderEvent.DECODE_LOST, SenderEvent.FAIL

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        incarnation = self.network.address.incarnation
        self._ranks = SourceRanks(
            self.engine, self.endpoint, self.digests, self.team, incarnation, self.spawn, self._mailbox.put
        )
        self._told: set[int] = set()  # rooms that are still here when the instance ends, and whose end has been told
        self._on_message |= {
            Wrote: self._wrote, RankFailed: self._rank_failed, Drained: self._rank_drained,
            ConfirmAbort: self._confirm_abort, AbortTransfer: self._abort_transfer, Reconcile: self._reconcile,
            UnknownRoom: self._unknown,
        }  # fmt: skip

    def tick(self, now_s: float) -> None:
        if self.ending:
            self._last_words()
        super().tick(now_s)

    # --- decode gives rooms up ---

    def _abort_transfer(self, peer: Address, message: AbortTransfer) -> None:
        room = self.rooms.get(message.room)
        if room is None:
            return self.unknown_room(peer, message.room)
        if peer.incarnation != room.peer.incarnation:
            self.counts["aborts from a stranger"] += 1
            return None
        return self.act(room, room.machine.handle(SenderEvent.ABORT_TRANSFER, message.cause))

    def _reconcile(self, peer: Address, message: Reconcile) -> None:
        """An answer for each room: it is not here, it has drained by this very question, or it still drains."""
        cause = Cause("peer_lost", f"{peer.name} has given the room up", "decode", peer=peer.name)
        for room_id in message.rooms:
            self._abort_transfer(peer, AbortTransfer(room_id, cause))
            room = self.rooms.get(room_id)
            if room is not None and room.peer.incarnation == peer.incarnation:
                self.say_draining(room)

    def say_draining(self, room: PrefillRoom) -> None:
        broken = room.machine.state is SenderState.BROKEN
        self.network.send(room.peer.incarnation, Draining(room.room, LEADER, broken))

    def report_progress(self) -> None:
        for room in self.leg_rooms():
            if room.machine.state is SenderState.BROKEN:  # until decode has found another proof
                self.network.dial(room.peer)
                self.say_draining(room)

    def _unknown(self, peer: Address, message: UnknownRoom) -> None:
        """A room or a decode that has ended knows nothing of what we copied to it; that is normal. Where one of our
        writes broke, decode has found its proof without us.
        """
        self.counts["told of an unknown room"] += 1
        room = self.rooms.get(message.room)
        if room is not None and room.peer.incarnation == peer.incarnation:
            self.act(room, room.machine.handle(SenderEvent.UNKNOWN))

    # --- links ---

    def decode_lost(self, peer: Address, reason: LostReason) -> None:
        """Its rooms have failed already, as those of every party of a room that is lost."""
        self._ranks.link_lost(peer.incarnation)

    def forget_decode(self, incarnation: int) -> None:
        self._ranks.forget(incarnation)

    def fail_rooms_of(self, decode: Address, event: SenderEvent, text: str) -> None:
        for room in self.leg_rooms():
            if room.peer.incarnation == decode.incarnation:
                self.fail(room, event, text, decode.name)

    # --- the other ranks ---

    def _wrote(self, peer: Address, message: Wrote) -> None:
        """A follower has done, or left, what it was told to write. Whether its pages are quiet is its own to say."""
        room, rank = self.rooms.get(message.room), self.team.rank_of(peer)
        if room is None or rank is None or not room.asked[rank]:
            self.counts["stray answers of followers"] += 1
            return
        room.asked[rank] -= 1
        if message.flushed:
            self._written(room, message.chunk, message.kv_bytes)
        else:
            # What it finds itself it has told before (`RankFailed`). So decode has aborted, and we hear of it later.
            text = f"rank {rank} has not written chunk {message.chunk}: {message.error}"
            self.fail(room, SenderEvent.ABORT_TRANSFER, text, peer.name, "handoff_failed")
        self.act(room, room.machine.write_ended(False))

    def _rank_failed(self, peer: Address, message: RankFailed) -> None:
        room = self.rooms.get(message.room)
        if room is not None and self.team.rank_of(peer) is not None:
            self.act(room, room.machine.handle(SenderEvent.FAIL, message.cause))

    def _rank_drained(self, peer: Address, message: Drained) -> None:
        """A follower's word to decode: the room's copy of it goes through us, who have the link."""
        room = self.rooms.get(message.room)
        if room is not None and self.team.rank_of(peer) == message.rank:
            self.tell_room(room, message)

    def _confirm_abort(self, peer: Address, message: ConfirmAbort) -> None:
        """Decode has told a follower, who does not know the room (yet). Behind our answer it hears no more of it."""
        room = self.rooms.get(message.room)
        if room is not None:
            self.act(room, room.machine.handle(SenderEvent.ABORT_TRANSFER, message.cause))
        self.network.send(peer.incarnation, AbortConfirmed(message.room))

    def end_room(self, room: PrefillRoom, cause: Cause) -> None:
        super().end_room(room, cause)
        for _ in range(room.asked.pop(cause.rank, 0)):  # the lost rank answers no more
            self.act(room, room.machine.write_ended(False))

    @property
    def quiet(self) -> bool:
        return not any(room.sending.open for room in self.rooms.values())

    def _last_words(self) -> None:
        """The instance ends: say of each room that our own writes have ended, though a forward, which can't end any
        more, names its pages.
        """
        for room in self.leg_rooms():
            if not room.sending.open and not room.machine.broken and room.room not in self._told:
                self._told.add(room.room)
                self._say_drained(room, complete=False)

    # --- the data plane ---

    def connect(self, room: PrefillRoom) -> None:
        room.clocks.wait(Wait.PREFILL, self.clock.now_s())  # decode has admitted it; from here on it is our queue
        try:
            self._ranks.connect(room)
        except TransferError as error:
            self.fail(room, SenderEvent.FAIL, str(error), room.peer.name, "handoff_failed")

    def _connected(self, item: Connected) -> None:
        room = self.rooms.get(item.room)
        self._ranks.connected(item, self.network.is_up(item.owner))
        if room is None or room.machine.state is not SenderState.QUEUED:
            return
        if item.targets is None:
            self.fail(room, SenderEvent.FAIL, item.error, room.peer.name, "handoff_failed")
            return
        if item.instead is not None:
            self.tell_room(room, DataPath(room.room, item.instead.path, item.instead.why))
        room.sending.targets = item.targets
        self.ready_to_write(room)

    def ready_to_write(self, room: PrefillRoom) -> None:
        """The room's targets are connected."""
        raise NotImplementedError

    def write(self, room: PrefillRoom, last: bool) -> None:
        assert room.holding is not None
        opened = self._ranks.write(room, last)
        if last:
            room.machine.last_posted()
            room.clocks.wait(Wait.TRANSFER, self.clock.now_s())
        if opened and room.holding.lease is None:
            self.ledger.lease(room.holding, dict.fromkeys(self._ranks.writers(room), 0))
            if self.info.computes_first:
                self.tell_both(room, self.progress(room, "sending", chunk=room.chunk - 1, tokens=room.computed))
        for _ in range(opened):
            room.machine.write_posted()

    def _write_ended(self, item: WriteEnded) -> None:
        room = self.rooms[item.room]  # a room outlives each of its writes
        self._ranks.ended(room, item)
        broken = item.result.outcome is WriteOutcome.BROKEN
        cause = None
        if broken:
            state = room.machine.state.name
            cause = self.cause(room, "handoff_failed", f"a write failed: {item.result.error}", state, room.peer.name)
        elif item.result.outcome is WriteOutcome.FLUSHED:
            self._written(room, item.chunk, item.kv_bytes)
        self.act(room, room.machine.write_ended(broken, cause))

    def _written(self, room: PrefillRoom, chunk: int, kv_bytes: int) -> None:
        room.clocks.progress(self.clock.now_s())
        self.tell_both(room, self.progress(room, "written", chunk=chunk, kv_bytes=kv_bytes))

    def say_delivered(self, room: PrefillRoom) -> None:
        """All is written, at every rank."""
        self._ranks.notify(room)
        self._say_drained(room, complete=True)

    def say_stopped(self, room: PrefillRoom) -> None:
        """Nothing more will be written."""
        if not room.machine.writes_posted:  # followers may have been told where to write, and no more
            self._ranks.cancel_others(room, self._why(room))
        self._say_drained(room, complete=False)

    def stop_writing(self, room: PrefillRoom) -> None:
        """At every rank; what is posted still ends."""
        self._ranks.cancel(room, self._why(room))

    def _say_drained(self, room: PrefillRoom, complete: bool) -> None:
        sending = room.sending
        word = Drained(
            room.room, LEADER, complete, sending.kv_bytes, sending.metadata_bytes,
            backend=sending.backend, measured=sending.measured,
        )  # fmt: skip
        self.tell_both(room, word)
        if not complete:
            self.tell_room(room, AbortAck(room.room, self.role, LEADER))

    def _why(self, room: PrefillRoom) -> Cause:
        return room.machine.cause or self.cause(room, "handoff_failed", "prefill has ended the room", "DRAINING")

    def free_pages(self, room: PrefillRoom) -> None:
        """The source pages: every forward that names them is done, and every write from them has ended."""
        holding = room.holding
        if holding is None:
            return
        peers = NeverGiven() if holding.lease is None else Quiet(drained=frozenset(holding.lease.writers))
        self.ledger.release(holding, Quiescent(holding.id, Stepped(self.forward.done), peers))
        room.holding = None
