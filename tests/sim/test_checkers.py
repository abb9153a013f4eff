"""Each checker finds the break that is planted for it, and nothing in a system that is whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.actors.router.breaker import Verdict
from kvferry.actors.settings import FaultSettings, LinkSettings
from kvferry.protocol.errors import LedgerError
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.sim.checkers import Broken, Watcher, check_idle
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
            with pytest.raises(Broken, match=r"left over.*guests.*prefill-0 queues.*decode-0 queues"):
                check_idle(system)
            assert (await call).ok and await system.settle(10)
            await asyncio.sleep(2)
            watcher.look()
            check_idle(system)
            assert watcher.writes.copies

    run(main())


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_write_that_no_lease_covers(side: str) -> None:
    async def main() -> None:
        async with SimSystem(SLOW) as system:
            watcher = Watcher(system)
            call = await receiving(system)
            leader = system.prefill() if side == "source" else system.decode()
            (room,) = leader.rooms.values()
            assert room.holding is not None and room.holding.lease is not None
            room.holding.lease = replace(room.holding.lease, writers={0: 4711})
            await asyncio.sleep(0.25)
            with pytest.raises(Broken, match=f"a write touches pages .* of its {side}, which no lease covers"):
                watcher.look()
            call.cancel()

    run(main())


def test_a_page_that_is_free_and_held() -> None:
    async def main() -> None:
        async with SimSystem(SLOW) as system:
            watcher = Watcher(system)
            call = await receiving(system)
            (room,) = system.decode().rooms.values()
            assert room.holding is not None
            system.decode().ledger._free.append(room.holding.pages[0])
            with pytest.raises(LedgerError, match="is also free"):
                watcher.look()
            call.cancel()

    run(main())


def test_an_actor_that_has_ended() -> None:
    async def main() -> None:
        async with SimSystem(SLOW) as system:
            system.decode()._mailbox.put("what it does not know")
            with pytest.raises(Broken, match="decode-0 has ended: TypeError"):
                await asyncio.wait_for(Watcher(system).run(), 5)

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
