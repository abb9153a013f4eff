"""Prefill's leader, which may be its only rank: receive, reserve, compute chunks, hand them to the data plane."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvferry.actors.chunks import chunk_of, next_chunk
from kvferry.actors.leg_room import drop
from kvferry.actors.load import Recent
from kvferry.actors.parts import Parts
from kvferry.actors.prefill.kept import line_up
from kvferry.actors.prefill.pages import SourcePages
from kvferry.actors.prefill.room import PrefillRoom
from kvferry.actors.prefill.writing import Writing
from kvferry.actors.settings import PrefillSettings
from kvferry.engine.contract import Drawn, StepPlan, StepResult
from kvferry.protocol import sender
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Wait, admission_wait
from kvferry.protocol.errors import Cause
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.messages import (
    Abort,
    AbortAck,
    Destination,
    Distrust,
    Failed,
    Load,
    OpenPrefill,
    PrefillDone,
    Progress,
)
from kvferry.protocol.rank import LEADER
from kvferry.protocol.sender import SenderEvent, SenderMachine, SenderState

#: States of a room whose prompt, or a part of it, is still to be computed.
NOT_COMPUTED = (
    SenderState.AWAITING_PAGES, SenderState.COMPUTING_AHEAD, SenderState.AWAITING_DESTINATION, SenderState.QUEUED,
    SenderState.COMPUTING,
)  # fmt: skip
#: States in which a `Destination` is what the room waits for.
_WITHOUT_DESTINATION = (SenderState.AWAITING_DESTINATION, SenderState.KEPT)


class Prefill(Writing):
    """`waiting` rooms have no pages, and may have some as soon as there are any; `active` ones are being computed."""

    def __init__(self, parts: Parts, settings: PrefillSettings) -> None:
        super().__init__(parts)
        self.settings = settings
        self.waiting: deque[int] = deque()
        self.active: deque[int] = deque()
        self._pages = SourcePages(self.ledger, self.page_size, self.forward, self.counts)
        self._speed = Recent()  # tokens and seconds of recent forwards
        self._on_message |= {
            OpenPrefill: self._open, Destination: self._destination, Abort: self._abort,
            Progress: self._progress_of_decode, Distrust: self._distrust,
        }  # fmt: skip

    # --- messages ---

    def _open(self, router: Address, message: OpenPrefill) -> None:
        cause = self.place_refused(message.room)
        tokens, limit = len(message.spec.fed_ids), self.info.max_prompt_tokens
        if cause is None and tokens > limit:
            text = f"the prompt has {tokens} tokens; prefill takes at most {limit}"
            cause = Cause("invalid_request", text, self.role, param="messages")
        if cause is not None:
            return self.refuse_open(router, message.room, cause)
        machine = SenderMachine(self.info.computes_first)
        return self.take_in(PrefillRoom(**self.new_room(router, message, message.decode), machine=machine))

    def leg_opened(self, room: PrefillRoom) -> None:
        if room.machine.state is SenderState.AWAITING_PAGES:
            self._line_up(room)

    def _destination(self, peer: Address, message: Destination) -> None:
        room = self.rooms.get(message.room)
        if room is None:
            return self.unknown_room(peer, message.room)
        if peer.incarnation != room.peer.incarnation:
            self.counts["destinations from a stranger"] += 1
            return None
        if room.machine.state in _WITHOUT_DESTINATION:
            room.destination = message
            if self.info.computes_first:
                room.clocks.wait(Wait.TRANSFER, self.clock.now_s())
        return self.act(room, room.machine.handle(SenderEvent.DESTINATION))

    def _abort(self, router: Address, message: Abort) -> None:
        room = self.of_router(router, message.room)
        if room is None:
            return self.unknown_room(router, message.room)
        return self.act(room, room.machine.handle(SenderEvent.ABORT, message.cause))

    def _progress_of_decode(self, peer: Address, message: Progress) -> None:
        room = self.rooms.get(message.room)
        if room is None or room.peer.incarnation != peer.incarnation:
            self.counts["late or stray messages of decode"] += 1
        else:
            room.clocks.queued("decode", message.position, message.step, 0, self.clock.now_s())

    def _distrust(self, _peer: Address, message: Distrust) -> None:
        """What is kept of one room only has gone with it."""
        if self._pages.siblings.distrust(message.group, self.forward.done):
            self.counts["kept prompts dropped for a failed check"] += 1

    # --- reserve, compute ---

    def admit(self) -> None:
        """In order; one that waits for a sibling's pages needs none of its own and holds nobody back."""
        for room_id in tuple(self.waiting):
            room = self.rooms[room_id]
            if self._pages.must_wait(room):
                continue
            if not self._pages.reserve(room):
                return
            self.waiting.remove(room_id)
            if not room.remaining:
                self.act(room, room.machine.handle(SenderEvent.PIN))
                continue
            line_up(self.active, room, self.rooms)
            if not room.drawn:
                room.clocks.wait(Wait.PREFILL, self.clock.now_s())
            self.act(room, room.machine.handle(SenderEvent.RESERVE))
            self._tell(room, self.progress(room, "started", tokens=room.computed))

    def plan_step(self, step: int) -> StepPlan | None:
        """Chunks of the rooms in order of arrival, within the token budget."""
        budget = self.settings.batch_tokens
        sequences = []
        for room_id in self.active:
            room = self.rooms[room_id]
            most = self._pages.next_most(room, min(self.settings.chunk_tokens, budget))
            size = next_chunk(room.remaining, most, self.page_size)
            if size == 0:
                break
            budget -= size
            sequences.append(chunk_of(room, size, step, self.ledger))
        return StepPlan(step, tuple(sequences)) if sequences else None

    def step_finished(self, plan: StepPlan, result: StepResult) -> None:
        self._speed.add(sum(len(sequence.token_ids) for sequence in plan.sequences), result.compute_s)
        for sequence, drawn in zip(plan.sequences, result.drawn, strict=True):
            room = self.rooms[sequence.key]  # a room outlives each forward that names it
            room.computed = sequence.start + len(sequence.token_ids)
            self._pages.siblings.computed(room, self.clock.now_s())
            if room.machine.computing:
                self._chunk_computed(room, len(sequence.token_ids), drawn)
            last = drawn is not None
            self.act(room, room.machine.step_ended(SenderEvent.LAST_COMPUTED if last else SenderEvent.CHUNK_COMPUTED))

    def _chunk_computed(self, room: PrefillRoom, tokens: int, drawn: Drawn | None) -> None:
        room.clocks.progress(self.clock.now_s())
        event = "prepared" if room.destination is None else "computed"
        self.tell_both(room, self.progress(room, event, chunk=room.chunk, tokens=tokens))
        room.chunk += 1
        if drawn is not None:
            drop(self.active, room.room)
            if not room.drawn:
                self._first_token(room, drawn)

    def _first_token(self, room: PrefillRoom, drawn: Drawn) -> None:
        """It does not wait for the transfer. Decode repeats it, with the same text and stop rules."""
        room.drawn, room.first_token, room.first_logprobs = True, drawn.token_id, drawn.logprobs
        frozen = room.spec.frozen_ids
        emission = self.texts.stream(room.spec.sampling, frozen).push(room.first_token)
        self.outbox.put(room, len(frozen), room.first_token, emission, room.first_logprobs)
        offset_s, awaits = self.clock.now_s() - room.opened_s, room.destination is None
        self.tell_room(room, PrefillDone(room.room, room.chunk, offset_s, awaits))

    def ready_to_write(self, room: PrefillRoom) -> None:
        self._line_up(room)

    def _line_up(self, room: PrefillRoom) -> None:
        line_up(self.waiting, room, self.rooms)
        self._tell(room, self.progress(room, "queued", position=self.waiting.index(room.room) + 1))

    def _tell(self, room: PrefillRoom, news: Progress) -> None:
        """Decode is opened after prefill: what is said at once, under prefill_complete, it could not place."""
        if room.machine.kvpoll is KVPoll.BOOTSTRAPPING:
            self.tell_room(room, news)
        else:
            self.tell_both(room, news)

    # --- commands ---

    def act(self, room: PrefillRoom, commands: list[Any]) -> None:
        for command in commands:
            match command:
                case sender.Enqueue():
                    self.connect(room)
                case sender.Keep():
                    self._pages.keep(room)
                    room.clocks.wait(admission_wait(room.spec.was_admitted), self.clock.now_s())
                case sender.Write(last):
                    self.write(room, last)
                case sender.Cancel():
                    drop(self.active, room.room)
                    self._pages.stopped(room)
                    self.stop_writing(room)
                case sender.Report(cause):
                    self.tell_room(room, Failed(room.room, self.role, cause))
                case sender.Deliver():
                    self._deliver(room)
                case sender.Release():
                    self.say_stopped(room)
                    self._release(room)
                case sender.Strand():
                    self.tell_room(room, AbortAck(room.room, self.role, LEADER))
                    self.free_pages(room)
                    self.say_draining(room)

    def _deliver(self, room: PrefillRoom) -> None:
        self.say_delivered(room)
        self._release(room)

    def _release(self, room: PrefillRoom) -> None:
        self.free_pages(room)
        drop(self.waiting, room.room)
        drop(self.active, room.room)
        self._pages.ended(room)
        del self.rooms[room.room]

    # --- clocks and status ---

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        self._pages.tick(now_s, self.leg_rooms())

    def block_tables(self) -> dict[int, tuple[int, ...]]:
        return super().block_tables() | self._pages.tables()

    def report_progress(self) -> None:
        super().report_progress()
        for position, room_id in enumerate((*self.active, *self.waiting)):
            room = self.rooms[room_id]
            news = self.progress(room, "queued", position=position, chunk=room.chunk - 1)
            room.clocks.queued("prefill", news.position, news.step, room.chunk, self.clock.now_s())
            self.tell_both(room, news)

    def load(self) -> Load:
        todo = [room for room in self.rooms.values() if room.opened and room.machine.state in NOT_COMPUTED]
        return Load(self.role, sum(map(self._pages.siblings.left, todo)), self._speed.per_s)

    @property
    def groups(self) -> int:
        """Groups of siblings that something is remembered of."""
        return len(self._pages.siblings)

    def queues(self) -> dict[str, int]:
        kept = sum(room.machine.state is SenderState.KEPT for room in self.rooms.values())
        return {"rooms": len(self.rooms), "waiting": len(self.waiting), "active": len(self.active), "kept": kept}
