"""A front with plain method calls instead of HTTP and Ray, on a simulated system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.actors.leader import Leader
from kvferry.actors.router.router import Router
from kvferry.actors.settings import LinkSettings
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.errors import Cause, PeerLost
from kvferry.protocol.messages import Roster, Token
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.serve.attempts import AttemptPolicy
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo
from kvferry.serve.live import LiveRequest
from kvferry.sim.loop import VirtualClock
from kvferry.sim.system import SimSystem


class DirectBackend:
    """`Backend` by calling the simulated router and registry directly."""

    def __init__(self, system: SimSystem) -> None:
        self._system = system
        self._turns = 0

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        """In turn, siblings to one; a router that is killed meanwhile ends the call as Ray does."""
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

    async def room(self, room: int) -> dict[str, Any] | None:
        for router in self._system.routers():
            if (journal := await router.journal(room)) is not None:
                return journal
        return None


class Client:
    """What a client of the front sees."""

    def __init__(self, system: SimSystem, name: str, attempts: int, recovery_s: float) -> None:
        self.system = system
        network = system.network.open(name, LinkSettings())
        self.network = network
        self.backend = DirectBackend(system)
        self.front = Front(
            network, self.backend, lambda _: (), VirtualClock(), system.network.random,
            FrontInfo("scripted", vocab_size=50_000, attempts=AttemptPolicy(attempts, recovery_s)),
            FrontMetrics(),
        )  # fmt: skip

    async def start(self) -> Client:
        await self.front.start()
        return self

    def open(self, prompt: tuple[int, ...], **sampling: Any) -> LiveRequest:
        return self.front.open(prompt, Sampling(**sampling))

    async def collect(self, live: LiveRequest) -> list[Token]:
        """All tokens up to the last; raises what the client would be told."""
        tokens: list[Token] = []
        try:
            while not tokens or not tokens[-1].finish_reason:
                tokens += await live.take()
        finally:
            self.front.close_request(live)
        return tokens

    async def ask(self, prompt: tuple[int, ...], **sampling: Any) -> list[int]:
        return [token.token_id for token in await self.collect(self.open(prompt, **sampling))]

    async def journal(self, live: LiveRequest) -> dict[str, Any]:
        found = await self.backend.room(live.room)
        assert found is not None
        return found


@pytest.fixture
def client_of() -> Callable[[SimSystem], Any]:
    async def make(system: SimSystem, attempts: int = 1, recovery_s: float = 30.0) -> Client:
        """With one attempt, a test sees the failure of the attempt itself."""
        return await Client(system, "front-0", attempts, recovery_s).start()

    return make


async def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Let virtual time pass until `holds()`."""
    clock = VirtualClock()
    end_s = clock.now_s() + limit_s
    while not holds():
        assert clock.now_s() < end_s, f"still not after {limit_s} s of virtual time"
        await asyncio.sleep(0.001)


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return until
