"""What a client asks of the sampling comes through the handoff: histories, log-probabilities, min_tokens (virtual
time). The scripted engine's tokens and numbers depend on every token of the history.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.settings import DecodeSettings, FaultSettings
from kvferry.actors.unified.unified import Unified
from kvferry.engine.contract import EngineLimits
from kvferry.engine.scripted import ScriptedEngine, ScriptedTexts
from kvferry.protocol.address import Address
from kvferry.protocol.errors import HandoffFailed
from kvferry.protocol.messages import Token
from kvferry.protocol.rank import Layout
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem, prefill_cost_s

NOBODY = Address("test", "", 0, "", 0)
PROMPT = tuple(range(700, 760))
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5}


async def unified_answer(prompt: tuple[int, ...], sampling: Sampling, eos: tuple[int, ...] = ()) -> list[Token]:
    """The same request with both roles in one process."""
    layout = Layout("scripted", "1", "float32", 8, layers=3, kv_heads=2, head_dim=4)
    engine = ScriptedEngine(
        layout, EngineLimits(64, 8, 4096, 50_000), metadata_rows=1, sleep=VirtualClock().sleep, cost_s=prefill_cost_s
    )
    unified = Unified(engine, ScriptedTexts(eos), chunk_tokens=32, batch_tokens=64)
    task = asyncio.create_task(unified.run())
    try:
        return await unified.answer(RequestSpec(1, prompt, sampling, NOBODY))
    finally:
        task.cancel()


def what_a_client_sees(tokens: list[Token]) -> list[tuple[Any, ...]]:
    return [(t.index, t.token_id, t.text, t.finish_reason, t.logprobs) for t in tokens]


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 0},
        {"logprobs": 3},
        {"logprobs": 20, "temperature": 1.0, "seed": 9},
        PENALTIES,
        PENALTIES | {"logprobs": 5, "temperature": 0.7, "seed": 4},
        {"min_tokens": 5, "logprobs": 1},
    ],
    ids=str,
)
def test_pd_gives_what_unified_gives(client_of: Any, asked: dict[str, Any]) -> None:
    """Case 50: every token has its entry, the first one too, and the entries equal unified's. The repeat of index 0
    that decode sends carries the same numbers as prefill's own.
    """

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client, sampling = await client_of(system), Sampling(max_tokens=12, **asked)
            offered: list[Token] = []
            for length in (1, 8, 33, 60):
                live = client.open(PROMPT[:length], max_tokens=12, **asked)
                offer = live.stream.offer
                live.stream.offer = lambda token, offer=offer: (offered.append(token), offer(token))[1]
                tokens = await client.collect(live)
                assert what_a_client_sees(tokens) == what_a_client_sees(await unified_answer(PROMPT[:length], sampling))
                count = sampling.logprobs
                assert all((t.logprobs is None) if count < 0 else len(t.logprobs.top) == count for t in tokens)
                assert await system.settle(5)
                first = [token for token in offered if token.index == 0]
                assert len(first) == 2 and first[0] == first[1]
                offered.clear()

    run(main())


def test_a_history_changes_the_scripted_tokens() -> None:
    """Or the comparisons here would prove nothing."""

    async def main() -> None:
        plain = await unified_answer(PROMPT, Sampling(max_tokens=12))
        penalised = await unified_answer(PROMPT, Sampling(max_tokens=12, repetition_penalty=1.2))
        assert plain[0].token_id != penalised[0].token_id and plain[-1].token_id != penalised[-1].token_id

    run(main())


def test_decode_repeats_the_first_tokens_logprobs_when_prefills_own_message_is_lost(client_of: Any) -> None:
    """Prefill is cut off from the front, hands over, and dies: index 0 comes from decode alone, with all it needs."""

    async def main() -> None:
        async with SimSystem(SimOptions(faults=FaultSettings(delay_ms=300))) as system:
            client = await client_of(system)
            right = await client.collect(client.open(PROMPT, max_tokens=40, logprobs=4, **PENALTIES))
            prefill = system.processes["prefill-0"].actor
            assert isinstance(prefill, Prefill)
            live = client.open(PROMPT, max_tokens=40, logprobs=4, **PENALTIES)
            senders: list[str] = []
            offer = client.front.on_message
            client.front.on_message = lambda peer, message: (senders.append(peer.name), offer(peer, message))[1]
            while not prefill.leg_rooms():
                await asyncio.sleep(0.001)
            system.network.cut(prefill.network.address, client.network.address)
            tokens = await live.take()
            system.kill("prefill-0")
            tokens += await client.collect(live)
            assert set(senders) == {"decode-0"}
            assert what_a_client_sees(tokens) == what_a_client_sees(right)
            assert live.attempt == 0

    run(main())


@pytest.mark.parametrize("at_s", [0.09, 0.3, 0.7])
@pytest.mark.parametrize("asked", [PENALTIES | {"logprobs": 2}, {"min_tokens": 50, "temperature": 1.0, "seed": 3}])
def test_a_next_attempt_goes_on_with_the_same_history(client_of: Any, asked: dict[str, Any], at_s: float) -> None:
    """The tokens that the client has count as generated, not as prompt: equal to a run that nothing interrupts."""
    options = SimOptions(decode=DecodeSettings(pool_pages=128, instances=2), faults=FaultSettings(delay_ms=5))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=3)
            right = await unified_answer(PROMPT, Sampling(max_tokens=60, **asked))
            live = client.open(PROMPT, max_tokens=60, **asked)
            task = asyncio.create_task(client.collect(live))
            await asyncio.sleep(at_s)
            system.kill("decode-0" if live.decode is None else live.decode.name)
            assert what_a_client_sees(await task) == what_a_client_sees(right)
            if live.decode is not None and at_s >= 0.3:
                assert live.attempt == 1 and live.spec.frozen_ids

    run(main())


def test_ignore_eos_and_min_tokens_hold_across_the_handoff(client_of: Any) -> None:
    """The scripted engine does not mask: an end token that comes in spite of the rules is text like any other."""

    async def main() -> None:
        ids = [token.token_id for token in await unified_answer(PROMPT, Sampling(max_tokens=9))]
        for eos in (ids[0], ids[4]):
            async with SimSystem(replace(SimOptions(), eos_token_ids=(eos,))) as system:
                client = await client_of(system)
                at = ids.index(eos)
                assert await client.ask(PROMPT, max_tokens=9) == ids[: at + 1]
                tokens = await client.collect(client.open(PROMPT, max_tokens=9, ignore_eos=True))
                assert [token.token_id for token in tokens] == ids and tokens[-1].finish_reason == "length"
                stopped = await client.ask(PROMPT, max_tokens=9, ignore_eos=True, stop_token_ids=(eos,))
                assert stopped == ids[: at + 1]
                sampling = Sampling(max_tokens=9, min_tokens=at + 1)
                tokens = await client.collect(client.open(PROMPT, max_tokens=9, min_tokens=at + 1))
                assert len(tokens) == 9
                assert what_a_client_sees(tokens) == what_a_client_sees(await unified_answer(PROMPT, sampling, (eos,)))
                assert await system.settle(5)

    run(main())


def test_a_row_without_the_logprobs_that_were_asked_for_fails_the_check(client_of: Any) -> None:
    """As everything in the row, they are checked before the commit, also without checksums."""

    async def main() -> None:
        async with SimSystem(SimOptions(checksum=False, faults=FaultSettings(delay_ms=100))) as system:
            client = await client_of(system)
            live = client.open(PROMPT, max_tokens=5, logprobs=4)
            while not any(room.first_logprobs for room in system.prefill().rooms.values()):
                await asyncio.sleep(0.001)
            (room,) = system.prefill().rooms.values()
            assert room.holding is not None
            row = system.prefill().engine.metadata_row(room.holding.rows[0])
            assert row[36:40] == bytes([5, 0, 0, 0])  # the chosen token's and four more
            row[36:40] = bytes(4)
            with pytest.raises(HandoffFailed, match="logprobs -1; the request asked for 4"):
                await client.collect(live)
            assert await system.settle(10)

    run(main())
