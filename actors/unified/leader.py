"""The leader of a unified instance: both legs of a room in one process, and a handoff that copies nothing.

To the router it is a prefill and a decode at one address. The room opens both legs here and hears both answers; what
lies between them, destination, writes, notification, is a step from one queue to the next: the pages that prefill
filled are the pages that decode runs on. So everything that decode's leader knows about rooms (admission, ages,
retraction, stop rules, next attempts) holds here as it is; this class adds the chunks of prompts to its forwards.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from kvferry.actors.chunks import chunk_of, next_chunk
from kvferry.actors.decode.decode import Decode
from kvferry.actors.decode.room import DecodeRoom
from kvferry.actors.leg_room import drop
from kvferry.actors.load import Recent
from kvferry.actors.parts import Parts
from kvferry.actors.settings import DecodeSettings, UnifiedSettings
from kvferry.actors.unified.room import UnifiedRoom
from kvferry.engine.contract import Drawn, Sequence, StepPlan, StepResult
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Wait
from kvferry.protocol.messages import (
    AbortAck,
    Admitted,
    Committed,
    Drained,
    Load,
    Message,
    Opened,
    OpenPrefill,
    PrefillDone,
    UnknownRoom,
)
from kvferry.protocol.rank import LEADER
from kvferry.protocol.receiver import Ack, ReceiverEvent, ReceiverState
from kvferry.protocol.room import DECODE, PREFILL


class UnifiedLeader(Decode):
    """`prefilling` rooms are admitted and being computed; the rest is decode's. A prompt's chunks share the forwards of
    the running batch, which goes first.
    """

    ROOM = UnifiedRoom

    def __init__(self, parts: Parts, settings: UnifiedSettings) -> None:
        super().__init__(parts, DecodeSettings(max_running=settings.max_running, max_rooms=settings.max_rooms))
        self.chunks = settings
        self.prefilling: deque[int] = deque()
        self._speed = Recent()  # prompt tokens and seconds of recent forwards that had any
        self._on_message |= {OpenPrefill: self._open_prefill}

    # --- the prefill leg: nothing is kept for it, the room's record is decode's ---

    def _open_prefill(self, router: Address, message: OpenPrefill) -> None:
        cause = self.place_refused(message.room)
        if cause is not None:
            return self.refuse_open(router, message.room, cause)
        self.network.send(router.incarnation, Opened(message.room, PREFILL))
        return None

    def links_needed(self, room: DecodeRoom) -> list[Address]:
        return [room.spec.front]

    def unknown_room(self, peer: Address, room: int) -> None:
        """Both legs of it are over here."""
        self.counts["messages for unknown rooms"] += 1
        for leg in (PREFILL, DECODE):
            self.network.send(peer.incarnation, UnknownRoom(room, leg))

    def tell_both(self, room: DecodeRoom, message: Message) -> None:
        self.tell_room(room, message)

    # --- admitted: computed here instead of being received ---

    def hand_out(self, room: DecodeRoom) -> None:
        assert room.holding is not None
        self.prefilling.append(room.room)
        room.clocks.wait(Wait.PREFILL, self.clock.now_s())
        self.tell_room(room, Admitted(room.room, len(room.holding.pages)))

    def abort_writers(self, room: DecodeRoom) -> None:
        """The writer is our own forward: with none running, nothing can be written any more."""
        drop(self.prefilling, room.room)
        if not room.machine.stepping:
            self.act(room, room.machine.rank_drained(LEADER, complete=False))

    def _quarantine(self, room: DecodeRoom) -> None:
        """No peer has the pages; they stay owned until the forward that names them is done."""
        room.clocks.stop()
        self.batch.leave(room)

    def seek_proof(self) -> None:
        """It comes with the end of the forward."""

    def _commit(self, room: DecodeRoom) -> None:
        """Prefill's pages are decode's: the owner changes, and nothing is copied."""
        assert isinstance(room, UnifiedRoom) and room.first is not None
        room.clocks.stop()
        self.tell_room(room, Committed(room.room))
        self.batch.commit(room)
        self._token(room, room.first.token_id, room.first.logprobs)

    def act(self, room: DecodeRoom, commands: list[Any]) -> None:
        """An abort is acked for both legs: the router has asked each of them."""
        super().act(room, commands)
        for command in commands:
            if isinstance(command, Ack):
                self.tell_room(room, AbortAck(room.room, PREFILL, LEADER))

    # --- the forward ---

    def plan_step(self, step: int) -> StepPlan | None:
        """One token of each running request, then chunks of prompts in order of admission within the rest."""
        plan = super().plan_step(step)
        sequences = [] if plan is None else list(plan.sequences)
        budget = self.chunks.batch_tokens - len(sequences)
        for room_id in self.prefilling:
            room = self._room(room_id)
            size = next_chunk(room.remaining, min(self.chunks.chunk_tokens, budget), self.page_size)
            if size == 0:
                break
            budget -= size
            sequences.append(chunk_of(room, size, step, self.ledger))
        return StepPlan(step, tuple(sequences)) if sequences else None

    def _room(self, room_id: int) -> UnifiedRoom:
        room = self.rooms[room_id]
        assert isinstance(room, UnifiedRoom)
        return room

    def step_finished(self, plan: StepPlan, result: StepResult) -> None:
        prompts = [s for s in plan.sequences if self._room(s.key).remaining]
        if prompts:
            self._speed.add(sum(len(sequence.token_ids) for sequence in prompts), result.compute_s)
        super().step_finished(plan, result)

    def sequence_finished(self, room: DecodeRoom, sequence: Sequence, drawn: Drawn | None) -> None:
        assert isinstance(room, UnifiedRoom)
        if room.remaining:
            self._chunk_computed(room, len(sequence.token_ids), drawn)
        else:
            super().sequence_finished(room, sequence, drawn)

    def _chunk_computed(self, room: UnifiedRoom, tokens: int, drawn: Drawn | None) -> None:
        room.computed += tokens
        room.machine.step_ended()
        if room.machine.state is not ReceiverState.RECEIVING:
            self.act(room, room.machine.rank_drained(LEADER, complete=False))
            return
        room.clocks.progress(self.clock.now_s())
        self.tell_room(room, self.progress(room, "computed", chunk=room.chunk, tokens=tokens))
        room.chunk += 1
        if drawn is not None:
            drop(self.prefilling, room.room)
            room.first = drawn
            self.tell_room(room, PrefillDone(room.room, room.chunk, self.clock.now_s() - room.opened_s))
            self.tell_room(room, Drained(room.room, LEADER, True))
            self.act(room, room.machine.rank_received(LEADER))
            self.act(room, room.machine.handle(ReceiverEvent.ALL_RECEIVED))

    def settle_checks(self, room: DecodeRoom) -> None:
        """Nothing was moved."""
        self.act(room, room.machine.handle(ReceiverEvent.CHECKED))

    def report_progress(self) -> None:
        """Also for those that wait for their turn to be computed, as prefill tells it."""
        super().report_progress()
        for position, room_id in enumerate(self.prefilling):
            room = self._room(room_id)
            news = self.progress(room, "queued", position=position, chunk=room.chunk - 1)
            news = msgspec.structs.replace(news, leg=PREFILL)
            room.clocks.queued(PREFILL, position, news.step, room.chunk, self.clock.now_s())
            self.tell_room(room, news)

    def load(self) -> Load:
        """Both roles' in one: prompts that are not computed yet, whether they are admitted or not."""
        queued = sum(self._room(room).remaining for room in (*self.waiting, *self.prefilling))
        return msgspec.structs.replace(
            super().load(), role=self.info.role, queued_tokens=queued, tokens_per_s=self._speed.per_s
        )

    def queues(self) -> dict[str, int]:
        return super().queues() | {"prefilling": len(self.prefilling)}
