"""An asyncio event loop on virtual time: when nothing is ready, time jumps to the next timer.

Everything runs in one thread and nothing waits for the outside, so a run depends on its seeds alone. When nothing is
ready and no timer is set, nothing can ever run again: that raises `Deadlock` instead of hanging.

A simulation is little else than calls of this loop, so it keeps its own books of them, leaner than asyncio's: no
selector, no contexts (nobody in a simulation has context variables), no debugging.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from random import Random as _Generator
from typing import Any, TypeVar

import msgspec

from kvferry.actors.ports import Timer

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set; the message lists the tasks that wait."""


class Call(msgspec.Struct):
    """What asyncio calls a Handle or a TimerHandle: something to be done, unless it is cancelled before."""

    do: Callable[..., Any] | None
    args: tuple[Any, ...]
    at_s: float = 0.0

    def cancel(self) -> None:
        self.do, self.args = None, ()

    def cancelled(self) -> bool:
        return self.do is None

    def when(self) -> float:
        return self.at_s


class VirtualLoop(asyncio.BaseEventLoop):
    """Starts at 0 s. Callbacks run in the order of their deadlines, equal ones in the order they were set."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._due: deque[Call] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        self._set = 0
        self._stopping = False

    def time(self) -> float:
        return self.now_s

    #: Never. Asked at the making of every future, so it is no function of Python's.
    get_debug = staticmethod(bool)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Any = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name)  # type: ignore[arg-type]

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Call:  # type: ignore[override]
        call = Call(callback, args)
        self._due.append(call)
        return call

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Call:  # type: ignore[override]
        return self._put(self.now_s + delay, callback, args)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Call:  # type: ignore[override]
        return self._put(when, callback, args)

    def _put(self, when_s: float, do: Callable[..., Any], args: tuple[Any, ...]) -> Call:
        call = Call(do, args, when_s)
        self._set += 1
        heappush(self._timers, (when_s, self._set, call))
        return call

    def _run_once(self) -> None:
        """All that is ready; then, as often as nothing is, time jumps. Returns when the loop is to stop."""
        due, timers = self._due, self._timers
        while not self._stopping:
            if not due:
                self._jump()
            # Timers of this moment that were set meanwhile come behind what is ready already.
            while timers and timers[0][0] <= self.now_s:
                due.append(heappop(timers)[2])
            for _ in range(len(due)):
                call = due.popleft()
                do = call.do
                if do is not None:
                    try:
                        do(*call.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - as asyncio does it: told to the handler
                        self.call_exception_handler({"message": f"exception in {do}", "exception": error})

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2].do is None:
            heappop(timers)
        if not timers:
            waiting = sorted(str(task.get_coro()) for task in asyncio.all_tasks(self))
            raise Deadlock("nothing is ready and no timer is set; waiting: " + ("; ".join(waiting) or "no task"))
        self.now_s = max(self.now_s, timers[0][0])

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no events of the kernel's."""

    def _write_to_self(self) -> None:
        """Nothing sleeps in the kernel, so nothing needs waking."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new virtual loop; tasks that it leaves behind are cancelled.

    Raises what `main` raises, or Deadlock.
    """
    with asyncio.Runner(debug=False, loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """`kvferry.actors.ports.Clock` on the time of the loop that it is first asked on, a virtual one as a rule."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: asyncio.AbstractEventLoop | None = None  # its loop, once it has been asked for

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self.known is None:
            self.known = asyncio.get_running_loop()
        return self.known

    def now_s(self) -> float:
        return (self.known or self.loop).time()

    async def sleep(self, duration_s: float) -> None:
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        loop = self.known or self.loop
        over = loop.create_future()
        timer = loop.call_later(duration_s, _end, over)
        try:
            await over
        finally:
            timer.cancel()

    def call_later(self, delay_s: float, do: Callable[[], None]) -> Timer:
        return self.loop.call_later(delay_s, do)


def _end(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.set_result(None)


class SeededRandom:
    """`kvferry.actors.ports.Random` out of a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = _Generator(seed)
        #: From 0 to below 1.
        self.draw: Callable[[], float] = self._generator.random

    def bits(self, count: int) -> int:
        return self._generator.getrandbits(count)

    def chance(self, rate: float) -> bool:
        """True at the given rate. Even rate 0 draws, so that switching one fault off moves no other draw."""
        return self._generator.random() < rate

    def between(self, low: float, high: float) -> float:
        return self._generator.uniform(low, high)
