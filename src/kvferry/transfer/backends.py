"""Backends by name, with their faults: the one place that knows which classes there are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.offer import CUDA, SHARED, Offer
from kvferry.protocol.offer import HOST as PRIVATE
from kvferry.transfer.contract import Endpoint, OnNotify, Region, TransferError
from kvferry.transfer.faulty import Faults, with_faults
from kvferry.transfer.local import BACKEND as LOCAL
from kvferry.transfer.local import LocalEndpoint
from kvferry.transfer.mooncake import MooncakeEndpoint
from kvferry.transfer.mooncake_agent import BACKEND as MOONCAKE
from kvferry.transfer.nics import IbDevice, devices_for
from kvferry.transfer.self_test import SelfTested, SpareRows
from kvferry.transfer.several import Several
from kvferry.transfer.shared import Area
from kvferry.transfer.spans import in_device
from kvferry.transfer.threaded import Options
from kvferry.transfer.ucx import UcxEndpoint
from kvferry.transfer.ucx_agent import BACKEND as UCX
from kvferry.transfer.ucxx import UcxxEndpoint
from kvferry.transfer.ucxx_agent import BACKEND as UCXX
from kvferry.transfer.ways import AUTO, HOST, RDMA, choose, ways_of

#: From here on agents over RDMA are numbered: those over tcp, beside them, never get there.
_RDMA_GENERATIONS = 1 << 20

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
    one that it computes on. `sleep` is for what is done after a time, and for injected faults. `sysfs`: where the
    kernel lists network devices.
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
    sysfs: Path = Path("/sys/class")


def _options(settings: _Settings, site: Site, transports: str) -> Options:
    """Of the backends with a thread of their own."""
    return Options(
        regions=site.regions,
        incarnation=site.incarnation,
        on_notify=site.on_notify,
        loop=site.loop,
        now_s=site.now_s,
        transports=transports,
        host=site.host,
        batch_bytes=settings.batch_bytes,
        max_agents=settings.max_agents,
    )


def _ucx(settings: _Settings, site: Site, transports: str) -> Endpoint:
    devices = devices_for(settings.ib_device, site.device, settings.transports, site.sysfs)
    if transports == RDMA and not devices.rdma:
        raise TransferError(devices.lacking)

    def within(site: Site) -> Endpoint:
        options = _options(settings, site, transports)
        if transports == RDMA:
            options["generations_from"] = _RDMA_GENERATIONS
        return UcxEndpoint(
            devices=devices.over(transports),
            poll_busy_ms=settings.poll_busy_ms,
            poll_idle_ms=settings.poll_idle_ms,
            **options,
        )

    return _staging(settings, site, within)


def _ucxx(settings: _Settings, site: Site, transports: str) -> Endpoint:
    return _staging(settings, site, lambda site: UcxxEndpoint(**_options(settings, site, transports)))


def _staging(settings: _Settings, site: Site, within: Callable[[Site], Endpoint]) -> Endpoint:
    """Around a backend for which each slice of a token is a descriptor: not `local`, which copies them as they are."""
    from kvferry.transfer.staging.endpoint import StagingEndpoint, sizes_for  # with torch, which few roles need

    # It copies host memory; slices of a device's go one by one.
    sizes = sizes_for(0 if in_device(site.regions) else settings.staging_mib << 20)

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


def _mooncake(settings: _Settings, site: Site, transports: str) -> Endpoint:
    return MooncakeEndpoint(
        poll_busy_ms=settings.poll_busy_ms, poll_idle_ms=settings.poll_idle_ms, **_options(settings, site, transports)
    )


def _local(settings: _Settings, site: Site, transports: str) -> Endpoint:
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


Make = Callable[[_Settings, Site, str], Endpoint]

#: Backend -> how its endpoint is made, over some transports.
_MAKERS: dict[str, Make] = {LOCAL: _local, UCX: _ucx, UCXX: _ucxx, MOONCAKE: _mooncake}

#: Names in the configuration.
BACKENDS = (AUTO, *_MAKERS)


def make_endpoint(settings: _Settings, site: Site) -> tuple[Endpoint, Offer]:
    """The endpoint that `settings` ask for, and what this process offers its peers by it.

    Blocks until its backends have started (up to 1 s each), so call it in a thread if the loop is at work. Raises
    ConfigError for an unknown backend and for devices that are not there, and TransferError when a backend can't start.
    """
    if settings.backend not in BACKENDS:
        raise ConfigError("transfer.backend", settings.backend, ", ".join(BACKENDS))
    made: tuple[Endpoint, Offer] = _several(settings, site) if settings.self_test_s <= 0 else _tested(settings, site)
    endpoint, offer = made
    return with_faults(endpoint, settings.faults, sleep=site.sleep, loop=site.loop), offer


def _several(settings: _Settings, site: Site) -> tuple[Several, Offer]:
    """All ways that the settings allow and that there are here. On one host there is no more than the best of them:
    what is lacking here is lacking in no other process.
    """
    wanted = ways_of(settings.backend, settings.transports)
    devices = devices_for(settings.ib_device, site.device, settings.transports, site.sysfs)
    made: dict[str, Endpoint] = {}
    lacking: dict[str, str] = {}
    for way in wanted:
        backend, _, over = way.partition("/")
        if made and over == HOST:
            lacking[way] = f"{' and '.join(made)} is here"
            continue
        try:
            if backend == LOCAL and settings.backend == AUTO and not site.areas:
                raise TransferError("its pool is not in memory that others can map")
            made[way] = _MAKERS[backend](settings, site, over)
        except TransferError as error:
            if way == wanted[-1]:
                raise
            lacking[way] = str(error)
    _log.info("kvferry-%016x: the data plane has %s", site.incarnation, " and ".join(made))
    for way, why in lacking.items():
        _log.info("kvferry-%016x: it lacks %s: %s", site.incarnation, way, why)
    memory = CUDA if in_device(site.regions) else SHARED if site.areas else PRIVATE
    nics = devices.nics if f"{UCX}/{RDMA}" in made else ()
    offer = Offer(tuple(made), memory, nics, site.kernel)
    return Several(settings.backend, made, partial(choose, wanted, offer, lacking=lacking), site.incarnation), offer


def _tested(settings: _Settings, site: Site) -> tuple[SelfTested, Offer]:
    area = SpareRows()
    tested = SelfTested(area, site.on_notify, site.sleep, settings.self_test_s, site.host)
    areas = [*site.areas, area.area] if site.areas else ()
    regions = (*site.regions, area.region)
    tested.inner, offer = _several(settings, replace(site, regions=regions, areas=areas, on_notify=tested.heard))
    return tested, offer
