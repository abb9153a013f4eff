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
from kvferry.sim.explore.gathering import GatheringSearch
from kvferry.sim.explore.search import Search
from kvferry.sim.explore.session import SessionBounds, SessionWorld
from kvferry.sim.explore.world import World


@dataclass(frozen=True)
class Model:
    """`title` says what it is; `make` builds its world for the small or the full bounds, `search` is its search."""

    name: str
    title: str
    small: Any
    full: Any
    make: Callable[[Any], Any]
    search: Callable[[Any], Search | GatheringSearch]

    def world(self, full: bool) -> Any:
        return self.make(self.full if full else self.small)

    def bounds(self, full: bool) -> str:
        text: str = (self.full if full else self.small).text()
        return text


LINKS = SessionBounds()
ONE_ROOM = Bounds(requests=1, faults=1)
TWO_ROOMS = Bounds(requests=2, prompt=True)
TWO_CHUNKS = Bounds(requests=1, prompt=True, prompt_tokens=2, pages=4, source_pages=2)
COMPUTES_FIRST = Bounds(requests=1, prompt=True, policy="prefill_complete")
SHUT_OUT = Bounds(requests=1, prompt=True, exits=False, revokes=True, crashing=("prefill",))
TWO_RANKS = Bounds(requests=1, prompt=True, ranks=2, crashing=("prefill", "prefill.1", "decode"))
TWO_ROUTERS = Bounds(routers=2, requests=1, attempts=2, source_pages=2, crashing=("router",), prompt=True)


def _world(name: str, title: str, full: Bounds, **small: Any) -> Model:
    return Model(name, title, replace(full, **small), full, World, Search)


MODELS: dict[str, tuple[Model, ...]] = {
    "session": (
        Model(
            "session", "two links over a bad carrier", replace(LINKS, faults=1, kinds=("path down",)), LINKS,
            SessionWorld, GatheringSearch,
        ),
    ),
    "handoff": (
        _world("handoff", "two rooms, and the second needs the pages of the first", TWO_ROOMS, faults=0),
        _world("handoff, slow router", "one room, every message waits its turn", ONE_ROOM, faults=0),
        _world("handoff, two chunks", "one room, written in two parts", TWO_CHUNKS, faults=1),
        _world("handoff, computed first", "one room under prefill_complete", COMPUTES_FIRST, faults=1),
        _world("handoff, shut out", "one room; writes arrive by an agent that decode may end", SHUT_OUT, faults=1),
    ),
    "ranks": (
        _world("ranks", "two source ranks, one target; any may die", TWO_RANKS, faults=1, kinds=("path",)),
    ),
    "routers": (
        _world("routers", "two routers, one dies, and the front goes on at the other", TWO_ROUTERS, faults=1),
    ),
}  # fmt: skip
