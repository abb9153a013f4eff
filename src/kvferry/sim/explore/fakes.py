"""What an explored actor is given: a clock that stands still, links, an engine and a data plane that only take notes.

`Surroundings` collects what the actor does in a turn, in order; the world between the actors carries it out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.engine.contract import (
    Drawn,
    Emission,
    EngineLimits,
    Sequence,
    StepPlan,
    StepResult,
)
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Message
from kvferry.protocol.metadata import ROW_BYTES, Metadata
from kvferry.protocol.rank import Layout
from kvferry.protocol.request import Sampling
from kvferry.transfer.contract import (
    Descriptor,
    Peer,
    Proofs,
    Region,
    RegionKind,
    Spans,
    WriteHandle,
    WriteOutcome,
    WriteResult,
)

PAGE_BYTES = 64
#: The token that every prompt draws here.
TOKEN = 7
LAYOUT = Layout("explored", "1", "float32", 1, layers=1, kv_heads=1, head_dim=4)
_WORLD_BASE = 1 << 20
#: A write's name: its room, and its number among the room's writes.
Handle = tuple[int, int]


@dataclass
class StandingClock:
    """Time does not pass: what a timer would bring is an event of the explorer's."""

    at_s: float = 0.0

    def now_s(self) -> float:
        return self.at_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError(f"nothing sleeps in an exploration, and not for {duration_s} s")


@dataclass(frozen=True)
class Dial:
    """Effect: open a session."""

    peer: Address


@dataclass(frozen=True)
class Say:
    """Effect: a message on a session that is open here, or being opened."""

    peer: int
    message: Message


@dataclass(frozen=True)
class Drop:
    """Effect: the session ends from this side."""

    peer: int


@dataclass(frozen=True)
class Post:
    """A write in the lane of process `target`. `pages`: (source page, target page, label of the
    source's content), `rows`: (target row, its bytes), `room` whose source pages they are.
    """

    handle: Handle
    target: int
    room: int
    pages: tuple[tuple[int, int, Any], ...]
    rows: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Notify:
    """Effect: a notification, behind the writes to `target` that had ended."""

    target: int
    payload: bytes


@dataclass(frozen=True)
class Client:
    """Effect: something that a client sees, or its room: what, room, value."""

    what: str
    room: int
    value: Any = None


Effect = Dial | Say | Drop | Notify | Client


@dataclass
class Surroundings:
    effects: list[Effect] = field(default_factory=list)

    def note(self, effect: Effect) -> None:
        self.effects.append(effect)


class Sessions:
    """`kvferry.actors.ports.Network` as one process sees it. Sessions to `fronts` are always open."""

    def __init__(self, around: Surroundings, address: Address, fronts: frozenset[int]) -> None:
        self._around, self._address, self._fronts = around, address, fronts
        self.open: dict[int, bool] = {}  # incarnation -> open, or still being dialled
        self.seen: set[int] = set()  # who has introduced itself: its end will be told

    @property
    def address(self) -> Address:
        return self._address

    async def start(self, handler: Any) -> None:
        raise AssertionError("an explored actor is not run")

    def dial(self, address: Address) -> None:
        if address.incarnation not in self.open and address.incarnation not in self._fronts:
            self.open[address.incarnation] = False
            self._around.note(Dial(address))

    def send(self, incarnation: int, message: Message) -> bool:
        if incarnation in self._fronts:
            self._around.note(Say(incarnation, message))
            return True
        if incarnation not in self.open:
            return False
        self._around.note(Say(incarnation, message))
        return True

    def is_up(self, incarnation: int) -> bool:
        return incarnation in self._fronts or self.open.get(incarnation, False)

    def drop(self, incarnation: int) -> None:
        self._around.note(Drop(incarnation))

    async def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class Written:
    """What a page holds: the prompt of `room`, computed or placed there by process `writer`."""

    room: int
    writer: int


class LabelEngine:
    """An engine whose pages hold labels. A forward ends when it is awaited."""

    def __init__(self, pages: int, rows: int, incarnation: int) -> None:
        self._pages, self._incarnation = pages, incarnation
        self.labels: dict[int, Any] = {}
        self.rows = [bytearray(ROW_BYTES) for _ in range(rows)]

    @property
    def layout(self) -> Layout:
        return LAYOUT

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self._pages, LAYOUT.page_size, 64, vocab_size=100)

    @property
    def metadata_rows(self) -> int:
        return len(self.rows)

    def regions(self) -> tuple[Region, ...]:
        pages = Region(RegionKind.PAGES, "k", 0, _WORLD_BASE, PAGE_BYTES, self._pages, 0, 1)
        rows = Region(RegionKind.ROWS, "metadata", -1, 2 * _WORLD_BASE, ROW_BYTES, len(self.rows))
        return pages, rows

    def metadata_row(self, slot: int) -> memoryview:
        return memoryview(self.rows[slot])

    def place(self, room: int, sequence: Sequence) -> None:
        """What a forward leaves in its pages; a page holds one token."""
        for position in range(sequence.start, sequence.position):
            self.labels[sequence.pages[position // LAYOUT.page_size]] = Written(room, self._incarnation)

    async def step(self, plan: StepPlan) -> StepResult:
        for sequence in plan.sequences:
            self.place(sequence.key, sequence)
        drawn = tuple(None if s.sampling is None else Drawn(TOKEN, 1.0) for s in plan.sequences)
        return StepResult(plan.step, drawn, 0.0)

    async def close(self) -> None:
        """Nothing to end."""


class CountingText:
    """Ends after `max_tokens`."""

    def __init__(self, left: int) -> None:
        self._left = left

    def push(self, token_id: int) -> Emission:
        self._left -= 1
        return Emission(f"<{token_id}>", "length" if self._left <= 0 else "")


class CountingTexts:
    def stream(self, sampling: Sampling, before: tuple[int, ...] = ()) -> CountingText:
        return CountingText(sampling.max_tokens - len(before))


class NotedPeer:
    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor


@dataclass(eq=False)
class NotedWrite:
    """A write that ends when the explorer says so."""

    post: Post
    on_end: Callable[[WriteResult], None]
    cancelled: bool = False
    result: WriteResult | None = None

    def end(self, outcome: WriteOutcome) -> None:
        self.result = WriteResult(outcome, 0, 0.0, "" if outcome is not WriteOutcome.BROKEN else "the path broke")
        self.on_end(self.result)


class NotingEndpoint:
    """`kvferry.transfer.contract.Endpoint`: what it is asked is noted.

    `lanes` are the writes that have not ended, by target; of each lane the first is posted, the others wait for it.
    `late` are writes that have ended broken: nobody can say what landed, so they may land until the process ends.
    """

    backend = "explored"

    def __init__(self, around: Surroundings, engine: LabelEngine, incarnation: int, proofs: Proofs) -> None:
        self._around, self._engine, self._incarnation, self.proofs = around, engine, incarnation, proofs
        self._numbers: dict[int, int] = {}
        self.lanes: dict[int, list[NotedWrite]] = {}
        self.late: list[Post] = []
        self.expecting = 0

    def descriptor(self) -> Descriptor:
        agent = f"explored-{self._incarnation:x}-0"
        return Descriptor(self.backend, agent, self._incarnation, 0, b"", self._engine.regions())

    async def connect(self, descriptor: Descriptor) -> Peer:
        return NotedPeer(descriptor)

    def write(self, peer: Peer, spans: Spans, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        pages: list[tuple[int, int, Any]] = []
        rows: list[tuple[int, bytes]] = []
        for source, _, at, to, length in spans.tolist():
            if source == 1:
                rows.append((to // ROW_BYTES, bytes(self._engine.rows[at // ROW_BYTES])))
                continue
            for item in range(length // PAGE_BYTES):
                page = at // PAGE_BYTES + item
                pages.append((page, to // PAGE_BYTES + item, self._engine.labels.get(page)))
        room = self._engine.labels[pages[0][0]].room if pages else Metadata.unpack(memoryview(rows[0][1])).room
        number = self._numbers[room] = self._numbers.get(room, 0) + 1
        target = peer.descriptor.incarnation
        write = NotedWrite(Post((room, number), target, room, tuple(pages), tuple(rows)), on_end)
        self.lanes.setdefault(target, []).append(write)
        return write

    def ended(self, handle: Handle, outcome: WriteOutcome) -> None:
        """The explorer ends a write."""
        for target, lane in self.lanes.items():
            for write in lane:
                if write.post.handle == handle:
                    lane.remove(write)
                    if not lane:
                        del self.lanes[target]
                    if outcome is WriteOutcome.BROKEN:
                        self.late.append(write.post)
                    return write.end(outcome)
        raise AssertionError(f"there is no write {handle}")

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._around.note(Notify(peer.descriptor.incarnation, payload))

    def cancel(self, handle: WriteHandle) -> None:
        assert isinstance(handle, NotedWrite)
        handle.cancelled = True

    def expect(self, change: int) -> None:
        self.expecting += change

    async def disconnect(self, peer: Peer) -> None:
        """Unfinished writes end broken: by the explorer, since their target has ended."""

    async def close(self) -> None:
        """Nothing to end."""


@dataclass
class Answer:
    """Stands for the future that a front's call waits for."""

    around: Surroundings
    room: int
    outcome: Any = None

    def done(self) -> bool:
        return self.outcome is not None

    def cancelled(self) -> bool:
        return False

    def set_result(self, outcome: Any) -> None:
        self.outcome = "ok" if outcome.ok else "failed"
        self.around.note(Client("outcome", self.room, self.outcome))


@dataclass
class Work:
    """Something that an actor has spawned and that has not begun: a method of `owner`, with its arguments."""

    owner: Any
    name: str
    arguments: dict[str, Any]

    @staticmethod
    def of(work: Awaitable[None]) -> Work:
        """Take a coroutine apart that has not been started."""
        coroutine: Any = work
        arguments = dict(coroutine.cr_frame.f_locals)
        owner, name = arguments.pop("self"), coroutine.__name__
        coroutine.close()
        return Work(owner, name, arguments)

    def run(self) -> None:
        """From its beginning to its end: nothing in an exploration makes it wait."""
        coroutine = getattr(self.owner, self.name)(**self.arguments)
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError(f"{self.name} waits for something")
