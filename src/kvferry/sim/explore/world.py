"""The world between explored processes: who lives, links that break, a data plane, clients, and the faults left.

Here: what can happen in a state, and what must hold in it. Not here: what an event does (`happen`, `change`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.protocol.address import Address
from kvferry.protocol.rank import RankInfo
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.sim.explore import happen
from kvferry.sim.explore.bounds import (
    ALIVE,
    ASKED_TO_ABORT,
    BROKEN,
    CUT_OFF,
    DEAD,
    DIAL,
    FRONT,
    NONE,
    OPEN,
    REQUEST,
    SERVED,
    UNBORN,
    UNFAIR,
    WAITING,
    Bounds,
    Side,
    State,
    room_of,
)
from kvferry.sim.explore.change import Change
from kvferry.sim.explore.effects import Post
from kvferry.sim.explore.follower import FollowerNode, join
from kvferry.sim.explore.landing import Landings
from kvferry.sim.explore.leaders import DecodeNode, PrefillNode, Size
from kvferry.sim.explore.local import Event, Local, Locals
from kvferry.sim.explore.naming import Naming
from kvferry.sim.explore.node import Node
from kvferry.sim.explore.router import RouterNode
from kvferry.transfer.contract import Proofs

HAPPEN = vars(happen)


@dataclass
class World:
    bounds: Bounds
    slots: tuple[str, ...] = ()
    locals: Locals = field(init=False)

    def __post_init__(self) -> None:
        routers = tuple(f"router-{i}" for i in range(self.bounds.routers))
        followers = tuple(f"prefill.{rank}" for rank in range(1, self.bounds.ranks))
        self.slots = (*routers, "prefill", "decode", *followers)
        self._infos: dict[tuple[int, int], RankInfo] = {}
        two = self.bounds.requests == 2 and self.bounds.routers == 1
        names: dict[int, int] = {}
        if two:
            for attempt in range(self.bounds.attempts):
                a, b = room_of(0, attempt), room_of(1, attempt)
                names |= {a: b, b: a}
            names |= {REQUEST: REQUEST + 1, REQUEST + 1: REQUEST}
        self.locals = Locals(names)
        self._naming = Naming(self.locals)
        self._landings = Landings()
        self.slot_of: dict[int, int] = {}
        self._addresses: dict[tuple[int, int], Address] = {}
        for slot, name in enumerate(self.slots):
            for life in range(1, self.bounds.faults + 3):
                incarnation = (slot + 1) * 0x10 + life
                self.slot_of[incarnation] = slot
                self._addresses[(slot, life)] = Address(name, "", incarnation, "host", incarnation)
        self.by_incarnation = {address.incarnation: address for address in self._addresses.values()}
        self.by_incarnation[FRONT.incarnation] = FRONT

    # --- processes ---

    def start(self) -> State:
        """All processes are linked; nothing is asked for yet."""
        nodes = [self.make(slot, 1) for slot in range(len(self.slots))]
        count = len(nodes)
        links: dict[tuple[int, int], Side] = {}
        routers = [node for node in nodes if isinstance(node, RouterNode)]
        leaders = [node for node in nodes if isinstance(node, PrefillNode | DecodeNode)]
        followers = [node for node in nodes if isinstance(node, FollowerNode)]
        pairs: list[tuple[Node, Node]] = [(follower, leaders[0]) for follower in followers]
        for follower in followers:
            join(follower, leaders[0])
        for leader in leaders:
            self._infos[(self.slot_of[leader.address.incarnation], 1)] = leader.actor.info
        for router in routers:
            router.roster(self.ranks((1,) * count))
            for leader in leaders:
                router.up(leader.address)
                leader.up(router.address)
                pairs.append((router, leader))
        for a, b in pairs:
            for one, other in ((a, b), (b, a)):
                links[(one.address.incarnation, other.address.incarnation)] = (OPEN, (), ())
        for node in nodes:
            node.effects()
        clients = tuple((UNBORN, 0, 0, 0) for _ in range(self.bounds.requests))
        ids = tuple(self.locals.add(node) for node in nodes)
        return State(
            ids, (ALIVE,) * count, (1,) * count, tuple(sorted(links.items())), (), (), clients, (), self.bounds.faults
        )

    def make(self, slot: int, life: int) -> Node:
        address, fronts, bounds = self._addresses[(slot, life)], frozenset({FRONT.incarnation}), self.bounds
        name, layers = self.slots[slot], bounds.ranks
        proofs = Proofs(drained=True, exited=bounds.exits and not bounds.revokes, revoked=bounds.revokes)
        size = Size(bounds.source_pages, 2, proofs, bounds.policy, bounds.ranks, 0, layers, bounds.chunk_tokens)
        if name == "prefill":
            return PrefillNode(address, fronts, size)
        if name.startswith("prefill."):
            return FollowerNode(address, fronts, replace(size, rank=int(name.partition(".")[2])))
        if name == "decode":
            return DecodeNode(address, fronts, Size(bounds.pages, bounds.rows, proofs, bounds.policy, layers=layers))
        return RouterNode(address, fronts)

    def ranks(self, lives: tuple[int, ...]) -> Any:
        found = []
        for slot, name in enumerate(self.slots):
            if name in ("prefill", "decode"):
                found.append(self.info(slot, lives[slot]))
        return tuple(found)

    def info(self, slot: int, life: int) -> RankInfo:
        """As it registers."""
        known = self._infos.get((slot, life))
        if known is None:
            node: Any = self.make(slot, life)
            known = self._infos[(slot, life)] = node.actor.info
        return known

    def spec(self, client: int, has: int) -> RequestSpec:
        prompt = tuple(range(1, self.bounds.prompt_tokens + 1))
        return RequestSpec(REQUEST + client, prompt, Sampling(self.bounds.max_tokens), FRONT, frozen_ids=(7,) * has)

    def incarnation(self, state: State, slot: int) -> int:
        return (slot + 1) * 0x10 + state.lives[slot]

    def agents_at(self, numbers: list[int], incarnation: int) -> dict[int, int]:
        return self.locals.states[numbers[self.slot_of[incarnation]]].agents

    def local(self, state: State, slot: int) -> Local:
        return self.locals.states[state.locals[slot]]

    # --- events ---

    def events(self, state: State) -> Iterator[Event]:
        """Everything that can happen now; names of faults are in `FAULTS`."""
        sides = dict(state.links)
        for slot in range(len(self.slots)):
            if state.status[slot] == ALIVE:
                yield from self._events_of(state, slot, sides)
            elif self._is_more_to_come(state) and state.lives[slot] <= self.bounds.faults:
                yield ("restart", slot)
        for at, (source, target, _) in enumerate(state.notes):
            first = all((s, t) != (source, target) for s, t, _ in state.notes[:at])
            slot = self.slot_of[target]
            if first and state.status[slot] == ALIVE:
                yield ("notified", at)
        for leader, room in state.stops:
            if state.status[self.slot_of[leader]] == ALIVE:
                yield ("stop", leader, room)
        yield from self._clients(state)
        if state.faults and not self.is_quiet(state):  # where no room is left, a fault can do no harm
            yield from self._faults(state, sides)

    def _events_of(self, state: State, slot: int, sides: dict[tuple[int, int], Side]) -> Iterator[Event]:
        here, local = self.incarnation(state, slot), self.local(state, slot)
        for (owner, peer), (status, queue, _) in sides.items():
            if owner != here:
                continue
            if queue:
                yield ("deliver", here, peer)
            if status == BROKEN or (status == DIAL and not self._lives(state, peer)):
                yield ("lost", here, peer)
        for who, whose in state.exits:
            if who == here and (who, whose) not in sides:
                yield ("exited", here, whose)
        for at in range(len(local.works)):
            yield ("work", slot, at)
        for post, posted, cancelled in local.writes:
            arrives = self._arrives(state, slot, post)
            if posted and arrives:
                yield ("flushed", slot, post.handle)
            if cancelled and (arrives or not self.bounds.revokes):
                yield ("cancelled", slot, post.handle)
            if not arrives:
                yield ("broken", slot, post.handle)
        if state.faults and "clock" in self.bounds.kinds:  # at the leaders too
            for room in local.expiring:
                yield ("expire", slot, room)
        if local.late and not self.bounds.revokes:
            yield ("kill", slot)
        if local.overdue:
            yield ("overdue", slot)
        if local.ends and not local.said:
            yield ("farewell", slot)
        elif local.ends and not any(queue for (_, peer), (_, queue, _) in sides.items() if peer == here):
            yield ("end", slot)
        if "drain" in self.bounds.kinds and self.slots[slot] == "prefill":
            if not local.drains:
                yield ("drain", slot)
            elif local.may_depart:
                yield ("depart", slot)
        if local.wants_tick and self._tick_helps(state, slot, sides):
            yield ("tick", slot)

    @staticmethod
    def _is_more_to_come(state: State) -> bool:
        """A client may open another room: only then does it matter who else lives, and is linked."""
        return any(doing in (UNBORN, CUT_OFF) for doing, _, _, _ in state.clients)

    def _tick_helps(self, state: State, slot: int, sides: dict[tuple[int, int], Side]) -> bool:
        """To dial a process that has ended changes nothing."""
        here = self.incarnation(state, slot)
        if self.slots[slot].startswith("router") and not self._is_more_to_come(state):
            return False
        if self.slots[slot].startswith("prefill"):
            return self.bounds.revokes and self._may_say_again(state, here, sides)
        return any(
            self._lives(state, peer) and (here, peer) not in sides
            for peer in (self.incarnation(state, other) for other in range(len(self.slots)) if other != slot)
            if not (self.slots[slot].startswith("router") and self.slots[self.slot_of[peer]].startswith("router"))
        )

    def _may_say_again(self, state: State, here: int, sides: dict[tuple[int, int], Side]) -> bool:
        """To decode, that a write has broken: when it has heard what was said before, and has answered."""
        decode = self.incarnation(state, self.slots.index("decode"))
        return self._lives(state, decode) and not any(
            queue for pair in ((here, decode), (decode, here)) for queue in sides.get(pair, (NONE, (), ()))[1:]
        )

    def _clients(self, state: State) -> Iterator[Event]:
        for client, (doing, attempt, _, router) in enumerate(state.clients):
            if doing in (UNBORN, CUT_OFF):
                for slot, name in enumerate(self.slots):
                    if (
                        name.startswith("router")
                        and state.status[slot] == ALIVE
                        and (doing == UNBORN or slot != router)
                    ):
                        yield ("ask", client, slot)
            elif doing == WAITING and state.status[router] == ALIVE:
                if room_of(client, attempt) in self.local(state, router).rooms:
                    yield ("abort", client)
            elif doing == SERVED:
                yield ("leave", client)

    def _faults(self, state: State, sides: dict[tuple[int, int], Side]) -> Iterator[Event]:
        kinds = self.bounds.kinds
        for slot, name in enumerate(self.slots):
            role = name.split("-")[0]
            if state.status[slot] == ALIVE and role in self.bounds.crashing:
                if "crash" in kinds:
                    yield ("crash", slot)
                if "stop" in kinds:
                    yield ("halt", slot)
        if "break" in kinds:
            for (a, b), (status, _, _) in sides.items():
                other = sides.get((b, a))
                if status in (DIAL, OPEN) and (a < b or other is None or other[0] in (NONE, BROKEN)):
                    yield ("cut", a, b)
        if "path" in kinds:
            for slot in range(len(self.slots)):
                if state.status[slot] != DEAD:
                    for post, posted, _ in self.local(state, slot).writes:
                        if posted and self._arrives(state, slot, post):
                            yield ("path", slot, post.handle)

    def _lives(self, state: State, incarnation: int) -> bool:
        slot = self.slot_of[incarnation]
        return state.status[slot] != DEAD and self.incarnation(state, slot) == incarnation

    def _arrives(self, state: State, slot: int, post: Post) -> bool:
        """What this process writes can still land."""
        if not self._lives(state, post.target):
            return False
        agents = self.local(state, self.slot_of[post.target]).agents
        return not self.bounds.revokes or agents.get(self.incarnation(state, slot)) == post.agent

    # --- what an event does ---

    def after(self, state: State, event: Event) -> State:
        """The state that follows. Raises Violation."""
        change = Change(self, state)
        HAPPEN[event[0]](change, *event[1:])
        return change.state()

    # --- what is asked of every state ---

    def check(self, state: State) -> None:
        """Raises Violation: every write that may land now may do so where it would."""
        for slot, name in enumerate(self.slots):
            if not name.startswith("prefill") or state.status[slot] == DEAD:
                continue
            writer, leader = self.local(state, slot), self.slots.index("prefill")
            keeps = state.status[leader] == ALIVE and not self.local(state, leader).ending
            held = self.local(state, leader).held if keeps else None
            for post in (*(post for post, posted, _ in writer.writes if posted), *writer.late):
                if self._arrives(state, slot, post):
                    owner = self.local(state, self.slot_of[post.target])
                    self._landings.check(post, self.incarnation(state, slot), post in writer.late, owner, held)

    def is_quiet(self, state: State) -> bool:
        """Every room has ended and every page is back."""
        for slot in range(len(self.slots)):
            if state.status[slot] == ALIVE and not self.local(state, slot).quiet:
                return False
        return all(doing not in (WAITING, ASKED_TO_ABORT, CUT_OFF) for doing, _, _, _ in state.clients)

    def is_fair(self, event: Event) -> bool:
        """Faults, clocks and clients that change their minds are nothing to wait for. Clocks neither: nothing here
        needs one to end."""
        return event[0] not in UNFAIR

    def key(self, state: State) -> Any:
        """The same for states that differ by the names of the two rooms alone."""
        return self._naming.key(state)
