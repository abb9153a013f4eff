"""The router in a whole system on virtual time: who is chosen, who is refused and how, what heals."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.actors.settings import DecodeSettings, PrefillSettings, RouterSettings
from kvferry.protocol.errors import HandoffFailed, Overloaded, Unavailable
from kvferry.protocol.messages import Drained, Message, OpenDecode, PrefillDone, Register, TokenBatch
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer.contract import TransferError

PROMPT = tuple(range(300, 310))
FOUR = SimOptions(
    prefill=PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64, instances=2),
    decode=DecodeSettings(pool_pages=64, instances=2),
)


def with_router(options: SimOptions, **router: Any) -> SimOptions:
    return replace(options, router=RouterSettings(**router))


async def ask_all(client: Any, count: int, max_tokens: int = 2) -> list[Any]:
    """Answers and errors of requests that come at one moment."""
    asked = (client.ask(PROMPT, max_tokens=max_tokens) for _ in range(count))
    return list(await asyncio.gather(*asked, return_exceptions=True))


async def names(client: Any, lives: list[Any]) -> list[tuple[str, str]]:
    journals = [await client.journal(live) for live in lives]
    return [(journal["prefill"], journal["decode"]) for journal in journals]


def opens(system: SimSystem) -> list[OpenDecode]:
    """All that the router says to decodes from now on."""
    seen: list[OpenDecode] = []
    network = system.router.network
    send = network.send

    def listening(incarnation: int, message: Message) -> bool:
        if isinstance(message, OpenDecode):
            seen.append(message)
        return send(incarnation, message)

    network.send = listening  # type: ignore[method-assign]
    return seen


def test_case_17_the_breaker_of_the_only_prefill(client_of: Any, wait_until: Any) -> None:
    """Case 17: the data plane refuses three times. While the breaker is open requests get 503 at once, and decode hears
    of none. After 5 s one probes; while it does, the others are refused. It fails: 10 s. The next one heals it.
    """

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client, clock = await client_of(system), VirtualClock()
            endpoint = system.prefill().endpoint
            connect = endpoint.connect

            async def refused(descriptor: Any) -> Any:
                raise TransferError("the data plane refuses")

            endpoint.connect = refused  # type: ignore[method-assign]
            for _ in range(3):
                with pytest.raises(HandoffFailed, match="the data plane refuses"):
                    await client.ask(PROMPT, max_tokens=2)
            opened_s, told_decode = clock.now_s(), opens(system)
            for _ in range(3):
                with pytest.raises(
                    Unavailable, match=r"breakers of all 1 pairs are open.*probe is in (5.0|4.9)"
                ) as got:
                    await client.ask(PROMPT, max_tokens=2)
                assert 4.9 < got.value.retry_after_s <= 5.0
            assert clock.now_s() - opened_s < 0.1 and told_decode == []
            status = await system.router.status()
            assert [(b["prefill"], b["decode"], b["state"]) for b in status["breakers"]] == [
                ("prefill-0", "decode-0", "open")
            ]

            await asyncio.sleep(opened_s + 5.0 - clock.now_s())
            results = await asyncio.gather(
                *(client.ask(PROMPT, max_tokens=2) for _ in range(3)), return_exceptions=True
            )
            assert [type(result) for result in results] == [HandoffFailed, Unavailable, Unavailable]
            assert "a probe is under way" in str(results[1]) and len(told_decode) == 1
            endpoint.connect = connect  # type: ignore[method-assign]
            await asyncio.sleep(5.0)
            with pytest.raises(Unavailable):
                await client.ask(PROMPT, max_tokens=2)
            await asyncio.sleep(5.0)
            right = list(system.engine().expected_tokens(PROMPT, 2))
            results = await asyncio.gather(
                *(client.ask(PROMPT, max_tokens=2) for _ in range(3)), return_exceptions=True
            )
            assert results[0] == right and [type(result) for result in results[1:]] == [Unavailable] * 2
            assert await ask_all(client, 3) == [right] * 3
            assert (await system.router.status())["breakers"] == [] and system.router.breakers.opened == 2
            assert await system.settle(5)

    run(main())


def test_a_prefill_that_was_started_again_needs_no_probe(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)

            async def refused(descriptor: Any) -> Any:
                raise TransferError("the data plane refuses")

            system.prefill().endpoint.connect = refused  # type: ignore[method-assign]
            for _ in range(3):
                with pytest.raises(HandoffFailed):
                    await client.ask(PROMPT, max_tokens=2)
            system.kill("prefill-0")
            new = system.spawn("prefill", "prefill-0").address.incarnation
            await wait_until(lambda: system.router.network.is_up(new))
            asked = [client.ask(PROMPT, max_tokens=2) for _ in range(3)]
            assert await asyncio.gather(*asked) == [list(system.engine().expected_tokens(PROMPT, 2))] * 3

    run(main())


def test_a_pair_whose_breaker_is_open_is_avoided_and_its_parts_still_serve(client_of: Any) -> None:
    """One prefill and one decode can't reach each other; either serves with the other's partner."""

    async def main() -> None:
        async with SimSystem(with_router(FOUR, policy="round_robin")) as system:
            client = await client_of(system)
            lives = [client.open(PROMPT, max_tokens=2) for _ in range(2)]  # in turn: two pairs, again and again
            await asyncio.gather(*(client.collect(live) for live in lives))
            (prefill, decode), _ = await names(client, lives)
            endpoint, agent = system.prefill(int(prefill[-1])).endpoint, system.processes[decode].address.incarnation
            connect = endpoint.connect

            async def some(descriptor: Any) -> Any:
                if descriptor.incarnation == agent:
                    raise TransferError("no route")
                return await connect(descriptor)

            endpoint.connect = some  # type: ignore[method-assign]
            results: list[Any] = []
            while len(results) < 12:
                results += await asyncio.gather(client.ask(PROMPT, max_tokens=2), return_exceptions=True)
            assert [isinstance(result, HandoffFailed) for result in results].count(True) == 3
            lives = [client.open(PROMPT, max_tokens=2) for _ in range(4)]
            await asyncio.gather(*(client.collect(live) for live in lives))
            pairs = await names(client, lives)
            assert (prefill, decode) not in pairs
            assert {p for p, _ in pairs} == {"prefill-0", "prefill-1"} and {d for _, d in pairs} == {
                "decode-0",
                "decode-1",
            }

    run(main())


def test_case_53_prefills_last_words_are_late(client_of: Any) -> None:
    """Case 53: whatever prefill says about the end (to the room, to decode, to the front) comes 3 s late. Its KV is at
    decode by then, so the client has its tokens when it would have had them anyway.
    """

    async def times(delay_s: float) -> list[float]:
        async with SimSystem(SimOptions()) as system:
            client, clock = await client_of(system), VirtualClock()
            network, loop = system.prefill().network, asyncio.get_running_loop()
            send = network.send

            def late(incarnation: int, message: Message) -> bool:
                if not isinstance(message, PrefillDone | Drained | TokenBatch):
                    return send(incarnation, message)
                loop.call_later(delay_s, send, incarnation, message)
                return True

            network.send = late  # type: ignore[method-assign]
            began_s, seen, live = clock.now_s(), [], client.open(PROMPT, max_tokens=3)
            ids: list[int] = []
            while len(ids) < 3:
                ids += [token.token_id for token in await live.take()]
                seen.append(clock.now_s() - began_s)
            assert ids == list(system.engine().expected_tokens(PROMPT, 3))
            client.front.close_request(live)
            assert await system.settle(5)
            return [seen[0], seen[-1]]

    (first_s, last_s), (late_first_s, late_last_s) = run(times(0.0)), run(times(3.0))
    assert late_first_s - first_s < 0.01 and late_last_s - last_s < 0.01


def test_case_56_no_prefill_is_left_and_one_comes_back(client_of: Any, wait_until: Any) -> None:
    """Case 56: 503 that says what is missing, at once, and nothing is computed elsewhere instead; no call is needed to
    recover.
    """

    async def main() -> None:
        async with SimSystem(FOUR) as system:
            client, clock = await client_of(system), VirtualClock()
            assert len(await client.ask(PROMPT, max_tokens=2)) == 2
            system.kill("prefill-0")
            system.kill("prefill-1")
            await asyncio.sleep(1.0)
            told_decode, asked_s = opens(system), clock.now_s()
            for _ in range(3):
                with pytest.raises(Unavailable, match=r"prefill: 0 of 2 instances.*no prefill is registered"):
                    await client.ask(PROMPT, max_tokens=2)
            assert clock.now_s() - asked_s < 0.1 and told_decode == []
            assert system.router.counts["refused unavailable"] == 3
            new = system.spawn("prefill", "prefill-1").address.incarnation
            await wait_until(lambda: system.router.network.is_up(new))
            assert await client.ask(PROMPT, max_tokens=2) == list(system.engine().expected_tokens(PROMPT, 2))
            assert await system.settle(5)

    run(main())


CROWDED = SimOptions(
    prefill=PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=256),
    decode=DecodeSettings(max_running=8, pool_pages=256),
    router=RouterSettings(queue_limit=16),
)


def test_case_61_a_hundred_requests_for_eight_places_and_a_queue_of_sixteen(client_of: Any) -> None:
    """Case 61: 8 + 16 are served to their end; 76 are answered Overloaded (429) with Retry-After, in no time. While the
    24 are served nobody else gets in, wherever they wait; afterwards there is room again.
    """

    async def main() -> None:
        async with SimSystem(CROWDED) as system:
            client, clock = await client_of(system), VirtualClock()
            began_s, refused_s = clock.now_s(), []

            async def ask(number: int) -> Any:
                try:
                    return await client.ask(PROMPT, max_tokens=20, temperature=1.0, seed=number)
                except Overloaded as error:
                    refused_s.append(clock.now_s() - began_s)
                    return error

            asked = [asyncio.create_task(ask(number)) for number in range(100)]
            await asyncio.sleep(0.3)  # the first eight are running; rooms have ended with their commit
            assert len(refused_s) == 76 and max(refused_s) < 0.1
            assert system.decode().queues()["running"] == 8 and system.decode().queues()["waiting"] == 16
            assert (await system.router.status())["waiting"] == 16
            with pytest.raises(Overloaded, match=r"16 requests wait for a place.*router.queue_limit is 16"):
                await client.ask(PROMPT, max_tokens=2)
            results = await asyncio.gather(*asked)
            for number, result in enumerate(results):
                if not isinstance(result, Overloaded):
                    sampling = Sampling(max_tokens=20, temperature=1.0, seed=number)
                    assert result == list(system.engine().expected_tokens(PROMPT, 20, sampling))
            assert Counter(type(result).__name__ for result in results) == {"list": 24, "Overloaded": 76}
            assert all(
                error.http_status == 429 and error.retry_after_s >= 1
                for error in results
                if isinstance(error, Overloaded)
            )
            assert len(await client.ask(PROMPT, max_tokens=2)) == 2
            assert await system.settle(5)

    run(main())


def test_retry_after_comes_from_how_fast_places_become_free(client_of: Any) -> None:
    """Once requests have ended, how long they had a place is known: `place_s`. With 8 running 8 / place_s end a second,
    so the n-th of those who are refused is told n * place_s / 8.
    """

    async def main() -> None:
        async with SimSystem(CROWDED) as system:
            client = await client_of(system)
            await asyncio.gather(*(client.ask(PROMPT, max_tokens=101) for _ in range(8)))
            place_s = system.decode().load().place_s
            assert 2.0 < place_s < 2.3  # 100 steps of 20 ms, and the handoff
            await asyncio.sleep(2.0)
            asked = [asyncio.create_task(client.ask(PROMPT, max_tokens=101)) for _ in range(24)]
            await asyncio.sleep(1.0)  # the 8 are running, and reported
            results = await asyncio.gather(
                *(client.ask(PROMPT, max_tokens=2) for _ in range(12)), return_exceptions=True
            )
            waits_s = [result.retry_after_s for result in results if isinstance(result, Overloaded)]
            assert waits_s == pytest.approx([max(1.0, n * place_s / 8) for n in range(1, 13)])
            await asyncio.gather(*asked)

    run(main())


def test_the_next_attempt_of_a_request_is_not_refused_for_the_queues_length(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(CROWDED) as system:
            client = await client_of(system)
            asked = [asyncio.create_task(client.ask(PROMPT, max_tokens=20)) for _ in range(24)]
            await asyncio.sleep(0.1)
            spec = RequestSpec(5, PROMPT, Sampling(max_tokens=2), client.network.address)
            first = await system.router.submit(spec, 0)
            assert first.cause is not None and first.cause.code == "overloaded"
            assert (await system.router.submit(spec, 1)).ok
            await asyncio.gather(*asked)

    run(main())


def test_a_limit_of_rooms_at_a_leader_is_answered_429_with_a_computed_retry_after(client_of: Any) -> None:
    options = replace(CROWDED, decode=DecodeSettings(max_running=2, max_rooms=2, pool_pages=256))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            results = await asyncio.gather(
                *(client.ask(PROMPT, max_tokens=2) for _ in range(4)), return_exceptions=True
            )
            refused = [result for result in results if isinstance(result, Overloaded)]
            assert len(refused) == 2 and all("decode holds 2 rooms; the limit is 2" in str(error) for error in refused)
            assert system.router.breakers.opened == 0

    run(main())


def test_a_draining_instance_gets_no_new_rooms(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(FOUR) as system:
            client = await client_of(system)
            leaving = system.prefill(0)
            registry = system.processes["registry"].address.incarnation
            draining = msgspec.structs.replace(leaving.info, draining=True)
            leaving.network.send(registry, Register(draining))
            await wait_until(lambda: draining in system.router.roster.ranks)
            lives = [client.open(PROMPT, max_tokens=2) for _ in range(6)]
            await asyncio.gather(*(client.collect(live) for live in lives))
            assert {prefill for prefill, _ in await names(client, lives)} == {"prefill-1"}

    run(main())


@pytest.mark.parametrize("routers", [1, 2])
def test_siblings_meet_at_one_prefill_and_spread_over_the_decodes(client_of: Any, routers: int) -> None:
    """Six samples of one prompt; the next group may go elsewhere. With two routers as well: a group has one."""

    async def main() -> None:
        async with SimSystem(with_router(FOUR, instances=routers)) as system:
            client = await client_of(system)
            front = client.network.address
            specs = [
                RequestSpec(n, PROMPT, Sampling(max_tokens=2, seed=n), front, group=group, samples=6)
                for group in (8, 9)
                for n in range(6)
            ]
            outcomes = await asyncio.gather(*(client.backend.submit(spec, 0) for spec in specs))
            for group in (outcomes[:6], outcomes[6:]):
                assert len({outcome.prefill.name for outcome in group}) == 1
                assert Counter(outcome.decode.name for outcome in group) == {"decode-0": 3, "decode-1": 3}

    run(main())


def test_a_burst_between_two_reports_spreads(client_of: Any) -> None:
    """Eight requests at one moment: nobody can have reported any of them."""

    async def main() -> None:
        async with SimSystem(FOUR) as system:
            client = await client_of(system)
            lives = [client.open(PROMPT, max_tokens=2) for _ in range(8)]
            await asyncio.gather(*(client.collect(live) for live in lives))
            pairs = await names(client, lives)
            assert Counter(prefill for prefill, _ in pairs) == {"prefill-0": 4, "prefill-1": 4}
            assert Counter(decode for _, decode in pairs) == {"decode-0": 4, "decode-1": 4}

    run(main())


def test_short_prompts_go_around_a_long_one(client_of: Any) -> None:
    """320 tokens take one prefill 0.32 s; three prompts of 10 tokens that come meanwhile go to the other one."""

    async def main() -> None:
        async with SimSystem(FOUR) as system:
            client = await client_of(system)
            long = client.open(tuple(range(320)), max_tokens=2)
            await asyncio.sleep(0.1)
            short = []
            for _ in range(3):
                short.append(client.open(PROMPT, max_tokens=2))
                await asyncio.sleep(0.05)
            await asyncio.gather(*(client.collect(live) for live in (long, *short)))
            (busy, _), *others = await names(client, [long, *short])
            assert all(prefill != busy for prefill, _ in others)

    run(main())


def test_what_prefill_reports_counts_a_siblings_prompt_once(client_of: Any, wait_until: Any) -> None:
    """83 tokens are 10 full pages of 8 and 3 tokens: one sibling computes 83, the two that wait for it 3 each, and a
    stranger with the same prompt all of it.
    """

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client, prefill = await client_of(system), system.prefill()
            spec = RequestSpec(1, tuple(range(83)), Sampling(max_tokens=2), client.network.address)
            sibling = msgspec.structs.replace(spec, group=7, samples=3)
            asked = [asyncio.create_task(system.router.submit(one, 0)) for one in (sibling, sibling, sibling, spec)]
            await wait_until(lambda: len(prefill.active) == 2 and len(prefill.waiting) == 2)
            assert prefill.forward.done == 0 and prefill.load().queued_tokens == 83 + 3 + 3 + 83
            await asyncio.gather(*asked)
            assert prefill.load().queued_tokens == 0

    run(main())
