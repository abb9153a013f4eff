"""Ends processes that keep more pages in quarantine than the configuration allows, by the word of whose pages they are.

That process, the owner of the pages, lives on the same host and holds the pidfd of the very process that it names; so
it is told to end it, and a successor is never hit. The hosting starts another one in its place, as after any death.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Coroutine
from typing import Any, Protocol

from kvferry.actors.membership import REGISTRY
from kvferry.protocol.messages import OverBudget

logger = logging.getLogger("kvferry.controller")


class Calls(Protocol):
    """What it needs of `kvferry.actors.pools.Hosting`."""

    async def call(self, name: str, method: str, *args: Any) -> Any: ...


class Reaper:
    """`killed` counts by name."""

    def __init__(self, hosting: Calls, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.killed: Counter[str] = Counter()
        self._hosting, self._spawn = hosting, spawn
        self._ending: set[int] = set()

    async def look(self, members: Container[str]) -> None:
        """Ask the registry who is over the budget. Of strangers to the pools nobody would start another."""
        try:
            found: list[tuple[str, OverBudget]] = await self._hosting.call(REGISTRY, "over_budget")
        except (LookupError, TimeoutError):
            return  # it is said again
        for owner, overdue in found:
            if overdue.incarnation not in self._ending and overdue.instance in members:
                self._ending.add(overdue.incarnation)
                self._spawn(self._end(owner, overdue))

    async def _end(self, owner: str, overdue: OverBudget) -> None:
        try:
            ended = await self._hosting.call(owner, "end_writer", overdue.incarnation)
        except (LookupError, TimeoutError):
            ended = False
        self._ending.discard(overdue.incarnation)
        if ended:
            self.killed[overdue.instance] += 1
            logger.warning(
                "%s, process %016x, was killed: %d pages of %s have been quarantined for it, for %.1f s",
                overdue.instance, overdue.incarnation, overdue.pages, owner, overdue.quarantined_s,
            )  # fmt: skip
