"""A state of a world while an event changes it: links, turns, clients.

The rules of links are those of `kvferry.actors.ports.Network`: in order, once, until the session breaks; then each side
learns of it at some time of its own, and may be handed first what was already on its way. A peer may dial again before
the other side has learned anything; what belongs to the newer session waits for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.protocol.messages import PrefillDone, Progress, Retracted, UnknownRoom
from kvferry.sim.explore.bounds import (
    ASKED_TO_ABORT,
    BROKEN,
    CUT_OFF,
    DEAD,
    DIAL,
    FAILED,
    FRONT,
    GONE,
    LEFT,
    NONE,
    OPEN,
    SERVED,
    UP,
    WAITING,
    Client,
    Side,
    State,
    client_of,
    room_of,
)
from kvferry.sim.explore.local import Event
from kvferry.sim.explore.violation import Violation

if TYPE_CHECKING:
    from kvferry.sim.explore.world import World


class Change:
    """A state that is being changed."""

    def __init__(self, world: World, before: State) -> None:
        self.world, self.before = world, before
        self.locals, self.status, self.lives = list(before.locals), list(before.status), list(before.lives)
        self.links: dict[tuple[int, int], Side] = dict(before.links)
        self.notes, self.exits = list(before.notes), list(before.exits)
        self.clients, self.stops, self.faults = list(before.clients), list(before.stops), before.faults
        self._later: list[tuple[int, int]] = []  # sides that are up, and told behind what a turn has said

    def state(self) -> State:
        links = tuple(sorted(item for item in self.links.items() if item[1] != (NONE, (), ())))
        if self.world.bounds.revokes:  # what comes by an agent that has ended does not come
            self.notes = [note for note in self.notes if note[0] in self.world.agents_at(self.locals, note[1])]
        return State(
            tuple(self.locals), tuple(self.status), tuple(self.lives), links, tuple(self.notes),
            tuple(sorted(self.exits)), tuple(self._client_kept(at, client) for at, client in enumerate(self.clients)),
            tuple(sorted(set(self.stops))), self.faults,
        )  # fmt: skip

    def _client_kept(self, number: int, client: Client) -> Client:
        """It does not matter how a client that can do nothing more has ended."""
        doing, attempt, _, _ = client
        if doing in (LEFT, FAILED) or (doing == SERVED and not self._is_decoding(room_of(number, attempt))):
            return GONE, attempt, 0, 0
        return client

    def incarnation(self, slot: int) -> int:
        return (slot + 1) * 0x10 + self.lives[slot]

    def turn(self, here: int, event: Event) -> None:
        slot = self.world.slot_of[here]
        self.locals[slot], deeds = self.world.locals.turn(self.locals[slot], event)
        self.do(here, deeds)
        while self._later:
            owner, peer = self._later.pop(0)
            self.turn(owner, ("up", self.world.by_incarnation[peer]))
        if any(deed[:2] == ("client", "over") for deed in deeds):
            self._purge(here, slot)

    def do(self, here: int, deeds: Any) -> None:
        for deed in deeds:
            match deed:
                case ("dial", peer):
                    self._dial(here, peer)
                case ("say", peer, message):
                    if peer == FRONT.incarnation:
                        self._told(here, self.world.locals.messages[message])
                    else:
                        self.put(peer, here, message)
                case ("notify", target, payload):
                    if self.lives_on(target):
                        self.notes.append((here, target, payload))
                case ("tokens", leg, room, index):
                    self._tokens(here, leg, room, index)
                case ("client", what, room, value):
                    self._client(what, room, value)

    def lives_on(self, incarnation: int) -> bool:
        slot = self.world.slot_of[incarnation]
        return self.status[slot] != DEAD and self.incarnation(slot) == incarnation

    # --- links ---

    def _dial(self, here: int, peer: int) -> None:
        _, queue, _ = self.links.get((here, peer), (NONE, (), ()))
        if self.world.bounds.prompt and self.lives_on(peer):
            if (peer, here) in self.links:  # it hears of a new session, so that the old one is over
                self.lost(peer, here)
            self.links[(here, peer)] = self.links[(peer, here)] = (OPEN, (), ())
            self._later += [(peer, here), (here, peer)]
            return
        self.links[(here, peer)] = (DIAL, queue, ())
        if self.lives_on(peer):
            self.put(peer, here, UP)

    def put(self, to: int, sender: int, message: int) -> None:
        """On the session that `sender` has, if it still leads anywhere. What a router is told of a room that has ended
        there changes nothing, and its answer changes nothing either."""
        if message >= 0 and not self._matters(to, self.world.locals.messages[message]):
            return
        ours, theirs = self.links.get((sender, to)), self.links.get((to, sender), (NONE, (), ()))
        if ours is None or ours[0] in (NONE, BROKEN) or not self.lives_on(to):
            return
        status, queue, new = theirs
        if message >= 0 and status == OPEN and not queue and self._is_prompt(to):
            self.turn(to, ("message", self.world.by_incarnation[sender], message))
        elif status == BROKEN:
            self.links[(to, sender)] = (status, queue, (*new, message))
        else:
            self.links[(to, sender)] = (status, (*queue, message), new)

    def _matters(self, to: int, message: Any) -> bool:
        slot = self.world.slot_of[to]
        role = self.world.slots[slot]
        if not self.lives_on(to):
            return False
        if role.startswith("router"):
            if isinstance(message, PrefillDone) and not message.awaits_destination:
                return False  # it changes nothing but the room's clock: see `local.check_news`
            return message.room in self.world.locals.states[self.locals[slot]].rooms
        if isinstance(message, UnknownRoom) and role.startswith("prefill"):  # it ends a room that has broken
            return message.room in self.world.locals.states[self.locals[slot]].rooms
        return not isinstance(message, Progress)

    def _purge(self, here: int, slot: int) -> None:
        """A room may have ended in this turn: what is on its way to it does not matter any more."""
        messages = self.world.locals.messages
        rooms = self.world.locals.states[self.locals[slot]].rooms
        for side, (status, queue, new) in self.links.items():
            if side[0] == here and queue:
                left = tuple(m for m in queue if m < 0 or messages[m].room in rooms)  # type: ignore[attr-defined]
                self.links[side] = (status, left, new)

    def broken(self, a: int, b: int) -> None:
        """Their session is over; each side learns of it when it does."""
        for side in ((a, b), (b, a)):
            status, queue, _ = self.links.get(side, (NONE, (), ()))
            if status == NONE:
                self.links.pop(side, None)
            else:
                self.links[side] = (BROKEN, () if self.world.bounds.prompt else queue, ())
                if self._is_prompt(side[0]):
                    self.lost(*side)

    def lost(self, here: int, peer: int) -> None:
        _, _, new = self.links.pop((here, peer))
        if new:
            self.links[(here, peer)] = (NONE, new, ())
        self.turn(here, ("lost", self.world.by_incarnation[peer]))

    def _is_prompt(self, here: int) -> bool:
        """A router that takes in what comes at once."""
        slot = self.world.slot_of[here]
        return self.world.bounds.prompt and self.lives_on(here) and self.world.slots[slot].startswith("router")

    def crash(self, slot: int) -> None:
        gone = self.incarnation(slot)
        for owner, peer in list(self.links):
            if peer == gone:
                self.broken(owner, peer)
        for owner, peer in list(self.links):
            if owner == gone:
                del self.links[(owner, peer)]
        self.status[slot], self.locals[slot] = DEAD, -1
        self.exits = [exit for exit in self.exits if exit[0] != gone]
        self.notes = [note for note in self.notes if note[1] != gone]
        self.stops = [stop for stop in self.stops if stop[0] != gone]
        if self.world.bounds.exits:
            for other in range(len(self.locals)):
                name = self.world.slots[other]  # a router does nothing about it
                if (
                    not name.startswith("router")
                    and self.status[other] != DEAD
                    and gone in self.world.locals.states[self.locals[other]].seen
                ):
                    self.exits.append((self.incarnation(other), gone))
        if self.world.slots[slot] == "decode":
            self.clients = [(FAILED, *kept[1:]) if kept[0] == SERVED else kept for kept in self.clients]
        if self.world.slots[slot].startswith("router"):
            self.clients = [self._cut_off(client, slot) for client in self.clients]

    def _cut_off(self, client: tuple[int, int, int, int], slot: int) -> tuple[int, int, int, int]:
        doing, attempt, has, router = client
        if router != slot or doing not in (WAITING, ASKED_TO_ABORT):
            return client
        if doing == ASKED_TO_ABORT or attempt + 1 >= self.world.bounds.attempts:
            return (FAILED, attempt, has, router)
        return (CUT_OFF, attempt, has, router)

    # --- clients ---

    def _is_decoding(self, room: int) -> bool:
        decode = self.locals[self.world.slots.index("decode")]
        return decode >= 0 and room in self.world.locals.states[decode].rooms

    def _client(self, what: str, room: int, value: Any) -> None:
        client, attempt = client_of(room)
        doing, current, has, router = self.clients[client]
        if what != "outcome" or attempt != current:
            return
        if doing not in (WAITING, ASKED_TO_ABORT):
            raise Violation("one-outcome", f"client {client} is answered again, for attempt {attempt}")
        ended = SERVED if value == "ok" and doing == WAITING else LEFT if value == "ok" else FAILED
        self.clients[client] = (ended, current, has, router)
        if ended is LEFT:  # it had left: decode is told to stop
            decode = self.world.slots.index("decode")
            self.stops.append((self.incarnation(decode), room))

    def _tokens(self, here: int, leg: str, room: int, index: int) -> None:
        client, attempt = client_of(room)
        doing, current, has, router = self.clients[client]
        if doing == GONE:
            return
        if attempt != current:
            self.stops.append((here, room))
            return
        if index > has and leg == "decode":
            raise Violation("client-sequence", f"client {client} has {has} tokens and is sent number {index}")
        self.clients[client] = (doing, current, max(has, index + 1), router)

    def _told(self, here: int, message: Any) -> None:
        assert isinstance(message, Retracted | UnknownRoom), message
