"""The whole handoff on virtual time: real actors, links, ledger and plans; scripted engine, fake data plane."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.actors.settings import DecodeSettings, FaultSettings, PrefillSettings
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(100, 200))


def test_tokens_equal_the_dense_computation_and_every_page_returns(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            for length in (1, 7, 8, 9, 31, 32, 33, 100):
                prompt = PROMPT[:length]
                tokens = await client.ask(prompt, max_tokens=6)
                assert tokens == list(system.engine().expected_tokens(prompt, 6)), length
            assert await system.settle(5)

    run(main())


def test_eight_in_parallel_give_what_they_give_alone(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            prompts = [PROMPT[i : i + 20 + 9 * i] for i in range(8)]
            together = await asyncio.gather(*(client.ask(prompt, max_tokens=10) for prompt in prompts))
            expected = [list(system.engine().expected_tokens(prompt, 10)) for prompt in prompts]
            assert together == expected
            assert await system.settle(5)

    run(main())


def test_a_pool_that_holds_one_request_at_a_time_serves_all_in_order(client_of: Any) -> None:
    options = SimOptions(
        decode=DecodeSettings(pool_pages=10), prefill=PrefillSettings(pool_pages=8, chunk_tokens=32, batch_tokens=64)
    )

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            answers = await asyncio.gather(*(client.ask(PROMPT[i : i + 40], max_tokens=24) for i in range(5)))
            for i, answer in enumerate(answers):
                assert answer == list(system.engine().expected_tokens(PROMPT[i : i + 40], 24))
            assert await system.settle(5)

    run(main())


def test_transfer_overlaps_compute(client_of: Any) -> None:
    """Issue M1, line 4: six chunks, every write delayed by half of a chunk's compute: prefill and transfer together
    take at most the compute and 1.2 delays, and each chunk is written while the next one computes.
    """
    chunk_s = 0.032
    options = SimOptions(faults=FaultSettings(delay_ms=chunk_s / 2 * 1000))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            live = client.open(tuple(range(6 * 32)), max_tokens=2)
            await client.collect(live)
            assert await system.settle(5)
            journal = await client.journal(live)
            at = {(e["event"], e["detail"].get("chunk", -1)): e["at_s"] for e in journal["events"]}
            started, drained = at["started", -1], at["drained", -1]
            assert drained - started <= 6 * chunk_s + 1.2 * chunk_s / 2
            for chunk in range(5):
                assert at["computed", chunk] < at["written", chunk] < at["computed", chunk + 1]

    run(main())


def test_the_journal_shows_kvpoll_pair_backend_and_bytes(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            live = client.open(PROMPT, max_tokens=3)
            await client.collect(live)
            await system.settle(5)
            journal = await client.journal(live)
            states = [row["state"] for row in journal["kvpoll"]]
            assert states == ["BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS"]
            assert all(row["duration_s"] > 0 for row in journal["kvpoll"][:3])
            assert (journal["prefill"], journal["decode"], journal["backend"]) == ("prefill-0", "decode-0", "fake")
            # 100 tokens, in 3 layers; of one, K or V is 2 heads x 4 floats. What lies behind them is not written.
            assert journal["kv_bytes"] == 100 * (2 * 4 * 4) * 2 * 3
            assert journal["outcome"] == {"ok": True, "cause": None}

    run(main())


def test_the_first_token_does_not_wait_for_the_transfer(client_of: Any) -> None:
    options = SimOptions(faults=FaultSettings(delay_ms=5000))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            clock = VirtualClock()
            began_s = clock.now_s()
            live = client.open(PROMPT[:16], max_tokens=3)
            first = await live.take()
            assert [token.index for token in first] == [0] and clock.now_s() - began_s < 1.0
            await client.collect(live)
            assert clock.now_s() - began_s > 5.0

    run(main())
