"""What `control.py` measures is control alone: an engine and a data plane that cost next to nothing stand under it."""

from __future__ import annotations

import asyncio

import numpy as np

from kvferry.actors.actor import Actor
from kvferry.actors.bootstrap.registry import Registry
from kvferry.actors.decode.decode import Decode
from kvferry.actors.inbox import Inbox
from kvferry.actors.links import LinkLayer
from kvferry.actors.parts import Parts
from kvferry.actors.ports import Network, Resolve
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.router.router import Router
from kvferry.actors.settings import ClockSettings, DecodeSettings, PrefillSettings, RouterSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.engine.contract import Drawn, Engine, EngineLimits, StepPlan, StepResult
from kvferry.engine.scripted import ScriptedTexts
from kvferry.protocol.metadata import ROW_BYTES
from kvferry.protocol.rank import Layout, RankInfo
from kvferry.transfer.contract import Region, RegionKind
from kvferry.transfer.fake import FakeFabric

MAILBOX = 1 << 16
MOST_ROOMS = 1 << 16
PAGE_SIZE = 16
LAYOUT = Layout("none", "1", "float32", PAGE_SIZE, layers=1, kv_heads=1, head_dim=1)
LIMITS = EngineLimits(pages=1 << 14, page_size=PAGE_SIZE, context_tokens=8192, vocab_size=50_000)
TOKEN = 7


class ZeroCostEngine:
    """`kvferry.engine.contract.Engine` that computes nothing: every token is the same, every step ends at once."""

    layout, limits, metadata_rows = LAYOUT, LIMITS, 4096

    def __init__(self) -> None:
        self._pool = np.zeros((2, LIMITS.pages, PAGE_SIZE), dtype=np.float32)
        self._rows = np.zeros((self.metadata_rows, ROW_BYTES), dtype=np.uint8)

    def regions(self) -> tuple[Region, ...]:
        pages = tuple(
            Region(RegionKind.PAGES, part, 0, pool.ctypes.data, pool[0].nbytes, LIMITS.pages, 0, 1, PAGE_SIZE)
            for part, pool in zip("kv", self._pool, strict=True)
        )
        base, size = self._rows.ctypes.data, ROW_BYTES
        return (*pages, Region(RegionKind.ROWS, "metadata", -1, base, size, self.metadata_rows))

    def metadata_row(self, slot: int) -> memoryview:
        row: memoryview = self._rows[slot].data
        return row

    async def step(self, plan: StepPlan) -> StepResult:
        drawn = (Drawn(TOKEN, 1.0) if sequence.sampling is not None else None for sequence in plan.sequences)
        return StepResult(plan.step, tuple(drawn), 0.0)

    async def close(self) -> None:
        """Nothing to end."""


def fabric() -> FakeFabric:
    """Copies at once; both roles must live in this process."""

    async def no_wait(_: float) -> None: ...

    return FakeFabric(
        loop=asyncio.get_running_loop(), sleep=no_wait, now_s=SystemClock().now_s, bandwidth_bytes_s=float("inf")
    )


def build(role: str, network: LinkLayer, resolve: Resolve, plane: FakeFabric | None) -> Actor:
    """A production actor over real links; limits are wide, so that none of them is what is measured."""
    clock, clocks = SystemClock(), ClockSettings()
    if role == "registry":
        return Registry(network, clock, MAILBOX, {"prefill": 1, "decode": 1})
    if role == "router":
        settings = RouterSettings(max_requests=MOST_ROOMS, queue_limit=MOST_ROOMS)
        return Router(network, clock, MAILBOX, SystemRandom(), resolve, settings, clocks, "fake")
    assert plane is not None
    return _leader(role, network, resolve, plane, ZeroCostEngine())


def _leader(role: str, network: Network, resolve: Resolve, plane: FakeFabric, engine: Engine) -> Actor:
    clock, inbox = SystemClock(), Inbox()
    tokens = LIMITS.context_tokens
    info = RankInfo(
        f"{role}-0", role, network.address, LAYOUT, pages=LIMITS.pages,
        max_prompt_tokens=tokens, max_total_tokens=tokens,
    )  # fmt: skip
    endpoint = plane.endpoint(engine.regions(), network.address.incarnation, inbox)
    parts = Parts(
        network, clock, MAILBOX, resolve, engine, ScriptedTexts(), endpoint, info, ClockSettings(), MOST_ROOMS
    )
    if role == "prefill":
        return Prefill(parts, PrefillSettings(chunk_tokens=1024, batch_tokens=8192))
    decode = Decode(parts, DecodeSettings(max_running=2048))
    inbox.deliver = decode.notified
    return decode
