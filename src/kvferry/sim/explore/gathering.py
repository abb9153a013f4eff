"""Search through worlds that gather: a state goes on with all that was gathered on any way to it.

Such a state is met once, and left again by what it gathers later alone. What is gathered only grows, so this ends: at
the smallest set of states and gatherings that nothing adds to any more. It does not depend on the order.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

from kvferry.sim.explore.liveness import cannot_end
from kvferry.sim.explore.search import Event, Found
from kvferry.sim.explore.violation import Violation


class Gathering(Protocol):
    """`gathered` is a set, as the bits of a number. `own` events need nothing of it, `brought` ones a bit each."""

    def start(self) -> Any: ...
    def own(self, state: Any) -> Iterator[Event]: ...
    def brought(self, state: Any, gathered: int) -> Iterator[Event]: ...
    def turn(self, state: Any, event: Event) -> tuple[Any, int]:
        """The state that follows, and what it gathers by it. Raises Violation."""

    def kept(self, state: Any, gathered: int) -> int:
        """What can matter from here."""

    def key(self, state: Any) -> Hashable: ...
    def is_quiet(self, state: Any) -> bool: ...
    def is_fair(self, event: Event) -> bool: ...


class GatheringSearch:
    """First in, first out, so that a trace to a violation is a short one."""

    def __init__(self, world: Gathering, limit: int = 0) -> None:
        self._world, self._limit = world, limit
        self._numbers: dict[Hashable, int] = {}
        self._states: list[Any] = []
        self._gathered: list[int] = []
        self._after: list[array[int] | None] = []  # of each state, those that follow; None: not left yet
        self._to_do: deque[int] = deque()
        self._pending: dict[int, int] = {}
        self._parents, self._depths, self._causes = array("i"), array("i"), array("i")
        self._events: list[Event] = []
        self._event_numbers: dict[Event, int] = {}
        self._from, self._to = array("i"), array("i")  # along fair events
        self.transitions = 0

    @property
    def states(self) -> int:
        return len(self._numbers)

    @property
    def depth(self) -> int:
        return max(self._depths)

    def run(self, progress: Callable[[GatheringSearch, int], None] = lambda *_: None) -> Found:
        """To the end, to the first violation, or to `limit` states."""
        self._meet(self._world.start(), -1, ())
        steps = 0
        while self._to_do and not (self._limit and self.states >= self._limit):
            violation, trace = self._go_on(self._to_do.popleft())
            if violation is not None:
                return Found(self.states, self.transitions, self.depth, 1, violation, trace)
            steps += 1
            if steps % 1024 == 0:
                progress(self, len(self._to_do))
        found = Found(self.states, self.transitions, self.depth, len(self._to_do))
        return found if self._to_do else self._alive(found)

    def _meet(self, state: Any, parent: int, event: Event) -> int:
        key = self._world.key(state)
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self._states)
            self._states.append(state)
            self._gathered.append(0)
            self._after.append(None)
            self._parents.append(parent)
            self._causes.append(self._event_number(event))
            self._depths.append(self._depths[parent] + 1 if parent >= 0 else 0)
            self._pending[known] = 0
            self._to_do.append(known)
        return known

    def _event_number(self, event: Event) -> int:
        number = self._event_numbers.setdefault(event, len(self._events))
        if number == len(self._events):
            self._events.append(event)
        return number

    def _gather(self, number: int, gathered: int) -> None:
        """What is new there is gone through later, together with what comes meanwhile."""
        pending = self._pending.get(number)
        new = self._world.kept(self._states[number], gathered) & ~self._gathered[number]
        if pending is not None:
            self._pending[number] = pending | new
        elif new:
            self._pending[number] = new
            self._to_do.append(number)

    def _go_on(self, number: int) -> tuple[Violation | None, list[Event]]:
        """By everything at first, and again by what has been gathered since."""
        world, state, new = self._world, self._states[number], self._pending.pop(number)
        self._gathered[number] |= new
        after = self._after[number]
        events = list(world.brought(state, new))
        if after is None:
            events = [*world.own(state), *events]
            after = array("i")
        if new:
            for follower in after:
                self._gather(follower, new)
        followers = set(after)
        for event in events:
            self.transitions += 1
            try:
                follower_state, sent = world.turn(state, event)
            except Violation as violation:
                return violation, [*self._trace(number), event]
            to = self._meet(follower_state, number, event)
            if to != number:
                followers.add(to)
                if world.is_fair(event):
                    self._from.append(number)
                    self._to.append(to)
            self._gather(to, self._gathered[number] | sent)
        self._after[number] = array("i", followers)
        return None, []

    def _trace(self, number: int) -> list[Event]:
        events: list[Event] = []
        while self._parents[number] >= 0:
            events.append(self._events[self._causes[number]])
            number = self._parents[number]
        return events[::-1]

    def _alive(self, found: Found) -> Found:
        quiet = bytearray(self._world.is_quiet(state) for state in self._states)
        stuck, count = cannot_end(quiet, self._from, self._to)
        if count:
            found.trace = self._trace(stuck)
            found.violation = Violation("all-end", f"{count} states, from which nothing ends every session")
        return found
