"""Decode's leader (TP 1: also its only rank): admit, receive, run the batch, publish."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from kvferry.actors.decode.room import DecodeRoom
from kvferry.actors.leader import Leader, drop
from kvferry.actors.ports import Clock, LostReason, Network, Resolve
from kvferry.actors.settings import ClockSettings, DecodeSettings
from kvferry.engine.contract import Engine, Sequence, StepPlan, StepResult, TextFactory
from kvferry.memory.admission import pages_needed, refusal
from kvferry.memory.proof import Drained as DrainedProof
from kvferry.memory.proof import Exited, NeverGiven, Quiescent, Stepped
from kvferry.protocol import receiver
from kvferry.protocol.clocks import Clocks, Wait
from kvferry.protocol.errors import Cause
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.messages import (
    Abort,
    AbortAck,
    AbortTransfer,
    Address,
    Admitted,
    Committed,
    Destination,
    Drained,
    Failed,
    OpenDecode,
    Progress,
    RankInfo,
    Received,
    Registered,
    RegistrationRefused,
    Stop,
    UnknownRoom,
)
from kvferry.protocol.metadata import Metadata, decode_notification
from kvferry.protocol.receiver import ReceiverEvent, ReceiverMachine, ReceiverState
from kvferry.transfer.contract import Endpoint, encode_descriptor

RANK = 0
REQUIRED_ACKS = frozenset({RANK})


class Notified(msgspec.Struct, frozen=True):
    """Item: a notification came on the data path, from the agent of that name."""

    agent: str
    payload: bytes


class Decode(Leader):
    """Its own task alone writes its state; the forward runs on the engine's thread."""

    role = "decode"

    def __init__(
        self,
        network: Network,
        clock: Clock,
        mailbox: int,
        resolve: Resolve,
        engine: Engine,
        texts: TextFactory,
        endpoint: Endpoint,
        info: RankInfo,
        settings: DecodeSettings,
        limits: ClockSettings,
    ) -> None:
        super().__init__(network, clock, mailbox, resolve, engine, info, limits)
        self.settings = settings
        self.endpoint = endpoint
        self.rooms: dict[int, DecodeRoom] = {}
        self.waiting: deque[int] = deque()
        self.running: deque[int] = deque()
        self._texts = texts
        self._agent = encode_descriptor(endpoint.descriptor())
        self._page_size = engine.limits.page_size
        self._on_message = {
            OpenDecode: self._open, Abort: self._abort, Stop: self._stop, Drained: self._drained,
            UnknownRoom: self._unknown, Progress: self._progress_of_prefill,
            Registered: self.registered, RegistrationRefused: self.registration_refused,
        }  # fmt: skip

    def notified(self, agent: str, payload: bytes) -> None:
        """The endpoint's `on_notify`."""
        self._mailbox.put(Notified(agent, payload))

    async def close(self) -> None:
        await self.endpoint.close()
        await self.engine.close()
        await super().close()

    def receive(self, item: Any) -> None:
        if isinstance(item, Notified):
            self._notified(item)
        else:
            super().receive(item)

    # --- messages ---

    def _open(self, router: Address, message: OpenDecode) -> None:
        if (cause := self._refusal(message)) is not None:
            return self.refuse_open(router, message.room, cause)
        now_s = self.clock.now_s()
        clocks = Clocks(self.limits, now_s)
        clocks.wait(Wait.ADMISSION, now_s)
        room = DecodeRoom(
            message.room, message.attempt, message.spec, router, message.prefill, now_s, clocks,
            ReceiverMachine(REQUIRED_ACKS), self._texts.stream(message.spec.sampling),
        )  # fmt: skip
        self.rooms[room.room] = room
        for peer in self.links_needed(room):
            self.network.dial(peer)
        self.open_if_linked(room)
        return None

    def _refusal(self, message: OpenDecode) -> Cause | None:
        if message.room in self.rooms:
            return Cause("handoff_failed", "the room is open here already", self.role, room=message.room)
        if len(self.rooms) >= self.settings.max_rooms:
            text = f"decode holds {len(self.rooms)} rooms; the limit is {self.settings.max_rooms}"
            return Cause("overloaded", text, self.role, room=message.room)
        spec, limit = message.spec, self.info.max_total_tokens
        return refusal(len(spec.prompt_ids), spec.sampling.max_tokens, limit, limit)

    def leg_opened(self, room: DecodeRoom) -> None:
        self.waiting.append(room.room)

    def _abort(self, router: Address, message: Abort) -> None:
        room = self.rooms.get(message.room)
        if room is None:
            return self.unknown_room(router, message.room)
        event = ReceiverEvent.ABORT_RUNNING if message.stop_running else ReceiverEvent.ABORT
        return self._do(room, room.machine.handle(event, message.cause))

    def _stop(self, _front: Address, message: Stop) -> None:
        room = self.rooms.get(message.room)
        if room is not None:
            cause = self.cause(room, "aborted", "the client has gone", room.machine.state.name)
            self._do(room, room.machine.handle(ReceiverEvent.STOP, cause))

    def _drained(self, peer: Address, message: Drained) -> None:
        room = self._of_prefill(peer, message.room)
        if room is not None:
            cause = self.cause(room, "handoff_failed", "prefill ended the transfer", "RECEIVING", peer.name)
            self._do(room, room.machine.rank_drained(message.rank, message.complete, cause))

    def _unknown(self, peer: Address, message: UnknownRoom) -> None:
        room = self._of_prefill(peer, message.room)
        if room is not None:
            cause = self.cause(room, "handoff_failed", "prefill does not know the room", "RECEIVING", peer.name)
            self._do(room, room.machine.handle(ReceiverEvent.UNKNOWN, cause))

    def _progress_of_prefill(self, peer: Address, message: Progress) -> None:
        room = self._of_prefill(peer, message.room)
        if room is None:
            return
        now_s = self.clock.now_s()
        # The engine's step counter rises for other rooms too: that is progress only while this one queues.
        step = message.step if message.event == "queued" else 0
        room.clocks.queued("prefill", message.position, step, message.chunk + 1, now_s)
        if message.event == "computed" and not room.machine.transferring:
            room.machine.transferring = True
            room.clocks.wait(Wait.TRANSFER, now_s)

    def _of_prefill(self, peer: Address, room_id: int) -> DecodeRoom | None:
        """The room, if it is here and `peer` is its prefill. What comes for other rooms is counted, no more."""
        room = self.rooms.get(room_id)
        if room is None or room.prefill.incarnation != peer.incarnation:
            self.counts["late or stray messages of prefill"] += 1
            return None
        return room

    # --- links ---

    def leg_rooms(self) -> list[DecodeRoom]:
        return list(self.rooms.values())

    def links_needed(self, room: DecodeRoom) -> list[Address]:
        return [room.spec.front, room.prefill]

    def link_up(self, peer: Address) -> None:
        super().link_up(peer)
        for room in self.leg_rooms():
            # A new session with a prefill whose rooms still wait for proof: ask again. UnknownRoom answers it too.
            if room.prefill.incarnation == peer.incarnation and room.machine.state is ReceiverState.RELEASING:
                self._abort_writer(room)

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        super().link_lost(peer, reason)
        for room in self.leg_rooms():
            for party, event in (
                (room.router, ReceiverEvent.ROOM_LOST),
                (room.prefill, ReceiverEvent.PREFILL_LOST),
                (room.spec.front, ReceiverEvent.FRONT_LOST),
            ):
                if party.incarnation == peer.incarnation:
                    self._fail(room, event, f"the link to {peer.name} ended: {reason.value}", peer.name)

    def peer_exited(self, peer: Address) -> None:
        """The end of the writer is proof only where a transport says so (design §5)."""
        event = ReceiverEvent.PREFILL_EXITED if self.endpoint.proofs.exited else ReceiverEvent.PREFILL_LOST
        for room in self.leg_rooms():
            if room.prefill.incarnation == peer.incarnation:
                self._fail(room, event, f"process {peer.pid} of {peer.name} has ended", peer.name)

    def _fail(self, room: DecodeRoom, event: ReceiverEvent, text: str, peer: str, code: str = "peer_lost") -> None:
        cause = self.cause(room, code, text, room.machine.state.name, peer)
        self._do(room, room.machine.handle(event, cause))

    # --- admission, receiving, commit ---

    def admit(self) -> None:
        """In order of arrival, whatever fits with prompt + max_tokens reserved; so what is admitted can finish."""
        while self.waiting and self._holding_rooms() < self.settings.max_running:
            room = self.rooms[self.waiting[0]]
            holding = self.ledger.reserve(room.room, pages_needed(room.total_tokens, self._page_size), rows=1)
            if holding is None:
                return
            self.waiting.popleft()
            room.holding = holding
            self._do(room, room.machine.handle(ReceiverEvent.ADMIT))

    def _holding_rooms(self) -> int:
        """Rooms that run or will: those that only wait for proof take pages, but no place in the batch."""
        waiting = ReceiverState.RELEASING
        return sum(room.holding is not None and room.machine.state is not waiting for room in self.rooms.values())

    def _hand_out(self, room: DecodeRoom) -> None:
        assert room.holding is not None
        pages = room.holding.pages[: pages_needed(room.prompt_tokens, self._page_size)]
        descriptor = self.endpoint.descriptor()
        destination = Destination(
            room.room, pages, 0, room.holding.rows[0], self._agent, descriptor.generation, tuple(REQUIRED_ACKS)
        )
        self.ledger.lease(room.holding, REQUIRED_ACKS, writer=room.prefill.incarnation)
        self._expect(room, True)
        room.clocks.wait(Wait.PREFILL, self.clock.now_s())
        self.tell_room(room, Admitted(room.room, len(room.holding.pages)))
        if not self.network.send(room.prefill.incarnation, destination):
            self._fail(room, ReceiverEvent.PREFILL_LOST, "there is no link to prefill", room.prefill.name)

    def _notified(self, item: Notified) -> None:
        news = decode_notification(item.payload)
        if news is None:
            self.counts["notifications that do not decode"] += 1
            return
        room = self.rooms.get(news.room)
        if room is None or room.prefill.incarnation != news.incarnation:
            self.counts["late or stray notifications"] += 1
            return
        self._do(room, room.machine.rank_received(news.rank))
        if room.machine.all_received:
            problem = self._check(room)
            if problem is None:
                self._do(room, room.machine.handle(ReceiverEvent.ALL_RECEIVED))
            else:
                self._fail(room, ReceiverEvent.CHECK_FAILED, problem, room.prefill.name, "handoff_failed")

    def _check(self, room: DecodeRoom) -> str | None:
        """What is wrong with the metadata as it lies here, or None."""
        found = self._metadata(room)
        expected = (room.room, room.prefill.incarnation, room.prompt_tokens)
        if (found.room, found.incarnation, found.prompt_tokens) != expected:
            return f"the metadata row holds {found}; expected room, incarnation and prompt tokens {expected}"
        if not 0 <= found.first_token < self.engine.limits.vocab_size:
            return f"the first token is {found.first_token}; allowed: 0 to {self.engine.limits.vocab_size - 1}"
        return None

    def _metadata(self, room: DecodeRoom) -> Metadata:
        assert room.holding is not None
        return Metadata.unpack(self.engine.metadata_row(room.holding.rows[0]))

    def _commit(self, room: DecodeRoom) -> None:
        assert room.holding is not None
        self.ledger.end_lease(room.holding, DrainedProof(frozenset(room.machine.acks)))
        self._expect(room, False)
        room.clocks.stop()
        self.tell_room(room, Committed(room.room))
        self.running.append(room.room)
        self._token(room, self._metadata(room).first_token)

    # --- the running batch ---

    def plan_step(self, step: int) -> StepPlan | None:
        if not self.running:
            return None
        return StepPlan(step, tuple(self._sequence(self.rooms[room], step) for room in self.running))

    def _sequence(self, room: DecodeRoom, step: int) -> Sequence:
        assert room.holding is not None
        self.ledger.name_in_step(room.holding, step)
        room.machine.step_started()
        position = room.prompt_tokens + room.generated - 1
        return Sequence(room.room, (room.last_token,), position, room.holding.pages, room.spec.sampling)

    def step_finished(self, plan: StepPlan, result: StepResult) -> None:
        for sequence, drawn in zip(plan.sequences, result.drawn, strict=True):
            room = self.rooms[sequence.key]  # a room outlives each forward that names it
            assert drawn is not None
            commands = room.machine.step_ended()
            if room.machine.state is ReceiverState.RUNNING:
                self._token(room, drawn.token_id)
            self._do(room, commands)

    def _token(self, room: DecodeRoom, token_id: int) -> None:
        """One more token of a committed request; the stop rules are applied here, on ids and text."""
        emission = room.text.push(token_id)
        self.publish(room, room.generated, token_id, emission.text, emission.finish_reason)
        room.generated += 1
        room.last_token = token_id
        if emission.finish_reason:
            self._do(room, room.machine.handle(ReceiverEvent.FINISHED))

    # --- commands ---

    def _do(self, room: DecodeRoom, commands: list[receiver.ReceiverCommand]) -> None:
        for command in commands:
            match command:
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
                    drop(self.running, room.room)
                case receiver.Release():
                    self._release(room)

    def _abort_writer(self, room: DecodeRoom) -> None:
        cause = room.machine.cause or self.cause(room, "handoff_failed", "decode has ended the room", "RELEASING")
        self.network.send(room.prefill.incarnation, AbortTransfer(room.room, cause))

    def _quarantine(self, room: DecodeRoom) -> None:
        assert room.holding is not None
        room.clocks.stop()
        self.ledger.quarantine(room.holding)

    def _release(self, room: DecodeRoom) -> None:
        """The pages return on proof: the machine orders this only when it has one; the ledger checks it again."""
        holding = room.holding
        if holding is not None:
            self.ledger.release(holding, Quiescent(holding.id, Stepped(self.step_done), self._proof(room)))
            room.holding = None
        self._expect(room, False)
        drop(self.waiting, room.room)
        drop(self.running, room.room)
        del self.rooms[room.room]

    def _proof(self, room: DecodeRoom) -> NeverGiven | DrainedProof | Exited:
        assert room.holding is not None
        if room.machine.drained:
            return DrainedProof(frozenset(room.machine.acks))
        return Exited(room.prefill.incarnation) if room.machine.exited else NeverGiven()

    def _expect(self, room: DecodeRoom, expecting: bool) -> None:
        if expecting != room.expecting:
            room.expecting = expecting
            self.endpoint.expect(1 if expecting else -1)

    # --- clocks and status ---

    def check_clocks(self, now_s: float) -> None:
        for room in self.leg_rooms():
            expiry = room.clocks.expired(now_s)
            if expiry is not None and room.machine.kvpoll not in (KVPoll.FAILED, KVPoll.SUCCESS):
                text = f"{expiry.clock} for {expiry.elapsed_s:.1f} s; the limit is {expiry.limit_s:g} s"
                self._fail(room, ReceiverEvent.EXPIRED, text, room.prefill.name, "deadline_exceeded")

    def report_progress(self) -> None:
        for room in self.leg_rooms():
            # Proof comes over a link: if prefill still lives, a new session answers (see `link_up`).
            if room.machine.state is ReceiverState.RELEASING:
                self.network.dial(room.prefill)
        for position, room_id in enumerate(self.waiting):
            room = self.rooms[room_id]
            news = self.progress(room, "queued", position=position + 1)
            room.clocks.queued("decode", news.position, news.step, 0, self.clock.now_s())
            self.tell_room(room, news)
            self.network.send(room.prefill.incarnation, news)

    def block_tables(self) -> dict[int, tuple[int, ...]]:
        return {room.room: room.holding.pages for room in self.leg_rooms() if room.holding is not None}

    def queues(self) -> dict[str, int]:
        receiving = sum(room.machine.state is ReceiverState.RECEIVING for room in self.rooms.values())
        releasing = sum(room.machine.state is ReceiverState.RELEASING for room in self.rooms.values())
        return {
            "rooms": len(self.rooms),
            "waiting": len(self.waiting),
            "receiving": receiving,
            "running": len(self.running),
            "releasing": releasing,
        }
