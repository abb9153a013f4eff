"""One process of an explored world: a production actor, what it is given, and the events that can happen to it.

An event runs as the host of the actor would have it: the item goes to `receive`, what it brings along follows, then
`advance`. Afterwards the checkers look at the actor, and its state is rendered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from kvferry.actors.actor import FromPeer, LinkLost, LinkUp, PeerExited, Tick
from kvferry.actors.ports import LostReason
from kvferry.protocol.address import Address
from kvferry.protocol.kvpoll import STICKY, KVPoll
from kvferry.protocol.messages import Message
from kvferry.sim.explore.canon import Renderer
from kvferry.sim.explore.effects import Effect, Post, Surroundings
from kvferry.sim.explore.fakes import (
    Sessions,
    StandingClock,
    Work,
)
from kvferry.sim.explore.violation import Violation

REGISTRY = Address("registry", "", 1, "", 0)
LONG_AGO_S = -1e9
#: (pages leased to a writer: page -> (room, incarnations)), the same for rows
Leases = tuple[dict[int, tuple[int, frozenset[int]]], dict[int, tuple[int, frozenset[int]]]]


class Node:
    """Base. `pump` lets the actor work off what lies in its mailbox."""

    role = ""
    actor: Any

    def __init__(self, address: Address, fronts: frozenset[int]) -> None:
        self.around = Surroundings()
        self.address = address
        self.clock = StandingClock()
        self.sessions = Sessions(self.around, address, fronts)
        self.works: list[Work] = []
        self.polls: dict[int, KVPoll] = {}
        self.said = False

    # --- events ---

    def up(self, peer: Address) -> None:
        self.sessions.open[peer.incarnation] = True
        self.sessions.seen.add(peer.incarnation)
        self._turn(LinkUp(peer))

    def lost(self, peer: Address) -> None:
        self.sessions.open.pop(peer.incarnation, None)
        self._turn(LinkLost(peer, LostReason.SILENT))

    def exited(self, peer: Address) -> None:
        self.sessions.seen.discard(peer.incarnation)
        self._turn(PeerExited(peer))

    def message(self, peer: Address, message: Message) -> None:
        self._turn(FromPeer(peer, message))

    def tick(self) -> None:
        raise NotImplementedError

    def expire(self, room: int) -> None:
        """The room's clocks have run out."""
        before = {other: machine.kvpoll for other, machine in self.rooms() if other != room}
        self._clocks(room)._progress_s = LONG_AGO_S
        self._turn(Tick())
        after = {other: machine.kvpoll for other, machine in self.rooms()}
        for other, poll in before.items():
            if poll not in STICKY and after.get(other, KVPoll.FAILED) is KVPoll.FAILED:
                text = f"{self.address.name}: room {other:x} fails because the clocks of room {room:x} have run out"
                raise Violation("one-room-per-clock", text)

    # --- what the world asks ---

    def rooms(self) -> Iterator[tuple[int, Any]]:
        """Rooms with their machines."""
        raise NotImplementedError

    def quiet(self) -> bool:
        """No rooms, and no page in use."""
        raise NotImplementedError

    def wants_tick(self) -> bool:
        """A periodic turn has something to do that nothing else would do."""
        raise NotImplementedError

    def expiring(self) -> tuple[int, ...]:
        """Rooms whose clocks run."""
        return tuple(room for room, _ in self.rooms() if not self._clocks(room)._stopped)

    def writes(self) -> tuple[tuple[Post, bool, bool], ...]:
        """Writes that have not ended: (write, is it posted, is it cancelled), in the order of their lanes."""
        return ()

    def late(self) -> tuple[Post, ...]:
        """Writes that have ended without saying what landed."""
        return ()

    def agents(self) -> dict[int, int]:
        """By writer, the generation of the agent by which its writes arrive here, where that is the only way."""
        return {}

    def overdue(self) -> bool:
        """A writer that owes its word may be shut out."""
        return False

    def leases(self) -> Leases:
        """What others may write to, and who."""
        return {}, {}

    def farewell(self) -> None:
        """A last turn, in which an instance that ends says so."""
        self.said = True
        self._turn(Tick())

    def ends(self) -> bool:
        """Its instance has lost a rank, and none of its own writes is open: it will end by itself."""
        return self.ending() and self.actor.quiet

    def ending(self) -> bool:
        """Its instance has lost a rank: no page is given to anybody here any more."""
        return bool(getattr(self.actor, "ending", ""))

    def drains(self) -> bool:
        """It takes no new rooms, and ends when those that are here have ended."""
        return False

    def may_depart(self) -> bool:
        """It says that it is done."""
        return False

    def held(self) -> dict[int, int]:
        """Page -> the room that holds it."""
        return {}

    def key(self) -> Hashable:
        render = Renderer(self._done())
        links = frozenset(self.sessions.open.items()), frozenset(self.sessions.seen)
        return self.role, self.address.incarnation, self.said, links, render(self.works), render(self._state())

    def _state(self) -> Any:
        return self.actor

    def _done(self) -> int:
        return 0

    def _clocks(self, room: int) -> Any:
        raise NotImplementedError

    # --- turns and checks ---

    def _turn(self, item: Any) -> None:
        self.actor.receive(item)
        self.pump()
        self.check()
        self.tidy()

    def pump(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Raises Violation. Called after each turn."""
        polls = {room: machine.kvpoll for room, machine in self.rooms()}
        for room, poll in self.polls.items():
            if poll in STICKY and polls.get(room, poll) is not poll:
                raise Violation(
                    "kvpoll-sticky", f"{self.address.name}: KVPoll was {poll.name} and is {polls[room].name}"
                )
        self.polls = polls
        self.check_clocks()
        for room, machine in self.rooms():
            refused = [(state, event) for verdict, state, event in machine.counts if verdict.name == "REFUSED"]
            if refused:
                state, event = refused[0]
                text = f"{type(machine).__name__} of room {room:x} refuses {event.name} in {state.name}"
                raise Violation("refused", f"{self.address.name}: {text}")

    def check_clocks(self) -> None:
        for room, poll in self.polls.items():
            if poll not in STICKY and self._clocks(room)._stopped:
                raise Violation("clocks-run", f"{self.address.name}: no clock runs for room {room:x}")

    def tidy(self) -> None:
        """Forget what nothing depends on any more."""

    def effects(self) -> list[Effect]:
        effects, self.around.effects[:] = list(self.around.effects), []
        return effects


async def resolve(name: str) -> Address:
    raise LookupError(name)
