"""The data plane of an explored process: what it is asked is noted, and writes end when the explorer says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.protocol.metadata import ROW_BYTES, Metadata
from kvferry.protocol.offer import NOTHING_SAID, Offer
from kvferry.sim.explore.effects import Handle, Notify, Post, Surroundings
from kvferry.sim.explore.fakes import PAGE_BYTES, LabelEngine
from kvferry.transfer.contract import (
    Descriptor,
    Peer,
    Proofs,
    Region,
    RegionKind,
    Revoked,
    WriteHandle,
    WriteOutcome,
    WriteResult,
)
from kvferry.transfer.work import Work, spans_in


class NotedPeer:
    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor


@dataclass(eq=False)
class NotedWrite:
    """A write that ends when the explorer says so."""

    post: Post
    on_end: Callable[[WriteResult], None]
    cancelled: bool = False
    result: WriteResult | None = None

    def end(self, outcome: WriteOutcome) -> None:
        self.result = WriteResult(outcome, 0, None, "" if outcome is not WriteOutcome.BROKEN else "the path broke")
        self.on_end(self.result)


class NotingEndpoint:
    """`kvferry.transfer.contract.Endpoint`: what it is asked is noted.

    `lanes` are the writes that have not ended, by target and agent; of each lane the first is posted, the others wait
    for it. `late` are writes that have ended broken: nobody can say what landed, so they may land until the process
    ends or, where targets take part, the agent. `agents`: there, the generation of each writer's agent.
    """

    backend = "explored"

    def __init__(self, around: Surroundings, engine: LabelEngine, incarnation: int, proofs: Proofs) -> None:
        self._around, self._engine, self._incarnation, self.proofs = around, engine, incarnation, proofs
        self._numbers: dict[int, int] = {}
        self.lanes: dict[tuple[int, int], list[NotedWrite]] = {}
        self.late: list[Post] = []
        self.expecting = 0
        self.agents: dict[int, int] = {}
        self.generation = 0

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._engine.regions()

    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor:
        generation = writer
        if self.proofs.revoked:
            if writer not in self.agents:
                self.generation += 1
                self.agents[writer] = self.generation
            generation = self.agents[writer]
        agent = f"explored-{self._incarnation:x}-{writer:x}-{generation:x}"
        return Descriptor(self.backend, agent, self._incarnation, generation, b"", self.regions, self.proofs)

    async def revoke(self, writer: int) -> Revoked | None:
        """Where writers reach memory by themselves it proves nothing."""
        generation = self.agents.pop(writer, None)
        return None if generation is None else Revoked(writer, generation)

    def writer_exited(self, writer: int) -> None:
        """Nothing was laid aside."""

    async def connect(self, descriptor: Descriptor) -> Peer:
        return NotedPeer(descriptor)

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        spans = spans_in(work)
        pages: list[tuple[int, int, int, Any]] = []
        rows: list[tuple[int, bytes]] = []
        regions = self._engine.regions()
        for source, _, at, to, length in spans.tolist():
            if regions[source].kind is RegionKind.ROWS:
                rows.append((to // ROW_BYTES, bytes(self._engine.rows[at // ROW_BYTES])))
                continue
            layer = regions[source].layer
            for item in range(length // PAGE_BYTES):
                page = at // PAGE_BYTES + item
                pages.append((layer, page, to // PAGE_BYTES + item, self._engine.labels.get((layer, page))))
        room = pages[0][3].room if pages else Metadata.unpack(memoryview(rows[0][1])).room
        number = self._numbers[room] = self._numbers.get(room, 0) + 1
        lane = peer.descriptor.incarnation, peer.descriptor.generation
        write = NotedWrite(Post((room, number), lane[0], room, tuple(pages), tuple(rows), lane[1]), on_end)
        self.lanes.setdefault(lane, []).append(write)
        return write

    def ended(self, handle: Handle, outcome: WriteOutcome) -> None:
        """The explorer ends a write."""
        for where, lane in self.lanes.items():
            for write in lane:
                if write.post.handle == handle:
                    lane.remove(write)
                    if not lane:
                        del self.lanes[where]
                    if outcome is WriteOutcome.BROKEN:
                        self.late.append(write.post)
                    return write.end(outcome)
        raise AssertionError(f"there is no write {handle}")

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._around.note(Notify(peer.descriptor.incarnation, payload))

    def cancel(self, handle: WriteHandle) -> None:
        assert isinstance(handle, NotedWrite)
        handle.cancelled = True

    def expect(self, change: int) -> None:
        self.expecting += change

    async def disconnect(self, peer: Peer) -> None:
        """Unfinished writes end broken: by the explorer, where their target has ended. Where it takes part, now: what
        was posted may still land, though nothing reads its source any more.
        """
        if self.proofs.revoked:
            lane = self.lanes.pop((peer.descriptor.incarnation, peer.descriptor.generation), [])
            self.late += [write.post for write in lane[:1]]
            for write in lane:
                write.end(WriteOutcome.BROKEN)

    async def close(self) -> None:
        """Nothing to end."""
