"""One prompt, several answers: the prompt's full pages are computed by one room and read by its siblings.

Each sample of a request with `n` is a room of its own, with its own destination, abort and next attempt. What they
share is the work: the first room of a group that gets pages computes the prompt; the others wait for it, hold its
full pages too, and compute only the rest (at least one token, from which their own first token is drawn). Between
the first room's end and the last sibling's coming the pages are kept as cache, which gives way when pages run short.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.actors.prefill.room import PrefillRoom
from kvferry.memory.ledger import Holding, PageLedger
from kvferry.memory.proof import NeverGiven, Quiescent, Stepped

#: Siblings are opened together; one that has not come by then has failed elsewhere.
GRACE_S = 5.0


@dataclass
class Kept:
    """The full pages of a computed prompt. `left`: siblings that have not taken them yet."""

    ids: tuple[int, ...]
    holding: Holding
    left: int
    until_s: float


class Siblings:
    """By group. Groups are the fronts' random numbers; rooms of none (0) never get here."""

    def __init__(self, ledger: PageLedger, page_size: int) -> None:
        self._ledger, self._page_size = ledger, page_size
        self._first: dict[int, int] = {}  # group -> the room that computes the prompt
        self._kept: dict[int, Kept] = {}

    def __len__(self) -> int:
        """Groups that something is remembered of."""
        return len(self._first.keys() | self._kept.keys())

    def full_pages(self, room: PrefillRoom) -> int:
        """Pages that a sibling can take over: all but the one of the last token, which everyone computes."""
        return (room.prompt_tokens - 1) // self._page_size if room.spec.group else 0

    def must_wait(self, room: PrefillRoom) -> bool:
        """A sibling is computing what this room can use."""
        return self.full_pages(room) > 0 and self._first.get(room.spec.group, room.room) != room.room

    def shared(self, room: PrefillRoom) -> tuple[int, ...]:
        """Pages with the beginning of the room's prompt, perhaps none. A next attempt's prompt may be longer."""
        kept = self._kept.get(room.spec.group)
        if kept is None:
            return ()
        count = min(self.full_pages(room), len(kept.holding.pages))
        tokens = count * self._page_size
        return kept.holding.pages[:count] if room.spec.fed_ids[:tokens] == kept.ids[:tokens] else ()

    def left(self, room: PrefillRoom) -> int:
        """Prompt tokens that the room will still compute itself."""
        if room.holding is None and (self.must_wait(room) or self.shared(room)):
            return min(room.remaining, room.prompt_tokens - self.full_pages(room) * self._page_size)
        return room.remaining

    def took(self, room: PrefillRoom, shared: int, step: int) -> None:
        """The room has its pages, `shared` of them from a sibling: if none, it is the one that computes them.

        `step`: the last forward that is done (nothing of ours is named by a later one).
        """
        group = room.spec.group
        if not self.full_pages(room):
            return
        kept = self._kept.get(group)
        if shared and kept is not None:
            kept.left -= 1
            if kept.left <= 0:
                self._drop(group, step)
        elif kept is None:
            self._first.setdefault(group, room.room)

    def computed(self, room: PrefillRoom, now_s: float) -> None:
        """More of the room's prompt is computed: once its full pages are, siblings may read them."""
        group, count = room.spec.group, self.full_pages(room)
        if self._first.get(group) != room.room or room.computed < count * self._page_size:
            return
        del self._first[group]
        if room.spec.samples > 1 and room.holding is not None:
            pages = room.holding.pages[:count]
            ids = room.spec.fed_ids[: count * self._page_size]
            kept = self._ledger.keep(group, pages)
            self._kept[group] = Kept(ids, kept, room.spec.samples - 1, now_s + GRACE_S)

    def ended(self, room: PrefillRoom) -> None:
        """The room is gone; if it was to compute the prompt, the next sibling does."""
        if self._first.get(room.spec.group) == room.room:
            del self._first[room.spec.group]

    def give_way(self, step: int) -> bool:
        """Let the oldest prompt go, because pages are short. False when there is none."""
        group = next(iter(self._kept), None)
        if group is None:
            return False
        self._drop(group, step)
        return True

    def distrust(self, group: int, step: int) -> bool:
        """What is kept of the group is not what it was: whoever comes for it computes it again. False for nothing."""
        if group not in self._kept:
            return False
        self._drop(group, step)
        return True

    def tick(self, now_s: float, waiting: set[int], step: int) -> None:
        """Let go of what nobody comes for. `waiting`: the groups of open rooms that have no pages yet."""
        for group, kept in list(self._kept.items()):
            if now_s >= kept.until_s and group not in waiting:
                self._drop(group, step)

    def tables(self) -> dict[int, tuple[int, ...]]:
        """Group -> pages, for the ledger's recount."""
        return {group: kept.holding.pages for group, kept in self._kept.items()}

    def _drop(self, group: int, step: int) -> None:
        holding = self._kept.pop(group).holding
        self._ledger.release(holding, Quiescent(holding.id, Stepped(step), NeverGiven()))
