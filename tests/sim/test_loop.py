"""The virtual-time loop: order, jumps, deadlock, and what it leaves behind."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.sim.loop import Deadlock, SeededRandom, VirtualClock, VirtualLoop, run


def test_time_jumps_to_each_timer_in_the_order_of_deadlines() -> None:
    async def main() -> list[tuple[str, float]]:
        clock, log = VirtualClock(), []

        async def nap(name: str, duration_s: float) -> None:
            await clock.sleep(duration_s)
            log.append((name, clock.now_s()))

        await asyncio.gather(nap("day", 86_400.0), nap("second", 1.0), nap("hour", 3_600.0), nap("also 1 s", 1.0))
        return log

    assert run(main()) == [("second", 1.0), ("also 1 s", 1.0), ("hour", 3_600.0), ("day", 86_400.0)]


def test_time_stands_still_while_something_is_ready() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return VirtualClock().now_s()

    assert run(main()) == 0.0


def test_asyncio_timeouts_run_on_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == 30.0


def test_deadlock_names_who_waits() -> None:
    async def never_filled() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="never_filled"):
        run(never_filled())


def test_what_main_raises_comes_out_and_tasks_left_behind_are_cancelled() -> None:
    ended: list[str] = []

    async def left_behind() -> None:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def main() -> None:
        asyncio.get_running_loop().create_task(left_behind())
        await asyncio.sleep(0)
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        run(main())
    assert ended == ["cancelled"]


def test_a_deadline_that_is_set_in_the_past_does_not_turn_time_back() -> None:
    async def main() -> float:
        await asyncio.sleep(5.0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        done = loop.create_future()
        loop.call_at(1.0, done.set_result, None)
        await done
        return loop.time()

    assert run(main()) == 5.0


def test_equal_seeds_give_equal_draws_whatever_the_rates() -> None:
    one, two = SeededRandom(7), SeededRandom(7)
    assert [one.bits(64), one.chance(0.0), one.bits(8)] == [two.bits(64), two.chance(0.0), two.bits(8)]
    three, four = SeededRandom(7), SeededRandom(7)
    assert three.chance(0.0) is False and four.chance(1.0) is True
    assert three.bits(64) == four.bits(64)
