"""One process of an explored world: a production actor, what it is given, and the events that can happen to it.

An event runs as the host of the actor would have it: the item goes to `receive`, what it brings along follows, then
`advance`. Afterwards the checkers look at the actor, and its state is rendered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable, Iterator
from copy import copy
from typing import Any

from kvferry.actors.actor import FromPeer, LinkLost, LinkUp, PeerExited, Tick
from kvferry.actors.decode.decode import Decode, Notified
from kvferry.actors.leader import Leader
from kvferry.actors.leaving import QUIET_S, DrainRequested
from kvferry.actors.parts import Parts
from kvferry.actors.ports import LostReason
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.room.room import AbortRequested, Room
from kvferry.actors.router.guest import RoomOver, RoomResolved
from kvferry.actors.router.router import Router
from kvferry.actors.router.view import Ask
from kvferry.actors.settings import ClockSettings, DecodeSettings, PrefillSettings, RouterSettings
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.kvpoll import STICKY, KVPoll
from kvferry.protocol.messages import Message, Roster, Stop
from kvferry.protocol.rank import RankInfo
from kvferry.protocol.receiver import ReceiverState
from kvferry.protocol.request import RequestSpec
from kvferry.sim.explore.canon import Renderer
from kvferry.sim.explore.fakes import (
    LAYOUT,
    Answer,
    Client,
    CountingTexts,
    Effect,
    LabelEngine,
    NotingEndpoint,
    Post,
    Sessions,
    StandingClock,
    Surroundings,
    Work,
    Written,
)
from kvferry.sim.explore.violation import Violation
from kvferry.transfer.contract import Proofs, WriteOutcome

REGISTRY = Address("registry", "", 1, "", 0)
LONG_AGO_S = -1e9
#: (pages leased to a writer: page -> (room, incarnation)), the same for rows
Leases = tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]


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

    def leases(self) -> Leases:
        """What others may write to, and who."""
        return {}, {}

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
        return (
            self.role, self.address.incarnation, frozenset(self.sessions.open.items()), frozenset(self.sessions.seen),
            render(self.works), render(self._state()),
        )  # fmt: skip

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
        for room, poll in polls.items():
            if poll not in STICKY and self._clocks(room)._stopped:
                raise Violation("clocks-run", f"{self.address.name}: no clock runs for room {room:x}")
        for room, machine in self.rooms():
            refused = [(state, event) for verdict, state, event in machine.counts if verdict.name == "REFUSED"]
            if refused:
                state, event = refused[0]
                text = f"{type(machine).__name__} of room {room:x} refuses {event.name} in {state.name}"
                raise Violation("refused", f"{self.address.name}: {text}")

    def tidy(self) -> None:
        """Forget what nothing depends on any more."""

    def effects(self) -> list[Effect]:
        effects, self.around.effects[:] = list(self.around.effects), []
        return effects


class _Spawning:
    """What an explored actor spawns is an event of its own."""

    works: list[Work]

    def spawn(self, work: Awaitable[None]) -> None:
        made = Work.of(work)
        if made.name in ("disconnect", "_connect"):
            made.run()
        else:
            self.works.append(made)


class ExploredPrefill(_Spawning, Prefill):
    pass


class ExploredDecode(_Spawning, Decode):
    pass


class LeaderNode(Node):
    engine: LabelEngine
    endpoint: NotingEndpoint
    actor: Leader[Any]

    def parts(self, pages: int, rows: int, proofs: Proofs) -> Parts:
        self.engine = LabelEngine(pages, rows, self.address.incarnation)
        self.endpoint = NotingEndpoint(self.around, self.engine, self.address.incarnation, proofs)
        info = RankInfo(
            self.address.name, self.role, self.address, LAYOUT, pages=pages, max_prompt_tokens=pages,
            max_total_tokens=pages + 1,
        )  # fmt: skip
        limits = ClockSettings(100.0, 100.0, 100.0, 100.0)
        return Parts(
            self.sessions, self.clock, 1000, _resolve, self.engine, CountingTexts(), self.endpoint, info, limits, 100
        )

    # --- events ---

    def work(self, index: int) -> None:
        """Something that was spawned runs from its beginning to its end."""
        work = self.works.pop(index)
        if work.name == "_run":
            self._check_forward(work.arguments["plan"])
        work.run()
        self._settle()

    def tick(self) -> None:
        self.actor._progress_at_s = 0.0
        self._turn(Tick())

    def drain(self) -> None:
        self._turn(DrainRequested(1e9))

    def drains(self) -> bool:
        return bool(self.actor.leaving)

    def may_depart(self) -> bool:
        """A tick, and half a second."""
        leaving = copy(self.actor.leaving)
        leaving.time_is_over(not self.actor.rooms, 1.0)
        return bool(leaving.state(len(self.actor.rooms), 1.0 + QUIET_S)["done"])

    def stop(self, front: Address, message: Stop) -> None:
        self._turn(FromPeer(front, message))

    # --- what the world asks ---

    def rooms(self) -> Iterator[tuple[int, Any]]:
        return ((room.room, room.machine) for room in self.actor.rooms.values())

    def quiet(self) -> bool:
        counts = self.actor.ledger.counts()
        return not self.actor.rooms and counts.at_baseline and counts.cached == 0 and not self.works

    def held(self) -> dict[int, int]:
        holdings = [(room.room, room.holding) for room in self.actor.rooms.values() if room.holding is not None]
        return {page: room for room, holding in holdings for page in holding.pages}

    def _done(self) -> int:
        return self.actor.forward.done

    def _clocks(self, room: int) -> Any:
        return self.actor.rooms[room].clocks

    # --- turns and checks ---

    def _settle(self) -> None:
        self.pump()
        self.check()
        self.tidy()

    def pump(self) -> None:
        self.actor._progress_at_s = 1.0
        while items := self.actor._mailbox.drain():
            for item in items:
                self.actor.receive(item)
        self.actor.advance()
        while items := self.actor._mailbox.drain():
            for item in items:
                self.actor.receive(item)
            self.actor.advance()

    def _turn(self, item: Any) -> None:
        self.actor.receive(item)
        self._settle()

    def check(self) -> None:
        super().check()
        try:
            self.actor.ledger.audit(self.actor.block_tables())
        except Exception as error:
            raise Violation("conservation", f"{self.address.name}: {error}") from error
        for work in self.works:
            if work.name == "_run":
                self._check_forward(work.arguments["plan"])

    def _check_forward(self, plan: Any) -> None:
        """A forward that runs may write to its pages up to its end: they must still be its rooms'."""
        held = self.held()
        for sequence in plan.sequences:
            for page in sequence.pages:
                if held.get(page) != sequence.key:
                    text = f"a forward of room {sequence.key:x} still writes to page {page}"
                    raise Violation("forward-in-own-pages", f"{self.address.name}: {text}")

    def tidy(self) -> None:
        held, engine = self.held(), self.engine
        engine.labels = {page: label for page, label in engine.labels.items() if page in held}
        holdings = [room.holding for room in self.actor.rooms.values() if room.holding is not None]
        rows = {row for holding in holdings for row in holding.rows}
        for row in range(len(engine.rows)):
            if row not in rows:
                engine.rows[row][:] = bytes(len(engine.rows[row]))
        self.endpoint._numbers = {r: n for r, n in self.endpoint._numbers.items() if r in self.actor.rooms}


class PrefillNode(LeaderNode):
    role = "prefill"

    def __init__(
        self, address: Address, fronts: frozenset[int], pages: int, chunk: int, rows: int, proofs: Proofs
    ) -> None:
        super().__init__(address, fronts)
        parts = self.parts(pages, rows, proofs)
        self.actor = ExploredPrefill(parts, PrefillSettings(chunk_tokens=chunk, batch_tokens=chunk))
        self.actor.works = self.works

    def write(self, handle: tuple[int, int], outcome: WriteOutcome) -> None:
        """A write ends."""
        self.endpoint.ended(handle, outcome)
        self._settle()

    def wants_tick(self) -> bool:
        return False

    def writes(self) -> tuple[tuple[Post, bool, bool], ...]:
        lanes = sorted(self.endpoint.lanes.items())
        return tuple((w.post, at == 0, w.cancelled) for _, lane in lanes for at, w in enumerate(lane))

    def late(self) -> tuple[Post, ...]:
        return tuple(self.endpoint.late)


class DecodeNode(LeaderNode):
    role = "decode"
    actor: ExploredDecode

    def __init__(self, address: Address, fronts: frozenset[int], pages: int, rows: int, proofs: Proofs) -> None:
        super().__init__(address, fronts)
        self.committed: set[int] = set()
        self.actor = ExploredDecode(self.parts(pages, rows, proofs), DecodeSettings(max_running=4))
        self.actor.works = self.works

    def land(self, post: Post) -> None:
        """Bytes arrive in memory; the actor is not told."""
        for _, page, label in post.pages:
            self.engine.labels[page] = label
        for row, content in post.rows:
            self.engine.rows[row][:] = content
        self.tidy()

    def notify(self, payload: bytes) -> None:
        self._turn(Notified("", payload))

    def wants_tick(self) -> bool:
        """A room waits for proof and there is no link to ask for it."""
        releasing = [r for r in self.actor.rooms.values() if r.machine.state is ReceiverState.RELEASING]
        return any(room.peer.incarnation not in self.sessions.open for room in releasing)

    def leases(self) -> Leases:
        pages: dict[int, tuple[int, int]] = {}
        rows: dict[int, tuple[int, int]] = {}
        for room in self.actor.rooms.values():
            if room.holding is not None and room.holding.lease is not None:
                pages |= dict.fromkeys(room.holding.pages, (room.room, room.peer.incarnation))
                rows |= dict.fromkeys(room.holding.rows, (room.room, room.peer.incarnation))
        return pages, rows

    def check(self) -> None:
        super().check()
        for room in self.actor.rooms.values():
            if room.machine.state is ReceiverState.RUNNING and room.room not in self.committed:
                self._check_content(room)
        self.committed = {room for room, machine in self.rooms() if machine.kvpoll is KVPoll.SUCCESS}

    def _check_content(self, room: Any) -> None:
        """What a room commits with is what its own prefill wrote for it."""
        wanted = Written(room.room, room.peer.incarnation)
        for page in room.holding.pages[: room.prompt_tokens]:
            if self.engine.labels.get(page) != wanted:
                text = f"room {room.room:x} commits with {self.engine.labels.get(page)} in page {page}"
                raise Violation("commit-content", f"{self.address.name}: {text}")


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
            self.sessions, self.clock, 1000, None, _resolve, RouterSettings(), limits, "explored"
        )
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


async def _resolve(name: str) -> Address:
    raise LookupError(name)
