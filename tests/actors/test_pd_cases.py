"""Cases of real bug reports, and the loss of each process, on virtual time. Each ends at baseline."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.actors.forward import EngineStalled
from kvferry.actors.settings import ClockSettings, DecodeSettings, FaultSettings, LinkSettings, PrefillSettings
from kvferry.engine.contract import StepPlan
from kvferry.protocol.errors import DeadlineExceeded, HandoffFailed, InvalidRequest, PeerError, PeerLost
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem, prefill_cost_s
from kvferry.transfer.faulty import FaultyEndpoint

PROMPT = tuple(range(300, 400))
LONG = tuple(range(1000, 1000 + 200))


def first_token(length: int) -> int:
    """The first token of PROMPT[:length], by a system of its own."""

    async def main() -> int:
        async with SimSystem(SimOptions()) as system:
            return system.engine().expected_tokens(PROMPT[:length], 1)[0]

    return run(main())


def test_case_1_max_tokens_1_gives_exactly_one_token(client_of: Any) -> None:
    """Case 1: one token, finish_reason length, and no decode step."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            tokens = await client.collect(client.open(PROMPT[:20], max_tokens=1))
            assert [token.token_id for token in tokens] == list(system.engine().expected_tokens(PROMPT[:20], 1))
            assert [token.finish_reason for token in tokens] == ["length"]
            assert await system.settle(5)
            assert system.decode().forward.done == 0

    run(main())


@pytest.mark.parametrize("rule", ["eos", "stop_token_id", "stop_string"])
def test_case_2_the_first_token_ends_the_request(client_of: Any, rule: str) -> None:
    """Case 2: EOS, a stop id, or a stop string completed by the very first token: stop at once, no text, no step."""
    token_id = first_token(20)
    options = SimOptions(eos_token_ids=(token_id,) if rule == "eos" else ())
    rules: dict[str, Any] = {
        "eos": {},
        "stop_token_id": {"stop_token_ids": (token_id,)},
        "stop_string": {"stop": (f"<{token_id}>",)},
    }

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            tokens = await client.collect(client.open(PROMPT[:20], max_tokens=9, **rules[rule]))
            assert [(token.index, token.text, token.finish_reason) for token in tokens] == [(0, "", "stop")]
            assert await system.settle(5)
            assert system.decode().forward.done == 0

    run(main())


def test_case_14_a_prompt_over_prefills_limit_is_refused_with_the_numbers(client_of: Any) -> None:
    """Case 14: 200 tokens; prefill holds 8 pages x 8 = 64, decode 512. Never an answer, never another prompt."""
    options = SimOptions(prefill=PrefillSettings(pool_pages=8, chunk_tokens=32, batch_tokens=64))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            with pytest.raises(InvalidRequest, match=r"200 tokens.*at most 64"):
                await client.ask(LONG, max_tokens=5)
            assert system.at_baseline()

    run(main())


def _fails_on_second_step(plan: StepPlan) -> float:
    if plan.step == 2 and len(plan.sequences[0].token_ids) > 1:
        raise RuntimeError("the device has failed")
    return prefill_cost_s(plan)


def test_case_16_prefill_fails_after_decode_was_dispatched(client_of: Any) -> None:
    """Case 16: the error names the leg, comes in under 2 s, and decode's pages are free at once: the process that
    could have written to them has ended.
    """
    options = SimOptions(cost_s=_fails_on_second_step)

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            clock = VirtualClock()
            live = client.open(PROMPT, max_tokens=5)
            failing = asyncio.create_task(client.collect(live))
            prefill = system.processes["prefill-0"]
            with pytest.raises(RuntimeError, match="the device has failed"):
                await prefill.task  # its host lets the process end with its actor
            system.kill("prefill-0")
            died_s = clock.now_s()
            with pytest.raises(PeerLost, match="prefill-0"):
                await failing
            assert clock.now_s() - died_s < 2
            assert await system.settle(0.1)

    run(main())


def test_case_16_the_data_plane_refuses(client_of: Any) -> None:
    """Case 16, second form: prefill answers Failed; decode's pages were given away, and come back by its ack."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            writer = system.prefill().network.address.incarnation
            hidden = system.fabric.find((await system.decode().endpoint.accept(writer)).agent)
            assert hidden is not None
            system.fabric.remove(hidden)
            clock = VirtualClock()
            began_s = clock.now_s()
            with pytest.raises(HandoffFailed, match=r"no such agent.*leg prefill"):
                await client.ask(PROMPT, max_tokens=5)
            assert clock.now_s() - began_s < 2
            assert await system.settle(1)

    run(main())


def test_case_29_decode_refuses_before_admission(client_of: Any) -> None:
    """Case 29: what decode refuses costs prefill nothing: its room ends at once, no page was taken."""
    options = SimOptions(decode=DecodeSettings(pool_pages=64, max_rooms=1))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            first = client.open(PROMPT, max_tokens=40)
            await first.take()
            with pytest.raises(PeerError, match=r"decode holds 1 rooms; the limit is 1"):
                await client.ask(PROMPT, max_tokens=5)
            counts = system.counts()["prefill-0"]
            assert counts.owned + counts.quarantined == 0
            await client.collect(first)
            assert await system.settle(5)

    run(main())


@pytest.mark.parametrize("cancel_ends", [True, False])
def test_case_34_a_sender_that_stalls_for_ever_times_out_in_transferring(client_of: Any, cancel_ends: bool) -> None:
    """Case 34: the error names room, state, elapsed and peer. Where the writer never answers, the pages stay
    quarantined, for as long as it takes, and come back when it has drained.
    """
    options = SimOptions(
        faults=FaultSettings(stall_after=1), cancel_ends=cancel_ends, clocks=ClockSettings(no_progress_s=7.0)
    )

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            clock = VirtualClock()
            began_s = clock.now_s()
            live = client.open(PROMPT, max_tokens=5)
            with pytest.raises(DeadlineExceeded) as caught:
                await client.collect(live)
            assert 7.0 <= clock.now_s() - began_s < 10.0
            cause = caught.value.cause
            assert cause.room == live.room and cause.state in ("TRANSFERRING", "RECEIVING", "FLUSHING")
            assert cause.elapsed_s >= 7.0 and cause.peer in ("prefill-0", "decode-0")
            journal = await client.journal(live)
            assert [row["state"] for row in journal["kvpoll"]][-2:] == ["TRANSFERRING", "FAILED"]
            if not cancel_ends:
                await asyncio.sleep(300)
                assert system.counts()["decode-0"].quarantined == 13  # 100 tokens and the first one, in pages of 8
                endpoint = system.processes["prefill-0"].endpoint
                assert isinstance(endpoint, FaultyEndpoint)
                endpoint.release_stalled()
            assert await system.settle(5)

    run(main())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("at_s", [0.001, 0.03, 0.05, 0.1, 0.13, 0.16, 0.3])
def test_a_process_is_killed_at_any_time(client_of: Any, victim: str, at_s: float) -> None:
    """Every client gets its full right answer or a clear error; the next request is right; all pages return."""

    async def main() -> None:
        async with SimSystem(SimOptions(faults=FaultSettings(delay_ms=10))) as system:
            client = await client_of(system)
            lives = [client.open(PROMPT[i:], max_tokens=12) for i in range(8)]
            tasks = [asyncio.create_task(client.collect(live)) for live in lives]
            await asyncio.sleep(at_s)
            system.kill(victim)
            role = victim.split("-")[0]
            await asyncio.sleep(2)
            system.spawn(role, victim)
            for i, outcome in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, PeerError) and victim in str(outcome), outcome
                else:
                    expected = system.engine().expected_tokens(PROMPT[i:], 12)
                    assert tuple(token.token_id for token in outcome) == expected
            await asyncio.sleep(2)
            assert await client.ask(PROMPT[:30], max_tokens=4) == list(system.engine().expected_tokens(PROMPT[:30], 4))
            assert await system.settle(10)

    run(main())


@pytest.mark.parametrize("at_s", [0.0, 0.0005, 0.001, 0.01, 0.033, 0.05, 0.11, 0.14, 0.2])
def test_a_client_leaves_at_any_phase(client_of: Any, at_s: float) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions(faults=FaultSettings(delay_ms=10))) as system:
            client = await client_of(system)
            staying = asyncio.create_task(client.ask(PROMPT[:50], max_tokens=20))
            leaving = client.open(PROMPT, max_tokens=50)
            await asyncio.sleep(at_s)
            client.front.close_request(leaving)
            assert await staying == list(system.engine().expected_tokens(PROMPT[:50], 20))
            assert await system.settle(1), system.counts()

    run(main())


def test_a_stopped_prefill_keeps_decodes_pages_quarantined_until_it_answers(client_of: Any) -> None:
    """A silent process is not a dead one: it still writes when it continues, so nobody gets its target pages."""
    options = SimOptions(links=LinkSettings(silence_s=3.0), faults=FaultSettings(delay_ms=50))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            live = client.open(PROMPT, max_tokens=5)
            task = asyncio.create_task(client.collect(live))
            await asyncio.sleep(0.1)
            prefill = system.processes["prefill-0"].address
            system.network.stop(prefill)
            with pytest.raises(PeerLost, match="prefill-0"):
                await task
            await asyncio.sleep(60)
            assert system.counts()["decode-0"].quarantined == 13
            system.network.resume(prefill)
            await asyncio.sleep(5)
            answer = await client.ask(PROMPT[:30], max_tokens=4)
            assert answer == list(system.engine().expected_tokens(PROMPT[:30], 4))
            assert await system.settle(10), system.counts()

    run(main())


def test_the_router_dies(client_of: Any) -> None:
    """Rooms short of Success are aborted under the ack rule; a request past it is left alone."""

    async def main() -> None:
        async with SimSystem(SimOptions(faults=FaultSettings(delay_ms=10))) as system:
            client = await client_of(system)
            past = client.open(PROMPT[:8], max_tokens=100)
            while past.decode is None:
                await past.take()
            short = client.open(LONG, max_tokens=5)
            await asyncio.sleep(0.05)
            system.kill("router-0")
            decode, prefill = system.decode(), system.prefill()
            await asyncio.sleep(1)
            assert list(decode.rooms) == [past.room] and not prefill.rooms
            client.front.close_request(short)
            await asyncio.sleep(5)
            assert not decode.rooms and all(counts.at_baseline for counts in system.counts().values())

    run(main())


def test_a_forward_that_never_ends_takes_its_process_down(client_of: Any) -> None:
    """No clock of a committed room runs any more, and a stuck forward can't be cancelled: the actor fails, its host
    lets the process end, and the client is told.
    """

    def stuck(plan: StepPlan) -> float:
        return 1e6 if plan.step == 5 and len(plan.sequences[0].token_ids) == 1 else prefill_cost_s(plan)

    async def main() -> None:
        async with SimSystem(SimOptions(cost_s=stuck, clocks=ClockSettings(no_progress_s=9.0))) as system:
            client = await client_of(system)
            asking = asyncio.create_task(client.ask(PROMPT, max_tokens=20))
            with pytest.raises(EngineStalled, match=r"forward 5 has run for 9\.\d s; the limit is 9 s"):
                await system.processes["decode-0"].task
            system.kill("decode-0")
            with pytest.raises(PeerLost, match="decode-0"):
                await asking

    run(main())
