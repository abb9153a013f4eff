"""Counts what goes wrong on a process's wires, and says so in its log without flooding it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

#: After a line about one kind, the next about it comes no sooner; it then says how many there were.
QUIET_S = 60.0


class Complaints:
    """`counts` takes every one; the log gets the first of a kind, and then a line a minute at most."""

    def __init__(self, log: logging.Logger, counts: Counter[str], now_s: Callable[[], float]) -> None:
        self._log, self._counts, self._now_s = log, counts, now_s
        self._said: dict[str, tuple[float, int]] = {}  # by kind: when, and the count then

    def about(self, kind: str, text: str, *args: object) -> None:
        """`kind` is the key in `counts`: one of few, never a peer's word. `text` with `args` is for `logging`."""
        self._counts[kind] += 1
        now_s, count = self._now_s(), self._counts[kind]
        said_s, before = self._said.get(kind, (float("-inf"), 0))
        if now_s - said_s < QUIET_S:
            return
        self._said[kind] = (now_s, count)
        more = f" ({count - before} since the last such line)" if before else ""
        self._log.warning(text + more, *args)
