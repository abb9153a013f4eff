"""The requests of one decode by age: who comes in, who runs in the next forward, who gives up its pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from kvferry.actors.decode.room import DecodeRoom
from kvferry.engine.contract import Sequence, StepPlan
from kvferry.memory.admission import Admission, Phase, pages_needed
from kvferry.memory.ledger import PageLedger
from kvferry.protocol.messages import Load
from kvferry.protocol.receiver import ReceiverState


class Batch:
    """`rooms` are the leader's own, by id. The rules are `Admission`'s; here they meet rooms and forwards."""

    def __init__(self, rooms: Mapping[int, DecodeRoom], ledger: PageLedger, page_size: int, max_running: int) -> None:
        self._rooms, self._ledger, self._page_size, self._max_running = rooms, ledger, page_size, max_running
        self._admission = Admission(ledger, page_size, max_running)

    @property
    def waiting(self) -> list[int]:
        """Rooms that are not admitted, the oldest first."""
        return [claim.key for claim in self._admission.waiting]

    @property
    def running(self) -> list[int]:
        """Committed rooms, the oldest first."""
        return [claim.key for claim in self._admission.running]

    @property
    def places(self) -> int:
        """Places taken: rooms that run or receive. Those that only wait for proof take pages, but no place."""
        return len(self._admission.receiving) + len(self._admission.running)

    def load(self, role: str, place_s: float) -> Load:
        """With the rooms counted in whose prompts are still computed elsewhere (prefill_complete), as if they were
        candidates already: what they will take is not free for another one, and those who find nothing will wait.
        """
        waiting, free_pages, free_places = len(self.waiting), self._ledger.free, self._max_running - self.places
        for room in self._rooms.values():
            if not room.opened or room.machine.state is not ReceiverState.AWAITING_PREFILL:
                continue
            pages = pages_needed(room.prompt_tokens + 1, self._page_size)
            if waiting or free_places < 1 or free_pages < pages + self.places:
                waiting += 1
            else:
                free_pages, free_places = free_pages - pages, free_places - 1
        return Load(
            role, waiting=waiting, running=self.places, free_pages=free_pages, total_pages=self._ledger.usable,
            free_places=free_places, place_s=place_s,
        )  # fmt: skip

    def queues(self) -> dict[str, int]:
        """How many rooms are where."""
        states = Counter(room.machine.state for room in self._rooms.values())
        return {
            "rooms": len(self._rooms),
            "waiting": len(self.waiting),
            "receiving": states[ReceiverState.RECEIVING] + states[ReceiverState.CHECKING],
            "running": len(self.running),
            "releasing": states[ReceiverState.RELEASING],
        }

    def arrive(self, room: DecodeRoom, now_s: float) -> None:
        """It brings its prompt, what earlier attempts have made, and the token that prefill will draw."""
        tokens = room.prompt_tokens + 1
        room.claim = self._admission.arrive(room.room, room.spec.request, tokens, room.total_tokens, now_s)

    def misfit(self) -> DecodeRoom | None:
        """A room that waits, and that pages which have been retired leave no room for."""
        if not self._ledger.retired:
            return None
        usable = self._ledger.usable
        return next((self._rooms[claim.key] for claim in self._admission.waiting if claim.need > usable), None)

    def admit(self) -> DecodeRoom | None:
        """The next room that may come in, with its holding; None when the oldest candidate has to wait."""
        claim = self._admission.admit()
        if claim is None:
            return None
        room = self._rooms[claim.key]
        room.holding = claim.holding
        return room

    def commit(self, room: DecodeRoom) -> None:
        assert room.claim is not None
        self._admission.commit(room.claim)

    def retract(self, room: DecodeRoom, now_s: float) -> None:
        """Out of the batch; its next attempt keeps its place."""
        assert room.claim is not None
        self._admission.retract(room.claim, now_s)

    def leave(self, room: DecodeRoom) -> None:
        """Safe at any time, and more than once."""
        if room.claim is not None:
            self._admission.leave(room.claim)

    def make_room(self, retract: Callable[[DecodeRoom], None]) -> None:
        """Every running request gets the page that its next token needs, the oldest first.

        Call it while no forward runs: `retract` must release the room's pages at once, and a forward that still
        wrote to them would not let it.
        """
        for claim in list(self._admission.running):
            while claim.phase is Phase.RUNNING:  # it may be retracted for an older one, or for itself
                room = self._rooms[claim.key]
                victim = self._admission.grow(claim, len(room.spec.prompt_ids) + room.generated)
                if victim is None:
                    break
                retract(self._rooms[victim.key])

    def plan(self, step: int) -> StepPlan | None:
        """One token of each running request, or None when there is none."""
        if not self._admission.running:
            return None
        return StepPlan(step, tuple(self._sequence(self._rooms[claim.key], step) for claim in self._admission.running))

    def _sequence(self, room: DecodeRoom, step: int) -> Sequence:
        assert room.holding is not None
        self._ledger.name_in_step(room.holding, step)
        room.machine.step_started()
        position = len(room.spec.prompt_ids) + room.generated - 1
        pages, history = room.holding.pages, room.past.history()
        return Sequence(room.room, (room.last_token,), position, pages, room.spec.sampling, history)
