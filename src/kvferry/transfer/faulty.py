"""The `faulty` decorator: any endpoint, with writes that come late, never, after an abort, or not as they were. For
fault runs and tests.

A delayed wire is a serial resource: writes to one peer are passed on in order, and the delay of each starts when
it is issued or when the one before it was passed on, whichever is later. Notifications keep their place in that
order and have no delay of their own. A write that is cancelled during its delay ends at once, but the wire stays
taken until the delay is over.

A *late write* is one that was cancelled before it was passed on and is passed on all the same, later: a real write of
the real backend, which lands after the room was aborted, beside the lane and so in any order. It has not ended before
it has landed, as the contract says; so what it shows is whether anybody acts as if it had.

A *flipped* write is followed by another real one, of one byte, which changes what lies at the target; the write ends
when both have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from kvferry.transfer.around import AroundEndpoint
from kvferry.transfer.contract import (
    Endpoint,
    Peer,
    TransferError,
    WriteHandle,
    WriteOutcome,
    WriteResult,
)
from kvferry.transfer.flip import flipping
from kvferry.transfer.lane import Lane
from kvferry.transfer.spans import total_bytes
from kvferry.transfer.work import Work, check_work, spans_in

_log = logging.getLogger(__name__)


class Faults(Protocol):
    """What this needs of `kvferry.actors.settings.FaultSettings`, which lies above this package."""

    @property
    def delay_ms(self) -> float: ...
    @property
    def stall_after(self) -> int: ...
    @property
    def late_after_abort_ms(self) -> float: ...
    @property
    def flip_after(self) -> int: ...


def with_faults(
    inner: Endpoint,
    faults: Faults,
    *,
    sleep: Callable[[float], Awaitable[None]],
    loop: asyncio.AbstractEventLoop,
    cancel_ends: bool = True,
) -> Endpoint:
    """`inner` with the faults that are configured; itself when there are none."""
    counted = faults.stall_after >= 0 or faults.flip_after >= 0
    if faults.delay_ms <= 0 and faults.late_after_abort_ms <= 0 and not counted:
        return inner
    return FaultyEndpoint(
        inner,
        delay_s=faults.delay_ms / 1000,
        stall_after=faults.stall_after,
        late_after_abort_s=faults.late_after_abort_ms / 1000,
        flip_after=faults.flip_after,
        sleep=sleep,
        loop=loop,
        cancel_ends=cancel_ends,
    )


class HeldWrite:
    """A write that may not have been passed on yet; `inner` is the real one once it has. `late`: it is still to come,
    though it was cancelled.
    """

    def __init__(
        self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None], stalls: bool, flips: bool = False
    ) -> None:
        self.peer = peer
        self.work = work
        self.stalls, self.flips = stalls, flips
        self.cancelled = False
        self.late: asyncio.Task[None] | None = None
        self.released = asyncio.Event()
        self.inner: WriteHandle | None = None
        self.ending = False
        self._result: WriteResult | None = None
        self._on_end = on_end

    @property
    def result(self) -> WriteResult | None:
        return self._result

    def end(self, result: WriteResult) -> None:
        self._result = result
        self._on_end(result)


class FaultyEndpoint(AroundEndpoint):
    """`Endpoint` around another one.

    Each write is held for `delay_s`. After `stall_after` writes (-1: never) one stalls before it is posted, until
    `release_stalled`. Cancelling a stalled write ends it at once, or with `cancel_ends=False` only when it is
    released: the writer that never answers. With `late_after_abort_s` (0: no), a write that is cancelled before it was
    passed on is passed on so much later, whole, and ends as the real one does. After `flip_after` writes (-1: never)
    one has its middle byte changed at the target.
    """

    def __init__(
        self,
        inner: Endpoint,
        *,
        delay_s: float,
        stall_after: int,
        sleep: Callable[[float], Awaitable[None]],
        loop: asyncio.AbstractEventLoop,
        late_after_abort_s: float = 0.0,
        flip_after: int = -1,
        cancel_ends: bool = True,
    ) -> None:
        super().__init__(inner)
        self._delay_s = delay_s
        self._stall_after = stall_after
        self._sleep = sleep
        self._loop = loop
        self._late_s = late_after_abort_s
        self._flip_after = flip_after
        self._cancel_ends = cancel_ends
        self._issued = 0
        self._lanes: dict[Peer, Lane[HeldWrite | bytes]] = {}
        self._late: set[HeldWrite] = set()
        self._closed = False

    @property
    def stalled(self) -> int:
        """Writes that wait for `release_stalled`, or will when their delay is over."""
        return len(self._stalled())

    @property
    def late(self) -> int:
        """Writes that were cancelled and will be passed on all the same."""
        return len(self._late)

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        self._check_open()
        check_work(work, self.inner.regions, peer.descriptor.regions)
        stalls, flips = self._issued == self._stall_after, self._issued == self._flip_after
        held = HeldWrite(peer, work, on_end, stalls, flips)
        self._issued += 1
        self._lane(peer).put(held)
        return held

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._check_open()
        self._lane(peer).put(payload)

    def cancel(self, handle: WriteHandle) -> None:
        if not isinstance(handle, HeldWrite):
            raise TransferError(f"{self.backend}: {handle!r} is not a write of this endpoint")
        handle.cancelled = True
        if handle.inner is not None:
            self.inner.cancel(handle.inner)
        elif self._late_s > 0:
            self._write_late(handle)
        elif self._cancel_ends or not handle.stalls:
            self._end(handle, WriteOutcome.CANCELLED)

    def release_stalled(self) -> None:
        """What stalls goes on: posted, or ended if it has been cancelled."""
        for held in self._stalled():
            held.stalls = False
            held.released.set()

    async def disconnect(self, peer: Peer) -> None:
        self._check_open()
        self._drop(peer, "disconnected")
        await super().disconnect(peer)

    async def close(self) -> None:
        self._closed = True
        for peer in list(self._lanes):
            self._drop(peer, "the endpoint is closed")
        await super().close()
        await asyncio.sleep(0)  # `on_end` of what just ended, before this returns

    def _lane(self, peer: Peer) -> Lane[HeldWrite | bytes]:
        if peer not in self._lanes:

            async def pass_on(work: HeldWrite | bytes) -> None:
                await self._pass_on(peer, work)

            self._lanes[peer] = Lane(self._loop, pass_on)
        return self._lanes[peer]

    async def _pass_on(self, peer: Peer, work: HeldWrite | bytes) -> None:
        if isinstance(work, bytes):
            try:
                self.inner.notify(peer, work)
            except TransferError as error:  # the endpoint has ended meanwhile, and notifications with it
                _log.info("a notification was dropped: %s", error)
            return
        if work.ending or work.late:
            return
        if self._delay_s > 0:
            await self._sleep(self._delay_s)
        if work.stalls and not work.ending and not work.late:
            await work.released.wait()
        if work.late:
            return
        if work.cancelled:
            self._end(work, WriteOutcome.CANCELLED)
        if not work.ending:
            self._issue(work)

    def _issue(self, work: HeldWrite) -> None:
        try:
            on_end = partial(self._flip, work) if work.flips else work.end
            work.inner = self.inner.write(work.peer, work.work, on_end)
        except TransferError as error:
            self._end(work, WriteOutcome.BROKEN, str(error))

    def _flip(self, work: HeldWrite, result: WriteResult) -> None:
        """The write has ended: change a byte of it where it lies, and only then say so."""
        spans = spans_in(work.work)
        flipped = flipping(spans, self.inner.regions, total_bytes(spans) // 2)
        if result.outcome is not WriteOutcome.FLUSHED or self._closed or flipped is None:
            work.end(result)
            return
        _log.info("a byte of a write of %d spans is changed at its target", len(spans))
        try:
            work.inner = self.inner.write(work.peer, flipped, lambda _: work.end(result))
        except TransferError as error:
            work.end(WriteResult(WriteOutcome.BROKEN, result.size_bytes, result.wire_s, str(error)))

    def _write_late(self, held: HeldWrite) -> None:
        if held.ending or held.late:
            return

        async def later() -> None:
            await self._sleep(self._late_s)
            self._late.discard(held)
            if not held.ending:
                _log.info("a cancelled write of %d bytes is issued late", total_bytes(spans_in(held.work)))
                self._issue(held)

        self._late.add(held)
        held.late = self._loop.create_task(later())
        held.released.set()

    def _stalled(self) -> list[HeldWrite]:
        held = [work for lane in self._lanes.values() for work in lane.items if isinstance(work, HeldWrite)]
        return [work for work in held if work.stalls and not work.ending]

    def _drop(self, peer: Peer, why: str) -> None:
        for held in [held for held in self._late if held.peer is peer]:
            self._late.discard(held)
            if held.late is not None:
                held.late.cancel()
            self._end(held, WriteOutcome.BROKEN, why)
        lane = self._lanes.pop(peer, None)
        for work in lane.close() if lane is not None else ():
            if isinstance(work, HeldWrite) and work.inner is None:
                self._end(work, WriteOutcome.BROKEN, why)

    def _end(self, held: HeldWrite, outcome: WriteOutcome, error: str = "") -> None:
        """End a write of which nothing was posted."""
        if held.ending:
            return
        held.ending = True
        held.released.set()
        self._loop.call_soon(held.end, WriteResult(outcome, 0, None, error))

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self.backend}: the endpoint is closed")
