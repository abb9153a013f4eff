"""Faults at random on a simulated system: processes that die, stand still or come back, networks that fail or lie.

Each fault is one coroutine that does its harm, waits and heals; `log` says what was done and when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from kvferry.actors.links import LinkLayer
from kvferry.protocol.address import Address
from kvferry.sim.network import SimFaults
from kvferry.sim.system import SimSystem
from kvferry.transfer.contract import Descriptor, Peer, TransferError

#: What the network is like while it is bad, for `NOISE_S`.
NOISE = SimFaults(latency_s=(0.001, 0.04), drop_rate=0.05, duplicate_rate=0.05, reorder_rate=0.05)
NOISE_S = 3.0


@dataclass(frozen=True)
class Weights:
    """How often each kind of fault is drawn, beside the others."""

    kill: int = 6
    stop: int = 2
    cut: int = 3
    break_paths: int = 2
    drop: int = 2
    noise: int = 2
    refuse: int = 2
    scale: int = 0


class Chaos:
    """`fronts` are links by name that take part in the network's faults; they are not the system's to kill."""

    def __init__(
        self, system: SimSystem, random: Random, fronts: Mapping[str, LinkLayer], weights: Weights | None = None
    ) -> None:
        self.log: list[str] = []
        self._system, self._random, self._fronts = system, random, fronts
        self._weights = weights or Weights()

    async def fault(self) -> None:
        """One fault, from harm to healing."""
        weights = vars(self._weights)
        (kind,) = self._random.choices(list(weights), list(weights.values()))
        await getattr(self, kind)()

    async def kill(self) -> None:
        """Any process; it comes back at once or after a while, by itself where the system has pools."""
        name = self._random.choice(list(self._system.processes))
        away_s = self._random.choice([0.0, self._random.uniform(0, 4)])
        self._note(f"kill {name}", away_s)
        self._system.kill(name)
        if not self._system.options.keep:
            await asyncio.sleep(away_s)
            self._system.spawn(name.split("-")[0], name)

    async def stop(self) -> None:
        """SIGSTOP and SIGCONT."""
        name = self._random.choice(list(self._system.processes))
        address, for_s = self._address(name), self._random.uniform(0.2, 8)
        self._note(f"stop {name}", for_s)
        self._system.network.stop(address)
        await asyncio.sleep(for_s)
        self._system.network.resume(address)

    async def cut(self) -> None:
        """A partition between two processes; all others see both."""
        a, b = self._two()
        ends, for_s = (self._address(a), self._address(b)), self._random.uniform(0.2, 10)
        self._note(f"cut {a} from {b}", for_s)
        self._system.network.cut(*ends)
        await asyncio.sleep(for_s)
        self._system.network.heal(*ends)

    async def break_paths(self) -> None:
        a, b = self._two()
        self._note(f"break the paths between {a} and {b}")
        self._system.network.break_paths(self._address(a), self._address(b))

    async def drop(self) -> None:
        """One end gives its link up, as it does when a mailbox is full."""
        a, b = self._two()
        self._note(f"{a} drops its link to {b}")
        links = self._fronts.get(a) or self._system.processes[a].actor.network
        links.drop(self._address(b).incarnation)

    async def noise(self) -> None:
        """Frames are late, lost, doubled and out of order."""
        self._note("noise", NOISE_S)
        self._set(NOISE)
        await asyncio.sleep(NOISE_S)
        self._set(SimFaults())

    async def refuse(self) -> None:
        """The data plane of one prefill connects to nobody."""
        name = self._random.choice([name for name in self._system.processes if name.startswith("prefill")] or [""])
        endpoint = self._system.processes[name].endpoint if name else None
        if endpoint is None:
            return
        for_s = self._random.uniform(0.1, 4)
        self._note(f"{name} can't connect", for_s)
        connect = endpoint.connect

        async def refused(descriptor: Descriptor) -> Peer:
            raise TransferError(f"{descriptor.agent}: refused by chaos")

        self._patch(endpoint, refused)
        await asyncio.sleep(for_s)
        self._patch(endpoint, connect)

    async def scale(self) -> None:
        """Other numbers of one role, where the system has pools."""
        role, most = self._random.choice([("prefill", 3), ("decode", 4), ("router", 3)])
        number = self._random.randint(1, most)
        self._note(f"scale {role}={number}")
        self._system.pools.scale({role: number})

    # --- small things ---

    def _note(self, what: str, for_s: float = 0.0) -> None:
        at_s = asyncio.get_running_loop().time()
        self.log.append(f"{at_s:.3f} {what}" + (f" for {for_s:.2f} s" if for_s else ""))

    def _two(self) -> tuple[str, str]:
        a, b = self._random.sample([*self._system.processes, *self._fronts], 2)
        return a, b

    def _address(self, name: str) -> Address:
        links = self._fronts.get(name)
        return links.address if links is not None else self._system.processes[name].address

    def _set(self, faults: SimFaults) -> None:
        """The rates and the latency of a network whose own limits stay."""
        for field in ("latency_s", "drop_rate", "duplicate_rate", "reorder_rate"):
            setattr(self._system.network.faults, field, getattr(faults, field))

    @staticmethod
    def _patch(endpoint: Any, connect: Any) -> None:
        endpoint.connect = connect
