"""The thread that owns NIXL's agent: it alone makes, drives and deletes it.

Commands come in through a queue, as calls; results go back through `deliver`, which runs a call on the endpoint's
loop. Each turn takes the commands that are there, polls the agent once, and gives every peer with work one turn.

A peer's work is a queue of writes and notifications, done strictly in order. Only the first write is posted, in
pieces, with at most `batch_bytes` under way, so a cancel is never more than that away from its end. A handle is
owned before it is posted and is released only when it is done or has raised: releasing one that is under way
aborts nothing, and its bytes would be read after their owner was told that the write had ended. For the same
reason nothing here times out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from kvferry.transfer.contract import (
    Descriptor,
    OnNotify,
    Region,
    Spans,
    TransferError,
    WriteOutcome,
    WriteResult,
)
from kvferry.transfer.spans import addresses, split, total_bytes
from kvferry.transfer.ucx_agent import add_peer, describe, nixl_errors, open_agent

#: Handles under way at a time; each carries a quarter of `batch_bytes`, which keeps single calls short.
PIECES = 4

#: Fast turns after a notification, to carry it off: NIXL does not say when it has left.
_PARTING_TURNS = 64

_log = logging.getLogger(__name__)


class UcxWrite:
    """One write. `result` is written on the endpoint's loop, everything else on the driver's thread."""

    def __init__(self, spans: Spans, on_end: Callable[[WriteResult], None]) -> None:
        self.result: WriteResult | None = None
        self.spans = spans
        self.on_end = on_end
        self.pieces: deque[Spans] | None = None  # not yet posted; None until the write's first turn
        self.posted: deque[tuple[Any, int]] = deque()  # (handle, bytes), oldest first
        self.flushed_bytes = 0
        self.first_post_s: float | None = None
        self.cancelled = False


class UcxPeer:
    """One connected peer. Broken and gone are for good: a new connection is a new object."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self.work: deque[UcxWrite | bytes] = deque()
        self.broken = ""  # why, once it is
        self.gone = False

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor


class Driver:
    """See the module. All methods but `run` are commands, put into `commands` and called by `run` on its thread."""

    def __init__(
        self,
        *,
        name: str,
        transports: str,
        host: str,
        batch_bytes: int,
        poll_busy_ms: float,
        poll_idle_ms: float,
        regions: tuple[Region, ...],
        on_notify: OnNotify,
        now_s: Callable[[], float],
        deliver: Callable[[Callable[[], None]], None],
    ) -> None:
        self.commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._name = name
        self._transports, self._host = transports, host
        self._piece_bytes = max(1, batch_bytes // PIECES)
        self._busy_s, self._idle_s = poll_busy_ms / 1000, poll_idle_ms / 1000
        self._regions = regions
        self._on_notify = on_notify
        self._now_s = now_s
        self._deliver = deliver
        self._agent: Any = None
        self._registration: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._peers: dict[str, UcxPeer] = {}
        self._expecting = 0
        self._parting = 0
        self._closing = False
        self._failure = "the endpoint is closed"

    # --- the thread ------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[bytes | TransferError], None]) -> None:
        """The thread's whole life. `on_ready`, called here, gets the descriptor's metadata, or why there is none."""
        ready: bytes | TransferError
        try:
            self._agent, self._registration, ready = open_agent(self._name, self._transports, self._host, self._regions)
            self._errors = nixl_errors()
        except Exception as error:  # noqa: BLE001  (whatever it is, the endpoint's loop must hear of it)
            self._failure = f"{self._name}: no agent over {self._transports!r}: {describe(error)}"
            ready = TransferError(self._failure)
        on_ready(ready)
        try:
            while self._agent is not None and not self._closing:
                self._turn()
        except Exception as error:  # noqa: BLE001  (the same)
            self._failure = f"{self._name}: the driver failed: {describe(error)}"
            _log.exception("%s: the driver failed", self._name)
        self._delete_agent()
        while not self._closing:  # answer what still comes: every write ends
            self.commands.get()()
        while not self.commands.empty():
            self.commands.get()()

    def _turn(self) -> None:
        progressed = False
        for name, payloads in self._agent.get_new_notifs().items():
            sender = name.decode() if isinstance(name, bytes) else str(name)
            for payload in payloads:
                self._deliver(partial(self._on_notify, sender, bytes(payload)))
            progressed = True
        for peer in list(self._peers.values()):
            if peer.broken:
                self._bury(peer)
            elif peer.work:
                progressed |= self._serve(peer)
        self._take_commands(0.0 if progressed else self._pause_s())

    def _pause_s(self) -> float:
        if self._expecting > 0 or any(peer.work for peer in self._peers.values()):
            return self._busy_s
        if self._parting > 0:
            self._parting -= 1
            return self._busy_s
        return self._idle_s

    def _take_commands(self, pause_s: float) -> None:
        try:
            command = self.commands.get(timeout=pause_s) if pause_s > 0 else self.commands.get_nowait()
            while True:
                command()
                command = self.commands.get_nowait()
        except Empty:
            return

    # --- commands --------------------------------------------------------------------------------------------

    def connect(self, descriptor: Descriptor, on_done: Callable[[UcxPeer | TransferError], None]) -> None:
        answer: UcxPeer | TransferError
        try:
            answer = self._connected(descriptor)
        except TransferError as error:
            # A new one: the frames in this one's traceback would keep the agent alive as long as it is kept.
            answer = TransferError(str(error))
        self._deliver(lambda: on_done(answer))

    def _connected(self, descriptor: Descriptor) -> UcxPeer:
        if self._agent is None:
            raise TransferError(self._failure)
        peer = self._peers.get(descriptor.agent)
        if peer is None:
            add_peer(self._agent, self._transports, descriptor)
            peer = self._peers[descriptor.agent] = UcxPeer(descriptor)
        elif peer.broken:
            raise TransferError(f"{descriptor.agent}: broken, and its last writes have not ended: {peer.broken}")
        elif peer.descriptor != descriptor:
            raise TransferError(f"{descriptor.agent}: connected already, with another descriptor")
        return peer

    def write(self, peer: UcxPeer, write: UcxWrite) -> None:
        if self._agent is None or peer.gone:
            self._end(write, WriteOutcome.BROKEN, peer.broken or self._failure)
        else:
            peer.work.append(write)

    def notify(self, peer: UcxPeer, payload: bytes) -> None:
        if self._agent is None or peer.gone or peer.broken:
            _log.warning("%s: notification to %s dropped: %s", self._name, peer.descriptor.agent, peer.broken)
        else:
            peer.work.append(payload)

    def cancel(self, write: UcxWrite) -> None:
        write.cancelled = True
        for peer in self._peers.values():
            # One that waits behind others has nothing to wait for. The first is ended by its next turn.
            if write in peer.work and peer.work[0] is not write:
                peer.work.remove(write)
                self._end(write, WriteOutcome.CANCELLED)

    def expect(self, change: int) -> None:
        self._expecting += change

    def disconnect(self, peer: UcxPeer, on_done: Callable[[], None]) -> None:
        """Nothing more is posted; what is under way stays owned until it has ended, whoever waits."""
        if not peer.gone and not peer.broken:
            peer.broken = "disconnected"
            if self._agent is not None:
                self._bury(peer)
        self._deliver(on_done)

    def close(self) -> None:
        self._closing = True

    # --- one peer's work -------------------------------------------------------------------------------------

    def _serve(self, peer: UcxPeer) -> bool:
        """One turn of one peer: reap, post one piece, end. True when anything moved."""
        first = peer.work[0]
        try:
            if isinstance(first, bytes):
                self._agent.send_notif(peer.descriptor.agent, first)
                peer.work.popleft()
                self._parting = _PARTING_TURNS
                return True
            if first.pieces is None:
                first.pieces = deque(split(first.spans, self._piece_bytes))
            moved = self._reap(first)
            if first.pieces and not first.cancelled and len(first.posted) < PIECES:
                self._post(peer, first, first.pieces.popleft())
                moved = True
        except self._errors as error:
            self._break(peer, describe(error))
            return True
        if not first.posted and (first.cancelled or not first.pieces):
            peer.work.popleft()
            self._end(first, WriteOutcome.CANCELLED if first.pieces else WriteOutcome.FLUSHED)
            return True
        return moved

    def _post(self, peer: UcxPeer, write: UcxWrite, piece: Spans) -> None:
        size_bytes = total_bytes(piece)
        source = self._descriptors(piece, self._regions, "source")
        target = self._descriptors(piece, peer.descriptor.regions, "target")
        handle = self._agent.initialize_xfer("WRITE", source, target, peer.descriptor.agent)
        if write.first_post_s is None:
            write.first_post_s = self._now_s()
        write.posted.append((handle, size_bytes))  # owned before it is posted
        try:
            state = self._agent.transfer(handle)
        except self._errors:
            write.posted.pop()
            self._release(handle)
            raise
        if state == "DONE":
            write.posted.pop()
            self._release(handle)
            write.flushed_bytes += size_bytes

    def _descriptors(self, piece: Spans, regions: tuple[Region, ...], side: str) -> Any:
        rows = np.zeros((len(piece), 3), dtype=np.uint64)  # address, length, device
        rows[:, 0] = addresses(piece, regions, side)
        rows[:, 1] = piece["length"].astype(np.uint64)
        return self._agent.get_xfer_descs(rows, "DRAM")

    def _reap(self, write: UcxWrite) -> bool:
        """Release what is done. A handle that raises has ended too: it is released, and the error goes on."""
        moved = False
        for handle, size_bytes in list(write.posted):
            try:
                state = self._agent.check_xfer_state(handle)
            except self._errors:
                write.posted.remove((handle, size_bytes))
                self._release(handle)
                raise
            if state == "DONE":
                write.posted.remove((handle, size_bytes))
                self._release(handle)
                write.flushed_bytes += size_bytes
                moved = True
        return moved

    def _break(self, peer: UcxPeer, why: str) -> None:
        _log.warning("%s: peer %s is broken: %s", self._name, peer.descriptor.agent, why)
        peer.broken = why
        self._bury(peer)

    def _bury(self, peer: UcxPeer) -> None:
        """End what a broken peer had, once nothing of it is under way; until then this is called every turn."""
        for work in peer.work:
            while isinstance(work, UcxWrite) and work.posted:
                try:
                    self._reap(work)
                    break
                except self._errors as error:
                    _log.info("%s: a write to %s ended: %s", self._name, peer.descriptor.agent, describe(error))
        if any(isinstance(work, UcxWrite) and work.posted for work in peer.work):
            return
        peer.gone = True
        del self._peers[peer.descriptor.agent]
        try:
            self._agent.remove_remote_agent(peer.descriptor.agent)
        except self._errors as error:
            _log.info("%s: %s was not removed: %s", self._name, peer.descriptor.agent, describe(error))
        while peer.work:
            work = peer.work.popleft()
            if isinstance(work, UcxWrite):
                self._end(work, WriteOutcome.BROKEN, peer.broken)

    def _end(self, write: UcxWrite, outcome: WriteOutcome, error: str = "") -> None:
        wire_s = 0.0 if write.first_post_s is None else self._now_s() - write.first_post_s
        result = WriteResult(outcome, write.flushed_bytes, wire_s, error)

        def ended() -> None:
            write.result = result
            write.on_end(result)

        self._deliver(ended)

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            _log.info("%s: a handle was not released: %s", self._name, describe(error))

    def _delete_agent(self) -> None:
        """Delete the agent, which ends whatever is under way; only then are the writes told."""
        if self._agent is None:
            return
        peers = list(self._peers.values())
        self._peers.clear()
        for peer in peers:
            peer.gone, peer.broken = True, peer.broken or self._failure
            for work in peer.work:
                while isinstance(work, UcxWrite) and work.posted:
                    self._release(work.posted.popleft()[0])
        # NIXL's wrapper may be held by the traceback of an error somewhere; the agent itself must go now.
        self._agent.agent = None
        self._agent = self._registration = None
        for peer in peers:
            while peer.work:
                work = peer.work.popleft()
                if isinstance(work, UcxWrite):
                    self._end(work, WriteOutcome.BROKEN, peer.broken)
