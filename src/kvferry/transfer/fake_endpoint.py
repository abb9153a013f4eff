"""One process's end of the `fake` backend. How bytes get from one to the other is the fabric's (`fake`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvferry.protocol.offer import NOTHING_SAID, Offer
from kvferry.transfer.contract import (
    Descriptor,
    OnNotify,
    Peer,
    Region,
    Revoked,
    Spans,
    TransferError,
    WriteHandle,
    WriteOutcome,
    WriteResult,
)
from kvferry.transfer.lane import Lane
from kvferry.transfer.spans import check_spans, split, total_bytes
from kvferry.transfer.work import Work, spans_in
from kvferry.transfer.write import Write

if TYPE_CHECKING:
    from kvferry.transfer.fake import FakeFabric

BACKEND = "fake"


class FakeAgent:
    """A receiving agent: one writer's way into one endpoint."""

    def __init__(self, endpoint: FakeEndpoint, writer: int, descriptor: Descriptor) -> None:
        self.endpoint, self.writer, self.descriptor = endpoint, writer, descriptor
        self.gone = asyncio.Event()


class FakePeer:
    """`agent` is the name of the sending one."""

    def __init__(self, endpoint: FakeEndpoint, descriptor: Descriptor, agent: str) -> None:
        self._descriptor, self.agent = descriptor, agent
        self.broken = ""
        self.ended = asyncio.Event()
        self.batch: Spans | None = None  # under way
        self.lane: Lane[FakeWrite | bytes] = Lane(endpoint.fabric.loop, lambda work: endpoint.carry(self, work))

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor


class FakeWrite(Write):
    ending = False  # its owner has been told, or will be in the loop's next turn


class FakeEndpoint:
    """`Endpoint` on a `FakeFabric`. Its agents are named fake-INCARNATION-GENERATION."""

    def __init__(
        self,
        fabric: FakeFabric,
        regions: tuple[Region, ...],
        incarnation: int,
        on_notify: OnNotify,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        running: asyncio.Event | None = None,
    ) -> None:
        self.fabric = fabric
        self.on_notify = on_notify
        self.expecting = 0
        self.running = running
        self._sleep = sleep or fabric.sleep
        self._regions, self._incarnation = regions, incarnation
        self._name = f"fake-{incarnation:016x}"
        self._generation = -1
        self._writers: dict[int, FakeAgent] = {}
        self._revoking: set[FakeAgent] = set()
        self._peers: dict[str, FakePeer] = {}
        self._closed = False

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    @property
    def writers(self) -> set[int]:
        """Those that have a receiving agent here."""
        return set(self._writers)

    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor:
        self._check_open()
        agent = self._writers.get(writer)
        if agent is None:
            name, proofs = self._next_name(), self.fabric.proofs
            descriptor = Descriptor(
                BACKEND, name, self._incarnation, self._generation, b"", self._regions, proofs
            )  # fmt: skip
            agent = self._writers[writer] = FakeAgent(self, writer, descriptor)
            self.fabric.add(agent)
        return agent.descriptor

    async def revoke(self, writer: int) -> Revoked | None:
        self._check_open()
        agent = self._writers.pop(writer, None)
        if agent is None:
            return None
        if self.fabric.scatter_s:
            self._revoking.add(agent)
            await self._sleep(self.fabric.scatter_s)
            self._revoking.discard(agent)
        self.fabric.remove(agent)
        return Revoked(writer, agent.descriptor.generation) if self.fabric.proofs.revoked else None

    def writer_exited(self, writer: int) -> None:
        """Nothing was laid aside."""

    async def connect(self, descriptor: Descriptor) -> Peer:
        self._check_open()
        if descriptor.backend != BACKEND:
            raise TransferError(f"{descriptor.agent}: backend is {descriptor.backend!r} there, {BACKEND!r} here")
        target = self.fabric.find(descriptor.agent)
        # What whoever stands around it has added for people to read is nothing to go by.
        if target is None or target.descriptor != replace(descriptor, why="", at=""):
            raise TransferError(f"{descriptor.agent}: no such agent, or its descriptor is another")
        if descriptor.incarnation == self._incarnation:
            raise TransferError(f"{descriptor.agent}: can't connect to itself")
        if target.writer != self._incarnation:
            raise TransferError(f"{descriptor.agent}: it is for {target.writer:016x}, not for {self._incarnation:016x}")
        peer = self._peers.get(descriptor.agent)
        if peer is None:
            peer = self._peers[descriptor.agent] = FakePeer(self, descriptor, self._next_name())
        return peer

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        self._check_open()
        known = self._known(peer)
        spans = spans_in(work)
        check_spans(spans, self._regions, peer.descriptor.regions)
        write = FakeWrite(spans, on_end, self.fabric.now_s())
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
            raise TransferError(f"{self._name}: {handle!r} is not a write of this backend")
        handle.cancelled = True
        if handle.first_post_s is None:
            self._end(handle, WriteOutcome.CANCELLED)

    def expect(self, change: int) -> None:
        self.expecting += change

    async def disconnect(self, peer: Peer) -> None:
        self._check_open()
        known = self._known(peer)
        self._leave_behind(known)
        self._break(known, "disconnected")

    async def close(self) -> None:
        self._closed = True
        self._end_agents()
        for peer in list(self._peers.values()):
            self._leave_behind(peer)
            for work in peer.lane.close():
                if isinstance(work, FakeWrite):
                    self._end(work, WriteOutcome.BROKEN, "the endpoint is closed")
        self._peers.clear()
        await asyncio.sleep(0)  # `on_end` of what just ended, before this returns

    def die(self) -> None:
        """The process is gone: nothing more is posted, and nobody here is told anything."""
        self._closed = True
        self._end_agents()
        for peer in self._peers.values():
            self._leave_behind(peer)
            peer.lane.close()

    async def carry(self, peer: FakePeer, work: FakeWrite | bytes) -> None:
        """One item of a peer's lane, from its start to its end."""
        if isinstance(work, bytes):
            agent = self.fabric.find(peer.descriptor.agent)
            if agent is not None and not peer.broken:
                self.fabric.loop.call_soon(agent.endpoint.on_notify, peer.agent, work)
            return
        if work.ending:
            return
        work.first_post_s = self.fabric.now_s()
        for batch in split(work.spans, self.fabric.batch_bytes):
            if work.cancelled:
                self._end(work, WriteOutcome.CANCELLED)
                return
            work.descriptors += len(batch)
            if not await self._carried(peer, batch):
                self._end(work, WriteOutcome.BROKEN, peer.broken)
                return
            work.flushed_bytes += total_bytes(batch)
        self._end(work, WriteOutcome.FLUSHED)

    async def _carried(self, peer: FakePeer, batch: Spans) -> bool:
        """One batch, from its posting to its end; False when it broke."""
        fabric, name = self.fabric, peer.descriptor.agent
        peer.batch = batch
        await self._sleep(total_bytes(batch) / fabric.bandwidth_bytes_s)
        target = fabric.find(name)
        if target is not None and not peer.broken and fabric.proofs.revoked:
            await self._driven(peer, target)
            target = fabric.find(name)
        peer.batch = None
        if target is None and not peer.broken:
            self._break(peer, f"{name}: the agent is gone")
        if peer.broken or target is None:
            return False
        fabric.copy(batch, self._regions, target.endpoint.regions)
        return True

    @staticmethod
    async def _driven(peer: FakePeer, target: FakeAgent) -> None:
        """Until the target's process runs, or there is nothing to wait for any more."""
        running = target.endpoint.running
        if running is None or running.is_set():
            return
        waits = {asyncio.ensure_future(event.wait()) for event in (running, target.gone, peer.ended)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _leave_behind(self, peer: FakePeer) -> None:
        """What has been posted is beyond our reach where the target takes part: it may land without us."""
        if peer.batch is not None and (self.fabric.proofs.revoked or self.fabric.scatter_s):
            self.fabric.land_later(peer.batch, self._regions, peer.descriptor.agent)
            peer.batch = None

    def _break(self, peer: FakePeer, why: str) -> None:
        """The write under way, if any, is ended by `carry`; those behind it never start."""
        peer.broken = peer.broken or why
        peer.ended.set()
        self._peers.pop(peer.descriptor.agent, None)
        for work in peer.lane.items:
            if isinstance(work, FakeWrite) and work.first_post_s is None:
                self._end(work, WriteOutcome.BROKEN, why)

    def _end(self, write: FakeWrite, outcome: WriteOutcome, error: str = "") -> None:
        if write.ending:
            return
        write.ending = True
        write.end(outcome, error, self.fabric.now_s(), self.fabric.loop.call_soon)

    def _next_name(self) -> str:
        self._generation += 1
        return f"{self._name}-{self._generation}"

    def _end_agents(self) -> None:
        for agent in (*self._writers.values(), *self._revoking):
            self.fabric.remove(agent)
        self._writers.clear()
        self.fabric.forget(self._incarnation)

    def _known(self, peer: Peer) -> FakePeer:
        if not isinstance(peer, FakePeer):
            raise TransferError(f"{self._name}: {peer!r} is not a peer of this backend")
        return peer

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self._name}: the endpoint is closed")
