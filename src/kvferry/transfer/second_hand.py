"""A thread beside a driver's, which takes a part of the same work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

_log = logging.getLogger(__name__)


class SecondHand:
    """`turn` is called again and again while it moves anything, every `pause_s` while `waits` says so, and else once it
    is woken. What it raises is logged, and the thread goes on: whoever asks is answered.
    """

    def __init__(self, name: str, turn: Callable[[], bool], waits: Callable[[], bool], pause_s: float) -> None:
        self._turn, self._waits, self._pause_s = turn, waits, pause_s
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon, so that a process that ends without `close` is not held up by it.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is work. From any thread."""
        self._calls.put(_nothing)

    def ask(self, call: Callable[[], None]) -> None:
        """Have it called on the thread, between turns, and wait for that. Raises what it raises."""
        done: Future[None] = Future()
        self._calls.put(partial(_settle, done, call))
        done.result()

    def close(self) -> None:
        """When it returns, the thread has ended. Nobody may ask for anything any more."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        pause_s: float | None = None
        while True:
            try:
                call = self._calls.get(timeout=pause_s) if pause_s != 0 else self._calls.get_nowait()
                if call is None:
                    return
                call()
            except Empty:
                pass
            moved = self._moved()
            pause_s = 0 if moved or not self._calls.empty() else self._pause_s if self._waits() else None

    def _moved(self) -> bool:
        try:
            return self._turn()
        except Exception:  # noqa: BLE001  (whatever it is: without this thread, the end of a target would wait for it)
            _log.exception("%s: a turn failed", self._thread.name)
            return False


def _nothing() -> None:
    """To be woken."""


def _settle(done: Future[None], call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  (whoever asked hears of it)
        done.set_exception(error)
    else:
        done.set_result(None)
