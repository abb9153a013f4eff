"""Who may connect to an encrypted carrier, over real sockets; the rest is in the carriers' contract."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest
import zmq

from kvferry.actors.links import LinkLayer
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.network import open_network, secret_of
from kvferry.cluster.secret import Secret
from kvferry.cluster.zmq_carrier import ZmqCarrier
from kvferry.cluster.zmq_curve import CurveKeys, KeyPair, curve_keys
from kvferry.protocol.frames import MAX_FRAME_BYTES

OURS, OTHERS = curve_keys(Secret(b"a" * 32)), curve_keys(Secret(b"b" * 32))


def stranger() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


class Wires:
    """A CarrierHandler that writes everything down."""

    def __init__(self) -> None:
        self.bytes: list[tuple[bytes, bytes]] = []
        self.down: list[tuple[bytes, bool]] = []

    def on_bytes(self, path: bytes, data: bytes) -> None:
        self.bytes.append((path, data))

    def on_path_down(self, path: bytes, refused: bool) -> None:
        self.down.append((path, refused))


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30.0):
        while not holds():
            await asyncio.sleep(0.002)


class Stage:
    def __init__(self) -> None:
        self._carriers: list[ZmqCarrier] = []

    def carrier(self, keys: CurveKeys | None) -> tuple[ZmqCarrier, Wires]:
        carrier, wires = ZmqCarrier("127.0.0.1", keys=keys), Wires()
        carrier.start(wires)
        self._carriers.append(carrier)
        return carrier, wires

    async def close(self) -> None:
        for carrier in self._carriers:
            await carrier.close()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    await stage.close()


def test_keys_come_from_the_secret_alone() -> None:
    """Equal secrets give equal keys, in Z85 of 40 characters; none is shown, and no two are the same."""
    again = curve_keys(Secret(b"a" * 32))
    assert again == OURS
    pairs = [OURS.listener, OURS.dialler, OTHERS.listener, OTHERS.dialler]
    assert len({pair.secret for pair in pairs} | {pair.public for pair in pairs}) == 8
    for pair in pairs:
        assert len(pair.public) == len(pair.secret) == 40 and zmq.curve_public(pair.secret) == pair.public
        assert pair.secret.decode() not in repr(pair)


#: Who dials, and why it is a stranger.
STRANGERS: dict[str, CurveKeys | None] = {
    "without encryption": None,
    "of another cluster": OTHERS,
    "knows the listener's public key, and has a key of its own": CurveKeys(OURS.listener, stranger()),
    "knows both public keys, and no secret one": CurveKeys(
        OURS.listener, KeyPair(OURS.dialler.public, stranger().secret)
    ),
    "takes another listener for ours": CurveKeys(OTHERS.listener, OURS.dialler),
}


@pytest.mark.parametrize("who", STRANGERS)
async def test_strangers_get_nothing_through(who: str, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Not a frame arrives, every try is counted, the log has one line, and members are served meanwhile."""
    (listener, heard), (intruder, told) = stage.carrier(OURS), stage.carrier(STRANGERS[who])
    tries = 5
    with caplog.at_level(logging.WARNING, "kvferry.links"):
        for _ in range(tries):
            intruder.send(intruder.connect(listener.endpoint), b"let me in")
        await until(lambda: listener.counts["handshakes_failed"] >= tries and len(told.down) == tries)
    assert [refused for _, refused in told.down] == [False] * tries
    assert heard.bytes == []
    lines = [record.getMessage() for record in caplog.records if listener.endpoint in record.getMessage()]
    assert sum("refused a connection" in line for line in lines) == 1
    member, _ = stage.carrier(OURS)
    member.send(member.connect(listener.endpoint), b"one of us")
    await until(lambda: heard.bytes)
    assert [data for _, data in heard.bytes] == [b"one of us"]


async def test_a_member_talks_to_no_stranger(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A listener without the cluster's secret hears nothing from us, and we say once what that may be."""
    for keys in (None, OTHERS):
        (impostor, heard), (member, told) = stage.carrier(keys), stage.carrier(OURS)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvferry.links"):
            for _ in range(3):
                member.send(member.connect(impostor.endpoint), b"confidential")
            await until(lambda told=told: len(told.down) == 3)  # type: ignore[misc]
        assert heard.bytes == [] and member.counts["handshakes_failed"] == 3
        assert sum("same cluster secret" in record.getMessage() for record in caplog.records) == 1


async def test_what_is_said_does_not_show_on_the_wire(stage: Stage) -> None:
    """A relay between the two sees every byte."""
    listener, heard = stage.carrier(OURS)
    member, _ = stage.carrier(OURS)
    seen = bytearray()
    host, _, port = listener.endpoint.removeprefix("tcp://").rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, int(port))

        async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                seen.extend(data)
                target.write(data)

        await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    member.send(member.connect(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"), b"the prompt's tokens" * 20)
    await until(lambda: heard.bytes)
    assert heard.bytes[0][1] == b"the prompt's tokens" * 20
    assert len(seen) > 380 and b"tokens" not in seen and b"CURVE" in seen
    await member.close()
    await listener.close()
    server.close()


@pytest.mark.parametrize("keys", [OURS, None], ids=["curve", "plain"])
async def test_a_frame_of_the_largest_size_passes_and_no_larger_one(keys: CurveKeys | None, stage: Stage) -> None:
    """ZMQ itself ends the connection of who sends more, before it is read whole; the others notice nothing."""
    (listener, heard), (member, _), (other, told) = stage.carrier(keys), stage.carrier(keys), stage.carrier(keys)
    path = member.connect(listener.endpoint)
    member.send(path, bytes(MAX_FRAME_BYTES))
    await until(lambda: heard.bytes)
    assert len(heard.bytes.pop()[1]) == MAX_FRAME_BYTES
    other.send(other.connect(listener.endpoint), bytes(10 * 1024 * 1024))
    await until(lambda: told.down)
    member.send(path, b"after it")
    await until(lambda: heard.bytes)
    assert [data for _, data in heard.bytes] == [b"after it"]


async def test_links_are_encrypted_unless_a_setting_says_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    async def opened(settings: LinkSettings, secret: Secret | None) -> LinkLayer:
        return await open_network("n", "127.0.0.1", settings, SystemClock(), SystemRandom(), secret)

    with pytest.raises(RuntimeError, match=r"links\.encrypted is true, and no secret was given"):
        await opened(LinkSettings(), None)
    with caplog.at_level(logging.WARNING, "kvferry.links"):
        await (await opened(LinkSettings(), Secret(bytes(32)))).close()
        assert caplog.records == []
        await (await opened(LinkSettings(encrypted=False), None)).close()
    assert [record.getMessage() for record in caplog.records] == [
        "n: links.encrypted is false; whoever reaches its port can read and write its links"
    ]
    assert secret_of(LinkSettings(encrypted=False), "/nowhere") is secret_of(LinkSettings(carrier="ray"), "/no") is None
