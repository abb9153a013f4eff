"""Who has an agent at decode, whatever order its making and its end come in; whom a full quarantine costs its life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.actors.decode.quarantine import over_budget
from kvferry.actors.decode.writers import Accepted, ShutOut, Writers, is_covered
from kvferry.actors.exits import Exits
from kvferry.protocol.address import Address
from kvferry.protocol.messages import OverBudget
from kvferry.protocol.receiver import ReceiverEvent, ReceiverMachine
from kvferry.sim.loop import VirtualClock
from kvferry.transfer.contract import Descriptor, TransferError
from kvferry.transfer.fake import TCP, FakeFabric

PREFILL, OTHER = 0xA, 0xC


class Leader:
    """What a leader gives its `Writers`; `items` in the order of their coming."""

    def __init__(self) -> None:
        clock = VirtualClock()
        self.fabric = FakeFabric(loop=asyncio.get_running_loop(), sleep=clock.sleep, now_s=clock.now_s, proofs=TCP)
        self.endpoint = self.fabric.endpoint((), 0xB, lambda agent, payload: None)
        self.items: list[Accepted | ShutOut] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.writers = Writers(self.endpoint, self.spawn, self.items.append)

    def spawn(self, work: Awaitable[None]) -> None:
        async def doing() -> None:
            await work

        self.tasks.append(asyncio.get_running_loop().create_task(doing()))

    async def settle(self) -> list[Accepted | ShutOut]:
        await asyncio.gather(*self.tasks)
        found, self.items[:] = list(self.items), []
        return found

    def known(self, *writers: int) -> dict[int, Descriptor]:
        found = self.writers.descriptors(writers)
        assert found is not None
        return found


async def test_an_agent_is_made_once_and_known_once_it_is_accepted() -> None:
    leader = Leader()
    assert leader.writers.descriptors([PREFILL]) is None and leader.writers.descriptors([PREFILL, OTHER]) is None
    items = await leader.settle()
    assert [item.writer for item in items] == [PREFILL, OTHER]
    assert all(isinstance(item, Accepted) and leader.writers.accepted(item) for item in items)
    known = leader.known(PREFILL, OTHER)
    assert known[PREFILL].agent != known[OTHER].agent and leader.writers.incarnations == {PREFILL, OTHER}


async def test_a_writer_that_is_shut_out_before_its_agent_is_known_gets_another_one() -> None:
    leader = Leader()
    leader.writers.descriptors([PREFILL])
    assert leader.writers.shut_out(PREFILL) and not leader.writers.shut_out(PREFILL)
    leader.writers.descriptors([PREFILL])
    first, proof, second = await leader.settle()
    assert isinstance(first, Accepted) and isinstance(proof, ShutOut) and isinstance(second, Accepted)
    assert not leader.writers.accepted(first) and leader.writers.accepted(second)
    assert first.descriptor is not None and second.descriptor is not None and proof.proof is not None
    assert leader.known(PREFILL) == {PREFILL: second.descriptor}
    assert leader.fabric.find(first.descriptor.agent) is None
    assert leader.fabric.find(second.descriptor.agent) is not None
    # The proof is about rooms of the first agent, never of the second.
    rooms: list[Any] = [SimpleNamespace(agents={PREFILL: d.generation}) for d in (first.descriptor, second.descriptor)]
    never: Any = SimpleNamespace(agents={})
    assert [is_covered(room, proof.proof) for room in (*rooms, never)] == [True, False, False]


async def test_a_room_of_an_agent_that_is_gone_costs_the_next_one_nothing() -> None:
    leader = Leader()
    leader.writers.descriptors([PREFILL])
    (first,) = await leader.settle()
    assert isinstance(first, Accepted) and leader.writers.accepted(first) and first.descriptor is not None
    old: Any = SimpleNamespace(agents={PREFILL: first.descriptor.generation})
    assert leader.writers.shut_out_of(old, PREFILL)
    leader.writers.descriptors([PREFILL])
    _, second = await leader.settle()
    assert isinstance(second, Accepted) and leader.writers.accepted(second)
    assert not leader.writers.shut_out_of(old, PREFILL)
    assert set(leader.known(PREFILL)) == {PREFILL} and await leader.settle() == []


async def test_an_endpoint_that_gives_no_agent_says_why() -> None:
    leader = Leader()

    async def refused(writer: int) -> Descriptor:
        raise TransferError("too many agents")

    leader.endpoint.accept = refused  # type: ignore[method-assign]
    leader.writers.descriptors([PREFILL])
    (item,) = await leader.settle()
    assert isinstance(item, Accepted) and leader.writers.accepted(item)
    assert (item.descriptor, item.error) == (None, "too many agents") and leader.writers.incarnations == set()


def waiting(writer: int, pages: range, since_s: float, ranks: int = 1) -> Any:
    """A room in quarantine since then, for that writer (rank 0) and others that have drained."""
    machine = ReceiverMachine({rank: writer + rank for rank in range(ranks)})
    machine.handle(ReceiverEvent.ADMIT)
    machine.handle(ReceiverEvent.PREFILL_LOST)
    for rank in range(1, ranks):
        machine.rank_drained(rank, complete=False)
    holding = SimpleNamespace(pages=tuple(pages), quarantined=True)
    peer = Address(f"prefill-{writer}", "", writer, "", 0)
    return SimpleNamespace(machine=machine, holding=holding, quarantined_s=since_s, peer=peer)


@pytest.mark.parametrize(
    ("rooms", "expected"),
    [
        ([], []),
        ([waiting(1, range(25), 90.0)], []),  # a quarter of 100 pages, exactly
        ([waiting(1, range(26), 90.0)], [OverBudget("prefill-1", 1, 26, 10.0)]),
        # Those that keep the most go first, until what is left fits.
        ([waiting(1, range(20), 90.0), waiting(2, range(20, 50), 95.0)], [OverBudget("prefill-2", 2, 30, 5.0)]),
        ([waiting(1, range(20), 90.0), waiting(2, range(20, 30), 95.0)], [OverBudget("prefill-1", 1, 20, 10.0)]),
        # Several rooms of one writer are counted together, since the oldest of them.
        (
            [waiting(1, range(14), 91.0), waiting(2, range(20, 34), 90.0), waiting(1, range(14, 18), 93.0)],
            [OverBudget("prefill-1", 1, 18, 9.0)],
        ),
        # One page for too long is enough, and then the rest may fit.
        ([waiting(1, range(1), 40.0), waiting(2, range(5, 30), 95.0)], [OverBudget("prefill-1", 1, 1, 60.0)]),
        # A rank that has drained is not to blame.
        ([waiting(4, range(26), 90.0, ranks=3)], [OverBudget("prefill-4", 4, 26, 10.0)]),
    ],
)
def test_who_is_over_the_budget(rooms: list[Any], expected: list[OverBudget]) -> None:
    """A budget of a quarter of 100 pages, and at most 60 s; it is 100 s now."""
    assert over_budget(rooms, 100, 0.25, 60.0, 100.0) == expected


class Pidfds:
    """The kernel: processes by incarnation, and what was done to them."""

    def __init__(self) -> None:
        self.ends: dict[int, Any] = {}
        self.killed: list[int] = []
        self.refuses = False

    def watch(self, address: Address, on_exit: Any) -> bool:
        self.ends[address.incarnation] = on_exit
        return True

    def kill(self, address: Address) -> None:
        if self.refuses:
            raise PermissionError
        self.killed.append(address.incarnation)

    def close(self) -> None:
        pass


def test_only_a_process_that_is_known_to_be_the_one_is_killed() -> None:
    kernel, gone = Pidfds(), list[Address]()
    exits = Exits(kernel, "here", gone.append)
    peer, elsewhere = Address("a", "", 7, "here", 100), Address("b", "", 8, "there", 100)
    assert not exits.kill(7), "nobody that we know"
    assert exits.observe(peer) and not exits.observe(elsewhere)
    assert not exits.kill(7) and not exits.kill(8), "the pid may be somebody else's by now"
    exits.answered(7)
    assert exits.kill(7) and kernel.killed == [7] and gone == []
    kernel.refuses = True
    assert not exits.kill(7)
    kernel.ends[7]()
    assert gone == [peer] and exits.kill(7) and kernel.killed == [7], "it has ended: done, and nobody is hit"
