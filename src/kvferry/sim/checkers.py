"""Checkers of a simulated system, apart from what they check: they look on, recount and compare. `findings.CHECKERS`
says what each of them promises; here are those of processes and rooms, and `Watcher`, which has them all.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.actors.decode.decode import Decode
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.ranks.follower import Follower
from kvferry.actors.router.router import Router
from kvferry.sim.contents import Contents
from kvferry.sim.findings import Broken, Findings
from kvferry.sim.pages import Pages
from kvferry.sim.system import SimProcess, SimSystem, ends_as_one
from kvferry.sim.writes import Writes

__all__ = ["Broken", "Watcher", "check_alive", "check_idle"]


class Watcher:
    """All checkers of one system, from now on. What they find is raised by `look`, which is called every `every_s`."""

    def __init__(self, system: SimSystem, every_s: float = 0.25) -> None:
        self.findings = Findings()
        self._system, self._every_s = system, every_s
        self._contents = Contents(self.findings)
        self.writes = Writes(system, self.findings, self._contents)
        self.pages = Pages(system, self.findings)
        system.on_spawn.append(self._spawned)
        for process in system.processes.values():
            self._spawned(process)

    def _spawned(self, process: SimProcess) -> None:
        self._contents.spawned(process)
        self.pages.spawned(process)

    def look(self, every_page: bool = True) -> None:
        self.findings.raise_first()  # an actor may have ended of what was found before
        for name, process in self._system.processes.items():
            check_alive(name, process)
            if isinstance(process.actor, Router):
                self._check_ages(name, process.actor)
        if every_page:
            self.pages.look()
        self.findings.raise_first()

    async def run(self) -> None:
        while True:
            self.look(every_page=False)
            await asyncio.sleep(self._every_s)

    def _check_ages(self, name: str, router: Router) -> None:
        limits = router._limits
        waits_s = limits.admission_s + limits.prefill_s + limits.transfer_s
        # Every change of what a room waits for may come just before its clock of no progress runs out.
        limit_s = waits_s + 5 * limits.no_progress_s + self._system.stopped_s
        for room_id, guest in router.guests.items():
            age_s = router.clock.now_s() - guest.room.journal.began_s
            if age_s > limit_s:
                state = guest.room.machine.state.name
                self.findings.add("rooms-end", f"{name}: room {room_id:x} is {age_s:.1f} s old, in state {state}")


def check_alive(name: str, process: SimProcess) -> None:
    """Raises Broken when the actor has ended by itself, and not because its instance ends as one."""
    if process.task.done() and not ends_as_one(process.task):
        error = None if process.task.cancelled() else process.task.exception()
        raise Broken("alive", f"{name} has ended: {error!r}") from error


def check_idle(system: SimSystem) -> None:
    """With no request left, no actor keeps anything of one. Pages may wait for proof of a writer that is stopped."""
    left: dict[str, Any] = {}
    for name, process in system.processes.items():
        actor = process.actor
        if isinstance(actor, Router):
            left |= {f"{name} {what}": kept for what, kept in _of_router(actor).items()}
        elif isinstance(actor, Prefill | Decode) and not system.network.is_stopped(process.address):
            left |= {f"{name} {what}": kept for what, kept in _of_leader(system, actor).items()}
        elif isinstance(actor, Follower) and not system.network.is_stopped(process.address):
            left[f"{name} rooms"] = list(getattr(actor, "rooms", ()))
    left = {what: kept for what, kept in left.items() if kept}
    if left:
        raise Broken("baseline", f"left over: {left}")


def _of_router(router: Router) -> dict[str, Any]:
    now_s = router.clock.now_s()
    names = {info.address.incarnation: info.instance for info in router.roster.ranks}
    return {
        "guests": list(router.guests),
        "probes": [breaker for breaker in router.breakers.status(names, now_s) if breaker["probing"]],
        "rooms not reported": [i for i in router.fleet.status(now_s) if i["rooms_not_reported"] and i["usable"]],
        "rooms crashed": router.counts["rooms crashed"],
        "ended without an outcome": [room for room, journal in router.ended.items() if journal.outcome is None],
    }


def _of_leader(system: SimSystem, leader: Prefill | Decode) -> dict[str, Any]:
    waiting = [room for room in leader.rooms.values() if system.waits_for_a_stopped_writer(room)]
    pages = len({page for room in waiting if room.holding is not None for page in room.holding.pages})
    queues = {name: count for name, count in leader.queues().items() if count - len(waiting) * (name in _HELD)}
    rows = leader.engine.metadata_rows - leader.ledger.free_rows - len(waiting)
    counts = leader.ledger.audit(leader.block_tables())
    left: dict[str, Any] = {"queues": queues, "rows": rows}
    if counts.quarantined != pages or counts.owned or counts.leased or counts.cached:
        left["pages"] = counts
    if isinstance(leader, Prefill):
        left["groups of siblings"] = leader.groups
    else:
        left["agents of strangers"] = _strangers(leader, system)
        left["places"] = leader.batch.places
        left["notifications expected"] = getattr(leader.endpoint, "expecting", 0) - len(waiting)
    return left


def _strangers(leader: Decode, system: SimSystem) -> list[int]:
    """Processes that have an agent here, and are dead; or not linked, where that is what an agent lives by."""
    living = {process.address.incarnation for process in system.processes.values()}
    by_link = system.options.proofs.revoked
    strangers = (w for w in leader.writers.incarnations if w not in living or (by_link and not leader.network.is_up(w)))
    return list(strangers)


#: Queues in which a room stays that waits for proof.
_HELD = ("rooms", "releasing")
