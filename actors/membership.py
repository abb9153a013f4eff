"""An actor's tie to the registry: find it, link to it, say who we are, and do so again whenever the link is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from kvferry.actors.ports import Network, Resolve
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Message, RegistrationRefused

REGISTRY = "registry"
RETRY_S = 0.5


@dataclass(frozen=True)
class RegistryFound:
    """Item for the actor's mailbox: the registry's address, or None while there is none."""

    address: Address | None


class RegistrationError(RuntimeError):
    """The registry will never take this rank: it contradicts the ranks that are there."""


class Membership:
    """`hello` is said each time the link to the registry opens; None: nothing is said yet. The actor passes its items
    on to the methods. `refusal` is why the registry has not taken us, as far as it has said so.
    """

    def __init__(
        self,
        network: Network,
        resolve: Resolve,
        hello: Message | None,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        post: Callable[[RegistryFound], None],
    ) -> None:
        self._network, self._resolve, self._hello = network, resolve, hello
        self._spawn, self._post = spawn, post
        self._address: Address | None = None
        self._looking = False
        self._retry_at_s = 0.0
        self.accepted = False
        self.refusal: str | None = None

    def is_registry(self, peer: Address) -> bool:
        return self._address is not None and peer.incarnation == self._address.incarnation

    def speaks(self, peer: Address, counts: Counter[str]) -> bool:
        """It is the registry's own word. In another's mouth it is counted, and means nothing."""
        if not self.is_registry(peer):
            counts["words of the registry from another"] += 1
        return self.is_registry(peer)

    def change(self, hello: Message) -> None:
        """Say something else from now on: at once, and until it is accepted."""
        self._hello, self.accepted = hello, False
        self._say_hello()

    def registered(self) -> None:
        self.accepted, self.refusal = True, None

    def refused(self, message: RegistrationRefused) -> None:
        """A place that may become free is asked for again (by `tick`). A mismatch can't mend itself: raises
        RegistrationError.
        """
        self.refusal = message.reason
        if not message.retry:
            raise RegistrationError(message.reason)

    def tick(self, now_s: float) -> None:
        """Look the registry up if we have none, at most every `RETRY_S`."""
        if self._address is None and not self._looking and now_s >= self._retry_at_s:
            self._looking, self._retry_at_s = True, now_s + RETRY_S
            self._spawn(self._look())
        elif self._address is not None and not self.accepted and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + RETRY_S
            self._say_hello()

    def found(self, address: Address | None) -> None:
        self._looking = False
        self._address = address
        if address is not None:
            self._network.dial(address)
            self._say_hello()

    def link_up(self, peer: Address) -> None:
        if self.is_registry(peer) and not self.accepted:
            self._say_hello()

    def link_lost(self, peer: Address) -> None:
        if self.is_registry(peer):
            self._address, self.accepted = None, False

    def tell(self, message: Message) -> None:
        """Something for the registry; lost while there is no link to it."""
        if self._address is not None:
            self._network.send(self._address.incarnation, message)

    def _say_hello(self) -> None:
        if self._hello is not None and self._address is not None and self._network.is_up(self._address.incarnation):
            self._network.send(self._address.incarnation, self._hello)

    async def _look(self) -> None:
        try:
            self._post(RegistryFound(await self._resolve(REGISTRY)))
        except LookupError:
            self._post(RegistryFound(None))
