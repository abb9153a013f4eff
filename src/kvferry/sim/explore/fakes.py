"""What an explored actor is given: a clock that stands still, links, an engine whose pages hold labels, texts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvferry.actors.ports import Timer
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
from kvferry.protocol.metadata import ROW_BYTES
from kvferry.protocol.rank import Layout, Slice
from kvferry.protocol.request import Sampling
from kvferry.sim.explore.effects import Client, Dial, Drop, Say, Surroundings
from kvferry.transfer.contract import (
    Region,
    RegionKind,
)

PAGE_BYTES = 64
_WORLD_BASE = 1 << 20
#: The token that every prompt draws here.
TOKEN = 7


def layout_of(layers: int, policy: str) -> Layout:
    """Pages of one token; one layer for each source rank."""
    return Layout("explored", "1", "float32", 1, layers=layers, kv_heads=1, head_dim=4, policy=policy)


@dataclass
class StandingClock:
    """Time does not pass: what a timer would bring is an event of the explorer's."""

    at_s: float = 0.0

    def now_s(self) -> float:
        return self.at_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError(f"nothing sleeps in an exploration, and not for {duration_s} s")

    def call_later(self, delay_s: float, do: Callable[[], None]) -> Timer:
        """Never: which timer runs out, and when, is the explorer's choice."""
        return NoTimer()


class NoTimer:
    """`kvferry.actors.ports.Timer` of a call that won't come."""

    def cancel(self) -> None:
        """There is nothing to cancel."""


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

    def session_of(self, incarnation: int) -> int:
        """Fronts compare it; there is none here that does."""
        return int(self.is_up(incarnation))

    def kill(self, incarnation: int) -> bool:
        """What the cluster would do is an event of the explorer's: budgets are times, and no time passes here."""
        raise AssertionError(f"nobody is killed from inside an exploration: {incarnation:x}")

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

    def __init__(self, pages: int, rows: int, incarnation: int, layout: Layout, part: Slice) -> None:
        self._pages, self._incarnation = pages, incarnation
        self.layout, self._part = layout, part
        self.labels: dict[tuple[int, int], Any] = {}  # (layer, page)
        self.rows = [bytearray(ROW_BYTES) for _ in range(rows)]

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self._pages, self.layout.page_size, 64, vocab_size=100)

    @property
    def metadata_rows(self) -> int:
        return len(self.rows)

    def regions(self) -> tuple[Region, ...]:
        layers = range(self._part.first_layer, self._part.first_layer + self._part.layers)
        sizes = PAGE_BYTES, self._pages, 0, 1, self.layout.page_size
        pages = [Region(RegionKind.PAGES, "k", layer, _WORLD_BASE * (layer + 1), *sizes) for layer in layers]
        rows = Region(RegionKind.ROWS, "metadata", -1, 64 * _WORLD_BASE, ROW_BYTES, len(self.rows))
        return *pages, rows

    def metadata_row(self, slot: int) -> memoryview:
        return memoryview(self.rows[slot])

    def place(self, room: int, sequence: Sequence) -> None:
        """What a forward leaves in its pages; a page holds one token."""
        for position in range(sequence.start, sequence.position):
            for layer in range(self._part.first_layer, self._part.first_layer + self._part.layers):
                self.labels[(layer, sequence.pages[position])] = Written(room, self._incarnation)

    async def step(self, plan: StepPlan) -> StepResult:
        for sequence in plan.sequences:
            self.place(sequence.key, sequence)
        drawn = tuple(None if s.sampling is None else Drawn(TOKEN, 1.0) for s in plan.sequences)
        return StepResult(plan.step, drawn, 0.0)

    def combine(self, plan: StepPlan, result: StepResult, parts: Iterable[bytes]) -> StepResult:
        """The others have nothing to add."""
        return result

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
