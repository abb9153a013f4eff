"""Cases of real bug reports about a service in use, on virtual time. Each ends at baseline."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.actors.settings import PrefillSettings
from kvferry.protocol.request import Sampling
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import PREFILL_TOKEN_S, SimOptions, SimSystem

PROMPT = tuple(range(300, 400))
LONG = tuple(range(1000, 1000 + 320))
CHUNK = 32
CHUNK_S = CHUNK * PREFILL_TOKEN_S
LONG_S = 600.0


def one_at_a_time(seed: int = 1) -> SimOptions:
    """Prefill computes one chunk of 32 tokens per forward, of one request."""
    return SimOptions(seed=seed, prefill=PrefillSettings(chunk_tokens=CHUNK, batch_tokens=CHUNK, pool_pages=64))


async def first_token_s(client: Any, prompt: tuple[int, ...]) -> float:
    """Virtual seconds to the first token; the rest is read too."""
    clock = VirtualClock()
    began_s = clock.now_s()
    live = client.open(prompt, max_tokens=2)
    await live.take()
    first_s = clock.now_s() - began_s
    if not live.stream.over:
        await client.collect(live)
    client.front.close_request(live)
    return first_s


def test_case_20_who_leaves_before_the_first_token_holds_nobody_up(client_of: Any) -> None:
    """Case 20: a prompt of ten chunks is closed in its second; a short one then waits for one chunk at most, and no
    chunk of the long one is computed after the one that was under way.
    """

    async def main() -> None:
        async with SimSystem(one_at_a_time()) as system:
            client = await client_of(system)
            idle_s = await first_token_s(client, PROMPT[:20])
            long = client.open(LONG, max_tokens=5)
            await asyncio.sleep(CHUNK_S * 1.5)
            steps = system.prefill().forward.done
            client.front.close_request(long)
            waited_s = await first_token_s(client, PROMPT[:20])
            assert waited_s <= idle_s + CHUNK_S
            # the long one's chunk that was running, and the short prompt's own
            assert system.prefill().forward.done <= steps + 2
            assert await system.settle(5)

    run(main())


def test_case_55_only_the_request_of_the_client_that_left_is_aborted(client_of: Any) -> None:
    """Case 55: requests are told apart by 63 random bits of ours and matched whole. Here one id is a prefix of the
    others in every notation: 0xa, 0xab, 0xabc; 1, 12, 123.
    """
    for ids in ([0xA, 0xAB, 0xABC], [1, 12, 123]):

        async def main(ids: list[int] = ids) -> None:
            async with SimSystem(SimOptions()) as system:
                client = await client_of(system)
                wanted = iter(ids)
                client.front.random = type("Ids", (), {"bits": staticmethod(lambda _: next(wanted))})()
                lives = [client.front.open(PROMPT, Sampling(max_tokens=20)) for _ in ids]
                readers = [asyncio.ensure_future(client.collect(live)) for live in lives[1:]]
                await lives[0].take()
                client.front.close_request(lives[0])
                expected = list(system.engine().expected_tokens(PROMPT, 20))
                for tokens in await asyncio.gather(*readers):
                    assert [token.token_id for token in tokens] == expected
                assert await system.settle(5)

        run(main())


def test_case_62_a_service_that_was_idle_serves_at_the_first_try(client_of: Any) -> None:
    """Case 62: ten minutes without a request are longer than every limit of the links; nothing is repeated."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            for idle_s in (LONG_S, 11.0, 61.0):
                live = client.open(PROMPT, max_tokens=4)
                tokens = [token.token_id for token in await client.collect(live)]
                assert tokens == list(system.engine().expected_tokens(PROMPT, 4))
                assert live.attempt == 0
                await asyncio.sleep(idle_s)
            assert client.front.metrics.attempts_failed.labels("peer_lost")._value.get() == 0
            assert await system.settle(5)

    run(main())
