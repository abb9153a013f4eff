"""Prefill and decode as explored processes."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.actors.actor import FromPeer, Tick
from kvferry.actors.decode.arrival import Notified
from kvferry.actors.decode.decode import Decode
from kvferry.actors.leader import Leader
from kvferry.actors.leaving import QUIET_S, DrainRequested
from kvferry.actors.parts import Parts
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.settings import ClockSettings, DecodeSettings, PrefillSettings
from kvferry.protocol.address import Address
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.messages import Stop
from kvferry.protocol.rank import RankInfo, slice_of
from kvferry.protocol.receiver import ReceiverState
from kvferry.protocol.sender import SenderState
from kvferry.sim.explore.data_plane import NotingEndpoint
from kvferry.sim.explore.effects import Post, Surroundings
from kvferry.sim.explore.fakes import (
    CountingTexts,
    LabelEngine,
    Sessions,
    StandingClock,
    Work,
    Written,
    layout_of,
)
from kvferry.sim.explore.node import LONG_AGO_S, Leases, Node, resolve
from kvferry.sim.explore.violation import Violation
from kvferry.transfer.contract import Proofs, WriteOutcome


class Spawning:
    """What an explored actor spawns is an event of its own."""

    works: list[Work]

    def spawn(self, work: Awaitable[None]) -> None:
        made = Work.of(work)
        if made.name in ("disconnect", "_connect", "_accept"):
            made.run()
        else:
            self.works.append(made)


class ExploredPrefill(Spawning, Prefill):
    pass


class ExploredDecode(Spawning, Decode):
    pass


@dataclass(frozen=True)
class Size:
    """Of a rank: its pool, its place among the `ranks` of its instance (pipeline stages, of one layer each)."""

    pages: int
    rows: int
    proofs: Proofs
    policy: str
    ranks: int = 1
    rank: int = 0
    layers: int = 1
    chunk_tokens: int = 1


class Ranked(Protocol):
    """A process that is a rank of an instance."""

    role: str
    address: Address
    around: Surroundings
    sessions: Sessions
    clock: StandingClock
    engine: LabelEngine
    endpoint: NotingEndpoint


def parts_of(node: Ranked, size: Size) -> Parts:
    incarnation, pages = node.address.incarnation, size.pages
    layout = layout_of(size.layers, size.policy)
    part = slice_of(layout, 0, 1, size.rank, size.ranks)
    engine = node.engine = LabelEngine(pages, size.rows, incarnation, layout, part)
    node.endpoint = NotingEndpoint(node.around, engine, incarnation, size.proofs)
    info = RankInfo(
        node.role, node.role, node.address, layout, pages=pages, max_prompt_tokens=pages, max_total_tokens=pages + 1,
        pp_rank=size.rank, pp_size=size.ranks,
    )  # fmt: skip
    limits = ClockSettings(100.0, 100.0, 100.0, 100.0)
    return Parts(
        node.sessions, node.clock, 1000, resolve, engine, CountingTexts(), node.endpoint, info, limits, 100,
        engine.combine,
    )  # fmt: skip


class Writes:
    """What a rank of prefill has on the data plane."""

    endpoint: NotingEndpoint
    _settle: Any

    def write(self, handle: tuple[int, int], outcome: WriteOutcome) -> None:
        """A write ends."""
        self.endpoint.ended(handle, outcome)
        self._settle()

    def writes(self) -> tuple[tuple[Post, bool, bool], ...]:
        lanes = sorted(self.endpoint.lanes.items())
        return tuple((w.post, at == 0, w.cancelled) for _, lane in lanes for at, w in enumerate(lane))

    def late(self) -> tuple[Post, ...]:
        return tuple(self.endpoint.late)


class LeaderNode(Node):
    engine: LabelEngine
    endpoint: NotingEndpoint
    actor: Leader[Any]

    def parts(self, size: Size) -> Parts:
        return parts_of(self, size)

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
        return {page: room for room, pages in self.actor.block_tables().items() for page in pages}

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
        engine.labels = {at: label for at, label in engine.labels.items() if at[1] in held}
        holdings = [room.holding for room in self.actor.rooms.values() if room.holding is not None]
        rows = {row for holding in holdings for row in holding.rows}
        for row in range(len(engine.rows)):
            if row not in rows:
                engine.rows[row][:] = bytes(len(engine.rows[row]))
        self.endpoint._numbers = {r: n for r, n in self.endpoint._numbers.items() if r in self.actor.rooms}


class PrefillNode(Writes, LeaderNode):
    role = "prefill"

    def __init__(self, address: Address, fronts: frozenset[int], size: Size) -> None:
        super().__init__(address, fronts)
        settings = PrefillSettings(chunk_tokens=size.chunk_tokens, batch_tokens=size.chunk_tokens)
        self.actor = ExploredPrefill(self.parts(size), settings)
        self.actor.works = self.works

    def wants_tick(self) -> bool:
        """It tells decode again and again of a write that has broken."""
        return any(room.machine.state is SenderState.BROKEN for room in self.actor.rooms.values())


class DecodeNode(LeaderNode):
    role = "decode"
    actor: ExploredDecode

    def __init__(self, address: Address, fronts: frozenset[int], size: Size) -> None:
        super().__init__(address, fronts)
        self.committed: set[int] = set()
        self.actor = ExploredDecode(self.parts(size), DecodeSettings(max_running=4))
        self.actor.works = self.works

    def land(self, post: Post) -> None:
        """Bytes arrive in memory; the actor is not told."""
        for layer, _, page, label in post.pages:
            self.engine.labels[(layer, page)] = label
        for row, content in post.rows:
            self.engine.rows[row][:] = content
        self.tidy()

    def notify(self, payload: bytes) -> None:
        self._turn(Notified("", payload))

    def wants_tick(self) -> bool:
        """A room waits for proof and there is no link to ask for it."""
        sources = [room.machine.writers[rank] for room in self._releasing() for rank in room.machine.unproven]
        return any(incarnation not in self.sessions.open for incarnation in sources)

    def agents(self) -> dict[int, int]:
        return dict(self.endpoint.agents)

    def overdue(self) -> bool:
        owing = {writer for room in self._releasing() for writer in room.machine.not_quiet}
        return bool(owing & self.endpoint.agents.keys() & self.actor.writers.incarnations)

    def shut_out(self) -> None:
        """The time is over in which a writer may leave a room without its word."""
        for room in self._releasing():
            room.quarantined_s = LONG_AGO_S
        self.tick()
        for room in self._releasing():
            room.quarantined_s = 0.0

    def _releasing(self) -> list[Any]:
        return [room for room in self.actor.rooms.values() if room.machine.state is ReceiverState.RELEASING]

    def leases(self) -> Leases:
        pages: dict[int, tuple[int, frozenset[int]]] = {}
        rows: dict[int, tuple[int, frozenset[int]]] = {}
        for room in self.actor.rooms.values():
            if room.holding is not None and room.holding.lease is not None:
                writers = room.room, frozenset(room.holding.lease.writers.values())
                pages |= dict.fromkeys(room.holding.pages, writers)
                rows |= dict.fromkeys(room.holding.rows, writers)
        return pages, rows

    def check(self) -> None:
        super().check()
        for room in self.actor.rooms.values():
            if room.machine.state is ReceiverState.RUNNING and room.room not in self.committed:
                self._check_content(room)
        self.committed = {room for room, machine in self.rooms() if machine.kvpoll is KVPoll.SUCCESS}

    def _check_content(self, room: Any) -> None:
        """What a room commits with is what its own prefill wrote for it."""
        for layer, incarnation in room.machine.writers.items():
            wanted = Written(room.room, incarnation)
            for page in room.holding.pages[: room.prompt_tokens]:
                found = self.engine.labels.get((layer, page))
                if found != wanted:
                    text = f"room {room.room:x} commits with {found} in layer {layer} of page {page}"
                    raise Violation("commit-content", f"{self.address.name}: {text}")
