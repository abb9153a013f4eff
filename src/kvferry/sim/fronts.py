"""The fronts of a simulated system: the production `Front` over simulated links, with an end and a successor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvferry.actors.links import LinkLayer
from kvferry.engine.token_pieces import TokenPiece
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.errors import Cause
from kvferry.serve.attempts import AttemptPolicy
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo
from kvferry.sim.backend import SimBackend
from kvferry.sim.system import SimSystem

#: A request goes on in later attempts for so long.
RECOVERY_S = 30.0


class NoText:
    """A `kvferry.serve.gateway.PromptEncoder` that is never asked: simulated clients send token ids."""

    def render(self, messages: Sequence[dict[str, str]], /) -> Sequence[int]:
        raise NotImplementedError

    def encode(self, text: str, /) -> Sequence[int]:
        raise NotImplementedError

    def piece(self, token_id: int, /) -> TokenPiece:
        raise NotImplementedError


class FrontProcess:
    """One front, its links, and its end."""

    def __init__(self, system: SimSystem, name: str, metrics: FrontMetrics) -> None:
        self.name, self._network = name, system.network
        self.links: LinkLayer = system.network.open(name, system.options.links)
        info = FrontInfo("scripted", vocab_size=50_000, attempts=AttemptPolicy(3, RECOVERY_S))
        clock = system.network.clock(self.links.address)
        self.front = Front(
            self.links, SimBackend(system), NoText(), clock, system.network.random, info, metrics
        )  # fmt: skip
        self.dead = False

    async def running(self) -> None:
        """Wait until it is not stopped. A dead one runs: nothing that it does goes anywhere."""
        while not self.dead and self._network.is_stopped(self.links.address):
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        """Its links end, its calls are cancelled, and nobody reads on."""
        self.dead = True
        self._network.kill(self.links.address)
        for live in list(self.front._requests.values()):
            live.attempts = AttemptPolicy(1)  # type: ignore[assignment]
            for task in (live.submission, live.reopening):
                if task is not None:
                    task.cancel()
            if live.stream.fail(Cause("unavailable", "the front is dead", "front")):
                live.wake()

    def waiting(self) -> list[str]:
        return [
            f"{live.spec.request:016x} attempt {live.attempt} room {live.room:x} tokens {live.stream.next_index}"
            for live in self.front._requests.values()
        ]


class SimFronts:
    """Those that clients come to, by name; `kvferry.sim.chaos.Fronts`. One that was killed has a successor."""

    def __init__(self, system: SimSystem, count: int) -> None:
        self._system = system
        self._metrics = FrontMetrics()  # nobody reads it, and making one takes a while
        names = [f"front-{i}" for i in range(count)]
        self.processes = {name: FrontProcess(system, name, self._metrics) for name in names}
        self.leavers: dict[int, Callable[[], None]] = {}  # by request: has its client leave

    async def start(self) -> None:
        for process in self.processes.values():
            await process.front.start()

    def links(self) -> dict[str, LinkLayer]:
        return {name: process.links for name, process in self.processes.items() if not process.dead}

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def spawn(self, name: str) -> None:
        process = self.processes[name] = FrontProcess(self._system, name, self._metrics)
        # A front's start has nothing to wait for: its links take frames from the next turn on.
        self._system.background(process.front.start())

    def leave(self, request: int) -> bool:
        """Its client goes, if it is still there."""
        leave = self.leavers.get(request)
        if leave is not None:
            leave()
        return leave is not None
