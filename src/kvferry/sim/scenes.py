"""Scenes: faults that say something only together, on the same processes and in this order.

What chance seldom puts together is played here, step by step; each step waits for what the one before has brought
about, and a scene that does not come to its point is over. They are drawn as stories (scenario.py), never as one fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvferry.actors.leg_room import LegRoom
from kvferry.protocol.machine import Machine
from kvferry.protocol.rank import EARLY
from kvferry.protocol.receiver import ReceiverState
from kvferry.protocol.room import RoomMachine, RoomState
from kvferry.protocol.sender import SenderState
from kvferry.sim.chaos import AIM_S
from kvferry.sim.data_chaos import DataChaos
from kvferry.sim.engine import SimEngine
from kvferry.sim.subjects import Subject, subjects_of

POLL_S = 0.002
#: A forward takes this many times its cost: about a second for a whole batch, less than any clock allows.
SLOW_PREFILL, SLOW_DECODE = 30.0, 60.0
#: The request of a scene has so many tokens to make, so that it is still under way when it comes to the point.
TOKENS = 4


class Scenes(DataChaos):
    """`Chaos` that can play scenes, by their names."""

    async def kill_unlinked(self, subject: Subject | None, _role: str) -> None:
        """Decode dies where prefill has lost its link to it, while a room waits there for decode's word."""
        if subject is None or not self._lives(subject):
            return
        prefill, decode = subject.names["prefill"], subject.names["decode"]
        waits = [SenderState.AWAITING_PAGES, SenderState.AWAITING_PAGES, SenderState.KEPT]
        if self._system.options.policy == EARLY:
            waits = [SenderState.AWAITING_DESTINATION]
        wanted, ends = self._random.choice(waits), (self._address(prefill), self._address(decode))
        seen: set[Machine[Any, Any]] = set()

        def waiting() -> bool:
            """A room between those two is in that state, and was so when we last looked."""
            before = set(seen)
            seen.clear()
            seen.update(self._between(prefill, decode, wanted))
            return bool(before & seen)

        self._struck("cut", {prefill, decode}, f"cut {prefill} from {decode}, and it drops its link and is slow")
        self._system.network.cut(*ends)
        self._give_up(prefill, decode)
        engine = self._engine(prefill)
        engine.slow = SLOW_PREFILL  # so that there is a queue for its pages
        found = await self._until(waiting)
        if found and self._lives(subject) and self._address(decode) == ends[1]:
            self._struck("kill decode", {decode}, f"kill {decode}")
            self._system.kill(decode)
        self._system.network.heal(*ends)
        engine.slow = 1.0
        self._spawn(decode)

    async def unheard_commit(self, _subject: Subject | None, _role: str) -> None:
        """Decode commits, and the room does not hear of it: it asks, for one of two reasons, and its question finds the
        request running, or on its way out.
        """
        found = await self._until(self._transferring)
        if found is None:
            return
        machine, subject = found
        router, decode = subject.names["router"], subject.names["decode"]
        engine, ends = self._engine(decode), (self._address(router), self._address(decode))
        self._struck("cut", {router, decode}, f"cut {router} from {decode}, which is slow")
        self._system.network.cut(*ends)
        engine.slow = SLOW_DECODE
        clocks, links = self._system.options.clocks, self._system.options.links
        play = self._clock_runs_out if clocks.no_progress_s < links.silence_s else self._client_leaves
        await play(machine, subject)
        self._system.network.heal(*ends)
        self._system.network.break_paths(*ends)  # what was not heard is said again at once
        await asyncio.sleep(0.5)
        engine.slow = 1.0

    async def _clock_runs_out(self, room: RoomMachine, subject: Subject) -> None:
        """It hears nothing of prefill either, and of decode again first: prefill's leg is open when decode answers."""
        ends = self._address(subject.names["router"]), self._address(subject.names["prefill"])
        self._note(f"cut {subject.names['router']} from {subject.names['prefill']}")
        self._system.network.cut(*ends)

        async def heal() -> None:
            await asyncio.sleep(1.0)
            self._system.network.heal(*ends)

        await self._until(lambda: room.state not in (RoomState.AWAITING_INPUT, RoomState.TRANSFERRING))
        self._system.background(heal())

    async def _client_leaves(self, room: RoomMachine, subject: Subject) -> None:
        """The router loses prefill; before its question is there, the client leaves and decode has heard that."""
        decode = subject.names["decode"]
        receiver = await self._until(lambda: self._leg(decode, subject.room))
        if receiver is None:
            return
        await self._until(lambda: receiver.state is ReceiverState.RUNNING and receiver.stepping)
        self._note(f"{subject.names['router']} drops its link to {subject.names['prefill']}")
        self._give_up(subject.names["router"], subject.names["prefill"])
        await self._until(lambda: room.state is RoomState.SETTLING)
        await self.leave(subject, "")
        await self._until(lambda: receiver.state is not ReceiverState.RUNNING)

    # --- looking on ---

    async def _until(self, look: Callable[[], Any]) -> Any:
        """What `look` finds, once it finds something; its last answer when that takes too long."""
        for _ in range(round(AIM_S / POLL_S)):
            if found := look():
                return found
            await asyncio.sleep(POLL_S)
        return look()

    def _engine(self, name: str) -> SimEngine:
        engine = getattr(self._system.processes[name].actor, "engine", None)
        assert isinstance(engine, SimEngine)
        return engine

    def _lives(self, subject: Subject) -> bool:
        """Its prefill and its decode are there, and two instances."""
        names = subject.names["prefill"], subject.names["decode"]
        return names[0] != names[1] and {*names} <= self._system.processes.keys()

    def _between(self, prefill: str, decode: str, state: SenderState) -> list[Machine[Any, Any]]:
        """Those of the rooms between those two that are in that state."""
        found = [(machine, subject.names) for machine, subject in subjects_of(self._system, state)]
        return [machine for machine, names in found if (names["prefill"], names["decode"]) == (prefill, decode)]

    def _transferring(self) -> tuple[RoomMachine, Subject] | None:
        """A room that awaits its input, and whose request has enough to do."""
        for machine, subject in subjects_of(self._system, RoomState.AWAITING_INPUT):
            if isinstance(machine, RoomMachine) and self._lives(subject):
                tokens = machine.spec.sampling.max_tokens - len(machine.spec.frozen_ids)
                if tokens >= TOKENS:
                    return machine, subject
        return None

    def _leg(self, name: str, room: int) -> Machine[Any, Any] | None:
        process = self._system.processes.get(name)
        record: LegRoom | None = getattr(process.actor, "rooms", {}).get(room) if process is not None else None
        return record.machine if record is not None else None
