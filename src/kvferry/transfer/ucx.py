"""The `ucx` backend: one-sided UCX through NIXL's agent (docs/adr/0001). The agents are ucx_driver's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from kvferry.transfer.contract import OnNotify, Region
from kvferry.transfer.threaded import ThreadedEndpoint
from kvferry.transfer.ucx_agent import BACKEND
from kvferry.transfer.ucx_driver import Driver
from kvferry.transfer.ucx_peer import UcxPeer, UcxWrite


class UcxEndpoint(ThreadedEndpoint[UcxPeer, UcxWrite]):
    """`Endpoint` over UCX. Raises TransferError when UCX gives no agent over `transports`.

    Over tcp, peers reach it at `host`, an address of this machine, by the device that has it or by `devices`. It has at
    most `max_agents` agents at a time, one for each writer and one for each target; each takes about 10 MB.

    Construction waits for the first agent to start, 0.1 to 1 s. A cancelled write that still waits behind others ends
    at once; all other writes to one peer end in order.
    """

    _backend: ClassVar[str] = BACKEND
    _peers: ClassVar[type[UcxPeer]] = UcxPeer
    _writes: ClassVar[type[UcxWrite]] = UcxWrite

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
        devices: str = "",
        batch_bytes: int = 8 * 1024 * 1024,
        poll_busy_ms: float = 1.0,
        poll_idle_ms: float = 20.0,
        max_agents: int = 256,
    ) -> None:
        make_driver = partial(
            Driver,
            incarnation=incarnation,
            transports=transports,
            host=host,
            devices=devices,
            batch_bytes=batch_bytes,
            poll_busy_ms=poll_busy_ms,
            poll_idle_ms=poll_idle_ms,
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
