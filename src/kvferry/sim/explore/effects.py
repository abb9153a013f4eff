"""What an explored actor does in a turn, in order; the world between the actors carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.protocol.address import Address
from kvferry.protocol.messages import Message

#: A write's name: its room, and its number among the room's writes.
Handle = tuple[int, int]


@dataclass(frozen=True)
class Dial:
    """Effect: open a session."""

    peer: Address


@dataclass(frozen=True)
class Say:
    """Effect: a message on a session that is open here, or being opened."""

    peer: int
    message: Message


@dataclass(frozen=True)
class Drop:
    """Effect: the session ends from this side."""

    peer: int


@dataclass(frozen=True)
class Post:
    """A write in the lane of process `target`. `pages`: (layer, source page, target page, label of the
    source's content), `rows`: (target row, its bytes), `room` whose source pages they are. `agent`: the generation of
    the target's agent by which it arrives.
    """

    handle: Handle
    target: int
    room: int
    pages: tuple[tuple[int, int, int, Any], ...]
    rows: tuple[tuple[int, bytes], ...]
    agent: int = 0


@dataclass(frozen=True)
class Notify:
    """Effect: a notification, behind the writes to `target` that had ended."""

    target: int
    payload: bytes


@dataclass(frozen=True)
class Client:
    """Effect: something that a client sees, or its room: what, room, value."""

    what: str
    room: int
    value: Any = None


Effect = Dial | Say | Drop | Notify | Client


@dataclass
class Surroundings:
    effects: list[Effect] = field(default_factory=list)

    def note(self, effect: Effect) -> None:
        self.effects.append(effect)
