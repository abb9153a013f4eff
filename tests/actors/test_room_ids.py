"""Two rooms with one id: it can't happen by what a client sends, since routers draw the ids; and if two routers draw
the same, the second room is refused wherever it meets the first, which does not notice.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.actors.leader import Leader
from kvferry.actors.settings import DecodeSettings, PrefillSettings, RouterSettings, UnifiedSettings
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import Abort, Stop
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(300, 400))
OTHER = tuple(range(700, 760))
TWO_ROUTERS = RouterSettings(instances=2)
NONE = PrefillSettings(instances=0)


class Draws:
    """A router's randomness: the first numbers of 63 bits are given, everything else is the real one's."""

    def __init__(self, inner: Any, *given: int) -> None:
        self._inner, self._given = inner, list(given)

    def bits(self, count: int) -> int:
        return self._given.pop(0) if count == 63 and self._given else self._inner.bits(count)

    def chance(self, rate: float) -> bool:
        return self._inner.chance(rate)

    def between(self, low: float, high: float) -> float:
        return self._inner.between(low, high)


def give(router: Any, *numbers: int) -> None:
    router._random = Draws(router._random, *numbers)


def spec_of(client: Any, prompt: tuple[int, ...], request: int = 99) -> RequestSpec:
    return RequestSpec(request, prompt, Sampling(max_tokens=5), client.network.address)


async def first_of_two(
    system: SimSystem, client: Any, wait_until: Any, tokens: int = 30
) -> tuple[Any, asyncio.Task[Any]]:
    """A live request of router-0, in mid-prefill, and its reader."""
    live = client.open(PROMPT, max_tokens=tokens)
    task = asyncio.create_task(client.collect(live))
    await wait_until(lambda: bool(system.router.guests))
    return live, task


def ids(tokens: list[Any]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize("drawn", [(5, 5, 6), (5, 0, 6)], ids=["a live room's", "no room's"])
def test_case_7_a_router_draws_again(client_of: Any, drawn: tuple[int, ...]) -> None:
    """Case 7: the id that is drawn for the second request is the first one's, or 0, which stands for no room. The
    router draws again: two rooms, two right answers. Clients can't name a room at all (see `serve.schemas`).
    """

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            give(system.router, *drawn)
            lives = [client.open(prompt, max_tokens=12) for prompt in (PROMPT, OTHER)]
            answers = await asyncio.gather(*map(client.collect, lives))
            for prompt, tokens in zip((PROMPT, OTHER), answers, strict=True):
                assert ids(tokens) == list(system.engine().expected_tokens(prompt, 12))
            assert [live.room for live in lives] == [5, 6]
            assert system.router.counts["room ids drawn again"] == 1
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_case_7_the_id_of_a_room_that_has_ended_is_not_used_again(client_of: Any) -> None:
    """Case 7, later: late messages of the first room may still be on their way."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            give(system.router, 5, 5, 6)
            for room in (5, 6):
                live = client.open(PROMPT[:20], max_tokens=2)
                await client.collect(live)
                assert await system.settle(5)
                assert live.room == room
            assert list(system.router.ended) == [5, 6]

    run(asyncio.wait_for(main(), 120))


UNIFIED = SimOptions(
    prefill=NONE, decode=DecodeSettings(instances=0), router=TWO_ROUTERS,
    unified=UnifiedSettings(instances=1, chunk_tokens=32, batch_tokens=64, pool_pages=64),
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "leg"),
    [
        (SimOptions(router=TWO_ROUTERS), "prefill"),
        (SimOptions(router=TWO_ROUTERS, prefill=PrefillSettings(instances=2, pool_pages=64)), "decode"),
        (UNIFIED, "decode"),
    ],
    ids=["at prefill", "at decode", "at a unified instance"],
)
def test_case_7_two_routers_draw_one_id(client_of: Any, wait_until: Any, options: SimOptions, leg: str) -> None:
    """Case 7: the second room is refused with a conflict where it meets the first (with two prefills: at decode); the
    first one's answer is right, and the front's next attempt of the second has an id of its own.
    """

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            for router in system.routers():
                give(router, 5)
            live, reading = await first_of_two(system, client, wait_until)
            name = "unified-0" if options is UNIFIED else "decode-0"
            leader = system.processes[name].actor
            assert isinstance(leader, Leader)
            await wait_until(lambda: 5 in leader.rooms)
            if options.prefill.instances == 2:  # the second room goes by the other prefill
                taken = next(i for i in range(2) if 5 in system.prefill(i).rooms)
                avoid = (system.prefill(taken).network.address.incarnation,)
            else:
                avoid = ()
            spec = spec_of(client, OTHER)
            spec = RequestSpec(spec.request, spec.prompt_ids, spec.sampling, spec.front, avoid=avoid)
            second: Outcome = await system.routers()[1].submit(spec, 0)
            assert not second.ok and second.cause is not None and second.room == 5
            assert (second.cause.code, second.cause.leg) == ("conflict", leg)
            assert "a room of this id is open here already" in second.cause.message
            assert system.routers()[1].counts["rooms that spoke against their pair"] == 0
            third = await system.routers()[1].submit(spec, 1)
            assert third.ok and third.room != 5
            expected = list(system.engine(name).expected_tokens(PROMPT, 30))
            assert ids(await reading) == expected and live.room == 5
            assert not any(process.task.done() for process in system.processes.values())
            assert await system.settle(10), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_a_conflict_is_answered_by_the_next_attempt(client_of: Any, wait_until: Any) -> None:
    """The client of the second request sees its answer, not the conflict."""

    async def main() -> None:
        async with SimSystem(SimOptions(router=TWO_ROUTERS)) as system:
            client = await client_of(system, attempts=3)
            for router in system.routers():
                give(router, 5)
            _, reading = await first_of_two(system, client, wait_until)
            await wait_until(lambda: 5 in system.prefill().rooms)
            second = client.open(OTHER, max_tokens=7)
            assert ids(await client.collect(second)) == list(system.engine().expected_tokens(OTHER, 7))
            assert (second.attempt, system.prefill().counts["rooms refused"]) == (1, 1)
            assert ids(await reading) == list(system.engine().expected_tokens(PROMPT, 30))
            assert await system.settle(10), system.counts()

    run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("options", [SimOptions(router=TWO_ROUTERS), UNIFIED], ids=["a pair", "unified"])
@pytest.mark.parametrize("phase", ["open", "running"])
def test_the_end_of_the_second_room_does_not_end_the_first(
    client_of: Any, wait_until: Any, options: SimOptions, phase: str
) -> None:
    """The second room's router aborts it before it has heard that it was refused, and another front says Stop: both
    name an id that is here, and mean another room.
    """

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            stranger = await client_of_name(client, system, "front-1")
            for router in system.routers():
                give(router, 5)
            live, reading = await first_of_two(system, client, wait_until)
            await wait_until(lambda: live.decode is not None if phase == "running" else len(system.router.guests) == 1)
            leaders = [
                p.actor for n, p in system.processes.items() if n.split("-")[0] in ("prefill", "decode", "unified")
            ]
            await wait_until(lambda: phase == "running" or all(5 in leader.rooms for leader in leaders))  # type: ignore[attr-defined]
            second = asyncio.create_task(system.routers()[1].submit(spec_of(stranger, OTHER), 0))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            cause = Cause("aborted", "its client has gone", "front", room=5)
            for leader in leaders:
                address: Address = leader.network.address
                assert system.routers()[1].network.send(address.incarnation, Abort(5, cause, stop_running=True))
                stranger.network.dial(address)
                await wait_until(lambda at=address.incarnation: stranger.network.is_up(at))
                assert stranger.network.send(address.incarnation, Stop(99, 0, 5))
            expected = list(system.engine(leaders[-1].info.instance).expected_tokens(PROMPT, 30))
            assert ids(await reading) == expected
            assert await system.settle(10), system.counts()

    run(asyncio.wait_for(main(), 120))


async def client_of_name(client: Any, system: SimSystem, name: str) -> Any:
    return await type(client)(system, name, 1, 30.0).start()
