"""The half of decode's leader that receives: ways for writers, destinations, arrivals, and proof about every writer.

Not here: who is admitted, what runs, when pages are released (decode.py).
"""

from __future__ import annotations

from typing import Any

from kvferry.actors.decode.arrival import Notified
from kvferry.actors.decode.checking import Checking
from kvferry.actors.decode.quarantine import Quarantine
from kvferry.actors.decode.room import DecodeRoom
from kvferry.actors.decode.unproven import quarantined
from kvferry.actors.decode.writers import Accepted, ShutOut, Writers, awaiting, exits, shuts_out
from kvferry.actors.parts import Parts
from kvferry.actors.ports import LostReason
from kvferry.actors.settings import DecodeSettings
from kvferry.memory.admission import pages_needed
from kvferry.protocol import instance
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Wait
from kvferry.protocol.instance import Arrived, Expect
from kvferry.protocol.messages import (
    AbortTransfer,
    Admitted,
    DataPath,
    Destination,
    Drained,
    Draining,
    Progress,
    UnknownRoom,
    Way,
)
from kvferry.protocol.metadata import Introduction, decode_notification
from kvferry.protocol.rank import LEADER
from kvferry.protocol.receiver import ReceiverEvent, ReceiverState
from kvferry.transfer.contract import Revoked, decode_descriptor, encode_descriptor


class Receiving(Checking):
    """Base of `Decode`. `act` carries out the machine's commands."""

    role = "decode"
    STOP, EXPIRED, FRONT_LOST = ReceiverEvent.STOP, ReceiverEvent.EXPIRED, ReceiverEvent.FRONT_LOST
    ROOM_LOST, PEER_LOST, FAIL = ReceiverEvent.ROOM_LOST, ReceiverEvent.PREFILL_LOST, ReceiverEvent.FAIL

    def __init__(self, parts: Parts, settings: DecodeSettings) -> None:
        super().__init__(parts)
        self.settings = settings
        self.writers = Writers(self.endpoint, self.team, self.spawn, self._mailbox.put)
        self.quarantine = Quarantine(self.rooms, self.writers, self.network, self.ledger, settings, self.counts)
        self._moved = 0  # news of rooms that receive: for those that wait for their places it is progress, as a step is
        self._on_message |= {
            Drained: self._drained, UnknownRoom: self._unknown, Progress: self._progress_of_prefill,
            Draining: self._draining, Arrived: self._arrived, instance.Accepted: self._accepted_at,
            instance.RevokedAt: self._revoked_at,
        }  # fmt: skip

    def notified(self, agent: str, payload: bytes) -> None:
        """The endpoint's `on_notify`."""
        self._mailbox.put(Notified(agent, payload))

    def receive_other(self, item: Any) -> None:
        match item:
            case Notified():
                self._notified(item)
            case Accepted():
                self._accepted(item)
            case ShutOut():
                self._shut_out(item)
            case _:
                super().receive_other(item)

    # --- agents for writers ---

    def _accepted(self, item: Accepted) -> None:
        if not self.writers.accepted(item):
            return
        if self.writers.can_be_shut_out(item.writer) and not self.network.is_up(item.writer):
            self.writers.shut_out(item.writer)  # the link was lost meanwhile
        for room in awaiting(self.leg_rooms(), item.writer):
            if item.descriptor is not None:
                self._send_destination(room)
            else:
                self.fail(room, ReceiverEvent.FAIL, item.error, room.peer.name, "handoff_failed")

    def _shut_out(self, item: ShutOut) -> None:
        """Every room on the agent that is gone has failed; others get a new one."""
        self.writers.closed(item)
        if item.target == LEADER and item.writer not in self.writers.incarnations:
            self.forget_source(item.writer)
        if item.proof is not None:
            self.counts["writers shut out"] += 1
            for room in self.leg_rooms():
                if shuts_out(room, item.target, item.proof):
                    text, state = f"{room.peer.name} has been shut out", room.machine.state.name
                    cause = self.cause(room, "peer_lost", text, state, room.peer.name)
                    self.act(room, room.machine.writer_revoked(item.writer, cause))
        if self.writers.has_ended(item.writer):
            self._settle_exit(item.writer, "a process of prefill has ended", "prefill")
        for room in awaiting(self.leg_rooms(), item.writer):
            self._send_destination(room)

    def _accepted_at(self, peer: Address, message: instance.Accepted) -> None:
        """A follower's agent for a writer."""
        if (rank := self.team.rank_of(peer)) is not None:
            descriptor = decode_descriptor(message.agent) if message.agent else None
            self._accepted(Accepted(message.writer, rank, message.turn, descriptor, message.error))

    def _revoked_at(self, peer: Address, message: instance.RevokedAt) -> None:
        if (rank := self.team.rank_of(peer)) is not None:
            proof = Revoked(message.writer, message.generation) if message.generation >= 0 else None
            self._shut_out(ShutOut(message.writer, rank, proof))

    # --- prefill's ranks ---

    def _drained(self, peer: Address, message: Drained) -> None:
        room = self._of_prefill(peer, message.room)
        if room is not None and room.source_of(peer) == message.rank:
            cause = message.cause
            if cause is None:
                cause = self.cause(room, "handoff_failed", "prefill ended the transfer", "RECEIVING", peer.name)
            self.act(room, room.machine.rank_drained(message.rank, message.complete, cause))

    def _unknown(self, peer: Address, message: UnknownRoom) -> None:
        room = self._of_prefill(peer, message.room)
        if room is not None:
            cause = self.cause(room, "handoff_failed", "prefill does not know the room", "RECEIVING", peer.name)
            rank = room.source_of(peer)
            assert rank is not None
            self.act(room, room.machine.rank_unknown(rank, cause))

    def _draining(self, peer: Address, message: Draining) -> None:
        """Not yet quiet; or, when a write broke, never by prefill's own word."""
        room = self._of_prefill(peer, message.room)
        if room is None:
            self.network.send(peer.incarnation, UnknownRoom(message.room, self.role))
        elif message.broken:
            self.quarantine.broken(room, peer.incarnation)

    def _progress_of_prefill(self, peer: Address, message: Progress) -> None:
        room = self._of_prefill(peer, message.room)
        if room is None:
            return
        now_s = self.clock.now_s()
        # The engine's step counter rises for other rooms too: that is progress only while this one queues.
        step = message.step if message.event == "queued" else 0
        if message.event == "written":
            moved = room.clocks.written("prefill", message.chunk, now_s)
        else:
            moved = room.clocks.queued("prefill", message.position, step, message.chunk + 1, now_s)
        self._moved += moved and room.machine.state is ReceiverState.RECEIVING
        if message.event in ("computed", "sending") and not room.machine.transferring:
            room.machine.transferring = True
            room.clocks.wait(Wait.TRANSFER, now_s)

    def _of_prefill(self, peer: Address, room_id: int) -> DecodeRoom | None:
        """The room, if it is here and `peer` one of its sources. What comes for other rooms is counted, no more."""
        room = self.rooms.get(room_id)
        if room is None or room.source_of(peer) is None:
            self.counts["late or stray messages of prefill"] += 1
            return None
        return room

    # --- links ---

    def links_needed(self, room: DecodeRoom) -> list[Address]:
        return [room.spec.front, *room.sources.values()]

    def link_up(self, peer: Address) -> None:
        self.quarantine.new_session(peer)  # before rooms are opened on it
        super().link_up(peer)

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        super().link_lost(peer, reason)
        for room in self.leg_rooms():
            if room.peer.incarnation != peer.incarnation and room.source_of(peer) is not None:
                text = f"the link to {peer.name} ended: {reason.value}"
                self.fail(room, ReceiverEvent.PREFILL_LOST, text, peer.name)
        self.quarantine.lost(peer)

    def peer_exited(self, peer: Address) -> None:
        """Its rooms fail now. Its end is proof only for ways where a transport says so (design §5), once every rank has
        ended what it may have left there; the others are closed.
        """
        self.writers.exited(peer.incarnation)
        self._settle_exit(peer.incarnation, f"process {peer.pid} of {peer.name} has ended", peer.name)

    def _settle_exit(self, writer: int, text: str, name: str) -> None:
        """What is known of that process's end goes to its rooms."""
        for room in self.leg_rooms():
            machine = room.machine
            if writer not in machine.writers.values() or writer in machine.exited | machine.revoked:
                continue
            cause = self.cause(room, "peer_lost", text, machine.state.name, name)
            if exits(room, writer, self.writers):
                self.act(room, machine.writer_exited(writer, cause))
            else:
                self.act(room, machine.handle(ReceiverEvent.PREFILL_LOST, cause))

    # --- the destination, and what arrives ---

    def hand_out(self, room: DecodeRoom) -> None:
        assert room.holding is not None
        room.clocks.wait(Wait.TRANSFER if self.info.computes_first else Wait.PREFILL, self.clock.now_s())
        self.tell_room(room, Admitted(room.room, len(room.holding.pages)))
        self._send_destination(room)

    def _send_destination(self, room: DecodeRoom) -> None:
        """Once there is an agent for each process that is to write, at each rank that it is to write to."""
        assert room.holding is not None
        descriptors = self.writers.descriptors(room.pairs, room.offers)
        if descriptors is None:
            return
        writers, pages = room.machine.writers, pages_needed(room.prompt_tokens, self.page_size)
        leading = descriptors[(writers[LEADER], LEADER)]
        ways = tuple(
            Way(source, target, encode_descriptor(descriptors[(writers[source], target)]))
            for source, targets in room.routes.items()
            for target in targets
            if (source, target) != (LEADER, LEADER)
        )
        destination = Destination(
            room.room, room.holding.pages[:pages], 0, room.holding.rows[0], encode_descriptor(leading),
            leading.generation, tuple(writers), ways,
        )  # fmt: skip
        room.agents = {pair: descriptor.generation for pair, descriptor in descriptors.items()}
        room.proofs = {pair: descriptor.proofs for pair, descriptor in descriptors.items()}
        self.ledger.lease(room.holding, writers)
        self.expect(room, True)
        if leading.why:
            self.tell_room(room, DataPath(room.room, leading.path, leading.why))
        if not self.network.send(room.peer.incarnation, destination):
            self.fail(room, ReceiverEvent.PREFILL_LOST, "there is no link to prefill", room.peer.name)

    def _notified(self, item: Notified) -> None:
        news = decode_notification(item.payload)
        if news is None:
            self.counts["notifications that do not decode"] += 1
        elif isinstance(news, Introduction):
            if news.incarnation in self.writers.incarnations:
                self.introduced(news)
        else:
            self._arrived_at(LEADER, Arrived(news.room, news.rank, news.incarnation, news.placed, news.last))

    def _arrived(self, peer: Address, message: Arrived) -> None:
        rank = self.team.rank_of(peer)
        if rank is not None:
            self._arrived_at(rank, message)

    def _arrived_at(self, target: int, news: Arrived) -> None:
        """A source rank's notification has come to one of our ranks; its last one says that it has written all."""
        room, source = self.rooms.get(news.room), news.source
        if room is None or room.machine.writers.get(source) != news.incarnation or target not in room.routes[source]:
            self.counts["late or stray notifications"] += 1
            return
        self.begin_checks(room, source, target, news.placed)
        if not news.last:
            return
        room.awaited.discard((source, target))
        if any(awaited == source for awaited, _ in room.awaited):
            return
        self.act(room, room.machine.rank_received(source))
        if room.machine.all_received:
            self.act(room, room.machine.handle(ReceiverEvent.ALL_RECEIVED))

    def abort_writers(self, room: DecodeRoom) -> None:
        cause = room.machine.cause or self.cause(room, "handoff_failed", "decode has ended the room", "RELEASING")
        for rank in room.machine.unproven:
            self.network.send(room.sources[rank].incarnation, AbortTransfer(room.room, cause))

    def expect(self, room: DecodeRoom, expecting: bool) -> None:
        if expecting != room.expecting:
            room.expecting = expecting
            change = 1 if expecting else -1
            self.endpoint.expect(change)
            self.team.tell_all(Expect(change))

    def seek_proof(self) -> None:
        self.quarantine.seek(self.clock.now_s())
        for overdue in self.quarantine.over_budget(self.clock.now_s()):
            self.membership.tell(overdue)

    async def status(self) -> dict[str, Any]:
        rows = quarantined(self.rooms.values(), self.writers, self.network.is_up, self.clock.now_s())
        paths = {"data_paths": self.writers.backends(), "data_path_reasons": self.writers.reasons()}
        return await super().status() | {"quarantined": rows} | paths

    async def end_writer(self, incarnation: int) -> bool:
        """A call, by the controller (`Quarantine.end_writer`)."""
        return self.quarantine.end_writer(incarnation, self.clock.now_s())
