"""Instances of several ranks: the same tokens as with one, whichever way both sides are sliced (case 46, 47)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.actors.settings import DecodeSettings, LinkSettings, PrefillSettings
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(300, 400))
LINKS = LinkSettings(heartbeat_s=0.5, silence_s=2.0, resend_s=0.25)


def sliced(prefill: tuple[int, int] = (1, 1), decode: tuple[int, int] = (1, 1), **options: Any) -> SimOptions:
    """(tp, pp) of each side."""
    return SimOptions(
        prefill=PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64, tp=prefill[0], pp=prefill[1]),
        decode=DecodeSettings(pool_pages=64, tp=decode[0], pp=decode[1]),
        links=LINKS,
        **options,
    )


LAYOUTS = [
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
    ((1, 2), (1, 2)),
    ((1, 3), (1, 2)),
    ((2, 1), (2, 1)),
    ((2, 2), (2, 3)),
    ((2, 1), (1, 2)),
    ((1, 1), (2, 1)),
    ((4, 1), (2, 1)),  # 2 heads, each on two ranks
    ((1, 1), (4, 1)),
]


@pytest.mark.parametrize("policy", ["early", "prefill_complete"])
@pytest.mark.parametrize(("prefill", "decode"), LAYOUTS)
def test_any_slicing_gives_the_tokens_of_one_rank(
    client_of: Any, prefill: tuple[int, int], decode: tuple[int, int], policy: str
) -> None:
    async def main() -> None:
        async with SimSystem(sliced(prefill, decode, policy=policy)) as system:
            client = await client_of(system)
            prompts = [PROMPT[i : 90 + i] for i in range(4)]
            answers = await asyncio.gather(*(client.ask(prompt, max_tokens=6) for prompt in prompts))
            assert answers == [list(system.engine().expected_tokens(prompt, 6)) for prompt in prompts]
            assert await system.settle(5), system.counts()

    run(main())
