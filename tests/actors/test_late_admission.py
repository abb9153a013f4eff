"""Decode lets a room in late, or too late: which clock runs then, and what it ends. And a full decode blocks nobody.

Pages of 8 tokens. A decode of 16 pages has room for one request of 100 + 20 tokens.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.actors.settings import ClockSettings, DecodeSettings, FaultSettings, PrefillSettings
from kvferry.engine.contract import StepPlan
from kvferry.protocol.errors import DeadlineExceeded
from kvferry.protocol.messages import Destination, UnknownRoom
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem, prefill_cost_s

PROMPTS = [tuple(range(1000 * i, 1000 * i + 100)) for i in range(1, 6)]
ONE_AT_A_TIME = DecodeSettings(pool_pages=16)


def right(system: SimSystem, prompt: tuple[int, ...], count: int) -> list[int]:
    return list(system.engine("decode-0").expected_tokens(prompt, count))


def steps_of(duration_s: float) -> Any:
    """Every decode step takes so long."""

    def cost_s(plan: StepPlan) -> float:
        one = all(len(sequence.token_ids) == 1 for sequence in plan.sequences)
        return duration_s if one else prefill_cost_s(plan)

    return cost_s


def test_case_35_admission_outlasts_every_other_deadline(client_of: Any, wait_until: Any) -> None:
    """Case 35: B decodes for 9 s, A waits for B's pages. The limits of prefill, of the transfer and of no progress are
    2 s: none of them ends A, since decode's steps are progress and prefill's deadline runs from A's admission only.
    """
    clocks = ClockSettings(prefill_wait_s=2.0, transfer_wait_s=2.0, no_progress_s=2.0, admission_wait_s=60.0)

    async def main() -> None:
        async with SimSystem(SimOptions(decode=ONE_AT_A_TIME, clocks=clocks, cost_s=steps_of(0.5))) as system:
            client, clock = await client_of(system), VirtualClock()
            b = asyncio.create_task(client.ask(PROMPTS[0], max_tokens=19))
            await wait_until(lambda: bool(system.decode().running))
            began_s = clock.now_s()
            a = client.open(PROMPTS[1], max_tokens=3)
            assert [token.token_id for token in await client.collect(a)] == right(system, PROMPTS[1], 3)
            assert clock.now_s() - began_s > 8.5, "eighteen steps of B"
            assert await b == right(system, PROMPTS[0], 19)
            assert (await client.journal(a))["outcome"]["ok"]
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_case_35_a_destination_that_comes_after_the_time_out(client_of: Any, wait_until: Any, heard_by: Any) -> None:
    """Case 35: A really times out (2 s for admission, B needs 9). Then its Destination comes: prefill answers at once
    that it does not know the room, and holds nothing of it. Room ids are never used twice, so no mark of the failure
    has to be remembered, and none can be erased.
    """
    clocks = ClockSettings(admission_wait_s=2.0)

    async def main() -> None:
        async with SimSystem(SimOptions(decode=ONE_AT_A_TIME, clocks=clocks, cost_s=steps_of(0.5))) as system:
            client, decode, prefill = await client_of(system), system.decode(), system.prefill()
            seen, answers = heard_by(Destination, prefill), heard_by(UnknownRoom, decode)
            b = asyncio.create_task(client.ask(PROMPTS[0], max_tokens=19))
            await wait_until(lambda: bool(decode.running))
            with pytest.raises(
                DeadlineExceeded, match=r"waiting for admission for 2\.\d s; the limit is 2 s"
            ) as caught:
                await client.ask(PROMPTS[1], max_tokens=3)
            room = caught.value.cause.room
            assert len(seen) == 1 and seen[0].room != room, "A's own never left"
            await asyncio.sleep(0.1)
            (of_b,) = decode.rooms
            unknown = prefill.counts["messages for unknown rooms"]
            late = Destination(room, seen[0].pages, 0, 5, seen[0].agent, seen[0].generation, (0,))
            for _ in range(2):
                assert decode.network.send(prefill.network.address.incarnation, late)
            await asyncio.sleep(0.005)
            assert [message.room for message in answers] == [room, room]
            assert prefill.counts["messages for unknown rooms"] == unknown + 2
            assert not prefill.rooms and system.counts()["prefill-0"].at_baseline and list(decode.rooms) == [of_b]
            assert await b == right(system, PROMPTS[0], 19)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_a_room_that_decode_has_let_in_no_longer_waits_for_admission(client_of: Any, wait_until: Any) -> None:
    """Decode admits A at once; prefill, whose pool is B's for 6 s, computes it later. The limit of admission, 3 s, is
    over by then at prefill too; it does not end a room that has been admitted: the limit of prefill, 60 s, runs.
    """
    clocks = ClockSettings(admission_wait_s=3.0, prefill_wait_s=60.0, no_progress_s=5.0)
    prefill = PrefillSettings(pool_pages=14, chunk_tokens=16, batch_tokens=16)

    def cost_s(plan: StepPlan) -> float:
        return 1.0 if any(len(sequence.token_ids) > 1 for sequence in plan.sequences) else 0.02

    async def main() -> None:
        async with SimSystem(SimOptions(prefill=prefill, clocks=clocks, cost_s=cost_s)) as system:
            client = await client_of(system)
            tasks = [asyncio.create_task(client.ask(prompt, max_tokens=3)) for prompt in PROMPTS[:2]]
            for prompt, answer in zip(PROMPTS, await asyncio.gather(*tasks), strict=False):
                assert answer == right(system, prompt, 3)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_a_full_decode_blocks_no_sender(client_of: Any, wait_until: Any) -> None:
    """Upstream an allocation at the receiver could wait for ever, and its sender with it. Here those who wait for a
    place hold nothing at prefill, whose whole pool is free for a request of the other decode; and they do not wait for
    ever.
    """
    options = SimOptions(
        decode=DecodeSettings(instances=2, pool_pages=16),
        prefill=PrefillSettings(pool_pages=15, chunk_tokens=32, batch_tokens=64),
        clocks=ClockSettings(admission_wait_s=10.0), cost_s=steps_of(60.0),
    )  # fmt: skip

    async def main() -> None:
        async with SimSystem(options) as system:
            client, prefill = await client_of(system), system.prefill()
            decodes = [system.decode(i) for i in range(2)]
            filling = [asyncio.create_task(client.ask(prompt, max_tokens=19)) for prompt in PROMPTS[:2]]
            await wait_until(lambda: all(decode.running for decode in decodes))
            waiting = asyncio.create_task(client.ask(PROMPTS[2], max_tokens=2))
            await wait_until(lambda: sum(len(decode.waiting) for decode in decodes) == 1)
            assert len(prefill.rooms) == 1 and prefill.ledger.free == 15, "it waits, and holds nothing"
            free = next(decode for decode in decodes if not decode.waiting)
            small = client.open(PROMPTS[3][:5], max_tokens=1)  # two pages, and three are free beside the one that runs
            assert [token.token_id for token in await client.collect(small)] == right(system, PROMPTS[3][:5], 1)
            assert small.decode == free.network.address and not waiting.done()
            with pytest.raises(DeadlineExceeded, match="waiting for admission"):
                await waiting
            assert not prefill.rooms and prefill.ledger.free == 15
            for task in filling:
                task.cancel()
            assert await system.settle(70), system.counts()

    run(asyncio.wait_for(main(), 300))


def test_a_time_out_ends_its_own_room_and_no_other(client_of: Any, wait_until: Any) -> None:
    """Upstream one request's time-out cleared all that were active (14), or a sweep stopped at the first that had time
    left, and those behind it were stranded (12). Here A is the oldest everywhere, and transfers for 10 s; B waits
    behind it and times out after 3; C, which B held back, is younger, has time left and is let in then.
    """
    options = SimOptions(
        decode=ONE_AT_A_TIME, clocks=ClockSettings(admission_wait_s=3.0), faults=FaultSettings(delay_ms=2500),
        cost_s=steps_of(0.25),
    )  # fmt: skip

    async def main() -> None:
        async with SimSystem(options) as system:
            client, decode, prefill, clock = await client_of(system), system.decode(), system.prefill(), VirtualClock()
            a = asyncio.create_task(client.ask(PROMPTS[0], max_tokens=5))
            await wait_until(lambda: bool(decode.rooms) and not decode.waiting)
            began_s = clock.now_s()
            b = asyncio.create_task(client.ask(PROMPTS[1], max_tokens=5))
            await asyncio.sleep(0.5)
            assert len(decode.waiting) == 1
            await asyncio.sleep(2.4)
            c = asyncio.create_task(client.ask(PROMPTS[3][:5], max_tokens=1))
            with pytest.raises(DeadlineExceeded, match="waiting for admission for 3"):
                await b
            assert clock.now_s() - began_s < 3.3
            await asyncio.sleep(0.1)
            # A and C
            assert len(decode.rooms) == len(prefill.rooms) == len(system.router.guests) == 2 and not decode.waiting
            assert await a == right(system, PROMPTS[0], 5)
            assert await c == right(system, PROMPTS[3][:5], 1)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_dead_pages_go_at_once_and_queued_ones_stay(client_of: Any, wait_until: Any) -> None:
    """Upstream one limit served both: 480 s kept gigabytes of dead blocks, and a short one dropped the blocks of those
    who queued. Here A's pages go with its client, in no time; B's target pages wait 100 s for B's turn at prefill.
    """
    prefill = PrefillSettings(pool_pages=64, chunk_tokens=16, batch_tokens=16)

    def cost_s(plan: StepPlan) -> float:
        return 15.0 if any(len(sequence.token_ids) > 1 for sequence in plan.sequences) else 0.02

    async def main() -> None:
        async with SimSystem(SimOptions(prefill=prefill, cost_s=cost_s)) as system:
            client, decode = await client_of(system), system.decode()
            first = asyncio.create_task(client.ask(PROMPTS[0], max_tokens=2))  # 7 chunks: 105 s
            await wait_until(lambda: decode.ledger.free == 64 - 13)
            a = asyncio.create_task(client.ask(PROMPTS[1], max_tokens=2))
            b = asyncio.create_task(client.ask(PROMPTS[2][:20], max_tokens=2))
            await wait_until(lambda: decode.ledger.free == 64 - 13 - 13 - 3 and len(system.prefill().rooms) == 3)
            a.cancel()
            await wait_until(lambda: decode.ledger.free == 64 - 13 - 3, 0.01)
            await asyncio.sleep(90)
            assert system.counts()["decode-0"].leased == 13 + 3
            assert await first == right(system, PROMPTS[0], 2)
            assert await b == right(system, PROMPTS[2][:20], 2)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 400))


def test_every_chunk_that_is_written_is_progress(client_of: Any) -> None:
    """Four chunks are computed in 0.1 s and written in 1.5 s each: something is flushed every 1.5 s, so the limit of no
    progress, 2 s, ends nothing, neither at a leg nor in the room.
    """
    options = SimOptions(clocks=ClockSettings(no_progress_s=2.0), faults=FaultSettings(delay_ms=1500))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            assert await client.ask(PROMPTS[0], max_tokens=3) == right(system, PROMPTS[0], 3)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_case_35_behind_a_room_whose_kv_is_coming(client_of: Any, wait_until: Any) -> None:
    """Case 35: what A waits for is B's place, and B's KV comes chunk by chunk for 10 s, while no forward runs at
    decode. That is progress of decode's, told each second, so A's limit of no progress, 4 s, does not end it.
    """
    options = SimOptions(
        decode=ONE_AT_A_TIME, clocks=ClockSettings(no_progress_s=4.0), faults=FaultSettings(delay_ms=2500)
    )

    async def main() -> None:
        async with SimSystem(options) as system:
            client, decode = await client_of(system), system.decode()
            b = asyncio.create_task(client.ask(PROMPTS[0], max_tokens=3))
            await wait_until(lambda: bool(decode.rooms) and not decode.waiting)
            a = asyncio.create_task(client.ask(PROMPTS[1], max_tokens=3))
            await wait_until(lambda: len(decode.waiting) == 1)
            assert await b == right(system, PROMPTS[0], 3)
            assert await a == right(system, PROMPTS[1], 3)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_behind_a_room_whose_kv_has_stopped_coming(client_of: Any, wait_until: Any) -> None:
    """The other side of it: B's second write stalls, so nothing moves, and both end by the limit of no progress."""
    options = SimOptions(
        decode=ONE_AT_A_TIME, clocks=ClockSettings(no_progress_s=2.0), faults=FaultSettings(stall_after=1)
    )

    async def main() -> None:
        async with SimSystem(options) as system:
            client, decode, clock = await client_of(system), system.decode(), VirtualClock()
            b = asyncio.create_task(client.ask(PROMPTS[0], max_tokens=3))
            await wait_until(lambda: bool(decode.rooms) and not decode.waiting)
            a = asyncio.create_task(client.ask(PROMPTS[1], max_tokens=3))
            with pytest.raises(DeadlineExceeded, match="no progress"):
                await b
            assert clock.now_s() < 3.5
            await asyncio.gather(a, return_exceptions=True)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))
