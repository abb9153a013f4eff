"""The production actors on virtual time: one registry, one router, prefill and decode instances, no Ray, no model.

Links, leaders, rooms, ledger and plans are the real classes; the engine is scripted (real memory, tokens that
depend on every byte of it), the data plane is `fake` (real copies), and time is the loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvferry.actors.actor import Actor
from kvferry.actors.bootstrap.registry import Registry
from kvferry.actors.bootstrap.room_ranks import RoomRanks
from kvferry.actors.decode.decode import Decode
from kvferry.actors.leg_room import LegRoom
from kvferry.actors.pools import Pools, routers_of
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.ranks.ending import RankLost
from kvferry.actors.ranks.follower import Follower
from kvferry.actors.ranks.names import instance_of
from kvferry.actors.router.fleet import is_leader
from kvferry.actors.router.router import Router
from kvferry.actors.settings import (
    ClockSettings,
    DecodeSettings,
    FaultSettings,
    LinkSettings,
    PrefillSettings,
    RouterSettings,
    UnifiedSettings,
)
from kvferry.engine.contract import StepPlan
from kvferry.engine.scripted import ScriptedEngine
from kvferry.memory.ledger import PageCounts
from kvferry.protocol.address import Address
from kvferry.protocol.rank import EARLY, LEADER
from kvferry.sim.endpoint import SimEndpoint
from kvferry.sim.hosting import SimHosting
from kvferry.sim.loop import VirtualClock
from kvferry.sim.network import SimNetwork
from kvferry.sim.ranks import RankMaker, rank_names
from kvferry.transfer.contract import Endpoint, Proofs
from kvferry.transfer.fake import HOST, FakeFabric

DECODE_STEP_S = 0.02
PREFILL_TOKEN_S = 0.001


def prefill_cost_s(plan: StepPlan) -> float:
    """A forward's cost by the tokens that it feeds; one token is a decode step."""
    tokens = sum(len(sequence.token_ids) for sequence in plan.sequences)
    return max(DECODE_STEP_S, tokens * PREFILL_TOKEN_S)


@dataclass(frozen=True)
class SimOptions:
    """Sizes, clocks and faults of a simulated system. `keep`: it has pools that scale, as the controller runs them.
    `restart_s`: until a rank that has ended with its instance is started again. `proofs`: those of the data plane, and
    with them how it behaves; `scatter_s` above 0: as with staging (`FakeFabric`). `page_size`: of roles that name no
    other.
    """

    seed: int = 1
    prefill: PrefillSettings = PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64)
    decode: DecodeSettings = DecodeSettings(pool_pages=64)
    unified: UnifiedSettings = UnifiedSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64)
    router: RouterSettings = RouterSettings()
    clocks: ClockSettings = ClockSettings()
    links: LinkSettings = LinkSettings()
    faults: FaultSettings = FaultSettings()
    cancel_ends: bool = True
    policy: str = EARLY
    page_size: int = 8
    layers: int = 3
    head_dim: int = 4
    context_tokens: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    bandwidth_bytes_s: float = 1e9
    proofs: Proofs = HOST
    scatter_s: float = 0.0
    checksum: bool = True
    digest_bytes_s: float = 1e9
    cost_s: Callable[[StepPlan], float] = prefill_cost_s
    keep: bool = False
    drain_s: float = 60.0
    slots: int = 64
    start_s: float = 2.0
    restart_s: float = 1.0


@dataclass
class SimProcess:
    """One simulated process of a role: its actor, the task that runs it, and its end of the data plane: as it is
    without a simulation, and `dressed` as its actor has it.
    """

    role: str
    actor: Actor
    task: asyncio.Task[None]
    endpoint: Endpoint | None = None
    dressed: SimEndpoint | None = None

    @property
    def address(self) -> Address:
        return self.actor.network.address


def ends_as_one(task: asyncio.Task[None]) -> bool:
    """The process has ended because another rank of its instance is lost."""
    return task.done() and not task.cancelled() and isinstance(task.exception(), RankLost)


@dataclass
class SimSystem:
    """Use it inside the virtual loop: `async with SimSystem(options) as system`. `on_spawn` hears of every process."""

    options: SimOptions
    on_spawn: list[Callable[[SimProcess], None]] = field(default_factory=list)
    network: SimNetwork = field(init=False)
    fabric: FakeFabric = field(init=False)
    processes: dict[str, SimProcess] = field(default_factory=dict)
    restarts: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)  # instances that are not wanted any more
    stopped_s: float = 0.0  # for how long processes have been stopped, all together
    _background: set[asyncio.Task[None]] = field(default_factory=set)
    _pools: Pools | None = None
    _keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> SimSystem:
        clock = VirtualClock()
        self.network = SimNetwork(self.options.seed)
        self.network.killer = self._killed
        self.fabric = FakeFabric(
            loop=asyncio.get_running_loop(),
            sleep=clock.sleep,
            now_s=clock.now_s,
            bandwidth_bytes_s=self.options.bandwidth_bytes_s,
            proofs=self.options.proofs,
            scatter_s=self.options.scatter_s,
        )
        for role, instance in self._names():
            for name in rank_names(self.options, role, instance):
                self.spawn(role, name)
        while not self.ready:
            await asyncio.sleep(0.05)
        if self.options.keep:
            await self._keep()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [process.task for process in self.processes.values()] + list(self.restarts.values())
        tasks += [self._keeping] if self._keeping is not None else []
        tasks += self._background
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _names(self) -> list[tuple[str, str]]:
        prefill = [("prefill", f"prefill-{i}") for i in range(self.options.prefill.instances)]
        decode = [("decode", f"decode-{i}") for i in range(self.options.decode.instances)]
        unified = [("unified", f"unified-{i}") for i in range(self.options.unified.instances)]
        routers = [("router", f"router-{i}") for i in range(self.options.router.instances)]
        return [("registry", "registry"), *routers, *prefill, *decode, *unified]

    @property
    def ready(self) -> bool:
        """Routers live, and each of them knows every instance and is linked to it."""
        routers = self.routers()
        return bool(routers) and all(self._linked(router) for router in routers)

    @staticmethod
    def _linked(router: Router) -> bool:
        """The router knows every instance and is linked to each."""
        ranks = [rank for rank in router.roster.ranks if is_leader(rank)]
        return router.roster.ready and all(router.network.is_up(rank.address.incarnation) for rank in ranks)

    @property
    def pools(self) -> Pools:
        """The keeper of the numbers; only with the option `keep`."""
        assert self._pools is not None
        return self._pools

    async def _keep(self) -> None:
        options = self.options
        hosting = SimHosting(self, options.slots, options.start_s)
        wanted = self._wanted() | {"router": options.router.instances}
        self._pools = Pools(hosting, VirtualClock(), wanted, options.drain_s)
        self._keeping = asyncio.get_running_loop().create_task(self._pools.run())
        while not self._pools.progress()["done"]:
            await asyncio.sleep(0.05)

    async def scaled(self, limit_s: float = 60.0, **numbers: int) -> dict[str, Any]:
        """Ask the pools for other numbers and wait for them, `limit_s` of virtual time at most; the last progress."""
        pools, clock = self.pools, VirtualClock()
        pools.scale(numbers)
        end_s = clock.now_s() + limit_s
        while not pools.progress()["done"] and clock.now_s() < end_s:
            await asyncio.sleep(0.05)
        return pools.progress()

    def _wanted(self) -> dict[str, int]:
        numbers = {role: getattr(self.options, role).instances for role in ("prefill", "decode", "unified")}
        return {role: number for role, number in numbers.items() if number or role != "unified"}

    # --- the parts ---

    @property
    def router(self) -> Router:
        actor = self.processes["router-0"].actor
        assert isinstance(actor, Router)
        return actor

    def router_names(self) -> list[str]:
        """Those that a front knows of, alive or not."""
        if self._pools is not None:
            return routers_of(self._pools.progress())
        return [f"router-{i}" for i in range(self.options.router.instances)]

    def routers(self) -> list[Router]:
        """Those that live, in the order of their names."""
        return [process.actor for process in self.processes.values() if isinstance(process.actor, Router)]

    def prefill(self, index: int = 0) -> Prefill:
        actor = self.processes[f"prefill-{index}"].actor
        assert isinstance(actor, Prefill)
        return actor

    def decode(self, index: int = 0) -> Decode:
        actor = self.processes[f"decode-{index}"].actor
        assert isinstance(actor, Decode)
        return actor

    def followers(self) -> list[Follower]:
        """The ranks that are no leaders, of those that live."""
        return [process.actor for process in self.processes.values() if isinstance(process.actor, Follower)]

    def engine(self, name: str = "decode-0") -> ScriptedEngine:
        actor = self.processes[name].actor
        assert isinstance(actor, Prefill | Decode) and isinstance(actor.engine, ScriptedEngine)
        return actor.engine

    async def resolve(self, name: str) -> Address:
        if name not in self.processes:
            raise LookupError(name)
        return self.processes[name].address

    def counts(self) -> dict[str, PageCounts]:
        """Pages by instance, recounted from the block tables."""
        leaders = {n: p.actor for n, p in self.processes.items() if isinstance(p.actor, Prefill | Decode)}
        return {name: leader.ledger.audit(leader.block_tables()) for name, leader in leaders.items()}

    def at_baseline(self) -> bool:
        """No rooms anywhere, and no page in use."""
        leaders = [p.actor for p in self.processes.values() if isinstance(p.actor, Prefill | Decode)]
        guests = [room for router in self.routers() for room in router.guests]
        slices = [room for follower in self.followers() for room in getattr(follower, "rooms", ())]
        idle = not guests and not slices and all(not leader.leg_rooms() for leader in leaders)
        return idle and all(counts.at_baseline for counts in self.counts().values())

    async def settle(self, limit_s: float) -> bool:
        """Wait, at most `limit_s` of virtual time, for the baseline."""
        clock = VirtualClock()
        end_s = clock.now_s() + limit_s
        while not self.at_baseline():
            if clock.now_s() >= end_s:
                return False
            await asyncio.sleep(0.01)
        return True

    # --- faults ---

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that goes on by itself, until the end of the system."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def stop(self, address: Address, for_s: float) -> None:
        """SIGSTOP a process (a front, too), and SIGCONT."""
        self.stopped_s += for_s
        self.network.stop(address)
        await asyncio.sleep(for_s)
        self.network.resume(address)

    def waits_for_a_stopped_writer(self, room: LegRoom) -> bool:
        """Its pages are quarantined, and one of those that may write to them stands still."""
        lease = room.holding.lease if room.holding is not None and room.holding.quarantined else None
        writers = [] if lease is None else [self.network.process(incarnation) for incarnation in lease.writers.values()]
        return any(writer is not None and writer.stopped for writer in writers)

    def kill(self, name: str) -> None:
        """End a process as kill -9 does: its links, its data plane and its task are gone at once."""
        process = self.processes.pop(name)
        self.network.kill(process.address)
        self.fabric.kill(process.address.incarnation)
        process.task.cancel()
        instance, rank = instance_of(name)
        if self.options.keep and rank != LEADER and instance not in self.removed:  # leaders are the pools' to start
            self._start_again(process.role, name)

    def _killed(self, incarnation: int) -> None:
        """By another process. Its pool, if there is one, starts it again, as Ray does."""
        for name, process in list(self.processes.items()):
            if process.address.incarnation == incarnation:
                self.kill(name)

    def spawn(self, role: str, name: str) -> SimProcess:
        """Start a process, also in the place of one that was killed: new incarnation, new memory."""
        links = self.network.open(name, self.options.links)
        clock, mailbox = self.network.clock(links.address), self.options.links.mailbox
        endpoint: Endpoint | None = None
        dressed: SimEndpoint | None = None
        actor: Actor
        if role == "registry":
            wanted = None if self._pools is not None else self._wanted()
            rooms = RoomRanks(follow=self.options.router.dp_choice == "follow_bootstrap_room")
            actor = Registry(links, clock, mailbox, wanted, rooms=rooms)
        elif role == "router":
            settings, limits = self.options.router, self.options.clocks
            actor = Router(links, clock, mailbox, self.network.random, self.resolve, settings, limits, "fake")
        else:
            carrier = self.network.process(links.address.incarnation)
            assert carrier is not None
            make = RankMaker(self.options, self.fabric, self.resolve).make
            actor, endpoint, dressed = make(role, name, links, clock, carrier)
        task = asyncio.get_running_loop().create_task(actor.run())
        process = self.processes[name] = SimProcess(role, actor, task, endpoint, dressed)
        for spawned in self.on_spawn:
            spawned(process)
        task.add_done_callback(lambda _: self._ended(name, process))
        return process

    def _ended(self, name: str, process: SimProcess) -> None:
        """A rank that ends with its instance is started again, as Ray does it."""
        if self.processes.get(name) is not process or not ends_as_one(process.task):
            return
        self.kill(name)
        self._start_again(process.role, name)

    def _start_again(self, role: str, name: str) -> None:
        if name not in self.restarts:
            self.restarts[name] = asyncio.get_running_loop().create_task(self._restart(role, name))

    async def _restart(self, role: str, name: str) -> None:
        await asyncio.sleep(self.options.restart_s)
        if name not in self.processes and instance_of(name)[0] not in self.removed:
            self.spawn(role, name)
        self.restarts.pop(name, None)
