"""The world between explored processes: who lives, links that break, a data plane, clients, and how many faults are left.

A *state* is a tuple of numbers. A link is a pair of *sides*, each with what is still to be delivered to it. The rules
are those of `kvferry.actors.ports.Network`: in order, once, until the session breaks; then each side learns of it at
some time of its own, and may be handed first what was already on its way. A peer may dial again before the other side
has learned anything; what belongs to the newer session waits for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvferry.protocol.address import Address
from kvferry.protocol.messages import Progress, Retracted, Stop, UnknownRoom
from kvferry.protocol.metadata import decode_notification
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.sim.explore.fakes import Post
from kvferry.sim.explore.local import Deed, Event, Local, Locals
from kvferry.sim.explore.node import DecodeNode, Node, PrefillNode, RouterNode
from kvferry.sim.explore.violation import Violation
from kvferry.transfer.contract import Proofs, WriteOutcome

#: Status of one side of a link. DIAL: opened from here, the answer is awaited. BROKEN: over, and not told yet. NONE:
#: only what a new session brings is here.
NONE, DIAL, OPEN, BROKEN = range(4)
#: First thing that each side hears of a session.
UP = -1
ALIVE, DEAD = range(2)
#: Events that never have to happen.
FAULTS = ("break", "crash", "halt", "path", "expire")
UNFAIR = frozenset({*FAULTS, "abort", "leave"})
#: What a client is doing.
UNBORN, WAITING, ASKED_TO_ABORT, SERVED, LEFT, FAILED, CUT_OFF, GONE = range(8)

Client = tuple[int, int, int, int]
Side = tuple[int, tuple[int, ...], tuple[int, ...]]
Links = tuple[tuple[tuple[int, int], Side], ...]


class State(NamedTuple):
    """`locals`: the number of each process's state (-1: dead). `lives`: how often each has been started.
    `notes`: notifications on their way. `exits`: (who, whose end) that the kernel has still to tell. `clients`: (what
    it is doing, attempt, next token); `stops`: (leader, room) to be told that nobody wants more.
    """

    locals: tuple[int, ...]
    status: tuple[int, ...]
    lives: tuple[int, ...]
    links: Links
    notes: tuple[tuple[int, int, bytes], ...]
    exits: tuple[tuple[int, int], ...]
    clients: tuple[tuple[int, int, int, int], ...]
    stops: tuple[tuple[int, int], ...]
    faults: int


@dataclass(frozen=True)
class Bounds:
    """What a model is explored within. `faults`: at most so many; `kinds` of them. `prompt_tokens` of each request
    (a page holds one), `chunk_tokens` per forward; `pages` of decode's pool, `source_pages` of prefill's.
    """

    routers: int = 1
    requests: int = 2
    attempts: int = 1
    faults: int = 2
    kinds: tuple[str, ...] = ("break", "crash", "stop", "path", "clock")
    crashing: tuple[str, ...] = ("prefill", "decode")
    prompt_tokens: int = 1
    chunk_tokens: int = 1
    max_tokens: int = 2
    pages: int = 3
    source_pages: int = 1
    rows: int = 1
    exits: bool = True
    prompt: bool = False

    def text(self) -> str:
        return (
            f"{self.routers} router(s), 1 prefill, 1 decode, {self.requests} request(s) of {self.prompt_tokens} page(s) "
            f"in chunks of {self.chunk_tokens}, {self.attempts} attempt(s); pools of {self.source_pages} and {self.pages} "
            f"pages; at most {self.faults} fault(s) of: {', '.join(self.kinds)}"
        )


FRONT = Address("front", "", 0xF0, "host", 9)
#: Names of rooms and requests: numbers that occur nowhere else, so that two rooms can change names.
ROOM, REQUEST = 0xA0000, 0xB0000


def room_of(client: int, attempt: int) -> int:
    return ROOM + client * 16 + attempt + 1


def client_of(room: int) -> tuple[int, int]:
    return (room - ROOM) // 16, (room - ROOM) % 16 - 1


@dataclass
class World:
    bounds: Bounds
    slots: tuple[str, ...] = ()
    locals: Locals = field(init=False)

    def __post_init__(self) -> None:
        routers = tuple(f"router-{i}" for i in range(self.bounds.routers))
        self.slots = (*routers, "prefill", "decode")
        two = self.bounds.requests == 2 and self.bounds.routers == 1
        names = {}
        if two:
            for attempt in range(self.bounds.attempts):
                a, b = room_of(0, attempt), room_of(1, attempt)
                names |= {a: b, b: a}
            names |= {REQUEST: REQUEST + 1, REQUEST + 1: REQUEST}
        self.locals = Locals(names)
        self._safe: dict[tuple[Any, ...], Violation | None] = {}
        self._slot_of: dict[int, int] = {}
        self._addresses: dict[tuple[int, int], Address] = {}
        for slot, name in enumerate(self.slots):
            for life in range(1, self.bounds.faults + 3):
                incarnation = (slot + 1) * 0x10 + life
                self._slot_of[incarnation] = slot
                self._addresses[(slot, life)] = Address(name, "", incarnation, "host", incarnation)
        self.by_incarnation = {address.incarnation: address for address in self._addresses.values()}
        self.by_incarnation[FRONT.incarnation] = FRONT

    # --- processes ---

    def start(self) -> State:
        """All processes are linked; nothing is asked for yet."""
        nodes = [self._make(slot, 1) for slot in range(len(self.slots))]
        count = len(nodes)
        links: dict[tuple[int, int], Side] = {}
        routers = [node for node in nodes if isinstance(node, RouterNode)]
        leaders = [node for node in nodes if not isinstance(node, RouterNode)]
        for router in routers:
            router.roster(self._ranks((1,) * count))
            for leader in leaders:
                for a, b in ((router, leader), (leader, router)):
                    a.up(b.address)
                    links[(a.address.incarnation, b.address.incarnation)] = (OPEN, (), ())
        for node in nodes:
            node.effects()
        clients = tuple((UNBORN, 0, 0, 0) for _ in range(self.bounds.requests))
        ids = tuple(self.locals.add(node) for node in nodes)
        return State(
            ids, (ALIVE,) * count, (1,) * count, tuple(sorted(links.items())), (), (), clients, (), self.bounds.faults
        )

    def _make(self, slot: int, life: int) -> Node:
        address, fronts, bounds = self._addresses[(slot, life)], frozenset({FRONT.incarnation}), self.bounds
        proofs = Proofs(drained=True, exited=bounds.exits, revoked=False)
        if self.slots[slot] == "prefill":
            return PrefillNode(address, fronts, bounds.source_pages, bounds.chunk_tokens, 2, proofs)
        if self.slots[slot] == "decode":
            return DecodeNode(address, fronts, bounds.pages, bounds.rows, proofs)
        return RouterNode(address, fronts)

    def _ranks(self, lives: tuple[int, ...]) -> Any:
        found = []
        for slot, name in enumerate(self.slots):
            if name in ("prefill", "decode"):
                found.append(self._info(slot, lives[slot]))
        return tuple(found)

    def _info(self, slot: int, life: int) -> Any:
        node: Any = self._make(slot, life)
        return node.actor.info

    def spec(self, client: int, has: int) -> RequestSpec:
        prompt = tuple(range(1, self.bounds.prompt_tokens + 1))
        return RequestSpec(REQUEST + client, prompt, Sampling(self.bounds.max_tokens), FRONT, frozen_ids=(7,) * has)

    def incarnation(self, state: State, slot: int) -> int:
        return (slot + 1) * 0x10 + state.lives[slot]

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
            slot = self._slot_of[target]
            if first and state.status[slot] == ALIVE:
                yield ("notified", at)
        for leader, room in state.stops:
            if state.status[self._slot_of[leader]] == ALIVE:
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
            if posted and self._lives(state, post.target):
                yield ("flushed", slot, post.handle)
            if cancelled:
                yield ("cancelled", slot, post.handle)
            if not self._lives(state, post.target):
                yield ("broken", slot, post.handle)
        if state.faults and "clock" in self.bounds.kinds:  # at the leaders too
            for room in local.expiring:
                yield ("expire", slot, room)
        if local.late:
            yield ("kill", slot)
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
        return any(
            self._lives(state, peer) and (here, peer) not in sides
            for peer in (self.incarnation(state, other) for other in range(len(self.slots)) if other != slot)
            if not (self.slots[slot].startswith("router") and self.slots[self._slot_of[peer]].startswith("router"))
        )

    def _clients(self, state: State) -> Iterator[Event]:
        for client, (doing, attempt, has, router) in enumerate(state.clients):
            if doing == UNBORN or doing == CUT_OFF:
                for slot, name in enumerate(self.slots):
                    if name.startswith("router") and state.status[slot] == ALIVE and (doing == UNBORN or slot != router):
                        yield ("open", client, slot)
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
                    yield ("break", a, b)
        if "path" in kinds:
            for slot in range(len(self.slots)):
                if state.status[slot] != DEAD:
                    for post, posted, _ in self.local(state, slot).writes:
                        if posted and self._lives(state, post.target):
                            yield ("path", slot, post.handle)

    def _lives(self, state: State, incarnation: int) -> bool:
        slot = self._slot_of[incarnation]
        return state.status[slot] != DEAD and self.incarnation(state, slot) == incarnation

    # --- what an event does ---

    def after(self, state: State, event: Event) -> State:
        """The state that follows. Raises Violation."""
        change = Change(self, state)
        getattr(self, f"_{event[0]}")(change, *event[1:])
        return change.state()

    def _deliver(self, change: Change, here: int, peer: int) -> None:
        status, queue, new = change.links[(here, peer)]
        first, rest = queue[0], queue[1:]
        if first != UP:
            change.links[(here, peer)] = (status, rest, new)
            return change.turn(here, ("message", self.by_incarnation[peer], first))
        change.links[(here, peer)] = (BROKEN if status == BROKEN else OPEN, rest, new)
        if status == NONE:
            change.put(peer, here, UP)
        return change.turn(here, ("up", self.by_incarnation[peer]))

    def _lost(self, change: Change, here: int, peer: int) -> None:
        _, _, new = change.links.pop((here, peer))
        if new:
            change.links[(here, peer)] = (NONE, new, ())
        change.turn(here, ("lost", self.by_incarnation[peer]))

    def _exited(self, change: Change, here: int, peer: int) -> None:
        change.exits.remove((here, peer))
        change.turn(here, ("exited", self.by_incarnation[peer]))

    def _work(self, change: Change, slot: int, at: int) -> None:
        change.turn(change.incarnation(slot), ("work", at))

    def _flushed(self, change: Change, slot: int, handle: Any) -> None:
        """The bytes are placed, then the writer hears of it. That they may lie there earlier is what `safe` is for."""
        (post,) = [post for post, _, _ in self.local(change.before, slot).writes if post.handle == handle]
        change.turn(post.target, ("land", post))
        change.turn(change.incarnation(slot), ("write", handle, WriteOutcome.FLUSHED))

    def _cancelled(self, change: Change, slot: int, handle: Any) -> None:
        change.turn(change.incarnation(slot), ("write", handle, WriteOutcome.CANCELLED))

    def _broken(self, change: Change, slot: int, handle: Any) -> None:
        change.turn(change.incarnation(slot), ("write", handle, WriteOutcome.BROKEN))

    def _path(self, change: Change, slot: int, handle: Any) -> None:
        change.faults -= 1
        self._broken(change, slot, handle)

    def _notified(self, change: Change, at: int) -> None:
        _, target, payload = change.notes.pop(at)
        change.turn(target, ("notify", payload))

    def _expire(self, change: Change, slot: int, room: int) -> None:
        change.faults -= 1
        change.turn(change.incarnation(slot), ("expire", room))

    def _tick(self, change: Change, slot: int) -> None:
        change.turn(change.incarnation(slot), ("tick",))

    def _stop(self, change: Change, leader: int, room: int) -> None:
        change.stops.remove((leader, room))
        client, attempt = client_of(room)
        change.turn(leader, ("stop", FRONT, Stop(REQUEST + client, attempt, room)))

    def _open(self, change: Change, client: int, slot: int) -> None:
        doing, attempt, has, _ = change.clients[client]
        attempt += doing == CUT_OFF
        change.clients[client] = (WAITING, attempt, has, slot)
        legs = [self._info(at, change.before.lives[at]) for at, name in enumerate(self.slots) if "router" not in name]
        change.turn(
            change.incarnation(slot), ("open", room_of(client, attempt), attempt, self.spec(client, has), *legs)
        )

    def _abort(self, change: Change, client: int) -> None:
        _, attempt, has, router = change.clients[client]
        change.clients[client] = (ASKED_TO_ABORT, attempt, has, router)
        change.turn(change.incarnation(router), ("abort", room_of(client, attempt)))

    def _leave(self, change: Change, client: int) -> None:
        """After decode has committed, a client that leaves is decode's front's to tell."""
        _, attempt, has, router = change.clients[client]
        change.clients[client] = (LEFT, attempt, has, router)
        decode = self.slots.index("decode")
        change.stops.append((change.incarnation(decode), room_of(client, attempt)))

    # --- faults ---

    def _break(self, change: Change, a: int, b: int) -> None:
        change.faults -= 1
        change.broken(a, b)

    def _crash(self, change: Change, slot: int) -> None:
        change.faults -= 1
        change.crash(slot)

    def _restart(self, change: Change, slot: int) -> None:
        """A new incarnation with new memory registers; every router hears of it."""
        change.lives[slot] += 1
        change.status[slot] = ALIVE
        node = self._make(slot, change.lives[slot])
        ranks = self._ranks(tuple(change.lives))
        if isinstance(node, RouterNode):
            node.roster(ranks)
        deeds = [deed for effect in node.effects() for deed in self.locals._deeds(effect)]
        change.locals[slot] = self.locals.add(node)
        change.do(node.address.incarnation, deeds)
        for other, name in enumerate(self.slots):
            if other != slot and name.startswith("router") and change.status[other] != DEAD:
                change.turn(change.incarnation(other), ("roster", ranks))

    def _halt(self, change: Change, slot: int) -> None:
        """It stands still for longer than the heartbeat limit, so all its links break, and then it goes on.

        That it does nothing meanwhile needs no state of its own: anybody may be slow at any time here, and its writes
        land as long as they have not ended. Nor does it matter when, during its standstill, each link breaks: what is
        sent to it meanwhile is lost in either case.
        """
        change.faults -= 1
        here = change.incarnation(slot)
        for peer in [peer for owner, peer in change.links if owner == here]:
            change.broken(here, peer)

    def _kill(self, change: Change, slot: int) -> None:
        """Pages that wait for proof have passed their budget: the cluster ends their writer."""
        change.crash(slot)

    # --- what must hold in every state ---

    def check(self, state: State) -> None:
        """Raises Violation: every write that may land now may do so where it would."""
        for slot, name in enumerate(self.slots):
            if name != "prefill" or state.status[slot] == DEAD:
                continue
            writer = self.local(state, slot)
            for post in (*(post for post, posted, _ in writer.writes if posted), *writer.late):
                owner = self._slot_of[post.target]
                if self._lives(state, post.target):
                    self._check_write(post, self.incarnation(state, slot), writer, self.local(state, owner))

    def _check_write(self, post: Post, incarnation: int, writer: Local, owner: Local) -> None:
        found = self._safe.get((post, incarnation, writer.id, owner.id), _UNKNOWN)
        if found is _UNKNOWN:
            found = self._problem(post, incarnation, writer, owner)
            self._safe[(post, incarnation, writer.id, owner.id)] = found
        if isinstance(found, Violation):
            raise found

    def _problem(self, post: Post, incarnation: int, writer: Local, owner: Local) -> Violation | None:
        pages, rows = owner.leases
        for _, target, _ in post.pages:
            if pages.get(target) != (post.room, incarnation):
                text = f"a write of room {post.room:x} can land in page {target}, leased to {pages.get(target)}"
                return Violation("write-in-leased-page", text)
        for row, _ in post.rows:
            if rows.get(row) != (post.room, incarnation):
                text = f"a write of room {post.room:x} can land in row {row}, leased to {rows.get(row)}"
                return Violation("write-in-leased-page", text)
        if post not in writer.late:
            for source, _, _ in post.pages:
                if writer.held.get(source) != post.room:
                    return Violation("read-from-held-page", f"room {post.room:x} reads page {source}, which it gave back")
        return None

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

    # --- symmetry ---

    def key(self, state: State) -> Any:
        """The same for states that differ by the names of the two rooms alone."""
        plain = self._named(state, False)
        if not self.locals.names:
            return plain
        other = self._named(state, True)
        return plain if repr(plain) <= repr(other) else other

    def _named(self, state: State, swapped: bool) -> Any:
        names = self.locals.names if swapped else {}
        of_state, of_message = self.locals.key_of_state, self.locals.key_of_message
        ids = tuple(-1 if at < 0 else of_state(at, swapped) for at in state.locals)
        links = tuple(
            (pair, status, tuple(m if m < 0 else of_message(m, swapped) for m in queue),
             tuple(m if m < 0 else of_message(m, swapped) for m in new))
            for pair, (status, queue, new) in state.links
        )  # fmt: skip
        notes = tuple((s, t, self._note(payload, names)) for s, t, payload in state.notes)
        clients = state.clients[::-1] if swapped else state.clients
        stops = tuple(sorted((leader, names.get(room, room)) for leader, room in state.stops))
        return ids, state.status, state.lives, links, notes, state.exits, clients, stops, state.faults

    @staticmethod
    def _note(payload: bytes, names: dict[int, int]) -> tuple[int, int, int]:
        news = decode_notification(payload)
        assert news is not None
        return names.get(news.room, news.room), news.rank, news.incarnation


_UNKNOWN: Any = object()


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
        slot = self.world._slot_of[here]
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
                    if self._lives(target):
                        self.notes.append((here, target, payload))
                case ("tokens", leg, room, index):
                    self._tokens(here, leg, room, index)
                case ("client", what, room, value):
                    self._client(what, room, value)

    def _lives(self, incarnation: int) -> bool:
        slot = self.world._slot_of[incarnation]
        return self.status[slot] != DEAD and self.incarnation(slot) == incarnation

    # --- links ---

    def _dial(self, here: int, peer: int) -> None:
        _, queue, _ = self.links.get((here, peer), (NONE, (), ()))
        if self.world.bounds.prompt and self._lives(peer):
            if (peer, here) in self.links:  # it hears of a new session, so that the old one is over
                self.world._lost(self, peer, here)
            self.links[(here, peer)] = self.links[(peer, here)] = (OPEN, (), ())
            self._later += [(peer, here), (here, peer)]
            return
        self.links[(here, peer)] = (DIAL, queue, ())
        if self._lives(peer):
            self.put(peer, here, UP)

    def put(self, to: int, sender: int, message: int) -> None:
        """On the session that `sender` has, if it still leads anywhere. What a router is told of a room that has ended
        there changes nothing, and its answer changes nothing either."""
        if message >= 0 and not self._matters(to, self.world.locals.messages[message]):
            return
        ours, theirs = self.links.get((sender, to)), self.links.get((to, sender), (NONE, (), ()))
        if ours is None or ours[0] in (NONE, BROKEN) or not self._lives(to):
            return
        status, queue, new = theirs
        if message >= 0 and status == OPEN and not queue and self._is_prompt(to):
            return self.turn(to, ("message", self.world.by_incarnation[sender], message))
        if status == BROKEN:
            self.links[(to, sender)] = (status, queue, (*new, message))
        else:
            self.links[(to, sender)] = (status, (*queue, message), new)

    def _matters(self, to: int, message: Any) -> bool:
        slot = self.world._slot_of[to]
        role = self.world.slots[slot]
        if not self._lives(to):
            return False
        if role.startswith("router"):
            return message.room in self.world.locals.states[self.locals[slot]].rooms
        return not isinstance(message, UnknownRoom if role == "prefill" else Progress)

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
                    self.world._lost(self, *side)

    def _is_prompt(self, here: int) -> bool:
        """A router that takes in what comes at once."""
        slot = self.world._slot_of[here]
        return self.world.bounds.prompt and self._lives(here) and self.world.slots[slot].startswith("router")

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
                if not name.startswith("router") and self.status[other] != DEAD and gone in self.world.locals.states[self.locals[other]].seen:
                    self.exits.append((self.incarnation(other), gone))
        if self.world.slots[slot] == "decode":
            self.clients = [(FAILED, *rest) if doing == SERVED else (doing, *rest) for doing, *rest in self.clients]
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
