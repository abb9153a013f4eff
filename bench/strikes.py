"""What a storm does to a server, and when each thing was whole again: kills, stops, cut links.

Times are seconds since the storm began, by the clock that is passed in.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx
from cuts import Cut, listening
from processes import front_pid
from serving import Served

LOOK_S = 0.25
HOLD_S = 0.1
KILL, STOP, CUT = "kill", "stop", "cut"


@dataclass
class Strike:
    """`end_s`: when a killed process had registered again, a stopped one went on, a cut one was healed."""

    kind: str
    victim: str
    at_s: float
    pid: int = 0
    end_s: float | None = None
    served_s: float | None = None  # when the killed one's successor had made a forward
    right_s: float | None = None  # when the next right answer came, of a request that began after `end_s`
    note: str = ""


@dataclass
class Seen:
    """What the last look at the server has shown. `step`: forwards since the process started; -1: it makes none."""

    pids: dict[str, int] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    step: dict[str, int] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)


class Strikes:
    """`run` looks and notes when what was struck is back; the others strike."""

    def __init__(self, server: Served, now_s: Callable[[], float], stops_s: tuple[float, float]) -> None:
        self.done: list[Strike] = []
        self.looks: list[tuple[float, dict[str, int]]] = []  # quarantined pages by instance, over time
        self._server, self._now_s = server, now_s
        self._seen = Seen()
        self._turns: dict[str, int] = {}
        self._lasting: set[asyncio.Task[None]] = set()
        self._durations_s = cycle(stops_s)
        self._cut_s = cycle(reversed(stops_s))

    # --- striking ---

    def kill(self, role: str) -> None:
        """`kill -9` of one of its processes, in turn."""
        name, pid = self._pick(role)
        if pid:
            os.kill(pid, signal.SIGKILL)
        self._note(KILL, name, pid)

    def stop(self, role: str) -> None:
        """SIGSTOP, and SIGCONT after the next of the durations."""
        name, pid = self._pick(role)
        strike = self._note(STOP, name, pid)
        if pid:
            self._last(self._stopped(strike, next(self._durations_s)))

    def cut(self, one: str, other: str) -> None:
        """The link between two processes, for the next of the durations."""
        (left, left_pid), (right, right_pid) = self._pick(one), self._pick(other)
        strike = self._note(CUT, f"{left} - {right}", left_pid and right_pid)
        if strike.pid:
            self._last(self._cut(strike, left_pid, right_pid, right, next(self._cut_s)))

    async def finish(self) -> None:
        """Every stop and cut has ended."""
        await asyncio.gather(*self._lasting)

    async def _stopped(self, strike: Strike, duration_s: float) -> None:
        strike.note = f"{duration_s:g} s"
        try:
            os.kill(strike.pid, signal.SIGSTOP)
            await asyncio.sleep(duration_s)
            os.kill(strike.pid, signal.SIGCONT)
        except ProcessLookupError:
            strike.note += ", ended meanwhile"
        strike.end_s = self._now_s()

    async def _cut(self, strike: Strike, left: int, right: int, listener: str, duration_s: float) -> None:
        ports = [self._seen.ports[listener]] if listener in self._seen.ports else sorted(listening(right))
        cuts = [Cut(left, right, port) for port in ports]
        end_s = self._now_s() + duration_s
        try:
            while self._now_s() < end_s:
                for cut in cuts:
                    await asyncio.to_thread(cut.hold)
                await asyncio.sleep(HOLD_S)
        except ProcessLookupError:
            strike.note = "one side ended meanwhile; "
        finally:
            for cut in cuts:
                cut.heal()
        strike.note += f"{duration_s:g} s, {sum(cut.connections for cut in cuts)} connections"
        strike.end_s = self._now_s()

    def _pick(self, role: str) -> tuple[str, int]:
        """Of those that are there now the next in turn; pid 0 when there is none."""
        if role == "front":
            return role, front_pid(self._server.process.pid) or 0
        struck = {s.victim for s in self.done if s.end_s is None}
        names = sorted(n for n in self._seen.registered - struck if n.split("-")[0] == role and n in self._seen.pids)
        if not names:
            return role, 0
        turn = self._turns[role] = self._turns.get(role, -1) + 1
        name = names[turn % len(names)]
        return name, self._seen.pids[name]

    def _note(self, kind: str, victim: str, pid: int) -> Strike:
        strike = Strike(kind, victim, self._now_s(), pid, note="" if pid else "nobody was there")
        if not pid:
            strike.end_s = strike.at_s
        self.done.append(strike)
        return strike

    def _last(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._lasting.add(task)

    # --- looking ---

    async def run(self) -> None:
        """For ever: look at the server, and note what is back."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        try:
            status = await asyncio.to_thread(self._server.status)
        except (httpx.HTTPError, ValueError):  # the front is away; it is found in the process table
            status = None
        if status is not None:
            self._seen = seen_in(status)
            self.looks.append((self._now_s(), quarantined_in(status)))
        for strike in self.done:
            if strike.kind == KILL and strike.pid:
                self._look_for(strike, status is not None)

    def _look_for(self, strike: Strike, front_answers: bool) -> None:
        name, seen = strike.victim, self._seen
        if name == "front":
            if strike.end_s is None and front_answers:
                pid = front_pid(self._server.process.pid)
                if pid not in (None, strike.pid):
                    strike.end_s = self._now_s()
            return
        back = name in seen.registered and seen.pids.get(name, strike.pid) != strike.pid
        if back and strike.end_s is None:
            strike.end_s = self._now_s()
        if back and strike.served_s is None and seen.step.get(name, -1) > 0:
            strike.served_s = self._now_s()

    def waiting_for(self) -> Iterator[Strike]:
        """What was struck and is not back."""
        return (strike for strike in self.done if strike.end_s is None)


def seen_in(status: dict[str, Any]) -> Seen:
    """Names, pids and ports in one status."""
    seen = Seen()
    for instance in status["instances"]:
        for rank in instance["ranks"][:1]:
            name = instance["id"]
            seen.pids[name], seen.step[name] = rank["pid"], instance["step"]
            seen.ports[name] = int(rank["endpoint"].rpartition(":")[2])
            if instance["registered"]:
                seen.registered.add(name)
    for router in status["routers"]:
        seen.pids[router["id"]] = router["pid"]
        if router["ready"]:
            seen.registered.add(router["id"])
    if status.get("registry"):
        seen.pids["registry"] = status["registry"]["pid"]
        # It restarts empty: it is back when everybody who lives has registered with it again.
        if status["registry"]["ranks"] >= len(seen.step) > 0:
            seen.registered.add("registry")
    return seen


def quarantined_in(status: dict[str, Any]) -> dict[str, int]:
    return {i["id"]: i["pages"]["quarantined"] for i in status["instances"] if i["pages"]}
