"""The clocks of a leg or a room: waits with a limit each, and *no progress*, which runs in every state.

A deadline is a local monotonic duration; no timestamp of another process is ever compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Wait(Enum):
    """What a leg or a room can be waiting for, beside progress."""

    ADMISSION = "admission"
    PREFILL = "prefill"
    TRANSFER = "transfer"


def admission_wait(was_admitted: bool) -> Wait | None:
    """What a candidate for a place at decode waits for. One that has had a place waits however long it takes."""
    return None if was_admitted else Wait.ADMISSION


@dataclass(frozen=True)
class Limits:
    """Seconds that each wait, and a time without progress, may last."""

    admission_s: float
    prefill_s: float
    transfer_s: float
    no_progress_s: float

    def of(self, wait: Wait) -> float:
        if wait is Wait.ADMISSION:
            return self.admission_s
        return self.prefill_s if wait is Wait.PREFILL else self.transfer_s


@dataclass(frozen=True)
class Expiry:
    """A clock that ran out: its name, its limit and how long it really ran."""

    clock: str
    limit_s: float
    elapsed_s: float


class Clocks:
    """At most one wait at a time, and the progress clock. Sans-IO: `now_s` is passed in."""

    __slots__ = ("_limits", "_progress_s", "_seen", "_stopped", "_wait", "_wait_since_s")

    def __init__(self, limits: Limits, now_s: float) -> None:
        self._limits = limits
        self._wait: Wait | None = None
        self._wait_since_s = now_s
        self._progress_s = now_s
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._stopped = False

    def wait(self, wait: Wait | None, now_s: float) -> None:
        """Start waiting for something else (or for nothing); that is progress."""
        if wait is not self._wait:
            self._wait, self._wait_since_s = wait, now_s
        self._progress_s = now_s

    def progress(self, now_s: float) -> None:
        self._progress_s = now_s

    def queued(self, leg: str, position: int, step: int, done: int, now_s: float) -> bool:
        """News from a leg's queue: progress only if the position fell, or its step counter or `done` rose."""
        before = self._seen.get(leg)
        self._seen[leg] = (position, step, done)
        if before is not None and not (position < before[0] or step > before[1] or done > before[2]):
            return False
        self._progress_s = now_s
        return True

    def written(self, leg: str, chunk: int, now_s: float) -> bool:
        """A chunk's write has ended: progress if the last one was of an earlier chunk. All may be computed by then."""
        return self.queued(f"{leg}, written", 0, 0, chunk + 1, now_s)

    def stop(self) -> None:
        """Nothing runs out any more."""
        self._stopped = True

    def is_due(self, now_s: float) -> bool:
        """Would `expired` report something? Changes nothing."""
        if self._stopped:
            return False
        if self._wait is not None and now_s - self._wait_since_s >= self._limits.of(self._wait):
            return True
        return now_s - self._progress_s >= self._limits.no_progress_s

    def expired(self, now_s: float) -> Expiry | None:
        """The clock that has run out by now, if any. It restarts, so that it is reported once per limit."""
        if self._stopped:
            return None
        if self._wait is not None:
            elapsed_s, limit_s = now_s - self._wait_since_s, self._limits.of(self._wait)
            if elapsed_s >= limit_s:
                self._wait_since_s = now_s
                return Expiry(f"waiting for {self._wait.value}", limit_s, elapsed_s)
        elapsed_s = now_s - self._progress_s
        if elapsed_s >= self._limits.no_progress_s:
            self._progress_s = now_s
            return Expiry("no progress", self._limits.no_progress_s, elapsed_s)
        return None
