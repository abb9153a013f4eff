"""A decode rank that is not the leader: it has agents for writers, and passes their notifications on."""

from __future__ import annotations

from typing import Any

from kvferry.actors.decode.arrival import Notified
from kvferry.actors.decode.checks import OwnDigests
from kvferry.actors.decode.writers import accept, revoke
from kvferry.actors.parts import Parts
from kvferry.actors.ranks.follower import Follower
from kvferry.protocol.address import Address
from kvferry.protocol.instance import Accept, Accepted, Arrived, Digested, Expect, Revoke, RevokedAt, TakeDigest
from kvferry.protocol.metadata import Introduction, decode_notification
from kvferry.protocol.offer import Offer
from kvferry.transfer.chunk import Chunk
from kvferry.transfer.contract import TransferError, encode_descriptor


class DecodeFollower(Follower):
    """It keeps nothing of a room: its pages are the leader's to give and to take back."""

    role = "decode"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._own = OwnDigests(self.engine, self.digests) if self.digests is not None else None
        self._on_message |= {
            Accept: self._accept, Revoke: self._revoke, Expect: self._expect, TakeDigest: self._take_digest,
        }  # fmt: skip

    def notified(self, agent: str, payload: bytes) -> None:
        """The endpoint's `on_notify`."""
        self._mailbox.put(Notified(agent, payload))

    def receive_other(self, item: Any) -> None:
        if isinstance(item, Notified):
            self._notified(item)
        else:
            super().receive_other(item)

    def _notified(self, item: Notified) -> None:
        news = decode_notification(item.payload)
        if news is None:
            self.counts["notifications that do not decode"] += 1
        elif isinstance(news, Introduction):
            self._introduced(news)
        else:
            self.tell_leader(Arrived(news.room, news.rank, news.incarnation, news.placed, news.last))

    def _introduced(self, news: Introduction) -> None:
        """A source process has said what it writes from."""
        if self._own is not None:
            try:
                self._own.introduced(news)
            except TransferError:
                self.counts["notifications that do not decode"] += 1

    # --- the leader's orders; the endpoint carries them out in the order in which they come ---

    def _accept(self, peer: Address, message: Accept) -> None:
        if self.is_leader(peer):
            self.spawn(self._make_agent(message.writer, message.offer, message.turn))

    async def _make_agent(self, writer: int, offer: Offer, turn: int) -> None:
        made = await accept(self.endpoint, writer, offer, self.info.rank, turn)
        agent = encode_descriptor(made.descriptor) if made.descriptor is not None else b""
        self.tell_leader(Accepted(writer, turn, agent, made.error))

    def _revoke(self, peer: Address, message: Revoke) -> None:
        if self.is_leader(peer):
            if self._own is not None:
                self._own.forget(message.writer)
            self.spawn(self._destroy_agent(message.writer, message.ended))

    async def _destroy_agent(self, writer: int, ended: bool) -> None:
        proof = await revoke(self.endpoint, writer, ended)
        self.tell_leader(RevokedAt(writer, proof.generation if proof is not None else -1))

    def _take_digest(self, peer: Address, message: TakeDigest) -> None:
        if self.is_leader(peer):
            self.spawn(self._digest(message))

    async def _digest(self, order: TakeDigest) -> None:
        try:
            if self._own is None:
                raise TransferError(f"rank {self.info.rank} takes no checksums")
            tokens = Chunk(order.first, order.first + order.tokens, order.prompt_tokens)
            digest = await self._own.take(order.incarnation, tokens, order.pages)
            self.tell_leader(Digested(order.room, order.source, order.first, digest))
        except TransferError as error:
            self.tell_leader(Digested(order.room, order.source, order.first, error=str(error)))

    def _expect(self, peer: Address, message: Expect) -> None:
        if self.is_leader(peer):
            self.endpoint.expect(message.change)
