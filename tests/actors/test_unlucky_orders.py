"""Sequences of events at which routers, attempts and the registry once broke together; each test names its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.actors.router.breaker import Verdict
from kvferry.actors.router.roster import REGISTRY_YOUNG_S
from kvferry.actors.settings import (
    DecodeSettings,
    FaultSettings,
    LinkSettings,
    PrefillSettings,
    RouterSettings,
    UnifiedSettings,
)
from kvferry.protocol.errors import HandoffFailed, Unavailable
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer.contract import TransferError

PROMPT = tuple(range(300, 340))
LINKS = LinkSettings(heartbeat_s=0.5, silence_s=2.0, resend_s=0.25)
POOLS: dict[str, Any] = {"chunk_tokens": 32, "batch_tokens": 64, "pool_pages": 64}


def fleet(prefill: int = 1, decode: int = 1, unified: int = 0, **router: Any) -> SimOptions:
    return SimOptions(
        prefill=PrefillSettings(instances=prefill, **POOLS),
        decode=DecodeSettings(instances=decode, pool_pages=64),
        unified=UnifiedSettings(instances=unified, **POOLS),
        router=RouterSettings(**router),
        links=LINKS,
    )


def refusing(system: SimSystem, index: int = 0) -> None:
    """From now on the data plane of this prefill connects to nobody."""

    async def refused(descriptor: Any) -> Any:
        raise TransferError("the data plane refuses")

    system.prefill(index).endpoint.connect = refused  # type: ignore[method-assign]


def right(system: SimSystem, prompt: tuple[int, ...], count: int) -> list[int]:
    return list(system.engine("prefill-0").expected_tokens(prompt, count))


def test_all_pairs_are_blocked_beside_a_unified_instance(client_of: Any) -> None:
    """A pair and a unified instance; both breakers are open. A prefill and the unified instance are no pair and have no
    breaker: the router fell over that one while it worked out when to come back.
    """

    async def main() -> None:
        async with SimSystem(fleet(unified=1, breaker_failures=1, policy="round_robin")) as system:
            client = await client_of(system)
            refusing(system)
            unified = system.processes["unified-0"].address.incarnation
            system.router.breakers.ended((unified, unified), 0, Verdict.BAD, system.router.clock.now_s())
            with pytest.raises(HandoffFailed):
                await client.ask(PROMPT, max_tokens=2)
            with pytest.raises(Unavailable, match=r"breakers of all 2 pairs are open; the next probe is in") as got:
                await client.ask(PROMPT, max_tokens=2)
            assert got.value.retry_after_s > 0 and not system.processes["router-0"].task.done()

    run(main())


def test_open_breakers_are_told_although_an_instance_is_missing(client_of: Any, wait_until: Any) -> None:
    """One of two prefills is dead, and the other's breaker is open: the answer named the dead one and had no
    Retry-After, though the service will be back when the breaker half-opens.
    """

    async def main() -> None:
        async with SimSystem(fleet(prefill=2, breaker_failures=1)) as system:
            client = await client_of(system)
            system.kill("prefill-1")
            await wait_until(lambda: not system.router.roster.ready)
            refusing(system)
            with pytest.raises(HandoffFailed):
                await client.ask(PROMPT, max_tokens=2)
            with pytest.raises(Unavailable, match=r"breakers of all 1 pairs are open.*1 of 2 instances") as got:
                await client.ask(PROMPT, max_tokens=2)
            assert 4 < got.value.retry_after_s <= 5

    run(main())


def test_a_router_that_stood_still_blames_nobody(client_of: Any) -> None:
    """The router is stopped until all its links have ended, with a room at each pair. When it goes on, it loses both
    rooms to links of its own; their pairs had done nothing, and serve again as soon as they are linked.
    """
    options = fleet(prefill=2, decode=2, breaker_failures=1, policy="round_robin")

    async def main() -> None:
        async with SimSystem(replace(options, faults=FaultSettings(delay_ms=1000))) as system:
            client = await client_of(system, attempts=3)
            asked = [asyncio.ensure_future(client.ask(PROMPT, max_tokens=20)) for _ in range(4)]
            await asyncio.sleep(0.1)
            assert len({guest.pair for guest in system.router.guests.values()}) == 2
            router = system.router.network.address
            system.network.stop(router)
            await asyncio.sleep(6)
            system.network.resume(router)
            await asyncio.sleep(1.5)
            assert (await system.router.status())["breakers"] == []
            assert await client.ask(PROMPT, max_tokens=2) == right(system, PROMPT, 2)
            assert await asyncio.gather(*asked) == [right(system, PROMPT, 20)] * 4
            assert await system.settle(10)

    run(main())


def test_the_next_attempt_goes_where_the_last_one_did_not_fail(client_of: Any) -> None:
    """One prefill fails every room at once, so it always looks idle; the other has long prompts to compute. With one
    request after another the idle one took all three attempts of each, until its breakers were open.
    """

    async def main() -> None:
        async with SimSystem(fleet(prefill=2, decode=2, breaker_failures=100)) as system:
            client = await client_of(system, attempts=3)
            refusing(system)
            long = [tuple(range(1000 * i, 1000 * i + 200)) for i in range(1, 7)]
            asked = [asyncio.ensure_future(client.ask(prompt, max_tokens=2)) for prompt in long]
            await asyncio.sleep(0.05)
            assert await client.ask(PROMPT, max_tokens=2) == right(system, PROMPT, 2)
            assert await asyncio.gather(*asked) == [right(system, prompt, 2) for prompt in long]
            assert await system.settle(10)

    run(main())


def test_a_decode_that_the_front_has_lost_is_not_preferred(client_of: Any, wait_until: Any) -> None:
    """Decode retracts a request and admits its next attempt; then the network between it and the front is cut, and
    nothing else. Each further attempt went there again, to keep its place, and waited in vain for that link.
    """

    async def main() -> None:
        async with SimSystem(fleet(decode=2)) as system:
            client = await client_of(system, attempts=3)
            live = client.open(PROMPT, max_tokens=60)
            tokens = await live.take()
            await wait_until(lambda: live.decode is not None and live.stream.next_index > 3)
            (index,) = [i for i in range(2) if system.decode(i).running]
            decode = system.decode(index)
            (room,) = decode.rooms.values()
            decode._retract(room)
            await wait_until(lambda: live.attempt == 1 and live.decode is not None)
            assert live.decode.name == decode.network.address.name == f"decode-{index}"
            system.network.cut(decode.network.address, client.network.address)
            tokens += await client.collect(live)
            assert [token.token_id for token in tokens] == right(system, PROMPT, 60)
            assert live.attempt == 2
            system.network.heal(decode.network.address, client.network.address)
            assert await system.settle(20)

    run(main())


def test_requests_are_served_while_ranks_register_again(client_of: Any, wait_until: Any) -> None:
    """The registry dies with one of two prefills and starts again, empty, and the decodes are slow to find it. Its
    first rosters name no decode: routers dropped them with all that they knew of them, and refused what they could have
    served. Who has died is forgotten a little later, when all have had time to register.
    """

    async def main() -> None:
        async with SimSystem(fleet(prefill=2, decode=2)) as system:
            client = await client_of(system)
            system.kill("registry")
            system.kill("prefill-1")
            registry = system.spawn("registry", "registry").address
            decodes = [system.decode(i).network.address for i in range(2)]
            for decode in decodes:
                system.network.cut(registry, decode)
            await wait_until(lambda: [rank.role for rank in system.router.roster.ranks] == ["prefill"])
            assert await client.ask(PROMPT, max_tokens=2) == right(system, PROMPT, 2)
            for decode in decodes:
                system.network.heal(registry, decode)
            await asyncio.sleep(REGISTRY_YOUNG_S + 1)
            names = sorted(address.name for address in system.router.fleet.addresses())
            assert names == ["decode-0", "decode-1", "prefill-0"]
            assert await client.ask(PROMPT, max_tokens=2) == right(system, PROMPT, 2)
            assert await system.settle(5)

    run(main())


def test_a_router_that_has_just_been_started_refuses_nobody(client_of: Any) -> None:
    """One of two routers is started again. Until the registry has told it who is there it said that nobody can serve,
    and the client was told so; the other router serves.
    """

    async def main() -> None:
        async with SimSystem(fleet(instances=2)) as system:
            client = await client_of(system, attempts=3)
            system.kill("router-0")
            system.spawn("router", "router-0")
            asked = (client.ask(PROMPT[i:], max_tokens=2) for i in range(4))
            assert await asyncio.gather(*asked) == [right(system, PROMPT[i:], 2) for i in range(4)]
            assert await system.settle(5)

    run(main())
