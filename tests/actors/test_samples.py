"""Several answers to one request, through the production actors: every sample is a room of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec

from kvferry.actors.settings import DecodeSettings
from kvferry.protocol.request import Sampling
from kvferry.serve.choices import Choices
from kvferry.serve.prepare import sample_seed
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(300, 340))


async def answers(choices: Choices) -> list[list[int]]:
    """The token ids of every choice, by index."""
    ids: dict[int, list[int]] = {}
    try:
        while not choices.over:
            for index, tokens in await choices.take():
                ids.setdefault(index, []).extend(token.token_id for token in tokens)
    finally:
        choices.close()
    return [ids[index] for index in sorted(ids)]


def samplings(count: int, max_tokens: int = 6, temperature: float = 0.8) -> list[Sampling]:
    plain = Sampling(max_tokens, temperature)
    return [msgspec.structs.replace(plain, seed=sample_seed(11, i)) for i in range(count)]


def test_case_4_samples_have_rooms_of_their_own(client_of: Any) -> None:
    """Case 4: n=4, at temperature 0.8 and greedy: each answer is the one its seed gives alone, from its own room."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            for temperature in (0.8, 0.0):
                choices = Choices(client.front)
                choices.open(PROMPT, samplings(4, temperature=temperature))
                got = await answers(choices)
                assert got == [
                    list(system.engine().expected_tokens(PROMPT, 6, sampling))
                    for sampling in samplings(4, temperature=temperature)
                ]
                assert len({tuple(ids) for ids in got}) == (4 if temperature else 1)
                assert len(set(choices.rooms)) == 4
            assert await system.settle(10), system.counts()

    run(main())


def test_case_5_three_prompts_with_two_samples_200_times(client_of: Any) -> None:
    """Case 5: six answers in the right order every time, and every page is free again at the end."""
    prompts = [PROMPT[:9], PROMPT[:16], PROMPT[:17]]

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            expected = [
                list(system.engine().expected_tokens(prompt, 2, sampling))
                for prompt in prompts
                for sampling in samplings(2, 2)
            ]
            for _ in range(200):
                choices = Choices(client.front)
                for prompt in prompts:
                    choices.open(prompt, samplings(2, 2))
                assert await answers(choices) == expected
            assert await system.settle(10), system.counts()
            assert client.front.requests_live == 0

    run(main())


def test_losing_the_decode_of_some_samples_leaves_the_others_alone(client_of: Any, wait_until: Any) -> None:
    options = dataclasses.replace(SimOptions(), decode=DecodeSettings(pool_pages=64, instances=2))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=3)
            choices = Choices(client.front)
            choices.open(PROMPT, samplings(4, 20))
            lives = choices.lives
            asking = asyncio.create_task(answers(choices))
            await wait_until(lambda: all(live.stream.next_index > 3 and live.decode is not None for live in lives))
            lost = [live for live in lives if live.decode.name == "decode-1"]
            assert 0 < len(lost) < 4
            system.kill("decode-1")
            assert await asking == [
                list(system.engine().expected_tokens(PROMPT, 20, sampling)) for sampling in samplings(4, 20)
            ]
            assert {live for live in lives if live.attempt} == set(lost)
            assert {live.spec.samples for live in lives} == {4} and len({live.spec.group for live in lives}) == 1
            assert await system.settle(10), system.counts()

    run(main())


def test_a_client_that_leaves_ends_every_room(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            choices = Choices(client.front)
            choices.open(PROMPT, samplings(4, 40))
            await wait_until(lambda: choices.completion_tokens > 8)
            choices.close()
            assert await system.settle(10), system.counts()
            assert client.front.requests_live == 0

    run(main())
