"""The self-test of a data path: before its first use, and never in anybody's pages."""

import asyncio
import logging

import numpy as np
import pytest

from kvferry.transfer.contract import SELF_TEST, TransferError, WriteOutcome, decode_descriptor, encode_descriptor
from kvferry.transfer.faulty import FaultyEndpoint
from kvferry.transfer.plan import pair, plan_pages
from kvferry.transfer.self_test import SelfTested, SpareRows


async def make(make_site, tools, kind, incarnation, seed=None, limit_s=30.0):
    """(endpoint, site): a tested endpoint around the real one."""
    memory, area, notes = tools.Memory(seed=seed), SpareRows(), []
    plain = memory.regions
    tested = SelfTested(area, lambda agent, note: notes.append(note), asyncio.sleep, limit_s, "192.0.2.7")
    memory.regions, memory.areas = (*plain, area.region), [memory.area, area.area]
    site = await make_site(kind, incarnation, memory)
    site.hear = tested.heard
    site.area, site.told, site.plain = area, notes, plain
    tested.inner = site.endpoint
    return tested, site


@pytest.fixture(params=["local", "ucx-host", "ucx-tcp"])
def kind(request):
    return request.param


async def test_a_path_is_tried_once_and_then_used(make_site, tools, kind):
    source, here = await make(make_site, tools, kind, 0xA, seed=1)
    target, there = await make(make_site, tools, kind, 0xB)
    target.expect(+1)
    descriptor = decode_descriptor(encode_descriptor(await target.accept(0xA)))
    peer = await source.connect(descriptor)
    await tools.soon(lambda: target.passed)
    assert there.area.rows[:512].any() and not any(array.any() for array in there.memory.arrays)
    there.area.rows[:512] = 0
    assert await source.connect(descriptor) is peer and not there.area.rows.any()
    spans = plan_pages(pair(source.regions, descriptor.regions), np.array([3, 5]), np.array([0, 1]))
    outcome = tools.Outcome()
    source.write(peer, spans, outcome)
    assert (await outcome).outcome is WriteOutcome.FLUSHED
    source.notify(peer, b"all of it")
    await tools.soon(lambda: there.told)
    assert there.told == [b"all of it"] and (target.passed, target.failed) == (1, 0) and source.regions == here.plain
    await source.disconnect(peer)
    await target.revoke(0xA)
    await source.connect(await target.accept(0xA))
    await tools.soon(lambda: target.passed == 2)  # a new agent is a new path


async def test_a_path_that_carries_nothing_is_refused_with_the_address(make_site, tools):
    source, site = await make(make_site, tools, "local", 0xA, limit_s=0.05)
    target, _ = await make(make_site, tools, "local", 0xB)
    stalling = {"delay_s": 0.0, "stall_after": 0, "sleep": asyncio.sleep, "loop": asyncio.get_running_loop()}
    source.inner = FaultyEndpoint(site.endpoint, **stalling)
    with pytest.raises(TransferError, match=r"by local to 192\.0\.2\.7 does not work: 32 bytes were not there after"):
        await source.connect(await target.accept(0xA))


async def test_bytes_that_do_not_lie_there_are_said_at_the_target(make_site, tools, caplog):
    source, _ = await make(make_site, tools, "local", 0xA)
    target, there = await make(make_site, tools, "local", 0xB)
    descriptor = await target.accept(0xA)
    await source.connect(descriptor)
    await tools.soon(lambda: target.passed)
    there.area.rows[:] = 0
    with caplog.at_level(logging.ERROR):
        target.heard("somebody", b"\xc1kvferry self-test " + descriptor.agent.encode())
    assert target.failed == 1 and "does not lie here" in caplog.text and not there.told


async def test_a_target_without_a_row_for_it_is_not_tried(make_site, tools):
    source, _ = await make(make_site, tools, "local", 0xA)
    plain = await make_site("local", 0xB, tools.Memory())
    descriptor = await plain.endpoint.accept(0xA)
    assert descriptor.regions[-1].part != SELF_TEST
    assert (await source.connect(descriptor)).descriptor == descriptor
