"""Design §5, *revoked*: what is destroyed ends what passes between two processes, and nothing else."""

import asyncio
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from kvferry.transfer.contract import TransferError, WriteOutcome
from kvferry.transfer.spans import make_spans

WRITER = 0xA
#: Its package is not in the extra `dev`.
MOONCAKE = pytest.param("mooncake-host", marks=pytest.mark.mooncake)


class Writer:
    """A writer process, and the lines that it prints."""

    def __init__(self, process, tools):
        self.process, self.tools = process, tools

    def write_to(self, descriptor):
        self.process.stdin.write(self.tools.hex_of(descriptor) + b"\n")

    async def says(self):
        return await self.tools.said(self.process)

    def send(self, number):
        self.process.send_signal(number)

    def stands_still(self):
        """A call into the kernel that was under way ends first."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


async def keeps(array, seconds):
    """Whether the memory stays as it is, looked at again and again."""
    before = array.copy()
    for _ in range(int(seconds / 0.01)):
        await asyncio.sleep(0.01)
        if not np.array_equal(before, array):
            return False
    return True


async def changes(array, tools):
    """Write over the memory, and wait until somebody else writes there."""
    array[:] = 0
    await tools.soon(lambda: array.any())


@pytest.fixture(params=["ucx-host", "ucx-tcp", "ucxx-host", MOONCAKE, "local"])
async def under_attack(request, make_site, start, tools):
    """(target, writer, memory): a stopped writer in mid-write, and the memory that it writes to."""
    target = await make_site(request.param, 0xB, tools.Memory())
    target.endpoint.expect(+1)
    writer = Writer(await start("writer_process.py", request.param, str(WRITER), "5"), tools)
    writer.write_to(await target.endpoint.accept(WRITER))
    assert await writer.says() == "writing"
    memory = target.memory.arrays[0]
    await changes(memory, tools)
    writer.send(signal.SIGSTOP)
    await tools.soon(writer.stands_still)
    return target, writer, memory


@pytest.mark.parametrize("under_attack", ["ucx-tcp", "ucxx-host", MOONCAKE], indirect=True)
async def test_nothing_lands_after_the_writers_agent_is_revoked(under_attack, make_site, request, tools):
    """A writer that was stopped in mid-write and continues: its pages are somebody else's by then."""
    target, writer, memory = under_attack
    proof = await target.endpoint.revoke(WRITER)
    assert proof is not None and proof.writer == WRITER
    memory[:] = 7
    assert await keeps(memory, 0.2)
    writer.send(signal.SIGCONT)
    assert await writer.says() == "broken"
    assert await keeps(memory, 0.5)
    # The target is healthy: it serves another writer, and the same one through a new agent.
    other = await make_site(request.node.callspec.params["under_attack"], 0xC, tools.Memory(seed=9))
    outcome = tools.Outcome()
    peer = await other.endpoint.connect(await target.endpoint.accept(0xC))
    other.endpoint.write(peer, make_spans(1, 1, 0, 0, [4096]), outcome)
    assert (await outcome).outcome is WriteOutcome.FLUSHED
    assert np.array_equal(target.memory.arrays[1][:4096], other.memory.arrays[1][:4096])
    writer.write_to(await target.endpoint.accept(WRITER))
    assert await writer.says() == "writing"
    await changes(memory, tools)


@pytest.mark.parametrize("under_attack", ["ucx-host", "local"], indirect=True)
async def test_on_one_host_a_stopped_writer_copies_on_when_it_continues(under_attack, tools):
    """It reaches memory by itself, so that only its end, or its own word, is proof; revoking is none."""
    target, writer, memory = under_attack
    memory[:] = 7
    assert await keeps(memory, 0.2)
    writer.send(signal.SIGCONT)
    await tools.soon(lambda: not np.all(memory == 7))
    assert await target.endpoint.revoke(WRITER) is None
    assert await writer.says() == "broken"


@pytest.mark.parametrize("under_attack", ["ucx-tcp", "ucxx-host", MOONCAKE], indirect=True)
async def test_what_a_dead_writer_left_in_the_socket_goes_with_the_agent(under_attack):
    target, writer, memory = under_attack
    target.endpoint.expect(-1)  # it looks rarely, so there is something left
    writer.send(signal.SIGKILL)
    await writer.process.wait()
    assert await target.endpoint.revoke(WRITER) is not None
    memory[:] = 7
    assert await keeps(memory, 0.5)


async def test_case_32_the_same_id_with_another_registration_is_another_agent(make_site, tools):
    """Case 32: "Replacement has the same id but new memory registration": a descriptor is of one agent, which ends
    with its process or its revocation; nothing that is kept of it reaches a successor.
    """
    source = await make_site("ucx-tcp", WRITER, tools.Memory(seed=1))
    before = await make_site("ucx-tcp", 0xB, tools.Memory())
    before.endpoint.expect(+1)
    descriptor = await before.endpoint.accept(WRITER)
    kept = await source.endpoint.connect(descriptor)
    first, late = tools.Outcome(), tools.Outcome()
    source.endpoint.write(kept, make_spans(0, 0, 0, 0, [4096]), first)
    assert (await first).outcome is WriteOutcome.FLUSHED
    await before.endpoint.close()
    after = await make_site("ucx-tcp", 0xB, tools.Memory())  # even the incarnation is the same here
    after.endpoint.expect(+1)
    successor = await after.endpoint.accept(WRITER)
    source.endpoint.write(kept, make_spans(0, 0, 0, 0, [4096]), late)
    assert (await late).outcome is WriteOutcome.BROKEN
    assert not any(array.any() for array in after.memory.arrays)
    outcome = tools.Outcome()
    source.endpoint.write(await source.endpoint.connect(successor), make_spans(0, 0, 0, 0, [4096]), outcome)
    assert (await outcome).outcome is WriteOutcome.FLUSHED


async def test_too_many_agents_are_refused_with_the_limit(make_site, tools):
    target = await make_site("ucx-host", 0xB, tools.Memory(), max_agents=2)
    await target.endpoint.accept(1)
    descriptor = await target.endpoint.accept(2)
    with pytest.raises(TransferError, match=r"has 2 agents; transfer\.max_agents is 2"):
        await target.endpoint.accept(3)
    assert await target.endpoint.accept(2) == descriptor
    await target.endpoint.revoke(1)
    assert (await target.endpoint.accept(3)).agent != descriptor.agent


@pytest.mark.parametrize("kind", ["ucx-tcp", MOONCAKE])
async def test_many_writers_come_and_go_and_leave_no_descriptor_and_little_memory(make_site, kind, tools):
    """Each cycle makes and deletes an agent at both ends (10 MB each while it lives)."""
    target = await make_site(kind, 0xB, tools.Memory())
    source = await make_site(kind, WRITER, tools.Memory(seed=1))
    target.endpoint.expect(+1)

    async def cycle():
        peer, outcome = await source.endpoint.connect(await target.endpoint.accept(WRITER)), tools.Outcome()
        source.endpoint.write(peer, make_spans(0, 0, 0, 0, [4096]), outcome)
        assert (await outcome).outcome is WriteOutcome.FLUSHED
        await target.endpoint.revoke(WRITER)
        await source.endpoint.disconnect(peer)

    def used():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * resource.getpagesize()  # noqa: PTH208

    for _ in range(5):
        await cycle()
    before = used()
    for _ in range(20):
        await cycle()
    after = used()
    assert after[0] <= before[0]
    assert after[1] - before[1] < 20 * 2 * 1024 * 1024
