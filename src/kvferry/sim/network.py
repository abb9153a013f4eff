"""A network in one process: seeded latency, and faults on demand, under the production `LinkLayer`.

`SimNetwork.open` makes the links of one simulated process. Processes on equal `host` see each other's exits through a
simulated pidfd. A killed process neither sends, receives nor wakes up again (its clock stops); its tasks are for the
test to cancel. A stopped one holds what it sends and what comes for it until it is resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvferry.actors.carrier import CarrierHandler, Path
from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import Timer
from kvferry.actors.settings import LinkSettings
from kvferry.protocol.address import Address
from kvferry.sim.loop import SeededRandom, VirtualClock


@dataclass
class SimFaults:
    """Rates from 0 to 1, seconds. A reordered frame is late by up to `reorder_s`; others keep their path's order."""

    latency_s: tuple[float, float] = (0.0001, 0.0003)
    drop_rate: float = 0.0
    duplicate_rate: float = 0.0
    reorder_rate: float = 0.0
    reorder_s: float = 0.05
    exit_notice_s: float = 0.001


@dataclass(eq=False)
class _Pipe:
    """One dialled connection: the same path name at both ends."""

    path: Path
    dialler: SimCarrier
    listener: SimCarrier | None
    last_at_s: dict[int, float] = field(default_factory=dict)  # by receiving process: arrival of its last frame

    def other(self, end: SimCarrier) -> SimCarrier | None:
        return self.listener if end is self.dialler else self.dialler


class SimNetwork:
    """The hub. Equal seeds and equal calls give equal runs."""

    def __init__(self, seed: int, faults: SimFaults | None = None) -> None:
        self.faults = faults or SimFaults()
        self.random = SeededRandom(seed)
        self._processes: dict[str, SimCarrier] = {}  # the latest at each endpoint
        self._by_incarnation: dict[int, SimCarrier] = {}
        self._pipes: dict[Path, _Pipe] = {}
        self._cuts: set[frozenset[str]] = set()
        self._made = 0
        self._clock = VirtualClock()
        #: Ends a process that another one has killed: whoever made it has more to end than its sockets.
        self.killer: Callable[[int], None] = lambda incarnation: self._by_incarnation[incarnation].end()

    def open(self, name: str, settings: LinkSettings, host: str = "sim", endpoint: str = "") -> LinkLayer:
        """Start a process. At the endpoint of a process that was killed it is that one's successor."""
        carrier = self.carrier(endpoint or f"sim://{name}")
        incarnation = self.random.bits(64)
        self._by_incarnation[incarnation] = carrier
        pid_watch = SimPidWatch(self, carrier)
        return LinkLayer(
            carrier, name, incarnation, settings, carrier.clock, self.random, pid_watch, host, carrier.pid
        )  # fmt: skip

    def carrier(self, endpoint: str) -> SimCarrier:
        """A process's bare sockets. Raises ValueError while a live process holds the endpoint."""
        holder = self._processes.get(endpoint)
        if holder is not None and not holder.ended:
            raise ValueError(f"endpoint {endpoint}: held by a live process")
        self._made += 1
        carrier = self._processes[endpoint] = SimCarrier(self, endpoint, pid=1000 + self._made)
        return carrier

    def clock(self, address: Address) -> SimClock:
        """The clock of a process: it stands still while the process is stopped, for good once it is killed."""
        return self._by_incarnation[address.incarnation].clock

    # --- faults ---------------------------------------------------------------------------------------------

    def cut(self, a: Address, b: Address) -> None:
        """Lose everything between two endpoints, silently, until healed."""
        self._cuts.add(frozenset((a.endpoint, b.endpoint)))

    def heal(self, a: Address, b: Address) -> None:
        self._cuts.discard(frozenset((a.endpoint, b.endpoint)))

    def kill(self, address: Address) -> None:
        """End the process: its connections break, later dials are refused, and its pidfds fire a little later."""
        self._by_incarnation[address.incarnation].end()

    def stop(self, address: Address) -> None:
        self._by_incarnation[address.incarnation].stop()

    def resume(self, address: Address) -> None:
        self._by_incarnation[address.incarnation].resume()

    def is_stopped(self, address: Address) -> bool:
        return self._by_incarnation[address.incarnation].stopped

    def break_paths(self, a: Address, b: Address) -> None:
        """Break every connection between two processes, once; both live on and may connect again."""
        ends = {self._by_incarnation[a.incarnation], self._by_incarnation[b.incarnation]}
        for pipe in list(self._pipes.values()):
            if {pipe.dialler, pipe.listener} == ends:
                self.break_pipe(pipe)

    # --- for carriers ---------------------------------------------------------------------------------------

    def process(self, incarnation: int) -> SimCarrier | None:
        return self._by_incarnation.get(incarnation)

    def make_pipe(self, dialler: SimCarrier, endpoint: str) -> _Pipe:
        self._made += 1
        listener = self._processes.get(endpoint)
        if listener is not None and listener.ended:
            listener = None
        pipe = _Pipe(b"pipe%d" % self._made, dialler, listener)
        self._pipes[pipe.path] = pipe
        if listener is None and frozenset((dialler.endpoint, endpoint)) not in self._cuts:
            self.later(partial(dialler.path_down, pipe.path, refused=True))
        return pipe

    def break_pipe(self, pipe: _Pipe, by: SimCarrier | None = None) -> None:
        """Take the connection down; its ends learn it, except `by`."""
        if self._pipes.pop(pipe.path, None) is None:
            return
        for end in (pipe.dialler, pipe.listener):
            if end is not None and end is not by:
                self.later(partial(end.path_down, pipe.path, refused=False))

    def carry(self, sender: SimCarrier, path: Path, data: bytes) -> None:
        pipe = self._pipes.get(path)
        receiver = pipe.other(sender) if pipe is not None else None
        if pipe is None or receiver is None:
            return
        if self._cuts and frozenset((sender.endpoint, receiver.endpoint)) in self._cuts:
            return
        faults, draw = self.faults, self.random.draw
        for _ in range(2 if draw() < faults.duplicate_rate else 1):
            if draw() >= faults.drop_rate:
                self._deliver(pipe, receiver, data)

    def pipes_of(self, end: SimCarrier) -> list[_Pipe]:
        return [pipe for pipe in self._pipes.values() if end in (pipe.dialler, pipe.listener)]

    def later(self, do: Callable[[], None], delay_s: float | None = None) -> None:
        low_s, high_s = self.faults.latency_s
        wait_s = self.random.between(low_s, high_s) if delay_s is None else delay_s
        self._clock.call_later(wait_s, do)

    def _deliver(self, pipe: _Pipe, receiver: SimCarrier, data: bytes) -> None:
        loop, faults, draw = self._clock.known or self._clock.loop, self.faults, self.random.draw
        low_s, high_s = faults.latency_s
        arrival_s = loop.time() + (low_s + (high_s - low_s) * draw())
        if draw() < faults.reorder_rate:
            arrival_s += faults.reorder_s * draw()
        else:
            # Strictly later: timers of equal times run in no particular order.
            arrival_s = max(arrival_s, pipe.last_at_s.get(receiver.pid, 0.0) + 1e-9)
            pipe.last_at_s[receiver.pid] = arrival_s
        loop.call_at(arrival_s, receiver.arrived, pipe.path, data)


class SimClock(VirtualClock):
    """The clock of one simulated process."""

    __slots__ = ("_process",)

    def __init__(self, process: SimCarrier) -> None:
        super().__init__()
        self._process = process

    @property
    def running(self) -> asyncio.Event:
        """Set while the process runs."""
        return self._process.is_running

    async def sleep(self, duration_s: float) -> None:
        await VirtualClock.sleep(self, duration_s)
        if not self._process.is_running.is_set():
            await self._process.running()

    def call_later(self, delay_s: float, do: Callable[[], None]) -> Timer:
        return (self.known or self.loop).call_later(delay_s, self._process.timed_out, do)


class SimCarrier:
    """`kvferry.actors.carrier.Carrier` of one simulated process."""

    def __init__(self, network: SimNetwork, endpoint: str, pid: int) -> None:
        self._network, self._endpoint, self.pid = network, endpoint, pid
        self.clock = SimClock(self)
        self.ended = False
        self._handler: CarrierHandler | None = None
        self._held: list[Callable[[], None]] | None = None  # what a stopped process has to do when it goes on
        self._held_timers: list[Callable[[], None]] = []  # and after that: a loop looks at its sockets first
        self.is_running = asyncio.Event()
        self.is_running.set()
        self._on_exit: list[Callable[[], None]] = []

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def start(self, handler: CarrierHandler) -> None:
        self._handler = handler

    def connect(self, endpoint: str) -> Path:
        return self._network.make_pipe(self, endpoint).path

    def send(self, path: Path, data: bytes) -> None:
        if self._held is not None:
            self.do(partial(self._network.carry, self, path, data))
        elif not self.ended:
            self._network.carry(self, path, data)

    def disconnect(self, path: Path) -> None:
        # After the frames that are on their way, as a socket with a linger time does it.
        low_s, high_s = self._network.faults.latency_s
        for pipe in self._network.pipes_of(self):
            if pipe.path == path and pipe.dialler is self:
                self._network.later(partial(self._network.break_pipe, pipe, by=self), low_s + high_s)

    async def close(self) -> None:
        """As a process that closes its sockets and then ends."""
        self.end()

    # --- called by the network ------------------------------------------------------------------------------

    def arrived(self, path: Path, data: bytes) -> None:
        if self._handler is None or self.ended:
            return
        if self._held is not None:
            self._held.append(partial(self._handler.on_bytes, path, data))
        else:
            self._handler.on_bytes(path, data)

    def path_down(self, path: Path, refused: bool) -> None:
        if self._handler is not None:
            self.do(partial(self._handler.on_path_down, path, refused))

    def on_exit(self, callback: Callable[[], None]) -> None:
        self._on_exit.append(callback)

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.is_running.clear()
        for pipe in self._network.pipes_of(self):
            self._network.later(partial(self._network.break_pipe, pipe, by=self))
        for callback in self._on_exit:
            self._network.later(callback, self._network.faults.exit_notice_s)

    def stop(self) -> None:
        if self._held is None and not self.ended:
            self._held = []
            self.is_running.clear()

    @property
    def stopped(self) -> bool:
        return self._held is not None

    def resume(self) -> None:
        if self._held is not None and not self.ended:
            held, self._held = self._held, None
            self.is_running.set()
            timers, self._held_timers = self._held_timers, []
            for do in (*held, *timers):
                do()

    def timed_out(self, do: Callable[[], None]) -> None:
        if self._held is not None:
            self._held_timers.append(do)
        elif not self.ended:
            do()

    async def running(self) -> None:
        await self.is_running.wait()

    def do(self, do: Callable[[], None]) -> None:
        if self.ended:
            return
        if self._held is not None:
            self._held.append(do)
            return
        do()


class SimPidWatch:
    """`kvferry.actors.carrier.PidWatch` over the simulated processes."""

    def __init__(self, network: SimNetwork, watcher: SimCarrier) -> None:
        self._network, self._watcher = network, watcher
        self._closed = False

    def watch(self, address: Address, on_exit: Callable[[], None]) -> bool:
        process = self._network.process(address.incarnation)
        if process is None:
            raise OSError(f"{address.name} was not opened by this network, so its end can't be known")
        if process.ended:
            return False
        process.on_exit(partial(self._fire, on_exit))
        return True

    def kill(self, address: Address) -> None:
        self._network.later(partial(self._network.killer, address.incarnation))

    def close(self) -> None:
        self._closed = True

    def _fire(self, on_exit: Callable[[], None]) -> None:
        if not self._closed:
            self._watcher.do(on_exit)
