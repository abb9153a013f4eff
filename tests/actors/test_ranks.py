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


#: tp, and pp or the layers of each stage.
Shape = tuple[int, int | list[int]]


def cut(shape: Shape) -> dict[str, Any]:
    tp, pp = shape
    return {"tp": tp, "pp": pp} if isinstance(pp, int) else {"tp": tp, "pp": len(pp), "stages": pp}


def sliced(prefill: Shape = (1, 1), decode: Shape = (1, 1), **options: Any) -> SimOptions:
    return SimOptions(
        prefill=PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64, **cut(prefill)),
        decode=DecodeSettings(pool_pages=64, **cut(decode)),
        links=LINKS,
        **options,
    )


LAYOUTS: list[tuple[Shape, Shape]] = [
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
def test_any_slicing_gives_the_tokens_of_one_rank(client_of: Any, prefill: Shape, decode: Shape, policy: str) -> None:
    async def main() -> None:
        async with SimSystem(sliced(prefill, decode, policy=policy)) as system:
            client = await client_of(system)
            prompts = [PROMPT[i : 90 + i] for i in range(4)]
            answers = await asyncio.gather(*(client.ask(prompt, max_tokens=6) for prompt in prompts))
            assert answers == [list(system.engine().expected_tokens(prompt, 6)) for prompt in prompts]
            assert await system.settle(5), system.counts()

    run(main())


@pytest.mark.parametrize(
    ("prefill", "decode"), [((1, [7, 8]), (1, 1)), ((1, [7, 8]), (2, [14, 1])), ((1, 1), (1, [1, 13, 1]))]
)
def test_case_47_fifteen_layers_in_uneven_stages(client_of: Any, prefill: Shape, decode: Shape) -> None:
    """Case 47: the stages are as they are configured, and the tokens those of one rank."""

    async def main() -> None:
        async with SimSystem(sliced(prefill, decode, layers=15)) as system:
            for name, (_, stages) in (("prefill-0", prefill), ("decode-0", decode)):
                members = system.processes[name].actor.info.members  # type: ignore[attr-defined]
                layers = {member.slice.first_layer: member.slice.layers for member in members}
                assert list(layers.values()) == ([] if isinstance(stages, int) else stages)
            answer = await (await client_of(system)).ask(PROMPT, max_tokens=6)
            assert answer == list(system.engine().expected_tokens(PROMPT, 6))

    run(main())
