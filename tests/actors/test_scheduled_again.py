"""A request that is scheduled again has lost its KV: it is computed again and sent again, in a room of its own. Nobody
waits for a second push of the first one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from kvferry.actors.settings import ClockSettings, DecodeSettings, FaultSettings
from kvferry.protocol.messages import Destination, Drained, OpenPrefill
from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.protocol.receiver import ReceiverState
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPTS = [tuple(range(100 * i, 100 * i + 20)) for i in range(1, 5)]
MAX_TOKENS = 60


def room_of_each_attempt(opened: list[OpenPrefill]) -> dict[int, list[OpenPrefill]]:
    found = defaultdict(list)
    for message in opened:
        found[message.spec.request].append(message)
    return found


@pytest.mark.parametrize("policy", [EARLY, PREFILL_COMPLETE])
@pytest.mark.parametrize("why", ["retracted", "the front lost decode"])
def test_case_37_one_push_per_room_and_a_room_per_attempt(
    client_of: Any, wait_until: Any, heard_by: Any, why: str, policy: str
) -> None:
    """Case 37: four requests in a pool of one and a half, or a link to decode that breaks in mid-answer. Each attempt
    is a room: its prompt is what the client has, computed whole; one Destination; one transfer of its own bytes; and
    decode never receives without one on its way. With 2 s for any wait, a wait for a second push would end the request.
    """
    limits = ClockSettings(prefill_wait_s=2.0, transfer_wait_s=2.0)
    pages = 15 if why == "retracted" else 64
    options = SimOptions(
        decode=DecodeSettings(pool_pages=pages), clocks=limits, faults=FaultSettings(delay_ms=2), policy=policy
    )

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=3)
            prefill, decode = system.prefill(), system.decode()
            opened: list[OpenPrefill] = heard_by(OpenPrefill, prefill)
            asked: list[Destination] = heard_by(Destination, prefill)
            sent: list[Drained] = heard_by(Drained, decode)
            lives = [client.open(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
            tasks = [asyncio.create_task(client.collect(live)) for live in lives]
            if why != "retracted":
                await wait_until(lambda: len(decode.running) == 4 and all(live.stream.next_index > 3 for live in lives))
                decode.network.drop(client.network.address.incarnation)
            for prompt, tokens in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
                assert [token.index for token in tokens] == list(range(MAX_TOKENS))
                right = system.engine().expected_tokens(prompt, MAX_TOKENS)
                assert tuple(token.token_id for token in tokens) == right
            assert await system.settle(5), system.counts()
            assert max(live.attempt for live in lives) >= 1
            rooms = [message.room for message in opened]
            assert len(set(rooms)) == len(rooms) == sum(live.attempt + 1 for live in lives)
            assert sorted(message.room for message in asked) == sorted(rooms), "one destination each"
            assert all(message.prefix_tokens == 0 for message in asked), "nothing is taken as being there already"
            for request, attempts in room_of_each_attempt(opened).items():
                prompt = next(live.spec.prompt_ids for live in lives if live.spec.request == request)
                right = system.engine().expected_tokens(prompt, MAX_TOKENS)
                assert [message.attempt for message in attempts] == list(range(len(attempts)))
                for message in attempts:
                    frozen = message.spec.frozen_ids
                    assert frozen == right[: len(frozen)] and bool(frozen) == (message.attempt > 0)
                    # Three layers, K and V, 2 heads x 4 x 4 bytes: of each fed token.
                    (push,) = [one for one in sent if one.room == message.room]
                    fed = len(prompt) + len(frozen)
                    assert (push.complete, push.kv_bytes) == (True, fed * 3 * 2 * 2 * 4 * 4)

    run(asyncio.wait_for(main(), 120))


def test_case_37_a_retracted_request_holds_nothing_back(client_of: Any, wait_until: Any) -> None:
    """Case 37: at the moment of a retraction the room is gone at decode, and gone at prefill since its transfer; so
    neither has a flag that could still be read as "to come from the other side".
    """

    async def main() -> None:
        async with SimSystem(SimOptions(decode=DecodeSettings(pool_pages=15))) as system:
            client = await client_of(system)
            decode, prefill = system.decode(), system.prefill()
            gone: list[tuple[bool, bool]] = []
            retract = decode._retract

            def look(room: Any) -> None:
                assert room.machine.state is ReceiverState.RUNNING and not room.expecting
                retract(room)
                gone.append((room.room in decode.rooms, room.room in prefill.rooms))

            decode._retract = look  # type: ignore[method-assign]
            tasks = [asyncio.create_task(client.ask(prompt, max_tokens=MAX_TOKENS)) for prompt in PROMPTS]
            for prompt, answer in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
                assert answer == list(system.engine().expected_tokens(prompt, MAX_TOKENS))
            assert gone and set(gone) == {(False, False)}
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))
