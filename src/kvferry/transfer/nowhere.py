"""The data plane of an instance that hands its KV to nobody: the contract, with no peer to be had."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.protocol.offer import NOTHING_SAID, Offer
from kvferry.transfer.contract import (
    Descriptor,
    Peer,
    Region,
    Revoked,
    TransferError,
    WriteHandle,
    WriteResult,
)
from kvferry.transfer.work import Work


class Nowhere:
    """Implements `kvferry.transfer.contract.Endpoint`. Nobody can write here: it proves nothing and waits for nobody.

    Every method that needs a peer raises TransferError.
    """

    backend = "none"

    regions: tuple[Region, ...] = ()

    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor:
        raise TransferError("this instance has no data plane")

    async def revoke(self, writer: int) -> Revoked | None:
        """There is nothing to revoke, and nothing is proved."""

    def writer_exited(self, writer: int) -> None:
        """Nothing was laid aside."""

    async def connect(self, descriptor: Descriptor) -> Peer:
        raise TransferError(f"agent {descriptor.agent}: this instance has no data plane")

    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle:
        raise TransferError("this instance has no data plane")

    def notify(self, peer: Peer, payload: bytes) -> None:
        raise TransferError("this instance has no data plane")

    def cancel(self, handle: WriteHandle) -> None:
        raise TransferError("this instance has no data plane")

    def expect(self, change: int) -> None:
        """Nothing to look out for."""

    async def disconnect(self, peer: Peer) -> None:
        raise TransferError("this instance has no data plane")

    async def close(self) -> None:
        """Nothing to end."""
