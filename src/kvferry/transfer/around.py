"""The base of what stands around another endpoint: it passes everything on, and subclasses change what they are for."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.protocol.offer import NOTHING_SAID, Offer
from kvferry.transfer.contract import (
    Descriptor,
    Endpoint,
    Peer,
    Region,
    Revoked,
    WriteHandle,
    WriteResult,
)
from kvferry.transfer.work import Work


class AroundEndpoint:
    """`kvferry.transfer.contract.Endpoint` that is `inner`."""

    def __init__(self, inner: Endpoint) -> None:
        self.inner = inner

    @property
    def backend(self) -> str:
        return self.inner.backend

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.inner.regions

    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor:
        return await self.inner.accept(writer, offer)

    async def revoke(self, writer: int) -> Revoked | None:
        return await self.inner.revoke(writer)

    def writer_exited(self, writer: int) -> None:
        self.inner.writer_exited(writer)

    async def connect(self, descriptor: Descriptor) -> Peer:
        return await self.inner.connect(descriptor)

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        return self.inner.write(peer, work, on_end)

    def notify(self, peer: Peer, payload: bytes) -> None:
        self.inner.notify(peer, payload)

    def cancel(self, handle: WriteHandle) -> None:
        self.inner.cancel(handle)

    def expect(self, change: int) -> None:
        self.inner.expect(change)

    async def disconnect(self, peer: Peer) -> None:
        await self.inner.disconnect(peer)

    async def close(self) -> None:
        await self.inner.close()
