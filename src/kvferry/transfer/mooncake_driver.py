"""The driver of Mooncake's engines: one for each writer and one for each target. The engines work by themselves, in
threads of their own; here is posted, asked after, and looked into the mailboxes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import ClassVar

from kvferry.transfer.contract import Descriptor, TransferError
from kvferry.transfer.driver import DriverParts
from kvferry.transfer.mooncake_agent import (
    BACKEND,
    PROOFS,
    MooncakeAgent,
    MooncakeMetadata,
    areas,
    encoder,
    metadata_decoder,
)
from kvferry.transfer.mooncake_mail import MAIL_BYTES, Mailbox
from kvferry.transfer.mooncake_peer import MooncakePeer, MooncakeWrite
from kvferry.transfer.names import metadata_of
from kvferry.transfer.polling import PollingDriver

#: What a closing endpoint waits at most for peers that are being opened: a target that stands still doesn't answer.
_PARTING_S = 3.0

_log = logging.getLogger(__name__)


class MooncakeDriver(PollingDriver[MooncakePeer, MooncakeWrite, MooncakeAgent]):
    _backend: ClassVar[str] = BACKEND

    def __init__(self, parts: DriverParts, *, poll_busy_ms: float, poll_idle_ms: float) -> None:
        super().__init__(parts, PROOFS, poll_busy_ms=poll_busy_ms, poll_idle_ms=poll_idle_ms)
        self._receiving: dict[int, tuple[MooncakeAgent, Mailbox]] = {}  # by the writer's incarnation
        self._openings: list[Thread] = []
        self._open_to: list[tuple[int, int]] = []  # what the next agent's writer may write into

    # --- the thread ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._new_agent().delete()

    def _poll(self) -> bool:
        progressed = False
        for writer, (agent, mailbox) in list(self._receiving.items()):
            try:
                for sender, payload in mailbox.take():
                    self._tell(partial(self._on_notify, sender, payload))
                    progressed = True
            except TransferError as error:
                _log.warning("%s: nothing more is heard from writer %016x: %s", agent.name, writer, error)
        for name, peer in list(self._peers.items()):
            progressed |= peer.serve()
            if peer.broken:
                del self._peers[name]
        return progressed

    def _delete_all(self) -> None:
        for peer in self._peers.values():
            peer.end(self._failure)
        for writer in list(self._receiving):
            self._shut_out(writer)
        until_s = self._now_s() + _PARTING_S
        for opening in self._openings:
            opening.join(max(0.0, until_s - self._now_s()))
        self._peers = {}

    # --- agents ----------------------------------------------------------------------------------------------

    def _make(self, generation: int) -> MooncakeAgent:
        return MooncakeAgent(self._incarnation, generation, self._transports, self._host, self._open_to)

    @property
    def _live(self) -> int:
        return len(self._receiving) + len(self._peers)

    # --- commands --------------------------------------------------------------------------------------------

    def _agent_for(self, writer: int) -> tuple[MooncakeAgent, bytes]:
        if writer not in self._receiving:
            mailbox = Mailbox(self._incarnation, self._generation + 1, writer)
            self._open_to = [*areas(self._regions), (mailbox.address, MAIL_BYTES)]
            try:
                self._receiving[writer] = self._next_agent(), mailbox
            finally:
                self._open_to = []
        agent, mailbox = self._receiving[writer]
        return agent, encoder.encode(MooncakeMetadata(self._transports, agent.server, mailbox.address))

    def _shut_out(self, writer: int) -> None:
        found = self._receiving.pop(writer, None)
        if found is not None:
            found[0].delete()  # before the mailbox, whose memory it writes to

    def _connect(self, descriptor: Descriptor) -> MooncakePeer:
        metadata = metadata_of(descriptor, metadata_decoder, self._transports)
        peer = MooncakePeer(
            descriptor, metadata, self._next_agent(), self._regions, self._batch_bytes, self._now_s, self._tell,
            self.put,
        )  # fmt: skip
        self._openings = [*(opening for opening in self._openings if opening.is_alive()), peer.opening]
        return peer

    def disconnect(self, peer: MooncakePeer, on_done: Callable[[], None]) -> None:
        peer.end("disconnected")
        self._deliver(on_done)
        if self._peers.get(peer.descriptor.agent) is peer:
            del self._peers[peer.descriptor.agent]
