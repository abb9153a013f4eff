"""One or several backends behind one endpoint: the target picks a way for each process that is to write to it, and says
why.

Not here: what is picked (ways.py), what backends there are (backends.py), and how any of them moves bytes. What is
written, and what proves that it has ended, is each backend's own: a descriptor says whose it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from kvferry.protocol.offer import NOTHING_SAID, Offer
from kvferry.transfer.contract import (
    Descriptor,
    Endpoint,
    Peer,
    Region,
    Revoked,
    TransferError,
    WriteHandle,
    WriteResult,
)
from kvferry.transfer.ways import Choice
from kvferry.transfer.work import Work

#: As much as a descriptor holds.
_MOST_WHY = 1024

_log = logging.getLogger(__name__)


#: Picks the way for a writer by what it offers. Raises TransferError when there is none.
Choose = Callable[[Offer], Choice]


class SeveralWrite:
    """A write by one of the backends."""

    def __init__(self, endpoint: Endpoint, handle: WriteHandle) -> None:
        self.endpoint, self.handle = endpoint, handle

    @property
    def result(self) -> WriteResult | None:
        return self.handle.result


class Several:
    """`Endpoint` over `endpoints`, by their ways; all have the same regions and the same notifications. `backend` is
    the one that was asked for, or "auto".
    """

    def __init__(self, backend: str, endpoints: Mapping[str, Endpoint], choose: Choose, incarnation: int) -> None:
        self._backend, self._endpoints, self._choose = backend, dict(endpoints), choose
        self._name = f"kvferry-{incarnation:016x}"
        self._chosen: dict[int, Choice] = {}  # by the writer's incarnation

    @property
    def backend(self) -> str:
        return self._backend

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(self._endpoints)

    @property
    def regions(self) -> tuple[Region, ...]:
        return next(iter(self._endpoints.values())).regions

    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor:
        choice = self._chosen.get(writer)
        if choice is None:
            choice = self._chosen[writer] = self._choose(offer)
            _log.info("%s: process %016x writes here by %s: %s", self._name, writer, choice.way, choice.why)
        descriptor = await self._endpoints[choice.way].accept(writer, offer)
        why = f"{choice.why}; {descriptor.why}" if descriptor.why else choice.why
        return msgspec.structs.replace(descriptor, why=why[:_MOST_WHY], way=choice.way)

    async def revoke(self, writer: int) -> Revoked | None:
        choice = self._chosen.pop(writer, None)
        return None if choice is None else await self._endpoints[choice.way].revoke(writer)

    def writer_exited(self, writer: int) -> None:
        """By which it came is forgotten with its agent."""
        for endpoint in self._endpoints.values():
            endpoint.writer_exited(writer)

    async def connect(self, descriptor: Descriptor) -> Peer:
        endpoint = self._endpoints.get(descriptor.way)
        if endpoint is None:
            ours = " and ".join(map(repr, self._endpoints))
            raise TransferError(f"{descriptor.agent}: the way is {descriptor.way!r} there; here there are {ours}")
        return await endpoint.connect(descriptor)

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        endpoint = self._of(peer)
        return SeveralWrite(endpoint, endpoint.write(peer, work, on_end))

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._of(peer).notify(peer, payload)

    def cancel(self, handle: WriteHandle) -> None:
        if not isinstance(handle, SeveralWrite):
            raise TransferError(f"{self._name}: {handle!r} is not a write of this endpoint")
        handle.endpoint.cancel(handle.handle)

    def expect(self, change: int) -> None:
        """It is not known by which the data will come."""
        for endpoint in self._endpoints.values():
            endpoint.expect(change)

    async def disconnect(self, peer: Peer) -> None:
        await self._of(peer).disconnect(peer)

    async def close(self) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.close()

    def _of(self, peer: Peer) -> Endpoint:
        endpoint = self._endpoints.get(peer.descriptor.way)
        if endpoint is None:
            raise TransferError(f"{self._name}: {peer!r} is not a peer of this endpoint")
        return endpoint
