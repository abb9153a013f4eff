"""The `ucxx` backend: tag messages through UCXX, two-sided. What a writer sends is received aside, checked against the
regions and put into its place by the target's own thread, so that nothing lands which the target did not want.

That costs two copies more than one-sided writing, and it makes *revoked* a proof on every network. The workers are
ucxx_driver's; what is said between them, ucxx_wire's.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

from kvferry.transfer.threaded import Options, ThreadedEndpoint
from kvferry.transfer.ucxx_agent import BACKEND
from kvferry.transfer.ucxx_driver import UcxxDriver
from kvferry.transfer.ucxx_source import UcxxPeer, UcxxWrite


class UcxxEndpoint(ThreadedEndpoint[UcxxPeer, UcxxWrite]):
    """`Endpoint` over UCXX. Raises TransferError when it is not installed or UCX gives no agent.

    `transports`: "host" is tcp on the loopback device, "tcp" on the device that has the address `host`. Each agent
    takes up to `batch_bytes` for what is under way. A cancelled write that still waits behind others ends at once; all
    other writes to one peer end in order.
    """

    _backend: ClassVar[str] = BACKEND
    _peers: ClassVar[type[UcxxPeer]] = UcxxPeer
    _writes: ClassVar[type[UcxxWrite]] = UcxxWrite

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__(UcxxDriver, **options)
