"""The `local` backend: two processes of one host map the target's pool, so a page moves by one copy, the writer's.

The loop's side. Who may map what is local_door's, the copying is done by local_peer's thread. A writer needs nobody's
help once it is connected: one that was stopped copies on when it continues, so taking its agent back proves nothing,
and only what it says itself, or its end, does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread

from kvferry.protocol.offer import NOTHING_SAID, Offer
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
from kvferry.transfer.copying import copier
from kvferry.transfer.local_door import Door, Hello, LocalMetadata, decode_metadata, knock, note
from kvferry.transfer.local_peer import Copyist, LocalPeer, LocalWrite
from kvferry.transfer.names import agent_name, check_descriptor, is_agent_of
from kvferry.transfer.shared import Area, outside
from kvferry.transfer.spans import check_spans
from kvferry.transfer.work import Work, spans_in

BACKEND = "local"
#: Of its agents' names.
_KIND = "kvferry-local"

#: A stopped writer copies on when it continues, whatever we have done meanwhile: revoking proves nothing.
PROOFS = Proofs(drained=True, exited=True, revoked=False)

_log = logging.getLogger(__name__)


class LocalEndpoint:
    """`Endpoint` within one host. `areas` are the memory in which all regions lie; without any, nobody can write here,
    and it only writes.

    Raises TransferError when a region lies outside of them, or when there can be no socket.
    """

    def __init__(
        self,
        *,
        regions: tuple[Region, ...],
        areas: Sequence[Area],
        incarnation: int,
        on_notify: OnNotify,
        loop: asyncio.AbstractEventLoop,
        now_s: Callable[[], float],
        batch_bytes: int = 16 * 1024 * 1024,
        max_agents: int = 256,
    ) -> None:
        self._name = f"{_KIND}-{incarnation:016x}"
        if areas and (index := outside(regions, [(area.base, area.size_bytes) for area in areas])) is not None:
            raise TransferError(f"{self._name}: region {index} does not lie in memory that can be shared")
        self._regions, self._areas, self._incarnation = regions, tuple(areas), incarnation
        self._on_notify, self._loop, self._max_agents = on_notify, loop, max_agents
        self._now_s = now_s
        self._generation = -1
        self._accepted: dict[int, Descriptor] = {}  # by the writer's incarnation
        self._peers: dict[str, LocalPeer] = {}  # by the target's agent
        self._connecting: dict[str, asyncio.Task[LocalPeer]] = {}
        self._leaving: set[asyncio.Future[None]] = set()
        self._closed = False
        try:
            self._door = Door(incarnation, self._areas, loop, self._admit, on_notify)
        except OSError as error:
            raise TransferError(f"{self._name}: no socket: {error}") from None
        self.copier, copy = copier()
        self._copyist = Copyist(self._name, regions, batch_bytes, copy, now_s, self._deliver)
        # A daemon, so that a process that ends without `close` is not held up by it.
        self._thread = Thread(target=self._copyist.run, name=self._name, daemon=True)
        self._thread.start()

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    # --- as a target ---

    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor:
        self._check_open()
        if not self._areas:
            raise TransferError(f"{self._name}: its memory can't be shared")
        known = self._accepted.get(writer)
        if known is None:
            self._check_room()
            name = self._next_name()
            known = self._accepted[writer] = Descriptor(
                BACKEND, name, self._incarnation, self._generation, self._door.metadata, self._regions, PROOFS
            )  # fmt: skip
        return known

    async def revoke(self, writer: int) -> Revoked | None:
        self._check_open()
        known = self._accepted.pop(writer, None)
        if known is not None:
            self._door.turn_out(known.agent)
        return None

    def writer_exited(self, writer: int) -> None:
        """Nothing was laid aside."""

    def _admit(self, hello: Hello) -> str:
        known = self._accepted.get(hello.writer)
        if known is None or known.agent != hello.agent:
            return f"{hello.agent} is not the agent of {hello.writer:016x} here"
        if not is_agent_of(hello.name, hello.writer, _KIND):
            return f"{hello.name} is no agent of {hello.writer:016x}"
        return ""

    # --- as a writer ---

    async def connect(self, descriptor: Descriptor) -> Peer:
        self._check_open()
        name = descriptor.agent
        check_descriptor(descriptor, BACKEND, self._incarnation, _KIND)
        if (known := self._peers.get(name)) is not None:
            return self._same(known, descriptor)
        metadata = decode_metadata(descriptor)
        if (index := outside(descriptor.regions, metadata.areas)) is not None:
            raise TransferError(f"{name}: region {index} does not lie in the memory that it shares")
        task = self._connecting.get(name)
        if task is None:
            self._check_room()
            task = self._connecting[name] = self._loop.create_task(self._connect(descriptor, metadata))
            task.add_done_callback(partial(self._tried, name))
        return self._same(await asyncio.shield(task), descriptor)

    async def _connect(self, descriptor: Descriptor, metadata: LocalMetadata) -> LocalPeer:
        own = self._next_name()
        try:
            connection, windows = await knock(self._loop, metadata, Hello(descriptor.agent, self._incarnation, own))
        except asyncio.CancelledError:
            raise TransferError(f"{self._name}: the endpoint is closed") from None
        peer = LocalPeer(descriptor, own, connection, windows)
        self._peers[descriptor.agent] = peer
        self._loop.add_reader(connection.fileno(), self._ended, peer)  # the target says nothing: it can only end
        return peer

    def _tried(self, name: str, task: asyncio.Task[LocalPeer]) -> None:
        del self._connecting[name]
        if not task.cancelled():
            task.exception()  # whoever asked may have gone

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        self._check_open()
        known, spans = self._known(peer), spans_in(work)
        check_spans(spans, self._regions, peer.descriptor.regions)
        write = LocalWrite(spans, on_end, self._now_s())
        self._command(partial(self._copyist.write, known, write))
        return write

    def notify(self, peer: Peer, payload: bytes) -> None:
        """At once: every write that has ended lies there."""
        self._check_open()
        known, packet = self._known(peer), note(payload)
        if known.broken:
            _log.warning("%s: notification to %s dropped: %s", self._name, peer.descriptor.agent, known.broken)
            return
        known.notes.append(packet)
        if len(known.notes) == 1:
            self._send_notes(known)

    def _send_notes(self, peer: LocalPeer) -> None:
        """As many as the socket takes. A target that stands still takes some, and the rest when it continues."""
        fd = peer.connection.fileno()
        while peer.notes and not peer.broken:
            try:
                peer.connection.send(peer.notes[0])
            except BlockingIOError:
                self._loop.add_writer(fd, self._send_notes, peer)
                return
            except OSError as error:
                self._break(peer, f"{peer.descriptor.agent}: {error}")
                return
            peer.notes.popleft()
        self._loop.remove_writer(fd)

    def cancel(self, handle: WriteHandle) -> None:
        if not isinstance(handle, LocalWrite):
            raise TransferError(f"{self._name}: {handle!r} is not a write of this backend")
        handle.cancelled = True
        handle.stop.value = 1
        self._command(partial(self._copyist.cancel, handle))

    def expect(self, change: int) -> None:
        """Nothing to look out for: the kernel wakes the loop."""

    async def disconnect(self, peer: Peer) -> None:
        self._check_open()
        self._break(self._known(peer), "disconnected")
        await self._all_left()

    async def close(self) -> None:
        """Unfinished writes have ended BROKEN when this returns, and the thread is joined."""
        if not self._closed:
            self._closed = True
            self._door.close()
            for task in self._connecting.values():
                task.cancel()
            for peer in list(self._peers.values()):
                self._break(peer, "the endpoint is closed")
        await self._all_left()
        self._copyist.commands.put(self._copyist.close)
        self._thread.join()  # it has nothing left to do
        await asyncio.sleep(0)  # what it delivered last

    # --- ends ---

    def _ended(self, peer: LocalPeer) -> None:
        """The target's process has ended, or it has taken our agent back."""
        self._break(peer, f"{peer.descriptor.agent}: the target has ended the connection")

    def _break(self, peer: LocalPeer, why: str) -> None:
        """Nothing more is posted; the thread tells the writes and lets go of the memory."""
        if self._peers.get(peer.descriptor.agent) is not peer:
            return
        del self._peers[peer.descriptor.agent]
        self._loop.remove_reader(peer.connection.fileno())
        self._loop.remove_writer(peer.connection.fileno())
        peer.end(why)
        left: asyncio.Future[None] = self._loop.create_future()
        self._leaving.add(left)

        def gone() -> None:
            peer.connection.close()
            self._leaving.discard(left)
            left.set_result(None)

        self._copyist.commands.put(partial(self._copyist.let_go, peer, gone))

    async def _all_left(self) -> None:
        if self._leaving:
            await asyncio.wait(set(self._leaving))

    # --- small things ---

    def _next_name(self) -> str:
        self._generation += 1
        return agent_name(self._incarnation, self._generation, _KIND)

    def _check_room(self) -> None:
        live = len(self._accepted) + len(self._peers) + len(self._connecting)
        if live >= self._max_agents:
            raise TransferError(f"{self._name}: has {live} agents; transfer.max_agents is {self._max_agents}")

    @staticmethod
    def _same(peer: LocalPeer, descriptor: Descriptor) -> LocalPeer:
        if peer.descriptor != descriptor:
            raise TransferError(f"{descriptor.agent}: connected already, with another descriptor")
        return peer

    def _known(self, peer: Peer) -> LocalPeer:
        if not isinstance(peer, LocalPeer):
            raise TransferError(f"{self._name}: {peer!r} is not a peer of this backend")
        return peer

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self._name}: the endpoint is closed")

    def _command(self, command: Callable[[], None]) -> None:
        if not self._closed:  # after it, `cancel` is late news
            self._copyist.commands.put(command)

    def _deliver(self, call: Callable[[], None]) -> None:
        """Called on the copying thread. A loop that was closed under us has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError as error:
            _log.info("%s: a result was not delivered: %s", self._name, error)
