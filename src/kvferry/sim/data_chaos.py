"""Faults of the data plane: nobody can be connected to, writes are late, fail or are damaged, memory changes."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.sim.chaos import Chaos
from kvferry.sim.endpoint import SimEndpoint
from kvferry.sim.subjects import Subject


class DataChaos(Chaos):
    """`Chaos` with the faults that strike at what a prefill writes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._flipped: set[int] = set()  # processes whose memory has changed once

    def _writer(self, subject: Subject | None) -> tuple[str, SimEndpoint] | None:
        """A prefill to strike at, and its end of the data plane."""
        name = self._victim(subject, "prefill")
        endpoint = self._system.processes[name].dressed if name is not None else None
        return None if name is None or endpoint is None else (name, endpoint)

    async def refuse(self, subject: Subject | None, _role: str) -> None:
        """The data plane of one prefill connects to nobody."""
        for_s = self._random.uniform(0.1, 4)
        if (writer := self._writer(subject)) is None:
            return
        name, endpoint = writer
        self._struck("refuse", {name}, f"{name} can't connect", for_s)
        endpoint.refuses = True
        await asyncio.sleep(for_s)
        endpoint.refuses = False

    async def late_writes(self, subject: Subject | None, _role: str) -> None:
        """What one prefill writes lands late, also when its room is aborted meanwhile."""
        for_s, most_s = self._random.uniform(0.5, 4), self._random.choice([0.1, 1.0, 5.0])
        if (writer := self._writer(subject)) is None:
            return
        name, endpoint = writer
        self._struck("late writes", {name}, f"writes of {name} land up to {most_s:g} s late", for_s)
        endpoint.late_s = lambda: self._random.uniform(0, most_s)
        await asyncio.sleep(for_s)
        endpoint.late_s = None

    async def break_writes(self, subject: Subject | None, _role: str) -> None:
        """Writes of one prefill fail on their way, and it can't say what has landed: only its end is proof then."""
        for_s = self._random.uniform(0.2, 2)
        if (writer := self._writer(subject)) is None:
            return
        name, endpoint = writer
        self._struck("break writes", {name}, f"writes of {name} fail", for_s)
        incarnation, endpoint.breaks = self._address(name).incarnation, True
        await asyncio.sleep(for_s)
        if name in self._system.processes and self._address(name).incarnation == incarnation:
            self._kill_and_spawn(name)

    async def garble(self, subject: Subject | None, _role: str) -> None:
        """The metadata rows that one prefill writes are damaged."""
        for_s = self._random.uniform(0.2, 2)
        if (writer := self._writer(subject)) is None:
            return
        name, endpoint = writer
        self._struck("garble", {name}, f"rows of {name} are damaged", for_s)
        endpoint.garbles = True
        await asyncio.sleep(for_s)
        endpoint.garbles = False

    async def flip(self, subject: Subject | None, _role: str) -> None:
        """A byte of what one prefill has written changes where it lies. Once in each target's life: pages that fail
        their check again are taken out of use, and a small pool would soon be too small.
        """
        for_s = self._random.uniform(0.2, 2)
        if (writer := self._writer(subject)) is None:
            return
        name, endpoint = writer
        self._struck("flip", {name}, f"a byte that {name} writes is changed at its target", for_s)

        def at(target: int, size_bytes: int) -> int | None:
            if target in self._flipped:
                return None
            self._flipped.add(target)
            return self._random.randrange(size_bytes)

        endpoint.flips = at
        await asyncio.sleep(for_s)
        endpoint.flips = None
