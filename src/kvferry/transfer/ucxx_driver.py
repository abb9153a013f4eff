"""The driver of UCXX's workers; it alone touches the regions.

A worker has work as long as a turn of it moves anything; then it is armed, and the thread sleeps until the descriptor
of one says that something has happened, or a command comes. So an idle endpoint uses no CPU, and nothing here is polled
by time.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any, ClassVar

from kvferry.transfer.contract import Descriptor, TransferError
from kvferry.transfer.driver import Driver, DriverParts
from kvferry.transfer.names import agent_name, metadata_of
from kvferry.transfer.pack import RegionMemory
from kvferry.transfer.ucxx_agent import BACKEND, PROOFS, UcxxAgent, make_context
from kvferry.transfer.ucxx_source import UcxxPeer, UcxxWrite
from kvferry.transfer.ucxx_target import UcxxTarget
from kvferry.transfer.ucxx_wire import PIECES, UcxxMetadata, encoder, metadata_decoder

#: What a closing endpoint waits at most for peers to take what is under way.
_PARTING_S = 3.0


class UcxxDriver(Driver[UcxxPeer, UcxxWrite, UcxxAgent]):
    _backend: ClassVar[str] = BACKEND

    def __init__(self, parts: DriverParts) -> None:
        super().__init__(parts, PROOFS)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events = select.epoll()
        self._events.register(self._wake, select.EPOLLIN)
        self._context: Any = None
        self._memory = RegionMemory(self._regions)
        self._targets: dict[int, UcxxTarget] = {}  # by the writer's incarnation
        self._by_fd: dict[int, UcxxTarget | UcxxPeer] = {}
        self._awake: set[UcxxTarget | UcxxPeer] = set()  # not armed

    def put(self, command: Callable[[], None]) -> None:
        super().put(command)
        os.eventfd_write(self._wake, 1)

    # --- the thread ------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[TransferError | None], None]) -> None:
        super().run(on_ready)
        self._events.close()
        os.close(self._wake)

    def _start(self) -> None:
        self._context = make_context(self._transports, self._host)
        self._new_agent().delete()

    def _turn(self) -> None:
        self._take_commands()
        if self._closing:
            return
        for served in list(self._awake):
            moved = served.serve()
            if isinstance(served, UcxxPeer) and served.broken and self._peers.get(served.descriptor.agent) is served:
                del self._peers[served.descriptor.agent]
            if served.gone:
                self._delete(served)
            elif not moved and served.agent.arm():
                self._awake.discard(served)
        self._sleep(0 if self._awake else None)

    def _sleep(self, limit_s: float | None) -> None:
        for fd, _ in self._events.poll(limit_s):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif (found := self._by_fd.get(fd)) is not None:
                self._awake.add(found)

    def _take_commands(self) -> None:
        try:
            while not self._closing:
                self._commands.get_nowait()()
        except Empty:
            return

    # --- agents ----------------------------------------------------------------------------------------------

    def _make(self, generation: int) -> UcxxAgent:
        return UcxxAgent(self._context, agent_name(self._incarnation, generation), generation)

    @property
    def _live(self) -> int:
        return len(self._targets) + len(self._peers)

    def _watch(self, served: UcxxTarget | UcxxPeer) -> None:
        self._by_fd[served.agent.fd] = served
        self._events.register(served.agent.fd, select.EPOLLIN)
        self._awake.add(served)

    def _delete(self, served: UcxxTarget | UcxxPeer) -> None:
        del self._by_fd[served.agent.fd]
        self._events.unregister(served.agent.fd)  # before its worker goes, and its descriptor with it
        self._awake.discard(served)
        served.agent.delete()

    # --- commands --------------------------------------------------------------------------------------------

    @property
    def _piece_bytes(self) -> int:
        return max(1, self._batch_bytes // PIECES)

    def _agent_for(self, writer: int) -> tuple[UcxxAgent, bytes]:
        target = self._targets.get(writer) or self._new_target(writer)
        metadata = UcxxMetadata(self._transports, os.getpid(), self._piece_bytes, target.agent.address)
        return target.agent, encoder.encode(metadata)

    def _new_target(self, writer: int) -> UcxxTarget:
        agent = self._next_agent()

        def on_note(sender: str, payload: bytes) -> None:
            self._tell(partial(self._on_notify, sender, payload))

        target = UcxxTarget(agent, writer, self._regions, self._piece_bytes, self._memory, on_note)
        self._targets[writer] = target
        self._watch(target)
        return target

    def _shut_out(self, writer: int) -> None:
        target = self._targets.pop(writer, None)
        if target is not None:
            target.revoke()
            self._awake.add(target)

    def _connect(self, descriptor: Descriptor) -> UcxxPeer:
        metadata = metadata_of(descriptor, metadata_decoder, self._transports)
        agent = self._next_agent()
        try:
            peer = UcxxPeer(descriptor, metadata, agent, self._memory, self._batch_bytes, self._now_s, self._tell)
        except agent.errors as error:
            agent.delete()
            raise TransferError(f"{descriptor.agent}: its address is refused: {error}") from None
        self._watch(peer)
        return peer

    def expect(self, change: int) -> None:
        """An event wakes the thread, so it need not know."""

    def disconnect(self, peer: UcxxPeer, on_done: Callable[[], None]) -> None:
        self._leave(peer, "disconnected")
        self._deliver(on_done)

    def _stir(self, peer: UcxxPeer) -> None:
        if not peer.broken:
            self._awake.add(peer)

    def _leave(self, peer: UcxxPeer, why: str) -> None:
        if not peer.broken:
            peer.leave(why)
            del self._peers[peer.descriptor.agent]
            self._awake.add(peer)

    def _delete_all(self) -> None:
        """What is under way gets a moment to come to its end; from now on nothing reads or writes the regions."""
        for peer in list(self._peers.values()):
            self._leave(peer, self._failure)
        for target in self._targets.values():
            target.revoke()
        until_s = self._now_s() + _PARTING_S
        while self._by_fd and self._now_s() < until_s:
            for served in list(self._by_fd.values()):
                served.serve()
                if served.gone or (isinstance(served, UcxxTarget) and served.agent.idle and not served.busy):
                    self._delete(served)
            self._sleep(0.001)
        for served in list(self._by_fd.values()):
            self._delete(served)
        self._targets, self._context = {}, None
