"""A protocol machine as data: one table, every cell filled (in the manner of h11's `_state.py`).

A cell is a transition (`Go`), IGNORED (late news is normal: counted, nothing changes) or REFUSED (cannot happen
between correct peers: counted, nothing changes; raised only when a *local* caller gave the command).
After each event the machine may fire *internal* events of its own (`after`), by the same table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from kvferry.protocol.errors import IllegalEvent


class Symbol(Enum):
    """A state or an event. Members are looked up in tables at every step, so they hash by identity (each exists once)
    rather than by name, as Enum would have it in Python code."""

    __hash__ = object.__hash__


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Verdict(Symbol):
    IGNORED = "ignored"
    REFUSED = "refused"


IGNORED = Verdict.IGNORED
REFUSED = Verdict.REFUSED


@dataclass(frozen=True)
class Go(Generic[S]):
    """Go to state `to`; `do` names the machine's method (without the underscore) that says what to do then."""

    to: S
    do: str = ""
    #: That method's name, underscore and all; "" for none.
    method: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", f"_{self.do}" if self.do else "")


Cell = Go[S] | Verdict
Table = Mapping[S, Mapping[E, Cell[S]]]


def holes(table: Table[S, E], states: type[S], events: type[E]) -> list[str]:
    """Names of the state x event cells that are not filled; empty when the table is complete."""
    return [f"{s.name} x {e.name}" for s in states for e in events if e not in table.get(s, {})]


def as_markdown(table: Table[S, E]) -> str:
    """The table for the docs, one row per cell that is a transition, and one line of verdicts per state."""
    lines = ["| state | event | next | action |", "|---|---|---|---|"]
    for state, row in table.items():
        for event, cell in row.items():
            if isinstance(cell, Go):
                lines.append(f"| {state.name} | {event.name} | {cell.to.name} | {cell.do.replace('_', ' ')} |")
        for verdict in Verdict:
            names = ", ".join(event.name for event, cell in row.items() if cell is verdict)
            if names:
                lines.append(f"| {state.name} | {names} | *{verdict.value}* | |")
    return "\n".join(lines)


class Machine(Generic[S, E]):
    """A table, a state, and counts of what was ignored and refused.

    Subclasses give TABLE, LOCAL (the events that only a local caller can bring about) and, for each `do`, a
    method `_<do>(**payload)` that appends to `self.commands`.
    """

    TABLE: ClassVar[Any]
    LOCAL: ClassVar[frozenset[Any]] = frozenset()

    def __init__(self, state: S) -> None:
        self.state = state
        self.commands: list[Any] = []
        self.counts: Counter[tuple[Verdict, S, E]] = Counter()

    def fire(self, event: E, **payload: Any) -> list[Any]:
        """Apply one event and return the commands that follow from it, in order.

        Raises IllegalEvent, with nothing changed, when a local caller's event is REFUSED.
        """
        self._apply(event, payload)
        while (internal := self.after()) is not None:
            self._apply(internal, {})
        commands, self.commands = self.commands, []
        return commands

    def refuses(self, event: E) -> bool:
        """Is `event` REFUSED in this state? Then it must change nothing, not even what is kept beside the state."""
        return bool(self.TABLE[self.state][event] is REFUSED)

    def after(self) -> E | None:
        """The internal event that is due now, if any."""
        return None

    def _apply(self, event: E, payload: dict[str, Any]) -> None:
        cell: Cell[S] = self.TABLE[self.state][event]
        if isinstance(cell, Go):
            self.state = cell.to
            if cell.method:
                getattr(self, cell.method)(**payload)
            return
        if cell is REFUSED and event in self.LOCAL:
            raise IllegalEvent(f"{type(self).__name__}: {event.name} is not allowed in state {self.state.name}")
        self.counts[(cell, self.state, event)] += 1
