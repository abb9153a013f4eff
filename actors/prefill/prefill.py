"""Prefill's leader (TP 1: also its only rank): receive, reserve, compute chunks, hand them to the data plane."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvferry.actors.chunks import chunk_of, next_chunk
from kvferry.actors.leader import Leader, drop
from kvferry.actors.leg_room import RANK
from kvferry.actors.load import Recent
from kvferry.actors.parts import Parts
from kvferry.actors.prefill.data_plane import Connected, DataPlane, WriteEnded
from kvferry.actors.prefill.room import PrefillRoom
from kvferry.actors.prefill.siblings import Siblings
from kvferry.actors.settings import PrefillSettings
from kvferry.engine.contract import StepPlan, StepResult
from kvferry.memory.admission import pages_needed
from kvferry.memory.proof import NeverGiven, Quiescent, Quiet, Stepped
from kvferry.protocol import sender
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Wait
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import (
    Abort,
    AbortAck,
    AbortTransfer,
    Destination,
    Drained,
    Failed,
    Load,
    OpenPrefill,
    PrefillDone,
    Progress,
    UnknownRoom,
)
from kvferry.protocol.sender import SenderEvent, SenderState
from kvferry.transfer.contract import TransferError, WriteOutcome

_BEFORE_PAGES = (SenderState.AWAITING_DESTINATION, SenderState.QUEUED)
#: States of a room whose prompt is still to be computed.
NOT_COMPUTED = (SenderState.AWAITING_DESTINATION, SenderState.QUEUED, SenderState.COMPUTING)


class Prefill(Leader[PrefillRoom]):
    """`waiting` rooms know their destination and have no pages; `active` ones are being computed."""

    role = "prefill"
    STOP, EXPIRED, FRONT_LOST = SenderEvent.STOP, SenderEvent.EXPIRED, SenderEvent.FRONT_LOST
    ROOM_LOST, PEER_LOST, FAIL = SenderEvent.ROOM_LOST, SenderEvent.DECODE_LOST, SenderEvent.FAIL

    def __init__(self, parts: Parts, settings: PrefillSettings) -> None:
        super().__init__(parts)
        self.settings = settings
        self.waiting: deque[int] = deque()
        self.active: deque[int] = deque()
        self._data_plane = DataPlane(
            self.engine, self.endpoint, self.network.address.incarnation, self.spawn, self._mailbox.put
        )
        self._siblings = Siblings(self.ledger, self.page_size)
        self._speed = Recent()  # tokens and seconds of recent forwards
        self._on_message |= {
            OpenPrefill: self._open, Destination: self._destination, Abort: self._abort,
            AbortTransfer: self._abort_transfer, Progress: self._progress_of_decode, UnknownRoom: self._unknown,
        }  # fmt: skip

    def receive(self, item: Any) -> None:
        match item:
            case Connected():
                self._connected(item)
            case WriteEnded():
                self._write_ended(item)
            case _:
                super().receive(item)

    # --- messages ---

    def _open(self, router: Address, message: OpenPrefill) -> None:
        cause = self.place_refused(message.room)
        tokens, limit = len(message.spec.fed_ids), self.info.max_prompt_tokens
        if cause is None and tokens > limit:
            text = f"the prompt has {tokens} tokens; prefill takes at most {limit}"
            cause = Cause("invalid_request", text, self.role, param="messages")
        if cause is not None:
            return self.refuse_open(router, message.room, cause)
        return self.take_in(PrefillRoom(**self.new_room(router, message, message.decode)))

    def _destination(self, peer: Address, message: Destination) -> None:
        room = self.rooms.get(message.room)
        if room is None:
            return self.unknown_room(peer, message.room)
        if peer.incarnation != room.peer.incarnation:
            self.counts["destinations from a stranger"] += 1
            return None
        if room.machine.state is SenderState.AWAITING_DESTINATION:
            room.destination = message
        return self.act(room, room.machine.handle(SenderEvent.DESTINATION))

    def _abort(self, router: Address, message: Abort) -> None:
        room = self.rooms.get(message.room)
        if room is None:
            return self.unknown_room(router, message.room)
        return self.act(room, room.machine.handle(SenderEvent.ABORT, message.cause))

    def _abort_transfer(self, peer: Address, message: AbortTransfer) -> None:
        room = self.rooms.get(message.room)
        if room is None:
            return self.unknown_room(peer, message.room)
        if peer.incarnation != room.peer.incarnation:
            self.counts["aborts from a stranger"] += 1
            return None
        return self.act(room, room.machine.handle(SenderEvent.ABORT_TRANSFER, message.cause))

    def _progress_of_decode(self, _peer: Address, message: Progress) -> None:
        room = self.rooms.get(message.room)
        if room is not None:
            room.clocks.queued("decode", message.position, message.step, 0, self.clock.now_s())

    def _unknown(self, _peer: Address, _message: UnknownRoom) -> None:
        """A room or a decode that has ended knows nothing of what we copied to it; that is normal."""
        self.counts["told of an unknown room"] += 1

    # --- links ---

    def peer_exited(self, peer: Address) -> None:
        for room in self.leg_rooms():
            if room.peer.incarnation == peer.incarnation:
                self.fail(room, SenderEvent.DECODE_EXITED, f"process {peer.pid} of {peer.name} has ended", peer.name)
        self._data_plane.forget(peer.incarnation)

    # --- reserve, compute ---

    def admit(self) -> None:
        """In order of arrival; one that waits for a sibling's pages needs none of its own and holds nobody back."""
        for room_id in tuple(self.waiting):
            room = self.rooms[room_id]
            if self._siblings.must_wait(room):
                continue
            if not self._reserve(room):
                return
            self.waiting.remove(room_id)
            self.active.append(room.room)
            room.clocks.wait(Wait.PREFILL, self.clock.now_s())
            self.act(room, room.machine.handle(SenderEvent.RESERVE))
            self.tell_both(room, self.progress(room, "started", tokens=room.computed))

    def _reserve(self, room: PrefillRoom) -> bool:
        """Source pages for the whole prompt; those that a sibling has computed are shared."""
        while True:
            shared = self._siblings.shared(room)
            pages = pages_needed(room.prompt_tokens, self.page_size) - len(shared)
            holding = self.ledger.reserve(room.room, pages, rows=1, shared=shared)
            if holding is not None:
                break
            if not self._siblings.give_way(self.forward.done):
                return False
        room.holding = holding
        room.computed = len(shared) * self.page_size
        self.counts["prompt tokens shared"] += room.computed
        self._siblings.took(room, len(shared), self.forward.done)
        return True

    def plan_step(self, step: int) -> StepPlan | None:
        """Chunks of the rooms in order of arrival, within the token budget."""
        budget = self.settings.batch_tokens
        sequences = []
        for room_id in self.active:
            room = self.rooms[room_id]
            most = min(self.settings.chunk_tokens, budget)
            if room.computed < (full := self._siblings.full_pages(room) * self.page_size):
                most = min(most, full - room.computed)  # the rest is a chunk of its own, as in every sibling
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
            self._siblings.computed(room, self.clock.now_s())
            event = SenderEvent.CHUNK_COMPUTED
            if drawn is not None:
                event = SenderEvent.LAST_COMPUTED
                room.first_token, room.first_logprobs = drawn.token_id, drawn.logprobs
            if room.machine.state is SenderState.COMPUTING:
                self._chunk_computed(room, len(sequence.token_ids), drawn is not None)
            self.act(room, room.machine.step_ended(event))

    def _chunk_computed(self, room: PrefillRoom, tokens: int, last: bool) -> None:
        room.clocks.progress(self.clock.now_s())
        self.tell_both(room, self.progress(room, "computed", chunk=room.chunk, tokens=tokens))
        room.chunk += 1
        if last:
            drop(self.active, room.room)
            # The first token does not wait for the transfer. Decode repeats it, with the same text and stop rules.
            frozen = room.spec.frozen_ids
            emission = self.texts.stream(room.spec.sampling, frozen).push(room.first_token)
            self.outbox.put(room, len(frozen), room.first_token, emission, room.first_logprobs)
            self.tell_room(room, PrefillDone(room.room, room.chunk, self.clock.now_s() - room.opened_s))

    # --- the data plane ---

    def _connect(self, room: PrefillRoom) -> None:
        try:
            self._data_plane.connect(room)
        except TransferError as error:
            self.fail(room, SenderEvent.FAIL, str(error), room.peer.name, "handoff_failed")

    def _connected(self, item: Connected) -> None:
        room = self.rooms.get(item.room)
        if room is None or room.machine.state is not SenderState.QUEUED:
            return
        if item.peer is None:
            self.fail(room, SenderEvent.FAIL, item.error, room.peer.name, "handoff_failed")
            return
        self._data_plane.connected(room, item.peer)
        self.waiting.append(room.room)
        self.tell_both(room, self.progress(room, "queued", position=len(self.waiting)))

    def _write(self, room: PrefillRoom, last: bool) -> None:
        assert room.holding is not None
        write = self._data_plane.plan(room, last)
        if last:
            room.machine.last_posted()
        if len(write.spans) == 0:
            return
        if room.holding.lease is None:
            self.ledger.lease(room.holding, {RANK: 0})
        room.machine.write_posted()
        if last:
            room.clocks.wait(Wait.TRANSFER, self.clock.now_s())
        self._data_plane.write(room, write)

    def _write_ended(self, item: WriteEnded) -> None:
        room = self.rooms[item.room]  # a room outlives each of its writes
        broken = item.result.outcome is WriteOutcome.BROKEN
        cause = None
        if broken:
            state = room.machine.state.name
            cause = self.cause(room, "handoff_failed", f"a write failed: {item.result.error}", state, room.peer.name)
        elif item.result.outcome is WriteOutcome.FLUSHED:
            room.clocks.progress(self.clock.now_s())
            self.tell_both(room, self.progress(room, "written", chunk=item.chunk, kv_bytes=item.kv_bytes))
        self.act(room, room.machine.write_ended(broken, cause))

    # --- commands ---

    def act(self, room: PrefillRoom, commands: list[Any]) -> None:
        for command in commands:
            match command:
                case sender.Enqueue():
                    self._connect(room)
                case sender.Write(last):
                    self._write(room, last)
                case sender.Cancel():
                    drop(self.active, room.room)
                    self._siblings.ended(room)
                    self._data_plane.cancel(room)
                case sender.Report(cause):
                    self.tell_room(room, Failed(room.room, self.role, cause))
                case sender.Deliver():
                    self._deliver(room)
                case sender.Release():
                    self.tell_both(room, Drained(room.room, RANK, False, room.kv_bytes, room.metadata_bytes))
                    self.tell_room(room, AbortAck(room.room, self.role, RANK))
                    self._release(room)
                case sender.Strand():
                    self.tell_room(room, AbortAck(room.room, self.role, RANK))
                    self._free_pages(room)

    def _deliver(self, room: PrefillRoom) -> None:
        self._data_plane.notify(room)
        self.tell_both(room, Drained(room.room, RANK, True, room.kv_bytes, room.metadata_bytes))
        self._release(room)

    def _release(self, room: PrefillRoom) -> None:
        self._free_pages(room)
        drop(self.waiting, room.room)
        drop(self.active, room.room)
        self._siblings.ended(room)
        del self.rooms[room.room]

    def _free_pages(self, room: PrefillRoom) -> None:
        """The source pages: every forward that names them is done, and every write from them has ended."""
        holding = room.holding
        if holding is None:
            return
        peers = NeverGiven() if holding.lease is None else Quiet(drained=frozenset({RANK}))
        self.ledger.release(holding, Quiescent(holding.id, Stepped(self.forward.done), peers))
        room.holding = None

    # --- clocks and status ---

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        without_pages = {room.spec.group for room in self.rooms.values() if room.machine.state in _BEFORE_PAGES}
        self._siblings.tick(now_s, without_pages, self.forward.done)

    def block_tables(self) -> dict[int, tuple[int, ...]]:
        return super().block_tables() | self._siblings.tables()

    def report_progress(self) -> None:
        for position, room_id in enumerate((*self.active, *self.waiting)):
            room = self.rooms[room_id]
            news = self.progress(room, "queued", position=position, chunk=room.chunk - 1)
            room.clocks.queued("prefill", news.position, news.step, room.chunk, self.clock.now_s())
            self.tell_both(room, news)

    def load(self) -> Load:
        todo = [room for room in self.rooms.values() if room.opened and room.machine.state in NOT_COMPUTED]
        return Load(self.role, sum(map(self._siblings.left, todo)), self._speed.per_s)

    @property
    def groups(self) -> int:
        """Groups of siblings that something is remembered of."""
        return len(self._siblings)

    def queues(self) -> dict[str, int]:
        return {"rooms": len(self.rooms), "waiting": len(self.waiting), "active": len(self.active)}
