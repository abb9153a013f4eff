"""The half of the router that watches who is there: the registry's roster, links to all leaders, and their loads.

Not here: requests and their rooms (router.py).
"""

from __future__ import annotations

from typing import Any

from kvferry.actors.actor import Actor
from kvferry.actors.membership import Membership, RegistryFound
from kvferry.actors.ports import Clock, LostReason, Network, Resolve
from kvferry.actors.router.breaker import Breakers
from kvferry.actors.router.fleet import Fleet
from kvferry.actors.router.roster import RosterBook
from kvferry.actors.settings import RouterSettings
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Load, Roster, Watch

REDIAL_S = 1.0


class Watching(Actor):
    """Base of `Router`."""

    def __init__(
        self, network: Network, clock: Clock, mailbox: int, resolve: Resolve, settings: RouterSettings
    ) -> None:
        super().__init__(network, clock, mailbox)
        self.settings = settings
        self.book = RosterBook()
        self.membership = Membership(network, resolve, Watch(network.address.name), self.spawn, self._mailbox.put)
        self.fleet = Fleet(network.is_up)
        self.breakers = Breakers(settings.breaker_failures, settings.breaker_open_s, settings.breaker_open_max_s)
        self._redial_at_s = 0.0
        self._on_message = {Roster: self._new_roster, Load: self._load}

    @property
    def roster(self) -> Roster:
        """The last one that came."""
        return self.book.roster

    @property
    def linked(self) -> bool:
        """It can serve, if anybody can: each role that is registered is linked to."""
        linked = {rank.role for rank in self.roster.ranks if self.network.is_up(rank.address.incarnation)}
        return self.membership.accepted and linked == {rank.role for rank in self.roster.ranks}

    @property
    def settled(self) -> bool:
        """It knows of everybody that there is."""
        return self.membership.accepted and self.book.is_complete

    def receive_other(self, item: Any) -> None:
        if isinstance(item, RegistryFound):
            self.membership.found(item.address)
        else:
            super().receive_other(item)

    def tick(self, now_s: float) -> None:
        self.membership.tick(now_s)
        if self.book.grows_complete(now_s):
            self._take_roster()
        if now_s >= self._redial_at_s:  # a link may break while the roster stays as it is
            self._redial_at_s = now_s + REDIAL_S
            self._dial_leaders()

    def link_up(self, peer: Address) -> None:
        self.membership.link_up(peer)
        if not self.membership.is_registry(peer):
            self.network.send(peer.incarnation, Watch(self.network.address.name))

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        self.membership.link_lost(peer)

    def _new_roster(self, registry: Address, roster: Roster) -> None:
        if not self.membership.speaks(registry, self.counts):
            return
        self.membership.accepted = True
        self.book.came(registry.incarnation, roster, self.clock.now_s())
        self._take_roster()

    def _take_roster(self) -> None:
        self.fleet.registered(self.roster.ranks, complete=self.book.is_complete)
        self.breakers.keep({address.incarnation for address in self.fleet.addresses()})
        self._dial_leaders()

    def _dial_leaders(self) -> None:
        for address in self.fleet.addresses():
            self.network.dial(address)

    def _load(self, peer: Address, load: Load) -> None:
        self.fleet.reported(peer.incarnation, load, self.clock.now_s())
