"""One source rank's side of the data plane: it connects to its targets, writes, and notifies them.

What becomes of it comes back as items for the rank's actor. Not here: which blocks a write has (`WritePlanner`), when
one is due (protocol.sender), whose the pages are (memory).

With checksums, the digest of each write's source bytes is taken while they are on the wire, on a thread of its own. The
write counts as open until both have ended, since the pages must keep still for either.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.actors.prefill.sending import Part, RankWrite, Sending, Targets
from kvferry.protocol.messages import Measured
from kvferry.protocol.metadata import Introduction, Notification, Placed, encode_notification
from kvferry.transfer.contract import (
    Descriptor,
    Endpoint,
    Peer,
    TransferError,
    WriteOutcome,
    WriteResult,
    encode_regions,
)
from kvferry.transfer.digest import EMPTY, Digests
from kvferry.transfer.work import Blocks


class Connected(msgspec.Struct, frozen=True):
    """Item: the data plane has (or has not, and `error` says why) connected to all of a room's targets, ranks of the
    decode whose leader is `owner`. `instead`: how we write to one of them, when it is not as that rank would have it.
    """

    room: int
    owner: int
    targets: dict[int, Peer] | None
    error: str = ""
    instead: Descriptor | None = None


class WriteEnded(msgspec.Struct, frozen=True):
    """Item: one of this rank's writes of a room, to rank `target`, has ended. `digest`: of its source, if taken."""

    room: int
    target: int
    part: Part
    kv_bytes: int
    row: bool
    result: WriteResult
    digest: int | None = None

    @property
    def chunk(self) -> int:
        return self.part.chunk


@dataclass
class _Open:
    """A write whose end, or whose digest, is still to come."""

    write: RankWrite
    part: Part
    result: WriteResult | None = None
    digest: int | None = None


class DataPlane:
    """`spawn` and `post` are the actor's. A rank of decode is connected to once for each agent that it gives us, and
    only the last one counts: it gives another when it has shut us out of the one before.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        digests: Digests | None,
        rank: int,
        incarnation: int,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        post: Callable[[Connected | WriteEnded], None],
    ) -> None:
        self._endpoint, self._digests, self._rank, self._incarnation = endpoint, digests, rank, incarnation
        self._spawn, self._post = spawn, post
        self._peers: dict[int, dict[int, Peer]] = {}  # by decode's leader and the target's process

    def connect(self, room: int, owner: int, targets: Targets) -> None:
        """`Connected` follows."""
        self._spawn(self._connect(room, owner, targets))

    async def _connect(self, room: int, owner: int, targets: Targets) -> None:
        try:
            peers = {rank: await self._endpoint.connect(target) for rank, target in targets.items()}
            ours = {rank: peer.descriptor for rank, peer in peers.items()}
            others = [ours[rank] for rank, target in targets.items() if ours[rank].backend != target.backend]
            self._post(Connected(room, owner, peers, instead=others[0] if others else None))
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
            if before is peer:
                continue
            if self._digests is not None:
                news = Introduction(self._incarnation, encode_regions(self._endpoint.regions))
                self._endpoint.notify(peer, encode_notification(news))
            if before is not None:
                self._spawn(self._endpoint.disconnect(before))
        if not is_up:
            self.link_lost(item.owner)

    def write(self, sending: Sending, part: Part, write: RankWrite) -> None:
        """`WriteEnded` follows. Of a write without blocks nothing is heard, but that it was none."""
        if not write.blocks:
            self._note(sending, write.target, part, False, EMPTY)
            return
        sending.open += 1
        sending.kv_bytes += write.kv_bytes
        sending.metadata_bytes += write.metadata_bytes
        room, opened = sending.room, _Open(write, part)

        def ended(result: WriteResult) -> None:
            opened.result = result
            self._settle(room, opened)

        sending.handles.append(self._endpoint.write(sending.targets[write.target], write.blocks, ended))
        if self._digests is not None:
            self._spawn(self._digest(self._digests, room, opened, write.blocks))

    async def _digest(self, digests: Digests, room: int, opened: _Open, blocks: Blocks) -> None:
        opened.digest = await digests.of(blocks, "source")
        self._settle(room, opened)

    def _settle(self, room: int, opened: _Open) -> None:
        write, result = opened.write, opened.result
        if result is not None and (self._digests is None or opened.digest is not None):
            row = write.metadata_bytes > 0
            self._post(WriteEnded(room, write.target, opened.part, write.kv_bytes, row, result, opened.digest))

    def ended(self, sending: Sending, item: WriteEnded) -> None:
        """What has been flushed can be checked while the next chunk computes; of the last one `notify` tells."""
        sending.open -= 1
        result, part = item.result, item.part
        sending.measured = sending.measured.plus(Measured(result.wait_s, result.wire_s, result.descriptors))
        if result.outcome is not WriteOutcome.FLUSHED or item.digest is None:
            return
        placed = self._note(sending, item.target, part, item.row, item.digest)
        if not part.tokens.last:
            self._say(sending, item.target, (placed,), False)

    @staticmethod
    def _note(sending: Sending, target: int, part: Part, row: bool, digest: int) -> Placed:
        first, end = part.tokens.first_token, part.tokens.end_token
        placed = Placed(part.chunk, first, end - first, row, digest)
        sending.placed.setdefault(target, []).append(placed)
        return placed

    def cancel(self, sending: Sending) -> None:
        """Of the room's writes: those that have ended stay as they are."""
        for handle in sending.handles:
            self._endpoint.cancel(handle)

    def notify(self, sending: Sending) -> None:
        """Tell each target rank, behind the writes, that all of ours are flushed, and what they were."""
        for target in sending.targets:
            placed = sorted(sending.placed.get(target, ()), key=lambda placed: placed.first)
            self._say(sending, target, tuple(placed) if self._digests is not None else (), True)

    def _say(self, sending: Sending, target: int, placed: tuple[Placed, ...], last: bool) -> None:
        news = Notification(sending.room, self._rank, self._incarnation, placed, last)
        self._endpoint.notify(sending.targets[target], encode_notification(news))

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
