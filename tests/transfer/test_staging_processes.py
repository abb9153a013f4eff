"""Staging between two processes, of which one is stopped, continued or killed in mid-transfer."""

import asyncio
import signal

import numpy as np
import pytest

from kvferry.transfer.contract import WriteOutcome
from kvferry.transfer.page_plan import page_blocks
from kvferry.transfer.pairing import pair_common

SOURCE, PAGES = 0x51, 40


@pytest.fixture(params=["ucx-host", "made-tcp"])
def kind(request):
    return request.param


@pytest.fixture
async def writing(start, make_site, kind, tools):
    """(source, peer, blocks, target process); what has been written once lies there."""
    source = await make_site(f"staging-{kind}", SOURCE, tools.Heads(2, 2, seed=1))
    process = await start("staging_process.py", "target", kind)
    peer = await source.endpoint.connect(tools.descriptor_of(await tools.said(process)))
    pairing = pair_common(source.memory.regions, peer.descriptor.regions)
    blocks = page_blocks(pairing, np.arange(PAGES), np.arange(PAGES))
    outcome = tools.Outcome()
    source.endpoint.write(peer, blocks, outcome)
    assert (await outcome).outcome is WriteOutcome.FLUSHED
    assert peer.descriptor.backend == "ucx+staging"
    return source, peer, blocks, process


async def test_a_target_killed_in_mid_transfer_breaks_the_writes(writing, tools):
    source, peer, blocks, process = writing
    process.send_signal(signal.SIGSTOP)
    outcomes = [tools.Outcome() for _ in range(3)]
    for outcome in outcomes:
        source.endpoint.write(peer, blocks, outcome)
    await asyncio.sleep(0.2)
    process.kill()
    await process.wait()
    results = [await outcome for outcome in outcomes]
    assert [result.outcome for result in results] == [WriteOutcome.BROKEN] * 3 and all(r.error for r in results)


async def test_a_cancelled_write_to_a_stopped_target_ends_when_it_has_continued(writing, tools):
    """It can't say what becomes of the pieces that it has announced before the target says it."""
    source, peer, blocks, process = writing
    process.send_signal(signal.SIGSTOP)
    outcome, after = tools.Outcome(), tools.Outcome()
    handle = source.endpoint.write(peer, blocks, outcome)
    await asyncio.sleep(0.2)
    source.endpoint.cancel(handle)
    await asyncio.sleep(0.3)
    assert not outcome.future.done()
    process.send_signal(signal.SIGCONT)
    assert (await outcome).outcome is WriteOutcome.CANCELLED
    source.endpoint.write(peer, blocks, after)
    assert (await after).outcome is WriteOutcome.FLUSHED


async def test_nothing_of_a_dead_writer_is_scattered_after_its_agent_is_revoked(start, make_site, kind, tools):
    """On one host its end alone is no proof here: what it has announced may be scattered until `revoke` answers."""
    target = await make_site(f"staging-{kind}", 0x52, tools.Heads())
    target.endpoint.expect(+1)
    writer = await start("staging_process.py", "source", kind)
    writer.stdin.write(tools.hex_of(await target.endpoint.accept(SOURCE)) + b"\n")
    assert await tools.said(writer) == "writing"
    source = tools.Heads(2, 2, seed=1)
    for index, array in enumerate(target.memory.arrays):
        assert np.array_equal(array, target.memory.from_heads(index, source, np.arange(PAGES), np.arange(PAGES)))
    writer.kill()
    await writer.wait()
    await target.endpoint.revoke(SOURCE)
    for array in target.memory.arrays:
        array[:] = 7
    await asyncio.sleep(0.3)
    assert all((array == 7).all() for array in target.memory.arrays)
    target.endpoint.writer_exited(SOURCE)
    assert kind == "made-tcp" or target.endpoint.rings == (2, 0)
