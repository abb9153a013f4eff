"""One end of a link knows that it is over, the other does not know yet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.actors.settings import LinkSettings
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(300, 400))
OTHER = tuple(range(700, 760))


def late_outcomes(client: Any, delay_s: float) -> None:
    """The front hears of a room's outcome later than a link needs to open."""
    submit = client.backend.submit

    async def later(spec: Any, attempt: int) -> Any:
        outcome = await submit(spec, attempt)
        await asyncio.sleep(delay_s)
        return outcome

    client.backend.submit = later


@pytest.mark.parametrize("outcome_s", [0.0, 0.2])
@pytest.mark.parametrize("again_s", [0.001, 0.02])
@pytest.mark.parametrize("tokens", [1, 20])
def test_decode_opens_a_room_over_a_link_that_the_front_has_ended(
    client_of: Any, wait_until: Any, outcome_s: float, again_s: float, tokens: int
) -> None:
    """The front ended its link to decode before the request; decode says Opened on the strength of it, commits, and
    finds with the first token that it is over. (That may be the last token: then nothing of the request is left there.)
    By the time that the front hears of the commit another request has made a new link to the same decode. So "it is
    up" is no sign that decode still serves the first; which session it is, is.
    """

    async def main() -> None:
        async with SimSystem(SimOptions(links=LinkSettings(heartbeat_s=5.0, silence_s=30.0))) as system:
            client, decode = await client_of(system, attempts=3), system.decode()
            assert len(await client.ask(PROMPT[:20], max_tokens=2)) == 2
            ends = client.network.address, decode.network.address
            system.network.cut(*ends)
            client.network.drop(ends[1].incarnation)
            await asyncio.sleep(0.5)
            old = decode.network.session_of(ends[0].incarnation)
            assert old, "decode does not know"
            late_outcomes(client, outcome_s)
            first = asyncio.create_task(client.ask(PROMPT, max_tokens=tokens))
            await wait_until(lambda: bool(decode.rooms))
            system.network.heal(*ends)
            await wait_until(lambda: decode.network.session_of(ends[0].incarnation) != old)
            await asyncio.sleep(again_s)
            second = asyncio.create_task(client.ask(OTHER, max_tokens=20))
            assert await asyncio.wait_for(second, 20) == list(system.engine().expected_tokens(OTHER, 20))
            assert await asyncio.wait_for(first, 20) == list(system.engine().expected_tokens(PROMPT, tokens))
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))
