"""A trace as a sequence diagram (mermaid), with the states of the machines on the way."""

from __future__ import annotations

from typing import Any

from kvferry.sim.explore.bounds import UP, State
from kvferry.sim.explore.session import Pair, SessionWorld
from kvferry.sim.explore.violation import Violation
from kvferry.sim.explore.world import World

Event = tuple[Any, ...]


def diagram(world: World | SessionWorld, trace: list[Event], violation: Violation) -> str:
    """Mermaid's text. The trace is played again from the start."""
    of: Any = _Handoff(world) if isinstance(world, World) else _Session(world)
    lines = ["sequenceDiagram", *(f"    participant {name}" for name in of.participants)]
    state: Any = world.start()
    for event in trace:
        lines += [f"    {line}" for line in of.lines(state, event)]
        try:
            state = world.after(state, event)
            world.check(state)
        except Violation:
            break
        if note := of.states(state):
            lines.append(f"    Note over {of.participants[0]},{of.participants[-1]}: {note}")
    lines.append(f"    Note over {of.participants[0]},{of.participants[-1]}: {violation}")
    return "\n".join(lines)


class _Handoff:
    def __init__(self, world: World) -> None:
        self._world = world
        self.participants = ("front", *(name.replace("-", "").replace(".", "") for name in world.slots))
        self._before = ""

    def lines(self, state: State, event: Event) -> list[str]:
        name, *rest = event
        match event:
            case ("deliver", here, peer):
                _, queue, _ = dict(state.links)[(here, peer)]
                what = "link up" if queue[0] == UP else self._message(queue[0])
                return [f"{self._name(peer)}->>{self._name(here)}: {what}"]
            case ("lost" | "exited", here, peer):
                return [f"Note over {self._name(here)}: {self._name(peer)} {name}"]
            case ("cut", a, b):
                return [f"{self._name(a)}-x{self._name(b)}: the link breaks"]
            case ("ask" | "abort", client, *slot):
                at = slot[0] if slot else state.clients[client][3]
                return [f"front->>{self._slot(at)}: {name} (client {client})"]
            case ("notified", at):
                source, target, _ = state.notes[at]
                return [f"{self._name(source)}->>{self._name(target)}: notification"]
            case ("flushed", slot, handle):
                return [f"{self._slot(slot)}->>decode: write {handle[1]} of room {handle[0]:x} is placed"]
            case ("stop", leader, room):
                return [f"front->>{self._name(leader)}: Stop (room {room:x})"]
            case ("leave", client):
                return [f"Note over front: client {client} leaves"]
            case ("work", slot, at):
                return [f"Note over {self._slot(slot)}: {self._world.local(state, slot).works[at]} ends"]
        slot, *rest = rest
        what = ", ".join(f"{item:x}" if isinstance(item, int) else str(item) for item in rest)
        return [f"Note over {self._slot(slot)}: {name} {what}"]

    def states(self, state: State) -> str:
        parts = []
        for slot, name in enumerate(self._world.slots):
            dead = state.locals[slot] < 0
            parts.append(f"{name} {'dead' if dead else ' '.join(self._world.local(state, slot).states) or '-'}")
        text = "; ".join(parts)
        self._before, changed = text, text != self._before
        return text.replace("; ", ", ") if changed else ""

    def _message(self, number: int) -> str:
        message: Any = self._world.locals.messages[number]
        room = getattr(message, "room", 0)
        return f"{type(message).__name__} (room {room:x})" if room else type(message).__name__

    def _name(self, incarnation: int) -> str:
        return self._world.by_incarnation[incarnation].name.replace("-", "").replace(".", "")

    def _slot(self, slot: int) -> str:
        return self._world.slots[slot].replace("-", "").replace(".", "")


class _Session:
    participants = ("A", "B")

    def __init__(self, world: SessionWorld) -> None:
        self._world = world

    def lines(self, state: Pair, event: Event) -> list[str]:
        name, slot, *rest = event
        here, there = "AB"[slot], "BA"[slot]
        if name == "frame":
            frame = self._world.frame_at(rest[0])
            return [f"{there}->>{here}: {type(frame).__name__} of {frame.session:x}"]
        return [f"Note over {here}: {name} {', '.join(map(str, rest))}".rstrip()]

    def states(self, state: Pair) -> str:
        return ""
