"""Whom a fault can be about: the rooms of a simulated system, and the names of those that work on each."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from kvferry.actors.leader import Leader
from kvferry.actors.leg_room import LegRoom
from kvferry.actors.router.router import Router
from kvferry.protocol.machine import Machine
from kvferry.protocol.request import RequestSpec
from kvferry.sim.system import SimSystem


class Subject(msgspec.Struct, frozen=True):
    """One room and the names of those that work on it."""

    room: int
    request: int
    names: dict[str, str]  # by role


def subjects_of(system: SimSystem, state: Enum | None = None) -> list[tuple[Machine[Any, Any], Subject]]:
    """Every machine of a room that lives (and is in that state), with its room."""
    found: list[tuple[Machine[Any, Any], Subject]] = []
    for name, process in system.processes.items():
        actor = process.actor
        if isinstance(actor, Router):
            for room_id, guest in actor.guests.items():
                machine = guest.room.machine
                if state is not None and machine.state is not state:
                    continue
                legs = (machine.prefill.name, machine.decode.name)
                found.append((machine, _subject(room_id, machine.spec, name, *legs)))
        elif isinstance(actor, Leader):
            room: LegRoom
            for room in actor.rooms.values():
                if state is not None and room.machine.state is not state:
                    continue
                legs = (name, room.peer.name) if actor.role == "prefill" else (room.peer.name, name)
                found.append((room.machine, _subject(room.room, room.spec, room.router.name, *legs)))
    return found


def _subject(room: int, spec: RequestSpec, router: str, prefill: str, decode: str) -> Subject:
    names = {"router": router, "prefill": prefill, "decode": decode, "front": spec.front.name}
    return Subject(room, spec.request, names)
