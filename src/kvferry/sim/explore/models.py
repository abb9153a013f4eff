"""The models, by name, each with the bounds within which it is covered completely.

Each has a small size, which tests run, and a full one. Of the models with leaders, the ones in which every message
waits its turn have one room: all orders in which a router can hear of it. With two rooms, which meet at the leaders
only (pools, forwards, lanes), the router takes in at once what comes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvferry.sim.explore.bounds import Bounds
from kvferry.sim.explore.search import Explorable
from kvferry.sim.explore.session import SessionBounds, SessionWorld
from kvferry.sim.explore.world import World


@dataclass(frozen=True)
class Model:
    """`title` says what it is; `make` builds its world for the small or the full bounds."""

    name: str
    title: str
    small: Any
    full: Any
    make: Callable[[Any], Explorable]

    def world(self, full: bool) -> Explorable:
        return self.make(self.full if full else self.small)

    def bounds(self, full: bool) -> str:
        text: str = (self.full if full else self.small).text()
        return text


ONE_ROOM = Bounds(requests=1)
TWO_ROOMS = Bounds(requests=2, prompt=True)
TWO_CHUNKS = Bounds(requests=1, prompt=True, prompt_tokens=2, pages=4, source_pages=2)
TWO_ROUTERS = Bounds(routers=2, requests=1, attempts=2, source_pages=2, crashing=("router",), prompt=True)

MODELS: dict[str, tuple[Model, ...]] = {
    "session": (
        Model("session", "two link layers over a bad carrier", SessionBounds(faults=0), SessionBounds(), SessionWorld),
    ),
    "handoff": (
        Model(
            "handoff-1", "one room, every message waits its turn",
            replace(ONE_ROOM, faults=1, kinds=("path", "clock")), replace(ONE_ROOM, faults=1), World,
        ),
        Model("handoff-2", "two rooms, the second needs the first one's pages",
              replace(TWO_ROOMS, faults=0), TWO_ROOMS, World),
        Model("handoff-3", "one room in two chunks", replace(TWO_CHUNKS, faults=1), TWO_CHUNKS, World),
    ),
    "routers": (
        Model("routers", "two routers, one dies; the front goes on at the other",
              replace(TWO_ROUTERS, faults=1), TWO_ROUTERS, World),
    ),
}  # fmt: skip
