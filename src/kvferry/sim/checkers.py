"""Checkers of a simulated system, apart from what they check: they recount, compare, and raise `Broken`.

`Writes` looks at every copy of the data plane, `Watcher` at the whole system again and again, `check_idle` at its end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.actors.decode.decode import Decode
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.router.router import Router
from kvferry.sim.system import SimProcess, SimSystem, ends_as_one
from kvferry.transfer.contract import Region, RegionKind, Spans
from kvferry.transfer.fake_endpoint import FakeAgent


class Broken(AssertionError):
    """The system has broken one of its promises."""


class Writes:
    """Between the fabric and its copies: each byte goes from a page that the source's room holds to a page, or a row,
    that is leased to that writer at the target; also where it lands `late`. `Watcher` raises what is
    found, since a copy runs in nobody's turn.
    """

    def __init__(self, system: SimSystem) -> None:
        self.copies = self.late = 0
        self.problem = ""
        self._system = system
        self._copy = system.fabric.copy
        self._land = system.fabric.land
        system.fabric.copy = self._checked  # type: ignore[method-assign]
        system.fabric.land = self._landed  # type: ignore[method-assign]

    def _checked(self, batch: Spans, source: tuple[Region, ...], target: tuple[Region, ...]) -> None:
        writer, owner = self._leader_of(source), self._leader_of(target)
        if writer is not None and owner is not None:
            self._check(batch, "source", source, self._held(writer, 0))
            self._check(batch, "target", target, self._held(owner, writer.network.address.incarnation))
        self.copies += 1
        self._copy(batch, source, target)

    def _landed(self, batch: Spans, data: list[bytes], target: FakeAgent) -> None:
        """What a writer had left behind: its source is gone, and the pages must be leased to it all the same."""
        owner = self._leader_of(target.endpoint.regions)
        if owner is not None:
            self._check(batch, "target", target.endpoint.regions, self._held(owner, target.writer))
        self.late += 1
        self._land(batch, data, target)

    def _leader_of(self, regions: tuple[Region, ...]) -> Prefill | Decode | None:
        """None for a process that has been killed: its memory is nobody's."""
        for process in self._system.processes.values():
            actor = process.actor
            if isinstance(actor, Prefill | Decode) and actor.engine.regions()[0].base == regions[0].base:
                return actor
        return None

    @staticmethod
    def _held(leader: Prefill | Decode, writer: int) -> dict[RegionKind, set[int]]:
        """Items under a lease to `writer` (0: under one of our own, for reading)."""
        holdings = [room.holding for room in leader.rooms.values() if room.holding is not None]
        leased = [h for h in holdings if h.lease is not None and writer in h.lease.writers.values()]
        pages = {page for holding in leased for page in holding.pages}
        return {RegionKind.PAGES: pages, RegionKind.ROWS: {row for holding in leased for row in holding.rows}}

    def _check(self, batch: Spans, side: str, regions: tuple[Region, ...], held: dict[RegionKind, set[int]]) -> None:
        for span in batch:
            region = regions[int(span[f"{side}_region"])]
            first = int(span[f"{side}_offset"]) // region.item_bytes
            last = (int(span[f"{side}_offset"]) + int(span["length"]) - 1) // region.item_bytes
            for item in range(first, last + 1):
                if item not in held[region.kind]:
                    self.problem = f"a write touches {region.kind.value} {item} of its {side}, which no lease covers"


class Watcher:
    """Looks at everything every `every_s`: no actor has ended by itself, every page is accounted for, and every write
    has kept to its leases.
    """

    def __init__(self, system: SimSystem, every_s: float = 0.05) -> None:
        self.writes = Writes(system)
        self._system, self._every_s = system, every_s

    def look(self) -> None:
        for name, process in self._system.processes.items():
            check_alive(name, process)
        for name, counts in self._system.counts().items():  # raises LedgerError where a page is lost or held twice
            if not counts.conserved:
                raise Broken(f"{name}: {counts} do not add up")
        if self.writes.problem:
            raise Broken(self.writes.problem)

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(self._every_s)


def check_alive(name: str, process: SimProcess) -> None:
    if process.task.done() and not ends_as_one(process.task):
        error = None if process.task.cancelled() else process.task.exception()
        raise Broken(f"{name} has ended: {error!r}") from error


def check_idle(system: SimSystem) -> None:
    """With no request left, no actor keeps anything of one."""
    left: dict[str, Any] = {}
    for name, process in system.processes.items():
        actor = process.actor
        if isinstance(actor, Router):
            left |= {f"{name} {what}": kept for what, kept in _of_router(actor).items()}
        elif isinstance(actor, Prefill | Decode):
            left |= {f"{name} {what}": kept for what, kept in _of_leader(actor).items()}
            left[f"{name} agents of strangers"] = _strangers(actor, system)
            counts = actor.ledger.audit(actor.block_tables())
            if not counts.at_baseline or counts.cached:
                left[f"{name} pages"] = counts
    left = {what: kept for what, kept in left.items() if kept}
    if left:
        raise Broken(f"left over: {left}")


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


def _strangers(leader: Prefill | Decode, system: SimSystem) -> list[int]:
    """Processes that have an agent here, and are dead; or not linked, where that is what an agent lives by."""
    living = {process.address.incarnation for process in system.processes.values()}
    writers = leader.writers.incarnations if isinstance(leader, Decode) else set()
    by_link = leader.endpoint.proofs.revoked
    return [w for w in writers if w not in living or (by_link and not leader.network.is_up(w))]


def _of_leader(leader: Prefill | Decode) -> dict[str, Any]:
    queues = {name: count for name, count in leader.queues().items() if count}
    rows = leader.engine.metadata_rows - leader.ledger.free_rows
    left: dict[str, Any] = {"queues": queues, "rows": rows}
    if isinstance(leader, Prefill):
        left["groups of siblings"] = leader.groups
    else:
        left["places"] = leader.batch.places
        left["notifications expected"] = getattr(leader.endpoint, "expecting", 0)
    return left
