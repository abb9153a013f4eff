"""Backends by name, with their faults: the one place that knows which classes there are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvferry.protocol.errors import ConfigError
from kvferry.transfer.contract import Endpoint, OnNotify, Region
from kvferry.transfer.faulty import Faults, with_faults
from kvferry.transfer.ucx import UcxEndpoint
from kvferry.transfer.ucx_agent import BACKEND as UCX


class _Settings(Protocol):
    """What this needs of `kvferry.actors.settings.TransferSettings`, which lies above this package."""

    @property
    def backend(self) -> str: ...
    @property
    def transports(self) -> str: ...
    @property
    def batch_bytes(self) -> int: ...
    @property
    def poll_busy_ms(self) -> float: ...
    @property
    def poll_idle_ms(self) -> float: ...
    @property
    def max_agents(self) -> int: ...
    @property
    def faults(self) -> Faults: ...


def make_endpoint(
    settings: _Settings,
    *,
    host: str,
    regions: tuple[Region, ...],
    incarnation: int,
    on_notify: OnNotify,
    loop: asyncio.AbstractEventLoop,
    now_s: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> Endpoint:
    """The endpoint that `settings` ask for; peers reach this process at `host`; `sleep` drives injected faults only.

    Blocks until the backend's agent has started (0.1 to 1 s), so call it in a thread if the loop is at work.
    Raises ConfigError for an unknown backend and TransferError when the backend can't start.
    """
    if settings.backend != UCX:
        raise ConfigError("transfer.backend", settings.backend, UCX)
    endpoint = UcxEndpoint(
        regions=regions,
        incarnation=incarnation,
        on_notify=on_notify,
        loop=loop,
        now_s=now_s,
        transports=settings.transports,
        host=host,
        batch_bytes=settings.batch_bytes,
        poll_busy_ms=settings.poll_busy_ms,
        poll_idle_ms=settings.poll_idle_ms,
        max_agents=settings.max_agents,
    )
    return with_faults(endpoint, settings.faults, sleep=sleep, loop=loop)
