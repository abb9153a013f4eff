"""Control messages that name nothing, and frames that are none: refused, counted, forgotten (virtual time)."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from collections import Counter
from typing import Any

import pytest

from kvferry.actors.links import LinkLayer
from kvferry.actors.settings import LinkSettings
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.frames import Data, Hello, encode_frame
from kvferry.protocol.messages import (
    Abort,
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
    RegisterDpRank,
    Stop,
    UnknownRoom,
)
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

CAUSE = Cause("aborted", "a room that never was")
#: What each role may be told about a room. The first row's kinds are orders: who gives one is told `UnknownRoom`.
ORDERS: dict[str, list[Any]] = {
    "prefill-0": [
        lambda room: Abort(room, CAUSE), lambda room: AbortTransfer(room, CAUSE),
        lambda room: Destination(room, (1, 2), 0, 0, b"agent", 0, (0,)),
    ],
    "decode-0": [lambda room: Abort(room, CAUSE)],
    "router-0": [
        lambda room: Opened(room, "prefill"), lambda room: Admitted(room, 3), lambda room: PrefillDone(room, 1),
        lambda room: Received(room, 0), Committed, lambda room: Failed(room, "decode", CAUSE),
        lambda room: AbortAck(room, "prefill"), lambda room: Drained(room, 0, True),
        lambda room: Progress(room, "prefill", "computed"),
    ],
}  # fmt: skip
NEWS: dict[str, list[Any]] = {
    "prefill-0": [lambda room: Stop(1, 0, room), lambda room: Progress(room, "decode", "queued"), UnknownRoom],
    "decode-0": [
        lambda room: Stop(1, 0, room), lambda room: Drained(room, 0, True), UnknownRoom,
        lambda room: Progress(room, "prefill", "computed"),
    ],
    "router-0": [UnknownRoom],
    "registry": [lambda room: RegisterDpRank(room, 1, "prefill-0"), lambda room: Drained(room, 0, True)],
}  # fmt: skip


class Stranger:
    """A process of the cluster that nobody has a room with."""

    def __init__(self, system: SimSystem) -> None:
        self.network: LinkLayer = system.network.open("stranger", LinkSettings())
        self.answers: Counter[str] = Counter()
        self.rooms: set[int] = set()

    def on_link_up(self, peer: Address) -> None: ...
    def on_exited(self, peer: Address) -> None: ...
    def on_failure(self, error: Exception) -> None: ...
    def on_link_lost(self, peer: Address, reason: object) -> None:
        raise AssertionError(f"{peer.name} has ended the link: {reason}")

    def on_message(self, peer: Address, message: Message) -> bool:
        self.answers[type(message).__name__] += 1
        if isinstance(message, UnknownRoom):
            self.rooms.add(message.room)
        return True

    async def link(self, system: SimSystem) -> None:
        await self.network.start(self)
        for process in system.processes.values():
            self.network.dial(process.address)
        await asyncio.sleep(1)


def refused(system: SimSystem) -> int:
    """All that was counted as strange, over all actors."""
    strange = ("unknown", "stray", "stops of no room", "unexpected", "refused")
    counts = [process.actor.counts for process in system.processes.values()]
    return sum(number for count in counts for name, number in count.items() if any(word in name for word in strange))


def tables(system: SimSystem) -> tuple[Any, ...]:
    registry: Any = system.processes["registry"].actor
    leaders = (system.prefill(), system.decode())
    links = [len(process.actor.network._links) for process in system.processes.values()]  # type: ignore[attr-defined]
    held = [(len(leader.rooms), leader.queues(), len(leader.outbox._tokens)) for leader in leaders]
    return held, system.router.guests, len(system.router.ended), len(registry.rooms), len(registry.table.ranks), links


@pytest.mark.parametrize("kind", ["orders", "news"])
def test_case_10_messages_for_rooms_that_never_were(kind: str) -> None:
    """Case 10: 10 000 of them, for as many rooms. Who orders something is answered UnknownRoom each time; all are
    counted; tables are as before, and memory is flat from the second half to the first."""
    told = ORDERS if kind == "orders" else NEWS
    makers = [(name, make) for name, makes in told.items() for make in makes]
    half = 5000

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            stranger = Stranger(system)
            await stranger.link(system)
            before, refused_before = tables(system), refused(system)

            async def tell(first: int) -> None:
                for number in range(first, first + half):
                    name, make = makers[number % len(makers)]
                    assert stranger.network.send(system.processes[name].address.incarnation, make((1 << 62) + number))
                    if number % 256 == 0:
                        await asyncio.sleep(0.2)
                await asyncio.sleep(2)

            await tell(0)
            answered = set(stranger.rooms)
            gc.collect()
            tracemalloc.start()
            first_bytes = tracemalloc.get_traced_memory()[0]
            stranger.rooms.clear()
            await tell(half)
            stranger.rooms.clear()
            gc.collect()
            grown_bytes = tracemalloc.get_traced_memory()[0] - first_bytes
            tracemalloc.stop()
            assert refused(system) - refused_before == 2 * half
            assert tables(system) == before
            assert grown_bytes < 100_000, "5000 rooms of 20 bytes each would show"
            if kind == "orders":
                assert answered == set(range(1 << 62, (1 << 62) + half))
                assert stranger.answers["UnknownRoom"] == 2 * half
            else:
                assert stranger.answers["UnknownRoom"] == 0

    run(main())


#: As the case has them, and as they are here: what would be a room, parts, a length, a type, a size.
BAD: dict[str, bytes] = {
    "a room that is no number": b"\x94\xa4data\x01\x00\x00",
    "too few parts": b"\x92\xa4data\x01",
    "a wrong length": b"\x95\xa4data\x01\x00\x00\xdd\xff\xff\xff\xff",
    "an unknown type": b"\x92\xa7unknown\x01",
    "10 MB": encode_frame(Data(1, 0, 0, (b"x",))) + bytes(10 * 1024 * 1024),
    "text": b"ABORT 7 127.0.0.1 4000",
    "nothing": b"",
}
BAD_MESSAGES: dict[str, bytes] = {
    "a room that is no number": b"\x83\xa4type\xa8Received\xa4room\xa1x\xa4rank\x00",
    "too few fields": b"\x82\xa4type\xa8Received\xa4room\x07",
    "a wrong length": b"\x83\xa4type\xa8Received\xa4room\xdb\xff\xff\xff\xff",
    "an unknown type": b"\x82\xa4type\xa7Unknown\xa4room\x07",
    "a negative page": b"\x88\xa4type\xabDestination\xa4room\x07\xa5pages\x91\xff",
}


def test_case_11_bad_control_frames(client_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Case 11: each is dropped and counted, each process says so once, links live, and the next request is served."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            stranger, client = Stranger(system), await client_of(system)
            await stranger.link(system)
            expected = await client.ask((1, 2, 3), max_tokens=4)
            processes = [(name, process.actor.network) for name, process in system.processes.items()]
            with caplog.at_level(logging.WARNING, "kvferry.links"):
                for _, layer in processes:
                    assert isinstance(layer, LinkLayer)
                    for _ in range(3):
                        for frame in BAD.values():
                            layer.on_bytes(b"nobody's path", frame)
                    link = stranger.network._links[layer.address.incarnation]
                    for payload in BAD_MESSAGES.values():
                        link.session.send(payload, 0.0)
                    stranger.network._after(link)
                await asyncio.sleep(2)
            for name, layer in processes:
                assert layer.counts["undecodable_frame"] == 3 * len(BAD), name
                assert layer.counts["undecodable_message"] == len(BAD_MESSAGES), name
                assert stranger.network.is_up(layer.address.incarnation), name
            lines = [record.getMessage() for record in caplog.records]
            assert len(lines) == 2 * len(processes)
            assert sum("dropped a message of 'stranger'" in line for line in lines) == len(processes)
            assert await client.ask((1, 2, 3), max_tokens=4) == expected
            assert await system.settle(10), system.counts()

    run(main())


def test_the_log_says_once_a_minute_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            layer = system.prefill().network
            assert isinstance(layer, LinkLayer)
            with caplog.at_level(logging.WARNING, "kvferry.links"):
                for _ in range(3):
                    for _ in range(100):
                        layer.on_bytes(b"nobody's path", b"\x00")
                    await asyncio.sleep(61)
            lines = [record.getMessage() for record in caplog.records]
            assert [line.rpartition(" (")[2] for line in lines[1:]] == ["100 since the last such line)"] * 2
            assert len(lines) == 3 and layer.counts["undecodable_frame"] == 300

    run(main())


def test_links_of_a_process_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hellos of ever new processes: beyond the limit they are counted, and those that are linked stay so."""
    from kvferry.actors import links

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            layer = system.decode().network
            assert isinstance(layer, LinkLayer)
            before = len(layer._links)
            monkeypatch.setattr(links, "MAX_LINKS", before + 3)
            for number in range(10, 20):
                sender = Address(f"peer-{number}", f"sim://peer-{number}", number, "elsewhere", number)
                layer.on_bytes(b"path %d" % number, encode_frame(Hello(number, sender, layer.address.incarnation, 1)))
            assert len(layer._links) == before + 3 and layer.counts["too_many_links"] == 7
            await asyncio.sleep(30)
            assert len(layer._links) == before

    run(main())
