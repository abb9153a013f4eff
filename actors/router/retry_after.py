"""When a client that was refused should come back."""

from __future__ import annotations

from collections import deque

MIN_S = 1.0
MAX_S = 60.0


class Lives:
    """How long the last rooms lived."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=64)

    def ended(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)

    def ending_per_s(self, live: int) -> float:
        """Rooms that end, by Little's law: the live ones over the mean life of the last; 0 while nothing is known."""
        if not self._durations_s:
            return 0.0
        return live * len(self._durations_s) / max(sum(self._durations_s), 1e-9)


class RetryAfter:
    """Gives the places that will become free to those who were refused, one each, in their order: told one and the same
    moment, they would all come back at once and most would be refused again.
    """

    def __init__(self) -> None:
        self._given_s = 0.0  # the moment up to which places have been given away

    def seconds(self, free_per_s: float, now_s: float) -> float:
        """Until the next place is free that nobody was told of, from 1 to 60 s. `free_per_s` is the measured rate at
        which places become free; 0 is unknown.
        """
        if free_per_s <= 0:
            return MIN_S
        self._given_s = min(max(now_s, self._given_s) + 1 / free_per_s, now_s + MAX_S)
        return max(MIN_S, self._given_s - now_s)
