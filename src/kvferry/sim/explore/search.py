"""Breadth first through every state of a world; then backwards from where all is over, for liveness.

The first violation that is met is one of the shortest. A state is remembered by a digest of 16 bytes.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from kvferry.sim.explore.liveness import cannot_end
from kvferry.sim.explore.violation import Violation

Event = tuple[Any, ...]


class Explorable(Protocol):
    """What can be searched. `key` is equal for states that count as one; `check` and `after` raise Violation.

    `is_fair(event)`: it happens at last if it stays possible; faults, and what nobody must wait for, are not.
    """

    def start(self) -> Any: ...
    def events(self, state: Any) -> Iterator[Event]: ...
    def after(self, state: Any, event: Event) -> Any: ...
    def check(self, state: Any) -> None: ...
    def key(self, state: Any) -> Any: ...
    def is_quiet(self, state: Any) -> bool: ...
    def is_fair(self, event: Event) -> bool: ...


@dataclass
class Found:
    """`trace` leads from the start to the violation. `states` counts them with symmetric ones merged."""

    states: int
    transitions: int
    depth: int
    frontier: int
    violation: Violation | None = None
    trace: list[Event] = field(default_factory=list)


class Search:
    def __init__(self, world: Explorable, limit: int = 0) -> None:
        self._world, self._limit = world, limit
        self._numbers: dict[bytes, int] = {}
        self._parents, self._causes = array("i"), array("i")
        self._events: list[Event] = []
        self._event_numbers: dict[Event, int] = {}
        self._from, self._to = array("i"), array("i")  # along fair events
        self._left = 0  # states that have been left by all their events
        self._quiet = bytearray()
        self.transitions = 0
        self.depth = 0

    @property
    def states(self) -> int:
        return len(self._numbers)

    def run(self, progress: Callable[[Search, int], None] = lambda *_: None) -> Found:
        """To the end, to the first violation, or to `limit` states."""
        start = self._world.start()
        self._number(start, -1, ())
        layer = [start]
        try:
            self._world.check(start)
            while layer and not (self._limit and self.states >= self._limit):
                layer = self._next_layer(layer, progress)
                self.depth += bool(layer)
        except _Stopped as stopped:
            return Found(self.states, self.transitions, self.depth, 1, stopped.violation, stopped.trace)
        found = Found(self.states, self.transitions, self.depth, len(layer))
        return found if layer else self._alive(found)

    def _next_layer(self, layer: list[Any], progress: Callable[[Search, int], None]) -> list[Any]:
        world, following, first = self._world, [], self._left
        for at, state in enumerate(layer):
            number = first + at
            for event in world.events(state):
                self.transitions += 1
                try:
                    after = world.after(state, event)
                    known = self._number(after, number, event)
                    if known == self.states - 1 and len(self._quiet) == self.states - 1:
                        world.check(after)
                        self._quiet.append(world.is_quiet(after))
                        following.append(after)
                except Violation as violation:
                    raise _Stopped(violation, [*self._trace(number), event]) from violation
                if world.is_fair(event):
                    self._from.append(number)
                    self._to.append(known)
            self._left += 1
            if at % 1024 == 0:
                progress(self, len(layer) - at + len(following))
        return following

    def _number(self, state: Any, parent: int, event: Event) -> int:
        digest = blake2b(marshal.dumps(self._world.key(state), 2), digest_size=16).digest()
        known = self._numbers.get(digest)
        if known is not None:
            return known
        number = self._numbers[digest] = len(self._numbers)
        self._parents.append(parent)
        self._causes.append(self._event_number(event))
        if parent < 0:
            self._quiet.append(self._world.is_quiet(state))
        return number

    def _event_number(self, event: Event) -> int:
        number = self._event_numbers.get(event)
        if number is None:
            number = self._event_numbers[event] = len(self._events)
            self._events.append(event)
        return number

    def _trace(self, number: int) -> list[Event]:
        events: list[Event] = []
        while self._parents[number] >= 0:
            events.append(self._events[self._causes[number]])
            number = self._parents[number]
        return events[::-1]

    def _alive(self, found: Found) -> Found:
        """From every state the end must be in reach, along what happens at last if it stays possible."""
        stuck, count = cannot_end(self._quiet, self._from, self._to)
        if count:
            found.trace = self._trace(stuck)
            text = f"{count} states, from which nothing ends every room and returns every page"
            found.violation = Violation("all-end", text)
        return found


class _Stopped(Exception):
    def __init__(self, violation: Violation, trace: list[Event]) -> None:
        self.violation, self.trace = violation, trace
        super().__init__(str(violation))
