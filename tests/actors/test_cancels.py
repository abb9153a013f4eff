"""Cancels at random phases: every counter is at baseline again as soon as nothing is on its way any more."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest

from kvferry.actors.settings import DecodeSettings, FaultSettings, PrefillSettings
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.sim.checkers import check_idle
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(300, 400))
CANCELS = 40
#: One request's tokens are 100 + 30 in pages of 8. The second decode request has to wait until the first has ended.
NARROW = DecodeSettings(pool_pages=17)
#: A late write lands 0.15 s after the cancel, and a forward ends sooner: there is nothing else to wait for.
LIMIT_S = 0.2
OPTIONS = SimOptions(
    prefill=PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64),
    decode=NARROW,
    faults=FaultSettings(delay_ms=40, late_after_abort_ms=150),
)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_counter_is_at_baseline_when_the_last_write_has_landed(client_of: Any, seed: int) -> None:
    """A request alone, or two of which one waits for the other's pages; all leave at one random moment."""
    random = Random(seed)

    async def cancel(system: SimSystem, client: Any, count: int) -> list[str]:
        """The KVPoll that each room had reached; a request that has no room yet is "none"."""
        lives = [client.open(PROMPT, max_tokens=30) for _ in range(count)]
        await asyncio.sleep(random.uniform(0, 1.1) ** 2 if random.random() < 0.7 else random.uniform(0, 0.004))
        rooms = [(room, r.machine.kvpoll.name) for room, r in system.decode().rooms.items()]
        rooms += [(room, "BOOTSTRAPPING") for room in system.router.guests if room not in dict(rooms)]
        for live in lives:
            client.front.close_request(live)
        left_s = VirtualClock().now_s()
        assert await system.settle(LIMIT_S), (dict(rooms), system.counts())
        assert VirtualClock().now_s() - left_s <= LIMIT_S
        assert client.front.requests_live == 0
        return [name for _, name in rooms] or ["none"]

    async def main() -> Counter[str]:
        phases: Counter[str] = Counter()
        async with SimSystem(OPTIONS) as system:
            client = await client_of(system)
            for _ in range(CANCELS):
                phases.update(await cancel(system, client, random.choice((1, 2))))
                await asyncio.sleep(1)
                check_idle(system)
        return phases

    phases = run(main())
    assert all(phases[name] >= 3 for name in ("BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS")), phases


def test_an_attempt_is_withdrawn_by_its_name(client_of: Any) -> None:
    """A withdrawal may come before the call that it is about: then it changes nothing, and is told so."""

    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            client, router = await client_of(system), system.router
            spec = RequestSpec(7, PROMPT, Sampling(30), client.front._network.address)
            assert not await router.withdraw(7, 0)
            submitted = asyncio.ensure_future(router.submit(spec, 0))
            await asyncio.sleep(0.1)
            assert len(router.guests) == 1 and not await router.withdraw(8, 0) and not await router.withdraw(7, 1)
            assert await router.withdraw(7, 0)
            outcome = await submitted
            assert not outcome.ok and outcome.cause is not None and outcome.cause.code == "aborted"
            assert await system.settle(LIMIT_S), system.counts()
            assert not await router.withdraw(7, 0)
            check_idle(system)

    run(main())


def test_a_cancel_does_not_wait_for_the_pair_to_be_connected(client_of: Any) -> None:
    """The room is over and its pages are free while the pair is still being formed, which goes on for whoever comes."""

    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            client, prefill = await client_of(system), system.prefill()
            connect, write, written = prefill.endpoint.connect, prefill.endpoint.write, []

            async def slowly(descriptor: Any) -> Any:
                await asyncio.sleep(5)
                return await connect(descriptor)

            def noting(*args: Any) -> Any:
                written.append(VirtualClock().now_s())
                return write(*args)

            prefill.endpoint.connect, prefill.endpoint.write = slowly, noting  # type: ignore[method-assign]
            live = client.open(PROMPT, max_tokens=30)
            await asyncio.sleep(1)
            assert len(system.router.guests) == len(prefill.rooms) == len(system.decode().rooms) == 1
            client.front.close_request(live)
            assert await system.settle(LIMIT_S), system.counts()
            check_idle(system)
            await asyncio.sleep(5)  # the connection is there, and the room is not
            assert not written
            assert len(await client.ask(PROMPT, max_tokens=3)) == 3 and written
            assert await system.settle(LIMIT_S), system.counts()

    run(main())
