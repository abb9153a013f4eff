"""What a run must have hit: every cell of the tables but those that are known to be unreachable, and every fault in
every state that a fault can find a room in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.sim.chaos import WEIGHTS
from kvferry.sim.coverage import all_cells, state_name
from kvferry.sim.scenario import ROOM_AIMS
from kvferry.sim.unreachable import SELDOM, UNREACHABLE


@dataclass(frozen=True)
class Coverage:
    """Counts of what is required, zeros included, and of it what was never hit."""

    cells: dict[str, int]
    pairs: dict[str, int]

    @property
    def missing(self) -> list[str]:
        return [name for counts in (self.cells, self.pairs) for name, count in counts.items() if not count]

    @property
    def summary(self) -> str:
        hit_cells, hit_pairs = (sum(map(bool, counts.values())) for counts in (self.cells, self.pairs))
        return (
            f"{hit_cells} of {len(self.cells)} cells that can be reached ({len(unreachable_cells())} can't), "
            f"{hit_pairs} of {len(self.pairs)} faults in states"
        )


def unreachable_cells() -> dict[str, str]:
    """By cell: why no system of correct processes comes there."""
    refused = {cell: "the table refuses it" for cell, what in all_cells().items() if what == "refused"}
    return UNREACHABLE | refused


def required_cells() -> list[str]:
    unreachable = unreachable_cells()
    return [cell for cell in all_cells() if cell not in unreachable and cell not in SELDOM]


def required_pairs() -> list[str]:
    """Each kind of fault in each state that rooms stay in."""
    return [f"{kind} in {state_name(state)}" for kind in WEIGHTS for state in ROOM_AIMS]


def coverage_of(cells: Mapping[str, int], pairs: Mapping[str, int]) -> Coverage:
    return Coverage(
        {name: cells.get(name, 0) for name in required_cells()},
        {name: pairs.get(name, 0) for name in required_pairs()},
    )
