"""An instance dies as one: a rank that has lost another one of it ends, too, once its own writes are quiet and told of.

Its host starts it again, with a new incarnation and new memory.
"""

from __future__ import annotations

#: What was said last is given so long to arrive.
GRACE_S = 0.3


class RankLost(RuntimeError):
    """A rank of this instance is lost, and this process ends for it."""


class Ending:
    """Sans-IO. Writes that do not end within `limit_s` are not waited for: the end of the process proves them quiet,
    where anything can.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s = 0.0
        self._quiet_since_s: float | None = None
        self.why = ""

    def __bool__(self) -> bool:
        return bool(self.why)

    def begin(self, why: str, now_s: float) -> bool:
        """False when it has begun before: the first reason stays."""
        if self.why:
            return False
        self.why, self._since_s = why, now_s
        return True

    def turn(self, quiet: bool, now_s: float) -> None:
        """Call it again and again; `quiet`: none of our own writes is open. Raises RankLost when it is time to end."""
        if not self.why:
            return
        if not quiet:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        told = self._quiet_since_s is not None and now_s - self._quiet_since_s >= GRACE_S
        if told or now_s - self._since_s >= self._limit_s:
            raise RankLost(self.why)
