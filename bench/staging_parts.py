"""The two processes of bench/staging.py: the ranks of both sides, and what each does alone.

A request of 1,024 tokens: 32 layers, 8 heads of 128 values of 16 bits, page 16, so 128 MiB; every second page of a pool
belongs to others. All ranks of one side live in one process, and their pools in the same memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import time
from functools import cache
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.blocks import Block
from kvferry.transfer.contract import Endpoint, Peer, Region, RegionKind, WriteResult, encode_descriptor
from kvferry.transfer.huge_pages import private
from kvferry.transfer.page_plan import page_blocks
from kvferry.transfer.pairing import pair_common
from kvferry.transfer.spans import make_spans
from kvferry.transfer.staging.copies import Memory, host_memory
from kvferry.transfer.staging.endpoint import StagingEndpoint, StagingSizes
from kvferry.transfer.staging.pieces import Piece, cut
from kvferry.transfer.ucx import UcxEndpoint

LAYERS, HEADS, HEAD_BYTES, PAGE_TOKENS, TOKENS = 32, 8, 256, 16, 1024
REGIONS, PAGES = 2 * LAYERS, 2 * TOKENS // PAGE_TOKENS
REQUEST_BYTES = REGIONS * TOKENS * HEADS * HEAD_BYTES
#: Source TP and target TP.
LAYOUTS = {"4 to 1": (4, 1), "1 to 4": (1, 4), "equal": (1, 1), "wire": (1, 1)}
#: Those in which ranks hold different heads.
SPLIT = ("4 to 1", "1 to 4")
LIMIT_S = 120.0


#: Pieces that a writer gathers into, and that its ring has room for.
SLOTS, RING = 3, 4


def sizes(piece_mib: float, layout: str, side: str) -> StagingSizes:
    piece = int(piece_mib * (1 << 20))
    writers = LAYOUTS[layout][0] if side == "target" else 0
    return StagingSizes(piece, SLOTS if side == "source" else 0, RING * piece, writers)


def hands(layout: str, tp: int) -> int:
    """Threads that copy: a rank's share of the cores, and one for the wire alone."""
    return 1 if layout == "wire" else max(1, min(2, len(os.sched_getaffinity(0)) // tp))


def regions_of(tp: int, rank: int, base: int) -> tuple[Region, ...]:
    """A rank's K and V of all layers, one behind the other."""
    heads = HEADS // tp
    item = PAGE_TOKENS * heads * HEAD_BYTES
    first = base + rank * REGIONS * PAGES * item
    return tuple(
        Region(RegionKind.PAGES, "kv"[i % 2], i // 2, first + i * PAGES * item, item, PAGES, rank * heads, heads, 16)
        for i in range(REGIONS)
    )


def pages_of(layout: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The request's pages at the source and at the target."""
    random = np.random.default_rng(sorted(LAYOUTS).index(layout))
    count = TOKENS // PAGE_TOKENS
    return random.permutation(PAGES)[:count], random.permutation(PAGES)[:count]


@cache
def blocks_of(layout: str, source: int, target: int) -> tuple[Block, ...]:
    """What source rank `source` writes to target rank `target`; none if they have no heads in common."""
    here, there = LAYOUTS[layout]
    pairing = pair_common(regions_of(here, source, 0), regions_of(there, target, 0))
    return page_blocks(pairing, *pages_of(layout))


class Pool:
    """256 MiB in huge pages where the kernel has them."""

    def __init__(self) -> None:
        size = 2 * REQUEST_BYTES
        self._map = private(size)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.bytes[:] = 0
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def request(self, tp: int, pages: NDArray[np.int64]) -> NDArray[np.uint8]:
        """What the pages hold: [regions, pages, tokens, heads, bytes], heads of all ranks together."""
        shape = (tp, REGIONS, PAGES, PAGE_TOKENS, HEADS // tp, HEAD_BYTES)
        taken = self.bytes[: np.prod(shape)].reshape(shape)[:, :, pages]
        return np.concatenate(list(taken), axis=3)


class Ranks:
    """The ranks of one side in every layout, each an endpoint with staging."""

    def __init__(self, side: str, transports: str, piece_mib: float) -> None:
        self.pool, self.side, self._transports, self._piece_mib = Pool(), side, transports, piece_mib
        self.endpoints: dict[tuple[str, int], StagingEndpoint] = {}
        self.inner: dict[tuple[str, int], UcxEndpoint] = {}
        self.wire_bytes, self._counting = 0, Lock()  # pieces are written by several threads
        for layout, tps in LAYOUTS.items():
            for rank in range(tps[side == "target"]):
                self.endpoints[layout, rank] = self._open(layout, tps[side == "target"], rank)

    def incarnation(self, layout: str, rank: int) -> int:
        return (0x10000 if self.side == "source" else 0x20000) + 16 * list(LAYOUTS).index(layout) + rank

    def _open(self, layout: str, tp: int, rank: int) -> StagingEndpoint:
        loop, incarnation = asyncio.get_running_loop(), self.incarnation(layout, rank)

        def open_inner(regions: tuple[Region, ...], on_notify: Any) -> Endpoint:
            inner = UcxEndpoint(
                regions=regions, incarnation=incarnation, on_notify=on_notify, loop=loop, now_s=time.monotonic,
                transports=self._transports, hands=hands(layout, tp),
            )  # fmt: skip
            self.inner[layout, rank] = inner
            write, write_gathered, notify = inner.write, inner.write_gathered, inner.notify

            def counted(peer: Peer, work: Any, on_end: Any) -> Any:
                spans = np.asarray(work) if isinstance(work, np.ndarray) else np.concatenate([b.spans() for b in work])
                with self._counting:
                    self.wire_bytes += int(spans["length"].sum())
                return write(peer, work, on_end)

            def counted_gathered(peer: Peer, spans: Any, gather: Any, on_end: Any) -> Any:
                with self._counting:
                    self.wire_bytes += int(spans["length"].sum())
                return write_gathered(peer, spans, gather, on_end)

            def said(peer: Peer, payload: bytes) -> None:
                with self._counting:
                    self.wire_bytes += len(payload)
                notify(peer, payload)

            inner.write, inner.notify = counted, said  # type: ignore[method-assign]
            inner.write_gathered = counted_gathered  # type: ignore[method-assign]
            return inner

        return StagingEndpoint(
            open_inner, regions=regions_of(tp, rank, self.pool.base), incarnation=incarnation,
            on_notify=lambda agent, payload: None, loop=loop, now_s=time.monotonic, sleep=asyncio.sleep,
            sizes=sizes(self._piece_mib, layout, self.side),
        )  # fmt: skip

    async def close(self) -> None:
        for endpoint in self.endpoints.values():
            await endpoint.close()


class Copies:
    """One side's copies of a layout alone, on memory of their own beside the pool."""

    def __init__(self, ranks: Ranks, layout: str, piece_mib: float) -> None:
        at = 0 if ranks.side == "source" else 1
        here, there = LAYOUTS[layout]
        tp = LAYOUTS[layout][at]
        self._side, self._size = ranks.side, int(piece_mib * (1 << 20))
        self._memories: list[Memory] = [
            host_memory(regions_of(tp, rank, ranks.pool.base), 2 * self._size) for rank in range(tp)
        ]
        self._pieces: list[tuple[int, Piece]] = []
        for source in range(here):
            for target in range(there):
                for piece in cut(blocks_of(layout, source, target), self._size):
                    self._pieces.append(((source, target)[at], piece))

    def run(self) -> float:
        """Seconds for the whole request, by one thread."""
        begun_s = time.perf_counter()
        for number, (rank, piece) in enumerate(self._pieces):
            offset = number % 2 * self._size
            if self._side == "source":
                self._memories[rank].gather(piece.source, offset, piece.size_bytes)
            else:
                self._memories[rank].scatter(offset, piece.size_bytes, piece.target)
        return time.perf_counter() - begun_s


async def written(endpoint: Endpoint, peer: Peer, work: Any) -> WriteResult:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[WriteResult] = loop.create_future()

    def end(result: WriteResult) -> None:  # an endpoint within a staging one calls it on its own thread
        loop.call_soon_threadsafe(ended.set_result, result)

    endpoint.write(peer, work, end)
    async with asyncio.timeout(LIMIT_S):
        return await ended


def ring_spans(staging_region: int, target_region: int, offset: int, piece_bytes: int, count: int) -> Any:
    """The pieces of a request from staging memory into a ring, as the wire alone has them."""
    at = np.arange(count)
    source, target = at % SLOTS * piece_bytes, offset + at % RING * piece_bytes
    return make_spans(staging_region, target_region, source, target, [piece_bytes] * count)


async def target_process(pipe: Connection, transports: str, piece_mib: float) -> None:
    """Does what the source asks for, a JSON list a message: [command, arguments...]."""
    ranks, loop = Ranks("target", transports, piece_mib), asyncio.get_running_loop()
    copies = {layout: Copies(ranks, layout, piece_mib) for layout in SPLIT}
    pipe.send_bytes(b"ready")
    while True:
        command, *arguments = json.loads(await loop.run_in_executor(None, pipe.recv_bytes))
        answer: Any = None
        if command == "accept":
            layout, rank, writer = arguments
            answer = encode_descriptor(await ranks.endpoints[layout, rank].accept(writer)).hex()
        elif command == "expect":
            layout, change = arguments
            for rank in range(LAYOUTS[layout][1]):
                ranks.endpoints[layout, rank].expect(change)
        elif command == "scatter":
            answer = await loop.run_in_executor(None, copies[arguments[0]].run)
        elif command == "clear":
            ranks.pool.bytes[:] = 0
        elif command == "sum":
            layout = arguments[0]
            held = ranks.pool.request(LAYOUTS[layout][1], pages_of(layout)[1])
            answer = [digest(held), int(np.count_nonzero(ranks.pool.bytes)) - int(np.count_nonzero(held))]
        elif command == "close":
            await ranks.close()
        pipe.send_bytes(json.dumps(answer).encode())
        if command == "close":
            return


def digest(held: NDArray[np.uint8]) -> int:
    """A sum in which every word counts with its place."""
    words = np.ascontiguousarray(held).reshape(-1).view(np.uint64)
    return int((words * np.arange(1, 2 * len(words), 2, dtype=np.uint64)).sum())


def run_target(pipe: Connection, transports: str, piece_mib: float) -> None:
    asyncio.run(target_process(pipe, transports, piece_mib))
