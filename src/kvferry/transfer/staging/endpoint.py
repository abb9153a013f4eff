"""The staging decorator around any endpoint: slices are staged where that pays, everything else goes straight.

What it promises is the contract's: a write ends FLUSHED when its bytes are where they belong, so when the target has
scattered them. Its proofs are those that the endpoint within states for the writer, in the descriptor:

* drained: a write ends only when what was announced of it has been scattered, and nothing else ever will be; where
  nobody can say that, it ends BROKEN, which is never followed by *drained*;
* revoked: `revoke` first ends the scattering, and answers when no copy of that writer's is under way;
* exited: pieces that a dead writer has announced may still be scattered, so its end counts from the answer of `revoke`
  on, whatever that answer is.

Both ends must be staging endpoints, which their descriptors show; where either has no staging memory, slices go
straight, and the descriptor of the peer says so. A target lends a writer a ring, and answers it over a connection of
its own, from when the writer first stages something on: one more agent at each end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvferry.protocol.offer import NOTHING_SAID, Offer
from kvferry.transfer.blocks import spans_of
from kvferry.transfer.contract import (
    Descriptor,
    Endpoint,
    OnNotify,
    Peer,
    Region,
    Revoked,
    TransferError,
    WriteHandle,
    WriteResult,
)
from kvferry.transfer.cost import Costs, estimate
from kvferry.transfer.staging.copies import Memory, host_memory
from kvferry.transfer.staging.pieces import ALIGN, check_fits, cut
from kvferry.transfer.staging.sender import Sender
from kvferry.transfer.staging.source import StagedPeer
from kvferry.transfer.staging.target import Rings
from kvferry.transfer.staging.wire import (
    OURS,
    SCRATCH_BYTES,
    USER,
    Hello,
    Lent,
    Ready,
    Scatter,
    Scattered,
    decode,
    unwrap,
    wrap,
)
from kvferry.transfer.staging.worker import Guest, JobQueue, Worker, at_once
from kvferry.transfer.staging.write import StagedWrite
from kvferry.transfer.threaded import ThreadedEndpoint
from kvferry.transfer.ucx import UcxEndpoint
from kvferry.transfer.work import Blocks, Work, check_work, spans_in

_log = logging.getLogger(__name__)
_DEFAULT_COSTS = Costs()

#: Behind the name of the backend within.
STAGING = "+staging"


def _also(why: str, more: str) -> str:
    return f"{why}; {more}" if why else more


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(call)


@dataclass(frozen=True)
class StagingSizes:
    """`slots` of `piece_bytes` to gather into, `rings` of `ring_bytes` to lend, one to each writer that stages."""

    piece_bytes: int = 4 << 20
    slots: int = 3
    ring_bytes: int = 16 << 20
    rings: int = 8

    @property
    def sender_bytes(self) -> int:
        return self.slots * self.piece_bytes + SCRATCH_BYTES if self.slots else 0

    @property
    def size_bytes(self) -> int:
        return self.sender_bytes + (SCRATCH_BYTES + self.rings * self.ring_bytes if self.rings else 0)

    def check(self) -> None:
        """Raises TransferError for sizes that don't go together."""
        for name in ("piece_bytes", "ring_bytes"):
            value = getattr(self, name)
            if value < ALIGN or value % ALIGN:
                raise TransferError(f"staging: {name} is {value}; it must be a multiple of {ALIGN}")
        if self.slots < 0 or self.rings < 0:
            raise TransferError(f"staging: slots is {self.slots} and rings {self.rings}; the least is 0")


NO_STAGING = StagingSizes(slots=0, rings=0)


def sizes_for(size_bytes: int) -> StagingSizes:
    """Of so much memory in all; none for less than 32 pieces of the least size."""
    piece = min(size_bytes // 32, 4 << 20) // ALIGN * ALIGN
    if not piece:
        return NO_STAGING
    slots, ring = 3, 4 * piece
    return StagingSizes(piece, slots, ring, (size_bytes - slots * piece - 2 * SCRATCH_BYTES) // ring)


class StagingEndpoint:
    """`open_inner` makes the endpoint within, for these regions (staging memory is the last) and with this `OnNotify`;
    `sleep` times the look after peers. `counts` says what it has done. Of `NO_STAGING` it understands peers that stage,
    and writes to them as the endpoint within does.
    """

    def __init__(
        self,
        open_inner: Callable[[tuple[Region, ...], OnNotify], Endpoint],
        *,
        regions: tuple[Region, ...],
        incarnation: int,
        on_notify: OnNotify,
        loop: asyncio.AbstractEventLoop,
        now_s: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        sizes: StagingSizes,
        costs: Costs = _DEFAULT_COSTS,
        memory_of: Callable[[Sequence[Region], int], Memory] = host_memory,
    ) -> None:
        sizes.check()
        self.counts: Counter[str] = Counter()
        self._regions, self._on_notify, self._costs = regions, on_notify, costs
        memory = memory_of(regions, sizes.size_bytes)
        inner_regions = (*regions, memory.region) if sizes.size_bytes else regions
        self._inner = open_inner(inner_regions, self._notified)
        self._stages = sizes.size_bytes > 0
        self._direct = isinstance(self._inner, ThreadedEndpoint)
        name = f"kvferry-{incarnation:016x}"
        self._gatherer, self._scatterer = self._job_queues(name, loop)
        self._sender = Sender(
            self._inner, memory, len(regions), sizes.slots, sizes.piece_bytes, self._gatherer, loop, now_s, sleep,
            self.counts,
        )  # fmt: skip
        self._rings = Rings(
            self._inner, incarnation, memory, regions, sizes.sender_bytes, sizes.ring_bytes, sizes.rings,
            self._scatterer, loop, self.counts,
        )  # fmt: skip
        self._slots, self._piece_bytes = sizes.slots, sizes.piece_bytes
        self._peers: dict[str, StagedPeer] = {}
        self._turns: Counter[int] = Counter()  # revocations, by writer
        self._accepted: set[int] = set()
        self._closed = False

    def _job_queues(self, name: str, loop: asyncio.AbstractEventLoop) -> tuple[JobQueue | UcxEndpoint, JobQueue]:
        """Who gathers, and who scatters."""
        if not isinstance(self._inner, ThreadedEndpoint):
            tell = partial(_soon, loop)
            return Worker(f"{name}-gather", tell), Worker(f"{name}-scatter", tell)
        self._inner.tell_on_thread()
        if isinstance(self._inner, UcxEndpoint) and self._inner.copies:
            return self._inner, Guest(name, self._inner.run_on_thread)
        return Worker(f"{name}-gather", at_once), Worker(f"{name}-scatter", at_once)

    @property
    def backend(self) -> str:
        return self._inner.backend

    @property
    def inner(self) -> Endpoint:
        return self._inner

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    @property
    def rings(self) -> tuple[int, int]:
        """(free, laid aside)"""
        return self._rings.free, self._rings.aside

    # --- who may write here ---

    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor:
        self._check_open()
        turn = self._turns[writer]
        self._accepted.add(writer)
        inner = await self._inner.accept(writer, offer)
        if not self._stages:
            return replace(inner, why=_also(inner.why, "slices go one by one: transfer.staging_mib is 0 there"))
        if turn == self._turns[writer]:  # else this agent is about to be destroyed
            self._rings.expect(writer, inner)
        inner = replace(inner, why=_also(inner.why, "small slices are staged"))
        return wrap(inner, self._kind, len(self._regions), self._rings.scratch, self._rings.promised_bytes)

    async def revoke(self, writer: int) -> Revoked | None:
        self._check_open()
        self._turns[writer] += 1
        self._accepted.discard(writer)
        for peer in self._sender.of(writer):
            peer.end("the agent for its answers is revoked")
        return await self._rings.end(writer, self._inner.revoke(writer))

    def writer_exited(self, writer: int) -> None:
        """Its ring, if it was laid aside, can be lent again."""
        self._rings.writer_exited(writer)
        self._inner.writer_exited(writer)

    # --- whom we write to ---

    async def connect(self, descriptor: Descriptor) -> Peer:
        self._check_open()
        inner, lent = self._unwrapped(descriptor)
        to = await self._inner.connect(inner)
        known = self._peers.get(descriptor.agent)
        if known is None or known.broken or known.inner is not to:
            shown = descriptor if self._slots and lent.size_bytes else self._unstaged(descriptor)
            known = self._peers[descriptor.agent] = self._sender.peer(to, descriptor, shown, lent)
        elif known.given != descriptor:
            raise TransferError(f"{descriptor.agent}: connected already, with another ring")
        return known

    def _unwrapped(self, descriptor: Descriptor) -> tuple[Descriptor, Lent]:
        """Raises TransferError."""
        plain = self._inner.backend
        if descriptor.backend == plain:
            return descriptor, Lent(b"", (), 0, 0)
        if descriptor.backend != f"{plain}{STAGING}":
            raise TransferError(f"{descriptor.agent}: backend is {descriptor.backend!r} there, {self._kind!r} here")
        return unwrap(descriptor, plain)

    def _unstaged(self, descriptor: Descriptor) -> Descriptor:
        """How a pair is shown of which one end does not stage."""
        if descriptor.backend == self._inner.backend:
            return descriptor
        _log.info("%s: slices go one by one: transfer.staging_mib is 0 here", descriptor.agent)
        why = "slices go one by one: transfer.staging_mib is 0 at the writer"
        return replace(descriptor, backend=self._inner.backend, why=why)

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        self._check_open()
        known = self._known(peer)
        check_work(work, self._regions, peer.descriptor.regions)
        staged: Blocks = ()
        if isinstance(work, tuple):
            staged, work = self._shared_out(known, work)
        return known.write(spans_in(work), cut(staged, self._most(known)), on_end)

    def _shared_out(self, peer: StagedPeer, blocks: Blocks) -> tuple[Blocks, Work]:
        """(what is staged, what goes straight), as the plan says. Raises TransferError when an entry that it wants
        staged is larger than a piece can be here.
        """
        most = self._most(peer)
        if not most:
            return (), blocks
        estimated = estimate(blocks, self._costs)
        _log.debug("to %s %s", peer.descriptor.agent, estimated.reason)
        if not estimated.staged:
            return (), blocks
        sliced = tuple(block for block in blocks if block.sliced)
        check_fits(sliced, most)
        return sliced, spans_of([block for block in blocks if not block.sliced])

    def _most(self, peer: StagedPeer) -> int:
        """Bytes of a piece; 0 when nothing can be staged. A piece above half a ring might never find room in it."""
        if not self._slots:
            return 0
        return min(self._piece_bytes, peer.lent.size_bytes // 2) // ALIGN * ALIGN

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._check_open()
        self._inner.notify(self._known(peer).inner, USER + payload)

    def cancel(self, handle: WriteHandle) -> None:
        if not isinstance(handle, StagedWrite):
            raise TransferError(f"{self._kind}: {handle!r} is not a write of this endpoint")
        if not self._closed:
            handle.peer.cancel(handle)

    def expect(self, change: int) -> None:
        self._inner.expect(change)

    async def disconnect(self, peer: Peer) -> None:
        self._check_open()
        known = self._known(peer)
        known.end("disconnected")
        await known.gathering.over()
        await self._inner.disconnect(known.inner)
        if self._peers.get(known.descriptor.agent) is known:
            del self._peers[known.descriptor.agent]
        process = known.descriptor.incarnation
        if known.staged and process not in self._accepted and not self._sender.of(process):
            await self._inner.revoke(process)

    async def close(self) -> None:
        self._closed = True
        self._sender.close("the endpoint is closed")
        self._rings.close()
        if not isinstance(self._gatherer, UcxEndpoint):
            self._gatherer.close()
        self._scatterer.close()
        await self._inner.close()
        await asyncio.sleep(0)  # the answers of both threads
        for peer in self._peers.values():
            peer.abandon()
        self._peers.clear()
        await asyncio.sleep(0)  # `on_end` of what just ended, before this returns

    # --- what comes in ---

    def _notified(self, agent: str, payload: bytes) -> None:
        """On the thread of the endpoint within, if it has one."""
        if payload[:1] == USER:
            self._on_loop(partial(self._on_notify, agent, payload[1:]))
            return
        try:
            message = decode(payload[1:] if payload[:1] == OURS else b"")
        except TransferError as error:
            self.counts["notifications of staging that do not decode"] += 1
            _log.warning("from %s: %s", agent, error)
            return
        match message:
            case Hello():
                self._on_loop(partial(self._rings.hello, agent, message))
            case Scatter():
                self._rings.scatter(agent, message)
            case Ready() | Scattered():
                peer = self._sender.find(message.incarnation, message.generation, message.session)
                if peer is None:
                    self.counts["late or stray notifications of staging"] += 1
                elif isinstance(message, Ready):
                    peer.ready(message)
                else:
                    peer.scattered(message)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._direct:
            self._sender.tell(call)
        else:
            call()

    @property
    def _kind(self) -> str:
        return f"{self._inner.backend}{STAGING}" if self._stages else self._inner.backend

    def _known(self, peer: Peer) -> StagedPeer:
        if not isinstance(peer, StagedPeer):
            raise TransferError(f"{self._kind}: {peer!r} is not a peer of this endpoint")
        return peer

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self._kind}: the endpoint is closed")
