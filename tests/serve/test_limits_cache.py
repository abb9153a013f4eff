"""The front's limits: one question for all who find them stale, and the last known ones while nobody answers."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause, Unavailable
from kvferry.protocol.messages import Roster
from kvferry.protocol.rank import Layout, RankInfo
from kvferry.serve.gateway import Limits, LimitsCache


class Clock:
    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError("nothing waits by time")


class Backend:
    """Each `roster` waits for its answer."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[Roster]] = []

    async def roster(self) -> Roster:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    async def submit(self, spec: Any, attempt: int) -> Any: ...
    async def status(self) -> Any: ...
    async def room(self, room: int) -> Any: ...


def roster(total: int) -> Roster:
    layout, nobody = Layout("m", "r", "float32", 16, 30, 3, 64), Address("", "", 0, "", 0)
    prefill, decode = (
        RankInfo(role, role, nobody, layout, max_prompt_tokens=500, max_total_tokens=total)
        for role in ("prefill", "decode")
    )
    return Roster(1, (prefill, decode), True)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_all_who_come_at_once_ask_once_and_one_that_leaves_takes_nothing_along() -> None:
    backend, clock = Backend(), Clock()
    cache = LimitsCache(backend, clock)
    askers = [asyncio.create_task(cache.get()) for _ in range(10)]
    await turn()
    askers[0].cancel()
    await turn()
    assert len(backend.asked) == 1
    backend.asked[0].set_result(roster(100))
    assert await asyncio.gather(*askers[1:]) == [Limits(500, 100)] * 9
    clock.time_s = 0.9
    assert await cache.get() == Limits(500, 100) and len(backend.asked) == 1
    clock.time_s = 1.1
    later = asyncio.create_task(cache.get())
    await turn()
    backend.asked[1].set_result(roster(200))
    assert await later == Limits(500, 200)


async def test_a_failure_reaches_all_and_the_next_asks_again() -> None:
    backend, clock = Backend(), Clock()
    cache = LimitsCache(backend, clock)
    down = Unavailable(Cause("unavailable", "the registry does not answer", "router"))
    askers = [asyncio.create_task(cache.get()) for _ in range(2)]
    await turn()
    backend.asked[0].set_exception(down)
    assert await asyncio.gather(*askers, return_exceptions=True) == [down, down]
    again = asyncio.create_task(cache.get())
    await turn()
    backend.asked[1].set_result(roster(100))
    assert await again == Limits(500, 100)
    clock.time_s = 5.0
    stale = asyncio.create_task(cache.get())
    await turn()
    backend.asked[2].set_exception(down)
    assert await stale == Limits(500, 100) and len(backend.asked) == 3
