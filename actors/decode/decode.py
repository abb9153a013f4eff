"""Decode's leader, which may be its only rank: admit, receive, run the batch, publish."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from kvferry.actors.decode.arrival import metadata_of
from kvferry.actors.decode.batch import Batch
from kvferry.actors.decode.receiving import Receiving
from kvferry.actors.decode.room import DecodeRoom
from kvferry.actors.load import Recent
from kvferry.actors.parts import Parts
from kvferry.actors.settings import DecodeSettings
from kvferry.engine.contract import Drawn, Sequence, StepPlan, StepResult
from kvferry.engine.history import Past
from kvferry.memory.admission import pages_needed, refusal
from kvferry.memory.proof import Quiescent, Stepped
from kvferry.protocol import receiver
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import admission_wait
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import (
    Abort,
    AbortAck,
    Committed,
    Failed,
    Load,
    Logprobs,
    OpenDecode,
    PrefillDone,
    Received,
    Retracted,
)
from kvferry.protocol.rank import LEADER, Member, whole, with_host
from kvferry.protocol.receiver import ReceiverEvent, ReceiverMachine, ReceiverState
from kvferry.transfer.contract import TransferError

logger = logging.getLogger("kvferry.decode")


class Decode(Receiving):
    """`waiting` rooms are not admitted; `running` ones are committed and decode together; both in order of age."""

    ROOM: type[DecodeRoom] = DecodeRoom

    def __init__(self, parts: Parts, settings: DecodeSettings) -> None:
        super().__init__(parts, settings)
        self.batch = Batch(self.rooms, self.ledger, self.page_size, settings.max_running)
        self._places = Recent()  # requests that ran, and for how long each had its place
        self._on_message |= {
            OpenDecode: self._open, Abort: self._abort, PrefillDone: self._prefill_done,
        }  # fmt: skip

    @property
    def waiting(self) -> list[int]:
        return self.batch.waiting

    @property
    def running(self) -> list[int]:
        return self.batch.running

    # --- messages ---

    def _open(self, router: Address, message: OpenDecode) -> None:
        spec, limit = message.spec, self.info.max_total_tokens
        cause = self.place_refused(message.room)
        if cause is None:
            cause = refusal(len(spec.prompt_ids), spec.sampling.max_tokens, limit, limit)
        if cause is not None:
            return self.refuse_open(router, message.room, cause)
        members = message.sources or (Member(LEADER, message.prefill, whole(self.info.layout)),)
        try:
            routes = self.writers.routes(members)
        except TransferError as error:
            return self.refuse_open(router, message.room, Cause("handoff_failed", str(error), self.role))
        sources = {member.rank: member.address for member in members if member.rank in routes}
        writers = {rank: address.incarnation for rank, address in sources.items()}
        offers = {m.address.incarnation: with_host(m) for m in members if m.rank in routes}
        record = self.new_room(router, message, message.prefill)
        machine = ReceiverMachine(writers, self.info.computes_first)
        record |= {"machine": machine, "sources": sources, "routes": routes, "offers": offers, "past": Past(spec)}
        text = self.texts.stream(spec.sampling, spec.frozen_ids)
        return self.take_in(self.ROOM(**record, text=text, generated=len(spec.frozen_ids)))

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

    # --- admission, commit ---

    def admit(self) -> None:
        while (misfit := self.batch.misfit()) is not None:
            counts = self.ledger.counts()
            needed = pages_needed(misfit.total_tokens, self.page_size)
            text = f"the request may need {needed} pages; {counts.retired} of the pool's {counts.total} are retired"
            self.fail(misfit, ReceiverEvent.FAIL, text, "", "handoff_failed")
        while (room := self.batch.admit()) is not None:
            room.admitted_s = self.clock.now_s()
            self.act(room, room.machine.handle(ReceiverEvent.ADMIT))

    def _commit(self, room: DecodeRoom) -> None:
        assert room.holding is not None
        self.ledger.end_lease(room.holding, room.quiet)
        self.expect(room, False)
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
                    self.hand_out(room)
                case receiver.NoteReceived(rank):
                    self.tell_room(room, Received(room.room, rank))
                case receiver.Check():
                    self.settle_checks(room)
                case receiver.Commit():
                    self._commit(room)
                case receiver.AbortWriter():
                    self._quarantine(room)
                    self.abort_writers(room)
                case receiver.Report(cause):
                    self.tell_room(room, Failed(room.room, self.role, cause))
                case receiver.Ack():
                    self.tell_room(room, AbortAck(room.room, self.role, LEADER))
                case receiver.AnswerCommitted():
                    self.tell_room(room, Committed(room.room))
                case receiver.LeaveBatch():
                    self.batch.leave(room)
                case receiver.Retract():
                    self._tell_retracted(room)
                case receiver.Release():
                    self._release(room)

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
        self.expect(room, False)
        self.batch.leave(room)
        del self.rooms[room.room]

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

    def queues(self) -> dict[str, int]:
        return self.batch.queues()
