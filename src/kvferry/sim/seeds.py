"""Runs of seeds: one (`run_seed`), or many by several processes (`run_seeds`). Equal seeds give equal runs."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager

import msgspec

from kvferry.sim.coverage import Cells
from kvferry.sim.findings import Broken
from kvferry.sim.loop import run
from kvferry.sim.required import unreachable_cells
from kvferry.sim.scenario import Play, Scenario, draw
from kvferry.sim.system import SimSystem
from kvferry.sim.trace import Trace

#: Seeds that one process runs before it tells of them.
CHUNK = 8


class Violation(msgspec.Struct, frozen=True):
    """`checker` is one of `findings.CHECKERS`, or "crash" for what none of them has found."""

    checker: str
    text: str


class Report(msgspec.Struct):
    """What one seed has come to; several can be added up. `cells` and `pairs` as `coverage` and `chaos` name them."""

    seed: int
    rooms: int = 0
    virtual_s: float = 0.0
    violations: list[Violation] = []
    faults: list[str] = []
    ends: dict[str, int] = {}
    errors: list[str] = []
    cells: dict[str, int] = {}
    pairs: dict[str, int] = {}
    trace: list[str] = []


def run_seed(seed: int, trace: bool = False, faults: Sequence[int] | None = None) -> Report:
    """Never raises: what goes wrong is a violation. With `trace` the report tells all that happened."""
    return run_scenario(draw(seed) if faults is None else draw(seed, faults), trace)


def run_scenario(scenario: Scenario, trace: bool = False) -> Report:
    report, cells = Report(scenario.seed), Cells()
    played: list[Play] = []
    traced = Trace() if trace else None

    async def main() -> None:
        try:
            async with SimSystem(scenario.options, [traced.spawned] if traced is not None else []) as system:
                play = Play(scenario, system, cells)
                played.append(play)
                await play.main()
        finally:
            report.virtual_s = asyncio.get_running_loop().time()

    with cells.counted(), _quiet():
        try:
            run(main())
        except Exception as error:  # noqa: BLE001 - a violation like others
            report.violations.append(_violation(error))
    report.rooms, report.cells = cells.rooms, dict(cells.by_name())
    for play in played:
        report.faults, report.pairs = play.chaos.log, dict(play.chaos.pairs)
        report.ends, report.errors = dict(play.clients.ends.counts), play.clients.ends.errors
        found = [Violation(broken.checker, broken.text) for _, broken in play.watcher.findings.found]
        report.violations += [violation for violation in found if violation not in report.violations]
        if traced is not None:
            report.trace = traced.lines(play.chaos.log, report.ends)
    unreachable = unreachable_cells()
    report.violations += [
        Violation("cells", f"{cell}: {unreachable[cell]}") for cell in report.cells if cell in unreachable
    ]
    return report


@contextmanager
def _quiet() -> Iterator[None]:
    """Processes that are killed and writers that are shut out are no news here."""
    logger = logging.getLogger("kvferry")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _violation(error: Exception) -> Violation:
    if isinstance(error, Broken):
        return Violation(error.checker, error.text)
    return Violation("crash", "".join(traceback.format_exception(error)))


def run_chunk(seeds: Sequence[int]) -> list[Report]:
    """Several seeds, one after another, by this process. Collecting garbage between them is cheaper than meanwhile."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return [run_seed(seed) for seed in seeds]
    finally:
        gc.enable()
        gc.unfreeze()


def run_seeds(seeds: Sequence[int], workers: int) -> Iterator[Report]:
    """As they are done, so in no particular order."""
    chunks = [seeds[first : first + CHUNK] for first in range(0, len(seeds), CHUNK)]
    if workers <= 1:
        for chunk in chunks:
            yield from run_chunk(chunk)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting: set[Future[list[Report]]] = set()
        try:
            for chunk in chunks:
                waiting.add(pool.submit(run_chunk, chunk))
                if len(waiting) > 2 * workers:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield from future.result()
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            for future in waiting:
                future.cancel()


class Sum:
    """Reports, added up."""

    def __init__(self) -> None:
        self.seeds = self.rooms = 0
        self.failed: list[Report] = []
        self.ends: Counter[str] = Counter()
        self.cells: Counter[str] = Counter()
        self.pairs: Counter[str] = Counter()

    def add(self, report: Report) -> None:
        self.seeds += 1
        self.rooms += report.rooms
        self.ends.update(report.ends)
        self.cells.update(report.cells)
        self.pairs.update(report.pairs)
        if report.violations:
            self.failed.append(report)
