"""Links that break between living processes, and news in unlucky orders: every page comes back, every room ends."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvferry.actors.ports import LostReason
from kvferry.actors.room.journal import Journal
from kvferry.actors.room.room import AbortRequested, FromLeg, LegLost, Room
from kvferry.actors.settings import FaultSettings, LinkSettings
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Limits
from kvferry.protocol.errors import Cause, HandoffFailed, PeerError
from kvferry.protocol.messages import Destination, Message, Opened, UnknownRoom
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.protocol.room import RoomMachine
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer.contract import WriteOutcome, WriteResult

PROMPT = tuple(range(300, 400))
SLOW = FaultSettings(delay_ms=400)


def sending(system: SimSystem) -> bool:
    return any(room.machine.writes_open for room in system.prefill().rooms.values())


@pytest.mark.parametrize("leg", ["prefill-0", "decode-0"])
def test_a_link_between_the_legs_that_breaks_while_both_live_loses_no_page(
    client_of: Any, wait_until: Any, leg: str
) -> None:
    """The ack of the drained writes was for a session that is over; decode asks again over a new one, by itself."""

    async def main() -> None:
        async with SimSystem(SimOptions(faults=SLOW)) as system:
            client = await client_of(system)
            failing = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: sending(system))
            other = system.decode() if leg == "prefill-0" else system.prefill()
            system.processes[leg].actor.network.drop(other.network.address.incarnation)
            with pytest.raises(PeerError, match="link"):
                await failing
            assert await system.settle(10), system.counts()

    run(main())


def test_a_partition_between_the_legs_heals_and_the_pages_come_back(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(
            SimOptions(faults=FaultSettings(delay_ms=5000), links=LinkSettings(silence_s=2.0))
        ) as system:
            client = await client_of(system)
            failing = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: sending(system))
            legs = system.prefill().network.address, system.decode().network.address
            system.network.cut(*legs)
            with pytest.raises(PeerError):
                await failing
            await asyncio.sleep(30)
            assert system.counts()["decode-0"].quarantined == 13, "101 tokens in pages of 8; silence proves nothing"
            system.network.heal(*legs)
            assert await system.settle(20), system.counts()
            assert await client.ask(PROMPT, max_tokens=3) == list(system.engine().expected_tokens(PROMPT, 3))

    run(main())


@pytest.mark.parametrize("leg", ["prefill-0", "decode-0"])
def test_a_router_links_again_to_a_leader_that_lives(client_of: Any, leg: str) -> None:
    """The registry's roster does not change when a link of the router's breaks: nobody else would dial."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            assert len(await client.ask(PROMPT, max_tokens=2)) == 2
            assert await system.settle(5)
            system.processes[leg].actor.network.drop(system.router.network.address.incarnation)
            await asyncio.sleep(3)
            assert len(await client.ask(PROMPT, max_tokens=2)) == 2

    run(main())


def test_a_writer_whose_writes_break_after_decodes_end_was_known_forgets_the_room(
    client_of: Any, wait_until: Any
) -> None:
    """kill -9 of decode: the kernel's word comes first, then the data plane reports that it can't say what landed."""

    async def main() -> None:
        options = SimOptions(faults=FaultSettings(stall_after=0), cancel_ends=False)
        async with SimSystem(options) as system:
            client = await client_of(system)
            failing = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: sending(system))
            (room,) = system.prefill().rooms.values()
            system.kill("decode-0")
            with pytest.raises(PeerError):
                await failing
            await asyncio.sleep(1)
            for handle in room.sending.handles:
                if not handle.ending:
                    handle.end(WriteResult(WriteOutcome.BROKEN, 0, 0.0, "the endpoint is gone"))
            assert await system.settle(5), (room.machine.state, system.counts())

    run(main())


@pytest.mark.parametrize(
    "change",
    [
        {"pages": (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)},  # a page named twice
        {"pages": tuple(range(1000, 1013))},  # pages outside the pool
        {"metadata_slot": 9999},
        {"agent": b"\xc1 not a descriptor"},
        {"required_acks": (0, 1)},
        {"pages": (1,)},
        {"prefix_tokens": 8},
    ],
    ids=lambda change: next(iter(change)) + str(len(str(change))),
)
def test_a_destination_that_makes_no_sense_fails_its_room_and_nothing_else(
    client_of: Any, change: dict[str, Any]
) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            prefill = system.prefill()
            take = prefill._on_message[Destination]
            prefill._on_message[Destination] = lambda peer, message: take(
                peer, msgspec.structs.replace(message, **change)
            )
            with pytest.raises(HandoffFailed, match="leg prefill"):
                await client.ask(PROMPT, max_tokens=5)
            prefill._on_message[Destination] = take
            assert not system.processes["prefill-0"].task.done()
            assert await system.settle(5), system.counts()
            assert await client.ask(PROMPT, max_tokens=3) == list(system.engine().expected_tokens(PROMPT, 3))

    run(main())


def test_a_full_mailbox_loses_neither_the_end_of_a_leg_nor_an_abort() -> None:
    async def main() -> None:
        front, prefill, decode = (Address(name, name, at, "sim", at) for at, name in enumerate("fpd", 1))
        spec = RequestSpec(1, PROMPT, Sampling(max_tokens=1), front)
        machine = RoomMachine(7, 0, spec, prefill, decode, Limits(9, 9, 9, 9), 0.0)
        told: list[Cause | None] = []
        journal = Journal(7, 1, 0, "p", "d", "fake", 100, 0.0)

        def send(_address: Address, _message: Message) -> bool:
            return True

        room = Room(machine, journal, VirtualClock(), send, told.append, mailbox=1)
        assert room.post(FromLeg(prefill, Opened(7, "prefill")))
        assert not room.post(FromLeg(prefill, UnknownRoom(7)))
        cause = Cause("aborted", "the client has gone")
        assert room.post(AbortRequested(cause))
        assert room.post(LegLost(prefill, LostReason.SILENT)) and room.post(LegLost(decode, LostReason.SILENT))
        await asyncio.wait_for(room.run(), 1.0)
        assert told == [cause]

    run(main())
