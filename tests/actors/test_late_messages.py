"""News that comes after its room is over, twice, or in the other order: counted, answered, and without effect.

Links deliver once and in order, so most of this can't come from a correct peer; the messages are handed to the
production actors over real (simulated) links all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from kvferry.actors.actor import FromPeer
from kvferry.actors.decode.arrival import Notified
from kvferry.actors.settings import DecodeSettings, FaultSettings, PrefillSettings
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import (
    AbortAck,
    AbortTransfer,
    Admitted,
    Committed,
    Destination,
    Drained,
    Failed,
    Message,
    Opened,
    PrefillDone,
    Progress,
    Received,
    Retracted,
    Token,
    TokenBatch,
)
from kvferry.protocol.metadata import Notification, decode_notification, encode_notification
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(300, 400))
CAUSE = Cause("handoff_failed", "late news")
TWO_PAIRS = SimOptions(
    prefill=PrefillSettings(instances=2, chunk_tokens=32, batch_tokens=64, pool_pages=64),
    decode=DecodeSettings(instances=2, pool_pages=64),
    faults=FaultSettings(delay_ms=1500),
)


def ids(tokens: list[Any]) -> list[int]:
    return [token.token_id for token in tokens]


async def say(speaker: Any, to: Address, *messages: Message, wait_until: Any) -> None:
    """Over the speaker's link, opened if need be."""
    speaker.network.dial(to)
    await wait_until(lambda: speaker.network.is_up(to.incarnation))
    for message in messages:
        assert speaker.network.send(to.incarnation, message)


def with_room(system: SimSystem, leaders: list[Any], room: int) -> Any:
    (found,) = [leader for leader in leaders if room in leader.rooms]
    return found


def dropped(client: Any, reason: str) -> float:
    value: float = client.front.metrics.tokens_dropped.labels(reason)._value.get()
    return value


def unknown(actor: Any) -> int:
    count: int = actor.counts["messages for unknown rooms"]
    return count


def of_attempt_0(room: int, destination: Destination) -> dict[str, list[Message]]:
    """All that can still come of a room that is over, by who says it to whom."""
    return {
        "prefill to router": [Opened(room, "prefill"), Progress(room, "prefill", "computed"), PrefillDone(room, 4),
                              Drained(room, 0, True), Failed(room, "prefill", CAUSE), AbortAck(room, "prefill")],
        "decode to router": [Opened(room, "decode"), Admitted(room, 13), Received(room, 0), Committed(room),
                             Failed(room, "decode", CAUSE), AbortAck(room, "decode")],
        "prefill to decode": [Progress(room, "prefill", "computed"), Drained(room, 0, True), Drained(room, 0, False)],
        "decode to prefill": [destination, AbortTransfer(room, CAUSE), Progress(room, "decode", "queued")],
    }  # fmt: skip


@pytest.mark.parametrize("phase", ["transfers", "runs", "has ended"])
def test_case_8_late_messages_of_an_attempt_that_has_failed(
    client_of: Any, wait_until: Any, heard_by: Any, phase: str
) -> None:
    """Case 8: attempt 0 fails after its bootstrap, the front goes on with another pair, in a new room; then everything
    of attempt 0 comes, and some of it names the room of attempt 1, which is none of the old pair's business. All of it
    is counted and ignored, what asks is answered UnknownRoom, and the answer is right, each token once.
    """

    async def main() -> None:
        async with SimSystem(TWO_PAIRS) as system:
            client = await client_of(system, attempts=3)
            prefills, decodes = [system.prefill(i) for i in range(2)], [system.decode(i) for i in range(2)]
            sent: list[Destination] = heard_by(Destination, *prefills)
            live = client.open(PROMPT, max_tokens=120)
            reading = asyncio.create_task(client.collect(live))
            await wait_until(
                lambda: any(room.sending.handles for prefill in prefills for room in prefill.rooms.values())
            )
            (first,) = system.router.guests
            prefill, decode = with_room(system, prefills, first), with_room(system, decodes, first)
            prefill.network.drop(decode.network.address.incarnation)  # both live; this attempt is lost
            await wait_until(lambda: live.attempt == 1 and not decode.rooms and bool(system.router.guests))
            (second,) = system.router.guests
            await wait_until(lambda: any(second in leader.rooms and not leader.waiting for leader in decodes))
            other = with_room(system, decodes, second)
            assert other is not decode and second != first
            if phase == "transfers":
                assert other.rooms[second].machine.state.name == "RECEIVING"
            elif phase == "runs":
                await wait_until(lambda: second in other.running)
            else:
                await reading
                assert await system.settle(5)
            before = {actor: unknown(actor) for actor in (system.router, prefill)}
            strays = decode.counts["late or stray messages of prefill"]
            news = of_attempt_0(first, sent[0])
            router = system.router.network.address
            await say(prefill, router, *news["prefill to router"], wait_until=wait_until)
            await say(decode, router, *news["decode to router"], wait_until=wait_until)
            await say(prefill, decode.network.address, *news["prefill to decode"], wait_until=wait_until)
            await say(decode, prefill.network.address, *news["decode to prefill"], wait_until=wait_until)
            old = prefill.network.address.incarnation
            decode.notified("", encode_notification(Notification(first, 0, old)))
            # Of the old pair, about the new room: to its router, and to its decode.
            await say(
                prefill, router, Failed(second, "prefill", CAUSE), Drained(second, 0, False), wait_until=wait_until
            )
            await say(decode, router, Failed(second, "decode", CAUSE), Committed(second), wait_until=wait_until)
            await say(prefill, other.network.address, Drained(second, 0, False), wait_until=wait_until)
            # Tokens of the old attempt, from both of its legs, and a retraction of it.
            front = client.network.address
            wrong = Token(live.spec.request, 0, first, 0, 11, "<11>")
            stale = dropped(client, "stale") + dropped(client, "unknown_request")
            await say(prefill, front, TokenBatch("prefill", (wrong,)), wait_until=wait_until)
            await say(decode, front, TokenBatch("decode", (wrong,)), wait_until=wait_until)
            await say(decode, front, Retracted(live.spec.request, 0, first, 1), wait_until=wait_until)
            await asyncio.sleep(0.01)
            if phase == "transfers":
                assert other.rooms[second].machine.state.name == "RECEIVING", "nobody has believed the old pair"
            tokens = await reading
            assert [token.index for token in tokens] == list(range(120))
            assert ids(tokens) == list(system.engine().expected_tokens(PROMPT, 120))
            assert dropped(client, "stale") + dropped(client, "unknown_request") == stale + 3
            # Six of each leg about the old room; and four of the old pair about the new one.
            assert unknown(system.router) - before[system.router] == 12 + 4
            assert unknown(prefill) - before[prefill] == 2  # Destination, AbortTransfer; Progress asks for no answer
            # Of prefill's three; UnknownRoom to Destination and to AbortTransfer; UnknownRoom of the router, 6 + 2.
            assert decode.counts["late or stray messages of prefill"] - strays == 3 + 2 + 8
            assert decode.counts["late or stray notifications"] == 1
            assert (live.attempt, live.room) == (1, second)
            assert await system.settle(10), system.counts()
            assert not prefill.rooms and not decode.rooms, "nothing was created"

    run(asyncio.wait_for(main(), 120))


class Held:
    """What would have come to an actor, kept back: `give` hands one item over, as often as it is asked."""

    def __init__(self, actor: Any, which: Callable[[Any], bool]) -> None:
        self.items: list[Any] = []
        self._receive, self._actor, self._which, self.open = actor.receive, actor, which, False
        actor.receive = self._take

    def _take(self, item: Any) -> None:
        if not self.open and self._which(item):
            self.items.append(item)
        else:
            self._receive(item)

    def give(self, item: Any) -> None:
        self._receive(item)
        self._actor.advance()


def is_sent(item: Any) -> bool:
    return isinstance(item, FromPeer) and isinstance(item.message, Drained)


def is_received(item: Any) -> bool:
    """A source rank's last notification."""
    news = decode_notification(item.payload) if isinstance(item, Notified) else None
    return isinstance(news, Notification) and news.last


@pytest.mark.parametrize("order", sorted(set(permutations("NNDD"))), ids="".join)
def test_case_28_received_and_sent_at_decode(client_of: Any, wait_until: Any, order: tuple[str, ...]) -> None:
    """Case 28: the notification on the data path ("received", N) and the Drained on the link ("sent", D) travel by
    different ways, so they come in any order; here also twice, and again when the room is gone. Decode commits at the
    first notification, once, whatever came before it.
    """

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            decode = system.decode()
            held = Held(decode, lambda item: is_sent(item) or is_received(item))
            live = client.open(PROMPT, max_tokens=6)
            reading = asyncio.create_task(client.collect(live))
            await wait_until(lambda: len(held.items) == 2)
            news = {"D": next(filter(is_sent, held.items)), "N": next(filter(is_received, held.items))}
            (room,) = decode.rooms.values()
            for at, name in enumerate(order):
                held.give(news[name])
                await asyncio.sleep(0.001)  # the last chunk is checked
                assert (room.machine.state.name == "RUNNING") == ("N" in order[: at + 1])
            assert ids(await reading) == list(system.engine().expected_tokens(PROMPT, 6))
            assert await system.settle(5), system.counts()
            for name in order:
                held.give(news[name])
            assert decode.counts["late or stray notifications"] == 2
            assert decode.counts["late or stray messages of prefill"] == 2
            assert [row["event"] for row in (await client.journal(live))["events"]].count("committed") == 1
            assert not system.processes["decode-0"].task.done() and not decode.rooms and system.at_baseline()
            held.open = True
            assert await client.ask(PROMPT[:30], max_tokens=3) == list(system.engine().expected_tokens(PROMPT[:30], 3))

    run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("order", sorted(set(permutations("NDA"))), ids="".join)
def test_case_28_at_a_decode_that_is_giving_up(client_of: Any, wait_until: Any, order: tuple[str, ...]) -> None:
    """Case 28: an abort (A) is among them. What comes before the commit decides: N before A is a success that A then
    stops; A first makes both of them acks, no more. The pages come back once, with the first proof.
    """

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            decode = system.decode()
            held = Held(decode, lambda item: is_sent(item) or is_received(item))
            live = client.open(PROMPT, max_tokens=50)
            reading = asyncio.create_task(client.collect(live))
            await wait_until(lambda: len(held.items) == 2)
            (room,) = decode.rooms.values()
            released = 0
            release = decode.ledger.release

            def counted(*proof: Any) -> None:
                nonlocal released
                release(*proof)
                released += 1

            decode.ledger.release = counted  # type: ignore[method-assign]
            for name in order:
                if name == "A":
                    reading.cancel()  # its client leaves
                    await asyncio.sleep(0.005)
                else:
                    held.give(next(filter(is_sent if name == "D" else is_received, held.items)))
                    await asyncio.sleep(0.001)
            committed = order.index("N") < order.index("A")
            assert room.machine.kvpoll.name == ("SUCCESS" if committed else "FAILED")
            await asyncio.gather(reading, return_exceptions=True)
            held.open = True
            assert await system.settle(1), system.counts()
            assert released == 1

    run(asyncio.wait_for(main(), 120))


LEGS = {"p": (PrefillDone, Drained), "d": (Received, Committed)}


@pytest.mark.parametrize("order", sorted(set(permutations("ppdd"))), ids="".join)
@pytest.mark.parametrize("times", [1, 2])
def test_case_28_received_and_sent_at_the_room(client_of: Any, wait_until: Any, order: Any, times: int) -> None:
    """Case 28: each leg's link keeps its order, the two links have none in common; so prefill's PrefillDone, Drained
    mix with decode's Received, Committed in any way. The front is answered once, with success, each time.
    """

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            client = await client_of(system)
            router, kinds = system.router, [kind for kinds in LEGS.values() for kind in kinds]
            held = Held(router, lambda item: isinstance(item, FromPeer) and type(item.message) in kinds)
            live = client.open(PROMPT, max_tokens=5)
            reading = asyncio.create_task(client.collect(live))
            await wait_until(lambda: len(held.items) == 4)
            await reading  # tokens need no room
            queues = {leg: [item for kind in kinds for item in held.items if type(item.message) is kind]
                      for leg, kinds in LEGS.items()}  # fmt: skip
            for leg in order:
                item = queues[leg].pop(0)
                for _ in range(times):
                    held.give(item)
                    await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            for item in held.items:
                held.give(item)
            assert unknown(router) == 4
            assert router.counts["rooms committed"] == 1 and router.counts["rooms failed"] == 0
            journal = await client.journal(live)
            assert journal["outcome"] == {"ok": True, "cause": None}
            assert await system.settle(1), system.counts()
            assert not system.processes["router-0"].task.done()

    run(asyncio.wait_for(main(), 120))
