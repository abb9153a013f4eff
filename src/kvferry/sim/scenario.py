"""One run: a random system, clients and faults, all drawn from the seed before they happen, and checked throughout.

At least two prefills, two decodes and two routers, twenty rooms and three faults. Pools hold a few requests each, so
that rooms queue, displace and retract each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Any

import msgspec

from kvferry.actors.settings import (
    ClockSettings,
    DecodeSettings,
    FaultSettings,
    LinkSettings,
    PrefillSettings,
    RouterSettings,
    UnifiedSettings,
)
from kvferry.protocol.link_table import LinkState
from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.protocol.receiver import ReceiverState
from kvferry.protocol.room import RoomState
from kvferry.protocol.sender import SenderState
from kvferry.sim.checkers import Watcher, check_idle
from kvferry.sim.clients import Ask, Clients, ask_of
from kvferry.sim.coverage import Cells
from kvferry.sim.findings import Broken
from kvferry.sim.fronts import SimFronts
from kvferry.sim.ranks import page_size_of
from kvferry.sim.scenes import Scenes
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer.fake import HOST, TCP

LINKS = LinkSettings(heartbeat_s=1.0, silence_s=3.0, resend_s=0.5)
CLOCKS = ClockSettings(prefill_wait_s=40, transfer_wait_s=40, admission_wait_s=40, no_progress_s=12)
#: Clocks that run out before the links give up; for instances of one rank: a rank that stands still makes the others'
#: forward stand still, and it is the link that must tell them so.
QUICK = ClockSettings(prefill_wait_s=2.5, transfer_wait_s=2.5, admission_wait_s=3, no_progress_s=1.5)
FRONTS = 2
ARRIVALS_S = 4.0
#: Longer than any request may live: a few attempts that run into their clocks.
PATIENCE_S = 300.0
#: States that a room passes within one turn.
PASSING: frozenset[Enum] = frozenset({
    RoomState.NEW, RoomState.SUCCEEDED, RoomState.FAILED, SenderState.DONE, SenderState.ENDED, ReceiverState.DONE,
    ReceiverState.ENDED,
})  # fmt: skip
#: The others: a fault can be aimed at them.
ROOM_AIMS = tuple(state for kind in (RoomState, SenderState, ReceiverState) for state in kind if state not in PASSING)
AIMS: tuple[Enum, ...] = (*ROOM_AIMS, LinkState.CONNECTING)
#: What brings rooms to states that they seldom come to: a fault, and the state in which it finds them.
CAUSES: dict[Enum, list[tuple[str, Enum]]] = {
    RoomState.SETTLING: [("kill prefill", RoomState.TRANSFERRING), ("break writes", RoomState.AWAITING_INPUT)],
    RoomState.ABORTING: [("leave", RoomState.TRANSFERRING), ("leave", RoomState.BOOTSTRAPPED)],
    SenderState.QUEUED: [("refuse", SenderState.AWAITING_DESTINATION), ("slow", SenderState.COMPUTING)],
    SenderState.DRAINING: [("leave", SenderState.COMPUTING), ("leave", SenderState.FLUSHING)],
    SenderState.BROKEN: [("break writes", SenderState.COMPUTING)],
    ReceiverState.RELEASING: [("leave", ReceiverState.RECEIVING), ("stop prefill", SenderState.FLUSHING)],
    ReceiverState.STOPPING: [("leave", ReceiverState.RUNNING), ("drain decode", ReceiverState.RUNNING)],
    LinkState.CONNECTING: [("noise", RoomState.AWAITING_INPUT), ("kill decode", ReceiverState.RUNNING)],
}


#: Faults that say more together, each with the state that it waits for, and how long after the first it begins to; and
#: scenes (scenes.py), which see to both themselves.
STORIES: list[list[tuple[str, Enum | None, float]]] = [
    # Decode has committed, and neither its word nor the room's question gets through while prefill dies.
    [("cut", RoomState.AWAITING_INPUT, 0.0), ("kill prefill", ReceiverState.RUNNING, 0.0)],
    [("cut", RoomState.TRANSFERRING, 0.0), ("kill prefill", ReceiverState.RUNNING, 0.0)],
    [("unheard commit", None, 0.0)],
    # Decode dies where prefill has no link to it.
    [("kill unlinked", SenderState.FLUSHING, 0.0)],
    [("kill unlinked", ReceiverState.RUNNING, 0.0)],
    # What can't be written any more, and the instance is to leave.
    [("break writes", SenderState.COMPUTING, 0.0), ("drain prefill", SenderState.BROKEN, 0.0)],
    [("leave", SenderState.COMPUTING, 0.0), ("drain prefill", SenderState.DRAINING, 0.0)],
    # The client goes, and the room hears of it in another way as well.
    [("leave", ReceiverState.RUNNING, 0.0), ("drain decode", ReceiverState.STOPPING, 0.0)],
    [("noise", RoomState.TRANSFERRING, 0.0), ("drain decode", ReceiverState.RECEIVING, 0.0)],
    # Decode hands a running request over, and its client goes before the forward that names its pages has ended.
    [("drain decode", ReceiverState.RUNNING, 0.0), ("leave", ReceiverState.STOPPING, 0.0)],
]


@dataclass(frozen=True)
class Strike:
    """A fault to come: not before `at_s`; with `aim` when some room comes to that state; `kind` if it is not drawn."""

    at_s: float
    aim: Enum | None
    kind: str = ""


@dataclass(frozen=True)
class Scenario:
    """All that a seed decides, but for the draws of its network and its faults."""

    seed: int
    options: SimOptions
    asks: tuple[Ask, ...]
    strikes: tuple[Strike, ...]
    chaos_seed: float


def draw(seed: int, faults: Sequence[int] = (3, 3, 4, 6)) -> Scenario:
    """`faults`: numbers of faults to draw from."""
    random = Random(seed)
    options = _paged(_options(random, seed))
    roles = ("prefill", "decode", "unified")
    limit = min(getattr(options, role).pool_pages * page_size_of(options, role) for role in roles)
    names = [f"front-{i}" for i in range(FRONTS)]
    asks: list[Ask] = []
    while sum(len(samplings) for ask in asks for _, samplings in ask.prompts) < 28:
        asks.append(ask_of(random, names, limit, ARRIVALS_S))
    strikes = [strike for _ in range(random.choice(list(faults))) for strike in _strikes(random)]
    if strikes and random.random() < 0.25:
        at_s = random.uniform(0.1, ARRIVALS_S / 2)
        strikes += [Strike(at_s + after_s, aim, kind) for kind, aim, after_s in random.choice(STORIES)]
    return Scenario(seed, options, tuple(asks), tuple(strikes), random.random())


def _paged(options: SimOptions) -> SimOptions:
    """Every third seed has two page sizes, and pools of as many tokens. By draws of its own: all else stays."""
    random = Random(f"pages of {options.seed}")
    if random.random() > 1 / 3:
        return options
    sizes = {"prefill": random.choice([2, 4, 8]), "decode": random.choice([2, 3, 4, 6, 8])}  # a chunk: 8 or 16
    made = {}
    for role, size in sizes.items():
        settings = getattr(options, role)
        tokens = settings.pool_pages * options.page_size
        made[role] = msgspec.structs.replace(settings, page_size=size, pool_pages=tokens // size)
    return replace(options, **made)


def _strikes(random: Random) -> list[Strike]:
    """One fault; and where it aims at a state that rooms seldom come to, one before it that brings some there."""
    at_s, aim = random.uniform(0.1, ARRIVALS_S), random.choice([None, random.choice(AIMS), random.choice(AIMS)])
    strikes = [Strike(at_s, aim)]
    if aim in CAUSES:
        kind, before = random.choice(CAUSES[aim])
        strikes.append(Strike(at_s, before, kind))
    return strikes


def _options(random: Random, seed: int) -> SimOptions:
    """Two routers, and pools that hold a few requests each; some with pools that scale."""
    tp, pp = random.choice([1, 1, 1, 1, 1, 1, 2]), [random.choice([1, 1, 1, 1, 1, 2]) for _ in range(2)]
    sizes: dict[str, Any] = {"chunk_tokens": random.choice([8, 16]), "batch_tokens": random.choice([16, 32])}
    return SimOptions(
        seed=seed,
        prefill=PrefillSettings(
            instances=random.choice([2, 2, 2, 3]), pool_pages=random.randint(15, 40), tp=tp,
            pp=pp[0], **sizes,
        ),
        decode=DecodeSettings(
            instances=random.choice([2, 2, 2, 3]), pool_pages=random.randint(14, 30), max_running=random.randint(3, 8),
            tp=tp, pp=pp[1],
        ),
        unified=UnifiedSettings(
            instances=random.choice([0, 0, 0, 0, 1]), pool_pages=random.randint(15, 40),
            max_running=random.randint(3, 8), **sizes,
        ),
        router=RouterSettings(
            instances=2, queue_limit=random.choice([2, 128, 128]), breaker_failures=random.randint(1, 3),
            breaker_open_s=random.choice([1.0, 5.0]), breaker_open_max_s=10.0,
            policy=random.choice(["predicted", "power_of_two", "round_robin", "random"]),
        ),
        clocks=QUICK if tp == 1 and pp == [1, 1] and random.random() < 0.4 else CLOCKS,
        links=LINKS,
        faults=FaultSettings(delay_ms=random.choice([0, 5, 60])),
        policy=random.choice([EARLY, PREFILL_COMPLETE]),
        proofs=random.choice([HOST, TCP]),
        scatter_s=0.0 if seed % 3 else 0.8,  # longer than what a dead writer left behind takes to land
        digest_bytes_s=1e6,  # so slow that faults find rooms at their checks
        page_size=4,
        layers=2,
        head_dim=2,
        keep=random.random() < 0.2,
        drain_s=random.choice([0.0, 0.5, 5.0]),
        start_s=random.choice([0.0, 2.0]),
    )  # fmt: skip


class Play:
    """A scenario on its system: `main` runs it to its end, or raises what is Broken."""

    def __init__(self, scenario: Scenario, system: SimSystem, cells: Cells) -> None:
        self.scenario, self.system = scenario, system
        self.fronts = SimFronts(system, FRONTS)
        keep = system.options.keep
        self.chaos = Scenes(system, Random(scenario.chaos_seed), self.fronts, cells, scales=keep)
        self.clients = Clients(self.fronts, system.engine("prefill-0"))
        self.watcher = Watcher(system)

    async def main(self) -> None:
        await self.fronts.start()
        watching = asyncio.ensure_future(self.watcher.run())
        clients = [self.clients.client(ask) for ask in self.scenario.asks]
        playing = asyncio.gather(*clients, *(self._strike(strike) for strike in self.scenario.strikes))
        try:
            await self._first_of(watching, playing)
            self._check_errors()
            await self._first_of(watching, asyncio.ensure_future(self._heal()))
        finally:
            watching.cancel()
            playing.cancel()
            await asyncio.gather(watching, playing, return_exceptions=True)
        self.watcher.look()
        check_idle(self.system)
        self._check_fronts()

    async def _first_of(self, watching: asyncio.Future[None], doing: asyncio.Future[Any]) -> None:
        done, _ = await asyncio.wait({watching, doing}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            doing.cancel()
            waiting = {process.name: process.waiting() for process in self.fronts.processes.values()}
            raise Broken("rooms-end", f"clients still wait after {PATIENCE_S:g} s: {waiting}")
        for task in (watching, doing):
            if task in done:
                task.result()

    async def _strike(self, strike: Strike) -> None:
        await asyncio.sleep(strike.at_s)
        await self.chaos.fault(strike.aim, strike.kind)

    def _check_errors(self) -> None:
        """Without a fault nobody is refused, except where the queue is short."""
        short = self.system.options.router.queue_limit == 2
        errors = self.clients.ends.errors
        wrong = [error for error in errors if not (short and error.startswith("overloaded"))]
        if wrong and not self.chaos.log:
            raise Broken("tokens-once", f"without a fault: {wrong}")

    async def _heal(self) -> None:
        """Every process is back; then nothing is left, every router serves, and again nothing is left."""
        if self.system.options.keep and not (await self.system.scaled(router=2))["done"]:
            raise Broken("service", f"the pools are not what is wanted: {self.system.pools.progress()}")
        await self._idle()
        live = [name for name, process in self.fronts.processes.items() if not process.dead]
        for index in range(4):  # at every router, at least once
            await self.clients.serve_again(index, live[0])
        await self._idle()

    async def _idle(self, limit_s: float = 90.0) -> None:
        for _ in range(int(limit_s / 0.25)):
            await asyncio.sleep(0.25)
            try:
                check_idle(self.system)
            except Broken as broken:
                left = broken
            else:
                return
        raise left

    def _check_fronts(self) -> None:
        for process in self.fronts.processes.values():
            if not process.dead and (process.front._requests or process.front._left):
                left = f"{process.waiting()} and {len(process.front._left)} calls"
                raise Broken("baseline", f"{process.name} keeps {left}")
