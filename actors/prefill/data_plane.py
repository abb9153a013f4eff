"""Prefill's side of the data plane: a destination is checked and connected to, chunks are written, the end is notified.

What becomes of it comes back as items for the leader. Not here: which spans a write has (`ChunkWriter`), when one is
due (protocol.sender), whose the pages are (memory).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from kvferry.actors.leg_room import RANK
from kvferry.actors.prefill.room import PrefillRoom
from kvferry.actors.prefill.sending import ChunkWrite, ChunkWriter
from kvferry.engine.contract import Engine
from kvferry.protocol.metadata import Notification, encode_notification
from kvferry.transfer.contract import Descriptor, Endpoint, Peer, TransferError, WriteResult, decode_descriptor


class Connected(msgspec.Struct, frozen=True):
    """Item: the data plane has (or has not) connected to a room's target."""

    room: int
    peer: Peer | None
    error: str = ""


class WriteEnded(msgspec.Struct, frozen=True):
    """Item: one of a room's writes has ended."""

    room: int
    chunk: int
    kv_bytes: int
    result: WriteResult


class DataPlane:
    """`spawn` and `post` are the leader's. A decode process is connected to once for each agent that it gives us, and
    only the last one counts: it gives another when it has shut us out of the one before.
    """

    def __init__(
        self,
        engine: Engine,
        endpoint: Endpoint,
        incarnation: int,
        spawn: Callable[[Awaitable[None]], None],
        post: Callable[[Connected | WriteEnded], None],
    ) -> None:
        self._endpoint, self._incarnation = endpoint, incarnation
        self._spawn, self._post = spawn, post
        self._writer = ChunkWriter(engine, incarnation)
        self._targets: dict[int, Peer] = {}  # by decode's incarnation

    def connect(self, room: PrefillRoom) -> None:
        """`Connected` follows. Raises TransferError, with the reason, for a destination that can't be written to."""
        destination = room.destination
        assert destination is not None
        descriptor = decode_descriptor(destination.agent)
        if descriptor.incarnation != room.peer.incarnation:
            text = f"the destination's agent is of process {descriptor.incarnation:016x}, not decode's"
            raise TransferError(text)
        if set(destination.required_acks) != {RANK}:
            text = f"required_acks is {destination.required_acks}; the ranks that write are ({RANK},)"
            raise TransferError(text)
        self._writer.check(room, destination, descriptor.regions)
        self._spawn(self._connect(room.room, descriptor))

    async def _connect(self, room: int, descriptor: Descriptor) -> None:
        try:
            self._post(Connected(room, await self._endpoint.connect(descriptor)))
        except TransferError as error:
            self._post(Connected(room, None, str(error)))

    def connected(self, target: Peer) -> None:
        before = self._targets.get(target.descriptor.incarnation)
        if before is not None and before.descriptor.generation > target.descriptor.generation:
            self._spawn(self._endpoint.disconnect(target))
            return
        self._targets[target.descriptor.incarnation] = target
        if before is not None and before is not target:
            self._spawn(self._endpoint.disconnect(before))

    def plan(self, room: PrefillRoom, last: bool) -> ChunkWrite:
        """The room's next write; perhaps it has no spans. With `last`, its row is filled in."""
        return self._writer.plan(room, last)

    def write(self, room: PrefillRoom, write: ChunkWrite) -> None:
        """`WriteEnded` follows."""
        assert room.target is not None
        chunk, room_id, post = room.chunk - 1, room.room, self._post
        room.kv_bytes += write.kv_bytes
        room.metadata_bytes += write.metadata_bytes

        def ended(result: WriteResult) -> None:
            post(WriteEnded(room_id, chunk, write.kv_bytes, result))

        room.handles.append(self._endpoint.write(room.target, write.spans, ended))

    def cancel(self, room: PrefillRoom) -> None:
        """Of the room's writes: those that have ended stay as they are."""
        for handle in room.handles:
            self._endpoint.cancel(handle)

    def notify(self, room: PrefillRoom) -> None:
        """Tell decode, behind the writes, that all of them are flushed."""
        assert room.target is not None
        self._endpoint.notify(room.target, encode_notification(Notification(room.room, RANK, self._incarnation)))

    def disconnect(self, incarnation: int) -> None:
        """Every write to it ends, and nothing reads its source any more."""
        target = self._targets.pop(incarnation, None)
        if target is not None:
            self._spawn(self._endpoint.disconnect(target))

    def forget(self, incarnation: int) -> None:
        """The decode process has ended."""
        self._writer.forget(incarnation)
        self.disconnect(incarnation)
