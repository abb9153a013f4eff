"""Under prefill_complete: the pages of computed prompts that wait for their destination. They are cache, and give way.

A finished prompt must never keep anybody from computing: so its pages are in state *cached* until its destination
comes, and whoever finds no free page takes them, from the prompt that will be needed latest, from its end. What is left
of a prompt is always its beginning; the rest is computed again once the destination is known.

*Needed latest*: a prompt without a destination before one that has it; among those that are alike, one that decode
has never let in before one that it has retracted (which keeps its age there), then the one that was finished last,
since decode's order of age is the order in which it hears that prompts are computed.

Why nobody waits for ever. A room gets all of its pages in one step or none, so no two rooms hold a part each and wait
for the other's; until then its own cache can be taken by those before it in the queue, and by nobody else who waits.
Rooms that have their pages compute, or write, and give them back. The queue serves rooms with a destination first, in
the order of their destinations; and once a room has its pages they can't be displaced. So a prompt is computed at most
twice, and what is computed for the second time was asked for by a decode that has room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kvferry.actors.prefill.room import PrefillRoom
from kvferry.memory.ledger import Holding, PageLedger
from kvferry.memory.proof import NeverGiven, Quiescent, Stepped


def release(ledger: PageLedger, holding: Holding, step: int) -> None:
    """Pages of ours that were never handed to anybody; `step` is the last forward that is done."""
    ledger.release(holding, Quiescent(holding.id, Stepped(step), NeverGiven()))


def line_up(queue: deque[int], room: PrefillRoom, rooms: Mapping[int, PrefillRoom]) -> None:
    """Into the queue: rooms with a destination go before those without, otherwise in order of arrival."""
    before = len(queue)
    if room.destination is not None:
        before = sum(rooms[other].destination is not None for other in queue)
    queue.insert(before, room.room)


class KeptPrompts:
    """By room, in the order in which they were finished. Each is a holding in state *cached*."""

    def __init__(self, ledger: PageLedger, page_size: int) -> None:
        self._ledger, self._page_size = ledger, page_size
        self._rooms: dict[int, PrefillRoom] = {}
        self._holdings: dict[int, Holding] = {}

    def __len__(self) -> int:
        """Prompts of which something is left."""
        return len(self._holdings)

    def keep(self, room: PrefillRoom, step: int) -> None:
        """The room's pages become cache; its metadata row is given back. `step`: the last forward that is done."""
        assert room.holding is not None
        self._rooms[room.room] = room
        self._holdings[room.room] = self._ledger.keep(room.room, room.holding.pages)
        release(self._ledger, room.holding, step)
        room.holding = None

    def pages(self, room: PrefillRoom) -> tuple[int, ...]:
        """The beginning of the room's prompt, perhaps nothing of it."""
        holding = self._holdings.get(room.room)
        return holding.pages if holding is not None else ()

    def give_way(self, to: PrefillRoom, pages: int, step: int) -> int:
        """Displace up to `pages` pages of one prompt, the one that will be needed latest; how many it has lost.

        0: there is nothing that `to` may take. A page that another holding has, too, is lost but not yet free.
        """
        others = [room for room in self._rooms.values() if room is not to and room.room in self._holdings]
        if to.destination is None:  # those with a destination stand before it
            others = [room for room in others if room.destination is None]
        if pages < 1 or not others:
            return 0
        victim = max(enumerate(others), key=lambda at: (_needed(at[1]), at[0]))[1]
        holding = self._holdings[victim.room]
        lost = min(pages, len(holding.pages))
        left = holding.pages[: len(holding.pages) - lost]
        if left:
            self._holdings[victim.room] = self._ledger.keep(victim.room, left)
        else:
            del self._holdings[victim.room]
        release(self._ledger, holding, step)
        victim.computed = len(left) * self._page_size
        return lost

    def ended(self, room: PrefillRoom, step: int) -> None:
        """The room has its pages again, or is gone. Safe to call for any room."""
        self._rooms.pop(room.room, None)
        holding = self._holdings.pop(room.room, None)
        if holding is not None:
            release(self._ledger, holding, step)

    def tables(self) -> dict[int, tuple[int, ...]]:
        """Room -> pages, for the ledger's recount."""
        return {room: holding.pages for room, holding in self._holdings.items()}


def _needed(room: PrefillRoom) -> tuple[bool, bool]:
    """Larger is later."""
    return room.destination is None, not room.spec.was_admitted
