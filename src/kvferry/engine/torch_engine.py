"""The real engine: one model and its pool, stepped on one thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from kvferry.engine.adapter import Adapter, cut, layout_of
from kvferry.engine.batch import build
from kvferry.engine.contract import Drawn, EngineLimits, StepPlan, StepResult
from kvferry.engine.group import Group
from kvferry.engine.loader import Loaded
from kvferry.engine.patches import apply_cpu_patches
from kvferry.engine.rules import check_plan
from kvferry.engine.sampler import sample
from kvferry.protocol.rank import Layout
from kvferry.transfer.contract import Region
from kvferry.transfer.shared import Area

#: A forward of an instance whose ranks all live has ended by then; of another it may never end.
CLOSE_S = 5.0


class TorchEngine:
    """Implements `kvferry.engine.contract.Engine`. Takes the loaded model over (patches change it in place).

    With `group` it is the engine of one rank, and each of its steps runs at all of them, or at none: the leader draws
    the tokens, the others' results have none. Raises ConfigError for a model that it can't serve or cut into so many
    ranks, and for sizes below 1; with `group`, making it and `step` raise RanksLost. Cancelling a `step` that runs does
    not stop its forward: its pages are written until it, or `close`, has ended.
    `shared`: other processes may map the pool.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        pages: int,
        page_size: int,
        metadata_rows: int,
        threads: int,
        now_s: Callable[[], float],
        patches: bool = True,
        shared: bool = False,
        group: Group | None = None,
    ) -> None:
        self._now_s = now_s
        self._eos_token_ids = loaded.eos_token_ids
        self._layout = layout_of(loaded, page_size)
        shard = None if group is None else cut(loaded, group)
        if patches:
            apply_cpu_patches(loaded.model)
        self._adapter = Adapter(loaded, shard)
        self._alone = group is None
        self._pool = self._adapter.pool(pages=pages, page_size=page_size, metadata_rows=metadata_rows, shared=shared)
        # torch keeps the number of threads per calling thread, so it is set on the one that computes
        self._executor = ThreadPoolExecutor(1, "engine", torch.set_num_threads, (threads,))
        self._limits = EngineLimits(
            pages=pages,
            page_size=page_size,
            context_tokens=loaded.context_tokens,
            vocab_size=self._adapter.vocab_size,
        )

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def metadata_rows(self) -> int:
        return len(self._pool.metadata)

    def regions(self) -> tuple[Region, ...]:
        return self._pool.regions()

    def areas(self) -> tuple[Area, ...]:
        """The pool's memory, as other processes may map it; nothing unless it is `shared`."""
        return self._pool.areas

    def metadata_row(self, slot: int) -> memoryview:
        return self._pool.metadata_row(slot)

    async def step(self, plan: StepPlan) -> StepResult:
        """Run one plan. Raises ValueError, before anything is written, for a plan that leaves its pages."""
        check_plan(plan, self._limits)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, plan)

    def _run(self, plan: StepPlan) -> StepResult:
        started_s = self._now_s()
        tensors = build(plan, self._limits.page_size)
        logits = self._adapter.forward(tensors, self._pool)
        drawn: list[Drawn | None] = [None] * len(plan.sequences)
        if logits is not None and tensors.wanted:
            tokens = sample(logits, [plan.sequences[index] for index in tensors.wanted], self._eos_token_ids)
            for index, token in zip(tensors.wanted, tokens, strict=True):
                drawn[index] = token
        return StepResult(plan.step, tuple(drawn), self._now_s() - started_s)

    async def close(self) -> None:
        """Wait for the step that runs, and end the thread. A step that waits for another rank is left behind after
        `CLOSE_S`: it ends by its own limit, or with the process. The pool's memory lives as long as this object.
        """
        ended = asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)
        await asyncio.wait({ended}, timeout=None if self._alone else CLOSE_S)
