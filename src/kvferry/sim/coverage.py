"""Which cells of the protocol's tables a run has been in, and in which states its rooms were when a fault struck.

Machines count only what they ignore or refuse; while a run is counted, `Cells` stands in front of every machine's step.
In production nothing is in front of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from kvferry.protocol import link_table, receiver, room, sender
from kvferry.protocol.machine import REFUSED, Go, Machine

#: The protocol's tables, by the name of their machine in reports.
TABLES: dict[str, Any] = {
    "link": link_table.TABLE, "room": room.TABLE, "sender": sender.TABLE, "receiver": receiver.TABLE,
}  # fmt: skip
STATES: dict[str, type[Enum]] = {
    "link": link_table.LinkState, "room": room.RoomState, "sender": sender.SenderState,
    "receiver": receiver.ReceiverState,
}  # fmt: skip
_MACHINE = {kind: name for name, kind in STATES.items()}

Entered = Callable[[Machine[Any, Any]], None]


def state_name(state: Enum) -> str:
    """As in "receiver RUNNING"."""
    return f"{_MACHINE[type(state)]} {state.name}"


def cell_name(state: Enum, event: Enum) -> str:
    """As in "receiver RUNNING x ABORT"."""
    return f"{state_name(state)} x {event.name}"


def all_cells() -> dict[str, str]:
    """Every cell of every table, and what it is: "goes", "ignored" or "refused"."""
    return {
        cell_name(state, event): "goes" if isinstance(cell, Go) else ("refused" if cell is REFUSED else "ignored")
        for table in TABLES.values()
        for state, row in table.items()
        for event, cell in row.items()
    }


class Cells:
    """Counts steps of machines by (state, event), and tells who waits for a state that a machine has come to it."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[Enum, Enum], int] = defaultdict(int)
        self._waiting: dict[Enum, list[Entered]] = {}

    def when_entered(self, state: Enum, tell: Entered) -> None:
        """Tell it once, in the turn of the machine; also of a machine that begins in that state."""
        self._waiting.setdefault(state, []).append(tell)

    def forget(self, state: Enum, tell: Entered) -> None:
        if tell in self._waiting.get(state, ()):
            self._waiting[state].remove(tell)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Stand in front of every machine's making and its steps."""
        make, apply, counts, waiting = Machine.__init__, Machine._apply, self._counts, self._waiting

        def made(machine: Machine[Any, Any], state: Enum) -> None:
            make(machine, state)
            for tell in waiting.pop(state, ()):
                tell(machine)

        def step(machine: Machine[Any, Any], event: Enum, payload: dict[str, Any]) -> None:
            before = machine.state
            counts[(before, event)] += 1
            apply(machine, event, payload)
            if waiting and machine.state is not before and machine.state in waiting:
                for tell in waiting.pop(machine.state):
                    tell(machine)

        Machine.__init__, Machine._apply = made, step  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Machine.__init__, Machine._apply = make, apply  # type: ignore[method-assign]

    def by_name(self) -> Counter[str]:
        return Counter({cell_name(state, event): count for (state, event), count in self._counts.items()})

    @property
    def rooms(self) -> int:
        """Rooms (attempts) that were opened."""
        return self._counts[(room.RoomState.NEW, room.RoomEvent.START)]
