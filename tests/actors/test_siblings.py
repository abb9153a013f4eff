"""Several answers to one prompt: each its own room, the prompt computed once (cases 4 and 5, on virtual time)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvferry.actors.prefill.siblings import GRACE_S
from kvferry.actors.settings import DecodeSettings, PrefillSettings
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PAGE = 8
GROUP = 4711


def as_siblings(client: Any, samples: int, group: int = GROUP) -> None:
    """Whatever the client opens from now on belongs to one group."""
    submit = client.backend.submit

    async def grouped(spec: RequestSpec, attempt: int) -> Outcome:
        outcome: Outcome = await submit(msgspec.structs.replace(spec, group=group, samples=samples), attempt)
        return outcome

    client.backend.submit = grouped


def computed_tokens(journals: list[dict[str, Any]]) -> int:
    events = [event for journal in journals for event in journal["events"]]
    return sum(event["detail"]["tokens"] for event in events if event["event"] == "computed")


def table_of(system: SimSystem) -> dict[str, Any]:
    return {name: counts for name, counts in system.counts().items() if name.startswith("prefill")}


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (100, 100 + 3 * 4),  # 12 full pages, and 4 tokens that each computes
        (97, 97 + 3 * 1),
        (96, 96 + 3 * 8),  # the last token's page is never shared, full or not
        (9, 9 + 3 * 1),
        (8, 4 * 8),  # no full page before the last token
        (1, 4 * 1),
    ],
)
def test_four_samples_compute_their_prompt_once(client_of: Any, length: int, expected: int) -> None:
    """Case 4: every sample has its own room, and its tokens are those of a request that is alone."""
    prompt = tuple(range(300, 300 + length))

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            as_siblings(client, 4)
            lives = [client.open(prompt, max_tokens=5, temperature=1.0, seed=seed) for seed in (1, 2, 3, 3)]
            answers = await asyncio.gather(*(client.collect(live) for live in lives))
            engine = system.engine()
            for live, answer in zip(lives, answers, strict=True):
                assert [t.token_id for t in answer] == list(engine.expected_tokens(prompt, 5, live.spec.sampling))
            assert len({live.room for live in lives}) == 4
            assert await system.settle(GRACE_S + 5)
            journals = [await client.journal(live) for live in lives]
            assert computed_tokens(journals) == expected
            assert all(counts.free == counts.total for counts in table_of(system).values())

    run(main())


def test_two_prompts_of_two_samples_each_share_within_their_groups_only(client_of: Any) -> None:
    """Case 5: children of several prompts, many times over; nothing is lost and the pool is back at baseline."""
    prompts = [tuple(range(10, 50)), tuple(range(500, 533))]

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            submit = client.backend.submit
            for turn in range(20):
                lives = []
                for at, prompt in enumerate(prompts):
                    client.backend.submit = submit
                    as_siblings(client, 2, group=2 * turn + at + 1)
                    lives += [client.open(prompt, max_tokens=3) for _ in range(2)]
                    await asyncio.sleep(0)  # the calls start with this group's wrapper
                answers = await asyncio.gather(*(client.collect(live) for live in lives))
                expected = [list(system.engine().expected_tokens(p, 3)) for p in prompts for _ in range(2)]
                assert [[t.token_id for t in answer] for answer in answers] == expected
            assert await system.settle(GRACE_S + 5)
            # (39 // 8) and (32 // 8) pages, once per turn and prompt
            assert system.prefill().counts["prompt tokens shared"] == 20 * (4 * PAGE + 4 * PAGE)

    run(main())


def test_a_sibling_that_computes_may_leave_and_the_next_one_takes_over(client_of: Any) -> None:
    prompt = tuple(range(300, 396))

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            as_siblings(client, 3)
            lives = [client.open(prompt, max_tokens=4) for _ in range(3)]
            await asyncio.sleep(0.05)  # within the first one's second chunk
            first = next(room for room in system.prefill().leg_rooms() if room.holding is not None)
            assert 0 < first.computed < 88
            gone = next(live for live in lives if live.spec.request == first.spec.request)
            client.front.close_request(gone)
            expected = list(system.engine().expected_tokens(prompt, 4))
            for live in lives:
                if live is not gone:
                    assert [t.token_id for t in await client.collect(live)] == expected
            assert await system.settle(GRACE_S + 5)

    run(main())


def test_kept_pages_give_way_to_a_request_that_needs_them(client_of: Any) -> None:
    """The second sibling never comes (its decode has no room for it), and another prompt needs the whole pool."""
    options = SimOptions(
        prefill=PrefillSettings(pool_pages=13, chunk_tokens=32, batch_tokens=64), decode=DecodeSettings(pool_pages=64)
    )
    prompt, other = tuple(range(300, 400)), tuple(range(900, 1000))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            submit = client.backend.submit
            as_siblings(client, 2)
            tokens = await client.ask(prompt, max_tokens=2)
            assert tokens == list(system.engine().expected_tokens(prompt, 2))
            assert table_of(system)["prefill-0"].cached == 12
            client.backend.submit = submit
            tokens = await client.ask(other, max_tokens=2)
            assert tokens == list(system.engine().expected_tokens(other, 2))
            assert table_of(system)["prefill-0"].cached == 0
            assert await system.settle(5)

    run(main())


def test_pages_that_nobody_comes_for_are_let_go(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            as_siblings(client, 2)
            await client.ask(tuple(range(300, 400)), max_tokens=2)
            assert table_of(system)["prefill-0"].cached == 12
            await asyncio.sleep(GRACE_S + 1)
            counts = table_of(system)["prefill-0"]
            assert (counts.cached, counts.free) == (0, counts.total)

    run(main())


def test_a_sibling_in_its_next_attempt_shares_the_prompt_with_its_frozen_tokens_behind(client_of: Any) -> None:
    """Decode dies: both samples go on elsewhere with what the client has; neither loses or repeats a token."""
    prompt = tuple(range(300, 400))
    options = SimOptions(decode=DecodeSettings(pool_pages=64, instances=2))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=3)
            as_siblings(client, 2)
            lives = [client.open(prompt, max_tokens=30, temperature=1.0, seed=seed) for seed in (5, 6)]
            readers = [asyncio.ensure_future(client.collect(live)) for live in lives]
            while not all(live.stream.next_index > 3 for live in lives):
                await asyncio.sleep(0.01)
            system.kill("decode-0")
            answers = await asyncio.gather(*readers)
            engine = system.engine("decode-1")
            for live, answer in zip(lives, answers, strict=True):
                assert [t.token_id for t in answer] == list(engine.expected_tokens(prompt, 30, live.spec.sampling))
            assert max(live.attempt for live in lives) > 0

    run(main())
