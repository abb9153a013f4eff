"""What every contender of bench/transfer.py has in common: the pool, the work, and the processes it moves between.

A contender in the usual shape is a subclass of `Ends`: one object of it in a source process and one in a target
process, each with a pool of its own, both alive for the whole run so that the rounds of all contenders can take turns.
A contender that has processes of its own (Ray's) implements `Contender` itself. Either is listed, with its name, in
`transfer.py`.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import multiprocessing
import os
import time
import zlib
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.huge_pages import private

#: K and V of this many layers, each one region.
LAYERS = 32
REGIONS = 2 * LAYERS
#: One request, and what a pool holds: every second page is another request's.
REQUEST_BYTES, POOL_BYTES = 128 * 1024 * 1024, 256 * 1024 * 1024
REGION_BYTES = POOL_BYTES // REGIONS
#: Bytes of a token in one region: 8 heads of 128 in 16 bits.
TOKEN_BYTES = 2048
#: What one round, or an opening, may take before its contender is out.
LIMIT_S = 120.0


class Work(msgspec.Struct, frozen=True):
    """One request: page `source_pages[i]` of every region goes to page `target_pages[i]` of the same region there."""

    page_bytes: int
    source_pages: list[int]
    target_pages: list[int]


def work(page_tokens: int, scattered: bool, seed: int) -> Work:
    """128 MiB in pages of so many tokens: in random places on both sides, or one run on both sides."""
    page_bytes = page_tokens * TOKEN_BYTES
    pool, count = REGION_BYTES // page_bytes, REQUEST_BYTES // REGIONS // page_bytes
    if not scattered:
        return Work(page_bytes, list(range(count)), list(range(pool - count, pool)))
    random = np.random.default_rng(seed)
    return Work(page_bytes, random.permutation(pool)[:count].tolist(), random.permutation(pool)[:count].tolist())


class Pool:
    """64 regions of 4 MiB, one behind the other, in private memory with huge pages where the kernel has them: what a
    pool of KV is to whoever is not told to share it. `bytes`: uint8[POOL_BYTES].
    """

    def __init__(self, memory: Any = None) -> None:
        """`memory`: a writable buffer of POOL_BYTES to use instead."""
        self.bytes: NDArray[np.uint8] = np.frombuffer(private(POOL_BYTES) if memory is None else memory, np.uint8)

    def pages(self, region: int, page_bytes: int) -> NDArray[np.uint8]:
        """One region as uint8[pages, page_bytes], a view."""
        return self.bytes[region * REGION_BYTES : (region + 1) * REGION_BYTES].reshape(-1, page_bytes)

    def base(self, region: int) -> int:
        """The address of a region."""
        return int(self.bytes.ctypes.data) + region * REGION_BYTES

    def fill(self, seed: int) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, POOL_BYTES, np.uint8)

    def stamp(self, round_number: int, page_bytes: int) -> None:
        """Each page says which round it is from and where it lay, so that what an earlier round left is not right."""
        marks = self.bytes.reshape(-1, page_bytes)[:, :8].view(np.uint32)
        marks[:, 0], marks[:, 1] = round_number, np.arange(len(marks))

    def digest(self, page_bytes: int, pages: list[int]) -> int:
        found = 0
        for region in range(REGIONS):
            found = zlib.crc32(self.pages(region, page_bytes)[pages], found)
        return found


class Ends:
    """One end of a contender, in a process of its own: `open`, then rounds, then `close`. A subclass overrides the
    methods; what blocks may block, nothing else runs in that process. Both ends of a pair run at the same time.

    `path` is what the bytes travel by: "host" (any way within one host) or "tcp". `environment` is set before anything
    is imported for it. Between rounds an end must not use the CPU; one that `spins` does, and is stopped.
    """

    path: ClassVar[str] = "host"
    spins: ClassVar[bool] = False
    environment: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.pool = self.make_pool()

    def make_pool(self) -> Pool:
        return Pool()

    async def open_target(self) -> bytes:
        """First of all, in the target process: what the source needs to know."""
        raise NotImplementedError

    async def open_source(self, offer: bytes) -> bytes:
        """Then, in the source process, with what the target said. The answer goes to `connected` at the target."""
        raise NotImplementedError

    async def connected(self, answer: bytes) -> None:
        """Then, at the target."""

    async def send(self, work: Work) -> None:
        """One round at the source. Ends when this end may use the pages again, whatever that is in the API."""
        raise NotImplementedError

    async def receive(self, work: Work) -> None:
        """The same round at the target, at the same time. Ends when all bytes lie in the pool and this end has been
        told so: by a notification, a message or the end of its own receives.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Both ends, at the same time."""


class Contender(Protocol):
    """What bench/transfer.py runs. Nothing here is async. `move` raises when a round fails: the contender is out."""

    name: str
    path: str
    spins: bool

    def open(self) -> None: ...
    def move(self, work: Work) -> float:
        """Seconds of one round, from the source's start until both ends know that all of it lies there."""
        ...

    def is_right(self, work: Work, round_number: int) -> bool:
        """Stamp the source, move once more, compare."""
        ...

    def pids(self) -> tuple[int, int]:
        """Of source and target, for their CPU time."""
        ...

    def close(self) -> None: ...


class Pair:
    """The usual contender: an `Ends` subclass, named "module:Class", with one object of it in each of two processes."""

    def __init__(self, name: str, ends: str) -> None:
        self.name, self._ends = name, ends
        module, _, kind = ends.partition(":")
        found = getattr(importlib.import_module(module), kind)
        self.path, self.spins = found.path, found.spins
        self._sides: dict[str, tuple[Any, Connection]] = {}

    def open(self) -> None:
        context = multiprocessing.get_context("spawn")
        for side in ("source", "target"):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(self._ends, theirs), name=f"{self.name}-{side}")
            process.start()
            theirs.close()
            self._sides[side] = process, ours
        for side in self._sides:
            self._answer(side)  # it is up
        offer = self._ask("target", "open_target")
        self._ask("target", "connected", self._ask("source", "open_source", offer))

    def move(self, work: Work) -> float:
        self._tell("target", "receive", work)
        self._tell("source", "send", work)
        (began_s, sent_s, _), (_, came_s, _) = self._times("source"), self._times("target")
        return max(sent_s, came_s) - began_s

    def is_right(self, work: Work, round_number: int) -> bool:
        self._ask("source", "stamp", round_number, work.page_bytes)
        self.move(work)
        there = self._ask("target", "digest", work.page_bytes, work.target_pages)
        return bool(self._ask("source", "digest", work.page_bytes, work.source_pages) == there)

    def pids(self) -> tuple[int, int]:
        source, target = (self._sides[side][0].pid for side in ("source", "target"))
        return source, target

    def close(self) -> None:
        for side in self._sides:
            self._tell(side, "close")
        for process, connection in self._sides.values():
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        self._sides = {}

    def _tell(self, side: str, *call: Any) -> None:
        try:
            self._sides[side][1].send(call)
        except OSError as error:
            raise RuntimeError(f"{self.name}: the {side} has ended: {error}") from None

    def _times(self, side: str) -> tuple[float, float, Any]:
        """When the call began and ended there, by the clock that all processes of one host share, and its result."""
        process, connection = self._sides[side]
        if not connection.poll(LIMIT_S):
            raise RuntimeError(f"{self.name}: the {side} has not answered within {LIMIT_S:g} s")
        try:
            began_s, ended_s, result, error = connection.recv()
        except EOFError:
            process.join(10)
            raise RuntimeError(f"{self.name}: the {side} has ended with {process.exitcode}") from None
        if error:
            raise RuntimeError(f"{self.name}: the {side}: {error}")
        return began_s, ended_s, result

    def _answer(self, side: str) -> Any:
        return self._times(side)[2]

    def _ask(self, side: str, *call: Any) -> Any:
        self._tell(side, *call)
        return self._answer(side)


def _serve(ends: str, connection: Connection) -> None:
    """The life of one end's process."""
    module, _, kind = ends.partition(":")
    found = getattr(importlib.import_module(module), kind)
    os.environ.update(found.environment)
    asyncio.run(_calls(found, connection))


async def _calls(kind: type[Ends], connection: Connection) -> None:
    ends = kind()
    ends.pool.fill(os.getpid())
    own = {"stamp": ends.pool.stamp, "digest": ends.pool.digest}
    connection.send((0.0, 0.0, None, ""))
    while True:
        try:
            name, *arguments = await asyncio.to_thread(connection.recv)
        except EOFError:
            return
        began_s, result, error = time.monotonic(), None, ""
        try:
            result = own[name](*arguments) if name in own else await getattr(ends, name)(*arguments)
        except Exception as failure:  # noqa: BLE001  (it ends this contender and no other)
            error = f"{type(failure).__name__}: {failure}"
        ended_s = time.monotonic()
        if name == "close":
            return
        connection.send((began_s, ended_s, result, error))


def memmove() -> Any:
    """The C library's, called without the GIL: (target address, source address, bytes)."""
    call = ctypes.CDLL(None).memmove
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
    return call
