"""Checkers of the page ledgers, with nothing of the ledgers' own sums: who has a page is asked of the rooms, who may
still touch it of the data plane and the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kvferry.actors.leader import Leader
from kvferry.actors.ranks.names import instance_of
from kvferry.memory.ledger import Holding, PageLedger
from kvferry.protocol.errors import LedgerError
from kvferry.sim.engine import SimEngine
from kvferry.sim.findings import Findings
from kvferry.sim.system import SimProcess, SimSystem

#: The ledger's calls that change what a page is.
CHANGES = ("reserve", "keep", "extend", "lease", "end_lease", "quarantine", "release")
#: Turns that change something between two recounts of every page.
ALL_EVERY = 100


class Pages:
    """*conservation* and *one-release*, for every leader of a system."""

    def __init__(self, system: SimSystem, findings: Findings) -> None:
        self._system, self._findings = system, findings
        self._of: dict[int, _LeaderPages] = {}

    def spawned(self, process: SimProcess) -> None:
        if isinstance(process.actor, Leader):
            watch = _LeaderPages(process, self._findings, self._open_writes)
            self._of[process.address.incarnation] = watch

    def look(self) -> None:
        """Every page of every leader that lives."""
        for process in self._system.processes.values():
            watch = self._of.get(process.address.incarnation)
            if watch is not None:
                watch.recount()

    def _open_writes(self, instance: str) -> set[int]:
        """The pages of one instance that writes of living (or stopped) processes still read or reach."""
        ranks = {
            process.address.incarnation
            for name, process in self._system.processes.items()
            if instance_of(name)[0] == instance
        }
        pages: set[int] = set()
        for process in self._system.processes.values():
            if process.dressed is not None:
                for write in process.dressed.open.values():
                    pages |= write.source_pages if write.source in ranks else set()
                    if write.target in ranks and self._system.fabric.find(write.agent) is not None:
                        pages |= write.target_pages
        return pages


class _LeaderPages:
    """One leader's. `held` is what was reserved and not released, by holding."""

    def __init__(self, process: SimProcess, findings: Findings, open_writes: Callable[[str], set[int]]) -> None:
        assert isinstance(process.actor, Leader)
        self._leader: Leader[Any] = process.actor
        self._name, self._findings, self._open_writes = process.address.name, findings, open_writes
        self._held: dict[int, tuple[int, ...]] = {}
        self._touched: set[int] = set()
        self._turns = 0
        ledger = self._leader.ledger
        for name in CHANGES:
            setattr(ledger, name, partial(self._changed, name, getattr(ledger, name)))
        advance = self._leader.advance

        def advanced() -> None:
            advance()
            if self._touched:
                self._turn_over()

        self._leader.advance = advanced  # type: ignore[method-assign]

    @property
    def _ledger(self) -> PageLedger:
        return self._leader.ledger

    def _changed(self, name: str, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "release":
            self._released(args[0])
        result = change(*args, **kwargs)
        holding = args[0] if isinstance(args[0], Holding) else result
        if isinstance(holding, Holding):
            self._touched.update(holding.pages)
            if name == "release":
                self._held.pop(holding.id, None)
            else:
                self._held[holding.id] = holding.pages
        return result

    def _released(self, holding: Holding) -> None:
        where = f"{self._name}: pages {holding.pages} of room {holding.owner:x}"
        if holding.id not in self._held:
            self._findings.add("one-release", f"{where} are released twice")
            return
        others = {page for id_, pages in self._held.items() if id_ != holding.id for page in pages}
        freed = set(holding.pages) - others
        if self._leader.ending:
            return  # none of its pages is used again
        if busy := sorted(freed & self._open_writes(self._name)):
            self._findings.add("one-release", f"{where} are released while writes are under way at {busy}")
        engine = self._leader.engine
        running = engine.running if isinstance(engine, SimEngine) else None
        if running is not None:
            named = {page for sequence in running.sequences for page in sequence.pages}
            if busy := sorted(freed & named):
                self._findings.add("one-release", f"{where} are released while forward {running.step} names {busy}")

    def _turn_over(self) -> None:
        self._turns += 1
        touched, self._touched = self._touched, set()
        if self._turns % ALL_EVERY == 0:
            self.recount()
            return
        tables, ledger = self._leader.block_tables().values(), self._ledger
        held = touched.intersection(page for pages in tables for page in pages)
        free_pages = [page for page in ledger._free if page in touched]
        retired_pages = touched & ledger._retired
        once = len(free_pages) + len(held) + len(retired_pages) == len(touched)
        if once and held.union(free_pages, retired_pages) == touched:
            return  # each in one place alone
        holders = Counter(page for pages in tables for page in pages)
        free = Counter(free_pages)
        for page in touched:
            retired = page in retired_pages
            if free[page] + bool(holders[page]) + retired != 1:
                text = f"page {page} lies {free[page]} times in the free list and in {holders[page]} block tables"
                text += ", and is retired" if retired else ""
                self._findings.add("conservation", f"{self._name}: {text}")

    def recount(self) -> None:
        try:
            counts = self._ledger.audit(self._leader.block_tables())
        except LedgerError as error:
            self._findings.add("conservation", f"{self._name}: {error}")
            return
        if not counts.conserved:
            self._findings.add("conservation", f"{self._name}: {counts} do not add up")
