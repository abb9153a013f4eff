"""The `fake` backend: endpoints of one process on one loop, for actors on virtual time and tests of the contract.

The bytes are really copied between the registered addresses, or not at all (`check_bytes=False`, for regions that
are no memory). A write takes size / bandwidth of the `sleep` that is passed in, batch by batch.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable

from kvferry.transfer.contract import (
    Descriptor,
    OnNotify,
    Peer,
    Proofs,
    Region,
    Spans,
    TransferError,
    WriteHandle,
    WriteOutcome,
    WriteResult,
)
from kvferry.transfer.lane import Lane
from kvferry.transfer.spans import addresses, check_spans, split, total_bytes

BACKEND = "fake"


class FakeFabric:
    """What joins the endpoints. `proofs` is what they claim; the default is that of `ucx` on one host."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        sleep: Callable[[float], Awaitable[None]],
        now_s: Callable[[], float],
        bandwidth_bytes_s: float = 1e9,
        batch_bytes: int = 8 * 1024 * 1024,
        check_bytes: bool = True,
        proofs: Proofs | None = None,
    ) -> None:
        self.loop, self.sleep, self.now_s = loop, sleep, now_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.batch_bytes = batch_bytes
        self.check_bytes = check_bytes
        self.proofs = proofs or Proofs(drained=True, exited=True, revoked=False)
        self._endpoints: dict[str, FakeEndpoint] = {}

    def endpoint(
        self, regions: tuple[Region, ...], incarnation: int, on_notify: OnNotify, generation: int = 0
    ) -> FakeEndpoint:
        """Raises TransferError when this incarnation and generation has an endpoint here already."""
        made = FakeEndpoint(self, regions, incarnation, on_notify, generation)
        name = made.descriptor().agent
        if name in self._endpoints:
            raise TransferError(f"{name}: there is one already")
        self._endpoints[name] = made
        return made

    def find(self, agent: str) -> FakeEndpoint | None:
        """The endpoint while it lives."""
        return self._endpoints.get(agent)

    def remove(self, agent: str) -> None:
        self._endpoints.pop(agent, None)

    def kill(self, agent: str) -> None:
        """As if its process died: its own writes stop and nobody hears of them; its peers' end BROKEN."""
        endpoint = self._endpoints.pop(agent, None)
        if endpoint is not None:
            endpoint.die()

    def copy(self, batch: Spans, source: tuple[Region, ...], target: tuple[Region, ...]) -> None:
        if not self.check_bytes:
            return
        starts = addresses(batch, source, "source").tolist()
        ends = addresses(batch, target, "target").tolist()
        for start, end, length in zip(starts, ends, batch["length"].tolist(), strict=True):
            ctypes.memmove(end, start, length)


class FakePeer:
    def __init__(self, endpoint: FakeEndpoint, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self.broken = ""
        self.lane: Lane[FakeWrite | bytes] = Lane(endpoint.fabric.loop, lambda work: endpoint.carry(self, work))

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor


class FakeWrite:
    def __init__(self, spans: Spans, on_end: Callable[[WriteResult], None]) -> None:
        self.result: WriteResult | None = None
        self.spans = spans
        self.on_end = on_end
        self.flushed_bytes = 0
        self.first_post_s: float | None = None
        self.cancelled = False
        self.ending = False


class FakeEndpoint:
    """`Endpoint` on a `FakeFabric`. Its agent is named fake-INCARNATION-GENERATION."""

    def __init__(
        self, fabric: FakeFabric, regions: tuple[Region, ...], incarnation: int, on_notify: OnNotify, generation: int
    ) -> None:
        self.fabric = fabric
        self.on_notify = on_notify
        self.expecting = 0
        self._descriptor = Descriptor(
            backend=BACKEND,
            agent=f"fake-{incarnation:016x}-{generation}",
            incarnation=incarnation,
            generation=generation,
            metadata=b"",
            regions=regions,
        )
        self._peers: dict[str, FakePeer] = {}
        self._closed = False

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def proofs(self) -> Proofs:
        return self.fabric.proofs

    def descriptor(self) -> Descriptor:
        return self._descriptor

    async def connect(self, descriptor: Descriptor) -> Peer:
        self._check_open()
        if descriptor.backend != BACKEND:
            raise TransferError(f"{descriptor.agent}: backend is {descriptor.backend!r} there, {BACKEND!r} here")
        target = self.fabric.find(descriptor.agent)
        if target is None or target.descriptor() != descriptor:
            raise TransferError(f"{descriptor.agent}: no such agent, or its descriptor is another")
        if descriptor.agent == self._descriptor.agent:
            raise TransferError(f"{descriptor.agent}: can't connect to itself")
        return self._peers.setdefault(descriptor.agent, FakePeer(self, descriptor))

    def write(self, peer: Peer, spans: Spans, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        self._check_open()
        known = self._known(peer)
        check_spans(spans, self._descriptor.regions, peer.descriptor.regions)
        write = FakeWrite(spans, on_end)
        if known.broken:
            self._end(write, WriteOutcome.BROKEN, known.broken)
        else:
            known.lane.put(write)
        return write

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._check_open()
        self._known(peer).lane.put(payload)

    def cancel(self, handle: WriteHandle) -> None:
        if not isinstance(handle, FakeWrite):
            raise TransferError(f"{self._descriptor.agent}: {handle!r} is not a write of this backend")
        handle.cancelled = True
        if handle.first_post_s is None:
            self._end(handle, WriteOutcome.CANCELLED)

    def expect(self, change: int) -> None:
        self.expecting += change

    async def disconnect(self, peer: Peer) -> None:
        self._check_open()
        self._break(self._known(peer), "disconnected")

    async def close(self) -> None:
        self._closed = True
        self.fabric.remove(self._descriptor.agent)
        for peer in list(self._peers.values()):
            for work in peer.lane.close():
                if isinstance(work, FakeWrite):
                    self._end(work, WriteOutcome.BROKEN, "the endpoint is closed")
        self._peers.clear()
        await asyncio.sleep(0)  # `on_end` of what just ended, before this returns

    def die(self) -> None:
        """The process is gone: nothing more is copied, and nobody here is told anything."""
        self._closed = True
        for peer in self._peers.values():
            peer.lane.close()

    async def carry(self, peer: FakePeer, work: FakeWrite | bytes) -> None:
        """One item of a peer's lane, from its start to its end."""
        fabric = self.fabric
        target = fabric.find(peer.descriptor.agent)
        if isinstance(work, bytes):
            if target is not None and not peer.broken:
                fabric.loop.call_soon(target.on_notify, self._descriptor.agent, work)
            return
        if work.ending:
            return
        work.first_post_s = fabric.now_s()
        for batch in split(work.spans, fabric.batch_bytes):
            if work.cancelled:
                self._end(work, WriteOutcome.CANCELLED)
                return
            await fabric.sleep(total_bytes(batch) / fabric.bandwidth_bytes_s)
            target = fabric.find(peer.descriptor.agent)
            if target is None and not peer.broken:
                self._break(peer, f"{peer.descriptor.agent}: the peer is gone")
            if peer.broken or target is None:
                self._end(work, WriteOutcome.BROKEN, peer.broken)
                return
            fabric.copy(batch, self._descriptor.regions, target.descriptor().regions)
            work.flushed_bytes += total_bytes(batch)
        self._end(work, WriteOutcome.FLUSHED)

    def _break(self, peer: FakePeer, why: str) -> None:
        """The write under way, if any, is ended by `carry`; those behind it never start."""
        peer.broken = peer.broken or why
        self._peers.pop(peer.descriptor.agent, None)
        for work in peer.lane.items:
            if isinstance(work, FakeWrite) and work.first_post_s is None:
                self._end(work, WriteOutcome.BROKEN, why)

    def _end(self, write: FakeWrite, outcome: WriteOutcome, error: str = "") -> None:
        if write.ending:
            return
        write.ending = True
        wire_s = 0.0 if write.first_post_s is None else self.fabric.now_s() - write.first_post_s
        self.fabric.loop.call_soon(self._tell, write, WriteResult(outcome, write.flushed_bytes, wire_s, error))

    def _tell(self, write: FakeWrite, result: WriteResult) -> None:
        write.result = result
        write.on_end(result)

    def _known(self, peer: Peer) -> FakePeer:
        if not isinstance(peer, FakePeer):
            raise TransferError(f"{self._descriptor.agent}: {peer!r} is not a peer of this backend")
        return peer

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self._descriptor.agent}: the endpoint is closed")
