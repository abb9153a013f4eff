"""What bench/transfer.py measures us against: the peers' own APIs, each used the best way that was found.

NIXL: descriptor lists prepared once, a window of posted handles, its progress thread off; and as its examples use it.
UCXX: tag messages of 2 MiB, gathered and scattered, since one message a page is six times slower. Mooncake: batches of
1,024 blocks, and single transfers with its options set. Ray: a gathered array through the object store; through Direct
Transport a gathered tensor, and the pages as they lie, both between registered tensors.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import numpy as np
from transfer_parts import POOL_BYTES, REGION_BYTES, REGIONS, Contender, Ends, Pair, Work

#: Bytes of a UCXX message and messages under way; blocks of a Mooncake batch (4,096 fail).
MESSAGE_BYTES, MESSAGES = 2 * 1024 * 1024, 4
BLOCKS = 1024
#: Mooncake's single transfers under way, and what neighbours are merged to at most.
TRANSFERS, MERGED_BYTES = 128, 1024 * 1024


def blocks(pages: list[int], page_bytes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers of these pages of every region, in a pool cut into pages."""
    per_region = REGION_BYTES // page_bytes
    return (np.arange(REGIONS)[:, None] * per_region + np.array(pages)).reshape(-1)


class Nixl(Ends):
    """Prepared lists and windows."""

    progress_thread = False
    #: Pages of one handle, and handles posted at a time. Where a post is the copy itself, a second one gains nothing.
    pages, handles = 256, 1

    def __init__(self) -> None:
        super().__init__()
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(enable_prog_thread=self.progress_thread))
        self.registration = self.agent.register_memory(self.rows(POOL_BYTES, self.pool.base(0)), "DRAM")
        self.peer, self.there, self.lists = "", 0, dict[int, tuple[Any, Any]]()

    @staticmethod
    def rows(page_bytes: int, base: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Every page of a pool at `base`: (address, length, device)."""
        rows = np.zeros((POOL_BYTES // page_bytes, 3), np.uint64)
        rows[:, 0] = base + np.arange(len(rows)) * page_bytes
        rows[:, 1] = page_bytes
        return rows

    async def open_target(self) -> bytes:
        return msgspec.msgpack.encode((bytes(self.agent.get_agent_metadata()), self.pool.base(0)))

    async def open_source(self, offer: bytes) -> bytes:
        metadata, self.there = msgspec.msgpack.decode(offer)
        self.peer = self.agent.add_remote_agent(metadata)
        return bytes(self.agent.get_agent_metadata())

    async def connected(self, answer: bytes) -> None:
        self.agent.add_remote_agent(answer)

    async def send(self, work: Work) -> None:
        if work.page_bytes not in self.lists:
            self.lists[work.page_bytes] = (
                self.agent.prep_xfer_dlist("", self.rows(work.page_bytes, self.pool.base(0)), "DRAM"),
                self.agent.prep_xfer_dlist(self.peer, self.rows(work.page_bytes, self.there), "DRAM"),
            )
        ours, theirs = self.lists[work.page_bytes]
        source, target = blocks(work.source_pages, work.page_bytes), blocks(work.target_pages, work.page_bytes)
        posted: deque[Any] = deque()
        for first in range(0, len(source), self.pages):
            some = slice(first, first + self.pages)
            handle = self.agent.make_prepped_xfer("WRITE", ours, source[some], theirs, target[some])
            if self.agent.transfer(handle) == "DONE":
                self.agent.release_xfer_handle(handle)
            else:
                posted.append(handle)
            while len(posted) >= self.handles:
                self.reap(posted)
        while posted:
            self.reap(posted)
        self.agent.send_notif(self.peer, b"all of it")
        self.agent.get_new_notifs()

    def reap(self, posted: deque[Any]) -> None:
        if self.agent.check_xfer_state(posted[0]) == "DONE":
            self.agent.release_xfer_handle(posted.popleft())

    async def receive(self, work: Work) -> None:
        while not self.agent.get_new_notifs():
            await asyncio.sleep(0.0005)

    async def close(self) -> None:
        for pair in self.lists.values():
            for prepared in pair:
                self.agent.release_dlist_handle(prepared)
        self.agent.agent = None


class NixlTcp(Nixl):
    path: ClassVar[str] = "tcp"
    environment: ClassVar[dict[str, str]] = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    pages, handles = 32, 8


class NixlDefault(Nixl):
    """As its examples use it: the progress thread on, one transfer of all pages, with its notification."""

    progress_thread = True
    spins: ClassVar[bool] = True

    async def send(self, work: Work) -> None:
        source, target = (self.rows(work.page_bytes, base) for base in (self.pool.base(0), self.there))
        here = self.agent.get_xfer_descs(source[blocks(work.source_pages, work.page_bytes)], "DRAM")
        there = self.agent.get_xfer_descs(target[blocks(work.target_pages, work.page_bytes)], "DRAM")
        handle = self.agent.initialize_xfer("WRITE", here, there, self.peer, b"all of it")
        state = self.agent.transfer(handle)
        while state != "DONE":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)


class Ucxx(Ends):
    """Its low-level API, driven by us. Without error handling: with it, UCX gives tag messages nothing but tcp."""

    options: ClassVar[dict[str, str]] = {"TLS": "cma,tcp,self", "NET_DEVICES": "lo", "RNDV_THRESH": "32768"}

    def __init__(self) -> None:
        super().__init__()
        import ucxx._lib.libucxx as api
        from ucxx._lib.arr import Array

        self.api, self.array = api, Array
        self.context = api.UCXContext(self.options, (api.Feature.TAG, api.Feature.WAKEUP))
        self.worker, self.peer = api.UCXWorker(self.context), None
        self.buffers = [np.zeros(MESSAGE_BYTES, np.uint8) for _ in range(MESSAGES)]

    def connect(self, address: bytes) -> None:
        there = self.api.UCXAddress.create_from_buffer(np.frombuffer(address, np.uint8).copy())
        self.peer = self.worker.create_endpoint_from_worker_address(there, False)

    async def open_target(self) -> bytes:
        return bytes(memoryview(self.worker.address))

    async def open_source(self, offer: bytes) -> bytes:
        self.connect(offer)
        return bytes(memoryview(self.worker.address))

    async def connected(self, answer: bytes) -> None:
        self.connect(answer)

    def wait(self, request: Any) -> None:
        while not request.completed:
            if not self.worker.progress_once():
                os.sched_yield()  # the other end may need this core
        request.check_error()

    async def send(self, work: Work) -> None:
        pages, per = self.pool.bytes.reshape(-1, work.page_bytes), MESSAGE_BYTES // work.page_bytes
        source, under_way = blocks(work.source_pages, work.page_bytes), [None] * MESSAGES
        for number, first in enumerate(range(0, len(source), per)):
            at = number % MESSAGES
            if under_way[at] is not None:
                self.wait(under_way[at])
            buffer = self.buffers[at].reshape(per, work.page_bytes)
            np.take(pages, source[first : first + per], axis=0, out=buffer, mode="clip")
            under_way[at] = self.peer.tag_send(self.array(self.buffers[at]), self.api.UCXXTag(0))
        for request in under_way:
            self.wait(request)
        told = np.zeros(1, np.uint8)
        self.wait(self.worker.tag_recv(self.array(told), self.api.UCXXTag(1)))

    async def receive(self, work: Work) -> None:
        pages, per = self.pool.bytes.reshape(-1, work.page_bytes), MESSAGE_BYTES // work.page_bytes
        target = blocks(work.target_pages, work.page_bytes)
        count = len(target) // per
        posted = [self.post(at) for at in range(MESSAGES)]
        for number in range(count):
            at = number % MESSAGES
            self.wait(posted[at])
            some = target[number * per : (number + 1) * per]
            pages[some] = self.buffers[at].reshape(per, work.page_bytes)
            if number + MESSAGES < count:
                posted[at] = self.post(at)
        self.wait(self.peer.tag_send(self.array(np.ones(1, np.uint8)), self.api.UCXXTag(1)))

    def post(self, at: int) -> Any:
        return self.worker.tag_recv(self.array(self.buffers[at]), self.api.UCXXTag(0))


class UcxxTcp(Ucxx):
    path: ClassVar[str] = "tcp"
    options: ClassVar[dict[str, str]] = {"TLS": "tcp", "NET_DEVICES": "lo", "RNDV_THRESH": "32768"}


class Mooncake(Ends):
    """As SGLang uses it: batches of synchronous writes over tcp, which wait spinning. A last word that the target sees
    change says that it is all there.
    """

    path: ClassVar[str] = "tcp"
    environment: ClassVar[dict[str, str]] = {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}

    def __init__(self) -> None:
        super().__init__()
        from mooncake.engine import TransferEngine

        self.engine, self.word = TransferEngine(), np.zeros(8, np.int64)
        self.check(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        self.check(self.engine.register_memory(self.pool.base(0), POOL_BYTES), "register_memory")
        self.check(self.engine.register_memory(self.word.ctypes.data, self.word.nbytes), "register_memory")
        self.peer, self.there, self.word_there, self.rounds = "", 0, 0, 0

    @staticmethod
    def check(status: int, what: str) -> None:
        if status != 0:
            raise RuntimeError(f"{what} returned {status}")

    async def open_target(self) -> bytes:
        name = f"127.0.0.1:{self.engine.get_rpc_port()}"
        return msgspec.msgpack.encode((name, self.pool.base(0), self.word.ctypes.data))

    async def open_source(self, offer: bytes) -> bytes:
        self.peer, self.there, self.word_there = msgspec.msgpack.decode(offer)
        return b""

    async def send(self, work: Work) -> None:
        source = (self.pool.base(0) + blocks(work.source_pages, work.page_bytes) * work.page_bytes).tolist()
        target = (self.there + blocks(work.target_pages, work.page_bytes) * work.page_bytes).tolist()
        self.write(source, target, work.page_bytes)
        self.rounds += 1
        self.word[0] = self.rounds
        self.check(self.engine.transfer_sync_write(self.peer, self.word.ctypes.data, self.word_there, 8), "the word")

    def write(self, source: list[int], target: list[int], size_bytes: int) -> None:
        for first in range(0, len(source), BLOCKS):
            here, there = source[first : first + BLOCKS], target[first : first + BLOCKS]
            self.check(
                self.engine.batch_transfer_sync_write(self.peer, here, there, [size_bytes] * len(here)), "a batch"
            )

    async def receive(self, work: Work) -> None:
        self.rounds += 1
        while self.word[0] < self.rounds:
            await asyncio.sleep(0.0005)


class MooncakeTuned(Mooncake):
    """Neighbours merged; single transfers, posted ahead and asked after; more connections, and larger pieces."""

    environment: ClassVar[dict[str, str]] = Mooncake.environment | {
        "MC_TCP_LANES_PER_PEER": "8",
        "MC_TCP_SLICE_SIZE": "1048576",
    }

    def write(self, source: list[int], target: list[int], size_bytes: int) -> None:
        posted: deque[int] = deque()
        for here, there, length in merged(source, target, size_bytes):
            while len(posted) >= TRANSFERS:
                self.reap(posted)
            posted.append(self.engine.transfer_submit_write(self.peer, here, there, length))
        while posted:
            self.reap(posted)

    def reap(self, posted: deque[int]) -> None:
        status = self.engine.transfer_check_status(posted[0])
        if status == 1:
            posted.popleft()
        elif status == 0:
            time.sleep(0.0001)
        else:
            raise RuntimeError(f"a transfer ended with {status}")


def merged(source: list[int], target: list[int], size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(source, target, bytes) of blocks that follow each other on both sides, up to MERGED_BYTES."""
    first, count = 0, 0
    for at in range(len(source) + 1):
        count = at - first
        follows = at < len(source) and source[at] == source[first] + count * size_bytes
        follows = follows and target[at] == target[first] + count * size_bytes
        if at and (not follows or (count + 1) * size_bytes > MERGED_BYTES):
            yield source[first], target[first], count * size_bytes
            first = at


def contenders() -> list[Contender]:
    """Those whose packages are installed here."""
    # Here, so that the processes of the others, which import this file, do not import Ray.
    from transfer_ray import DirectInPlace, DirectTransport, ObjectStore

    found: list[Contender] = [
        Pair("NIXL prepared", "transfer_peers:Nixl"),
        Pair("NIXL default", "transfer_peers:NixlDefault"),
        Pair("NIXL tcp prepared", "transfer_peers:NixlTcp"),
    ]
    if importlib.util.find_spec("ucxx") is not None:
        found += [Pair("UCXX", "transfer_peers:Ucxx"), Pair("UCXX tcp", "transfer_peers:UcxxTcp")]
    if importlib.util.find_spec("mooncake") is not None:
        found += [
            Pair("Mooncake batches", "transfer_peers:Mooncake"),
            Pair("Mooncake tuned", "transfer_peers:MooncakeTuned"),
        ]
    return [*found, ObjectStore(), DirectTransport(), DirectInPlace()]
