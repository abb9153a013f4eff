"""An endpoint that tries each data path before it is used first: a row of bytes is written to the target, a note
follows it, and the target looks whether the bytes lie there.

The rows lie in a small area of their own, a region behind the others, which no plan touches. Every pair of agents is
tried once: a path that takes bytes nowhere, or never ends a write, shows when the pair is formed, and not in a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from kvferry.protocol.offer import NOTHING_SAID, Offer
from kvferry.transfer.around import AroundEndpoint
from kvferry.transfer.contract import (
    SELF_TEST,
    Descriptor,
    OnNotify,
    Peer,
    Region,
    RegionKind,
    TransferError,
    WriteOutcome,
    WriteResult,
)
from kvferry.transfer.shared import Area
from kvferry.transfer.spans import make_spans

#: Rows for what comes, and behind them as many for what is sent; tests of different writers don't meet.
ROWS, ROW_BYTES = 512, 32

#: Before a test's note; no msgpack begins so.
_MAGIC = b"\xc1kvferry self-test "

_log = logging.getLogger(__name__)


class SpareRows:
    """The memory of the tests, and the region that it is."""

    def __init__(self) -> None:
        self.area = Area(2 * ROWS * ROW_BYTES)
        self.region = Region(RegionKind.ROWS, SELF_TEST, -1, self.area.base, ROW_BYTES, 2 * ROWS)
        self.rows = np.frombuffer(self.area.buffer, np.uint8, 2 * ROWS * ROW_BYTES).reshape(-1, ROW_BYTES)


class SelfTested(AroundEndpoint):
    """`Endpoint` around `inner`, whose regions end with that of `area`. A path must carry its row within `limit_s`, by
    `sleep`; `at` is where peers reach this process, for people to read. Notifications for `inner` go to `heard`.
    """

    def __init__(
        self, area: SpareRows, on_notify: OnNotify, sleep: Callable[[float], Awaitable[None]], limit_s: float, at: str
    ) -> None:
        self._area, self._on_notify, self._sleep, self._limit_s, self._at = area, on_notify, sleep, limit_s, at
        self._tried: dict[str, asyncio.Task[Peer]] = {}  # by the target's agent
        self.passed = self.failed = 0  # of the tests that have come here

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.inner.regions[:-1]

    def heard(self, agent: str, payload: bytes) -> None:
        """The `on_notify` of `inner`."""
        if not payload.startswith(_MAGIC):
            self._on_notify(agent, payload)
            return
        name = payload[len(_MAGIC) :].decode(errors="replace")
        if np.array_equal(self._area.rows[_slot(name)], _content(name)):
            self.passed += 1
        else:
            self.failed += 1
            _log.error("%s: what %s wrote in its self-test does not lie here", name, agent)

    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor:
        return msgspec.structs.replace(await self.inner.accept(writer, offer), at=self._at)

    async def connect(self, descriptor: Descriptor) -> Peer:
        """Raises TransferError, naming the advertised address, also where the path does not carry the row."""
        peer, name = await self.inner.connect(descriptor), descriptor.agent
        task = self._tried.get(name)
        if task is None or (task.done() and (task.exception() is not None or task.result() is not peer)):
            task = self._tried[name] = asyncio.ensure_future(self._try(peer))
        return await asyncio.shield(task)

    async def _try(self, peer: Peer) -> Peer:
        descriptor = peer.descriptor
        if not descriptor.regions or descriptor.regions[-1].part != SELF_TEST:
            return peer
        slot = _slot(descriptor.agent)
        self._area.rows[ROWS + slot] = _content(descriptor.agent)
        here, there = len(self.inner.regions) - 1, len(descriptor.regions) - 1
        spans = make_spans(here, there, (ROWS + slot) * ROW_BYTES, slot * ROW_BYTES, [ROW_BYTES])
        over = asyncio.Event()
        ended: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()
        self.inner.write(peer, spans, ended.set_result)
        limit = asyncio.ensure_future(self._sleep(self._limit_s))
        limit.add_done_callback(lambda _: over.set())
        ended.add_done_callback(lambda _: over.set())
        await over.wait()
        limit.cancel()
        if ended.done() and ended.result().outcome is WriteOutcome.FLUSHED:
            self.inner.notify(peer, _MAGIC + descriptor.agent.encode())
            return peer
        why = ended.result().error if ended.done() else f"{ROW_BYTES} bytes were not there after {self._limit_s:g} s"
        await self.inner.disconnect(peer)
        text = f"{descriptor.agent}: the data path by {descriptor.backend} to {descriptor.at} does not work: {why}"
        _log.error("%s", text)
        raise TransferError(text)

    async def disconnect(self, peer: Peer) -> None:
        task = self._tried.get(peer.descriptor.agent)
        if task is not None and task.done() and (task.exception() is not None or task.result() is peer):
            del self._tried[peer.descriptor.agent]
        await self.inner.disconnect(peer)


def _slot(agent: str) -> int:
    """The row of a test by an agent's name: those of one process are counted, so few have the same at a time."""
    number = agent.rpartition("-")[2]
    return int(number) % ROWS if number.isdecimal() else 0


def _content(agent: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(hashlib.blake2b(agent.encode(), digest_size=ROW_BYTES).digest(), np.uint8)
