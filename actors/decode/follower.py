"""A decode rank that is not the leader: it has agents for writers, and passes their notifications on."""

from __future__ import annotations

from typing import Any

from kvferry.actors.decode.arrival import Notified
from kvferry.actors.decode.writers import accept
from kvferry.actors.parts import Parts
from kvferry.actors.ranks.follower import Follower
from kvferry.protocol.address import Address
from kvferry.protocol.instance import Accept, Accepted, Arrived, Expect, Revoke, RevokedAt
from kvferry.protocol.metadata import decode_notification
from kvferry.transfer.contract import encode_descriptor


class DecodeFollower(Follower):
    """It keeps nothing of a room: its pages are the leader's to give and to take back."""

    role = "decode"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._on_message |= {Accept: self._accept, Revoke: self._revoke, Expect: self._expect}

    def notified(self, agent: str, payload: bytes) -> None:
        """The endpoint's `on_notify`."""
        self._mailbox.put(Notified(agent, payload))

    def receive(self, item: Any) -> None:
        if isinstance(item, Notified):
            self._notified(item)
        else:
            super().receive(item)

    def _notified(self, item: Notified) -> None:
        news = decode_notification(item.payload)
        if news is None:
            self.counts["notifications that do not decode"] += 1
        else:
            self.tell_leader(Arrived(news.room, news.rank, news.incarnation))

    # --- the leader's orders; the endpoint carries them out in the order in which they come ---

    def _accept(self, peer: Address, message: Accept) -> None:
        if self.is_leader(peer):
            self.spawn(self._make_agent(message.writer, message.host, message.turn))

    async def _make_agent(self, writer: int, host: str, turn: int) -> None:
        made = await accept(self.endpoint, writer, host, self.info.rank, turn)
        agent = encode_descriptor(made.descriptor) if made.descriptor is not None else b""
        self.tell_leader(Accepted(writer, turn, agent, made.error))

    def _revoke(self, peer: Address, message: Revoke) -> None:
        if self.is_leader(peer):
            self.spawn(self._destroy_agent(message.writer))

    async def _destroy_agent(self, writer: int) -> None:
        proof = await self.endpoint.revoke(writer)
        self.tell_leader(RevokedAt(writer, proof.generation if proof is not None else -1))

    def _expect(self, peer: Address, message: Expect) -> None:
        if self.is_leader(peer):
            self.endpoint.expect(message.change)
