"""An asyncio event loop on virtual time: when nothing is ready, time jumps to the next timer.

Everything runs in one thread and nothing waits for the outside, so a run depends on its seeds alone. When nothing is
ready and no timer is set, nothing can ever run again: that raises `Deadlock` instead of hanging.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random as _Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set; the message lists the tasks that wait."""


class _Selector:
    """Stands where the loop asks the kernel for events: there are none, so waiting is a jump in time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            waiting = sorted(str(task.get_coro()) for task in asyncio.all_tasks(self._loop))
            raise Deadlock("nothing is ready and no timer is set; waiting: " + ("; ".join(waiting) or "no task"))
        self._loop.advance(timeout_s)
        return []

    def close(self) -> None:
        """Nothing is open."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Starts at 0 s. Callbacks run in the order of their deadlines, equal ones in the order they were set."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self._selector = _Selector(self)

    def time(self) -> float:
        return self._virtual_s

    def advance(self, duration_s: float) -> None:
        self._virtual_s += max(0.0, duration_s)

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no events of the kernel's."""

    def _write_to_self(self) -> None:
        """Nothing sleeps in the kernel, so nothing needs waking."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new virtual loop; tasks that it leaves behind are cancelled.

    Raises what `main` raises, or Deadlock.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """`kvferry.actors.ports.Clock` on the running loop's virtual time."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class SeededRandom:
    """`kvferry.actors.ports.Random` out of a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = _Generator(seed)

    def bits(self, count: int) -> int:
        return self._generator.getrandbits(count)

    def chance(self, rate: float) -> bool:
        """True at the given rate. Even rate 0 draws, so that switching one fault off moves no other draw."""
        return self._generator.random() < rate

    def between(self, low: float, high: float) -> float:
        return self._generator.uniform(low, high)
