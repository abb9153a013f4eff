"""The loop's side of a backend whose work is done by a thread of its own: it checks what it is given, hands commands to
that thread, and delivers what returns. What the thread does is the backend's driver (driver.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, ClassVar, Generic, Required, TypedDict, TypeVar

from kvferry.protocol.offer import NOTHING_SAID, Offer
from kvferry.transfer.contract import (
    Descriptor,
    OnNotify,
    Peer,
    Region,
    Revoked,
    TransferError,
    WriteHandle,
    WriteResult,
)
from kvferry.transfer.driver import Driver, DriverParts
from kvferry.transfer.names import check_descriptor
from kvferry.transfer.queued_peer import QueuedPeer
from kvferry.transfer.spans import check_spans
from kvferry.transfer.work import Work, spans_in
from kvferry.transfer.write import Write

T = TypeVar("T")
P = TypeVar("P", bound=QueuedPeer[Any, Any])
W = TypeVar("W", bound=Write)

_log = logging.getLogger(__name__)


class Options(TypedDict, total=False):
    """What every such endpoint takes. Peers reach it at `host`; it has at most `max_agents` agents at a time, one for
    each writer and one for each target, numbered from `generations_from` on, and posts at most `batch_bytes` at a time.
    """

    regions: Required[tuple[Region, ...]]
    incarnation: Required[int]
    on_notify: Required[OnNotify]
    loop: Required[asyncio.AbstractEventLoop]
    now_s: Required[Callable[[], float]]
    transports: str
    host: str
    batch_bytes: int
    max_agents: int
    generations_from: int


class ThreadedEndpoint(Generic[P, W]):
    """`Endpoint` in front of a `Driver`. A subclass names the classes that its driver works with.

    Construction waits until the driver is ready: do it in a thread if the loop has other work by then. Raises
    TransferError when the driver has no agent. The regions' memory must stay mapped until `close` has returned.
    """

    _backend: ClassVar[str]
    _peers: ClassVar[type[Any]]
    _writes: ClassVar[type[Any]]

    def __init__(
        self,
        make_driver: Callable[[DriverParts], Driver[P, W, Any]],
        *,
        regions: tuple[Region, ...],
        incarnation: int,
        on_notify: OnNotify,
        loop: asyncio.AbstractEventLoop,
        now_s: Callable[[], float],
        transports: str = "host",
        host: str = "127.0.0.1",
        batch_bytes: int = 16 * 1024 * 1024,
        max_agents: int = 256,
        generations_from: int = 0,
    ) -> None:
        self._regions, self._incarnation = regions, incarnation
        self._name = f"kvferry-{incarnation:016x}"
        self._loop, self._now_s = loop, now_s
        self._closed = self._told_here = False
        parts = DriverParts(
            regions=regions, incarnation=incarnation, on_notify=on_notify, now_s=now_s, deliver=self._deliver,
            tell=self._tell, transports=transports, host=host, batch_bytes=batch_bytes, max_agents=max_agents,
            generations_from=generations_from,
        )  # fmt: skip
        self._driver = make_driver(parts)
        self._ready: Future[None] = Future()
        self._finished: asyncio.Future[None] = loop.create_future()
        # A daemon, so that a process that ends without `close` is not held up by it.
        self._thread = Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except TransferError:
            self._closed = True
            self._driver.put(self._driver.close)
            self._thread.join()
            raise

    @property
    def backend(self) -> str:
        return self._backend

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor:
        self._check_open()
        accepted: asyncio.Future[Descriptor] = self._loop.create_future()
        self._command(partial(self._driver.accept, writer, partial(_settle, accepted)))
        return await accepted

    async def revoke(self, writer: int) -> Revoked | None:
        self._check_open()
        revoked: asyncio.Future[Revoked | None] = self._loop.create_future()
        self._command(partial(self._driver.revoke, writer, partial(_settle, revoked)))
        return await revoked

    def writer_exited(self, writer: int) -> None:
        """Nothing was laid aside."""

    async def connect(self, descriptor: Descriptor) -> Peer:
        self._check_open()
        check_descriptor(descriptor, self._backend, self._incarnation)
        connected: asyncio.Future[P] = self._loop.create_future()
        self._command(partial(self._driver.connect, descriptor, partial(_settle, connected)))
        return await connected

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        self._check_open()
        known = self._known(peer)
        spans = spans_in(work)
        check_spans(spans, self._regions, peer.descriptor.regions)
        write: W = self._writes(spans, on_end, self._now_s())
        self._driver.submit(known, write)
        return write

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._check_open()
        self._command(partial(self._driver.notify, self._known(peer), payload))

    def cancel(self, handle: WriteHandle) -> None:
        if not isinstance(handle, self._writes):
            raise TransferError(f"{self._name}: {handle!r} is not a write of this backend")
        self._command(partial(self._driver.cancel, handle))

    def expect(self, change: int) -> None:
        self._command(partial(self._driver.expect, change))

    async def disconnect(self, peer: Peer) -> None:
        self._check_open()
        gone: asyncio.Future[None] = self._loop.create_future()
        self._command(partial(self._driver.disconnect, self._known(peer), partial(_settle, gone, None)))
        await gone

    async def close(self) -> None:
        """Deletes the agents on their thread and joins it; unfinished writes have ended BROKEN when this returns."""
        if not self._closed:
            self._closed = True
            self._driver.put(self._driver.close)
        await asyncio.shield(self._finished)  # the thread's last delivery, so all others have come
        self._thread.join()

    def _run(self) -> None:
        self._driver.run(partial(_settle, self._ready))
        self._deliver(partial(_settle, self._finished, None))

    def _known(self, peer: Peer) -> P:
        if not isinstance(peer, self._peers):
            raise TransferError(f"{self._name}: {peer!r} is not a peer of this backend")
        known: P = peer
        return known

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self._name}: the endpoint is closed")

    def _command(self, command: Callable[[], None]) -> None:
        if not self._closed:  # after it, `cancel` and `expect` are late news
            self._driver.put(command)

    @property
    def copies(self) -> bool:
        """To write is to copy: bytes move while one of its own threads does that, and at no other time."""
        return self._driver.copies

    def run_on_thread(self, call: Callable[[], None]) -> None:
        """Have it called on the driver's thread, which waits for it. Can be called from any thread; not called any more
        once the endpoint is closed.
        """
        self._command(call)

    def tell_on_thread(self) -> None:
        """From now on `on_end` and `on_notify` are called on the driver's thread, which must not wait in them. `write`,
        `notify` and `cancel` can be called from any thread.
        """
        self._told_here = True

    def _tell(self, call: Callable[[], None]) -> None:
        if self._told_here:
            call()
        else:
            self._deliver(call)

    def _deliver(self, call: Callable[[], None]) -> None:
        """Called on the driver's thread. A loop that was closed under us has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError as error:
            _log.info("%s: a result was not delivered: %s", self._name, error)


def _settle(future: asyncio.Future[T] | Future[T], answer: T | TransferError) -> None:
    if future.done():  # its waiter was cancelled
        return
    if isinstance(answer, TransferError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
