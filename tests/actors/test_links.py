"""The link layer: what every carrier must give (simulated and ZMQ alike), then faults on virtual time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import pytest

from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import LostReason
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.network import open_network
from kvferry.cluster.secret import Secret
from kvferry.cluster.zmq_carrier import ZmqCarrier
from kvferry.cluster.zmq_curve import curve_keys
from kvferry.protocol.address import Address
from kvferry.protocol.errors import IllegalEvent
from kvferry.protocol.frames import Hello, encode_frame
from kvferry.protocol.messages import MAX_MESSAGE_BYTES, BadFrame, Message, RegistrationRefused, Stop
from kvferry.sim.loop import run
from kvferry.sim.network import SimFaults, SimNetwork

SETTINGS = LinkSettings(heartbeat_s=0.1, silence_s=1.0, resend_s=0.05, window=64)
PATIENT = LinkSettings(window=64)


class Recorder:
    """A handler that writes down everything, echoes if told to, and is full after `room` messages."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.log: list[tuple[str, Any]] = []
        self.room = room
        self.echo: LinkLayer | None = None
        self._changed = asyncio.Event()

    def on_link_up(self, peer: Address) -> None:
        self._note("up", peer.name)

    def on_message(self, peer: Address, message: Message) -> bool:
        if len(self.messages) >= self.room:
            return False
        self._note("message", message)
        if self.echo is not None:
            self.echo.send(peer.incarnation, message)
        return True

    def on_link_lost(self, peer: Address, reason: LostReason) -> None:
        self._note("lost", reason)

    def on_exited(self, peer: Address) -> None:
        self._note("exited", peer.name)

    def on_failure(self, error: Exception) -> None:
        self._note("failure", error)

    @property
    def messages(self) -> list[Message]:
        return [what for kind, what in self.log if kind == "message"]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.log]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30.0):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_lost(self) -> LostReason:
        await self.until(lambda: "lost" in self.kinds())
        reason: LostReason = next(what for kind, what in self.log if kind == "lost")
        return reason

    def _note(self, kind: str, what: Any) -> None:
        self.log.append((kind, what))
        self._changed.set()


class World(Protocol):
    async def open(self, name: str, *, endpoint: str = "") -> LinkLayer: ...


class SimWorld:
    def __init__(self) -> None:
        self.network = SimNetwork(seed=1)

    async def open(self, name: str, *, endpoint: str = "") -> LinkLayer:
        return self.network.open(name, SETTINGS, endpoint=endpoint)


class ZmqWorld:
    """All in one process, so no exits are watched. On a real clock the silence limit has to outlast a busy machine."""

    async def open(self, name: str, *, endpoint: str = "") -> LinkLayer:
        port = int(endpoint.rsplit(":", 1)[1]) if endpoint else 0
        carrier = ZmqCarrier("127.0.0.1", port, keys=curve_keys(Secret(bytes(32))))
        random = SystemRandom()
        return LinkLayer(carrier, name, random.bits(64), PATIENT, SystemClock(), random, None, "", os.getpid())


Scenario = Callable[[World], Coroutine[Any, Any, None]]


def _on_sim(scenario: Scenario) -> None:
    run(scenario(SimWorld()))


def _on_zmq(scenario: Scenario) -> None:
    asyncio.run(scenario(ZmqWorld()))


both = pytest.mark.parametrize("carried", [_on_sim, _on_zmq], ids=["sim", "zmq"])


async def pair(world: World) -> tuple[LinkLayer, Recorder, LinkLayer, Recorder]:
    """Two processes with an open link, dialled by the first."""
    a, b, ra, rb = await world.open("a"), await world.open("b"), Recorder(), Recorder()
    await a.start(ra)
    await b.start(rb)
    a.dial(b.address)
    await ra.until(lambda: bool(ra.log))
    await rb.until(lambda: bool(rb.log))
    assert (ra.log, rb.log) == ([("up", "b")], [("up", "a")])
    return a, ra, b, rb


def stops(count: int) -> list[Message]:
    return [Stop(request=number, attempt=0, room=0) for number in range(count)]


# --- what every carrier must give --------------------------------------------------------------------------


@both
def test_ping_pong_of_a_thousand_messages(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, ra, b, rb = await pair(world)
        rb.echo = b
        for number, message in enumerate(stops(1000)):
            assert a.send(b.address.incarnation, message)
            await ra.until(lambda number=number: len(ra.messages) > number)  # type: ignore[misc]
        assert ra.messages == rb.messages == stops(1000)
        await a.close()
        await b.close()

    carried(scenario)


@both
def test_a_burst_arrives_in_order_and_dial_is_idempotent(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, ra, b, rb = await pair(world)
        for message in stops(60):
            assert a.send(b.address.incarnation, message)
            a.dial(b.address)
            b.dial(a.address)
        await rb.until(lambda: len(rb.messages) == 60)
        assert rb.messages == stops(60)
        assert ra.kinds() == ["up"]
        await a.close()
        await b.close()

    carried(scenario)


@both
def test_both_dial_at_once_and_get_one_link(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, b, ra, rb = await world.open("a"), await world.open("b"), Recorder(), Recorder()
        await a.start(ra)
        await b.start(rb)
        a.dial(b.address)
        b.dial(a.address)
        assert a.send(b.address.incarnation, stops(1)[0])
        assert b.send(a.address.incarnation, stops(1)[0])
        await ra.until(lambda: len(ra.messages) == 1)
        await rb.until(lambda: len(rb.messages) == 1)
        assert ra.kinds() == rb.kinds() == ["up", "message"]
        await a.close()
        await b.close()

    carried(scenario)


@both
def test_drop_ends_the_session_at_both_and_a_new_dial_opens_another(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, ra, b, rb = await pair(world)
        assert a.send(b.address.incarnation, stops(1)[0])  # still delivered: it was queued before the drop
        a.drop(b.address.incarnation)
        assert not a.is_up(b.address.incarnation)
        assert a.send(b.address.incarnation, stops(1)[0]) is False
        assert ra.kinds() == ["up"]  # told in a turn of its own
        await rb.until_lost()  # a dial at once may overtake the last words on its own connection
        a.dial(b.address)
        await rb.until(lambda: len(rb.log) == 4)
        await ra.until(lambda: len(ra.log) == 3)
        assert ra.log == [("up", "b"), ("lost", LostReason.CLOSED), ("up", "b")]
        assert rb.log == [("up", "a"), ("message", stops(1)[0]), ("lost", LostReason.CLOSED), ("up", "a")]
        await a.close()
        assert a.send(b.address.incarnation, stops(1)[0]) is False
        await b.close()

    carried(scenario)


@both
def test_a_full_mailbox_ends_the_session_at_both(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, ra, b, rb = await pair(world)
        rb.room = 3
        for message in stops(10):
            a.send(b.address.incarnation, message)
        assert await ra.until_lost() is LostReason.OVERFLOW
        assert await rb.until_lost() is LostReason.OVERFLOW
        assert rb.messages == stops(3)
        await a.close()
        await b.close()

    carried(scenario)


@both
def test_a_full_window_ends_the_session_and_send_does_not_wait(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, ra, b, rb = await pair(world)
        sent = [a.send(b.address.incarnation, message) for message in stops(65)]
        assert sent == [True] * 64 + [False]
        assert await ra.until_lost() is LostReason.OVERFLOW
        assert await rb.until_lost() is LostReason.OVERFLOW
        await a.close()
        await b.close()

    carried(scenario)


@both
def test_a_dial_to_an_endpoint_where_nobody_listens_is_refused(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        gone, a, ra = await world.open("gone"), await world.open("a"), Recorder()
        await gone.close()
        address = Address("gone", gone.address.endpoint, gone.address.incarnation, "another host", 1)
        await a.start(ra)
        a.dial(address)
        assert a.send(address.incarnation, stops(1)[0])
        assert await ra.until_lost() is LostReason.REFUSED
        assert ra.kinds() == ["lost"]
        await a.close()

    carried(scenario)


@both
def test_another_incarnation_at_the_endpoint_says_so(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, ra, b, _ = await pair(world)
        await b.close()
        assert await ra.until_lost() is LostReason.CLOSED
        ra.log.clear()
        successor = await world.open("b", endpoint=b.address.endpoint)
        await successor.start(Recorder())
        before = Address("b", b.address.endpoint, b.address.incarnation ^ 1, "another host", 1)
        a.dial(before)
        assert await ra.until_lost() is LostReason.REPLACED
        await a.close()
        await successor.close()

    carried(scenario)


@both
def test_garbage_is_counted_and_creates_nothing(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, ra, b, rb = await pair(world)
        path = a._carrier.connect(b.address.endpoint)
        for data in (b"\xc1", b"garbage", bytes(100)):
            a._carrier.send(path, data)
        assert a.send(b.address.incarnation, stops(1)[0])
        async with asyncio.timeout(30.0):
            while b.counts["undecodable_frame"] < 3:
                await asyncio.sleep(0.01)
        await rb.until(lambda: len(rb.messages) == 1)
        assert ra.kinds() == ["up"]
        assert rb.kinds() == ["up", "message"]
        await a.close()
        await b.close()

    carried(scenario)


@both
def test_local_mistakes_are_refused(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a = await world.open("a")
        with pytest.raises(IllegalEvent, match="not started"):
            a.dial(Address("b", "sim://b", 1, "", 0))
        await a.start(Recorder())
        with pytest.raises(IllegalEvent, match="once"):
            await a.start(Recorder())
        with pytest.raises(IllegalEvent, match="itself"):
            a.dial(a.address)
        assert a.send(12345, stops(1)[0]) is False
        await a.close()
        await a.close()

    carried(scenario)


@both
def test_a_message_over_the_size_limit_is_refused_and_one_below_it_arrives(carried: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, ra, b, rb = await pair(world)
        with pytest.raises(BadFrame, match=str(MAX_MESSAGE_BYTES)):
            a.send(b.address.incarnation, RegistrationRefused("x" * MAX_MESSAGE_BYTES, retry=False))
        large = RegistrationRefused("x" * (MAX_MESSAGE_BYTES - 100), retry=False)
        assert a.send(b.address.incarnation, large)
        await rb.until(lambda: len(rb.messages) == 1)
        assert rb.messages == [large]
        assert ra.kinds() == ["up"]
        await a.close()
        await b.close()

    carried(scenario)


# --- faults, on virtual time -------------------------------------------------------------------------------


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def sim_pair(
    sim: SimNetwork, hosts: tuple[str, str] = ("h", "h")
) -> tuple[LinkLayer, Recorder, LinkLayer, Recorder]:
    a, b, ra, rb = sim.open("a", SETTINGS, hosts[0]), sim.open("b", SETTINGS, hosts[1]), Recorder(), Recorder()
    await a.start(ra)
    await b.start(rb)
    a.dial(b.address)
    await ra.until(lambda: bool(ra.log))
    await rb.until(lambda: bool(rb.log))
    return a, ra, b, rb


@pytest.mark.parametrize("seed", range(25))
def test_loss_repetition_and_reordering_are_the_sessions_to_survive(seed: int) -> None:
    async def main() -> tuple[float, list[tuple[str, Any]]]:
        sim = SimNetwork(seed, SimFaults(drop_rate=0.2, duplicate_rate=0.3, reorder_rate=0.3, reorder_s=0.1))
        a, b, ra, rb = sim.open("a", SETTINGS), sim.open("b", SETTINGS), Recorder(), Recorder()
        await a.start(ra)
        await b.start(rb)
        a.dial(b.address)
        b.dial(a.address)  # the late Hello of the session that gave way must do no harm
        for number, message in enumerate(stops(200)):
            assert a.send(b.address.incarnation, message) and b.send(a.address.incarnation, message)
            if number % 50 == 25:
                sim.break_paths(a.address, b.address)
            await asyncio.sleep(0.02)
        await asyncio.sleep(5.0)
        assert ra.log == [("up", "b"), *(("message", m) for m in stops(200))]
        assert rb.log == [("up", "a"), *(("message", m) for m in stops(200))]
        assert a.is_up(b.address.incarnation) and b.is_up(a.address.incarnation)
        return now_s(), ra.log

    assert run(main()) == run(main())  # and equal seeds give equal runs


def test_a_cut_is_noticed_at_both_within_the_silence_limit_and_healing_allows_a_new_session() -> None:
    async def main() -> None:
        sim = SimNetwork(3)
        a, ra, b, rb = await sim_pair(sim, ("h1", "h2"))
        await asyncio.sleep(2.0)
        sim.cut(a.address, b.address)
        cut_at_s = now_s()
        assert await ra.until_lost() is LostReason.SILENT
        assert await rb.until_lost() is LostReason.SILENT
        assert 0.8 < now_s() - cut_at_s < 1.1
        a.dial(b.address)  # into the cut: nobody refuses, so silence has to end it
        dialled_at_s = now_s()
        await ra.until(lambda: ra.kinds() == ["up", "lost", "lost"])
        assert now_s() - dialled_at_s == pytest.approx(1.0, abs=0.01)
        sim.heal(a.address, b.address)
        b.dial(a.address)
        await ra.until(lambda: ra.kinds()[-1] == "up")
        await rb.until(lambda: rb.kinds() == ["up", "lost", "up"])

    run(main())


def test_a_kill_on_this_host_is_an_exit_and_the_order_of_callbacks_holds() -> None:
    async def main() -> None:
        sim = SimNetwork(4)
        a, ra, b, _ = await sim_pair(sim)
        assert b.send(a.address.incarnation, stops(1)[0])
        await asyncio.sleep(0.5)
        sim.kill(b.address)
        killed_at_s = now_s()
        await ra.until(lambda: len(ra.log) == 4)
        assert ra.log == [("up", "b"), ("message", stops(1)[0]), ("lost", LostReason.EXITED), ("exited", "b")]
        assert now_s() - killed_at_s < 0.01
        a.dial(b.address)
        await ra.until(lambda: len(ra.log) == 5)
        assert ra.log[4] == ("lost", LostReason.EXITED)

    run(main())


def test_a_kill_on_another_host_is_a_refusal_and_no_proof() -> None:
    async def main() -> None:
        sim = SimNetwork(5)
        a, ra, b, _ = await sim_pair(sim, ("h1", "h2"))
        await asyncio.sleep(0.5)
        sim.kill(b.address)
        killed_at_s = now_s()
        assert await ra.until_lost() is LostReason.REFUSED
        assert now_s() - killed_at_s < 0.01
        await asyncio.sleep(60.0)
        assert ra.kinds() == ["up", "lost"]
        await a.close()

    run(main())


def test_a_stopped_process_is_silent_not_exited_and_its_exit_comes_when_it_ends() -> None:
    async def main() -> None:
        sim = SimNetwork(6)
        _, ra, b, rb = await sim_pair(sim)
        await asyncio.sleep(0.5)
        sim.stop(b.address)
        assert await ra.until_lost() is LostReason.SILENT
        await asyncio.sleep(30.0)
        assert ra.kinds() == ["up", "lost"]
        sim.resume(b.address)
        await rb.until(lambda: "lost" in rb.kinds())
        await asyncio.sleep(5.0)
        assert ra.kinds() == ["up", "lost"]
        sim.kill(b.address)
        await ra.until(lambda: len(ra.log) == 3)
        assert ra.log == [("up", "b"), ("lost", LostReason.SILENT), ("exited", "b")]

    run(main())


def test_a_short_stop_is_survived_and_nothing_is_lost() -> None:
    async def main() -> None:
        sim = SimNetwork(7)
        a, ra, b, rb = await sim_pair(sim)
        sim.stop(b.address)
        for message in stops(20):
            assert a.send(b.address.incarnation, message)
        await asyncio.sleep(0.5)
        assert rb.messages == []
        sim.resume(b.address)
        await asyncio.sleep(0.5)
        assert rb.messages == stops(20)
        assert ra.kinds() == ["up"]

    run(main())


def test_a_process_that_ended_before_we_looked_is_an_exit_too() -> None:
    """The Hello of a process that has died since: its pid is free, and that is proof."""

    async def main() -> None:
        sim = SimNetwork(8, SimFaults(latency_s=(0.01, 0.01)))
        a, b, ra = sim.open("a", SETTINGS), sim.open("b", SETTINGS), Recorder()
        await a.start(ra)
        await b.start(Recorder())
        b.dial(a.address)
        await asyncio.sleep(0.005)
        sim.kill(b.address)
        await ra.until(lambda: len(ra.log) == 3)
        assert ra.log == [("up", "b"), ("lost", LostReason.EXITED), ("exited", "b")]
        await asyncio.sleep(10.0)
        assert len(ra.log) == 3

    run(main())


def test_a_successor_at_the_endpoint_replaces_a_peer_of_another_host() -> None:
    async def main() -> None:
        sim = SimNetwork(9)
        a, ra, b, _ = await sim_pair(sim, ("h1", "h2"))
        await asyncio.sleep(0.5)
        sim.kill(b.address)
        successor = sim.open("b", SETTINGS, "h2")
        await successor.start(Recorder())
        assert await ra.until_lost() is LostReason.REPLACED
        assert not successor.is_up(a.address.incarnation)

    run(main())


def test_one_end_that_gave_up_and_dials_again_ends_the_old_session_at_the_other_first() -> None:
    async def main() -> None:
        sim = SimNetwork(10)
        a, ra, b, rb = await sim_pair(sim)
        sim.cut(a.address, b.address)
        a.drop(b.address.incarnation)  # its Bye is lost
        await asyncio.sleep(0.1)
        sim.heal(a.address, b.address)
        a.dial(b.address)
        assert a.send(b.address.incarnation, stops(1)[0])
        await rb.until(lambda: bool(rb.messages))
        assert rb.log == [("up", "a"), ("lost", LostReason.CLOSED), ("up", "a"), ("message", stops(1)[0])]
        assert ra.log == [("up", "b"), ("lost", LostReason.CLOSED), ("up", "b")]

    run(main())


def test_a_handler_that_raises_does_not_stop_the_links() -> None:
    async def main() -> None:
        sim = SimNetwork(11)
        a, _, b, rb = await sim_pair(sim)
        reported: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(str(context["exception"])))

        def broken(peer: Address, message: Message) -> bool:
            del rb.on_message  # type: ignore[method-assign]
            raise ArithmeticError("a mistake of the actor")

        rb.on_message = broken  # type: ignore[method-assign]
        for message in stops(3):
            a.send(b.address.incarnation, message)
        await asyncio.sleep(0.5)
        assert reported == ["a mistake of the actor"]
        assert rb.messages == stops(3)[1:]

    run(main())


def test_a_timer_that_fails_is_told_and_those_of_the_other_links_go_on() -> None:
    async def main() -> None:
        sim = SimNetwork(12)
        a, b, c = (sim.open(name, SETTINGS) for name in "abc")
        ra = Recorder()
        for layer, recorder in ((a, ra), (b, Recorder()), (c, Recorder())):
            await layer.start(recorder)
        for layer in (b, c):
            a.dial(layer.address)
        await ra.until(lambda: ra.kinds() == ["up", "up"])
        mistake = ArithmeticError("a mistake of the session")

        def broken(now_s: float) -> None:
            raise mistake

        a._links[b.address.incarnation].session.tick = broken  # type: ignore[method-assign]
        sim.cut(a.address, c.address)
        assert await ra.until_lost() is LostReason.SILENT
        assert ("failure", mistake) in ra.log and not a.is_up(c.address.incarnation)

    run(main())


def test_open_network_tells_its_address_before_it_starts() -> None:
    async def main() -> None:
        network = await open_network("n", "127.0.0.1", SETTINGS, SystemClock(), SystemRandom(), Secret(bytes(32)))
        assert network.address.name == "n"
        assert network.address.endpoint.startswith("tcp://127.0.0.1:")
        assert network.address.pid == os.getpid()
        await network.close()

    asyncio.run(main())


def test_a_session_of_two_peers_is_one_peers() -> None:
    """Its number is drawn at random: who says Hello with one that another peer holds gets nothing, and ends nothing."""

    async def main() -> None:
        world = SimNetwork(seed=1)
        layer = world.open("a", SETTINGS)
        await layer.start(Recorder())
        first, second = (Address(f"peer-{n}", f"sim://peer-{n}", n, "elsewhere", n) for n in (5, 6))
        for sender in (first, second):
            layer.on_bytes(b"path of %d" % sender.pid, encode_frame(Hello(77, sender, layer.address.incarnation, 1)))
        assert layer.is_up(5) and not layer.is_up(6) and layer.counts["impossible_hello"] == 1
        await asyncio.sleep(3 * SETTINGS.silence_s)
        assert not layer.is_up(5)
        layer.on_bytes(b"path of 6", encode_frame(Hello(78, second, layer.address.incarnation, 2)))
        assert layer.is_up(6)
        await asyncio.sleep(3 * SETTINGS.silence_s)
        assert not layer.is_up(6), "the timers still run"
        await layer.close()

    run(main())
