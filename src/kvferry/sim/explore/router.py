"""A router and its rooms as an explored process."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import Any

from kvferry.actors.actor import FromPeer, Tick
from kvferry.actors.room.room import AbortRequested, Room
from kvferry.actors.router.guest import RoomOver, RoomResolved
from kvferry.actors.router.router import Router
from kvferry.actors.router.view import Ask
from kvferry.actors.settings import ClockSettings, RouterSettings
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import Roster
from kvferry.protocol.rank import RankInfo
from kvferry.protocol.request import RequestSpec
from kvferry.sim.explore.effects import Client
from kvferry.sim.explore.fakes import (
    Answer,
    Work,
)
from kvferry.sim.explore.node import Node, resolve
from kvferry.sim.explore.violation import Violation

REGISTRY = Address("registry", "", 1, "", 0)


class ExploredRouter(Router):
    """Rooms get their turns from the explorer; the registry is not part of the world."""

    def __init__(self, *arguments: Any) -> None:
        self.new: list[int] = []
        super().__init__(*arguments)

    def spawn(self, work: Awaitable[None]) -> None:
        Work.of(work)

    def _run_room(self, room_id: int, room: Room) -> None:
        self.new.append(room_id)


class RouterNode(Node):
    role = "router"
    actor: ExploredRouter

    def __init__(self, address: Address, fronts: frozenset[int]) -> None:
        super().__init__(address, fronts)
        limits = ClockSettings(100.0, 100.0, 100.0, 100.0)
        self.actor = ExploredRouter(
            self.sessions, self.clock, 1000, None, resolve, RouterSettings(), limits, "explored"
        )
        self.actor.membership._address = REGISTRY
        self.resolved: dict[int, int] = {}
        self.version = 0

    # --- events ---

    def roster(self, ranks: tuple[RankInfo, ...]) -> None:
        """The registry tells of new ranks."""
        self.version += 1
        self._turn(FromPeer(REGISTRY, Roster(self.version, ranks, True)))

    def open(self, room: int, attempt: int, spec: RequestSpec, prefill: RankInfo, decode: RankInfo) -> None:
        """A front's call has been admitted, and the pair is chosen."""
        answer: Any = Answer(self.around, room)
        self.actor._open_room(Ask(room, len(spec.fed_ids)), spec, attempt, answer, prefill, decode)
        self.pump()
        self.check()

    def abort(self, room: int) -> None:
        """The front cancels its call."""
        cause = Cause("aborted", "the front has cancelled the attempt", "front", room=room)
        self.actor.guests[room].room.post(AbortRequested(cause))
        self.pump()
        self.check()

    def tick(self) -> None:
        self.actor._redial_at_s = 0.0
        self._turn(Tick())

    # --- what the world asks ---

    def rooms(self) -> Iterator[tuple[int, Any]]:
        return ((room, guest.room.machine) for room, guest in self.actor.guests.items())

    def quiet(self) -> bool:
        return not self.actor.guests

    def wants_tick(self) -> bool:
        return any(address.incarnation not in self.sessions.open for address in self.actor.fleet.addresses())

    def outcomes(self) -> dict[int, Any]:
        return {room: guest.answer.outcome for room, guest in self.actor.guests.items()}  # type: ignore[attr-defined]

    def _state(self) -> Any:
        leaders = frozenset(address.incarnation for address in self.actor.fleet.addresses())
        return leaders, [(room, guest.answer, guest.room) for room, guest in self.actor.guests.items()]

    def _clocks(self, room: int) -> Any:
        return self.actor.guests[room].room.machine.clocks

    def pump(self) -> None:
        actor = self.actor
        actor._redial_at_s = 1.0
        while True:
            moved = False
            for item in actor._mailbox.drain():
                moved = True
                self._note(item)
                actor.receive(item)
            actor.advance()
            for room_id, guest in list(actor.guests.items()):
                if room_id in actor.new:
                    actor.new.remove(room_id)
                    moved = True
                    guest.room.begin()
                elif not guest.room.ended and (items := guest.room.waiting_items()):
                    moved = True
                    guest.room.turn(items)
                if guest.room.ended:
                    actor._mailbox.put(RoomOver(room_id, None))
                    moved = True
            if not moved:
                return

    def _note(self, item: Any) -> None:
        if isinstance(item, RoomResolved):
            room = item.guest.room.machine.room
            self.resolved[room] = self.resolved.get(room, 0) + 1
            if self.resolved[room] > 1:
                raise Violation("one-resolve", f"{self.address.name}: room {room:x} answers its front twice")
        elif isinstance(item, RoomOver):
            guest: Any = self.actor.guests[item.room]
            if sum(event[1] == "ended" for event in guest.room.journal._events) != 1:
                raise Violation("one-end", f"{self.address.name}: room {item.room:x} ends twice")
            if guest.answer.outcome is None:
                raise Violation("one-outcome", f"{self.address.name}: room {item.room:x} ends without an answer")
            self.around.note(Client("over", item.room))
            self.resolved.pop(item.room, None)
