"""The exploration itself: snapshots, names that change places, the search, and the models within their small bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry import cli
from kvferry.actors.decode.quarantine import Quarantine
from kvferry.actors.decode.room import DecodeRoom
from kvferry.protocol.messages import Released
from kvferry.sim.explore.bounds import REQUEST, Bounds, room_of
from kvferry.sim.explore.canon import renamed
from kvferry.sim.explore.data_plane import NotingEndpoint
from kvferry.sim.explore.gathering import GatheringSearch
from kvferry.sim.explore.local import check_news
from kvferry.sim.explore.models import MODELS, SHUT_OUT, Model
from kvferry.sim.explore.search import Search
from kvferry.sim.explore.snapshot import freeze, thaw
from kvferry.sim.explore.violation import Violation
from kvferry.sim.explore.world import World
from kvferry.transfer.contract import Revoked

ALL = [model for group in MODELS.values() for model in group]


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.name)
def test_a_model_is_covered_within_its_small_bounds(model: Model) -> None:
    """Every state is left by every event, nothing is violated, and from each of them everything can end."""
    found = model.search(model.world(full=False)).run()
    assert found.violation is None, found.trace
    assert found.frontier == 0
    assert found.states > 100


def test_full_bounds_are_wider() -> None:
    for model in ALL:
        assert model.full.faults > model.small.faults


def test_what_is_left_out_of_the_world_moves_no_machine() -> None:
    check_news()


# --- the search, on worlds whose answer is known ---


class Grid:
    """Walks from (0, 0) to (3, 3), one step right or up at a time; `walls` can't be entered."""

    def __init__(self, walls: set[tuple[int, int]], forbidden: tuple[int, int] | None = None) -> None:
        self.walls, self.forbidden = walls, forbidden

    def start(self) -> tuple[int, int]:
        return (0, 0)

    def events(self, state: tuple[int, int]) -> Iterator[tuple[Any, ...]]:
        x, y = state
        for name, to in (("right", (x + 1, y)), ("up", (x, y + 1))):
            if max(to) <= 3 and to not in self.walls:
                yield (name,)

    def after(self, state: tuple[int, int], event: tuple[Any, ...]) -> tuple[int, int]:
        x, y = state
        return (x + 1, y) if event[0] == "right" else (x, y + 1)

    def check(self, state: tuple[int, int]) -> None:
        if state == self.forbidden:
            raise Violation("grid", f"{state} is forbidden")

    def key(self, state: tuple[int, int]) -> tuple[int, int]:
        return state

    def is_quiet(self, state: tuple[int, int]) -> bool:
        return state == (3, 3)

    def is_fair(self, event: tuple[Any, ...]) -> bool:
        return True


def test_every_state_is_met_once() -> None:
    found = Search(Grid(set())).run()
    assert (found.states, found.transitions, found.depth) == (16, 24, 6)
    assert found.violation is None


def test_the_trace_is_a_shortest_one() -> None:
    found = Search(Grid(set(), forbidden=(2, 1))).run()
    assert found.violation is not None and found.violation.checker == "grid"
    assert sorted(event[0] for event in found.trace) == ["right", "right", "up"]


def test_a_dead_end_is_found() -> None:
    """(3, 1) can be entered, and nothing leads on from there."""
    found = Search(Grid({(3, 2)})).run()
    assert found.violation is not None and found.violation.checker == "all-end"
    x, y = 0, 0
    for (name,) in found.trace:
        x, y = (x + 1, y) if name == "right" else (x, y + 1)
    assert (x, y) in {(3, 0), (3, 1)}  # the first is on the way to the second


def test_a_limit_leaves_a_frontier() -> None:
    assert Search(Grid(set()), limit=5).run().frontier > 0


class Keys:
    """A walk from 0 to 3. The step from 1 to 2 needs the key that lies on the way over 4, and the door closes at once;
    one way to 0 leads over 4, so the walk that starts at 0 has it at last.
    """

    def __init__(self, forbidden: bool = False) -> None:
        self.steps: tuple[tuple[int, int], ...] = ((0, 1), (0, 4), (4, 0), (2, 3))
        self.forbidden = forbidden

    def start(self) -> int:
        return 0

    def own(self, state: int) -> Iterator[tuple[Any, ...]]:
        return (("to", to) for at, to in self.steps if at == state)

    def brought(self, state: int, gathered: int) -> Iterator[tuple[Any, ...]]:
        if state == 1 and gathered & 1:
            yield ("to", 2)

    def turn(self, state: int, event: tuple[Any, ...]) -> tuple[int, int]:
        if event[1] == 3 and self.forbidden:
            raise Violation("keys", "3 is entered")
        return event[1], int(state == 4)

    def kept(self, state: int, gathered: int) -> int:
        return gathered

    def key(self, state: int) -> int:
        return state

    def is_quiet(self, state: int) -> bool:
        return state == 3

    def is_fair(self, event: tuple[Any, ...]) -> bool:
        return True


def test_what_is_gathered_later_reaches_states_that_were_left_before() -> None:
    """1 is met before the key is; it is left again when the key has come there by way of 0, and each state is met once.
    Transitions: 0-1, 0-4, 4-0, 1-2, 2-3."""
    found = GatheringSearch(Keys()).run()
    assert (found.states, found.transitions, found.frontier) == (5, 5, 0)
    assert found.violation is None


def test_a_violation_behind_something_gathered_is_found() -> None:
    found = GatheringSearch(Keys(forbidden=True)).run()
    assert found.violation is not None and found.violation.checker == "keys"
    assert found.trace == [("to", 1), ("to", 2), ("to", 3)]


def test_a_state_that_needs_what_nobody_gathers_is_stuck() -> None:
    keys = Keys()
    keys.steps = ((0, 1), (2, 3))
    found = GatheringSearch(keys).run()
    assert found.violation is not None and found.violation.checker == "all-end"


# --- revocation ---

SHUT_OUT_SMALL = replace(SHUT_OUT, faults=1, kinds=("break",))


def test_an_agent_that_has_ended_is_the_proof_by_which_pages_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come back by it whose writer has neither answered nor ended."""
    proofs: set[str] = set()
    end = Quarantine.end

    def noting(self: Quarantine, room: DecodeRoom, pages: int, now_s: float) -> Released:
        released = end(self, room, pages, now_s)
        proofs.add(released.proof)
        return released

    monkeypatch.setattr(Quarantine, "end", noting)
    assert Search(World(SHUT_OUT_SMALL)).run().violation is None
    assert proofs == {"drained", "revoked"}


def test_a_revocation_that_does_not_end_the_agent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is minted, and the writer's bytes land all the same."""

    async def revoke(self: NotingEndpoint, writer: int) -> Revoked | None:
        return Revoked(writer, self.agents[writer]) if writer in self.agents else None

    monkeypatch.setattr(NotingEndpoint, "revoke", revoke)
    found = Search(World(SHUT_OUT_SMALL)).run()
    assert found.violation is not None and found.violation.checker == "write-in-leased-page"


# --- snapshots and keys ---


def test_a_snapshot_keeps_functions_that_lead_back_to_their_owner() -> None:
    class_of: dict[str, Any] = {"count": 1}

    def bump(by: int) -> int:
        class_of["count"] += by
        return int(class_of["count"])

    class_of["bump"] = bump
    copy = thaw(freeze(class_of))
    assert copy["bump"](2) == 3
    assert copy["count"] == 3
    assert class_of["count"] == 1


def test_rooms_change_places_in_a_key() -> None:
    a, b = room_of(0, 0), room_of(1, 0)
    names = {a: b, b: a}
    assert renamed(("x", a, frozenset({(b, 7)})), names) == ("x", b, frozenset({(a, 7)}))


def test_two_clients_that_differ_by_name_alone_are_one_state() -> None:
    world = World(Bounds(requests=2, prompt=True, faults=0))
    first, second = (world.after(world.start(), ("ask", client, 0)) for client in (0, 1))
    assert first != second
    assert world.key(first) == world.key(second)
    assert world.spec(0, 0).request == REQUEST


def test_an_error_in_an_actor_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as a finding of its own, and never as one of a checker that was meant."""
    from kvferry.actors.prefill.prefill import Prefill

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Prefill, "leg_opened", broken)
    found = Search(World(Bounds(requests=1, prompt=True, faults=0))).run()
    assert found.violation is not None and found.violation.checker == "no-escape"
    assert "planted" in found.violation.text


def test_the_command_prints_what_was_covered(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sim", "explore", "--model", "handoff", "--small", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["models"]
    assert [row["model"] for row in rows] == [model.name for model in MODELS["handoff"]]
    assert all(row["frontier"] == 0 and row["violation"] is None and row["states"] for row in rows)
