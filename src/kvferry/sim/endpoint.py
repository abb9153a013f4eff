"""The data plane of one simulated process, around its endpoint: what stands still with the process, what lands late.

While its process is stopped nothing is posted and nobody is told of anything. When it goes on it posts what it had to
post, however long that was. A *late* write is one that the hardware has taken: it lands when it does, and a cancel
comes too late for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.actors.inbox import Inbox
from kvferry.sim.network import SimCarrier
from kvferry.transfer.around import AroundEndpoint
from kvferry.transfer.contract import (
    Descriptor,
    Endpoint,
    Peer,
    Region,
    RegionKind,
    Spans,
    TransferError,
    WriteHandle,
    WriteOutcome,
    WriteResult,
)
from kvferry.transfer.flip import byte_at
from kvferry.transfer.lane import Lane
from kvferry.transfer.spans import check_spans, total_bytes
from kvferry.transfer.work import Work, spans_in

#: Changes a bit: an agent's name, the number of a region there, an offset in it. False when the agent is gone.
Flip = Callable[[str, int, int], bool]
#: A target's process and the bytes of a write to it -> the number of the byte that changes, or None for none of it.
Flips = Callable[[int, int], int | None]


@dataclass(frozen=True)
class OpenWrite:
    """A write that has not ended: the processes and the pages at both of its ends. It goes through `agent`."""

    source: int
    target: int
    agent: str
    source_pages: frozenset[int]
    target_pages: frozenset[int]


def pages_of(spans: Spans, side: str, regions: tuple[Region, ...]) -> frozenset[int]:
    """The pages that a span table touches on one side."""
    touched: set[int] = set()
    rows = zip(
        spans[f"{side}_region"].tolist(), spans[f"{side}_offset"].tolist(), spans["length"].tolist(), strict=True
    )
    for index, offset, length in rows:
        region = regions[index]
        if region.kind is RegionKind.PAGES:
            touched.update(range(offset // region.item_bytes, (offset + length - 1) // region.item_bytes + 1))
    return frozenset(touched)


def _garble(spans: Spans, regions: tuple[Region, ...]) -> None:
    """Damage the rows at their source, just before they are written."""
    for span in spans:
        region = regions[int(span["source_region"])]
        if region.kind is RegionKind.ROWS:
            ctypes.memset(region.base + int(span["source_offset"]), 0xFF, 8)


class LateWrite:
    """A write that is held back, or `breaks`; `inner` is the real one once it has been passed on."""

    def __init__(self, spans: Spans, wait_s: float, breaks: bool, on_end: Callable[[WriteResult], None]) -> None:
        self.spans, self.wait_s, self.breaks, self.on_end = spans, wait_s, breaks, on_end
        self.inner: WriteHandle | None = None
        self.result: WriteResult | None = None

    def end(self, result: WriteResult) -> None:
        if self.result is None:
            self.result = result
            self.on_end(result)


class SimEndpoint(AroundEndpoint):
    """`kvferry.transfer.contract.Endpoint`. `late_s` says how late the next write lands, `refuses` that nobody can be
    connected to, `breaks` that writes fail on their way, `garbles` that metadata rows are damaged there. `flips` says
    which byte of the next write changes at its target once it lies there. `open` has the writes that have not ended.
    """

    def __init__(self, inner: Endpoint, process: SimCarrier, incarnation: int, flip: Flip) -> None:
        super().__init__(inner)
        self._process, self._incarnation, self._flip = process, incarnation, flip
        self.late_s: Callable[[], float] | None = None
        self.refuses = self.breaks = self.garbles = False
        self.flips: Flips | None = None
        self.open: dict[int, OpenWrite] = {}
        self._made = 0
        self._lanes: dict[str, Lane[LateWrite]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def connect(self, descriptor: Descriptor) -> Peer:
        if self.refuses:
            raise TransferError(f"{descriptor.agent}: refused by chaos")
        return await super().connect(descriptor)

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        spans, regions, theirs = spans_in(work), self.inner.regions, peer.descriptor
        self._made += 1
        number = self._made

        def ended(result: WriteResult) -> None:
            self.open.pop(number, None)
            if self.flips is not None and result.outcome is WriteOutcome.FLUSHED:
                self._flip_one(self.flips, spans, theirs)
            self._process.do(partial(on_end, result))

        if self.garbles:
            _garble(spans, regions)
        handle: WriteHandle
        lane = self._lanes.get(theirs.agent)
        if self.late_s is None and not self.breaks and (lane is None or not lane.items):
            handle = self.inner.write(peer, spans, ended)
        else:
            check_spans(spans, regions, theirs.regions)
            wait_s = 0.0 if self.late_s is None else self.late_s()
            handle = late = LateWrite(spans, wait_s, self.breaks, ended)
            self._lane(peer).put(late)
        self.open[number] = OpenWrite(
            self._incarnation, theirs.incarnation, theirs.agent,
            pages_of(spans, "source", regions), pages_of(spans, "target", theirs.regions),
        )  # fmt: skip
        return handle

    def _flip_one(self, flips: Flips, spans: Spans, target: Descriptor) -> None:
        at = flips(target.incarnation, total_bytes(spans))
        if at is None:
            return
        span, within = byte_at(spans, at)
        row = spans[span]
        if self._flip(target.agent, int(row["target_region"]), int(row["target_offset"]) + within):
            self.flips = None

    def cancel(self, handle: WriteHandle) -> None:
        if not isinstance(handle, LateWrite):
            self.inner.cancel(handle)
        elif handle.inner is not None:
            self.inner.cancel(handle.inner)

    async def disconnect(self, peer: Peer) -> None:
        self._drop(peer.descriptor.agent)
        await super().disconnect(peer)

    async def close(self) -> None:
        for agent in list(self._lanes):
            self._drop(agent)
        await super().close()

    def _lane(self, peer: Peer) -> Lane[LateWrite]:
        agent = peer.descriptor.agent
        if agent not in self._lanes:
            self._lanes[agent] = Lane(self._process.clock.loop, partial(self._pass_on, peer))
        return self._lanes[agent]

    async def _pass_on(self, peer: Peer, late: LateWrite) -> None:
        if late.wait_s > 0:
            await self._process.clock.sleep(late.wait_s)
        if late.breaks:
            late.end(WriteResult(WriteOutcome.BROKEN, 0, None, "broken by chaos"))
            return
        try:
            late.inner = self.inner.write(peer, late.spans, late.end)
        except TransferError as error:
            late.end(WriteResult(WriteOutcome.BROKEN, 0, None, str(error)))

    def _drop(self, agent: str) -> None:
        lane = self._lanes.pop(agent, None)
        for late in lane.close() if lane is not None else ():
            if late.inner is None:
                late.end(WriteResult(WriteOutcome.BROKEN, 0, None, "disconnected"))


class SimInbox(Inbox):
    """Notifications wait while their process is stopped."""

    def __init__(self, process: SimCarrier) -> None:
        self._process = process

    def __call__(self, agent: str, payload: bytes) -> None:
        if self.deliver is not None:
            self._process.do(partial(self.deliver, agent, payload))
