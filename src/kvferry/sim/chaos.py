"""Faults on a simulated system: processes that die, stand still or come back, networks that fail or lie, memory that is
written late, clients that leave.

Each fault is one coroutine that does its harm, waits and heals. It strikes at a time, or aimed: when some room comes to
a given state, at the processes of that room. `log` says what was done and when; `pairs` counts the states in which it
found the rooms of those that it struck.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from enum import Enum
from random import Random
from typing import Any, Protocol

from kvferry.actors.leader import Leader
from kvferry.actors.links import LinkLayer
from kvferry.actors.ranks.names import instance_of
from kvferry.protocol.address import Address
from kvferry.protocol.link import LinkSession
from kvferry.protocol.machine import Machine
from kvferry.sim.coverage import Cells, state_name
from kvferry.sim.engine import SimEngine
from kvferry.sim.network import SimFaults
from kvferry.sim.subjects import Subject, subjects_of
from kvferry.sim.system import SimSystem

#: What the network is like while it is bad, for `NOISE_S`.
NOISE = SimFaults(latency_s=(0.001, 0.04), drop_rate=0.1, duplicate_rate=0.1, reorder_rate=0.1)
NOISE_S = 3.0
#: Meanwhile connections break so often, so that links are made and taken up again in bad weather.
BREAKS_S = 0.3
#: The longer ones outlive the links' limit of silence.
STOPS_S = ((0.1, 1.0), (4.0, 8.0))
CUTS_S = ((0.2, 2.5), (2.5, 10.0))
AIM_S = 6.0
#: What a forward may take when its instance is slow.
SLOW_FORWARD_S = 1.25

ROLES = ("prefill", "decode", "router", "registry", "front")
#: How often each kind is drawn, beside the others.
WEIGHTS = {
    **{f"kill {role}": 2 for role in ROLES}, **{f"stop {role}": 2 for role in ROLES},
    "cut": 3, "break paths": 2, "drop a link": 2, "noise": 2, "refuse": 2, "slow": 2, "late writes": 3,
    "break writes": 2, "garble": 2, "flip": 2, "leave": 3, "drain prefill": 2, "drain decode": 2,
}  # fmt: skip


class Fronts(Protocol):
    """The fronts of a system, as chaos sees them: they are not the system's to kill."""

    def links(self) -> dict[str, LinkLayer]: ...
    def kill(self, name: str) -> None: ...
    def spawn(self, name: str) -> None: ...
    def leave(self, request: int) -> bool: ...


class Chaos:
    """All draws come from `random`. `scales`: the system has pools, so numbers may change and who dies comes back."""

    def __init__(self, system: SimSystem, random: Random, fronts: Fronts, cells: Cells, scales: bool = False) -> None:
        self.log: list[str] = []
        self.pairs: Counter[str] = Counter()
        self._system, self._random, self._fronts, self._cells = system, random, fronts, cells
        self._weights = WEIGHTS | ({"scale": 8} if scales else {})

    async def fault(self, aim: Enum | None, kind: str = "") -> None:
        """One fault, of that kind or drawn, from harm to healing; with `aim` when some room comes to that state."""
        kind, role = self._kind(kind or self._draw())
        machine = await self._aimed(aim) if aim is not None else None
        subject = self._subject(machine)
        await getattr(self, kind.replace(" ", "_"))(subject, role)

    def _draw(self) -> str:
        (kind,) = self._random.choices(list(self._weights), list(self._weights.values()))
        return kind

    @staticmethod
    def _kind(kind: str) -> tuple[str, str]:
        """What is done, and to which role if that is part of it."""
        first, _, role = kind.partition(" ")
        return (first, role) if role in ROLES else (kind, "")

    # --- aiming ---

    async def _aimed(self, state: Enum) -> Machine[Any, Any] | None:
        """The first machine that comes to the state and is still there a moment later; None when none does."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + AIM_S
        while (left_s := end_s - loop.time()) > 0:
            entered: asyncio.Future[Machine[Any, Any]] = loop.create_future()
            self._cells.when_entered(state, entered.set_result)
            done, _ = await asyncio.wait({entered}, timeout=left_s)
            if not done:
                self._cells.forget(state, entered.set_result)
            elif entered.result().state is state:
                return entered.result()
        return None

    def _subject(self, machine: Machine[Any, Any] | None) -> Subject | None:
        """The room of a machine, or any room; None when there is none."""
        if isinstance(machine, LinkSession):
            return Subject(0, 0, {"dialler": machine.us.name, "listener": machine.peer.name})
        subjects = subjects_of(self._system)
        for found, subject in subjects:
            if found is machine:
                return subject
        return self._random.choice(subjects)[1] if subjects else None

    def _struck(self, kind: str, names: set[str] | None, text: str, for_s: float = 0.0) -> None:
        """Write the fault down, and the states of the rooms that the named processes work on (None: of all)."""
        instances = None if names is None else {instance_of(name)[0] for name in names}
        for machine, subject in subjects_of(self._system):
            if instances is None or instances & set(subject.names.values()):
                self.pairs[f"{kind} in {state_name(machine.state)}"] += 1
        self._note(text + (f" for {for_s:.2f} s" if for_s else ""))

    # --- processes ---

    async def kill(self, subject: Subject | None, role: str) -> None:
        """A process; it comes back at once or after a while, by itself where the system has pools."""
        away_s = self._random.choice([0.0, self._random.uniform(0, 4)])
        name = self._victim(subject, role)
        if name is None:
            return
        self._struck(f"kill {role}", self._concerned(name, role), f"kill {name}", away_s)
        if role == "front":
            self._fronts.kill(name)
            await asyncio.sleep(away_s)
            self._fronts.spawn(name)
            return
        self._system.kill(name)
        await asyncio.sleep(away_s)
        self._spawn(name)

    async def stop(self, subject: Subject | None, role: str) -> None:
        """SIGSTOP and SIGCONT."""
        low_s, high_s = self._random.choice(STOPS_S)
        for_s = self._random.uniform(low_s, high_s)
        name = self._victim(subject, role)
        if name is None or self._stalls(name, for_s):
            return
        self._struck(f"stop {role}", self._concerned(name, role), f"stop {name}", for_s)
        await self._system.stop(self._address(name), for_s)

    def _stalls(self, name: str, for_s: float) -> bool:
        """Stopped for so long, a process that is slow as well would end itself: its forward outlives its limit."""
        process = self._system.processes.get(name)
        engine = getattr(process.actor, "engine", None) if process is not None else None
        slow = isinstance(engine, SimEngine) and engine.slow > 1
        return slow and for_s + SLOW_FORWARD_S > self._system.options.clocks.no_progress_s

    async def slow(self, subject: Subject | None, _role: str) -> None:
        """The forwards of one instance take long."""
        for_s, times = self._random.uniform(0.5, 4), self._random.choice([5.0, 30.0])
        name = self._victim(subject, self._random.choice(["prefill", "decode"]))
        engine = getattr(self._system.processes[name].actor, "engine", None) if name is not None else None
        if name is None or not isinstance(engine, SimEngine):
            return
        self._struck("slow", {name}, f"{name} is {times:g} times slower", for_s)
        engine.slow = times
        await asyncio.sleep(for_s)
        engine.slow = 1.0

    # --- the network ---

    async def cut(self, subject: Subject | None, _role: str) -> None:
        """A partition between two processes; all others see both."""
        for_s = self._random.uniform(*self._random.choice(CUTS_S))
        a, b = self._two(subject)
        ends = (self._address(a), self._address(b))
        self._struck("cut", {a, b}, f"cut {a} from {b}", for_s)
        self._system.network.cut(*ends)
        await asyncio.sleep(for_s)
        self._system.network.heal(*ends)

    async def break_paths(self, subject: Subject | None, _role: str) -> None:
        a, b = self._two(subject)
        self._struck("break paths", {a, b}, f"break the paths between {a} and {b}")
        self._system.network.break_paths(self._address(a), self._address(b))

    async def drop_a_link(self, subject: Subject | None, _role: str) -> None:
        """One end gives its link up, as it does when a mailbox is full."""
        a, b = self._two(subject)
        self._struck("drop a link", {a, b}, f"{a} drops its link to {b}")
        self._give_up(a, b)

    async def noise(self, _subject: Subject | None, _role: str) -> None:
        """Frames are late, lost, doubled and out of order, connections break, and links are given up."""
        self._struck("noise", None, "noise", NOISE_S)
        self._set(NOISE)
        for _ in range(round(NOISE_S / BREAKS_S)):
            a, b = self._two(None)
            wait_s = self._random.uniform(0, BREAKS_S)
            if self._random.random() < 0.5:
                self._system.network.break_paths(self._address(a), self._address(b))
            else:
                self._give_up(a, b)
            await asyncio.sleep(wait_s)
            self._give_up(b, a)
            await asyncio.sleep(BREAKS_S - wait_s)
        self._set(SimFaults())

    # --- others ---

    async def leave(self, subject: Subject | None, _role: str) -> None:
        """The client of one room leaves."""
        if subject is not None and self._fronts.leave(subject.request):
            for machine, other in subjects_of(self._system):
                if other.request == subject.request:
                    self.pairs[f"leave in {state_name(machine.state)}"] += 1
            self._note(f"the client of {subject.request:016x} leaves")

    async def scale(self, _subject: Subject | None, _role: str) -> None:
        """Other numbers of one role, where the system has pools."""
        roles = [("prefill", 3), ("decode", 4), ("router", 3)]
        role, most = self._random.choice([*roles, ("unified", 2)] if self._system.options.unified.instances else roles)
        number = self._random.randint(1, most)
        self._struck("scale", None, f"scale {role}={number}")
        self._system.pools.scale({role: number})

    async def drain(self, subject: Subject | None, role: str) -> None:
        """An instance leaves, handing over what it does not finish, and another comes in its place."""
        limit_s = self._random.choice([0.0, 0.05, 1.0])
        name = instance_of(self._victim(subject, role) or "")[0]
        process = self._system.processes.get(name)
        if process is None or self._system.options.keep:
            return
        self._struck(f"drain {role}", {name}, f"drain {name} within {limit_s:g} s")
        assert isinstance(process.actor, Leader)
        await process.actor.drain(limit_s)
        while self._system.processes.get(name) is process and not (await process.actor.drained())["done"]:
            await asyncio.sleep(0.1)
        if self._system.processes.get(name) is process:
            self._kill_and_spawn(name)

    # --- small things ---

    def _give_up(self, name: str, other: str) -> None:
        """Its link to another one, if both are there."""
        if {name, other} <= {*self._names()}:
            self._links(name).drop(self._address(other).incarnation)

    def _kill_and_spawn(self, name: str) -> None:
        self._note(f"kill {name}")
        self._system.kill(name)
        self._spawn(name)

    def _spawn(self, name: str) -> None:
        """Start it again, where nobody else does or has done it."""
        if not self._system.options.keep and name not in self._system.processes:
            self._system.spawn(name.split("-")[0], name)

    def _note(self, text: str) -> None:
        self.log.append(f"{asyncio.get_running_loop().time():.6f} {text}")

    def _concerned(self, name: str, role: str) -> set[str] | None:
        """Every room knows the registry, though none names it."""
        return None if role == "registry" else {name}

    def _names(self) -> list[str]:
        return [*self._system.processes, *self._fronts.links()]

    def _victim(self, subject: Subject | None, role: str) -> str | None:
        """The process of that role that works on the room, or any of that role; None when there is none now."""
        names = self._names()
        wanted = subject.names.get(role) if subject is not None else None
        ranks = [name for name in names if wanted is not None and instance_of(name)[0] == wanted]
        if ranks:
            return self._random.choice(ranks)
        others = [name for name in names if name == role or name.startswith(f"{role}-")]
        return self._random.choice(others) if others else None

    def _two(self, subject: Subject | None) -> tuple[str, str]:
        """Two of those that work on the room, or any two."""
        names = self._names()
        those = [name for name in dict.fromkeys(subject.names.values()) if name in names] if subject is not None else []
        a, b = self._random.sample(those if len(those) > 1 else names, 2)
        return a, b

    def _links(self, name: str) -> Any:
        links = self._fronts.links().get(name)
        return links if links is not None else self._system.processes[name].actor.network

    def _address(self, name: str) -> Address:
        address: Address = self._links(name).address
        return address

    def _set(self, faults: SimFaults) -> None:
        """The rates and the latency of a network whose own limits stay."""
        for field in ("latency_s", "drop_rate", "duplicate_rate", "reorder_rate"):
            setattr(self._system.network.faults, field, getattr(faults, field))
