"""Scenes come to their point: each within a few seeds, whatever else these bring."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.sim.scenario import CLOCKS, QUICK, STORIES, Scenario, Strike, draw
from kvferry.sim.seeds import Report, run_scenario

SEEDS = range(60)


def played(seed: int, kind: str) -> Scenario:
    """The scenario of that seed, with the story that begins with that kind, and no other fault."""
    scenario = draw(seed)
    story = next(story for story in STORIES if story[-1][0] == kind)
    return dataclasses.replace(scenario, strikes=tuple(Strike(0.5 + after_s, aim, one) for one, aim, after_s in story))


def hits(report: Report, point: str) -> int:
    assert not report.violations
    return report.cells.get(point, 0) + report.pairs.get(point, 0)


@pytest.mark.parametrize(
    ("kind", "policy", "clocks", "point"),
    [
        ("unheard commit", EARLY, QUICK, "room COMMITTED x COMMITTED"),
        ("unheard commit", PREFILL_COMPLETE, CLOCKS, "receiver STOPPING x ABORT"),
        ("kill unlinked", EARLY, CLOCKS, "sender AWAITING_DESTINATION x DECODE_EXITED"),
        ("kill unlinked", PREFILL_COMPLETE, CLOCKS, "sender KEPT x DECODE_EXITED"),
        ("leave", EARLY, CLOCKS, "leave in receiver STOPPING"),
    ],
)
def test_a_scene_comes_to_its_point(kind: str, policy: str, clocks: object, point: str) -> None:
    scenarios = (played(seed, kind) for seed in SEEDS)
    alike = [s for s in scenarios if s.options.policy == policy and s.options.clocks is clocks]
    assert any(hits(run_scenario(scenario), point) for scenario in alike)
