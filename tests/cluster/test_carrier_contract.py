"""What every carrier of links must do, between real sockets, real Ray actors and real processes.

Each test is an async function that is given a `Stage`: over ZMQ it runs here, over Ray inside an actor, since frames
can only reach an actor. Links over a carrier are part of the contract: sessions survive what carriers may do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvferry.actors.carrier import Carrier
from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import LostReason
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.names import NAMESPACE
from kvferry.cluster.network import open_network
from kvferry.cluster.secret import Secret
from kvferry.cluster.zmq_carrier import ZmqCarrier
from kvferry.cluster.zmq_curve import curve_keys
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Message, Stop, Watch
from kvferry.transfer.shared import host_identity

SECRET = Secret(b"s" * 32)

#: A process that echoes every message and prints its address; it ends with its standard input.
ECHO = """
import asyncio, sys, msgspec
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.network import open_network
from kvferry.cluster.secret import Secret

class Echo:
    def on_link_up(self, peer): pass
    def on_message(self, peer, message): return self.network.send(peer.incarnation, message)
    def on_link_lost(self, peer, reason): pass
    def on_exited(self, peer): pass
    def on_failure(self, error): raise error

async def main():
    echo = Echo()
    settings = LinkSettings(heartbeat_s=0.2)
    clock, random, secret = SystemClock(), SystemRandom(), Secret(b"s" * 32)
    echo.network = await open_network("echo", "127.0.0.1", settings, clock, random, secret)
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
    """A LinkHandler that writes everything down."""

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

    def on_failure(self, error: Exception) -> None:
        self.log.put_nowait(error)

    async def next(self) -> object:
        return await asyncio.wait_for(self.log.get(), 30.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.002)


# --- two stages --------------------------------------------------------------------------------------------


class ZmqEcho:
    """An echo in a process of its own. `again` ends it, if it has not ended, and starts another in its place."""

    def __init__(self) -> None:
        self.address = Address("", "", 0, "", 0)

    async def again(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ECHO, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.address = msgspec.json.decode(await self._process.stdout.readline(), type=Address)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def bye(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


class ZmqStage:
    settings = LinkSettings()

    def __init__(self) -> None:
        self._carriers: list[Carrier] = []

    def carrier(self) -> Carrier:
        self._carriers.append(ZmqCarrier("127.0.0.1", keys=curve_keys(SECRET)))
        return self._carriers[-1]

    async def close(self) -> None:
        """Also when a scene has failed: a context with open sockets would keep whoever collects it waiting for ever."""
        for carrier in self._carriers:
            await carrier.close()

    async def echo(self) -> ZmqEcho:
        echo = ZmqEcho()
        await echo.again()
        return echo


class EchoActor:
    """The same over Ray. Its name stays when Ray starts it again."""

    def __init__(self) -> None:
        self._network: LinkLayer | None = None

    def on_link_up(self, peer: Address) -> None: ...
    def on_link_lost(self, peer: Address, reason: LostReason) -> None: ...
    def on_exited(self, peer: Address) -> None: ...
    def on_failure(self, error: Exception) -> None: ...

    def on_message(self, peer: Address, message: Message) -> bool:
        assert self._network is not None
        return self._network.send(peer.incarnation, message)

    async def address(self) -> Address:
        if self._network is None:
            settings = LinkSettings(carrier="ray", heartbeat_s=0.2)
            self._network = await open_network("echo", "127.0.0.1", settings, SystemClock(), SystemRandom())
            await self._network.start(self)
        return self._network.address

    async def bye(self) -> None:
        assert self._network is not None
        await self._network.close()
        asyncio.get_running_loop().call_later(0.1, os._exit, 0)


class RayEcho:
    def __init__(self) -> None:
        import ray

        name = f"echo-{SystemRandom().bits(32):08x}"
        self._actor = ray.remote(EchoActor).options(
            name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=1, max_task_retries=0
        ).remote()  # fmt: skip
        self.address = Address("", "", 0, "", 0)

    async def again(self) -> None:
        from ray.exceptions import RayError

        before = self.address.pid
        async with asyncio.timeout(60.0):
            while self.address.pid == before:
                try:
                    self.address = await self._actor.address.remote()
                except RayError:
                    await asyncio.sleep(0.1)

    def signal(self, number: int) -> None:
        os.kill(self.address.pid, number)

    async def bye(self) -> None:
        await self._actor.bye.remote()


class RayStage:
    settings = LinkSettings(carrier="ray")

    def carrier(self) -> Carrier:
        from kvferry.cluster.ray_carrier import RayCarrier

        return RayCarrier(SystemRandom().bits(64))

    async def echo(self) -> RayEcho:
        echo = RayEcho()
        await echo.again()
        return echo


Stage = ZmqStage | RayStage
Play = Callable[[Callable[[Stage], Awaitable[None]]], Awaitable[None]]


class StageActor:
    async def play(self, scene: Callable[[Stage], Awaitable[None]]) -> None:
        await scene(RayStage())


@pytest.fixture(scope="module")
def ray_stage() -> Iterator[Any]:
    """One Ray cluster, and in it the actor that plays the scenes."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its workers can't import a test
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        stage = ray.remote(StageActor).options(name="stage", namespace=NAMESPACE, num_cpus=0, max_concurrency=256)
        yield stage.remote()
    finally:
        ray.shutdown()


async def on_zmq(scene: Callable[[Stage], Awaitable[None]]) -> None:
    stage = ZmqStage()
    try:
        await scene(stage)
    finally:
        await stage.close()


@pytest.fixture(params=["zmq", pytest.param("ray", marks=pytest.mark.real)])
def play(request: pytest.FixtureRequest) -> Play:
    """Runs a scene on its stage."""
    if request.param == "zmq":
        return on_zmq
    actor = request.getfixturevalue("ray_stage")

    async def on_ray(scene: Callable[[Stage], Awaitable[None]]) -> None:
        await actor.play.remote(scene)

    return on_ray


# --- carriers ----------------------------------------------------------------------------------------------


async def both_ways(stage: Stage) -> None:
    listener, dialler, heard, answered = stage.carrier(), stage.carrier(), Wires(), Wires()
    listener.start(heard)
    dialler.start(answered)
    path = dialler.connect(listener.endpoint)
    count = 1000  # more than one drain, or one call, takes
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


async def breaks_show(stage: Stage) -> None:
    for who_closes in ("listener", "dialler"):
        listener, dialler, heard, answered = stage.carrier(), stage.carrier(), Wires(), Wires()
        listener.start(heard)
        dialler.start(answered)
        path = dialler.connect(listener.endpoint)
        dialler.send(path, b"hello")
        await until(lambda heard=heard: heard.bytes)  # type: ignore[misc]
        listener.send(heard.bytes[0][0], b"welcome")
        await until(lambda answered=answered: answered.bytes)  # type: ignore[misc]
        if who_closes == "listener":
            await listener.close()
            await until(lambda answered=answered: answered.down)  # type: ignore[misc]
            assert answered.down == [(path, False)]
            await dialler.close()
        else:
            await dialler.close()
            await until(lambda heard=heard: heard.down)  # type: ignore[misc]
            assert heard.down == [(heard.bytes[0][0], False)]
            await listener.close()


async def refusals(stage: Stage) -> None:
    gone = stage.carrier()
    await gone.close()
    dialler, wires = stage.carrier(), Wires()
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


async def last_words(stage: Stage) -> None:
    listener, dialler, heard = stage.carrier(), stage.carrier(), Wires()
    listener.start(heard)
    dialler.start(Wires())
    path = dialler.connect(listener.endpoint)
    dialler.send(path, b"hello")
    await until(lambda: heard.bytes)
    dialler.send(path, b"bye")
    dialler.disconnect(path)
    await until(lambda: len(heard.bytes) == 2)
    assert heard.bytes[1][1] == b"bye"
    await dialler.close()
    await listener.close()


async def overload(stage: Stage) -> None:
    """What does not fit is dropped and counted; nothing waits, nothing is raised, and the path goes on."""
    listener, dialler, heard = stage.carrier(), stage.carrier(), Wires()
    dialler.start(Wires())
    path = dialler.connect(listener.endpoint)
    counts: Counter[str] = dialler.counts  # type: ignore[attr-defined]
    count = 0
    while counts["dropped_full"] < 1000:  # how much fits is the kernel's and ZMQ's matter
        assert count < 10_000_000
        dialler.send(path, b"%d" % count)
        count += 1
    dropped = counts["dropped_full"]
    listener.start(heard)
    await until(lambda: len(heard.bytes) == count - dropped)
    numbers = [int(data) for _, data in heard.bytes]
    assert numbers == sorted(set(numbers))
    dialler.send(path, b"%d" % count)
    await until(lambda: int(heard.bytes[-1][1]) == count)
    await dialler.close()
    await listener.close()


@pytest.mark.parametrize("scene", [both_ways, breaks_show, refusals, last_words, overload])
async def test_carrier(scene: Callable[[Stage], Awaitable[None]], play: Play) -> None:
    await play(scene)


# --- links over them, between processes --------------------------------------------------------------------


async def linked(stage: Stage, settings: LinkSettings) -> tuple[ZmqEcho | RayEcho, LinkLayer, Recorder]:
    echo, recorder = await stage.echo(), Recorder()
    network = await open_network("test", "127.0.0.1", settings, SystemClock(), SystemRandom(), SECRET)
    await network.start(recorder)
    network.dial(echo.address)
    assert await recorder.next() == "up"
    network.send(echo.address.incarnation, Stop(1, 2, 3))
    assert await recorder.next() == Stop(1, 2, 3)
    return echo, network, recorder


async def killed_and_started_again(stage: Stage) -> None:
    """Lost by exit, then proven gone; who comes in its place is somebody else, whatever its name."""
    echo, network, recorder = await linked(stage, stage.settings)
    first = echo.address
    assert first.host == host_identity() and first.incarnation != network.address.incarnation
    echo.signal(signal.SIGKILL)
    assert await recorder.next() is LostReason.EXITED
    assert await recorder.next() == "exited"
    network.dial(first)
    assert await recorder.next() is LostReason.EXITED
    await echo.again()
    assert echo.address.incarnation != first.incarnation
    network.dial(echo.address)
    assert await recorder.next() == "up"
    network.send(echo.address.incarnation, Stop(4, 5, 6))
    assert await recorder.next() == Stop(4, 5, 6)
    echo.signal(signal.SIGKILL)
    assert [await recorder.next(), await recorder.next()] == [LostReason.EXITED, "exited"]
    await network.close()


async def dead_without_a_pidfd(stage: Stage) -> None:
    """Of a process on another host the kernel says nothing: the carrier shows that it is gone, well before silence."""
    echo, recorder = await stage.echo(), Recorder()
    settings = msgspec.structs.replace(stage.settings, silence_s=300.0)
    network = await open_network("test", "127.0.0.1", settings, SystemClock(), SystemRandom(), SECRET)
    network._exits._host = "elsewhere"
    await network.start(recorder)
    network.dial(echo.address)
    assert await recorder.next() == "up"
    echo.signal(signal.SIGKILL)
    assert await recorder.next() is LostReason.REFUSED
    await network.close()


async def says_bye(stage: Stage) -> None:
    echo, network, recorder = await linked(stage, stage.settings)
    await echo.bye()
    assert await recorder.next() is LostReason.CLOSED
    assert await recorder.next() == "exited"
    await network.close()


async def stopped(stage: Stage) -> None:
    """A stopped process is silent, and no exit until it ends."""
    echo, network, recorder = await linked(stage, msgspec.structs.replace(stage.settings, silence_s=2.5))
    echo.signal(signal.SIGSTOP)
    assert await recorder.next() is LostReason.SILENT
    assert recorder.log.empty()
    echo.signal(signal.SIGKILL)
    assert await recorder.next() == "exited"
    await network.close()


async def many_in_flight(stage: Stage) -> None:
    echo, network, recorder = await linked(stage, stage.settings)
    count = 4000
    for number in range(count):
        assert network.send(echo.address.incarnation, Stop(number, 0, 0))
    assert [await recorder.next() for _ in range(count)] == [Stop(number, 0, 0) for number in range(count)]
    large = "x" * 3_000_000
    assert network.send(echo.address.incarnation, Watch(large))
    assert await recorder.next() == Watch(large)
    echo.signal(signal.SIGKILL)
    await network.close()


async def test_ray_carries_only_between_named_actors() -> None:
    settings = LinkSettings(carrier="ray")
    with pytest.raises(RuntimeError, match="this process is no named Ray actor"):
        await open_network("test", "127.0.0.1", settings, SystemClock(), SystemRandom())


@pytest.mark.parametrize("scene", [killed_and_started_again, dead_without_a_pidfd, says_bye, stopped, many_in_flight])
async def test_links(scene: Callable[[Stage], Awaitable[None]], play: Play) -> None:
    await play(scene)
