"""Readiness by proof, on the real actors and virtual time: what proves it, what it costs, and what busy means."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvferry.actors.settings import ClockSettings, DecodeSettings, FaultSettings, PrefillSettings, RouterSettings
from kvferry.serve.gateway import ReadyPolicy
from kvferry.serve.ready import Readiness
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

POLICY = ReadyPolicy(fresh_s=5.0, limit_s=2.0, stuck_s=20.0)
#: Lost clients and stalled writes are not what is tested: no clock of a room ends before the test.
PATIENT = ClockSettings(prefill_wait_s=900, transfer_wait_s=900, admission_wait_s=900, no_progress_s=900)


def rooms_of(client: Any) -> int:
    """How many attempts the front has opened."""
    turns: int = client.backend._turns
    return turns


def live_in_metrics(client: Any) -> float:
    value: float = client.front.metrics.registry.get_sample_value("kvferry_requests_live")
    return value


def on(options: SimOptions, main: Any) -> None:
    """Run `main(system)`."""

    async def enter() -> None:
        async with SimSystem(options) as system:
            await main(system)

    body: Coroutine[Any, Any, None] = enter()
    run(body)


def test_a_handoff_of_one_token_proves_it_for_a_while(client_of: Any) -> None:
    """It is an ordinary room, with a journal; it counts as nobody's request and leaves nothing."""

    async def main(system: SimSystem) -> None:
        client = await client_of(system)
        readiness = Readiness(client.front, POLICY)
        asking = asyncio.ensure_future(readiness.report())
        await asyncio.sleep(0.001)
        assert rooms_of(client) == 1 and client.front.requests_live == 0 and live_in_metrics(client) == 0
        report = await asking
        assert report.ready and not report.busy and report.missing == () and report.handoff_age_s == 0
        assert await system.settle(5)
        (journal,) = (book.as_object(0.0) for book in system.router.ended.values())
        assert journal["outcome"]["ok"] and journal["prompt_tokens"] == 1 and journal["kv_bytes"] > 0
        await asyncio.sleep(4.9)
        assert (await readiness.report()).handoff_age_s == pytest.approx(4.9, abs=0.1) and rooms_of(client) == 1
        await asyncio.sleep(0.2)
        assert (await readiness.report()).ready and rooms_of(client) == 2
        assert live_in_metrics(client) == 0 and await system.settle(5), system.counts()

    on(SimOptions(), main)


def test_many_callers_share_one_probe(client_of: Any) -> None:
    async def main(system: SimSystem) -> None:
        client = await client_of(system)
        readiness = Readiness(client.front, POLICY)
        asking = [asyncio.ensure_future(readiness.report()) for _ in range(50)]
        await asyncio.sleep(0.001)
        asking[0].cancel()  # the one whose probe it is leaves
        reports = await asyncio.gather(*asking[1:])
        assert all(report.ready for report in reports) and rooms_of(client) == 1

    on(SimOptions(), main)


def test_a_clients_handoff_is_proof_enough(client_of: Any) -> None:
    async def main(system: SimSystem) -> None:
        client = await client_of(system)
        await client.ask(tuple(range(20)), max_tokens=3)
        assert (await Readiness(client.front, POLICY).report()).ready and rooms_of(client) == 1

    on(SimOptions(), main)


def test_what_is_missing_and_what_can_be_done_without(client_of: Any) -> None:
    """One of two decodes is gone: the rest still serves, and the answer says so. Without any there is no pair."""

    async def main(system: SimSystem) -> None:
        client = await client_of(system, attempts=3)
        readiness = Readiness(client.front, POLICY)
        system.kill("decode-0")
        await asyncio.sleep(20)
        report = await readiness.report()
        assert report.ready and report.missing == ("decode: 1 of 2 instances are complete",)
        system.kill("decode-1")
        await asyncio.sleep(20)
        report = await readiness.report()
        assert not report.ready and report.missing == ("decode: 0 of 2 instances are complete",)
        assert report.error is not None and "decode: 0 of 2" in str(report.error) and report.handoff_age_s > 15
        opened = rooms_of(client)
        await readiness.report()
        assert rooms_of(client) == opened  # where there can be no pair, none is tried

    on(SimOptions(decode=DecodeSettings(pool_pages=64, instances=2)), main)


def test_a_handoff_that_hangs_is_unreadiness_with_its_cause(client_of: Any) -> None:
    """The token comes from prefill at once; the KV never does. The probe's room is aborted."""

    async def main(system: SimSystem) -> None:
        client = await client_of(system)
        report = await Readiness(client.front, POLICY).report()
        assert not report.ready and report.missing == () and report.handoff_age_s is None
        assert report.error is not None and report.error.http_status == 503
        assert "no handoff goes through" in report.error.cause.text()
        assert "the probe's handoff took longer than 2 s" in report.error.cause.text()
        await asyncio.sleep(1)
        assert not system.router.guests and client.front.requests_live == 0

    on(SimOptions(faults=FaultSettings(stall_after=0), clocks=PATIENT), main)


def test_waiting_behind_long_prompts_is_not_unreadiness(client_of: Any) -> None:
    """Prefill has a minute of work in its queue; the probe, which starts behind it, is given up after 2 s."""
    prefill = PrefillSettings(chunk_tokens=32, batch_tokens=32, pool_pages=2048)
    options = SimOptions(prefill=prefill, decode=DecodeSettings(pool_pages=2048), clocks=PATIENT)

    async def main(system: SimSystem) -> None:
        client = await client_of(system)
        asking = [asyncio.ensure_future(client.ask(tuple(range(i, i + 3000)), max_tokens=2)) for i in range(3)]
        await asyncio.sleep(0.1)
        readiness = Readiness(client.front, POLICY)
        report = await readiness.report()
        assert report.ready and report.busy and report.handoff_age_s is None
        opened = rooms_of(client)
        assert (await readiness.report()).busy and rooms_of(client) == opened  # told from memory, at once
        await asyncio.gather(*asking)
        assert (await readiness.report()).ready and await system.settle(10)

    on(options, main)


def test_a_full_decode_that_streams_is_not_unready(client_of: Any) -> None:
    """Streams of 5 s take all its pages, and for longer than `stuck_s` there may be no handoff: the tokens are
    the sign of life."""
    options = SimOptions(decode=DecodeSettings(pool_pages=32, max_running=8), clocks=PATIENT)

    async def main(system: SimSystem) -> None:
        client = await client_of(system)
        streams = [asyncio.ensure_future(client.ask(tuple(range(8)), max_tokens=247)) for _ in range(9)]
        reports = []
        readiness = Readiness(client.front, ReadyPolicy(fresh_s=0.1, limit_s=2.0, stuck_s=2.5))
        for _ in range(4):
            await asyncio.sleep(4)
            reports.append(await readiness.report())
        assert all(report.ready for report in reports) and any(report.busy for report in reports), reports
        await asyncio.gather(*streams)

    on(options, main)


def test_a_refusal_for_load_is_not_unreadiness(client_of: Any) -> None:
    """The router refuses the probe as it refuses clients: 503 to them, but nothing is broken."""
    prefill = PrefillSettings(chunk_tokens=32, batch_tokens=32, pool_pages=2048)
    options = SimOptions(
        prefill=prefill, decode=DecodeSettings(pool_pages=2048), router=RouterSettings(max_requests=2), clocks=PATIENT
    )

    async def main(system: SimSystem) -> None:
        client = await client_of(system)
        other = await type(client)(system, "front-1", 1, 30.0).start()
        asking = [asyncio.ensure_future(client.ask(tuple(range(i, i + 1000)), max_tokens=2)) for i in range(2)]
        await asyncio.sleep(0.3)
        assert len(system.router.guests) == 2 and not any(task.done() for task in asking)
        for front in (client.front, other.front):  # also one none of whose own clients waits
            report = await Readiness(front, POLICY).report()
            assert report.ready and report.busy
        await asyncio.gather(*asking)

    on(options, main)


def test_clients_who_wait_in_vain_make_it_unready_in_the_end(client_of: Any) -> None:
    """The data plane hangs: prefill's first tokens go on coming, which prove no handoff."""
    options = SimOptions(faults=FaultSettings(stall_after=0), clocks=PATIENT)

    async def main(system: SimSystem) -> None:
        client = await client_of(system)
        readiness = Readiness(client.front, POLICY)
        waiting = []
        for ready in (True, True, False, False):  # 5, 12, 24 and 36 s after the first has come
            for _ in range(5):
                waiting.append(asyncio.ensure_future(client.ask(tuple(range(8)), max_tokens=9)))
                await asyncio.sleep(1 if ready else 2)
            assert (await readiness.report()).ready is ready
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    on(options, main)
