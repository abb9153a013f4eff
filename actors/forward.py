"""The one forward of a leader that may be running, and its numbers: what *stepped* is proved with."""

from __future__ import annotations

from kvferry.engine.contract import Engine, StepPlan, StepResult

#: Ticks are ten times closer than that.
GAP_S = 1.0


class EngineStalled(RuntimeError):
    """A forward has outlived the no-progress limit."""


class Forward:
    """Forwards are numbered from 1. `done` is the last that has finished; a later one runs iff `running`."""

    def __init__(self, engine: Engine, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._looked_s = self._ran_s = 0.0
        self.done = 0
        self.running = False

    @property
    def next(self) -> int:
        """The number for the next plan; only while none runs."""
        return self.done + 1

    async def run(self, plan: StepPlan) -> StepResult:
        return await self._engine.step(plan)

    def started(self, now_s: float) -> None:
        self.running, self._looked_s, self._ran_s = True, now_s, 0.0

    def finished(self, step: int) -> None:
        self.running, self.done = False, step

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
            raise EngineStalled(
                f"forward {self.next} has run for {self._ran_s:.1f} s; the limit is {self._limit_s:g} s"
            )
