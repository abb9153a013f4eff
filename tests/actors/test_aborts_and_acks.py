"""Aborts, and what frees the pages then: the word of those who may still use them, and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from kvferry.actors.actor import FromPeer
from kvferry.actors.decode.arrival import Notified
from kvferry.actors.settings import ClockSettings, DecodeSettings, FaultSettings, LinkSettings
from kvferry.engine.contract import StepPlan
from kvferry.protocol.errors import Cause, KVFerryError
from kvferry.protocol.messages import Abort, AbortTransfer, Drained, UnknownRoom
from kvferry.protocol.sender import SenderEvent
from kvferry.sim.checkers import Watcher, check_idle
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem, prefill_cost_s
from kvferry.transfer.fake import TCP
from kvferry.transfer.faulty import FaultyEndpoint

PROMPT = tuple(range(300, 400))
OTHER = tuple(range(700, 760))
#: 101 tokens (the prompt and the first token) in pages of 8.
PAGES = 13


def right(system: SimSystem, prompt: tuple[int, ...], count: int) -> list[int]:
    return list(system.engine("decode-0").expected_tokens(prompt, count))


def releases(leader: Any) -> Counter[int]:
    """From now on: how often each room's pages were released."""
    counted: Counter[int] = Counter()
    release = leader.ledger.release

    def count(holding: Any, proof: Any) -> None:
        release(holding, proof)
        counted[holding.owner] += 1

    leader.ledger.release = count
    return counted


def hold(actor: Any, kind: type[Any]) -> list[Any]:
    """From now on nothing of this kind comes to the actor; it is kept here."""
    kept: list[Any] = []
    receive = actor.receive

    def take(item: Any) -> None:
        found = item.message if isinstance(item, FromPeer) else item
        if isinstance(found, kind):
            kept.append(item)
        else:
            receive(item)

    actor.receive = take
    return kept


def slow_steps(plan: StepPlan) -> float:
    return 0.5 if all(len(sequence.token_ids) == 1 for sequence in plan.sequences) else prefill_cost_s(plan)


@pytest.mark.parametrize("says", ["the client leaves", "the router aborts", "both"])
def test_case_22_abort_after_the_transfer_and_before_the_first_step(client_of: Any, wait_until: Any, says: str) -> None:
    """Case 22: B's KV is in, it is committed and waits for its first forward, since A's is running. B is aborted: its
    pages are released once, while that forward still runs, no forward ever names it, and its place in the batch (there
    are two) is C's.

    Upstream the request was in neither of two queues then. Here the commit puts it into the running batch in the turn
    that ends its receiving, so there is no moment in which it is in none.
    """
    options = SimOptions(cost_s=slow_steps, decode=DecodeSettings(pool_pages=64, max_running=2))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            decode, planned = system.decode(), set[int]()
            plan_step = decode.plan_step

            def note(step: int) -> StepPlan | None:
                plan = plan_step(step)
                planned.update(sequence.key for sequence in (plan.sequences if plan is not None else ()))
                return plan

            decode.plan_step = note  # type: ignore[method-assign]
            a = asyncio.create_task(client.ask(OTHER, max_tokens=10))
            await wait_until(lambda: decode.forward.running)
            released, free, rows = releases(decode), decode.ledger.free, decode.ledger.free_rows
            b = client.open(PROMPT, max_tokens=9)
            reading = asyncio.create_task(client.collect(b))
            await wait_until(lambda: len(decode.running) == 2)
            step, room = decode.forward.next, decode.running[1]
            assert decode.forward.running and decode.batch.places == 2
            if says != "the client leaves":
                cause = Cause("aborted", "the client has gone", "front")
                assert system.router.network.send(decode.network.address.incarnation, Abort(room, cause, True))
            if says != "the router aborts":
                reading.cancel()
            await wait_until(lambda: room not in decode.rooms, 0.01)
            assert decode.forward.running and decode.forward.next == step, "while the same forward runs"
            assert (decode.batch.places, decode.ledger.free, decode.ledger.free_rows) == (1, free, rows)
            c = asyncio.create_task(client.ask(PROMPT[:50], max_tokens=4))
            assert await c == right(system, PROMPT[:50], 4)
            assert await a == right(system, OTHER, 10)
            reading.cancel()
            assert await system.settle(5), system.counts()
            assert released[room] == 1 and room not in planned

    run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("hears", ["nothing", "the word on the link"])
def test_cancel_between_prefills_end_and_decodes_scheduler(client_of: Any, wait_until: Any, hears: str) -> None:
    """Upstream blocks that were sent stayed until a lease ended. Here prefill has delivered and forgotten the room, and
    its notification has not been seen yet when the client leaves: decode asks, "I don't know the room" is proof, and
    the pages are free within a few messages' time.
    """

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            decode, prefill = system.decode(), system.prefill()
            held = hold(decode, Notified if hears != "nothing" else Notified | Drained)  # type: ignore[arg-type]
            released = releases(decode)
            reading = asyncio.create_task(client.ask(PROMPT, max_tokens=9))
            await wait_until(lambda: bool(held) and not prefill.rooms)
            (room,) = decode.rooms
            assert system.counts()["prefill-0"].at_baseline and system.counts()["decode-0"].leased == PAGES
            reading.cancel()
            assert await system.settle(0.01), system.counts()
            assert released == {room: 1}

    run(asyncio.wait_for(main(), 120))


STALLED = SimOptions(faults=FaultSettings(stall_after=1), cancel_ends=False, clocks=ClockSettings(no_progress_s=5.0))


async def fault(kind: str, system: SimSystem, reading: asyncio.Task[Any]) -> None:
    prefill, decode = system.prefill(), system.decode()
    if kind == "the client leaves":
        reading.cancel()
    elif kind == "prefill fails":
        (room,) = prefill.rooms.values()
        prefill.fail(room, SenderEvent.FAIL, "the device refuses", "", "handoff_failed")
    elif kind == "the router dies":
        system.kill("router-0")
    elif kind == "the link of the legs":
        prefill.network.drop(decode.network.address.incarnation)
    elif kind == "the front dies":
        system.network.kill(next(iter(prefill.rooms.values())).spec.front)


FAULTS = [
    "the client leaves", "prefill fails", "the router dies", "the link of the legs", "no progress", "the front dies"
]  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_pages_wait_for_the_write_whoever_ends_the_room(client_of: Any, wait_until: Any, kind: str) -> None:
    """Case 26, upstream faults 1 to 6: a write is on its way and nobody can stop it. Whoever ends the room, with or
    without decode, neither its target nor its source pages are free until the write has ended; then both are at once,
    and decode had no time-out to wait for. What is asked meanwhile gets other pages, and its own tokens.
    """

    async def main() -> None:
        async with SimSystem(STALLED) as system:
            watcher = Watcher(system)
            client, other = await client_of(system), None
            reading = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            prefill, decode = system.prefill(), system.decode()
            endpoint = system.processes["prefill-0"].endpoint
            assert isinstance(endpoint, FaultyEndpoint)
            await wait_until(lambda: endpoint.stalled == 1)
            await fault(kind, system, reading)
            await wait_until(lambda: system.counts()["decode-0"].quarantined == PAGES, 10)
            await asyncio.sleep(20)
            counts = system.counts()
            assert counts["decode-0"].quarantined == PAGES and counts["decode-0"].free == 64 - PAGES
            assert counts["prefill-0"].leased == PAGES and counts["prefill-0"].free == 64 - PAGES
            watcher.look()
            if kind == "the router dies":
                system.spawn("router", "router-0")
            if kind in ("the front dies", "the router dies"):
                other = await type(client)(system, "front-1", 3, 30.0).start()
            # The stalled write holds the lane to decode, so this one ends when that does; it has pages of its own.
            more = asyncio.create_task((other or client).ask(OTHER, max_tokens=3))
            await asyncio.sleep(1)
            endpoint.release_stalled()
            await wait_until(lambda: not any(c.quarantined for c in system.counts().values()), 2)
            assert await more == right(system, OTHER, 3)
            assert await system.settle(5), system.counts()
            watcher.look()
            assert not decode.rooms and not prefill.rooms
            reading.cancel()
            check_idle(system)

    run(asyncio.wait_for(main(), 200))


def test_case_26_the_ack_is_lost(client_of: Any, wait_until: Any) -> None:
    """Case 26: prefill's Drained is lost with its link. Decode never releases without it: it asks again, and the
    sender, which has cleared the room long ago, answers at once.
    """
    options = SimOptions(faults=FaultSettings(delay_ms=300), links=LinkSettings(heartbeat_s=0.5, silence_s=2.0))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            prefill, decode = system.prefill(), system.decode()
            told: list[Any] = []
            say = prefill.tell_both

            def lose(room: Any, message: Any) -> None:
                if isinstance(message, Drained):
                    told.append(message)
                    system.network.cut(prefill.network.address, decode.network.address)
                say(room, message)

            prefill.tell_both = lose  # type: ignore[method-assign]
            reading = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: any(room.sending.handles for room in prefill.rooms.values()))
            reading.cancel()
            await wait_until(lambda: bool(told) and not prefill.rooms)
            await asyncio.sleep(30)
            assert system.counts()["decode-0"].quarantined == PAGES
            asked: list[tuple[int, int]] = []
            unknown = prefill.unknown_room

            def count(peer: Any, room: int) -> None:
                asked.append((room, system.counts()["decode-0"].quarantined))
                unknown(peer, room)

            prefill.unknown_room = count  # type: ignore[method-assign]
            system.network.heal(prefill.network.address, decode.network.address)
            await wait_until(lambda: bool(asked), 20)
            await asyncio.sleep(0.002)
            assert system.at_baseline() and asked == [(told[0].room, PAGES)]

    run(asyncio.wait_for(main(), 120))


def test_case_26_an_abort_of_a_room_that_the_sender_has_cleared(client_of: Any, wait_until: Any) -> None:
    """Case 26: both of prefill's words, notification and Drained, are lost; decode's transfer clock runs out, and its
    abort is about a room that prefill has forgotten. The answer comes at once, by the next message.
    """
    options = SimOptions(clocks=ClockSettings(transfer_wait_s=3.0, no_progress_s=3.0))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            decode, prefill, clock = system.decode(), system.prefill(), VirtualClock()
            hold(decode, Notified)
            hold(decode, Drained)
            asked_s: list[float] = []
            abort = prefill._on_message[AbortTransfer]

            def note(peer: Any, message: Any) -> None:
                asked_s.append(clock.now_s())
                abort(peer, message)

            prefill._on_message[AbortTransfer] = note
            with pytest.raises(KVFerryError):
                await client.ask(PROMPT, max_tokens=5)
            await wait_until(lambda: bool(asked_s), 10)
            await wait_until(lambda: not decode.rooms, 0.002)
            assert prefill.counts["messages for unknown rooms"] == 1 and system.at_baseline()

    run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("fence", ["revoked", "never"])
def test_case_26_the_writer_is_replaced_and_its_ack_never_comes(client_of: Any, wait_until: Any, fence: str) -> None:
    """Case 26: on a transport on which the end of the writer's process is no proof. Its successor, at the same address,
    knows nothing of the room, and says so: that is not the writer's word. Only the fence, the end of the agent that the
    writer's incarnation wrote through, brings the pages back.
    """

    async def main() -> None:
        async with SimSystem(SimOptions(faults=FaultSettings(delay_ms=300), proofs=TCP)) as system:
            client = await client_of(system)
            decode = system.decode()
            decode.writers._close = lambda pairs: False  # type: ignore[method-assign]  # the test holds the fence
            reading = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: any(room.sending.handles for room in system.prefill().rooms.values()))
            (room,) = decode.rooms.values()
            old = system.prefill().network.address
            system.kill("prefill-0")
            with pytest.raises(KVFerryError):
                await reading
            new = system.spawn("prefill", "prefill-0").actor
            assert await client_ready(client, system) == right(system, OTHER, 3)
            at_decode, strays = decode.network.address.incarnation, decode.counts["late or stray messages of prefill"]
            for word in (Drained(room.room, 0, False), Drained(room.room, 0, True), UnknownRoom(room.room, "prefill")):
                assert new.network.send(at_decode, word)
            await asyncio.sleep(20)
            assert decode.counts["late or stray messages of prefill"] == strays + 3
            assert system.counts()["decode-0"].quarantined == PAGES and list(decode.rooms) == [room.room]
            if fence == "revoked":
                decode.act(room, room.machine.writer_revoked(new.network.address.incarnation))
                assert system.counts()["decode-0"].quarantined == PAGES, "another one's agent"
                decode.act(room, room.machine.writer_revoked(old.incarnation, Cause("peer_lost", "fenced")))
                assert system.at_baseline()

    run(asyncio.wait_for(main(), 120))


async def client_ready(client: Any, system: SimSystem) -> list[int]:
    await asyncio.sleep(2)
    answer: list[int] = await client.ask(OTHER, max_tokens=3)
    assert not any(process.task.done() for process in system.processes.values())
    return answer
