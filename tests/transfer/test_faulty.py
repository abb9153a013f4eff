"""Delay and stall, on a clock that the test turns."""

import asyncio

import pytest

from kvferry.transfer.contract import TransferError, WriteOutcome
from kvferry.transfer.fake import FakeFabric
from kvferry.transfer.faulty import FaultyEndpoint
from kvferry.transfer.spans import make_spans


class Clock:
    """Virtual time: `sleep` ends when `advance` has reached its end."""

    def __init__(self):
        self.now, self.sleepers = 0.0, []

    def now_s(self):
        return self.now

    async def sleep(self, duration_s):
        woken = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now + duration_s, woken))
        await woken

    async def advance(self, duration_s):
        end = self.now + duration_s
        await settle()
        while due := sorted((at for at, woken in self.sleepers if at <= end + 1e-9 and not woken.done())):
            self.now = due[0]
            for at, woken in self.sleepers:
                if at <= self.now + 1e-9 and not woken.done():
                    woken.set_result(None)
            await settle()
        self.now = end


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


class Bench:
    def __init__(self, tools, **faults):
        loop, self.clock = asyncio.get_running_loop(), Clock()
        fabric = FakeFabric(loop=loop, sleep=self.clock.sleep, now_s=self.clock.now_s, bandwidth_bytes_s=4096.0)
        self.target, self.memory = tools.Site(tools.Memory()), tools.Memory(1)
        self.fabric = fabric
        self.target.endpoint = fabric.endpoint(self.target.memory.regions, 2, self.target.hear)
        inner = fabric.endpoint(self.memory.regions, 1, lambda agent, payload: None)
        self.endpoint = FaultyEndpoint(inner, sleep=self.clock.sleep, loop=loop, **faults)
        self.ended = []

    async def connect(self):
        self.descriptor = await self.target.endpoint.accept(1)
        self.peer = await self.endpoint.connect(self.descriptor)
        return self

    def write(self, name):
        """One page: a second on the wire."""
        return self.endpoint.write(
            self.peer,
            make_spans(0, 0, 0, 0, [4096]),
            lambda result: self.ended.append((name, result.outcome.value, self.clock.now)),
        )


async def test_a_delayed_wire_is_serial_and_goes_on_while_the_write_before_is_carried(tools):
    bench = await Bench(tools, delay_s=10, stall_after=-1).connect()
    bench.write("a")
    await bench.clock.advance(4)
    bench.write("b")
    bench.endpoint.notify(bench.peer, b"after b was passed on")
    await bench.clock.advance(15)
    assert bench.ended == [("a", "flushed", 11)] and bench.target.notes == []
    await bench.clock.advance(12)  # b: from 10, when a was passed on, to 20, and a second of carrying
    assert bench.ended == [("a", "flushed", 11), ("b", "flushed", 21)]
    assert [payload for _, payload in bench.target.notes] == [b"after b was passed on"]
    await bench.clock.advance(69)
    bench.write("c")  # at 100: its own delay starts when it is issued
    await bench.clock.advance(20)
    assert bench.ended[2:] == [("c", "flushed", 111)]


async def test_a_write_cancelled_in_its_delay_ends_at_once_and_moves_nothing(tools):
    bench = await Bench(tools, delay_s=10, stall_after=-1).connect()
    handle = bench.write("a")
    await bench.clock.advance(4)
    bench.endpoint.cancel(handle)
    await settle()
    assert bench.ended == [("a", "cancelled", 4)] and handle.result.size_bytes == 0
    await bench.clock.advance(20)
    assert len(bench.ended) == 1 and not bench.target.memory.arrays[0].any()


async def test_one_write_stalls_until_it_is_released_and_holds_up_those_behind(tools):
    bench = await Bench(tools, delay_s=0, stall_after=1).connect()
    for name in "abc":
        bench.write(name)
    await bench.clock.advance(1000)
    assert bench.ended == [("a", "flushed", 1)] and bench.endpoint.stalled == 1
    bench.endpoint.release_stalled()
    await bench.clock.advance(10)
    assert bench.ended[1:] == [("b", "flushed", 1001), ("c", "flushed", 1002)] and bench.endpoint.stalled == 0


@pytest.mark.parametrize("cancel_ends", [True, False])
async def test_cancelling_a_stalled_write(tools, cancel_ends):
    bench = await Bench(tools, delay_s=0, stall_after=0, cancel_ends=cancel_ends).connect()
    stalled, behind = bench.write("a"), bench.write("b")
    await bench.clock.advance(5)
    bench.endpoint.cancel(behind)  # it was never posted, so it has nothing to wait for
    bench.endpoint.cancel(stalled)
    await bench.clock.advance(5)
    ended = [("b", "cancelled", 5)]
    assert bench.ended == ([*ended, ("a", "cancelled", 5)] if cancel_ends else ended)
    bench.endpoint.release_stalled()
    await bench.clock.advance(5)
    assert {name: outcome for name, outcome, _ in bench.ended} == {"a": "cancelled", "b": "cancelled"}
    bench.write("c")
    await bench.clock.advance(5)
    assert bench.ended[-1][:2] == ("c", "flushed")


async def test_disconnect_and_close_end_held_writes_broken(tools):
    bench = await Bench(tools, delay_s=10, stall_after=1).connect()
    handles = [bench.write(name) for name in "ab"]
    await bench.endpoint.disconnect(bench.peer)
    await settle()
    assert [handle.result.outcome for handle in handles] == [WriteOutcome.BROKEN] * 2
    await bench.connect()
    held = bench.write("c")
    await bench.endpoint.close()
    assert held.result.outcome is WriteOutcome.BROKEN
    with pytest.raises(TransferError, match="closed"):
        bench.write("d")


async def test_a_fake_endpoint_that_is_killed_breaks_its_peers_writes_and_says_nothing_itself(tools):
    bench = await Bench(tools, delay_s=0, stall_after=-1).connect()
    back = await bench.target.endpoint.connect(await bench.endpoint.accept(2))
    own = bench.target.endpoint.write(back, make_spans(0, 0, 0, 0, [4096]), lambda result: pytest.fail("it is dead"))
    handle = bench.write("a")
    await bench.clock.advance(0.5)
    bench.fabric.kill(2)
    await bench.clock.advance(5)
    assert handle.result.outcome is WriteOutcome.BROKEN and own.result is None
    assert not bench.target.memory.arrays[0].any()
    with pytest.raises(TransferError, match="no such agent"):
        await bench.endpoint.connect(bench.descriptor)


async def test_a_write_aborted_in_its_delay_lands_late_and_ends_only_then(tools):
    """It goes beside the lane: what was issued behind it is carried first."""
    bench = await Bench(tools, delay_s=10, stall_after=-1, late_after_abort_s=20).connect()
    handle = bench.write("a")
    await bench.clock.advance(4)
    bench.endpoint.cancel(handle)
    bench.endpoint.cancel(handle)  # once more is no second write
    bench.write("b")
    await bench.clock.advance(19)
    assert handle.result is None and bench.endpoint.late == 1 and bench.ended == [("b", "flushed", 21)]
    bench.target.memory.arrays[0][:] = 0
    await bench.clock.advance(3)  # from 24 on the wire, for a second
    assert bench.ended[1:] == [("a", "flushed", 25)] and bench.endpoint.late == 0
    assert (bench.target.memory.pages(0)[0] == bench.memory.pages(0)[0]).all()


async def test_a_write_that_has_been_passed_on_or_has_ended_is_not_written_again(tools):
    bench = await Bench(tools, delay_s=0, stall_after=-1, late_after_abort_s=20).connect()
    passed_on, ended = bench.write("a"), bench.write("b")
    await bench.clock.advance(0.5)
    bench.endpoint.cancel(passed_on)
    await bench.clock.advance(5)
    bench.endpoint.cancel(ended)
    await bench.clock.advance(100)
    assert [(name, at) for name, _, at in bench.ended] == [("a", 1), ("b", 2)] and bench.endpoint.late == 0


@pytest.mark.parametrize("how", ["disconnect", "close"])
async def test_a_late_write_ends_broken_with_its_path(tools, how):
    bench = await Bench(tools, delay_s=10, stall_after=-1, late_after_abort_s=20).connect()
    handle = bench.write("a")
    bench.endpoint.cancel(handle)
    await (bench.endpoint.disconnect(bench.peer) if how == "disconnect" else bench.endpoint.close())
    await bench.clock.advance(100)
    assert bench.ended == [("a", "broken", 0)] and not bench.target.memory.arrays[0].any()
