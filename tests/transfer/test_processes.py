"""Backends between two real processes: bytes, and what happens when the target is killed or stopped."""

import asyncio
import json
import signal

import numpy as np
import pytest

from kvferry.transfer.contract import TransferError, WriteOutcome
from kvferry.transfer.plan import pair, plan_pages
from kvferry.transfer.spans import make_spans

SEED = 5
#: Its package is not in the extra `dev`.
MOONCAKE = pytest.param("mooncake-host", marks=pytest.mark.mooncake)


@pytest.fixture
def start_target(start, tools):
    """start_target(kind, incarnation): a target process and its descriptor."""

    async def begin(kind, incarnation):
        process = await start("peer_process.py", kind, str(incarnation), str(SEED), str(0xA))
        return process, tools.descriptor_of(await tools.said(process))

    return begin


@pytest.fixture(params=["ucx-host", "ucx-tcp", "ucxx-host", MOONCAKE, "local"])
def kind(request):
    return request.param


@pytest.fixture
async def source(make_site, kind, tools):
    return await make_site(kind, 0xA, tools.Memory(SEED))


LONG = 4096  # rounds that take seconds


async def warm(source, peer, tools):
    """A first write sets the connection up."""
    outcome = tools.Outcome()
    source.endpoint.write(peer, make_spans(0, 0, 0, 0, [4096]), outcome)
    assert (await outcome).outcome is WriteOutcome.FLUSHED


async def test_64_scattered_pages_are_right_when_the_notification_comes(source, start_target, kind, tools):
    process, descriptor = await start_target(kind, 0xB)
    peer = await source.endpoint.connect(descriptor)
    random = np.random.default_rng(3)
    source_pages, target_pages = random.permutation(80)[:64], random.permutation(80)[:64]
    outcome = tools.Outcome()
    spans = plan_pages(pair(source.memory.regions, descriptor.regions), source_pages, target_pages)
    source.endpoint.write(peer, spans, outcome)
    result = await outcome
    assert (result.outcome, result.size_bytes) == (WriteOutcome.FLUSHED, 64 * 6 * 4096)
    source.endpoint.notify(peer, json.dumps([source_pages.tolist(), target_pages.tolist()]).encode())
    verdict, agent = (await tools.said(process)).split()
    assert verdict == "right" and f"{0xA:016x}" in agent
    process.stdin.close()
    assert await process.wait() == 0


async def test_a_target_killed_in_mid_write_breaks_it_and_its_successor_is_served(source, start_target, kind, tools):
    process, descriptor = await start_target(kind, 0xB)
    peer = await source.endpoint.connect(descriptor)
    await warm(source, peer, tools)
    first, second = tools.Outcome(), tools.Outcome()
    source.endpoint.write(peer, tools.rounds(65536), first)
    source.endpoint.write(peer, tools.rounds(1), second)
    process.kill()
    await process.wait()
    broken = await first
    assert broken.outcome is WriteOutcome.BROKEN and broken.error and broken.size_bytes < 65536 * tools.REGION_BYTES
    assert (await second).outcome is WriteOutcome.BROKEN
    if kind in ("ucx-host", "local"):
        with pytest.raises(TransferError, match=r"can't reach the memory|does not answer"):
            await source.endpoint.connect(descriptor)
    _, successor = await start_target(kind, 0xC)
    assert successor.agent != descriptor.agent
    await warm(source, await source.endpoint.connect(successor), tools)


@pytest.mark.parametrize("kind", ["ucx-host", "local"], indirect=True)
async def test_on_one_host_a_stopped_target_is_written_to_all_the_same(source, start_target, kind, tools):
    """Before and right behind a notification, as at the end of every room. Else an abort would wait for a target that
    stands still, and each chunk for the target's next look.
    """
    process, descriptor = await start_target(kind, 0xB)
    await source.endpoint.accept(0xC)  # takes the agent that is there: the one that writes is made for this peer
    peer = await source.endpoint.connect(descriptor)
    await warm(source, peer, tools)
    for _ in range(3):
        process.send_signal(signal.SIGSTOP)
        await flushed(source, peer, tools)
        source.endpoint.notify(peer, json.dumps([[], []]).encode())
        await flushed(source, peer, tools)
        process.send_signal(signal.SIGCONT)
        said = await tools.said(process)  # it has come, and something lies in its memory
        assert said.startswith("wrong") and f"{0xA:016x}" in said


async def flushed(source, peer, tools):
    outcome = tools.Outcome()
    source.endpoint.write(peer, tools.rounds(4), outcome)
    assert (await outcome).outcome is WriteOutcome.FLUSHED


@pytest.mark.parametrize("kind", ["ucx-tcp", "ucxx-host", MOONCAKE], indirect=True)
async def test_over_tcp_a_cancelled_write_to_a_stopped_target_ends_only_when_it_is_flushed(
    source, start_target, kind, tools
):
    process, descriptor = await start_target(kind, 0xB)
    peer = await source.endpoint.connect(descriptor)
    await warm(source, peer, tools)
    process.send_signal(signal.SIGSTOP)
    outcome = tools.Outcome()
    handle = source.endpoint.write(peer, tools.rounds(LONG), outcome)
    await asyncio.sleep(0.1)  # the window fills
    source.endpoint.cancel(handle)
    await asyncio.sleep(0.1)
    assert not outcome.future.done()
    process.send_signal(signal.SIGCONT)
    result = await outcome
    # What was posted when the target stood still: more than nothing, at most the window.
    assert result.outcome is WriteOutcome.CANCELLED
    assert 0 < result.size_bytes <= 256 * 1024


@pytest.mark.parametrize("kind", ["ucx-tcp", "ucxx-host", MOONCAKE], indirect=True)
async def test_over_tcp_nothing_reads_the_source_of_a_stopped_target_after_disconnect(
    source, start_target, kind, tools
):
    """The write would be under way for ever: without its agent it has ended, and its pages can be used again."""
    process, descriptor = await start_target(kind, 0xB)
    peer = await source.endpoint.connect(descriptor)
    await warm(source, peer, tools)
    process.send_signal(signal.SIGSTOP)
    outcome, other = tools.Outcome(), tools.Outcome()
    source.endpoint.write(peer, tools.rounds(LONG), outcome)
    await asyncio.sleep(0.1)
    await source.endpoint.disconnect(peer)
    assert (await outcome).outcome is WriteOutcome.BROKEN
    _, second = await start_target(kind, 0xC)
    source.endpoint.write(await source.endpoint.connect(second), tools.rounds(1), other)
    assert (await other).outcome is WriteOutcome.FLUSHED
    if kind == "ucxx-host":  # what UCXX has under way ends with the peer's help only, and then its connection goes
        process.send_signal(signal.SIGCONT)
    left = tools.Outcome()
    source.endpoint.write(await source.endpoint.connect(descriptor), tools.rounds(LONG), left)
    await asyncio.sleep(0.1)
    await source.endpoint.close()
    assert (await left).outcome is WriteOutcome.BROKEN
