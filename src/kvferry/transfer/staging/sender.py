"""What the peers of one endpoint share on the writer's side: slots of staging memory, the thread that gathers, and the
look after peers whose word is awaited. `lock` is held in whatever is called from more than one thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from threading import RLock

from kvferry.transfer.contract import Descriptor, Endpoint, Peer, TransferError, encode_descriptor
from kvferry.transfer.staging.copies import Memory
from kvferry.transfer.staging.filling import Filling
from kvferry.transfer.staging.pieces import Piece
from kvferry.transfer.staging.ring import Room
from kvferry.transfer.staging.source import StagedPeer
from kvferry.transfer.staging.wire import Hello, Lent, encode
from kvferry.transfer.staging.worker import JobQueue
from kvferry.transfer.staging.write import StagedWrite
from kvferry.transfer.ucx import UcxEndpoint

_log = logging.getLogger(__name__)

#: How often the path of a peer is tried while nothing but its word is awaited.
TRY_S = 0.1


class Sender:
    """Slots begin at 0 of staging memory; `scratch` is a word of it that is never written to. `staging_region` is the
    number of that memory among our regions. `gatherer` is the endpoint within where that copies by itself: then whoever
    writes a piece gathers it, too.
    """

    def __init__(
        self,
        inner: Endpoint,
        memory: Memory,
        staging_region: int,
        slots: int,
        slot_bytes: int,
        gatherer: JobQueue | UcxEndpoint,
        loop: asyncio.AbstractEventLoop,
        now_s: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        counts: Counter[str],
    ) -> None:
        self.inner, self.loop, self.now_s, self.counts = inner, loop, now_s, counts
        self.staging_region, self.slot_bytes = staging_region, slot_bytes
        self.scratch = slots * slot_bytes
        self.lock = RLock()
        self._memory, self._gatherer, self._sleep = memory, gatherer, sleep
        self._free = list(range(slots))[::-1]
        self._asking: deque[StagedPeer] = deque()
        self._peers: dict[tuple[int, int, int], StagedPeer] = {}  # by (incarnation, generation, session)
        self._spoilt: set[tuple[int, int]] = set()
        self._sessions = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._watching = self._closed = False

    def tell(self, call: Callable[[], None]) -> None:
        """Have it called on the loop. One that was closed under us has nobody left to tell."""
        try:
            self.loop.call_soon_threadsafe(call)
        except RuntimeError as closed:
            _log.info("a write's end was not delivered: %s", closed)

    # --- peers ---

    def peer(self, inner: Peer, given: Descriptor, descriptor: Descriptor, lent: Lent) -> StagedPeer:
        """A new connection. One whose ring may still be written into by an earlier one stages nothing."""
        with self.lock:
            self._sessions += 1
            if (descriptor.incarnation, descriptor.generation) in self._spoilt:
                lent = Lent(lent.metadata, lent.extra, 0, 0)
            peer = StagedPeer(self, inner, given, descriptor, lent, self._sessions)
            self._peers[(descriptor.incarnation, descriptor.generation, self._sessions)] = peer
            return peer

    def find(self, incarnation: int, generation: int, session: int) -> StagedPeer | None:
        return self._peers.get((incarnation, generation, session))

    def of(self, incarnation: int) -> list[StagedPeer]:
        """The peers of that process that answer us."""
        with self.lock:
            return [peer for key, peer in self._peers.items() if key[0] == incarnation and peer.staged]

    def forget(self, peer: StagedPeer) -> None:
        self._peers.pop((peer.descriptor.incarnation, peer.descriptor.generation, peer.session), None)
        if peer in self._asking:
            self._asking.remove(peer)

    def spoil(self, peer: StagedPeer) -> None:
        """Something that was posted into this ring may land at any time, as long as the agent lives."""
        self._spoilt.add((peer.descriptor.incarnation, peer.descriptor.generation))

    def greet(self, peer: StagedPeer) -> None:
        """Tell the target how to answer."""

        async def say() -> None:
            try:
                back = encode_descriptor(await self.inner.accept(peer.descriptor.incarnation))
                if not peer.broken:
                    hello = Hello(peer.descriptor.generation, peer.session, back)
                    self.inner.notify(peer.inner, encode(hello))
            except TransferError as error:
                peer.end(f"{peer.descriptor.agent}: no way for its answers: {error}")

        task = self.loop.create_task(say())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.watch(peer)

    # --- memory ---

    def place_of(self, slot: int) -> int:
        return slot * self.slot_bytes

    def take_slot(self, peer: StagedPeer) -> int | None:
        """None when the peer has to wait for its turn: then it is asked (`pump`) when that has come."""
        if peer in self._asking:
            if peer is not self._asking[0] or not self._free:
                return None
            self._asking.popleft()
        elif self._asking or not self._free:
            self._asking.append(peer)
            return None
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        while self._free and self._asking:
            first = self._asking[0]
            first.pump()
            if self._free and self._asking and self._asking[0] is first:  # it has no use for it now
                self._asking.popleft()

    def send(self, peer: StagedPeer, write: StagedWrite, piece: Piece, room: Room, slot: int) -> None:
        """Have a piece gathered into its slot; the peer hears of that. Where the endpoint within copies by itself, it
        has also been written into its room by then. Raises TransferError when that endpoint refuses it.
        """
        filling = Filling(partial(self._fill, peer, write, piece, slot))
        if isinstance(self._gatherer, UcxEndpoint):
            spans = peer.spans(piece, room, slot)
            self._gatherer.write_gathered(
                peer.inner, spans, filling, partial(peer.sent, filling, write, piece, room, slot)
            )  # fmt: skip
        else:
            self._gatherer.put(filling, partial(peer.gathered, filling, write, piece, room, slot))

    def _fill(self, peer: StagedPeer, write: StagedWrite, piece: Piece, slot: int) -> bool:
        if peer.broken or write.cancelled:
            return False
        self._memory.gather(piece.source, self.place_of(slot), piece.size_bytes)
        return True

    # --- waiting for a peer's word ---

    def watch(self, peer: StagedPeer) -> None:
        with self.lock:
            if self._watching or self._closed:
                return
            self._watching = True
        self.tell(self._begin_watch)

    def _begin_watch(self) -> None:
        if not self._closed:
            self._watch = self.loop.create_task(self._watched())

    async def _watched(self) -> None:
        """A peer that says nothing for two turns is tried, so that the end of its path shows."""
        self.inner.expect(+1)
        silent: dict[StagedPeer, int] = {}
        try:
            while True:
                await self._sleep(TRY_S)
                with self.lock:
                    waiting = {peer: peer.heard for peer in self._peers.values() if peer.waits_for_word}
                for peer, heard in waiting.items():
                    if silent.get(peer) == heard:
                        peer.try_path()
                silent = waiting
                with self.lock:
                    if not any(peer.busy for peer in self._peers.values()):
                        self._watching = False
                        return
        finally:
            self.inner.expect(-1)

    def close(self, why: str) -> None:
        self._closed = True
        with self.lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.end(why)
        for task in (*self._tasks, *((self._watch,) if self._watch is not None else ())):
            task.cancel()
