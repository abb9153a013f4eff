"""Where a prompt's source pages come from, and who else has them: the pool, its siblings, what was kept of it."""

from __future__ import annotations

from collections import Counter

from kvferry.actors.forward import Forward
from kvferry.actors.prefill.kept import KeptPrompts
from kvferry.actors.prefill.room import PrefillRoom
from kvferry.actors.prefill.siblings import Siblings
from kvferry.memory.admission import pages_needed
from kvferry.memory.ledger import PageLedger
from kvferry.protocol.sender import SenderState

_BEFORE_PAGES = (SenderState.AWAITING_PAGES, SenderState.AWAITING_DESTINATION, SenderState.QUEUED)


class SourcePages:
    """Cache gives way to whoever is in turn: kept prompts first, then what siblings have not come for."""

    def __init__(self, ledger: PageLedger, page_size: int, forward: Forward, counts: Counter[str]) -> None:
        self._ledger, self._page_size, self._forward, self._counts = ledger, page_size, forward, counts
        self.siblings = Siblings(ledger, page_size)
        self.kept = KeptPrompts(ledger, page_size)

    def must_wait(self, room: PrefillRoom) -> bool:
        """A sibling is computing what the room lacks."""
        return room.remaining > 0 and self.siblings.must_wait(room)

    def reserve(self, room: PrefillRoom) -> bool:
        """Pages for the whole prompt, and a row: what was kept of it or what a sibling has computed, and the others.
        All or none: False when too few are free, and no cache that gives way to this room is left.
        """
        while True:
            kept, shared = self.kept.pages(room), self.siblings.shared(room)
            found = max(kept, shared, key=len)
            missing = pages_needed(room.prompt_tokens, self._page_size) - len(found)
            room.holding = self._ledger.reserve(room.room, missing, rows=1, shared=found)
            if room.holding is not None:
                break
            displaced = self.kept.give_way(room, missing - self._ledger.free, self._forward.done)
            if displaced:
                self._counts["pages displaced"] += displaced
            elif not self.siblings.give_way(self._forward.done):
                return False
        room.computed = min(len(found) * self._page_size, room.prompt_tokens)
        self.kept.ended(room, self._forward.done)
        taken = len(shared) if len(shared) > len(kept) else 0
        self._counts["prompt tokens shared"] += taken * self._page_size
        if room.drawn:
            self._counts["prompt tokens computed again"] += room.remaining
        if room.remaining:
            self.siblings.took(room, taken, self._forward.done)
        return True

    def next_most(self, room: PrefillRoom, most: int) -> int:
        """Tokens that the room's next chunk may have, if `most` fit: what siblings share ends with a chunk."""
        full = self.siblings.full_pages(room) * self._page_size
        return min(most, full - room.computed) if room.computed < full else most

    def keep(self, room: PrefillRoom) -> None:
        """The prompt is computed and has no destination: its pages become cache."""
        self.kept.keep(room, self._forward.done)

    def stopped(self, room: PrefillRoom) -> None:
        """The room computes no more."""
        self.siblings.ended(room)

    def ended(self, room: PrefillRoom) -> None:
        """The room is gone. Its own holding is the leader's to release."""
        self.siblings.ended(room)
        self.kept.ended(room, self._forward.done)

    def tick(self, now_s: float, rooms: list[PrefillRoom]) -> None:
        without_pages = {room.spec.group for room in rooms if room.machine.state in _BEFORE_PAGES}
        self.siblings.tick(now_s, without_pages, self._forward.done)

    def tables(self) -> dict[int, tuple[int, ...]]:
        """Room, or group -> cached pages, for the ledger's recount."""
        return self.siblings.tables() | self.kept.tables()
