"""The one forward of a leader that may be running, and its numbers: what *stepped* is proved with."""

from __future__ import annotations

import msgspec

from kvferry.engine.contract import Engine, RanksLost, StepPlan, StepResult

#: Ticks are ten times closer than that.
GAP_S = 1.0
#: A forward that lacks a rank is over, and the link to that rank tells which one it is: by default within 10 s.
LOST_S = 15.0


class StepDone(msgspec.Struct, frozen=True):
    """Item for the mailbox: this rank's part of a forward has finished."""

    result: StepResult


class StepLost(msgspec.Struct, frozen=True):
    """Item: it can't finish any more, since other ranks are lost."""

    why: str


async def run_step(engine: Engine, plan: StepPlan) -> StepDone | StepLost:
    try:
        return StepDone(await engine.step(plan))
    except RanksLost as error:
        return StepLost(str(error))


class EngineStalled(RuntimeError):
    """A forward has outlived the no-progress limit."""


class Forward:
    """Forwards are numbered from 1. `done` is the last that has finished; a later one runs iff `running`."""

    def __init__(self, engine: Engine, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._looked_s = self._ran_s = 0.0
        self._lost = ""
        self.done = 0
        self.running = False

    @property
    def next(self) -> int:
        """The number for the next plan; only while none runs."""
        return self.done + 1

    async def run(self, plan: StepPlan) -> StepDone | StepLost:
        return await run_step(self._engine, plan)

    def started(self, now_s: float) -> None:
        self.running, self._looked_s, self._ran_s = True, now_s, 0.0

    def finished(self, step: int) -> None:
        self.running, self.done = False, step

    def lost(self, why: str) -> None:
        """It runs for ever: its pages can't be proved quiet. Whose fault it is, and so what becomes of the rooms, the
        links tell; if they don't, this process ends alone.
        """
        self._lost, self._limit_s, self._ran_s = why, min(self._limit_s, LOST_S), 0.0

    def check(self, now_s: float) -> None:
        """A forward that does not end can't be cancelled, and its pages can't be proved quiet: the process must go.

        Called at each tick. A process that was stopped has not ticked, and its forward has not run: of a longer gap
        between two calls only `GAP_S` counts. Raises EngineStalled.
        """
        if not self.running:
            return
        self._ran_s += min(now_s - self._looked_s, GAP_S)
        self._looked_s = now_s
        if self._ran_s >= self._limit_s:
            if self._lost:
                raise EngineStalled(f"forward {self.next} can't end: {self._lost}")
            raise EngineStalled(
                f"forward {self.next} has run for {self._ran_s:.1f} s; the limit is {self._limit_s:g} s"
            )
