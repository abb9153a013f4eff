"""`kvferry.actors.pools.Hosting` over simulated processes: what Ray does for real ones, on virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.actors.leader import Leader
from kvferry.actors.ranks.names import instance_of
from kvferry.sim.ranks import rank_names

if TYPE_CHECKING:
    from kvferry.sim.system import SimProcess, SimSystem

#: A call that hangs is given up after this.
CALL_S = 10.0


class SimHosting:
    """At most `slots` leaders have a place; a process takes `start_s` to start. A stopped process answers nothing."""

    def __init__(self, system: SimSystem, slots: int, start_s: float) -> None:
        self._system, self.slots, self._start_s = system, slots, start_s
        self._placed = {name for name, process in system.processes.items() if isinstance(process.actor, Leader)}
        self._starting: dict[str, asyncio.Task[None]] = {}

    async def start(self, role: str, name: str) -> str | None:
        if name in self._system.processes or name in self._starting:
            return None
        if role not in ("registry", "router"):
            if len(self._placed) >= self.slots:
                return f"needs 1 slot, there are {self.slots}, {len(self._placed)} are taken"
            self._placed.add(name)
        self._starting[name] = asyncio.get_running_loop().create_task(self._start(role, name))
        return None

    async def _start(self, role: str, name: str) -> None:
        await asyncio.sleep(self._start_s)
        for rank in rank_names(self._system.options, role, name):
            if rank not in self._system.processes and rank not in self._system.restarts:
                self._system.spawn(role, rank)
        del self._starting[name]

    async def process(self, name: str) -> object:
        return (await self._answering(name)).address.incarnation

    async def call(self, name: str, method: str, *args: Any) -> Any:
        actor = (await self._answering(name)).actor
        return await getattr(actor, method)(*args)

    async def leave(self, name: str) -> dict[str, Any]:
        process = await self._answering(name)
        pages: dict[str, Any] = {}
        if isinstance(process.actor, Leader):
            pages = msgspec.to_builtins(process.actor.ledger.audit(process.actor.block_tables()))
        process.task.cancel()
        await asyncio.gather(process.task, return_exceptions=True)
        return pages

    async def remove(self, name: str) -> bool:
        if name in self._starting:
            self._starting.pop(name).cancel()
        self._system.removed.add(name)
        for rank in [rank for rank in self._system.processes if instance_of(rank)[0] == name]:
            self._system.kill(rank)
        self._placed.discard(name)
        return True

    async def _answering(self, name: str) -> SimProcess:
        process = self._system.processes.get(name)
        if process is None:
            raise LookupError(f"there is no process {name}")
        if self._system.network.is_stopped(process.address):
            await asyncio.sleep(CALL_S)
            raise TimeoutError
        return process
