"""Faults seen elsewhere are planted one by one: the checker that is meant for each must fire, by its name."""

from __future__ import annotations

import pytest

from kvferry.sim.explore.bounds import Bounds
from kvferry.sim.explore.diagram import diagram
from kvferry.sim.explore.search import Search
from kvferry.sim.explore.world import World
from kvferry.sim.mutations import MUTATIONS, WIDE, Mutation

#: The faults that a checker must find; the document on exploration says where the others are met.
WANTED = {1, 2, 3, 4, 5, 6, 9, 11, 14, 18, 19, 20, 21}


def test_every_fault_that_is_wanted_is_planted() -> None:
    assert {mutation.number for mutation in MUTATIONS} == WANTED


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.number}: {mutation.title}")
def test_a_checker_fires(mutation: Mutation) -> None:
    """Cases 25, 26, 28, 31: what went wrong elsewhere is found here, within seconds, with a trace that leads to it."""
    with mutation.plant():
        world = World(mutation.bounds)
        found = Search(world).run()
        assert found.violation is not None and found.violation.checker == mutation.checker
        drawn = diagram(world, found.trace, found.violation)
    assert drawn.startswith("sequenceDiagram") and mutation.checker in drawn.splitlines()[-1]


SMALL = {mutation.bounds for mutation in MUTATIONS} - {WIDE}


@pytest.mark.parametrize("bounds", sorted(SMALL, key=repr), ids=repr)
def test_without_a_mutation_nothing_fires(bounds: Bounds) -> None:
    """Within the same bounds, so that each of the checkers above speaks of its mutation. (The widest is left out.)"""
    found = Search(World(bounds)).run()
    assert found.violation is None
    assert found.frontier == 0
