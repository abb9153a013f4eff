"""Who has an agent at decode, whatever order its making and its end come in; whom a full quarantine costs its life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.actors.decode.quarantine import over_budget
from kvferry.actors.decode.writers import Accepted, ShutOut, Writers, exits, shuts_out
from kvferry.actors.exits import Exits
from kvferry.protocol.address import Address
from kvferry.protocol.instance import Accept, Revoke
from kvferry.protocol.messages import Message, OverBudget
from kvferry.protocol.offer import Offer
from kvferry.protocol.receiver import ReceiverEvent, ReceiverMachine
from kvferry.sim.loop import VirtualClock
from kvferry.transfer.contract import Descriptor, Proofs, Revoked, TransferError
from kvferry.transfer.fake import HOST, TCP, FakeFabric

PREFILL, OTHER = 0xA, 0xC
HERE = 0  # the target rank whose endpoint it is: the leader

OFFER = Offer(("local",), "shared", (), "host")
OFFERS = {PREFILL: OFFER, OTHER: OFFER}


class Leader:
    """What a leader gives its `Writers`; `items` in the order of their coming."""

    def __init__(self, proofs: Proofs = TCP) -> None:
        clock = VirtualClock()
        self.fabric = FakeFabric(loop=asyncio.get_running_loop(), sleep=clock.sleep, now_s=clock.now_s, proofs=proofs)
        self.endpoint = self.fabric.endpoint((), 0xB, lambda agent, payload: None)
        self.exited: list[int] = []
        self.endpoint.writer_exited = self.exited.append  # type: ignore[method-assign]
        self.items: list[Accepted | ShutOut] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.orders: list[tuple[int, Message]] = []
        team: Any = SimpleNamespace(send=lambda rank, message: self.orders.append((rank, message)))
        self.writers = Writers(self.endpoint, team, self.spawn, self.items.append)

    def spawn(self, work: Awaitable[None]) -> None:
        async def doing() -> None:
            await work

        self.tasks.append(asyncio.get_running_loop().create_task(doing()))

    async def settle(self) -> list[Accepted | ShutOut]:
        await asyncio.gather(*self.tasks)
        found, self.items[:] = list(self.items), []
        return found

    def known(self, *writers: int) -> dict[int, Descriptor]:
        found = self.ask(*writers)
        assert found is not None
        return {writer: descriptor for (writer, _), descriptor in found.items()}

    def ask(self, *writers: int) -> dict[tuple[int, int], Descriptor] | None:
        return self.writers.descriptors([(writer, HERE) for writer in writers], OFFERS)


async def test_an_agent_is_made_once_and_known_once_it_is_accepted() -> None:
    leader = Leader()
    assert leader.ask(PREFILL) is None and leader.ask(PREFILL, OTHER) is None
    items = await leader.settle()
    assert [item.writer for item in items] == [PREFILL, OTHER]
    assert all(isinstance(item, Accepted) and leader.writers.accepted(item) for item in items)
    known = leader.known(PREFILL, OTHER)
    assert known[PREFILL].agent != known[OTHER].agent and leader.writers.incarnations == {PREFILL, OTHER}


async def test_a_writer_that_is_shut_out_before_its_agent_is_known_gets_another_one() -> None:
    leader = Leader()
    leader.ask(PREFILL)
    assert leader.writers.shut_out(PREFILL) and not leader.writers.shut_out(PREFILL)
    leader.ask(PREFILL)
    first, proof, second = await leader.settle()
    assert isinstance(first, Accepted) and isinstance(proof, ShutOut) and isinstance(second, Accepted)
    assert not leader.writers.accepted(first) and leader.writers.accepted(second)
    assert first.descriptor is not None and second.descriptor is not None and proof.proof is not None
    assert leader.known(PREFILL) == {PREFILL: second.descriptor}
    assert leader.fabric.find(first.descriptor.agent) is None
    assert leader.fabric.find(second.descriptor.agent) is not None
    # The proof is about rooms of the first agent, never of the second.
    agents = [{(PREFILL, HERE): d.generation} for d in (first.descriptor, second.descriptor)]
    rooms: list[Any] = [SimpleNamespace(agents=named, closed=set()) for named in (*agents, {})]
    assert [shuts_out(room, HERE, proof.proof) for room in rooms] == [True, False, False]


async def test_a_room_of_an_agent_that_is_gone_costs_the_next_one_nothing() -> None:
    leader = Leader()
    leader.ask(PREFILL)
    (first,) = await leader.settle()
    assert isinstance(first, Accepted) and leader.writers.accepted(first) and first.descriptor is not None
    old: Any = SimpleNamespace(agents={(PREFILL, HERE): first.descriptor.generation})
    assert leader.writers.shut_out_of(old, PREFILL)
    leader.ask(PREFILL)
    _, second = await leader.settle()
    assert isinstance(second, Accepted) and leader.writers.accepted(second)
    assert not leader.writers.shut_out_of(old, PREFILL)
    assert set(leader.known(PREFILL)) == {PREFILL} and await leader.settle() == []


async def test_an_endpoint_that_gives_no_agent_says_why() -> None:
    leader = Leader()

    async def refused(writer: int, offer: Offer) -> Descriptor:
        raise TransferError("too many agents")

    leader.endpoint.accept = refused  # type: ignore[method-assign]
    leader.ask(PREFILL)
    (item,) = await leader.settle()
    assert isinstance(item, Accepted) and leader.writers.accepted(item)
    assert (item.descriptor, item.error) == (None, "too many agents") and leader.writers.incarnations == set()


async def test_a_writer_of_two_ranks_is_shut_out_when_both_have_destroyed_its_agent() -> None:
    """Rank 1 makes and destroys its own, by order."""
    leader = Leader()
    pairs = [(PREFILL, HERE), (PREFILL, 1)]
    assert leader.writers.descriptors(pairs, OFFERS) is None and leader.orders == [(1, Accept(PREFILL, 2, OFFER))]
    (own,) = await leader.settle()
    assert isinstance(own, Accepted) and leader.writers.accepted(own) and own.descriptor is not None
    assert leader.writers.descriptors(pairs, OFFERS) is None and len(leader.orders) == 1, "it is on its way"
    there = Descriptor("fake", "agent", 0xB1, 7, b"", ())
    assert not leader.writers.accepted(Accepted(PREFILL, 1, 1, there)), "an answer to another question"
    assert leader.writers.accepted(Accepted(PREFILL, 1, 2, there))
    assert leader.writers.descriptors(pairs, OFFERS) == {pairs[0]: own.descriptor, pairs[1]: there}
    room: Any = SimpleNamespace(agents={pairs[0]: own.descriptor.generation, pairs[1]: 7}, closed=set())
    assert leader.writers.shut_out_of(room, PREFILL) and leader.orders[1:] == [(1, Revoke(PREFILL))]
    (proof,) = await leader.settle()
    assert isinstance(proof, ShutOut) and proof.proof is not None
    assert not shuts_out(room, HERE, proof.proof), "it still writes to rank 1"
    assert not shuts_out(room, 1, Revoked(PREFILL, 6)), "an older agent's end"
    assert shuts_out(room, 1, Revoked(PREFILL, 7))


def waiting(writer: int, pages: range, since_s: float, ranks: int = 1) -> Any:
    """A room in quarantine since then, for that writer (rank 0) and others that have drained."""
    machine = ReceiverMachine({rank: writer + rank for rank in range(ranks)})
    machine.handle(ReceiverEvent.ADMIT)
    machine.handle(ReceiverEvent.PREFILL_LOST)
    for rank in range(1, ranks):
        machine.rank_drained(rank, complete=False)
    holding = SimpleNamespace(pages=tuple(pages), quarantined=True)
    peer = Address(f"prefill-{writer}", "", writer, "", 0)
    proofs = dict.fromkeys([(writer, HERE)], HOST)
    return SimpleNamespace(machine=machine, holding=holding, quarantined_s=since_s, peer=peer, proofs=proofs)


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
    assert over_budget(rooms, 100, 0.25, 60.0, 100.0, frozenset[int]().__contains__) == expected


def test_who_has_ended_is_not_killed() -> None:
    rooms = [waiting(1, range(20), 10.0), waiting(2, range(20, 50), 10.0)]
    assert over_budget(rooms, 100, 0.25, 60.0, 100.0, {1}.__contains__) == [OverBudget("prefill-2", 2, 30, 90.0)]


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


@dataclass
class Case:
    """A leader with an agent for PREFILL here and one at rank 1, and a room that names both, over HOST."""

    leader: Leader
    room: Any

    @staticmethod
    async def make() -> Case:
        leader = Leader(HOST)
        pairs = [(PREFILL, HERE), (PREFILL, 1)]
        leader.writers.descriptors(pairs, OFFERS)
        (own,) = await leader.settle()
        assert isinstance(own, Accepted) and leader.writers.accepted(own)
        assert leader.writers.accepted(Accepted(PREFILL, 1, 2, Descriptor("fake", "agent", 0xB1, 7, b"", (), HOST)))
        leader.orders.clear()
        room: Any = SimpleNamespace(agents=dict.fromkeys(pairs, 0), proofs=dict.fromkeys(pairs, HOST), closed=set())
        return Case(leader, room)

    def closed(self, item: ShutOut) -> bool:
        """The room has nothing to fear any more, once this has come."""
        self.leader.writers.closed(item)
        return self.exits()

    def exits(self) -> bool:
        return exits(self.room, PREFILL, self.leader.writers)

    async def own(self) -> ShutOut:
        (item,) = await self.leader.settle()
        assert isinstance(item, ShutOut)
        return item


THERE = ShutOut(PREFILL, 1, None)


async def test_an_end_counts_when_every_rank_has_answered_and_each_is_told_of_it() -> None:
    case = await Case.make()
    case.leader.writers.exited(PREFILL)
    assert not case.exits() and case.leader.orders == [(1, Revoke(PREFILL, ended=True))]
    assert not case.closed(await case.own()), "rank 1 has not answered"
    assert case.closed(THERE) and case.leader.exited == [PREFILL]


async def test_an_answer_to_a_revocation_from_before_the_end_is_not_the_last() -> None:
    """Rank 1 answers in order: first to what was asked while the writer lived."""
    case = await Case.make()
    assert case.leader.writers.shut_out(PREFILL)
    case.leader.writers.exited(PREFILL)
    assert case.leader.orders == [(1, Revoke(PREFILL)), (1, Revoke(PREFILL, ended=True))]
    before, after = await case.leader.settle()
    assert isinstance(before, ShutOut) and isinstance(after, ShutOut)
    assert not case.closed(before) and not case.closed(THERE) and not case.closed(after)
    assert case.closed(THERE)


async def test_a_rank_that_revoked_long_ago_is_asked_again_and_can_lend_what_it_laid_aside() -> None:
    case = await Case.make()
    assert case.leader.writers.shut_out(PREFILL)
    assert not case.closed(await case.own()) and not case.closed(THERE), "it may live"
    case.leader.writers.exited(PREFILL)
    assert not case.exits() and case.leader.orders[1:] == [(1, Revoke(PREFILL, ended=True))]
    assert not case.closed(await case.own()) and case.closed(THERE)
    assert case.leader.exited == [PREFILL]


async def test_an_agent_that_is_being_made_when_its_writer_ends_is_ended_and_never_known() -> None:
    case = await Case.make()
    assert case.leader.writers.shut_out(PREFILL)
    case.leader.writers.closed(await case.own())
    case.leader.writers.closed(THERE)
    assert case.leader.ask(PREFILL) is None
    case.leader.writers.exited(PREFILL)
    made, ended = await case.leader.settle()
    assert isinstance(made, Accepted) and isinstance(ended, ShutOut) and not case.leader.writers.accepted(made)
    assert not case.closed(ended) and case.closed(THERE) and case.leader.writers.incarnations == set()


async def test_the_end_of_one_process_is_not_that_of_the_next_one() -> None:
    """They are two incarnations; a room of the one that lives stays open, whatever is answered about it."""
    case = await Case.make()
    case.leader.writers.exited(OTHER)
    assert case.leader.orders == [] and await case.leader.settle() == []
    assert case.leader.writers.shut_out(PREFILL)
    assert not case.closed(await case.own()) and not case.closed(THERE)
