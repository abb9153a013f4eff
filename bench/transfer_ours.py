"""Our own backends as contenders of bench/transfer.py, and the limits that they are measured against."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import time
from typing import Any, ClassVar

import msgspec
import numpy as np
from transfer_parts import POOL_BYTES, REGION_BYTES, REGIONS, TOKEN_BYTES, Ends, Pool, Work, memmove

from kvferry.transfer.contract import (
    Endpoint,
    Peer,
    Region,
    RegionKind,
    WriteOutcome,
    WriteResult,
    decode_descriptor,
    encode_descriptor,
)
from kvferry.transfer.local import LocalEndpoint
from kvferry.transfer.mooncake import MooncakeEndpoint
from kvferry.transfer.plan import Pairing, pair, plan_pages
from kvferry.transfer.shared import Area
from kvferry.transfer.ucx import UcxEndpoint
from kvferry.transfer.ucxx import UcxxEndpoint

SOURCE, TARGET = 0xA, 0xB


def regions(pool: Pool) -> tuple[Region, ...]:
    """The pool in pages of one token, so that pages of any size are whole items of it."""
    kind, pages = RegionKind.PAGES, REGION_BYTES // TOKEN_BYTES
    return tuple(Region(kind, "kv"[i % 2], i // 2, pool.base(i), TOKEN_BYTES, pages, 0, 8) for i in range(REGIONS))


class Ours(Ends):
    """Through the contract, as the actors use it. A subclass makes the endpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: asyncio.Queue[bytes] = asyncio.Queue()
        self.endpoint: Endpoint
        self.peer: Peer
        self._pairings: dict[int, Pairing] = {}
        self._there: tuple[Region, ...] = ()

    def endpoint_of(self, **options: Any) -> Endpoint:
        raise NotImplementedError

    def _open(self, incarnation: int) -> None:
        self.endpoint = self.endpoint_of(
            regions=regions(self.pool),
            incarnation=incarnation,
            on_notify=lambda agent, payload: self.notes.put_nowait(payload),
            loop=asyncio.get_running_loop(),
            now_s=time.monotonic,
        )

    async def open_target(self) -> bytes:
        self._open(TARGET)
        return encode_descriptor(await self.endpoint.accept(SOURCE))

    async def open_source(self, offer: bytes) -> bytes:
        self._open(SOURCE)
        descriptor = decode_descriptor(offer)
        self._there = descriptor.regions
        self.peer = await self.endpoint.connect(descriptor)
        return b""

    def _pairing(self, page_bytes: int) -> Pairing:
        """Made once per pair of layouts, as by the actors."""
        found = self._pairings.get(page_bytes)
        if found is None:
            ours, theirs = (
                [msgspec.structs.replace(r, item_bytes=page_bytes, items=REGION_BYTES // page_bytes) for r in side]
                for side in (self.endpoint.regions, self._there)
            )
            found = self._pairings[page_bytes] = pair(ours, theirs)
        return found

    async def send(self, work: Work) -> None:
        spans = plan_pages(self._pairing(work.page_bytes), np.array(work.source_pages), np.array(work.target_pages))
        ended: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()
        self.endpoint.write(self.peer, spans, ended.set_result)
        result = await ended
        if result.outcome is not WriteOutcome.FLUSHED:
            raise RuntimeError(result.error)
        self.endpoint.notify(self.peer, b"all of it")

    async def receive(self, work: Work) -> None:
        self.endpoint.expect(+1)
        await self.notes.get()
        self.endpoint.expect(-1)

    async def close(self) -> None:
        await self.endpoint.close()


class Local(Ours):
    def make_pool(self) -> Pool:
        self.area = Area(POOL_BYTES)
        return Pool(self.area.buffer)

    def endpoint_of(self, **options: Any) -> Endpoint:
        return LocalEndpoint(areas=[self.area], **options)


class Ucx(Ours):
    transports: ClassVar[str] = "host"

    def endpoint_of(self, **options: Any) -> Endpoint:
        return UcxEndpoint(transports=self.transports, **options)


class UcxTcp(Ucx):
    path = "tcp"
    transports = "tcp"


class Ucxx(Ours):
    path = "tcp"

    def endpoint_of(self, **options: Any) -> Endpoint:
        return UcxxEndpoint(**options)


class Mooncake(Ours):
    path = "tcp"

    def endpoint_of(self, **options: Any) -> Endpoint:
        return MooncakeEndpoint(**options)


# --- limits ------------------------------------------------------------------------------------------------


class Memmove(Ends):
    """One process, one memmove per page, between two pools with huge pages: nothing is told to anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Pool()
        self.call = memmove()

    async def open_target(self) -> bytes:
        return b""

    async def open_source(self, offer: bytes) -> bytes:
        self.other.fill(1)
        return b""

    async def send(self, work: Work) -> None:
        size, call = work.page_bytes, self.call
        sources, targets = np.array(work.source_pages) * size, np.array(work.target_pages) * size
        for region in range(REGIONS):
            here, there = self.pool.base(region), self.other.base(region)
            for source, target in zip((sources + here).tolist(), (targets + there).tolist(), strict=True):
                call(target, source, size)

    async def receive(self, work: Work) -> None:
        """The other process has no part in it."""


class ProcessCopy(Ends):
    """process_vm_writev into the other process, as many pages a call as it takes."""

    async def open_target(self) -> bytes:
        return msgspec.msgpack.encode((os.getpid(), self.pool.base(0)))

    async def open_source(self, offer: bytes) -> bytes:
        self.pid, self.there = msgspec.msgpack.decode(offer)
        self.call: Any = ctypes.CDLL(None, use_errno=True).process_vm_writev
        self.call.restype = ctypes.c_ssize_t
        return b""

    async def send(self, work: Work) -> None:
        here, there = areas(self.pool.base(0), work.page_bytes, work.source_pages), areas(
            self.there, work.page_bytes, work.target_pages
        )  # fmt: skip
        for first in range(0, len(here), 1024):
            some = [ctypes.c_void_p(side[first:].ctypes.data) for side in (here, there)]
            count = len(here[first : first + 1024])
            moved = self.call(self.pid, some[0], count, some[1], count, 0)
            if moved != count * work.page_bytes:
                raise OSError(ctypes.get_errno(), f"process_vm_writev: {moved} bytes")

    async def receive(self, work: Work) -> None:
        """The other process has no part in it."""


def areas(base: int, page_bytes: int, pages: list[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """struct iovec of each page of each region."""
    found = np.empty((REGIONS, len(pages), 2), np.uint64)
    found[:, :, 0] = base + np.arange(REGIONS)[:, None] * REGION_BYTES + np.array(pages) * page_bytes
    found[:, :, 1] = page_bytes
    return found.reshape(-1, 2)


class RawSocket(Ends):
    """One TCP connection on the loopback device: sendmsg from the pages, recvmsg_into the pages, blocking."""

    path = "tcp"

    async def open_target(self) -> bytes:
        self.listener = socket.create_server(("127.0.0.1", 0))
        return str(self.listener.getsockname()[1]).encode()

    async def open_source(self, offer: bytes) -> bytes:
        self.stream = socket.create_connection(("127.0.0.1", int(offer)))
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return b""

    async def connected(self, answer: bytes) -> None:
        self.stream, _ = self.listener.accept()
        self.listener.close()

    def _views(self, page_bytes: int, pages: list[int]) -> list[memoryview]:
        return [self.pool.pages(r, page_bytes)[page].data for r in range(REGIONS) for page in pages]

    async def send(self, work: Work) -> None:
        move(self.stream.sendmsg, self._views(work.page_bytes, work.source_pages))
        if self.stream.recv(1) != b"k":
            raise ConnectionError("the target has ended")

    async def receive(self, work: Work) -> None:
        move(lambda some: self.stream.recvmsg_into(some)[0], self._views(work.page_bytes, work.target_pages))
        self.stream.sendall(b"k")

    async def close(self) -> None:
        self.stream.close()


def move(call: Any, views: list[memoryview]) -> None:
    """All of the views by calls that take up to 256 of them and may move less."""
    first = 0
    while first < len(views):
        moved = call(views[first : first + 256])
        if not moved:
            raise ConnectionError("the other end has gone")
        while first < len(views) and moved >= len(views[first]):
            moved -= len(views[first])
            first += 1
        if moved:
            views[first] = views[first][moved:]
