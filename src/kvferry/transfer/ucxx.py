"""The `ucxx` backend: tag messages through UCXX, two-sided. What a writer sends is received aside, checked against the
regions and put into its place by the target's own thread, so that nothing lands which the target did not want.

That costs two copies more than one-sided writing, and it makes *revoked* a proof on every network. The workers are
ucxx_driver's; what is said between them, ucxx_wire's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from kvferry.transfer.contract import OnNotify, Region
from kvferry.transfer.threaded import ThreadedEndpoint
from kvferry.transfer.ucxx_agent import BACKEND as UCXX
from kvferry.transfer.ucxx_driver import UcxxDriver
from kvferry.transfer.ucxx_source import UcxxPeer, UcxxWrite


class UcxxEndpoint(ThreadedEndpoint[UcxxPeer, UcxxWrite]):
    """`Endpoint` over UCXX. Raises TransferError when it is not installed or UCX gives no agent.

    `transports`: "host" is tcp on the loopback device, "tcp" on the device that has the address `host`. It has at most
    `max_agents` agents at a time, one for each writer and one for each target. Each takes up to `batch_bytes` for what
    is under way. A cancelled write that still waits behind others ends at once; all other writes to one peer end in
    order.
    """

    _backend: ClassVar[str] = UCXX
    _peers: ClassVar[type[UcxxPeer]] = UcxxPeer
    _writes: ClassVar[type[UcxxWrite]] = UcxxWrite

    def __init__(
        self,
        *,
        regions: tuple[Region, ...],
        incarnation: int,
        on_notify: OnNotify,
        loop: asyncio.AbstractEventLoop,
        now_s: Callable[[], float],
        transports: str = "host",
        host: str = "127.0.0.1",
        batch_bytes: int = 8 * 1024 * 1024,
        max_agents: int = 256,
    ) -> None:
        make_driver = partial(
            UcxxDriver,
            incarnation=incarnation,
            transports=transports,
            host=host,
            batch_bytes=batch_bytes,
            max_agents=max_agents,
            regions=regions,
            on_notify=on_notify,
            now_s=now_s,
        )
        super().__init__(
            regions=regions,
            incarnation=incarnation,
            loop=loop,
            now_s=now_s,
            make_driver=lambda deliver: make_driver(deliver=deliver),
        )
