"""A process that ends, fails or leaves in the middle of a handoff: the other leg neither waits for it nor keeps pages.

Each test is a sequence that lost something in a system of this kind; its own words say what.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.actors.settings import FaultSettings, LinkSettings, PrefillSettings
from kvferry.engine.contract import StepPlan
from kvferry.protocol.errors import Cause, KVFerryError, PeerError
from kvferry.protocol.messages import AbortTransfer
from kvferry.protocol.sender import SenderEvent
from kvferry.sim.checkers import Watcher
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem, prefill_cost_s
from kvferry.transfer.faulty import FaultyEndpoint

PROMPT = tuple(range(300, 400))
OTHER = tuple(range(700, 760))
PAGES = 13


def right(system: SimSystem, prompt: tuple[int, ...], count: int) -> list[int]:
    return list(system.engine("prefill-0").expected_tokens(prompt, count))


@pytest.mark.parametrize("also", ["nobody", "router-0", "front-0"])
@pytest.mark.parametrize("when", ["before it has the room", "before its first message"])
def test_decode_dies_before_its_first_message(client_of: Any, wait_until: Any, also: str, when: str) -> None:
    """Upstream the room at prefill then waited for ever (9). Prefill has no link to this decode yet, so no exit and no
    loss will tell it; the room's actor does, or the loss of the router or of the front, whoever is left.
    """

    async def main() -> None:
        async with SimSystem(SimOptions(links=LinkSettings(heartbeat_s=0.5, silence_s=2.0))) as system:
            client, clock = await client_of(system), VirtualClock()
            prefill, decode = system.prefill(), system.decode()
            live = client.open(PROMPT, max_tokens=5)
            reading = asyncio.create_task(client.collect(live))
            if when == "before it has the room":
                await wait_until(lambda: bool(prefill.rooms))
            else:
                while not decode.rooms:  # a link takes tenths of a millisecond to open
                    await asyncio.sleep(0.00001)
                assert not decode.network.is_up(prefill.network.address.incarnation)
            died_s = clock.now_s()
            system.kill("decode-0")
            if also == "router-0":
                system.kill("router-0")
            elif also == "front-0":
                system.network.kill(client.network.address)
            await wait_until(lambda: not prefill.rooms, 2.5)
            assert clock.now_s() - died_s < 0.1, "by an exit, not by a time-out"
            if also == "nobody":
                with pytest.raises(PeerError, match="decode-0"):
                    await reading
            assert system.counts()["prefill-0"].at_baseline
            reading.cancel()

    run(asyncio.wait_for(main(), 120))


def test_decode_stands_still_before_its_first_message(client_of: Any, wait_until: Any) -> None:
    """As above, by silence: the limit of the links ends the room. When decode goes on, its Destination gets an answer,
    and its pages come back by it.
    """

    async def main() -> None:
        async with SimSystem(SimOptions(links=LinkSettings(heartbeat_s=0.5, silence_s=2.0))) as system:
            client, prefill, decode = await client_of(system), system.prefill(), system.decode()
            reading = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: bool(decode.rooms))
            system.network.stop(decode.network.address)
            with pytest.raises(PeerError, match="decode-0"):
                await reading
            await wait_until(lambda: not prefill.rooms, 0.01)
            await asyncio.sleep(20)
            system.network.resume(decode.network.address)
            await wait_until(lambda: decode.membership.accepted and not decode.rooms, 10)
            await asyncio.sleep(2)
            assert await client.ask(PROMPT, max_tokens=5) == right(system, PROMPT, 5)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("phase", ["queued", "computing", "writing"])
def test_prefill_fails_while_decode_waits_and_the_router_stands_still(
    client_of: Any, wait_until: Any, phase: str
) -> None:
    """Upstream the two legs were called side by side, prefill failed, and decode waited for KV that never came (19).
    Prefill tells decode itself: with the router stopped, decode has given up, and its pages are free, within
    milliseconds of the last write's end.
    """
    options = SimOptions(prefill=PrefillSettings(chunk_tokens=16, batch_tokens=16, pool_pages=64))

    async def main() -> None:
        async with SimSystem(options) as system:
            client, prefill, decode = await client_of(system), system.prefill(), system.decode()
            reading = asyncio.create_task(client.ask(PROMPT, max_tokens=5))

            def there() -> bool:
                rooms = list(prefill.rooms.values())
                if phase == "queued":
                    return any(room.destination is not None for room in rooms)
                return any(room.chunk >= (2 if phase == "writing" else 0) and room.machine.stepping for room in rooms)

            await wait_until(there)
            assert system.counts()["decode-0"].leased == PAGES
            system.network.stop(system.router.network.address)
            (room,) = prefill.rooms.values()
            prefill.fail(room, SenderEvent.FAIL, "the device refuses", "", "handoff_failed")
            await wait_until(lambda: not decode.rooms and not prefill.rooms, 0.03)  # a chunk of 16 tokens takes 20 ms
            assert all(counts.at_baseline for counts in system.counts().values())
            system.network.resume(system.router.network.address)
            with pytest.raises(KVFerryError, match="prefill"):
                await reading
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("limit_s", [30.0, 1.0])
def test_prefill_leaves_when_its_pages_have_been_read(client_of: Any, wait_until: Any, limit_s: float) -> None:
    """Upstream a prefill could not put off its end until its blocks were read (20). Here it may end, so its host is
    told, when no write is left: all of them within the limit, or, when that is over, those that are on their way.
    """
    options = SimOptions(faults=FaultSettings(stall_after=3), cancel_ends=False)

    async def main() -> None:
        async with SimSystem(options) as system:
            watcher = Watcher(system)
            client, prefill = await client_of(system), system.prefill()
            endpoint = system.processes["prefill-0"].endpoint
            assert isinstance(endpoint, FaultyEndpoint)
            reading = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: endpoint.stalled == 1)  # the fourth chunk's: all is computed
            await prefill.drain(limit_s)
            for _ in range(50):
                await asyncio.sleep(0.1)
                assert not (await prefill.drained())["done"] and system.counts()["prefill-0"].leased == PAGES
            endpoint.release_stalled()
            if limit_s > 5:
                assert await reading == right(system, PROMPT, 5)
            else:
                with pytest.raises(KVFerryError, match="is leaving"):
                    await reading
            await asyncio.sleep(1)
            assert (await prefill.drained())["done"] and system.counts()["prefill-0"].at_baseline
            watcher.look()
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def stuck_after(step: int) -> Any:
    def cost_s(plan: StepPlan) -> float:
        prompt = any(len(sequence.token_ids) > 1 for sequence in plan.sequences)
        return 8.0 if prompt and plan.step == step else prefill_cost_s(plan)

    return cost_s


def test_an_abort_during_a_forward_that_still_writes(client_of: Any, wait_until: Any) -> None:
    """The source pages belong to a forward for 8 s more: it writes into them at its end. They are not free before, and
    who comes meanwhile gets others.
    """

    async def main() -> None:
        async with SimSystem(SimOptions(cost_s=stuck_after(2))) as system:
            client, prefill, decode = await client_of(system), system.prefill(), system.decode()
            reading = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: prefill.forward.done == 1 and prefill.forward.running)
            reading.cancel()
            await asyncio.sleep(1)
            assert system.counts()["prefill-0"].free == 64 - PAGES
            answer = asyncio.create_task(client.ask(OTHER, max_tokens=3))
            await asyncio.sleep(5)
            assert system.counts()["prefill-0"].free == 64 - PAGES - 8, "the other, of 60 tokens, waits with its own"
            assert await answer == right(system, OTHER, 3)
            assert not decode.counts["late or stray notifications"]
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_decodes_abort_crosses_prefills_delivery(client_of: Any, wait_until: Any) -> None:
    """Decode says AbortTransfer while prefill's Drained and notification are on their way: whichever is read first,
    the pages come back once, and the room's end is decode's word.
    """

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client, prefill, decode = await client_of(system), system.prefill(), system.decode()
            deliver = prefill._deliver

            def cross(room: Any) -> None:
                deliver(room)
                prefill._on_message[AbortTransfer](room.peer, AbortTransfer(room.room, Cause("aborted", "crossed")))

            prefill._deliver = cross  # type: ignore[method-assign]
            assert await client.ask(PROMPT, max_tokens=5) == right(system, PROMPT, 5)
            assert prefill.counts["messages for unknown rooms"] == 1 and not decode.rooms
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))
