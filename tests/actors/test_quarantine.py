"""Design §5: by which proof pages come back, over a transport like tcp and on one host; each time to the baseline."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.actors.settings import DecodeSettings, FaultSettings, LinkSettings, PrefillSettings
from kvferry.protocol.errors import KVFerryError
from kvferry.protocol.messages import Drained, Draining, Reconcile, UnknownRoom
from kvferry.sim.checkers import Watcher, check_idle
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer.fake import HOST, TCP
from kvferry.transfer.faulty import FaultyEndpoint

PROMPT = tuple(range(300, 400))
#: 100 tokens and the first one that is drawn, in pages of 8.
PAGES = 13
LINKS = LinkSettings(heartbeat_s=0.5, silence_s=3.0, resend_s=0.25)
#: One batch is a write of seconds, so that a stop meets it under way.
SLOW = {"bandwidth_bytes_s": 2_000.0, "links": LINKS}
#: Room for one such request: the next one needs the very pages of the first.
TINY = DecodeSettings(pool_pages=15, quarantine_budget=1.0)


async def writing(system: SimSystem, client: Any, wait_until: Any) -> tuple[int, Any]:
    """A request whose prompt is being written: its room, and its answer to come."""
    asking = asyncio.ensure_future(client.ask(PROMPT, max_tokens=3))
    prefills = [system.prefill(i) for i in range(system.options.prefill.instances)]
    await wait_until(lambda: any(r.machine.writes_open for prefill in prefills for r in prefill.rooms.values()))
    await asyncio.sleep(0.05)
    (room,) = system.decode().rooms
    return room, asking


async def released(system: SimSystem, room: int) -> dict[str, Any]:
    """What the room's journal says of its pages, which may be late news."""
    async with asyncio.timeout(5):
        while True:
            journal = await system.router.journal(room)
            assert journal is not None
            for event in journal["events"]:
                if event["event"] == "released":
                    detail: dict[str, Any] = event["detail"]
                    return detail
            await asyncio.sleep(0.01)


async def all_is_well(system: SimSystem, client: Any) -> None:
    right = list(system.engine().expected_tokens(PROMPT, 3))
    async with asyncio.timeout(60):
        while True:
            try:
                assert await client.ask(PROMPT, max_tokens=3) == right
                break
            except KVFerryError:
                await asyncio.sleep(0.5)
    assert await system.settle(10), system.counts()
    check_idle(system)


def test_over_tcp_a_stopped_writers_pages_come_back_by_revoked_and_serve_another(
    client_of: Any, wait_until: Any
) -> None:
    """Done-when 6: B runs on the very pages that A's stopped writer would still write to, and A's writer continues."""

    async def main() -> None:
        options = SimOptions(proofs=TCP, prefill=PrefillSettings(instances=2, pool_pages=64), decode=TINY, **SLOW)
        async with SimSystem(options) as system:
            client, watcher = await client_of(system), Watcher(system)
            watching = asyncio.ensure_future(watcher.run())
            room_id, asking = await writing(system, client, wait_until)
            (room,) = system.decode().rooms.values()
            assert room.holding is not None
            pages, writer = set(room.holding.pages), room.peer
            system.network.stop(writer)
            with pytest.raises(KVFerryError, match="silent"):
                await asking
            assert system.counts()["decode-0"].at_baseline
            detail = await released(system, room_id)
            assert detail["proof"] == "revoked" and detail["pages"] == PAGES
            second = client.open(PROMPT, max_tokens=3)
            answering = asyncio.ensure_future(client.collect(second))
            await wait_until(lambda: any(r.holding for r in system.decode().rooms.values()))
            (room,) = [r for r in system.decode().rooms.values() if r.holding is not None]
            assert set(room.holding.pages) & pages
            await asyncio.sleep(0.1)
            assert room.peer.incarnation != writer.incarnation
            system.network.resume(writer)
            tokens = [token.token_id for token in await answering]
            assert tokens == list(system.engine().expected_tokens(PROMPT, 3))
            await all_is_well(system, client)
            watching.cancel()
            watcher.look()

    run(main())


def test_on_one_host_a_stopped_writers_pages_wait_until_it_has_drained(client_of: Any, wait_until: Any) -> None:
    """Done-when 6: they are nobody's for as long as it stands still; a new session starts by asking, and it answers."""

    async def main() -> None:
        async with SimSystem(SimOptions(proofs=HOST, **SLOW)) as system:
            client, watcher = await client_of(system), Watcher(system)
            watching = asyncio.ensure_future(watcher.run())
            room_id, asking = await writing(system, client, wait_until)
            system.network.stop(system.prefill().network.address)
            with pytest.raises(KVFerryError, match="silent"):
                await asking
            await asyncio.sleep(120)
            assert system.counts()["decode-0"].quarantined == PAGES
            (row,) = (await system.decode().status())["quarantined"]
            assert (row["writer"], len(row["pages"]), row["linked"]) == ("prefill-0", PAGES, False)
            assert row["for_s"] > 119 and row["waits_for"] == ["drained by rank 0", "exited"]
            system.network.resume(system.prefill().network.address)
            await wait_until(lambda: system.counts()["decode-0"].at_baseline)
            detail = await released(system, room_id)
            assert (detail["proof"], detail["pages"]) == ("drained", PAGES) and detail["quarantined_s"] > 120
            await all_is_well(system, client)
            watching.cancel()
            watcher.look()

    run(main())


@pytest.mark.parametrize(
    ("settings", "least_s", "most_s"),
    [
        (DecodeSettings(pool_pages=48, quarantine_budget=0.25), 3.0, 8.0),  # 13 of 48 pages are more than 12
        (DecodeSettings(pool_pages=64, quarantine_s=6.0), 9.0, 12.0),
    ],
)
def test_a_writer_over_the_budget_is_killed_and_its_successor_is_not(
    client_of: Any, wait_until: Any, settings: DecodeSettings, least_s: float, most_s: float
) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions(proofs=HOST, keep=True, decode=settings, **SLOW)) as system:
            client, clock = await client_of(system), VirtualClock()
            room_id, asking = await writing(system, client, wait_until)
            stopped = system.prefill().network.address
            system.network.stop(stopped)
            began_s = clock.now_s()
            with pytest.raises(KVFerryError):
                await asking
            await wait_until(lambda: system.counts().get("decode-0") and system.counts()["decode-0"].at_baseline)
            assert least_s <= clock.now_s() - began_s <= most_s
            assert (await released(system, room_id))["proof"] == "exited"
            await wait_until(lambda: "prefill-0" in system.processes)
            assert system.pools.progress()["killed"] == {"prefill-0": 1}
            assert system.prefill().network.address.incarnation != stopped.incarnation
            assert not await system.decode().end_writer(stopped.incarnation)
            assert not await system.decode().end_writer(system.prefill().network.address.incarnation)
            await all_is_well(system, client)
            assert system.pools.progress()["killed"] == {"prefill-0": 1}

    run(main())


def test_within_the_budget_nobody_is_killed(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        settings = DecodeSettings(pool_pages=52, quarantine_budget=0.25)  # 13 of 52 pages are not more than 13
        async with SimSystem(SimOptions(proofs=HOST, keep=True, decode=settings, **SLOW)) as system:
            client = await client_of(system)
            _, asking = await writing(system, client, wait_until)
            system.network.stop(system.prefill().network.address)
            with pytest.raises(KVFerryError):
                await asking
            await asyncio.sleep(60)
            assert system.counts()["decode-0"].quarantined == PAGES
            assert system.pools.progress()["killed"] == {}
            system.network.resume(system.prefill().network.address)
            await all_is_well(system, client)

    run(main())


def test_over_tcp_the_source_pages_come_back_while_decode_stands_still(client_of: Any, wait_until: Any) -> None:
    """Its writes would be under way for as long; without the sending agent nothing reads their pages."""

    async def main() -> None:
        async with SimSystem(SimOptions(proofs=TCP, **SLOW)) as system:
            client, watcher = await client_of(system), Watcher(system)
            watching = asyncio.ensure_future(watcher.run())
            _, asking = await writing(system, client, wait_until)
            system.network.stop(system.decode().network.address)
            with pytest.raises(KVFerryError):
                await asking
            await wait_until(lambda: system.counts()["prefill-0"].at_baseline)
            assert system.network.is_stopped(system.decode().network.address)
            (room,) = system.prefill().rooms.values()  # it can't say that it has drained
            assert room.holding is None
            system.network.resume(system.decode().network.address)
            await all_is_well(system, client)
            watching.cancel()
            watcher.look()

    run(main())


def test_over_tcp_a_writer_that_stalls_is_shut_out_though_its_link_lives(client_of: Any, wait_until: Any) -> None:
    """A write that has been cancelled and does not end: after `revoke_after_s` only that peer pays for it."""

    async def main() -> None:
        settings = DecodeSettings(pool_pages=64, revoke_after_s=7.0)
        options = SimOptions(
            proofs=TCP, decode=settings, links=LINKS, faults=FaultSettings(stall_after=0), cancel_ends=False
        )
        async with SimSystem(options) as system:
            client, clock = await client_of(system), VirtualClock()
            live = client.open(PROMPT, max_tokens=3)
            await wait_until(lambda: any(r.machine.writes_open for r in system.prefill().rooms.values()))
            (room_id,) = system.decode().rooms
            client.front.close_request(live)
            await wait_until(lambda: system.counts()["decode-0"].quarantined == PAGES)
            began_s = clock.now_s()
            await wait_until(lambda: system.counts()["decode-0"].at_baseline)
            assert 7.0 <= clock.now_s() - began_s <= 8.5
            assert (await released(system, room_id))["proof"] == "revoked"
            assert system.decode().counts["writers shut out"] == 1
            endpoint = system.processes["prefill-0"].endpoint
            assert isinstance(endpoint, FaultyEndpoint)
            endpoint.release_stalled()
            await all_is_well(system, client)

    run(main())


def test_over_tcp_what_a_dead_writer_left_behind_lands_nowhere(client_of: Any, wait_until: Any) -> None:
    """Its exit is no proof there; the agent that it wrote through is gone before its pages are anybody's."""

    async def main() -> None:
        options = SimOptions(proofs=TCP, decode=TINY, **SLOW)
        async with SimSystem(options) as system:
            client, watcher = await client_of(system), Watcher(system)
            room_id, asking = await writing(system, client, wait_until)
            system.kill("prefill-0")
            with pytest.raises(KVFerryError):
                await asking
            assert (await released(system, room_id))["proof"] == "revoked"
            system.spawn("prefill", "prefill-0")
            await all_is_well(system, client)
            await asyncio.sleep(5)
            watcher.look()
            assert watcher.writes.late == 0

    run(main())


def test_on_one_host_a_dead_writers_end_counts_when_revoke_has_answered(client_of: Any, wait_until: Any) -> None:
    """With staging, what it had announced is still put into its pages after its end: they are leased until that is
    over, though the end is known at once and another request waits for them.
    """

    async def main() -> None:
        options = SimOptions(proofs=HOST, scatter_s=0.8, decode=TINY, **SLOW)
        async with SimSystem(options) as system:
            client, watcher = await client_of(system), Watcher(system)
            room_id, asking = await writing(system, client, wait_until)
            system.kill("prefill-0")
            with pytest.raises(KVFerryError):
                await asking
            (row,) = (await system.decode().status())["quarantined"]
            assert row["waits_for"] == ["the end of what it left at rank 0"]
            detail = await released(system, room_id)
            assert (detail["proof"], detail["pages"]) == ("exited", PAGES) and 0.8 <= detail["quarantined_s"] < 0.9
            watcher.look()
            assert watcher.writes.late == 1
            system.spawn("prefill", "prefill-0")
            await all_is_well(system, client)
            watcher.look()

    run(main())


def test_case_31_a_replaced_prefill_writes_by_an_agent_of_its_own(client_of: Any, wait_until: Any) -> None:
    """Case 31: "Kill the only prefill actor, start a new one under the same name/address; do not touch decode": what
    was in flight fails cleanly, and the next request goes to the new one, by an agent of its own.
    """

    async def main(proofs: Any) -> None:
        async with SimSystem(SimOptions(proofs=proofs, **SLOW)) as system:
            client = await client_of(system)
            _, asking = await writing(system, client, wait_until)
            before = system.prefill().network.address
            system.kill("prefill-0")
            after = system.spawn("prefill", "prefill-0").address
            assert before.endpoint == after.endpoint and before.incarnation != after.incarnation
            with pytest.raises(KVFerryError, match="prefill-0"):
                await asking
            await all_is_well(system, client)
            assert system.decode().writers.incarnations == {after.incarnation}

    for proofs in (HOST, TCP):
        run(main(proofs))


def test_a_new_session_asks_for_all_rooms_at_once_and_each_gets_its_answer(client_of: Any, wait_until: Any) -> None:
    """One write is under way, others wait behind it: those rooms have ended at prefill when decode asks."""

    async def main() -> None:
        async with SimSystem(SimOptions(proofs=HOST, **SLOW)) as system:
            client = await client_of(system)
            asked = [asyncio.ensure_future(client.ask(PROMPT[:40], max_tokens=3)) for _ in range(3)]
            ends = (system.prefill().network.address, system.decode().network.address)
            await wait_until(lambda: sum(r.machine.writes_open > 0 for r in system.prefill().rooms.values()) == 3)
            rooms = set(system.decode().rooms)
            system.network.cut(*ends)
            assert all(isinstance(end, KVFerryError) for end in await asyncio.gather(*asked, return_exceptions=True))
            await wait_until(lambda: not system.decode().network.is_up(ends[0].incarnation))
            said: list[Any] = []
            for actor in (system.decode(), system.prefill()):
                record(actor.network, said)
            system.network.heal(*ends)
            await wait_until(lambda: system.counts()["decode-0"].at_baseline)
            (question,) = [message for message in said if isinstance(message, Reconcile)]
            assert set(question.rooms) == rooms
            answers = {m.room: type(m) for m in said if isinstance(m, UnknownRoom | Draining | Drained)}
            assert set(answers) == rooms
            await all_is_well(system, client)

    run(main())


def record(network: Any, said: list[Any]) -> None:
    send = network.send

    def sent(incarnation: int, message: Any) -> bool:
        said.append(message)
        return bool(send(incarnation, message))

    network.send = sent
