"""The `ucx` backend: one-sided UCX through NIXL's agent (docs/adr/0001). The loop's side; the agent's is ucx_driver.

Not here: NIXL. An endpoint only checks what it is given, hands commands to its thread, and delivers what returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TypeVar

from kvferry.transfer.contract import (
    Descriptor,
    OnNotify,
    Peer,
    Proofs,
    Region,
    Revoked,
    TransferError,
    WriteHandle,
    WriteResult,
)
from kvferry.transfer.spans import check_spans
from kvferry.transfer.ucx_agent import BACKEND, agent_name, transport
from kvferry.transfer.ucx_driver import Driver
from kvferry.transfer.ucx_peer import UcxPeer, UcxWrite
from kvferry.transfer.work import Work, spans_in

T = TypeVar("T")

_log = logging.getLogger(__name__)


class UcxEndpoint:
    """`Endpoint` over UCX. Raises TransferError when UCX gives no agent over `transports`.

    Over tcp, peers reach it at `host`, an address of this machine, by the device that has it or by `devices`. It has at
    most `max_agents` agents at a time, one for each writer and one for each target; each takes about 10 MB.

    Construction waits for the first agent to start, 0.1 to 1 s: do it in a thread if the loop has other work by then.
    The regions' memory must stay mapped until `close` has returned. A cancelled write that still waits behind
    others ends at once; all other writes to one peer end in order.
    """

    def __init__(
        self,
        *,
        regions: tuple[Region, ...],
        incarnation: int,
        on_notify: OnNotify,
        loop: asyncio.AbstractEventLoop,
        now_s: Callable[[], float],
        transports: str = "host",
        host: str = "127.0.0.1",
        devices: str = "",
        batch_bytes: int = 8 * 1024 * 1024,
        poll_busy_ms: float = 1.0,
        poll_idle_ms: float = 20.0,
        max_agents: int = 256,
    ) -> None:
        self._regions = regions
        self._incarnation = incarnation
        self._name = f"kvferry-{incarnation:016x}"
        self._transports = transports
        self._loop, self._now_s = loop, now_s
        self._closed = False
        self._driver = Driver(
            incarnation=incarnation,
            transports=transports,
            host=host,
            devices=devices,
            batch_bytes=batch_bytes,
            poll_busy_ms=poll_busy_ms,
            poll_idle_ms=poll_idle_ms,
            max_agents=max_agents,
            regions=regions,
            on_notify=on_notify,
            now_s=now_s,
            deliver=self._deliver,
        )
        self._ready: Future[None] = Future()
        self._finished: asyncio.Future[None] = loop.create_future()
        # A daemon, so that a process that ends without `close` is not held up by it.
        self._thread = Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except TransferError:
            self._closed = True
            self._driver.commands.put(self._driver.close)
            self._thread.join()
            raise

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def proofs(self) -> Proofs:
        return transport(self._transports).proofs

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    async def accept(self, writer: int, host: str = "") -> Descriptor:
        self._check_open()
        accepted: asyncio.Future[Descriptor] = self._loop.create_future()
        self._command(partial(self._driver.accept, writer, partial(_settle, accepted)))
        return await accepted

    async def revoke(self, writer: int) -> Revoked | None:
        self._check_open()
        revoked: asyncio.Future[Revoked | None] = self._loop.create_future()
        self._command(partial(self._driver.revoke, writer, partial(_settle, revoked)))
        return await revoked

    async def connect(self, descriptor: Descriptor) -> Peer:
        self._check_open()
        if descriptor.backend != BACKEND:
            raise TransferError(f"{descriptor.agent}: backend is {descriptor.backend!r} there, {BACKEND!r} here")
        if descriptor.agent != agent_name(descriptor.incarnation, descriptor.generation):
            raise TransferError(
                f"agent {descriptor.agent!r} does not belong to incarnation {descriptor.incarnation:016x}, "
                f"generation {descriptor.generation}"
            )
        if descriptor.incarnation == self._incarnation:
            raise TransferError(f"{self._name}: can't connect to itself")
        connected: asyncio.Future[UcxPeer] = self._loop.create_future()
        self._command(partial(self._driver.connect, descriptor, partial(_settle, connected)))
        return await connected

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        self._check_open()
        known = self._known(peer)
        spans = spans_in(work)
        check_spans(spans, self._regions, peer.descriptor.regions)
        write = UcxWrite(spans, on_end, self._now_s())
        self._command(partial(self._driver.write, known, write))
        return write

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._check_open()
        self._command(partial(self._driver.notify, self._known(peer), payload))

    def cancel(self, handle: WriteHandle) -> None:
        if not isinstance(handle, UcxWrite):
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
            self._driver.commands.put(self._driver.close)
        await asyncio.shield(self._finished)  # the thread's last delivery, so all others have come
        self._thread.join()

    def _run(self) -> None:
        self._driver.run(partial(_settle, self._ready))
        self._deliver(partial(_settle, self._finished, None))

    def _known(self, peer: Peer) -> UcxPeer:
        if not isinstance(peer, UcxPeer):
            raise TransferError(f"{self._name}: {peer!r} is not a peer of this backend")
        return peer

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self._name}: the endpoint is closed")

    def _command(self, command: Callable[[], None]) -> None:
        if not self._closed:  # after it, `cancel` and `expect` are late news
            self._driver.commands.put(command)

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
