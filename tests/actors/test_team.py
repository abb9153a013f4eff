"""Who may join an instance, when its forward has ended, and when a rank that has lost another one ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.actors.ranks.ending import GRACE_S, Ending, RankLost
from kvferry.actors.ranks.team import Team
from kvferry.engine.contract import Drawn, Sequence, StepPlan, StepResult, decode_plan
from kvferry.protocol.address import Address
from kvferry.protocol.instance import Join, Joined, RunStep, Stepped
from kvferry.protocol.messages import Message
from kvferry.protocol.rank import Layout, RankInfo, Slice

LAYOUT = Layout("model", "1", "float32", 16, layers=5, kv_heads=2, head_dim=8)


def address(number: int) -> Address:
    return Address(f"rank-{number}", "sim", 1000 + number, "sim", number)


def info(rank: int, **more: Any) -> RankInfo:
    fields: dict[str, Any] = {"pp_rank": rank, "pp_size": 3, "pages": 64} | more
    return RankInfo("prefill-0", "prefill", address(rank), LAYOUT, **fields)


class Wire:
    """A network that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []

    def send(self, incarnation: int, message: Message) -> bool:
        self.sent.append((incarnation, message))
        return True


def combine(_plan: StepPlan, result: StepResult, parts: Any) -> StepResult:
    return msgspec.structs.replace(result, drawn=(Drawn(sum(int(part) for part in parts), 1.0),))


def full() -> tuple[Team, Wire]:
    wire = Wire()
    team = Team(wire, info(0), combine)  # type: ignore[arg-type]
    for rank in (2, 1):
        assert not team.complete and team.join(address(rank), Join(info(rank)))
    assert team.complete
    return team, wire


def test_all_ranks_make_it_complete_in_any_order() -> None:
    team, wire = full()
    assert wire.sent == [(1002, Joined(2)), (1001, Joined(1))]
    slices = [(member.rank, member.address.incarnation, member.slice) for member in team.members()]
    assert slices == [(0, 1000, Slice(0, 2, 0, 2)), (1, 1001, Slice(2, 2, 0, 2)), (2, 1002, Slice(4, 1, 0, 2))]
    assert team.join(address(1), Join(info(1))), "a Joined that was lost is said again"


@pytest.mark.parametrize(
    "stranger",
    [
        info(1, pp_size=2),
        info(1, pages=32),
        info(0),
        msgspec.structs.replace(info(1), instance="prefill-1"),
        msgspec.structs.replace(info(1), role="decode"),
        msgspec.structs.replace(info(1), layout=msgspec.structs.replace(LAYOUT, page_size=8)),
        msgspec.structs.replace(info(1), address=address(7)),
    ],
    ids=["size", "pages", "the leader's place", "instance", "role", "layout", "another process"],
)
def test_who_does_not_belong_here_is_not_taken_in(stranger: RankInfo) -> None:
    wire = Wire()
    team = Team(wire, info(0), None)  # type: ignore[arg-type]
    assert not team.join(address(1), Join(stranger)) and not wire.sent and not team.mates


def test_a_second_process_does_not_take_the_place_of_one_that_is_not_known_to_be_gone() -> None:
    team, _ = full()
    again = msgspec.structs.replace(info(1), address=address(9))
    assert not team.join(address(9), Join(again))
    assert team.rank_of(address(1)) == 1 and team.rank_of(address(9)) is None


def test_a_follower_that_is_lost_before_all_are_there_leaves_its_place_open() -> None:
    wire = Wire()
    team = Team(wire, info(0), None)  # type: ignore[arg-type]
    assert team.join(address(1), Join(info(1)))
    assert team.lost(address(1)) is None and team.lost(address(5)) is None
    again = msgspec.structs.replace(info(1), address=address(9))
    assert team.join(address(9), Join(again)) and team.join(address(2), Join(info(2)))
    assert team.lost(address(9)) == 1, "now the instance ends with it"


def test_a_forward_has_ended_when_it_has_on_every_rank() -> None:
    team, wire = full()
    plan = StepPlan(4, (Sequence(1, (5,), 0, (3,)),))
    team.begin(plan)
    orders = [(to, decode_plan(message.plan)) for to, message in wire.sent if isinstance(message, RunStep)]
    assert orders == [(1002, plan), (1001, plan)]
    assert team.mate_stepped(2, Stepped(4, b"20")) is None
    assert team.stepped(StepResult(4, (None,), 0.5)) is None
    assert team.mate_stepped(2, Stepped(4, b"20")) is None, "the same rank again"
    assert team.mate_stepped(1, Stepped(3, b"7")) is None, "of another forward"
    assert team.mate_stepped(1, Stepped(4, b"7")) == (plan, StepResult(4, (Drawn(27, 1.0),), 0.5))
    assert team.mate_stepped(1, Stepped(4, b"7")) is None


def test_an_instance_of_one_rank_waits_for_nobody() -> None:
    wire = Wire()
    alone = msgspec.structs.replace(info(0), pp_size=1)
    team = Team(wire, alone, None)  # type: ignore[arg-type]
    plan, result = StepPlan(1, ()), StepResult(1, (), 0.1)
    team.begin(plan)
    assert team.complete and team.members() == () and team.stepped(result) == (plan, result) and not wire.sent


def test_a_rank_ends_when_its_writes_have_ended_and_its_words_have_had_time() -> None:
    ending = Ending(limit_s=60.0)
    ending.turn(True, 0.0)
    assert not ending and ending.begin("rank 1 is lost", 10.0) and not ending.begin("rank 2 is lost", 10.5)
    ending.turn(False, 11.0)
    ending.turn(True, 12.0)
    ending.turn(False, 12.1)  # a write that was on its way
    ending.turn(True, 13.0)
    ending.turn(True, 13.0 + GRACE_S / 2)
    with pytest.raises(RankLost, match="rank 1 is lost"):
        ending.turn(True, 13.0 + GRACE_S)


def test_a_rank_whose_writes_do_not_end_ends_with_them() -> None:
    ending = Ending(limit_s=60.0)
    ending.begin("rank 1 is lost", 10.0)
    ending.turn(False, 69.9)
    with pytest.raises(RankLost):
        ending.turn(False, 70.0)
