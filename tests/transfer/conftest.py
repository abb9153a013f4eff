"""Shared by the tests of the data plane: real memory with a pattern in it, and endpoints that are closed for sure."""

import asyncio
import ctypes
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvferry.actors.settings import TransferSettings
from kvferry.transfer import backends
from kvferry.transfer.contract import Region, RegionKind, decode_descriptor, encode_descriptor
from kvferry.transfer.cost import Costs
from kvferry.transfer.fake import FakeFabric
from kvferry.transfer.faulty import FaultyEndpoint
from kvferry.transfer.local import LocalEndpoint
from kvferry.transfer.mooncake import MooncakeEndpoint
from kvferry.transfer.mooncake_agent import load as load_mooncake
from kvferry.transfer.shared import Area
from kvferry.transfer.spans import make_spans
from kvferry.transfer.staging.endpoint import StagingEndpoint, StagingSizes
from kvferry.transfer.ucx import UcxEndpoint
from kvferry.transfer.ucx_agent import Agent
from kvferry.transfer.ucxx import UcxxEndpoint

LAYERS, PAGES, PAGE_BYTES, ROW_BYTES = 3, 80, 4096, 64
REGION_BYTES = PAGES * PAGE_BYTES


class Memory:
    """K and V of three layers and metadata rows, in memory that can be shared. `seed` None leaves it zero."""

    def __init__(self, seed=None, pages=PAGES, page_bytes=PAGE_BYTES):
        sizes = [pages * page_bytes] * (2 * LAYERS) + [4 * ROW_BYTES]
        self.area = Area(sum(sizes))
        self.areas = [self.area]
        whole = np.frombuffer(self.area.buffer, np.uint8)
        self.arrays = np.split(whole[: sum(sizes)], np.cumsum(sizes)[:-1])
        if seed is not None:
            random = np.random.default_rng(seed)
            for array in self.arrays:
                array[:] = random.integers(1, 256, array.size, dtype=np.uint8)
        pools = (
            Region(RegionKind.PAGES, "kv"[index % 2], index // 2, array.ctypes.data, page_bytes, pages, 0, 1)
            for index, array in enumerate(self.arrays[:-1])
        )
        rows = Region(RegionKind.ROWS, "metadata", -1, self.arrays[-1].ctypes.data, ROW_BYTES, 4)
        self.regions = (*pools, rows)

    def pages(self, index):
        return self.arrays[index].reshape(-1, self.regions[index].item_bytes)


class Heads:
    """K and V of two layers for some of 8 heads, [pages, tokens, heads, bytes]."""

    PAGES, TOKENS, HEAD_BYTES = 40, 4, 32

    def __init__(self, first=0, heads=8, seed=None):
        shape = (self.PAGES, self.TOKENS, heads, self.HEAD_BYTES)
        random = np.random.default_rng(seed)
        made = [random.integers(1, 256, shape, dtype=np.uint8) for _ in range(4)]
        self.arrays = [array if seed is not None else np.zeros_like(array) for array in made]
        self.heads = slice(first, first + heads)
        item = self.TOKENS * heads * self.HEAD_BYTES
        self.regions = tuple(
            Region(
                RegionKind.PAGES, "kv"[i % 2], i // 2, array.ctypes.data, item, self.PAGES, first, heads, self.TOKENS
            )
            for i, array in enumerate(self.arrays)
        )

    def from_heads(self, index, other, pages, of):
        """Where `pages[i]` has what `other` has in its page `of[i]`, as far as both have the heads; the rest is 0."""
        whole = np.zeros((self.PAGES, self.TOKENS, 8, self.HEAD_BYTES), np.uint8)
        whole[pages, :, other.heads] = other.arrays[index][of]
        return whole[:, :, self.heads]


@dataclass
class Site:
    """One endpoint with its memory and what it has been told."""

    memory: Memory
    notes: list = field(default_factory=list)
    on_note: object = None
    endpoint: object = None
    inner: object = None

    def hear(self, agent, payload):
        self.notes.append((agent, payload))
        if self.on_note is not None:
            self.on_note()


class Outcome:
    """An `on_end` that can be awaited and that fails when it is called twice."""

    def __init__(self):
        self.future = asyncio.get_running_loop().create_future()

    def __call__(self, result):
        self.future.set_result(result)

    def __await__(self):
        return asyncio.wait_for(asyncio.shield(self.future), 60).__await__()


async def soon(condition):
    """Wait until the condition holds; fails after a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def rounds(count):
    """The first region's bytes, `count` times: a write of any length on little memory."""
    return make_spans(0, 0, 0, 0, [REGION_BYTES] * count)


async def said(process):
    """The next line that it prints."""
    return (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()


async def landed(source, target, peer, work):
    """Write it, and see it flushed."""
    outcome = Outcome()
    target.endpoint.expect(1)
    source.endpoint.write(peer, work, outcome)
    assert (await outcome).outcome.value == "flushed"
    target.endpoint.expect(-1)


async def stdin_ends():
    """Of this process, which reads nothing from it."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(sys.stdin.fileno(), ended.set_result, None)
    await ended
    loop.remove_reader(sys.stdin.fileno())


@pytest.fixture
def tools():
    """The helpers above, for test files that can't import this one."""
    return Tools


class Tools:
    Memory, Heads, Site, Outcome = Memory, Heads, Site, Outcome
    REGION_BYTES = REGION_BYTES
    soon, said, rounds, landed = map(staticmethod, (soon, said, rounds, landed))

    @staticmethod
    async def open_staging(*args, **options):
        return await open_staging(*args, **options)

    @staticmethod
    def hex_of(descriptor):
        return encode_descriptor(descriptor).hex().encode()

    @staticmethod
    def descriptor_of(text):
        return decode_descriptor(bytes.fromhex(text))

    @staticmethod
    def stop_flag():
        return ctypes.c_int32(0)


@pytest.fixture
def no_survivors():
    """No endpoint's thread outlives the test."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry-")] == []


def sockets():
    links = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sorted(link for link in links if link.startswith("socket:"))


@pytest.fixture(scope="session", autouse=True)
def nixl_comes_first():
    """The wheels of NIXL and UCXX each bring a UCX of their own. UCXX's is loaded with global symbols, which NIXL's
    plugin would take for its own if it came later: a crash at some time. No process of the product has both; the
    tests' has.
    """
    agent = Agent(0xA9E27, 0, "host", "127.0.0.1", ())
    yield
    agent.delete()


def endpoint_of(kind, memory, incarnation, on_notify, **options):
    """A real endpoint: "local", or "ucx", "ucxx" or "mooncake" with "-host" or "-tcp"."""
    options |= {"regions": memory.regions, "incarnation": incarnation, "on_notify": on_notify, "now_s": time.monotonic}
    options |= {"loop": asyncio.get_running_loop()}
    if kind == "local":
        return LocalEndpoint(areas=memory.areas, **options)
    backend, _, transports = kind.partition("-")
    kinds = {"ucx": UcxEndpoint, "ucxx": UcxxEndpoint, "mooncake": MooncakeEndpoint}
    return kinds[backend](transports=transports, **options)


#: Small enough for several pieces of the little memory above; staging always pays.
STAGING_SIZES = StagingSizes(piece_bytes=4096, slots=3, ring_bytes=16 * 1024, rings=2)


def made(transports, memory, incarnation, on_notify):
    """What the roles would have: several backends, tried before use; slices that are staged where that pays."""
    site = backends.Site(
        host="127.0.0.1", kernel="here", regions=memory.regions, areas=[], incarnation=incarnation,
        on_notify=on_notify, loop=asyncio.get_running_loop(), now_s=time.monotonic, sleep=asyncio.sleep,
    )  # fmt: skip
    return backends.make_endpoint(TransferSettings(backend="auto", transports=transports, staging_mib=1), site)[0]


async def open_staging(kind, fabric, incarnation, memory, sizes=STAGING_SIZES, costs=None, **options):
    """The endpoint within is `site.inner`. Of the kind "made-tcp" it is what the roles have."""
    site, loop = Site(memory), asyncio.get_running_loop()
    if kind.startswith("made-"):
        site.endpoint = made(kind.removeprefix("made-"), memory, incarnation, site.hear)
        return site

    def open_inner(regions, on_notify):
        if kind == "fake":
            site.inner = fabric.endpoint(regions, incarnation, on_notify)
        else:
            site.inner = UcxEndpoint(
                regions=regions,
                incarnation=incarnation,
                on_notify=on_notify,
                loop=loop,
                now_s=time.monotonic,
                transports=kind.removeprefix("ucx-"),
                batch_bytes=256 * 1024,
                **options,
            )
        return site.inner

    site.endpoint = StagingEndpoint(
        open_inner,
        regions=memory.regions,
        incarnation=incarnation,
        on_notify=site.hear,
        loop=loop,
        now_s=time.monotonic,
        sleep=asyncio.sleep,
        sizes=sizes,
        costs=costs or Costs(span_us=1e6),
    )
    return site


async def open_site(kind, fabric, incarnation, memory, **options):
    site = Site(memory)
    loop = asyncio.get_running_loop()
    if kind.startswith("staging-"):
        return await open_staging(kind.removeprefix("staging-"), fabric, incarnation, memory, **options)
    if kind == "fake":
        site.endpoint = fabric.endpoint(memory.regions, incarnation, site.hear)
    elif kind == "faulty":
        inner = fabric.endpoint(memory.regions, incarnation, site.hear)
        site.endpoint = FaultyEndpoint(inner, delay_s=0.001, stall_after=-1, sleep=asyncio.sleep, loop=loop)
    else:
        site.endpoint = endpoint_of(
            kind, memory, incarnation, lambda *note: site.hear(*note), batch_bytes=256 * 1024, **options
        )
    return site


@pytest.fixture
async def make_site(no_survivors):
    """make_site(kind, incarnation, memory): endpoints that are closed at the end, and leave no socket behind."""
    sites, before = [], []
    fabric = FakeFabric(
        loop=asyncio.get_running_loop(), sleep=asyncio.sleep, now_s=time.monotonic, batch_bytes=256 * 1024
    )

    async def make(kind, incarnation, memory, **options):
        if kind.startswith("mooncake") and "mooncake.engine" not in sys.modules:
            without = len(sockets())
            load_mooncake()
            await soon(lambda: len(sockets()) > without)  # the library has one as long as the process lives
        if not sites:
            before.extend(sockets())
        sites.append(await open_site(kind, fabric, incarnation, memory, **options))
        return sites[-1]

    yield make
    for site in sites:
        await site.endpoint.close()
    assert not sites or sockets() == before


@pytest.fixture
async def start(make_site):
    """start(script, *arguments): a process beside this file. None outlives the test."""
    started = []

    async def begin(script, *arguments):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name(script)),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.returncode is None:
            process.kill()
        process.stdin.close()
        await process.wait()
        process._transport.close()
