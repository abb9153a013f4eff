"""The `fake` backend: endpoints of one process on one loop, for actors on virtual time and tests of the contract.

The bytes are really copied between the registered addresses, or not at all (`check_bytes=False`, for regions that
are no memory). A write takes size / bandwidth of the `sleep` that is passed in, batch by batch.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable

from kvferry.transfer.contract import OnNotify, Proofs, Region, Spans, TransferError
from kvferry.transfer.fake_endpoint import FakeAgent, FakeEndpoint
from kvferry.transfer.spans import addresses

#: What `ucx` proves on one host, where a writer reaches memory by itself, and over tcp, where the target takes part.
HOST = Proofs(drained=True, exited=True, revoked=False)
TCP = Proofs(drained=True, exited=False, revoked=True)


class FakeFabric:
    """What joins the endpoints. `proofs` is what they claim, and how they behave; the default is that of `ucx` on one
    host: a writer needs nobody's help, and its bytes land as long as it runs.

    Where `revoked` is a proof, the target takes part, as over tcp: nothing lands while it stands still, and what a
    writer had under way when it died or disconnected lands `late_s` later, unless its receiving agent is gone by then.
    With `scatter_s` above 0 that is so elsewhere, too, as with staging: a dead writer has announced what it had under
    way. `revoke` ends it, and takes so long.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        sleep: Callable[[float], Awaitable[None]],
        now_s: Callable[[], float],
        bandwidth_bytes_s: float = 1e9,
        batch_bytes: int = 16 * 1024 * 1024,
        check_bytes: bool = True,
        proofs: Proofs = HOST,
        late_s: float = 0.5,
        scatter_s: float = 0.0,
    ) -> None:
        self.loop, self.sleep, self.now_s = loop, sleep, now_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.batch_bytes = batch_bytes
        self.check_bytes = check_bytes
        self.proofs = proofs
        self.late_s, self.scatter_s = late_s, scatter_s
        self._endpoints: dict[int, FakeEndpoint] = {}
        self._agents: dict[str, FakeAgent] = {}

    def endpoint(
        self,
        regions: tuple[Region, ...],
        incarnation: int,
        on_notify: OnNotify,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        running: asyncio.Event | None = None,
    ) -> FakeEndpoint:
        """`sleep` is the process's own, which stands still with it; `running` is set while it does not.

        Raises TransferError when this incarnation has an endpoint here already.
        """
        if incarnation in self._endpoints:
            raise TransferError(f"fake-{incarnation:016x}: there is one already")
        made = self._endpoints[incarnation] = FakeEndpoint(self, regions, incarnation, on_notify, sleep, running)
        return made

    def find(self, agent: str) -> FakeAgent | None:
        """The receiving agent while it lives."""
        return self._agents.get(agent)

    def add(self, agent: FakeAgent) -> None:
        self._agents[agent.descriptor.agent] = agent

    def remove(self, agent: FakeAgent) -> None:
        self._agents.pop(agent.descriptor.agent, None)
        agent.gone.set()

    def forget(self, incarnation: int) -> None:
        self._endpoints.pop(incarnation, None)

    def kill(self, incarnation: int) -> None:
        """As if the process died: its own writes stop and nobody hears of them; its peers' end BROKEN."""
        endpoint = self._endpoints.pop(incarnation, None)
        if endpoint is not None:
            endpoint.die()

    def copy(self, batch: Spans, source: tuple[Region, ...], target: tuple[Region, ...]) -> None:
        if not self.check_bytes:
            return
        starts = addresses(batch, source, "source").tolist()
        ends = addresses(batch, target, "target").tolist()
        for start, end, length in zip(starts, ends, batch["length"].tolist(), strict=True):
            ctypes.memmove(end, start, length)

    def flip(self, agent: str, region: int, offset: int) -> bool:
        """One bit of what lies there changes by itself. False when the agent is gone."""
        target = self.find(agent)
        if target is None:
            return False
        byte = ctypes.c_ubyte.from_address(target.endpoint.regions[region].base + offset)
        byte.value ^= 1
        return True

    def land_later(self, batch: Spans, source: tuple[Region, ...], agent: str) -> None:
        """The bytes as they are now lie on the way to `agent`."""
        starts = addresses(batch, source, "source").tolist() if self.check_bytes else []
        data = [ctypes.string_at(at, n) for at, n in zip(starts, batch["length"].tolist(), strict=False)]
        self.loop.call_later(self.late_s, self._land, batch, data, agent)

    def _land(self, batch: Spans, data: list[bytes], agent: str) -> None:
        target = self.find(agent)
        if target is not None:
            self.land(batch, data, target)

    def land(self, batch: Spans, data: list[bytes], target: FakeAgent) -> None:
        """What was under way is placed, though its writer may be gone."""
        ends = addresses(batch, target.endpoint.regions, "target").tolist()
        for end, piece in zip(ends, data, strict=False):
            ctypes.memmove(end, piece, len(piece))
