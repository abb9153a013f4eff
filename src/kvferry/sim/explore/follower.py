"""A rank of prefill that is not the leader, as an explored process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.actors.actor import Tick
from kvferry.actors.prefill.follower import PrefillFollower
from kvferry.actors.ranks.follower import LeaderFound
from kvferry.protocol.address import Address
from kvferry.protocol.sender import SenderState
from kvferry.sim.explore.data_plane import NotingEndpoint
from kvferry.sim.explore.effects import Say
from kvferry.sim.explore.fakes import LabelEngine
from kvferry.sim.explore.leaders import Size, Spawning, Writes, parts_of
from kvferry.sim.explore.node import Node


class ExploredFollower(Spawning, PrefillFollower):
    pass


class FollowerNode(Writes, Node):
    """A rank of prefill that is not the leader."""

    role = "prefill"
    engine: LabelEngine
    endpoint: NotingEndpoint

    def __init__(self, address: Address, fronts: frozenset[int], size: Size) -> None:
        super().__init__(address, fronts)
        self.actor = ExploredFollower(parts_of(self, size))
        self.actor.works = self.works

    def found(self, leader: Address) -> None:
        self._turn(LeaderFound(leader))

    def work(self, index: int) -> None:
        self.works.pop(index).run()
        self._settle()

    def rooms(self) -> Iterator[tuple[int, Any]]:
        return ((room.room, room.machine) for room in self.actor.rooms.values())

    def expiring(self) -> tuple[int, ...]:
        """It has no clocks: its leader has."""
        return ()

    def quiet(self) -> bool:
        return not self.actor.rooms and not self.works

    def wants_tick(self) -> bool:
        """It tells decode again and again of a write that has broken."""
        return any(room.machine.state is SenderState.BROKEN for room in self.actor.rooms.values())

    def tick(self) -> None:
        self.actor._say_at_s = 0.0
        self._turn(Tick())
        self.actor._say_at_s = 0.0

    def pump(self) -> None:
        while items := self.actor._mailbox.drain():
            for item in items:
                self.actor.receive(item)
            self.actor.advance()

    def check_clocks(self) -> None:
        """As for `expiring`."""

    def tidy(self) -> None:
        """Labels of its pages stay: whose they are is the leader's business."""
        rooms = self.actor.rooms
        self.endpoint._numbers = {room: number for room, number in self.endpoint._numbers.items() if room in rooms}

    def _settle(self) -> None:
        self.pump()
        self.check()
        self.tidy()


def join(follower: FollowerNode, leader: Node) -> None:
    """Before anything is asked for, the instance is complete."""
    follower.found(leader.address)
    leader.up(follower.address)
    follower.up(leader.address)
    for node, peer in ((leader, follower), (follower, leader)):
        for effect in peer.effects():
            if isinstance(effect, Say) and effect.peer == node.address.incarnation:
                node.message(peer.address, effect.message)
