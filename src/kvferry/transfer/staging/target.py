"""The target's side of staging: rings that are lent to writers, and the scattering of what lies in them.

A ring is lent when a writer says Hello, so that those who never stage take none, and for as long as it has its
receiving agent. When that agent is revoked, nothing of the writer's is scattered any more: a notification of it that is
still to come is dropped, and the copy that was under way is waited for. The ring goes to another writer only if nothing
can land in it any more, as the endpoint within proves; else it is laid aside until `writer_exited`, because the next
writer's bytes would not be safe there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from threading import Lock

from kvferry.transfer.blocks import Side
from kvferry.transfer.contract import Descriptor, Endpoint, Peer, Region, Revoked, TransferError, decode_descriptor
from kvferry.transfer.staging.copies import Memory
from kvferry.transfer.staging.under_way import UnderWay
from kvferry.transfer.staging.wire import SCRATCH_BYTES, Hello, Ready, Scatter, Scattered, encode, side_in
from kvferry.transfer.staging.worker import JobQueue
from kvferry.transfer.work import check_slices

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Lease:
    """What a writer has here, for as long as it has this agent. `ring`: its number, or None. `over`: it has ended, and
    nothing of it is left.
    """

    writer: int
    generation: int
    copying: UnderWay
    ring: int | None = None
    open: bool = True
    session: int = -1
    agent: str = ""  # the sending one of that session
    back: Peer | None = None  # our connection to the writer
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Rings:
    """`offset` is where the rings begin in staging memory, behind SCRATCH_BYTES; `regions` are the user's."""

    def __init__(
        self,
        inner: Endpoint,
        incarnation: int,
        memory: Memory,
        regions: tuple[Region, ...],
        offset: int,
        ring_bytes: int,
        rings: int,
        worker: JobQueue,
        loop: asyncio.AbstractEventLoop,
        counts: Counter[str],
    ) -> None:
        self._inner, self._incarnation = inner, incarnation
        self._memory, self._regions = memory, regions
        self._offset, self._ring_bytes, self._worker, self._loop = offset, ring_bytes, worker, loop
        self._rings = rings
        self._counts = counts
        self._free = list(range(rings))[::-1]
        self._leases: dict[int, Lease] = {}  # by generation of the agent
        self._ending: dict[int, list[Lease]] = {}  # by writer, revoked ones of which something may be left
        self._aside: dict[int, list[int]] = {}  # by writer, rings that it may still write into
        self._exited: set[int] = set()  # writers of leases that are ending
        self._lock = Lock()  # of the leases: notifications come on another thread than calls
        self._greeting: set[asyncio.Task[None]] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def aside(self) -> int:
        return sum(map(len, self._aside.values()))

    @property
    def promised_bytes(self) -> int:
        """What a ring has that is lent here; 0 when there are none."""
        return self._ring_bytes if self._rings else 0

    @property
    def scratch(self) -> int:
        return self._offset

    def expect(self, writer: int, descriptor: Descriptor) -> None:
        """By this agent that writer may come and ask for a ring."""
        if descriptor.generation not in self._leases:
            copying = UnderWay(self._loop)
            self._leases[descriptor.generation] = Lease(writer, descriptor.generation, copying)

    def _place(self, ring: int) -> int:
        return self._offset + SCRATCH_BYTES + ring * self._ring_bytes

    async def end(self, writer: int, revoke: Awaitable[Revoked | None]) -> Revoked | None:
        """Stop all of a writer's scattering. `revoke` is that of the endpoint within: it begins at once, so that what
        is asked of both is done in one order. What an earlier call has begun is over, too, when this one returns.
        """
        ending = self._ending.setdefault(writer, [])
        before, ended = list(ending), [lease for lease in self._leases.values() if lease.writer == writer]
        ending += ended
        with self._lock:
            for lease in ended:
                lease.open = False
                del self._leases[lease.generation]
        try:
            proof = await revoke
            for lease in ended:
                await lease.copying.over()
                if lease.back is not None:
                    await self._inner.disconnect(lease.back)
                self._take_back(lease, proof is not None)
        finally:
            for lease in ended:
                ending.remove(lease)
                lease.over.set()
            if not ending and self._ending.get(writer) is ending:
                del self._ending[writer]
                self._exited.discard(writer)
        for lease in before:
            await lease.over.wait()
        return proof

    def _take_back(self, lease: Lease, proved: bool) -> None:
        if lease.ring is not None and (proved or lease.writer in self._exited):
            self._free.append(lease.ring)
        elif lease.ring is not None:
            self._aside.setdefault(lease.writer, []).append(lease.ring)

    def writer_exited(self, writer: int) -> None:
        """That process has ended, and its agent here has been revoked: its rings can be lent again."""
        self._free += self._aside.pop(writer, [])
        if writer in self._ending:
            self._exited.add(writer)

    def close(self) -> None:
        with self._lock:
            for lease in self._leases.values():
                lease.open = False
            self._leases.clear()
        for task in self._greeting:
            task.cancel()

    # --- what writers say ---

    def hello(self, agent: str, message: Hello) -> None:
        lease = self._leases.get(message.generation)
        if lease is None or message.session <= lease.session:
            self._counts["late or stray notifications of staging"] += 1
            return
        if lease.ring is None and self._free:
            lease.ring = self._free.pop()
        elif lease.ring is None:
            self._counts["writers without a ring"] += 1
            _log.info("writer %016x gets no ring: all are lent; its slices go straight", lease.writer)
        with self._lock:
            lease.session, lease.agent = message.session, agent
        task = self._loop.create_task(self._greet(lease, message))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, lease: Lease, message: Hello) -> None:
        """Ready, once nothing of a session before this one is read from the ring any more."""
        await lease.copying.over()
        try:
            descriptor = decode_descriptor(message.descriptor)
            if descriptor.incarnation != lease.writer:
                raise TransferError(f"writer {lease.writer:016x} gives the descriptor of {descriptor.incarnation:016x}")
            before, back = lease.back, await self._inner.connect(descriptor)
            if not lease.open:
                await self._inner.disconnect(back)
                return
            lease.back = back
            if before is not None and before is not back:
                await self._inner.disconnect(before)
            place, size = (0, 0) if lease.ring is None else (self._place(lease.ring), self._ring_bytes)
            self._inner.notify(back, encode(Ready(self._incarnation, lease.generation, message.session, place, size)))
        except TransferError as error:  # the writer waits, and posts nothing, until it is cancelled or disconnected
            _log.warning("writer %016x can't be answered, and stages nothing: %s", lease.writer, error)

    def scatter(self, agent: str, message: Scatter) -> None:
        """Puts a piece where it belongs, on the worker; the writer hears of it. Called where notifications come."""
        with self._lock:
            lease = self._leases.get(message.generation)
            if lease is None or (lease.session, lease.agent) != (message.session, agent) or lease.ring is None:
                self._counts["late or stray notifications of staging"] += 1
                return
            lease.copying.begin()  # whoever ends this lease from here on waits for it
            place = self._place(lease.ring) + message.offset
        try:
            side = self._side(message)
        except TransferError as error:
            lease.copying.end()
            self._answer(lease, message, str(error))
            return

        def copy() -> None:
            if lease.open and lease.session == message.session:
                self._memory.scatter(place, message.size_bytes, side)

        def copied(error: str) -> None:
            lease.copying.end()
            self._answer(lease, message, error)

        self._worker.put(copy, copied)

    def _side(self, message: Scatter) -> Side:
        """Raises TransferError for what lies outside the ring or a region."""
        side = side_in(message)
        check_slices("target", side, self._regions)
        size = sum(side.width.tolist()) * sum(side.count.tolist())
        if size != message.size_bytes or message.offset + size > self._ring_bytes:
            raise TransferError(
                f"piece {message.number}: slices of {size} bytes from {message.size_bytes} at {message.offset} of a "
                f"ring of {self._ring_bytes}"
            )
        return side

    def _answer(self, lease: Lease, message: Scatter, error: str) -> None:
        if not lease.open or lease.session != message.session or lease.back is None:
            return
        answer = Scattered(self._incarnation, lease.generation, message.session, message.number, error)
        try:
            self._inner.notify(lease.back, encode(answer))
        except TransferError as closed:  # the endpoint has ended meanwhile
            _log.info("a piece's answer was dropped: %s", closed)
