"""A request outlives its room: the next attempt goes on from the tokens that the client has (virtual time)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.actors.settings import DecodeSettings, FaultSettings, RouterSettings
from kvferry.protocol.errors import Cause, PeerLost
from kvferry.protocol.messages import Token
from kvferry.serve.attempts import AttemptPolicy, Attempts
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(700, 760))
TWO_DECODES = SimOptions(decode=DecodeSettings(pool_pages=128, instances=2), faults=FaultSettings(delay_ms=5))


def assert_each_once_in_order(tokens: list[Token], right: tuple[int, ...]) -> None:
    assert [token.index for token in tokens] == list(range(len(right)))
    assert tuple(token.token_id for token in tokens) == right
    assert "".join(token.text for token in tokens) == "".join(f"<{i}>" for i in right)


@pytest.mark.parametrize("at_s", [0.002, 0.05, 0.09, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("victim", ["decode-0", "decode-1", "prefill-0"])
def test_nobody_notices_a_kill(client_of: Any, victim: str, at_s: float) -> None:
    """Eight streams of 60 tokens; one process is killed and started again 8 s later. Every client gets exactly the
    tokens that it gets without the kill.
    """

    async def main() -> None:
        async with SimSystem(TWO_DECODES) as system:
            client = await client_of(system, attempts=3)
            prompts = [PROMPT[i:] for i in range(8)]
            lives = [client.open(prompt, max_tokens=60) for prompt in prompts]
            tasks = [asyncio.create_task(client.collect(live)) for live in lives]
            await asyncio.sleep(at_s)
            system.kill(victim)
            await asyncio.sleep(8)
            system.spawn(victim.split("-")[0], victim)
            for prompt, tokens in zip(prompts, await asyncio.gather(*tasks), strict=True):
                assert_each_once_in_order(tokens, system.engine("decode-0").expected_tokens(prompt, 60))
            assert await system.settle(10), system.counts()

    run(main())


@pytest.mark.parametrize("at_s", [0.0005, 0.002, 0.05, 0.09, 0.2, 0.5])
def test_nobody_notices_the_loss_of_a_router(client_of: Any, at_s: float) -> None:
    """Its rooms go with it: what is short of Success goes on through the other router, the rest is left alone."""
    options = replace(TWO_DECODES, router=RouterSettings(instances=2))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=3)
            prompts = [PROMPT[i:] for i in range(8)]
            lives = [client.open(prompt, max_tokens=60) for prompt in prompts]
            tasks = [asyncio.create_task(client.collect(live)) for live in lives]
            await asyncio.sleep(at_s)
            system.kill("router-0")
            for prompt, tokens in zip(prompts, await asyncio.gather(*tasks), strict=True):
                assert_each_once_in_order(tokens, system.engine("decode-0").expected_tokens(prompt, 60))
            assert await system.settle(10), system.counts()

    run(main())


def test_seeded_draws_and_stop_strings_go_on_across_attempts(client_of: Any) -> None:
    """The draw of a position is the same in any attempt, and a stop string may begin in one and end in the next."""

    async def main() -> None:
        async with SimSystem(TWO_DECODES) as system:
            client = await client_of(system, attempts=3)
            sampling = {"max_tokens": 200, "temperature": 1.0, "seed": 11}
            undisturbed = await client.collect(client.open(PROMPT, **sampling))
            ids = [token.token_id for token in undisturbed]
            # A stop string over tokens 40 and 41: the first half is held back when decode dies.
            stop = f"{ids[40]}><{ids[41]}"
            live = client.open(PROMPT, stop=(stop,), **sampling)
            tokens: list[Token] = []
            while len(tokens) < 41:
                tokens += await live.take()
            assert live.decode is not None and len(tokens) == 41
            system.kill(live.decode.name)
            tokens += await client.collect(live)
            assert [token.token_id for token in tokens] == ids[:42]
            assert [token.index for token in tokens] == list(range(42))
            assert "".join(token.text for token in tokens) == "".join(f"<{i}>" for i in ids[:40]) + "<"
            assert tokens[-1].finish_reason == "stop"

    run(main())


def test_without_a_replacement_the_client_is_told_what_failed_first(client_of: Any) -> None:
    """Case 19: no replacement decode comes: an error that names decode, within the recovery time; no hang."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system, attempts=3)
            live = client.open(PROMPT, max_tokens=300)
            while live.stream.next_index < 3:
                await live.take()
            system.kill("decode-0")
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(PeerLost, match=r"decode-0.*no later attempt succeeded.*because no pair can serve"):
                await client.collect(live)
            assert 29 < asyncio.get_running_loop().time() - began_s < 32

    run(main())


def test_a_client_that_leaves_while_its_next_attempt_waits(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system, attempts=3)
            live = client.open(PROMPT, max_tokens=300)
            await live.take()
            system.kill("decode-0")
            await asyncio.sleep(3)
            assert client.front.requests_live == 1
            client.front.close_request(live)
            assert client.front.requests_live == 0
            system.spawn("decode", "decode-0")
            await asyncio.sleep(3)
            assert await system.settle(5) and system.decode().forward.done == 0

    run(main())


LOST = Cause("peer_lost", "decode is gone", "decode")
FULL = Cause("unavailable", "no pair", "router")
ROUTER = Cause("peer_lost", "the router is gone", "router")
BAD = Cause("invalid_request", "no", "router")
LEAVES = Cause("draining", "decode-1 is leaving", "decode")


@pytest.mark.parametrize(
    ("failures", "delays"),
    [
        ([(LOST, 0, 0), (LOST, 0, 1), (LOST, 0, 2)], [0.0, 0.0, None]),  # three in a row without a token
        ([(LOST, 5, 0), (LOST, 6, 1), (LOST, 7, 2), (LOST, 8, 3)], [0.0] * 4),  # each brought a token
        ([(LOST, 5, 0), (FULL, 5, 1), (FULL, 5, 29.9), (FULL, 5, 30)], [0.0, 0.5, 0.5, None]),
        ([(FULL, 0, 0)], [None]),  # nothing was lost: the service is full
        ([(ROUTER, 0, 0), (ROUTER, 0, 3), (ROUTER, 0, 31)], [0.5, 0.5, None]),
        ([(BAD, 0, 0)], [None]),
        (
            [(LEAVES, 0, 0)] * 5 + [(LOST, 0, 1), (LOST, 0, 2), (LOST, 0, 3)],
            [0.0, *[0.1] * 4, 0.0, 0.0, None],
        ),  # leaving counts as none; and a front that knows nobody else yet does not ask without a pause
        ([(LEAVES, 0, 0), (LEAVES, 0, 1), (LEAVES, 5, 2)], [0.0, 0.1, 0.0]),
        ([(LEAVES, 5, 0), (FULL, 5, 1), (LEAVES, 5, 2), (LEAVES, 5, 30)], [0.0, 0.5, 0.0, None]),
        ([(LOST, 5, 0), (BAD, 5, 1)], [0.0, None]),
    ],
)
def test_when_another_attempt_is_opened(failures: list[tuple[Cause, int, float]], delays: list[float | None]) -> None:
    attempts = Attempts(AttemptPolicy(max_attempts=3, recovery_s=30.0))
    assert [attempts.failed(cause, tokens, now_s) for cause, tokens, now_s in failures] == delays


def test_after_a_retraction_a_full_service_is_waited_for() -> None:
    """The request was being served, so that it has to come in again is no refusal; and no failure either."""
    attempts = Attempts(AttemptPolicy(max_attempts=3, recovery_s=30.0))
    for _ in range(5):
        attempts.retracted()
    assert [attempts.failed(FULL, 4, now_s) for now_s in (10.0, 20.0, 39.9, 40.0)] == [0.5, 0.5, 0.5, None]
    assert attempts.final(FULL) is FULL


def test_one_attempt_means_none_after_it() -> None:
    assert Attempts(AttemptPolicy(max_attempts=1)).failed(LOST, 3, 0.0) is None
    assert Attempts(AttemptPolicy(max_attempts=1)).failed(ROUTER, 0, 0.0) is None
    assert Attempts(AttemptPolicy(max_attempts=1)).failed(LEAVES, 3, 0.0) == 0.0, "nothing has failed"
    assert Attempts(AttemptPolicy(recovery_s=0.0)).failed(ROUTER, 3, 0.0) is None
