"""The ZMQ carrier itself, and links over it between real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec
import pytest
import zmq

from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import LostReason
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.network import open_network
from kvferry.cluster.pidwatch import PidfdWatch, host_id
from kvferry.cluster.zmq_carrier import DRAIN_FRAMES, ZmqCarrier
from kvferry.protocol.messages import Address, Message, Stop

#: Where silence is not the point, its limit has to outlast a busy machine.
PATIENT = LinkSettings()

#: A process that echoes every message and prints its address; it ends with its standard input.
ECHO = """
import asyncio, sys, msgspec
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.network import open_network

class Echo:
    def on_link_up(self, peer): pass
    def on_message(self, peer, message): return self.network.send(peer.incarnation, message)
    def on_link_lost(self, peer, reason): pass
    def on_exited(self, peer): pass

async def main():
    echo = Echo()
    settings = LinkSettings(heartbeat_s=0.2)
    echo.network = await open_network("echo", "127.0.0.1", settings, SystemClock(), SystemRandom())
    await echo.network.start(echo)
    print(msgspec.json.encode(echo.network.address).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await echo.network.close()

asyncio.run(main())
"""


class Wires:
    """A CarrierHandler that writes everything down."""

    def __init__(self) -> None:
        self.bytes: list[tuple[bytes, bytes]] = []
        self.down: list[tuple[bytes, bool]] = []

    def on_bytes(self, path: bytes, data: bytes) -> None:
        self.bytes.append((path, data))

    def on_path_down(self, path: bytes, refused: bool) -> None:
        self.down.append((path, refused))


class Recorder:
    def __init__(self) -> None:
        self.log: asyncio.Queue[object] = asyncio.Queue()

    def on_link_up(self, peer: Address) -> None:
        self.log.put_nowait("up")

    def on_message(self, peer: Address, message: Message) -> bool:
        self.log.put_nowait(message)
        return True

    def on_link_lost(self, peer: Address, reason: LostReason) -> None:
        self.log.put_nowait(reason)

    def on_exited(self, peer: Address) -> None:
        self.log.put_nowait("exited")

    async def next(self) -> object:
        return await asyncio.wait_for(self.log.get(), 30.0)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.002)


async def test_frames_go_both_ways_on_one_path() -> None:
    listener, dialler, heard, answered = ZmqCarrier("127.0.0.1"), ZmqCarrier("127.0.0.1"), Wires(), Wires()
    listener.start(heard)
    dialler.start(answered)
    path = dialler.connect(listener.endpoint)
    count = 3 * DRAIN_FRAMES + 1  # more than one drain takes
    for number in range(count):
        dialler.send(path, b"%d" % number)
    await until(lambda: len(heard.bytes) == count)
    assert [data for _, data in heard.bytes] == [b"%d" % number for number in range(count)]
    for number in range(count):
        listener.send(heard.bytes[0][0], b"%d" % number)
    await until(lambda: len(answered.bytes) == count)
    assert answered.bytes == [(path, b"%d" % number) for number in range(count)]
    assert heard.down == answered.down == []
    await dialler.close()
    await listener.close()


async def test_a_connection_that_breaks_shows_at_both_ends() -> None:
    for who_closes in ("listener", "dialler"):
        listener, dialler, heard, answered = ZmqCarrier("127.0.0.1"), ZmqCarrier("127.0.0.1"), Wires(), Wires()
        listener.start(heard)
        dialler.start(answered)
        path = dialler.connect(listener.endpoint)
        dialler.send(path, b"hello")
        await until(lambda heard=heard: heard.bytes)
        listener.send(heard.bytes[0][0], b"welcome")
        await until(lambda answered=answered: answered.bytes)
        if who_closes == "listener":
            await listener.close()
            await until(lambda answered=answered: answered.down)
            assert answered.down == [(path, False)]
            await dialler.close()
        else:
            await dialler.close()
            await until(lambda heard=heard: heard.down)
            assert heard.down == [(heard.bytes[0][0], False)]
            await listener.close()


async def test_nobody_listening_is_a_refusal_and_a_closed_path_tells_nothing() -> None:
    gone = ZmqCarrier("127.0.0.1")
    await gone.close()
    dialler, wires = ZmqCarrier("127.0.0.1"), Wires()
    dialler.start(wires)
    path = dialler.connect(gone.endpoint)
    given_up = dialler.connect(gone.endpoint)
    dialler.disconnect(given_up)
    dialler.send(given_up, b"to nobody")
    await until(lambda: wires.down)
    await asyncio.sleep(0.05)
    assert wires.down == [(path, True)]
    await dialler.close()
    await dialler.close()


async def test_frames_of_other_shapes_are_dropped() -> None:
    listener, wires = ZmqCarrier("127.0.0.1"), Wires()
    listener.start(wires)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.ROUTING_ID, b"dialled 1")
        socket.connect(listener.endpoint)
        socket.send_multipart([b"two", b"parts"])
        socket.send(b"one part")
        await until(lambda: wires.bytes)
        assert wires.bytes == [(b"dialled 1", b"one part")]
        assert listener.counts["malformed"] == 1
    await listener.close()


async def test_a_host_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(zmq.ZMQError):
        ZmqCarrier("203.0.113.7")


async def test_the_advertised_host_is_what_others_are_told() -> None:
    carrier = ZmqCarrier("127.0.0.1", advertised_host="localhost")
    assert carrier.endpoint.startswith("tcp://localhost:")
    await carrier.close()


# --- real processes ----------------------------------------------------------------------------------------


async def with_echo(
    settings: LinkSettings = PATIENT,
) -> tuple[asyncio.subprocess.Process, Address, LinkLayer, Recorder]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ECHO, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address = msgspec.json.decode(await process.stdout.readline(), type=Address)
    recorder = Recorder()
    network = await open_network("test", "127.0.0.1", settings, SystemClock(), SystemRandom())
    await network.start(recorder)
    network.dial(address)
    assert await recorder.next() == "up"
    network.send(address.incarnation, Stop(1, 2, 3))
    assert await recorder.next() == Stop(1, 2, 3)
    return process, address, network, recorder


async def test_a_killed_process_is_lost_by_exit_and_then_proven_gone() -> None:
    process, address, network, recorder = await with_echo()
    assert (address.pid, address.host) == (process.pid, host_id())
    assert address.incarnation != network.address.incarnation
    process.kill()
    assert await recorder.next() is LostReason.EXITED
    assert await recorder.next() == "exited"
    await process.wait()
    network.dial(address)
    assert await recorder.next() is LostReason.EXITED
    await network.close()


async def test_a_process_that_says_bye_is_closed_first_and_gone_later() -> None:
    process, _, network, recorder = await with_echo()
    assert process.stdin is not None
    process.stdin.close()
    assert await recorder.next() is LostReason.CLOSED
    assert await recorder.next() == "exited"
    await process.wait()
    await network.close()


async def test_a_stopped_process_is_silent_and_no_exit_until_it_ends() -> None:
    process, _, network, recorder = await with_echo(LinkSettings(silence_s=1.5))
    process.send_signal(signal.SIGSTOP)
    assert await recorder.next() is LostReason.SILENT
    assert recorder.log.empty()
    process.kill()
    assert await recorder.next() == "exited"
    await process.wait()
    await network.close()


async def test_no_such_process_can_be_watched() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    watch, fired = PidfdWatch(), asyncio.Event()
    assert watch.watch(Address("gone", "", 1, host_id(), process.pid), fired.set) is False
    assert watch.watch(Address("us", "", 2, host_id(), os.getpid()), fired.set) is True
    await asyncio.sleep(0.01)
    assert not fired.is_set()
    watch.close()
