"""One source rank's side of the data plane: it connects to its targets, writes, and notifies them at the end.

What becomes of it comes back as items for the rank's actor. Not here: which spans a write has (`SpanPlanner`), when one
is due (protocol.sender), whose the pages are (memory).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from kvferry.actors.prefill.sending import RankWrite, Sending, Targets
from kvferry.protocol.metadata import Notification, encode_notification
from kvferry.transfer.contract import Endpoint, Peer, TransferError, WriteResult


class Connected(msgspec.Struct, frozen=True):
    """Item: the data plane has (or has not, and `error` says why) connected to all of a room's targets, ranks of the
    decode whose leader is `owner`.
    """

    room: int
    owner: int
    targets: dict[int, Peer] | None
    error: str = ""


class WriteEnded(msgspec.Struct, frozen=True):
    """Item: one of this rank's writes of a room has ended."""

    room: int
    chunk: int
    kv_bytes: int
    result: WriteResult


class DataPlane:
    """`spawn` and `post` are the actor's. A rank of decode is connected to once for each agent that it gives us, and
    only the last one counts: it gives another when it has shut us out of the one before.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        rank: int,
        incarnation: int,
        spawn: Callable[[Awaitable[None]], None],
        post: Callable[[Connected | WriteEnded], None],
    ) -> None:
        self._endpoint, self._rank, self._incarnation = endpoint, rank, incarnation
        self._spawn, self._post = spawn, post
        self._peers: dict[int, dict[int, Peer]] = {}  # by decode's leader and the target's process

    def connect(self, room: int, owner: int, targets: Targets) -> None:
        """`Connected` follows."""
        self._spawn(self._connect(room, owner, targets))

    async def _connect(self, room: int, owner: int, targets: Targets) -> None:
        try:
            peers = {rank: await self._endpoint.connect(target) for rank, target in targets.items()}
            self._post(Connected(room, owner, peers))
        except TransferError as error:
            self._post(Connected(room, owner, None, str(error)))

    def connected(self, item: Connected, is_up: bool) -> None:
        """Keep the connections. `is_up`: there is a link to the owner; else, where a target has to take part in what we
        write, they came too late.
        """
        known = self._peers.setdefault(item.owner, {})
        for peer in (item.targets or {}).values():
            before = known.get(peer.descriptor.incarnation)
            if before is not None and before.descriptor.generation > peer.descriptor.generation:
                self._spawn(self._endpoint.disconnect(peer))
                continue
            known[peer.descriptor.incarnation] = peer
            if before is not None and before is not peer:
                self._spawn(self._endpoint.disconnect(before))
        if not is_up:
            self.link_lost(item.owner)

    def write(self, sending: Sending, chunk: int, write: RankWrite) -> None:
        """`WriteEnded` follows."""
        sending.open += 1
        sending.kv_bytes += write.kv_bytes
        sending.metadata_bytes += write.metadata_bytes
        room, post = sending.room, self._post

        def ended(result: WriteResult) -> None:
            post(WriteEnded(room, chunk, write.kv_bytes, result))

        sending.handles.append(self._endpoint.write(sending.targets[write.target], write.spans, ended))

    def cancel(self, sending: Sending) -> None:
        """Of the room's writes: those that have ended stay as they are."""
        for handle in sending.handles:
            self._endpoint.cancel(handle)

    def notify(self, sending: Sending) -> None:
        """Tell each target rank, behind the writes, that all of ours are flushed."""
        payload = encode_notification(Notification(sending.room, self._rank, self._incarnation))
        for target in sending.targets.values():
            self._endpoint.notify(target, payload)

    def link_lost(self, owner: int) -> None:
        """Where a rank of decode has to take part it shuts us out now, if it lives; if it stands still, our writes
        would be under way for as long. Without the agents nothing reads their pages.
        """
        known = self._peers.get(owner, {})
        for target in [target for target, peer in known.items() if peer.descriptor.proofs.revoked]:
            self._spawn(self._endpoint.disconnect(known.pop(target)))

    def disconnect(self, owner: int) -> None:
        """Every write to that decode's ranks ends, and nothing reads its source any more."""
        for peer in self._peers.pop(owner, {}).values():
            self._spawn(self._endpoint.disconnect(peer))
