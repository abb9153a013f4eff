"""The `local` backend alone: who may map whose memory, and what becomes of a transfer when one of the two ends."""

import asyncio
import gc
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry.transfer.contract import TransferError, WriteOutcome
from kvferry.transfer.copying import by_kernel, copier
from kvferry.transfer.local import LocalEndpoint
from kvferry.transfer.local_door import LocalMetadata
from kvferry.transfer.shared import Area, Window
from kvferry.transfer.spans import make_spans


def changed(descriptor, **fields):
    """The descriptor with other metadata."""
    metadata = msgspec.msgpack.decode(descriptor.metadata, type=LocalMetadata)
    data = msgspec.msgpack.encode(msgspec.structs.replace(metadata, **fields))
    return msgspec.structs.replace(descriptor, metadata=data)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host": "elsewhere"}, "runs on another host, .*: elsewhere there"),
        ({"uid": os.geteuid() + 1}, f"runs as user {os.geteuid() + 1}, this one as {os.geteuid()}"),
        ({"pid": 1}, f"process 1 of user {os.geteuid()} should answer; it is process"),
        ({"door": b"\0kvferry-nobody"}, "does not answer"),
        ({"areas": ()}, "region 0 does not lie in the memory that it shares"),
    ],
)
async def test_who_is_not_a_process_of_ours_on_this_host_is_refused(make_site, tools, fields, words):
    source, target = await make_site("local", 0xA, tools.Memory()), await make_site("local", 0xB, tools.Memory())
    descriptor = changed(await target.endpoint.accept(0xA), **fields)
    with pytest.raises(TransferError, match=words):
        await source.endpoint.connect(descriptor)


async def test_an_agent_is_for_its_writer_and_until_it_is_revoked(make_site, tools):
    source, target = await make_site("local", 0xA, tools.Memory()), await make_site("local", 0xB, tools.Memory())
    for descriptor in (await target.endpoint.accept(0xC), await target.endpoint.accept(0xA)):
        if descriptor.generation:
            await target.endpoint.revoke(0xA)
        with pytest.raises(TransferError, match=f"{descriptor.agent} is not the agent of {0xA:016x} here"):
            await source.endpoint.connect(descriptor)


async def test_memory_that_is_not_shared_is_refused_and_so_is_more_than_was_shared(make_site, tools):
    area, region = Area(4096), tools.Memory().regions[0]
    options = {"incarnation": 1, "on_notify": None, "loop": asyncio.get_running_loop(), "now_s": None}
    with pytest.raises(TransferError, match="region 0 does not lie in memory that can be shared"):
        LocalEndpoint(regions=(region,), areas=[area], **options)
    with pytest.raises(TransferError, match="an area of 8192 bytes was promised; what came has 4096"):
        Window(area.fd, 0, 8192)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 8192)
    try:
        with pytest.raises(TransferError, match="can be made shorter"):
            Window(loose, 0, 8192)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(area.fd, 0)
    finally:
        os.close(loose)


def mapped_pools():
    return sum("memfd:kvferry-pool" in line for line in Path("/proc/self/maps").read_text().splitlines())


async def test_the_memory_of_a_target_that_has_gone_is_let_go(make_site, tools):
    source, target = await make_site("local", 0xA, tools.Memory()), await make_site("local", 0xB, tools.Memory())
    gc.collect()  # what other tests have left behind
    before = mapped_pools()
    for end in (target.endpoint.revoke, None):
        peer = await source.endpoint.connect(await target.endpoint.accept(0xA))
        assert mapped_pools() == before + 1
        await (end(0xA) if end else source.endpoint.disconnect(peer))
        await tools.soon(lambda: mapped_pools() == before)


async def test_copies_by_the_kernel_are_the_same(tools):
    """Where nothing was compiled. 2,500 spans of odd sizes, in more calls than one."""
    random = np.random.default_rng(4)
    source, target = (np.zeros(2**22, np.uint8) for _ in range(2))
    source[:] = random.integers(1, 256, source.size)
    size = random.integers(1, 3000, 2500)
    place = np.cumsum(size) - size
    to, origin = (place + array.ctypes.data for array in (target, source))
    expected = np.zeros_like(target)
    expected[: size.sum()] = source[: size.sum()]
    for copy in (by_kernel, copier()[1]):
        target[:] = 0
        stop = tools.stop_flag()
        columns = to.astype(np.uint64), origin.astype(np.uint64), size.astype(np.int64)
        assert copy(*columns, stop) == 2500 and np.array_equal(target, expected)
        target[:], stop.value = 0, 1
        assert copy(*columns, stop) == 0 and not target.any()


async def test_a_writer_killed_in_mid_write_has_written_its_last_byte(make_site, start, tools):
    """*Exited* is proof here: nothing of a dead writer's is under way anywhere."""
    target = await make_site("local", 0xB, tools.Memory())
    writer = await start("writer_process.py", "local", str(0xA), "5")
    descriptor = await target.endpoint.accept(0xA)
    writer.stdin.write(tools.hex_of(descriptor) + b"\n")
    assert await tools.said(writer) == "writing"
    memory = target.memory.arrays[0]
    memory[:] = 0
    await tools.soon(memory.any)
    writer.send_signal(signal.SIGKILL)
    await writer.wait()
    memory[:] = 7
    await asyncio.sleep(0.2)
    assert np.all(memory == 7) and not any(array.any() for array in target.memory.arrays[1:])


async def test_a_cancelled_write_to_a_stopped_target_ends_at_once(make_site, start, tools):
    """The target's help is not needed, so that *drained* comes also while it stands still; and what it was told
    meanwhile, more than a socket holds, it hears when it continues, in order.
    """
    source = await make_site("local", 0xA, tools.Memory(seed=5))
    process = await start("peer_process.py", "local", str(0xB), "5", str(0xA))
    peer = await source.endpoint.connect(tools.descriptor_of(await tools.said(process)))
    process.send_signal(signal.SIGSTOP)
    outcome = tools.Outcome()
    handle = source.endpoint.write(peer, tools.rounds(65536), outcome)
    await tools.soon(lambda: handle.flushed_bytes)
    source.endpoint.cancel(handle)
    result = await outcome
    assert result.outcome is WriteOutcome.CANCELLED and 0 < result.size_bytes < 65536 * tools.REGION_BYTES
    whole = list(range(80))
    for _ in range(600):
        source.endpoint.notify(peer, b"[[],[]] " + b" " * 1000)
    process.send_signal(signal.SIGCONT)
    others = tools.Outcome()
    spans = [make_spans(region, region, 0, 0, [tools.REGION_BYTES]) for region in range(6)]
    source.endpoint.write(peer, np.concatenate(spans), others)
    await others
    source.endpoint.notify(peer, f"[{whole},{whole}]".encode())
    verdicts = [(await tools.said(process)).split()[0] for _ in range(601)]
    assert verdicts[-1] == "right"


async def test_a_target_killed_while_it_is_told_breaks_the_peer_and_no_other(make_site, start, tools):
    source = await make_site("local", 0xA, tools.Memory(seed=5))
    first, second = [await start("peer_process.py", "local", str(number), "5", str(0xA)) for number in (0xB, 0xC)]
    peer, other = [await source.endpoint.connect(tools.descriptor_of(await tools.said(p))) for p in (first, second)]
    outcomes = [tools.Outcome() for _ in range(3)]
    source.endpoint.write(peer, tools.rounds(65536), outcomes[0])
    source.endpoint.write(other, tools.rounds(512), outcomes[1])
    first.kill()
    broken, right = await outcomes[0], await outcomes[1]
    assert broken.outcome is WriteOutcome.BROKEN and broken.error and right.outcome is WriteOutcome.FLUSHED
    source.endpoint.notify(peer, b"late")  # dropped, with a line in the log
    source.endpoint.write(peer, make_spans(0, 0, 0, 0, [1]), outcomes[2])
    assert (await outcomes[2]).outcome is WriteOutcome.BROKEN
