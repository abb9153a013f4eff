"""A front with plain method calls instead of HTTP and Ray, on a simulated system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.actors.settings import LinkSettings
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.messages import Message, Token
from kvferry.protocol.request import Sampling
from kvferry.serve.attempts import AttemptPolicy
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo
from kvferry.serve.live import LiveRequest
from kvferry.sim.backend import SimBackend
from kvferry.sim.checkers import check_idle
from kvferry.sim.loop import VirtualClock
from kvferry.sim.system import SimSystem


class Client:
    """What a client of the front sees."""

    def __init__(self, system: SimSystem, name: str, attempts: int, recovery_s: float) -> None:
        self.system = system
        network = system.network.open(name, LinkSettings())
        self.network = network
        self.backend = SimBackend(system)
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


@pytest.fixture
def served_again() -> Callable[[SimSystem, Client], Any]:
    async def check(system: SimSystem, client: Client) -> None:
        """Everybody is back, all is as it was, and a request is answered."""
        await until(lambda: system.ready)
        assert await system.settle(20), (system.counts(), [r.machine.state for r in system.decode().rooms.values()])
        prompt = tuple(range(307, 400))
        assert await client.ask(prompt, max_tokens=3) == list(system.engine().expected_tokens(prompt, 3))
        assert await system.settle(5)
        check_idle(system)

    return check


@pytest.fixture
def heard_by() -> Callable[..., list[Any]]:
    def note(kind: type[Message], *actors: Any) -> list[Any]:
        """What comes of this kind to any of them; it is handled all the same."""
        kept: list[Any] = []

        def noting(handler: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            def take(peer: Any, message: Any) -> None:
                kept.append(message)
                handler(peer, message)

            return take

        for actor in actors:
            actor._on_message[kind] = noting(actor._on_message[kind])
        return kept

    return note
