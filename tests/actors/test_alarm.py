"""The alarm of a process's links: the earliest of what is asked for, once."""

import asyncio
import math

import pytest

from kvferry.actors.alarm import Alarm
from kvferry.sim.loop import VirtualClock, run


def test_it_rings_at_the_earliest_time_that_was_asked_for_and_once():
    async def main():
        clock, rung = VirtualClock(), []
        alarm = Alarm(clock, lambda: rung.append(clock.now_s()))
        assert not alarm.is_set
        for at_s in (5.0, math.inf, 2.0, 3.0):
            alarm.by(at_s)
        assert alarm.is_set
        await asyncio.sleep(10)
        assert rung == [2.0] and not alarm.is_set

    run(main())


def test_who_is_rung_may_ask_again_and_a_time_that_is_over_is_soon():
    async def main():
        clock, rung = VirtualClock(), []

        def ring():
            rung.append(clock.now_s())
            if len(rung) < 3:
                alarm.by(1.0)

        alarm = Alarm(clock, ring)
        alarm.by(1.0)
        await asyncio.sleep(10)
        assert rung == pytest.approx([1.0, 1.001, 1.002])  # a millisecond apart at least: it doesn't spin

    run(main())


def test_a_closed_one_rings_no_more():
    async def main():
        rung = []
        alarm = Alarm(VirtualClock(), lambda: rung.append(1))
        alarm.by(1.0)
        alarm.close()
        alarm.by(2.0)
        await asyncio.sleep(10)
        assert not rung and not alarm.is_set

    run(main())
