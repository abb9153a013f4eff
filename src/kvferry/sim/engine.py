"""The scripted engine of a simulated process: it can be slow, and it tells what it writes and reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvferry.engine.contract import EngineLimits, Sequence, StepPlan, StepResult
from kvferry.engine.scripted import Places, ScriptedEngine, Words
from kvferry.protocol.rank import Layout, Slice


class Reader(Protocol):
    """Who looks on as pages are written and read."""

    def written(self, engine: SimEngine, plan: StepPlan) -> None: ...
    def read(self, engine: SimEngine, sequence: Sequence) -> None: ...


class SimEngine(ScriptedEngine):
    """`slow`: a forward takes so many times its cost. `running` is the plan of the forward that runs."""

    def __init__(
        self,
        layout: Layout,
        limits: EngineLimits,
        *,
        metadata_rows: int,
        sleep: Callable[[float], Awaitable[None]],
        cost_s: Callable[[StepPlan], float],
        incarnation: int,
        part: Slice | None = None,
    ) -> None:
        super().__init__(
            layout, limits, metadata_rows=metadata_rows, sleep=sleep, part=part,
            cost_s=lambda plan: cost_s(plan) * self.slow,
        )  # fmt: skip
        self.slow = 1.0
        self.incarnation = incarnation
        self.running: StepPlan | None = None
        self.reader: Reader | None = None

    async def step(self, plan: StepPlan) -> StepResult:
        self.running = plan
        try:
            return await super().step(plan)
        finally:
            self.running = None

    def _write(self, plan: StepPlan, places: tuple[Places, Words]) -> None:
        super()._write(plan, places)
        if self.reader is not None:
            self.reader.written(self, plan)

    def _read(self, sequence: Sequence) -> int:
        if self.reader is not None:
            self.reader.read(self, sequence)
        return super()._read(sequence)
