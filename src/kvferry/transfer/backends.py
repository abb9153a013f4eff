"""Backends by name, with their faults: the one place that knows which classes there are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvferry.protocol.errors import ConfigError
from kvferry.transfer.contract import Endpoint, OnNotify, Region, TransferError
from kvferry.transfer.faulty import Faults, with_faults
from kvferry.transfer.local import BACKEND as LOCAL
from kvferry.transfer.local import LocalEndpoint
from kvferry.transfer.mooncake import MooncakeEndpoint
from kvferry.transfer.mooncake_agent import BACKEND as MOONCAKE
from kvferry.transfer.nics import IbDevice, ucx_devices
from kvferry.transfer.self_test import SelfTested, SpareRows
from kvferry.transfer.several import BACKEND as AUTO
from kvferry.transfer.several import Choice, Choose, Several
from kvferry.transfer.shared import Area
from kvferry.transfer.threaded import Options
from kvferry.transfer.ucx import UcxEndpoint
from kvferry.transfer.ucx_agent import BACKEND as UCX
from kvferry.transfer.ucxx import UcxxEndpoint
from kvferry.transfer.ucxx_agent import BACKEND as UCXX

_log = logging.getLogger(__name__)


class _Settings(Protocol):
    """What this needs of `kvferry.actors.settings.TransferSettings`, which lies above this package."""

    @property
    def backend(self) -> str: ...
    @property
    def transports(self) -> str: ...
    @property
    def ib_device(self) -> IbDevice: ...
    @property
    def batch_bytes(self) -> int: ...
    @property
    def poll_busy_ms(self) -> float: ...
    @property
    def poll_idle_ms(self) -> float: ...
    @property
    def max_agents(self) -> int: ...
    @property
    def staging_mib(self) -> int: ...
    @property
    def self_test_s(self) -> float: ...
    @property
    def faults(self) -> Faults: ...


@dataclass(frozen=True)
class Site:
    """The process that an endpoint is made for. Peers reach it at `host`, an address; `kernel` is the host of its
    `Address`. `areas`: the memory of its regions that others may map, if it is of that kind; `device` the number of the
    one that it computes on. `sleep` is for what is done after a time, and for injected faults.
    """

    host: str
    kernel: str
    regions: tuple[Region, ...]
    areas: Sequence[Area]
    incarnation: int
    on_notify: OnNotify
    loop: asyncio.AbstractEventLoop
    now_s: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    device: int = 0


def _options(settings: _Settings, site: Site) -> Options:
    """Of the backends with a thread of their own."""
    return Options(
        regions=site.regions,
        incarnation=site.incarnation,
        on_notify=site.on_notify,
        loop=site.loop,
        now_s=site.now_s,
        transports=settings.transports,
        host=site.host,
        batch_bytes=settings.batch_bytes,
        max_agents=settings.max_agents,
    )


def _ucx(settings: _Settings, site: Site) -> Endpoint:
    devices = ucx_devices(settings.ib_device, site.device)

    def within(site: Site) -> Endpoint:
        return UcxEndpoint(
            devices=devices,
            poll_busy_ms=settings.poll_busy_ms,
            poll_idle_ms=settings.poll_idle_ms,
            **_options(settings, site),
        )

    return _staging(settings, site, within)


def _ucxx(settings: _Settings, site: Site) -> Endpoint:
    return _staging(settings, site, lambda site: UcxxEndpoint(**_options(settings, site)))


def _staging(settings: _Settings, site: Site, within: Callable[[Site], Endpoint]) -> Endpoint:
    """Around a backend for which each slice of a token is a descriptor: not `local`, which copies them as they are."""
    from kvferry.transfer.staging.endpoint import StagingEndpoint, sizes_for  # with torch, which few roles need

    sizes = sizes_for(settings.staging_mib << 20)

    def open_inner(regions: tuple[Region, ...], on_notify: OnNotify) -> Endpoint:
        return within(replace(site, regions=regions, on_notify=on_notify))

    if sizes.size_bytes:
        _log.info(
            "kvferry-%016x: %d MiB to stage slices, when another layout comes: %d pieces of %d KiB to gather, %d rings "
            "of %d KiB to lend",
            site.incarnation, settings.staging_mib, sizes.slots, sizes.piece_bytes >> 10, sizes.rings,
            sizes.ring_bytes >> 10,
        )  # fmt: skip
    return StagingEndpoint(
        open_inner,
        regions=site.regions,
        incarnation=site.incarnation,
        on_notify=site.on_notify,
        loop=site.loop,
        now_s=site.now_s,
        sleep=site.sleep,
        sizes=sizes,
    )


def _mooncake(settings: _Settings, site: Site) -> Endpoint:
    return MooncakeEndpoint(
        poll_busy_ms=settings.poll_busy_ms, poll_idle_ms=settings.poll_idle_ms, **_options(settings, site)
    )


def _local(settings: _Settings, site: Site) -> Endpoint:
    return LocalEndpoint(
        regions=site.regions,
        areas=site.areas,
        incarnation=site.incarnation,
        on_notify=site.on_notify,
        loop=site.loop,
        now_s=site.now_s,
        batch_bytes=settings.batch_bytes,
        max_agents=settings.max_agents,
    )


def _auto(settings: _Settings, site: Site) -> Endpoint:
    """`local` for writers of this host, and `ucx` for the others; or for all, where the memory can't be mapped."""
    endpoints: dict[str, Endpoint] = {}
    refused = "its pool is not in memory that others can map"
    if site.areas:
        try:
            endpoints[LOCAL] = _local(settings, site)
        except TransferError as error:
            refused = str(error)
    if settings.transports != "host" or LOCAL not in endpoints:
        endpoints[UCX] = _ucx(settings, site)
    choose = chooser(site.kernel, settings.transports, "" if LOCAL in endpoints else refused)
    _log.info("kvferry-%016x: the data plane has %s", site.incarnation, " and ".join(endpoints))
    return Several(endpoints, choose, site.incarnation)


def chooser(kernel: str, transports: str, refused: str) -> Choose:
    """The rule of `auto`, for a process whose `Address.host` is `kernel`. `refused`: why there is no `local` here, or
    "".
    """

    def choose(host: str) -> Choice:
        same = bool(host) and host == kernel
        if same and not refused:
            return Choice(LOCAL, "the writer is on the same host, so the pool is mapped there: one copy, no wire")
        where = "on the same host" if same else "on another host" if host else "on a host that is not known"
        if not same and transports == "host":
            raise TransferError(f"the writer is {where}, and transfer.transports is host; set it to tcp")
        why = f"the writer is {where}{f', but {refused}' if same else ''}: UCX over {transports}"
        return Choice(UCX, why)

    return choose


Make = Callable[[_Settings, Site], Endpoint]

#: Name in the configuration -> how its endpoint is made.
BACKENDS: dict[str, Make] = {AUTO: _auto, LOCAL: _local, UCX: _ucx, UCXX: _ucxx, MOONCAKE: _mooncake}


def make_endpoint(settings: _Settings, site: Site) -> Endpoint:
    """The endpoint that `settings` ask for.

    Blocks until the backend has started (up to 1 s), so call it in a thread if the loop is at work. Raises ConfigError
    for an unknown backend and TransferError when the backend can't start.
    """
    make = BACKENDS.get(settings.backend)
    if make is None:
        raise ConfigError("transfer.backend", settings.backend, ", ".join(BACKENDS))
    endpoint = make(settings, site) if settings.self_test_s <= 0 else _tested(make, settings, site)
    return with_faults(endpoint, settings.faults, sleep=site.sleep, loop=site.loop)


def _tested(make: Make, settings: _Settings, site: Site) -> Endpoint:
    area = SpareRows()
    tested = SelfTested(area, site.on_notify, site.sleep, settings.self_test_s, site.host)
    areas = [*site.areas, area.area] if site.areas else ()
    regions = (*site.regions, area.region)
    tested.inner = make(settings, replace(site, regions=regions, areas=areas, on_notify=tested.heard))
    return tested
