"""The turns of single processes, each run once: (state of a process, event) -> (state, what it does to the others)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.protocol.errors import Cause
from kvferry.protocol.instance import Wrote
from kvferry.protocol.machine import Go
from kvferry.protocol.messages import (
    Load,
    Message,
    Progress,
    Received,
    Register,
    TokenBatch,
    Watch,
)
from kvferry.protocol.room import TABLE, RoomEvent
from kvferry.sim.explore.canon import Renderer, renamed
from kvferry.sim.explore.effects import Client, Dial, Effect, Notify, Post, Say
from kvferry.sim.explore.node import Leases, Node
from kvferry.sim.explore.snapshot import freeze, thaw
from kvferry.sim.explore.violation import Violation

Event = tuple[Any, ...]
#: What a turn does to the others: ("dial", peer), ("say", peer, message number), ("notify", target, payload),
#: ("tokens", message), ("client", what, room, value).
Deed = tuple[Any, ...]

_NO_CAUSE = Cause("handoff_failed", "explored")
#: News that a room writes into its journal and that starts its clocks again, and nothing else: clocks may run out at
#: any time here, so it is left out of the world.
_NEWS = (Load, Watch, Register, Received)
#: What moves a room to Transferring.
_SENDING = ("computed", "sending")


def check_news() -> None:
    """The tables must bear out what is left out."""
    for event in (RoomEvent.PREFILL_DONE, RoomEvent.RECEIVED, RoomEvent.PROGRESS):
        assert not any(isinstance(row[event], Go) for row in TABLE.values()), event


def is_news(message: Message) -> bool:
    return isinstance(message, _NEWS) or (isinstance(message, Progress) and message.event not in _SENDING)


def canonical(message: Message) -> Message:
    """Without texts and measurements."""
    changes: dict[str, Any] = {}
    if isinstance(message, Progress):
        return Progress(message.room, message.leg, message.event)
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, Cause):
            changes[name] = _NO_CAUSE
        elif name == "error" and isinstance(message, Wrote):
            changes[name] = ""
        elif name in ("kv_bytes", "metadata_bytes", "offset_s", "chunks"):
            changes[name] = 0
    return msgspec.structs.replace(message, **changes) if changes else message


@dataclass(frozen=True, eq=False)
class Local:
    """A state of one process, and what can be seen of it from outside."""

    id: int
    frozen: bytes
    key: Hashable
    seen: frozenset[int]
    works: tuple[str, ...]
    rooms: tuple[int, ...]
    expiring: tuple[int, ...]
    wants_tick: bool
    quiet: bool
    writes: tuple[tuple[Post, bool, bool], ...]
    late: tuple[Post, ...]
    leases: Leases
    held: dict[int, int]
    states: tuple[str, ...]
    drains: bool
    may_depart: bool
    ending: bool
    ends: bool
    said: bool
    agents: dict[int, int]
    overdue: bool


@dataclass
class Locals:
    """All states of processes that were met. `names` maps each room and request to the one that it may be taken for."""

    names: dict[int, int]
    states: list[Local] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    keys: dict[Hashable, int] = field(default_factory=dict)
    _ids: dict[Hashable, int] = field(default_factory=dict)
    _message_ids: dict[Message, int] = field(default_factory=dict)
    _turns: dict[tuple[int, Event], tuple[int, tuple[Deed, ...]] | Violation] = field(default_factory=dict)
    _swapped: dict[tuple[int, bool], int] = field(default_factory=dict)
    _named: dict[tuple[int, bool], int] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        return len(self._turns)

    def add(self, node: Node) -> int:
        key = node.key()
        known = self._ids.get(key)
        if known is not None:
            return known
        number = self._ids[key] = len(self.states)
        machines = tuple(f"{room & 0xF}:{machine.state.name}" for room, machine in node.rooms())
        rooms = tuple(room for room, _ in node.rooms())
        works = tuple(work.name for work in node.works)
        self.states.append(
            Local(
                number, freeze(node), key, frozenset(node.sessions.seen), works, rooms, node.expiring(),
                node.wants_tick(), node.quiet(), node.writes(), node.late(), node.leases(), node.held(), machines,
                node.drains(), node.may_depart(), node.ending(), node.ends(), node.said,
                node.agents(), node.overdue(),
            )
        )  # fmt: skip
        return number

    def turn(self, state: int, event: Event) -> tuple[int, tuple[Deed, ...]]:
        """Raises Violation."""
        known = self._turns.get((state, event))
        if known is None:
            try:
                known = self._run(state, event)
            except Violation as violation:
                known = violation
            self._turns[(state, event)] = known
        if isinstance(known, Violation):
            raise known
        return known

    def _run(self, state: int, event: Event) -> tuple[int, tuple[Deed, ...]]:
        node: Node = thaw(self.states[state].frozen)
        name, *arguments = event
        if name == "message":
            arguments[1] = self.messages[arguments[1]]
        try:
            getattr(node, name)(*arguments)
        except Violation:
            raise
        except Exception as error:
            raise Violation("no-escape", f"{node.address.name}: {type(error).__name__}: {error}") from error
        deeds = tuple(deed for effect in node.effects() for deed in self._deeds(effect))
        return self.add(node), deeds

    def _deeds(self, effect: Effect) -> list[Deed]:
        match effect:
            case Dial(peer):
                return [("dial", peer.incarnation)]
            case Say(_, TokenBatch() as batch):
                return [("tokens", batch.leg, token.room, token.index) for token in batch.tokens]
            case Say(peer, message):
                return [] if is_news(message) else [("say", peer, self.message(canonical(message)))]
            case Notify(target, payload):
                return [("notify", target, payload)]
            case Client(what, room, value):
                return [("client", what, room, value)]
        raise TypeError(f"{effect!r} is no effect")

    def message(self, message: Message) -> int:
        known = self._message_ids.get(message)
        if known is None:
            known = self._message_ids[message] = len(self.messages)
            self.messages.append(message)
        return known

    # --- symmetry ---

    def key_of_state(self, state: int, swapped: bool) -> int:
        known = self._swapped.get((state, swapped))
        if known is None:
            known = self._swapped[(state, swapped)] = self._key(self.states[state].key, swapped)
        return known

    def key_of_message(self, message: int, swapped: bool) -> int:
        known = self._named.get((message, swapped))
        if known is None:
            known = self._named[(message, swapped)] = self._key(Renderer(0)(self.messages[message]), swapped)
        return known

    def _key(self, key: Hashable, swapped: bool) -> int:
        return self.keys.setdefault(renamed(key, self.names) if swapped else key, len(self.keys))
