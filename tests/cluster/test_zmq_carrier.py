"""What is ZMQ's own in its carrier, and the pidfd; what every carrier must do is in test_carrier_contract.py."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
import zmq

from kvferry.cluster.pidwatch import PidfdWatch
from kvferry.cluster.zmq_carrier import ZmqCarrier
from kvferry.protocol.address import Address
from kvferry.transfer.shared import host_identity


class Wires:
    """A CarrierHandler that keeps the frames."""

    def __init__(self) -> None:
        self.bytes: list[tuple[bytes, bytes]] = []

    def on_bytes(self, path: bytes, data: bytes) -> None:
        self.bytes.append((path, data))

    def on_path_down(self, path: bytes, refused: bool) -> None:
        raise AssertionError("no path goes down here")


async def test_frames_of_other_shapes_are_dropped() -> None:
    listener, wires = ZmqCarrier("127.0.0.1"), Wires()
    listener.start(wires)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.ROUTING_ID, b"dialled 1")
        socket.connect(listener.endpoint)
        socket.send_multipart([b"two", b"parts"])
        socket.send(b"one part")
        async with asyncio.timeout(30.0):
            while not wires.bytes:
                await asyncio.sleep(0.002)
        assert wires.bytes == [(b"dialled 1", b"one part")]
        assert listener.counts["malformed"] == 1
    await listener.close()


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:99999",
                 "inproc://zeromq.zap.01", "ipc:///tmp/x", "ray://n/a/1", "tcp://a b:1", "tcp://\0:1"],
)  # fmt: skip
async def test_what_is_no_endpoint_is_a_path_that_is_refused(endpoint: str) -> None:
    """It may be a peer's word, so nothing is raised; the carrier goes on."""
    down: list[tuple[bytes, bool]] = []

    class Told(Wires):
        def on_path_down(self, path: bytes, refused: bool) -> None:
            down.append((path, refused))

    carrier, other, heard = ZmqCarrier("127.0.0.1"), ZmqCarrier("127.0.0.1"), Wires()
    carrier.start(Told())
    other.start(heard)
    path = carrier.connect(endpoint)
    carrier.send(path, b"x")
    async with asyncio.timeout(30.0):
        while not down:
            await asyncio.sleep(0.002)
    assert down == [(path, True)]
    carrier.send(carrier.connect(other.endpoint), b"y")
    async with asyncio.timeout(30.0):
        while not heard.bytes:
            await asyncio.sleep(0.002)
    await carrier.close()
    await other.close()


async def test_a_host_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(zmq.ZMQError):
        ZmqCarrier("203.0.113.7")


async def test_the_advertised_host_is_what_others_are_told() -> None:
    carrier = ZmqCarrier("127.0.0.1", advertised_host="localhost")
    assert carrier.endpoint.startswith("tcp://localhost:")
    await carrier.close()


async def test_no_such_process_can_be_watched() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    watch, fired = PidfdWatch(), asyncio.Event()
    assert watch.watch(Address("gone", "", 1, host_identity(), process.pid), fired.set) is False
    assert watch.watch(Address("us", "", 2, host_identity(), os.getpid()), fired.set) is True
    await asyncio.sleep(0.01)
    assert not fired.is_set()
    watch.close()


async def test_a_watched_process_is_killed_by_its_pidfd_though_it_is_stopped() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
    watch, ended = PidfdWatch(), asyncio.Event()
    address = Address("it", "", 1, host_identity(), process.pid)
    assert watch.watch(address, ended.set) is True
    process.send_signal(signal.SIGSTOP)
    watch.kill(Address("another one that had this pid", "", 2, host_identity(), process.pid))
    await asyncio.sleep(0.05)
    assert not ended.is_set()
    watch.kill(address)
    await asyncio.wait_for(ended.wait(), 30)
    assert await process.wait() == -signal.SIGKILL
    watch.kill(address)  # late: nobody is hit
    watch.close()
