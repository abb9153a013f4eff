"""Decode's leader (TP 1: also its only rank): admit, receive, run the batch, publish."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from kvferry.actors.decode.arrival import metadata_of, problem_of
from kvferry.actors.decode.batch import Batch
from kvferry.actors.decode.quarantine import Quarantine
from kvferry.actors.decode.room import DecodeRoom
from kvferry.actors.decode.unproven import quarantined
from kvferry.actors.decode.writers import Accepted, ShutOut, Writers, awaiting, is_covered
from kvferry.actors.leader import Leader
from kvferry.actors.leg_room import RANK
from kvferry.actors.load import Recent
from kvferry.actors.parts import Parts
from kvferry.actors.ports import LostReason
from kvferry.actors.settings import DecodeSettings
from kvferry.engine.contract import Drawn, Sequence, StepPlan, StepResult
from kvferry.engine.history import Past
from kvferry.memory.admission import pages_needed, refusal
from kvferry.memory.proof import Quiescent, Stepped
from kvferry.protocol import receiver
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Wait, admission_wait
from kvferry.protocol.messages import (
    Abort,
    AbortAck,
    AbortTransfer,
    Admitted,
    Committed,
    Destination,
    Drained,
    Draining,
    Failed,
    Load,
    Logprobs,
    OpenDecode,
    PrefillDone,
    Progress,
    Received,
    Retracted,
    UnknownRoom,
)
from kvferry.protocol.metadata import decode_notification
from kvferry.protocol.receiver import ReceiverEvent, ReceiverMachine, ReceiverState
from kvferry.transfer.contract import encode_descriptor

logger = logging.getLogger("kvferry.decode")


class Notified(msgspec.Struct, frozen=True):
    """Item: a notification came on the data path, from the agent of that name."""

    agent: str
    payload: bytes


class Decode(Leader[DecodeRoom]):
    """`waiting` rooms are not admitted; `running` ones are committed and decode together; both in order of age."""

    role = "decode"
    ROOM: type[DecodeRoom] = DecodeRoom
    STOP, EXPIRED, FRONT_LOST = ReceiverEvent.STOP, ReceiverEvent.EXPIRED, ReceiverEvent.FRONT_LOST
    ROOM_LOST, PEER_LOST, FAIL = ReceiverEvent.ROOM_LOST, ReceiverEvent.PREFILL_LOST, ReceiverEvent.FAIL

    def __init__(self, parts: Parts, settings: DecodeSettings) -> None:
        super().__init__(parts)
        self.settings = settings
        self.batch = Batch(self.rooms, self.ledger, self.page_size, settings.max_running)
        self.writers = Writers(self.endpoint, self.spawn, self._mailbox.put)
        self.quarantine = Quarantine(
            self.rooms, self.writers, self.network, self.ledger, self.endpoint.proofs, settings, self.counts
        )
        self._moved = 0  # news of rooms that receive: for those that wait for their places it is progress, as a step is
        self._places = Recent()  # requests that ran, and for how long each had its place
        self._on_message |= {
            OpenDecode: self._open, Abort: self._abort, Drained: self._drained, UnknownRoom: self._unknown,
            Progress: self._progress_of_prefill, PrefillDone: self._prefill_done, Draining: self._draining,
        }  # fmt: skip

    @property
    def waiting(self) -> list[int]:
        return self.batch.waiting

    @property
    def running(self) -> list[int]:
        return self.batch.running

    def notified(self, agent: str, payload: bytes) -> None:
        """The endpoint's `on_notify`."""
        self._mailbox.put(Notified(agent, payload))

    def receive(self, item: Any) -> None:
        match item:
            case Notified():
                self._notified(item)
            case Accepted():
                self._accepted(item)
            case ShutOut():
                self._shut_out(item)
            case _:
                super().receive(item)

    # --- messages ---

    def _open(self, router: Address, message: OpenDecode) -> None:
        spec, limit = message.spec, self.info.max_total_tokens
        cause = self.place_refused(message.room)
        if cause is None:
            cause = refusal(len(spec.prompt_ids), spec.sampling.max_tokens, limit, limit)
        if cause is not None:
            return self.refuse_open(router, message.room, cause)
        record = self.new_room(router, message, message.prefill)
        machine = ReceiverMachine({RANK: message.prefill.incarnation}, self.info.computes_first)
        text = self.texts.stream(spec.sampling, spec.frozen_ids)
        room = self.ROOM(**record, machine=machine, text=text, past=Past(spec), generated=len(spec.frozen_ids))
        return self.take_in(room)

    def leg_opened(self, room: DecodeRoom) -> None:
        self._line_up(room)

    def _line_up(self, room: DecodeRoom) -> None:
        """A candidate from the moment when the leg is open and, under prefill_complete, its prompt is computed."""
        if room.opened and room.machine.state is ReceiverState.QUEUED:
            self.batch.arrive(room, self.clock.now_s())

    def _prefill_done(self, router: Address, message: PrefillDone) -> None:
        room = self.rooms.get(message.room)
        if room is None:
            return self.unknown_room(router, message.room)
        return self.act(room, room.machine.handle(ReceiverEvent.PREFILL_DONE))

    def _abort(self, router: Address, message: Abort) -> None:
        room = self.of_router(router, message.room)
        if room is None:
            return self.unknown_room(router, message.room)
        event = ReceiverEvent.ABORT_RUNNING if message.stop_running else ReceiverEvent.ABORT
        return self.act(room, room.machine.handle(event, message.cause))

    def _drained(self, peer: Address, message: Drained) -> None:
        room = self._of_prefill(peer, message.room)
        if room is not None:
            cause = self.cause(room, "handoff_failed", "prefill ended the transfer", "RECEIVING", peer.name)
            self.act(room, room.machine.rank_drained(message.rank, message.complete, cause))

    def _unknown(self, peer: Address, message: UnknownRoom) -> None:
        room = self._of_prefill(peer, message.room)
        if room is not None:
            cause = self.cause(room, "handoff_failed", "prefill does not know the room", "RECEIVING", peer.name)
            self.act(room, room.machine.handle(ReceiverEvent.UNKNOWN, cause))

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
        """The room, if it is here and `peer` is its prefill. What comes for other rooms is counted, no more."""
        room = self.rooms.get(room_id)
        if room is None or room.peer.incarnation != peer.incarnation:
            self.counts["late or stray messages of prefill"] += 1
            return None
        return room

    # --- links ---

    def links_needed(self, room: DecodeRoom) -> list[Address]:
        return [room.spec.front, room.peer]

    def link_up(self, peer: Address) -> None:
        self.quarantine.new_session(peer)  # before rooms are opened on it
        super().link_up(peer)

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        super().link_lost(peer, reason)
        self.quarantine.lost(peer)

    def peer_exited(self, peer: Address) -> None:
        """The end of the writer is proof only where a transport says so (design §5)."""
        for room in self.leg_rooms():
            if peer.incarnation not in room.machine.writers.values():
                continue
            text, state = f"process {peer.pid} of {peer.name} has ended", room.machine.state.name
            cause = self.cause(room, "peer_lost", text, state, peer.name)
            if self.endpoint.proofs.exited:
                self.act(room, room.machine.writer_exited(peer.incarnation, cause))
            else:
                self.act(room, room.machine.handle(ReceiverEvent.PREFILL_LOST, cause))
        self.writers.shut_out(peer.incarnation)

    # --- admission, receiving, commit ---

    def admit(self) -> None:
        while (room := self.batch.admit()) is not None:
            room.admitted_s = self.clock.now_s()
            self.act(room, room.machine.handle(ReceiverEvent.ADMIT))

    def _hand_out(self, room: DecodeRoom) -> None:
        assert room.holding is not None
        room.clocks.wait(Wait.TRANSFER if self.info.computes_first else Wait.PREFILL, self.clock.now_s())
        self.tell_room(room, Admitted(room.room, len(room.holding.pages)))
        self._send_destination(room)

    def _send_destination(self, room: DecodeRoom) -> None:
        """Once there is an agent for each process that is to write."""
        assert room.holding is not None
        descriptors = self.writers.descriptors(room.machine.writers.values())
        if descriptors is None:
            return
        pages = room.holding.pages[: pages_needed(room.prompt_tokens, self.page_size)]
        agent, ranks = descriptors[room.peer.incarnation], tuple(room.machine.writers)
        destination = Destination(
            room.room, pages, 0, room.holding.rows[0], encode_descriptor(agent), agent.generation, ranks
        )
        room.agents = {writer: descriptor.generation for writer, descriptor in descriptors.items()}
        self.ledger.lease(room.holding, room.machine.writers)
        self._expect(room, True)
        if not self.network.send(room.peer.incarnation, destination):
            self.fail(room, ReceiverEvent.PREFILL_LOST, "there is no link to prefill", room.peer.name)

    def _accepted(self, item: Accepted) -> None:
        if not self.writers.accepted(item):
            return
        for room in awaiting(self.leg_rooms(), item.writer):
            if item.descriptor is not None:
                self._send_destination(room)
            else:
                self.fail(room, ReceiverEvent.FAIL, item.error, room.peer.name, "handoff_failed")

    def _shut_out(self, item: ShutOut) -> None:
        """Every room on the agent that is gone has failed; others get a new one."""
        if item.proof is not None:
            self.counts["writers shut out"] += 1
            for room in self.leg_rooms():
                if is_covered(room, item.proof):
                    text, state = f"{room.peer.name} has been shut out", room.machine.state.name
                    cause = self.cause(room, "peer_lost", text, state, room.peer.name)
                    self.act(room, room.machine.writer_revoked(item.writer, cause))
        for room in awaiting(self.leg_rooms(), item.writer):
            self._send_destination(room)

    def _notified(self, item: Notified) -> None:
        news = decode_notification(item.payload)
        if news is None:
            self.counts["notifications that do not decode"] += 1
            return
        room = self.rooms.get(news.room)
        if room is None or room.peer.incarnation != news.incarnation:
            self.counts["late or stray notifications"] += 1
            return
        self.act(room, room.machine.rank_received(news.rank))
        if room.machine.all_received:
            problem = problem_of(self.engine, room)
            if problem is None:
                self.act(room, room.machine.handle(ReceiverEvent.ALL_RECEIVED))
            else:
                self.fail(room, ReceiverEvent.CHECK_FAILED, problem, room.peer.name, "handoff_failed")

    def _commit(self, room: DecodeRoom) -> None:
        assert room.holding is not None
        self.ledger.end_lease(room.holding, room.quiet)
        self._expect(room, False)
        room.clocks.stop()
        self.tell_room(room, Committed(room.room))
        self.batch.commit(room)
        metadata = metadata_of(self.engine, room)
        self._token(room, metadata.first_token, metadata.logprobs)

    # --- the running batch ---

    def plan_step(self, step: int) -> StepPlan | None:
        self.batch.make_room(self._retract)
        return self.batch.plan(step)

    def _retract(self, room: DecodeRoom) -> None:
        self.act(room, room.machine.handle(ReceiverEvent.RETRACT))

    def _tell_retracted(self, room: DecodeRoom) -> None:
        """Behind the request's tokens on the front's link; the pages don't wait for an answer."""
        self.batch.retract(room, self.clock.now_s())
        self.counts["retracted"] += 1
        logger.info("request %016x: retracted at token %d", room.spec.request, room.generated)
        self.outbox.flush()
        news = Retracted(room.spec.request, room.attempt, room.room, room.generated)
        self.network.send(room.spec.front.incarnation, news)

    def step_finished(self, plan: StepPlan, result: StepResult) -> None:
        for sequence, drawn in zip(plan.sequences, result.drawn, strict=True):
            self.sequence_finished(self.rooms[sequence.key], sequence, drawn)  # a room outlives each forward of its own

    def sequence_finished(self, room: DecodeRoom, _sequence: Sequence, drawn: Drawn | None) -> None:
        """The room's part of a forward has ended."""
        assert drawn is not None
        commands = room.machine.step_ended()
        if room.machine.state is ReceiverState.RUNNING:
            self._token(room, drawn.token_id, drawn.logprobs)
        self.act(room, commands)

    def _token(self, room: DecodeRoom, token_id: int, logprobs: Logprobs | None) -> None:
        """One more token of a committed request; the stop rules are applied here, on ids and text."""
        emission = room.text.push(token_id)
        self.outbox.put(room, room.generated, token_id, emission, logprobs)
        room.past.add(token_id)
        room.generated += 1
        room.last_token = token_id
        if emission.finish_reason:
            self.act(room, room.machine.handle(ReceiverEvent.FINISHED))

    def hand_over_room(self, room: DecodeRoom) -> None:
        """A committed request is its front's to open again; the pages go when no forward names them any more."""
        running = room.machine.state is ReceiverState.RUNNING
        return self._retract(room) if running else super().hand_over_room(room)

    # --- commands ---

    def act(self, room: DecodeRoom, commands: list[Any]) -> None:
        for command in commands:
            match command:
                case receiver.LineUp():
                    room.clocks.wait(admission_wait(room.spec.was_admitted), self.clock.now_s())
                    self._line_up(room)
                case receiver.HandOut():
                    self._hand_out(room)
                case receiver.NoteReceived(rank):
                    self.tell_room(room, Received(room.room, rank))
                case receiver.Commit():
                    self._commit(room)
                case receiver.AbortWriter():
                    self._quarantine(room)
                    self._abort_writer(room)
                case receiver.Quarantine():
                    self._quarantine(room)
                case receiver.Report(cause):
                    self.tell_room(room, Failed(room.room, self.role, cause))
                case receiver.Ack():
                    self.tell_room(room, AbortAck(room.room, self.role, RANK))
                case receiver.AnswerCommitted():
                    self.tell_room(room, Committed(room.room))
                case receiver.LeaveBatch():
                    self.batch.leave(room)
                case receiver.Retract():
                    self._tell_retracted(room)
                case receiver.Release():
                    self._release(room)

    def _abort_writer(self, room: DecodeRoom) -> None:
        cause = room.machine.cause or self.cause(room, "handoff_failed", "decode has ended the room", "RELEASING")
        self.network.send(room.peer.incarnation, AbortTransfer(room.room, cause))

    def _quarantine(self, room: DecodeRoom) -> None:
        assert room.holding is not None
        room.clocks.stop()
        self.batch.leave(room)
        if room.agents:
            self.quarantine.begin(room, self.clock.now_s())
        else:
            self.act(room, room.machine.never_given())

    def _release(self, room: DecodeRoom) -> None:
        """The pages return on proof: the machine orders this only when it has one; the ledger checks it again."""
        holding = room.holding
        if holding is not None:
            if room.last_token >= 0:  # it ran
                self._places.add(1, self.clock.now_s() - room.admitted_s)
            quarantined = holding.quarantined
            self.ledger.release(holding, Quiescent(holding.id, Stepped(self.forward.done), room.peer_proof))
            room.holding = None
            if quarantined:
                self.tell_room(room, self.quarantine.end(room, len(holding.pages), self.clock.now_s()))
        self._expect(room, False)
        self.batch.leave(room)
        del self.rooms[room.room]

    def _expect(self, room: DecodeRoom, expecting: bool) -> None:
        if expecting != room.expecting:
            room.expecting = expecting
            self.endpoint.expect(1 if expecting else -1)

    # --- clocks and status ---

    def report_progress(self) -> None:
        self.seek_proof()
        for position, room_id in enumerate(self.waiting):
            room = self.rooms[room_id]
            news = self.progress(room, "queued", position=position + 1)
            news = msgspec.structs.replace(news, step=news.step + self._moved)
            room.clocks.queued("decode", news.position, news.step, 0, self.clock.now_s())
            self.tell_room(room, news)
            self.network.send(room.peer.incarnation, news)

    def load(self) -> Load:
        return self.batch.load(self.role, self._places.mean_s)

    def seek_proof(self) -> None:
        self.quarantine.seek(self.clock.now_s())
        for overdue in self.quarantine.over_budget(self.clock.now_s()):
            self.membership.tell(overdue)

    async def status(self) -> dict[str, Any]:
        rows = quarantined(self.rooms.values(), self.endpoint.proofs, self.network.is_up, self.clock.now_s())
        return await super().status() | {"quarantined": rows}

    async def end_writer(self, incarnation: int) -> bool:
        """A call, by the controller (`Quarantine.end_writer`)."""
        return self.quarantine.end_writer(incarnation, self.clock.now_s())

    def queues(self) -> dict[str, int]:
        return self.batch.queues()
