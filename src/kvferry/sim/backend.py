"""What a front asks of the rest of a simulated system (`kvferry.serve.gateway.Backend`): plain calls where production
has Ray's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kvferry.actors.leader import Leader
from kvferry.actors.router.router import Router
from kvferry.protocol.errors import Cause, PeerLost
from kvferry.protocol.messages import Roster
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec
from kvferry.sim.system import SimSystem


class SimBackend:
    """One front's; routers are called in turn, from the first."""

    def __init__(self, system: SimSystem) -> None:
        self._system = system
        self._turns = 0

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        """In turn, siblings to one. Raises PeerLost when the router is not there, or is killed meanwhile."""
        names = self._system.router_names()
        self._turns += 1
        name = names[(spec.group + attempt if spec.group else self._turns - 1) % len(names)]
        process = self._system.processes.get(name)
        lost = PeerLost(Cause("peer_lost", "the router is gone", "router", peer=name))
        if process is None or not isinstance(process.actor, Router):
            raise lost
        call = asyncio.ensure_future(process.actor.submit(spec, attempt))
        try:
            await asyncio.wait({call, process.task}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise lost
            return call.result()
        finally:
            call.cancel()

    async def roster(self) -> Roster:
        return self._system.router.roster

    async def status(self) -> dict[str, Any]:
        """As the Ray backend puts it together."""
        routers = self._system.routers()
        leaders = [p.actor for p in self._system.processes.values() if isinstance(p.actor, Leader)]
        return {
            "instances": [await leader.status() for leader in leaders],
            "routers": [await router.status() for router in routers],
            "rooms_live": sum(len(router.guests) for router in routers),
            "requests_live": 0,
        }

    async def pools(self) -> dict[str, Any]:
        return self._system.pools.progress()

    async def scale(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        self._system.pools.scale(numbers)
        return self._system.pools.progress()

    async def room(self, room: int) -> dict[str, Any] | None:
        for router in self._system.routers():
            if (journal := await router.journal(room)) is not None:
                return journal
        return None
