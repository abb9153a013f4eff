"""Each checker finds the break that is planted for it, and nothing in a system that is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.actors.router.breaker import Verdict
from kvferry.actors.settings import ClockSettings, FaultSettings, LinkSettings
from kvferry.engine.contract import Sequence, StepPlan
from kvferry.memory.proof import NeverGiven, Quiescent, Quiet, Stepped
from kvferry.protocol.errors import LedgerError
from kvferry.protocol.messages import Token
from kvferry.protocol.receiver import ReceiverState
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.sim.checkers import Broken, Watcher, check_idle
from kvferry.sim.clients import Clients
from kvferry.sim.fronts import SimFronts
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(300, 400))
SLOW = SimOptions(faults=FaultSettings(delay_ms=200))


class Silent:
    """A front that reads nothing."""

    def on_link_up(self, peer: Any) -> None: ...
    def on_message(self, peer: Any, message: Any) -> bool:
        return True

    def on_link_lost(self, peer: Any, reason: Any) -> None: ...
    def on_exited(self, peer: Any) -> None: ...
    def on_failure(self, error: Exception) -> None: ...


async def receiving(system: SimSystem) -> asyncio.Task[Any]:
    """One request whose KV is being written, and its call."""
    links = system.network.open("front-0", LinkSettings())
    await links.start(Silent())
    spec = RequestSpec(1, PROMPT, Sampling(max_tokens=5), links.address)
    call = asyncio.create_task(system.router.submit(spec, 0))
    while not any(room.sending.handles for room in system.prefill().rooms.values()):
        await asyncio.sleep(0.001)
    return call


def test_a_system_that_is_whole_passes() -> None:
    async def main() -> None:
        async with SimSystem(SLOW) as system:
            watcher = Watcher(system)
            call = await receiving(system)
            watcher.look()
            with pytest.raises(Broken, match=r"baseline: left over.*guests.*prefill-0 queues.*decode-0 queues"):
                check_idle(system)
            assert (await call).ok and await system.settle(10)
            await asyncio.sleep(2)
            watcher.look()
            check_idle(system)
            assert watcher.writes.copies

    run(main())


def broken_by(plant: Callable[[SimSystem], Awaitable[None]], wait_s: float = 0.3) -> Broken:
    """What is found when something is planted while a room's KV is being written."""

    async def main() -> Broken:
        async with SimSystem(SLOW) as system:
            watcher = Watcher(system)
            call = await receiving(system)
            await plant(system)
            await asyncio.sleep(wait_s)
            with pytest.raises(Broken) as broken:
                watcher.look()
            call.cancel()
            return broken.value

    return run(main())


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_write_that_no_lease_covers(side: str) -> None:
    async def another_writer(system: SimSystem) -> None:
        leader = system.prefill() if side == "source" else system.decode()
        (room,) = leader.rooms.values()
        assert room.holding is not None and room.holding.lease is not None
        room.holding.lease = replace(room.holding.lease, writers={0: 4711})

    broken = broken_by(another_writer)
    assert broken.checker == "leased-writes"
    assert f"of its {side}, which no lease covers" in broken.text


def test_a_write_into_another_rooms_pages() -> None:
    """The pages are leased to that writer, but for another of its rooms."""

    async def other_room(system: SimSystem) -> None:
        (room,) = system.decode().rooms.values()
        room.room += 1

    broken = broken_by(other_room)
    assert broken.checker == "leased-writes" and "leased for room" in broken.text


def test_a_page_that_is_free_and_held() -> None:
    async def freed(system: SimSystem) -> None:
        (room,) = system.decode().rooms.values()
        assert room.holding is not None
        system.decode().ledger._free.append(room.holding.pages[0])

    broken = broken_by(freed, wait_s=0.0)
    assert broken.checker == "conservation" and "is also free" in broken.text


def test_a_page_that_is_touched_is_recounted_in_the_same_turn() -> None:
    """Without the recount of every page: what reserves a page that is still in a block table is found at once."""

    async def main() -> None:
        async with SimSystem(SLOW) as system:
            watcher = Watcher(system)
            call = await receiving(system)
            ledger = system.decode().ledger
            (room,) = system.decode().rooms.values()
            assert room.holding is not None
            ledger._free.append(room.holding.pages[0])
            ledger.name_in_step(room.holding, 0)
            system.decode().ledger.quarantine(room.holding)
            system.decode().advance()
            with pytest.raises(Broken, match=r"conservation: decode-0: page .* lies 1 times in the free list and in 1"):
                watcher.look(every_page=False)
            call.cancel()

    run(main())


def test_pages_that_are_released_while_a_write_is_under_way() -> None:
    """A ledger that takes any proof would not notice."""

    async def released(system: SimSystem) -> None:
        (room,) = system.decode().rooms.values()
        assert room.holding is not None
        room.holding.lease = None
        system.decode().ledger.release(room.holding, Quiescent(room.holding.id, Stepped(0), Quiet()))

    broken = broken_by(released, wait_s=0.0)
    assert broken.checker == "one-release" and "while writes are under way at" in broken.text


def test_pages_that_are_released_twice_or_while_a_forward_names_them() -> None:
    async def main() -> None:
        async with SimSystem(SimOptions(cost_s=lambda plan: 1.0)) as system:
            watcher = Watcher(system)
            links = system.network.open("front-0", LinkSettings())
            await links.start(Silent())
            call = asyncio.create_task(system.router.submit(RequestSpec(1, PROMPT, Sampling(5), links.address), 0))
            while system.engine("prefill-0").running is None:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            ledger = system.prefill().ledger
            (room,) = system.prefill().rooms.values()
            assert room.holding is not None
            for _ in range(2):
                with suppress(LedgerError):
                    ledger.release(room.holding, Quiescent(room.holding.id, Stepped(9), NeverGiven()))
            texts = [broken.text for _, broken in watcher.findings.found if broken.checker == "one-release"]
            assert len(texts) == 1 and "while forward 1 names" in texts[0]
            watcher.findings.found.clear()
            with suppress(LedgerError):
                ledger.release(room.holding, Quiescent(room.holding.id, Stepped(9), NeverGiven()))
            with pytest.raises(Broken, match=r"one-release: .* are released twice"):
                watcher.look(every_page=False)
            call.cancel()

    run(main())


def test_a_forward_that_reads_what_another_room_wrote() -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            watcher = Watcher(system)
            call = await receiving(system)
            (room,) = system.decode().rooms.values()
            assert room.holding is not None
            engine, page = system.engine("decode-0"), room.holding.pages[1]
            while not system.decode().running:
                await asyncio.sleep(0.001)
            stranger = Sequence(4711, (5,), 8, (0, page))
            engine._write(StepPlan(1, (stranger,)), engine._places_of(StepPlan(1, (stranger,))))
            await asyncio.sleep(0.1)
            with pytest.raises(Broken, match=r"page-contents: page .*\(number 1 of room .* holds Stamp\(room=4711"):
                watcher.look()
            call.cancel()

    run(main())


def test_an_actor_that_has_ended() -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            system.decode()._mailbox.put("what it does not know")
            with pytest.raises(Broken, match="alive: decode-0 has ended: TypeError"):
                await asyncio.wait_for(Watcher(system).run(), 5)

    run(main())


def test_a_room_that_outlives_its_clocks() -> None:
    async def main() -> None:
        clocks = ClockSettings(prefill_wait_s=1, transfer_wait_s=1, admission_wait_s=1, no_progress_s=1)
        async with SimSystem(replace(SLOW, clocks=clocks)) as system:
            watcher = Watcher(system)
            call = await receiving(system)
            (guest,) = system.router.guests.values()
            guest.room.journal.began_s -= 8.5
            with pytest.raises(Broken, match=r"rooms-end: router-0: room .* is 8.5"):
                watcher.look()
            call.cancel()

    run(main())


def test_what_a_room_has_left_behind() -> None:
    """A row that never came back, and a probe whose end nobody told."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            system.decode().ledger._free_rows.pop()
            pair, breakers = (1, 2), system.router.breakers
            for _ in range(3):
                breakers.ended(pair, 0, Verdict.BAD, 0.0)
            assert pair not in breakers.blocked(100.0) and breakers.dispatched(pair)
            with pytest.raises(Broken, match=r"probes.*'probing': True.*decode-0 rows': 1"):
                check_idle(system)

    run(main())


def test_pages_wait_for_a_writer_that_stands_still_and_for_no_other() -> None:
    async def main() -> None:
        async with SimSystem(SLOW) as system:
            call = await receiving(system)
            system.network.stop(system.prefill().network.address)
            call.cancel()
            await asyncio.sleep(15)
            (room,) = system.decode().rooms.values()
            assert room.machine.state is ReceiverState.RELEASING
            check_idle(system)
            system.network.resume(system.prefill().network.address)
            with pytest.raises(Broken, match=r"baseline: left over.*decode-0 pages"):
                check_idle(system)
            assert await system.settle(10)
            check_idle(system)

    run(main())


def test_a_client_that_gets_a_token_twice_or_another_one() -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            clients = Clients(SimFronts(system, 1), system.engine("prefill-0"))
            sampling = Sampling(max_tokens=2)
            right = system.engine("prefill-0").expected_tokens(PROMPT, 2, sampling)
            tokens = [Token(1, 0, 7, at, id_, f"<{id_}>", "length" if at else "", None) for at, id_ in enumerate(right)]
            clients.check(PROMPT, sampling, tokens, True)
            other = msgspec.structs.replace(tokens[1], token_id=right[1] + 1)
            for wrong in (tokens[:1], [*tokens, tokens[1]], tokens[::-1], [tokens[0], other]):
                with pytest.raises(Broken, match="tokens-once: a client got"):
                    clients.check(PROMPT, sampling, wrong, True)

    run(main())
