"""One timer for the earliest of many deadlines."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvferry.actors.ports import Clock, Timer

#: The least time until it rings, so that a deadline lost in rounding can't spin the loop.
FLOOR_S = 0.001


class Alarm:
    """`ring` is called once no later than the earliest time that was asked for since it rang last. Who wants it to ring
    again asks again.
    """

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock, self._ring = clock, ring
        self._timer: Timer | None = None
        self._at_s = math.inf
        self._off = False

    @property
    def is_set(self) -> bool:
        """It will ring, unless it is closed before."""
        return self._timer is not None

    def by(self, at_s: float) -> None:
        """Ring no later than that; `inf`: it need not."""
        if at_s < self._at_s and not self._off:
            self._stop()
            self._at_s = at_s
            self._timer = self._clock.call_later(max(FLOOR_S, at_s - self._clock.now_s()), self._due)

    def close(self) -> None:
        """For good."""
        self._stop()
        self._off = True

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at_s = None, math.inf

    def _due(self) -> None:
        self._timer, self._at_s = None, math.inf
        self._ring()
