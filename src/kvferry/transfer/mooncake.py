"""The `mooncake` backend: one-sided writes over tcp by Mooncake's TransferEngine. The engines are mooncake_driver's;
docs/adr/0015 says what their API can prove.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Unpack

from kvferry.transfer.contract import Peer, TransferError
from kvferry.transfer.mooncake_agent import BACKEND
from kvferry.transfer.mooncake_driver import MooncakeDriver
from kvferry.transfer.mooncake_mail import NOTE_BYTES
from kvferry.transfer.mooncake_peer import MooncakePeer, MooncakeWrite
from kvferry.transfer.threaded import Options, ThreadedEndpoint


class MooncakeEndpoint(ThreadedEndpoint[MooncakePeer, MooncakeWrite]):
    """`Endpoint` over Mooncake. Raises TransferError when it is not installed or gives no engine.

    `transports`: "host" is the loopback address, "tcp" the address `host`. A connection is made beside other work; one
    that can't be made breaks its writes. A cancelled write that still waits behind others ends at once; all other
    writes to one peer end in order.
    """

    _backend: ClassVar[str] = BACKEND
    _peers: ClassVar[type[MooncakePeer]] = MooncakePeer
    _writes: ClassVar[type[MooncakeWrite]] = MooncakeWrite

    def __init__(self, *, poll_busy_ms: float = 1.0, poll_idle_ms: float = 20.0, **options: Unpack[Options]) -> None:
        driver = partial(MooncakeDriver, poll_busy_ms=poll_busy_ms, poll_idle_ms=poll_idle_ms)
        super().__init__(driver, **options)

    def notify(self, peer: Peer, payload: bytes) -> None:
        """Raises TransferError for a payload above `NOTE_BYTES`, too."""
        if len(payload) > NOTE_BYTES:
            raise TransferError(f"{self._name}: a notification of {len(payload)} bytes; the limit is {NOTE_BYTES}")
        super().notify(peer, payload)
