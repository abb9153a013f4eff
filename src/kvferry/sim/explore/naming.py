"""Symmetry: states that differ by the names of the two rooms alone count as one.

Each part of a state (a process's own, the links, the rest) has a number by either naming; the parts are few and are met
again and again, so a state's key is a handful of look-ups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.protocol.metadata import Notification, decode_notification
from kvferry.sim.explore.bounds import Links, State
from kvferry.sim.explore.local import Locals


class Naming:
    def __init__(self, found: Locals) -> None:
        self._locals = found
        self._parts: dict[tuple[Any, bool], int] = {}
        self._part_numbers: dict[Any, int] = {}

    def key(self, state: State) -> Any:
        """The same for states that differ by the names of the two rooms alone."""
        same = state.status, state.lives, state.exits, state.faults
        plain = self._named(state, False)
        return min(plain, self._named(state, True)) if self._locals.names else plain, same

    def _named(self, state: State, swapped: bool) -> tuple[int, ...]:
        of_state = self._locals.key_of_state
        ids = [-1 if at < 0 else of_state(at, swapped) for at in state.locals]
        rest = state.notes, state.clients, state.stops
        return *ids, self._part(state.links, swapped, self._links), self._part(rest, swapped, self._rest)

    def _part(self, part: Any, swapped: bool, make: Callable[[Any, bool], Any]) -> int:
        """A number for a part of a state, by either naming."""
        known = self._parts.get((part, swapped))
        if known is None:
            made = make(part, swapped)
            known = self._parts[(part, swapped)] = self._part_numbers.setdefault(made, len(self._part_numbers))
        return known

    def _links(self, links: Links, swapped: bool) -> Any:
        def named(queue: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(m if m < 0 else self._locals.key_of_message(m, swapped) for m in queue)

        return tuple((pair, status, named(queue), named(new)) for pair, (status, queue, new) in links)

    def _rest(self, rest: Any, swapped: bool) -> Any:
        names = self._locals.names if swapped else {}
        notes, clients, stops = rest
        named = tuple((source, target, self._note(payload, names)) for source, target, payload in notes)
        told = tuple(sorted((leader, names.get(room, room)) for leader, room in stops))
        return named, clients[::-1] if swapped else clients, told

    @staticmethod
    def _note(payload: bytes, names: dict[int, int]) -> tuple[int, int, int]:
        news = decode_notification(payload)
        assert isinstance(news, Notification)
        return names.get(news.room, news.room), news.rank, news.incarnation
