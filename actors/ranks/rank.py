"""What every rank of an instance is, its leader and the others: an engine, an end of the data plane, a registration,
and a life that ends with the other ranks'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.actors.actor import Actor
from kvferry.actors.membership import Membership, RegistryFound
from kvferry.actors.parts import Parts
from kvferry.actors.ports import LostReason
from kvferry.actors.ranks.ending import Ending
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Message, Registered, RegistrationRefused

#: What a rank says again and again, of where its rooms stand.
PROGRESS_EVERY_S = 1.0


@dataclass(frozen=True)
class RankReplaced:
    """Item for a leader: that rank has ended, since there is another process in its place."""

    rank: int


class Rank(Actor):
    """Base of leaders and followers. `hello` registers it; None: not yet."""

    def __init__(self, parts: Parts, hello: Message | None) -> None:
        super().__init__(parts.network, parts.clock, parts.mailbox)
        self.engine, self.endpoint, self.info = parts.engine, parts.endpoint, parts.info
        self.digests = parts.digests
        self.membership = Membership(self.network, parts.resolve, hello, self.spawn, self._mailbox.put)
        self.ending = Ending(parts.limits.no_progress_s)
        self._on_message = {Registered: self._registered, RegistrationRefused: self._registration_refused}

    async def close(self) -> None:
        await self.endpoint.close()
        if self.digests is not None:
            await self.digests.close()  # before the memory goes
        await self.engine.close()
        await super().close()

    async def replaced(self, rank: int) -> None:
        """A call, by a leader's host: another process says that it is that rank now."""
        self._mailbox.put(RankReplaced(rank))

    def receive_other(self, item: Any) -> None:
        if isinstance(item, RegistryFound):
            self.membership.found(item.address)
        else:
            super().receive_other(item)

    def _registered(self, peer: Address, _message: Registered) -> None:
        if self.membership.speaks(peer, self.counts):
            self.membership.registered()

    def _registration_refused(self, peer: Address, message: RegistrationRefused) -> None:
        if self.membership.speaks(peer, self.counts):
            self.membership.refused(message)

    def link_up(self, peer: Address) -> None:
        self.membership.link_up(peer)

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        self.membership.link_lost(peer)

    def tick(self, now_s: float) -> None:
        self.membership.tick(now_s)
        self.ending.turn(self.quiet, now_s)

    @property
    def quiet(self) -> bool:
        """None of this rank's own writes is open."""
        return True
