"""Who copies, one job after the other: a thread of its own, so that nobody waits; or a guest on another's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

_log = logging.getLogger(__name__)

#: Called with "" or what went wrong.
OnDone = Callable[[str], None]
#: Runs a call where the answers of workers are wanted: on the loop, or at once on the worker's thread.
Tell = Callable[[Callable[[], None]], None]


class JobQueue(Protocol):
    """Whatever becomes of a job, `on_done` hears of it; but not of those that `close` has come before."""

    def put(self, job: Callable[[], object], on_done: OnDone) -> None: ...
    def close(self) -> None: ...


def _carry_out(name: str, job: Callable[[], object], on_done: OnDone, tell: Tell) -> None:
    error = ""
    try:
        job()
    except Exception as raised:  # noqa: BLE001  (whatever it is, whoever waits for the copy must hear of it)
        error = f"{type(raised).__name__}: {raised}"
        _log.exception("%s: a copy failed", name)
    try:
        tell(partial(on_done, error))
    except RuntimeError as closed:  # a loop that was closed under us has nobody left to tell
        _log.info("%s: an answer was not delivered: %s", name, closed)
    except Exception:  # noqa: BLE001  (the thread has other things to do)
        _log.exception("%s: the answer to a copy failed", name)


class Worker:
    """The thread starts with the first job. `close` ends it after the job that it is at; the others are never done."""

    def __init__(self, name: str, tell: Tell) -> None:
        self._name, self._tell = name, tell
        self._jobs: SimpleQueue[tuple[Callable[[], object], OnDone] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._closed = False

    def put(self, job: Callable[[], object], on_done: OnDone) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((job, on_done))

    def close(self) -> None:
        """When it returns, nothing copies any more. Waits for one job: some MiB."""
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed and (work := self._jobs.get()) is not None:
            _carry_out(self._name, *work, self._tell)


class Guest:
    """`run` has a call made on the other's thread, where answers are given, too. `close` does not wait: the job that is
    under way ends before that thread does.
    """

    def __init__(self, name: str, run: Callable[[Callable[[], None]], None]) -> None:
        self._name, self._there = name, run
        self._closed = False

    def put(self, job: Callable[[], object], on_done: OnDone) -> None:
        self._there(partial(self._do, job, on_done))

    def close(self) -> None:
        self._closed = True

    def _do(self, job: Callable[[], object], on_done: OnDone) -> None:
        if not self._closed:
            _carry_out(self._name, job, on_done, at_once)


def at_once(call: Callable[[], None]) -> None:
    """A `Tell` for where answers are wanted on the thread that copies."""
    call()
