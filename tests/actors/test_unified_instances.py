"""Unified instances behind the router, on virtual time: both legs of a room at one address, always to baseline."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.actors.settings import ClockSettings, DecodeSettings, PrefillSettings, UnifiedSettings
from kvferry.actors.unified.leader import UnifiedLeader
from kvferry.protocol.errors import DeadlineExceeded, InvalidRequest
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(300, 400))
NONE = {"prefill": PrefillSettings(instances=0), "decode": DecodeSettings(instances=0)}


def unified(instances: int = 1, **fields: Any) -> SimOptions:
    sizes = {"pool_pages": 64, "chunk_tokens": 32, "batch_tokens": 64} | fields
    return SimOptions(unified=UnifiedSettings(instances=instances, **sizes), **NONE)


def leader(system: SimSystem, index: int = 0) -> UnifiedLeader:
    actor = system.processes[f"unified-{index}"].actor
    assert isinstance(actor, UnifiedLeader)
    return actor


def test_answers_equal_the_dense_computation(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(unified()) as system:
            client = await client_of(system)
            lengths = (1, 7, 8, 9, 31, 32, 33, 64, 65, 100)
            answers = await asyncio.gather(*(client.ask(PROMPT[:length], max_tokens=9) for length in lengths))
            engine = system.engine("unified-0")
            assert answers == [list(engine.expected_tokens(PROMPT[:length], 9)) for length in lengths]
            assert await system.settle(5)

    run(main())


def test_the_journal_shows_both_legs_and_no_byte_moved(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(unified()) as system:
            client = await client_of(system)
            live = client.open(PROMPT, max_tokens=3)
            await client.collect(live)
            assert await system.settle(5)
            journal = await client.journal(live)
            assert (journal["prefill"], journal["decode"]) == ("unified-0", "unified-0")
            assert (journal["kv_bytes"], journal["metadata_bytes"]) == (0, 0)
            states = [row["state"] for row in journal["kvpoll"]]
            assert states == ["BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS"]
            told = [(event["leg"], event["event"]) for event in journal["events"]]
            for expected in [("prefill", "opened"), ("decode", "opened"), ("decode", "admitted"),
                             ("prefill", "prefill done"), ("prefill", "drained"), ("decode", "committed")]:  # fmt: skip
                assert told.count(expected) == 1, told

    run(main())


def test_a_tiny_pool_retracts_and_everything_finishes(client_of: Any) -> None:
    """A pool of 1.5 requests' length, four requests: as on decode (case 38)."""

    async def main() -> None:
        async with SimSystem(unified(pool_pages=15)) as system:
            client = await client_of(system)
            prompts = [tuple(range(100 * i, 100 * i + 20)) for i in range(1, 5)]
            answers = await asyncio.gather(*(client.ask(prompt, max_tokens=60) for prompt in prompts))
            engine = system.engine("unified-0")
            assert answers == [list(engine.expected_tokens(prompt, 60)) for prompt in prompts]
            assert leader(system).counts["retracted"] > 0
            assert await system.settle(5)

    run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.02, 0.05, 0.08, 0.2, 0.5])
def test_a_client_that_leaves_in_any_phase(client_of: Any, after_s: float) -> None:
    async def main() -> None:
        async with SimSystem(unified()) as system:
            client = await client_of(system)
            leaving = client.open(PROMPT, max_tokens=50)
            staying = asyncio.ensure_future(client.ask(PROMPT[:50], max_tokens=20))
            await asyncio.sleep(after_s)
            client.front.close_request(leaving)
            assert await staying == list(system.engine("unified-0").expected_tokens(PROMPT[:50], 20))
            assert await system.settle(5), leader(system).rooms

    run(main())


@pytest.mark.parametrize("after_s", [0.01, 0.1, 0.4])
def test_a_killed_instance_costs_no_token(client_of: Any, after_s: float) -> None:
    async def main() -> None:
        async with SimSystem(unified(2)) as system:
            client = await client_of(system, attempts=3)
            asks = [asyncio.ensure_future(client.ask(PROMPT[i:], max_tokens=30)) for i in range(6)]
            await asyncio.sleep(after_s)
            system.kill("unified-0")
            engine = system.engine("unified-1")
            for i, ask in enumerate(asks):
                assert await ask == list(engine.expected_tokens(PROMPT[i:], 30))
            assert await system.settle(5)

    run(main())


def test_a_router_that_dies_leaves_what_runs_alone(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(unified()) as system:
            client = await client_of(system, attempts=3)
            live = client.open(PROMPT, max_tokens=30)
            tokens = await live.take()
            while live.decode is None:
                await asyncio.sleep(0.01)
            system.kill("router-0")
            tokens += await client.collect(live)
            ids = [token.token_id for token in tokens]
            assert ids == list(system.engine("unified-0").expected_tokens(PROMPT, 30)) and live.attempt == 0
            assert not leader(system).rooms

    run(main())


def test_what_can_never_fit_and_what_waits_too_long(client_of: Any) -> None:
    options = unified(pool_pages=13)
    clocks = ClockSettings(admission_wait_s=1.0)

    async def main() -> None:
        async with SimSystem(SimOptions(unified=options.unified, clocks=clocks, **NONE)) as system:
            client = await client_of(system)
            with pytest.raises(InvalidRequest, match="at most 104 fit"):
                await client.ask(PROMPT, max_tokens=5)
            first = client.open(PROMPT[:16], max_tokens=88)
            await first.take()
            with pytest.raises(DeadlineExceeded):
                await client.ask(PROMPT[:90], max_tokens=3)
            await client.collect(first)
            assert await system.settle(5)

    run(main())


def test_prompts_that_wait_for_their_turn_make_progress(client_of: Any) -> None:
    """Twelve are admitted at once and computed one after the other, 0.8 s each, with a limit of 3 s without progress:
    nobody was told that the queue before them grew shorter, so the last ones were given up.
    """
    options = replace(unified(pool_pages=1300), clocks=ClockSettings(no_progress_s=3.0))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            prompts = [(i,) * 800 for i in range(1, 13)]
            answers = await asyncio.gather(*(client.ask(prompt, max_tokens=2) for prompt in prompts))
            engine = system.engine("unified-0")
            assert answers == [list(engine.expected_tokens(prompt, 2)) for prompt in prompts]
            assert await system.settle(5)

    run(main())


def test_a_mixed_fleet_pairs_nobody_with_a_unified_instance(client_of: Any) -> None:
    """One pair and one unified instance: twenty requests use both, and no room lies across."""
    options = SimOptions(unified=UnifiedSettings(instances=1, pool_pages=64, chunk_tokens=32, batch_tokens=64))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            lives = [client.open(PROMPT[i:], max_tokens=5) for i in range(20)]
            answers = await asyncio.gather(*(client.collect(live) for live in lives))
            engine = system.engine()
            for i, answer in enumerate(answers):
                assert [token.token_id for token in answer] == list(engine.expected_tokens(PROMPT[i:], 5))
            assert await system.settle(5)
            journals = [await client.journal(live) for live in lives]
            pairs = {(journal["prefill"], journal["decode"]) for journal in journals}
            assert pairs == {("prefill-0", "decode-0"), ("unified-0", "unified-0")}

    run(main())
