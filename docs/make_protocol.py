"""Writes docs/protocol.md out of the protocol's own tables.

python docs/make_protocol.py           write the page
python docs/make_protocol.py --check   compare it with the tables; exit 1 when they differ
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from kvferry.protocol import handoff, link_table, receiver, room, sender
from kvferry.protocol.kvpoll import STICKY, KVPoll, combined
from kvferry.protocol.machine import Go, as_markdown
from kvferry.protocol.receiver import ReceiverMachine, ReceiverState
from kvferry.protocol.room import KVPOLL, RoomMachine, RoomState
from kvferry.protocol.sender import SenderMachine, SenderState

PAGE = Path(__file__).with_name("protocol.md")

HEAD = """\
<!-- Made by docs/make_protocol.py out of the tables in src/kvferry/protocol. Change the tables, then run it again. -->
# The protocol's tables

One room has three machines: its own, in the router's process; the *sender*, at prefill's leader; the *receiver*, at
decode's leader. Each is one table in which every state has a cell for every event. A cell is a transition, *ignored*
(late news is normal: counted, nothing changes) or *refused* (can't happen between correct peers: counted, nothing
changes; an event that only a local caller can bring about raises `IllegalEvent` instead). Internal events are fired
by the machine itself, after an event, when what they stand for has become true. [architecture.md](architecture.md)
tells the story that these tables decide."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def kvpolls() -> str:
    rows = [(state.name, str(state.value), "yes" if state in STICKY else "") for state in sorted(KVPoll)]
    return table(("KVPoll", "value", "sticky"), rows)


def together() -> str:
    """KVPoll of a handoff, for every pair of its ends."""
    rows = [(f"**{s.name}**", *(combined(s, r).name for r in sorted(KVPoll))) for s in sorted(KVPoll)]
    return table(("sender ↓ receiver →", *(r.name for r in sorted(KVPoll))), rows)


def phases() -> list[str]:
    """A handoff by its phases, under each policy."""
    parts = []
    for policy, rows in handoff.HANDOFF.items():
        cells = [
            (p.what, p.room.name, p.sender.name if p.sender else "", p.receiver.name if p.receiver else "",
             p.kvpoll.name, p.waits_for)
            for p in rows
        ]  # fmt: skip
        parts += [f"### {policy}", table(("phase", "room", "sender", "receiver", "KVPoll", "clock"), cells)]
    return parts


def room_kvpolls() -> str:
    kept = "as it was: the failure is not decided yet"
    return table(("state", "KVPoll"), [(s.name, p.name if p is not None else kept) for s, p in KVPOLL.items()])


def sender_kvpolls() -> str:
    def posted(machine: SenderMachine) -> None:
        machine.write_posted()

    return _leg_kvpolls(SenderState, SenderMachine, posted, "once a write is posted")


def receiver_kvpolls() -> str:
    def transferring(machine: ReceiverMachine) -> None:
        machine.transferring = True

    def make() -> ReceiverMachine:
        return ReceiverMachine({0: 1})

    return _leg_kvpolls(ReceiverState, make, transferring, "once prefill has computed a chunk or a notification is in")


def _leg_kvpolls(states: type[Enum], make: Callable[[], Any], later: Callable[[Any], None], when: str) -> str:
    """Ask a machine in each state, before and after `later`."""
    rows = []
    for state in states:
        machine = make()
        machine.state = state
        before = machine.kvpoll.name
        later(machine)
        after = machine.kvpoll.name
        rows.append((state.name, before if before == after else f"{before}; {after} {when}"))
    return table(("state", "KVPoll"), rows)


#: A diagram's line is told by so many events at most; the table below it has them all.
EVENTS_TOLD = 3


def diagram(states: type[Enum], transitions: Any) -> str:
    """A mermaid state diagram of a table: one line for each pair of states, with the events that lead over it."""
    lines = ["```mermaid", "stateDiagram-v2"]
    entered = {cell.to for row in transitions.values() for cell in row.values() if isinstance(cell, Go)}
    lines += [f"    [*] --> {state.name}" for state in states if state not in entered]
    for state, row in transitions.items():
        events: dict[Enum, list[str]] = {}
        for event, cell in row.items():
            if isinstance(cell, Go):
                events.setdefault(cell.to, []).append(event.name)
        for to, names in events.items():
            told = ", ".join(names[:EVENTS_TOLD])
            more = f" and {len(names) - EVENTS_TOLD} more" if len(names) > EVENTS_TOLD else ""
            lines.append(f"    {state.name} --> {to.name}: {told}{more}")
        if not events:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join([*lines, "```"])


def commands(classes: Iterable[type]) -> str:
    """What a machine orders and what the actor around it does then: the classes' own words."""
    rows = [(f"`{cls.__name__}`", " ".join((inspect.getdoc(cls) or "").split())) for cls in classes]
    return table(("command", "what the actor does"), rows)


def machine_section(
    title: str, module: ModuleType, states: type[Enum], machine: Any, orders: Iterable[type], polls: str
) -> list[str]:
    local = ", ".join(sorted(event.name for event in machine.LOCAL))
    return [
        f"## {title}",
        f"Source: `src/kvferry/{module.__name__.removeprefix('kvferry.').replace('.', '/')}.py`.",
        inspect.getdoc(module) or "",
        f"Local events: {local}.",
        diagram(states, machine.TABLE),
        as_markdown(machine.TABLE),
        commands(orders),
        polls,
    ]


def render() -> str:
    parts = [HEAD, "## KVPoll", kvpolls(), inspect.getdoc(combined) or "", together()]
    parts += ["## A handoff, phase by phase", "Source: `src/kvferry/protocol/handoff.py`."]
    parts += [inspect.getdoc(handoff) or "", *phases()]
    parts += machine_section(
        "Room", room, RoomState, RoomMachine, (room.SendLeg, room.Resolve, room.End), room_kvpolls()
    )
    parts += machine_section(
        "Sender", sender, SenderState, SenderMachine, get_args(sender.SenderCommand), sender_kvpolls()
    )
    receiver_orders = get_args(receiver.ReceiverCommand)
    parts += machine_section("Receiver", receiver, ReceiverState, ReceiverMachine, receiver_orders, receiver_kvpolls())
    parts += [
        "## Link session",
        "Source: `src/kvferry/protocol/link_table.py`; rules and actions: `src/kvferry/protocol/link.py`.",
        inspect.getdoc(link_table) or "",
        diagram(link_table.LinkState, link_table.TABLE),
        as_markdown(link_table.TABLE),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None, page: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    text = render()
    if not parser.parse_args(arguments).check:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page.name} differs from the tables; write it again: python docs/make_protocol.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
