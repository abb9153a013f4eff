"""What the router believes between two reports, and what leaders report when; by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.actors.load import LoadReports, Recent
from kvferry.actors.router.fleet import Fleet
from kvferry.actors.router.view import Ask
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Load
from kvferry.protocol.rank import Layout, RankInfo

LAYOUT = Layout("m", "1", "float32", 16, 1, 1, 8)
P1, P2, D1, D2 = 1, 2, 3, 4


def info(incarnation: int, role: str, **fields: Any) -> RankInfo:
    address = Address(f"{role}-{incarnation}", f"sim://{incarnation}", incarnation, "h", incarnation)
    return RankInfo(address.name, role, address, LAYOUT, pages=100, **fields)


RANKS = [info(P1, "prefill"), info(P2, "prefill"), info(D1, "decode"), info(D2, "decode")]


@pytest.fixture
def fleet() -> Fleet:
    """All are linked. Prefills report 1000 tokens a second and nothing queued, decodes 2 places and 20 pages."""
    made = Fleet(lambda incarnation: True)
    made.registered(RANKS)
    for prefill in (P1, P2):
        made.reported(prefill, Load("prefill", 0, 1000.0), 0.0)
    for decode in (D1, D2):
        made.reported(decode, Load("decode", free_pages=20, total_pages=100, free_places=2, place_s=4.0), 0.0)
    return made


def queued(fleet: Fleet, now_s: float = 0.0) -> list[float]:
    return [view.queued_tokens for view in fleet.prefills(now_s)]


def test_a_room_counts_from_its_opening_until_a_report_that_must_know_it(fleet: Fleet) -> None:
    fleet.dispatched(Ask(71, 300), P1, D1)
    fleet.dispatched(Ask(72, 50), P1, D1)
    assert queued(fleet) == [350, 0]
    fleet.opened(71, P1)
    fleet.reported(P1, Load("prefill", 280, 1000.0), 1.0)  # 20 of 71's 300 are computed; 72 is still on its way
    assert queued(fleet, 1.0) == [330, 0]
    fleet.opened(72, P1)
    assert queued(fleet, 1.0) == [330, 0], "Opened alone changes nothing: the report before it did not know"
    fleet.reported(P1, Load("prefill", 0, 1000.0), 2.0)
    assert queued(fleet, 2.0) == [0, 0]


def test_what_was_reported_is_worked_off_at_the_instances_own_speed(fleet: Fleet) -> None:
    fleet.reported(P1, Load("prefill", 900, 500.0), 10.0)
    fleet.dispatched(Ask(71, 60), P1, D1)
    assert queued(fleet, 11.0) == [460, 0]
    assert queued(fleet, 20.0) == [60, 0], "what was sent since is not: when it comes there is not known"


def test_a_sibling_leaves_a_page_of_work_at_its_home(fleet: Fleet) -> None:
    fleet.dispatched(Ask(71, 300), P1, D1)
    fleet.dispatched(Ask(72, 300, home=P1), P1, D2)
    assert queued(fleet) == [316, 0]


def test_decodes_places_and_pages_go_to_the_rooms_that_are_on_their_way(fleet: Fleet) -> None:
    """31 tokens and one more are 2 pages. Two rooms have places; the third waits, and so does everyone behind it."""
    seen = []
    for room in (71, 72, 73, 74):
        fleet.dispatched(Ask(room, 31), P1, D1)
        view = fleet.decodes()[0]
        seen.append((view.waiting, view.running, view.free_pages, view.free_places))
    assert seen == [(0, 1, 18, 1), (0, 2, 16, 0), (1, 2, 16, 0), (2, 2, 16, 0)]
    for room in (71, 72, 73):
        fleet.opened(room, D1)
    fleet.reported(D1, Load("decode", 0, 0, 1, 2, 16, 100, free_places=0, place_s=4.0), 0.5)
    view = fleet.decodes()[0]
    assert (view.waiting, view.running, view.free_pages, view.free_places) == (2, 2, 16, 0), "74 is not known there yet"


def test_a_room_that_failed_counts_no_more_and_one_that_runs_does_until_it_is_reported(fleet: Fleet) -> None:
    fleet.dispatched(Ask(71, 31), P1, D1)
    fleet.dispatched(Ask(72, 31), P1, D1)
    fleet.over(71, P1, D1, committed=False)
    fleet.over(72, P1, D1, committed=True)
    assert queued(fleet) == [0, 0], "computed"
    assert fleet.decodes()[0].running == 1
    fleet.opened(72, D1)
    fleet.reported(D1, Load("decode", running=1, free_pages=18, total_pages=100, free_places=1), 1.0)
    assert fleet.decodes()[0].running == 1


def test_unknown_speeds_are_the_others_mean_and_unknown_instances_idle() -> None:
    fleet = Fleet(lambda incarnation: True)
    fleet.registered([*RANKS, info(5, "prefill")])
    assert {view.tokens_per_s for view in fleet.prefills(0.0)} == {1000.0}, "nobody has been measured"
    fleet.reported(P1, Load("prefill", 0, 300.0), 0.0)
    fleet.reported(P2, Load("prefill", 0, 500.0), 0.0)
    assert [view.tokens_per_s for view in fleet.prefills(0.0)] == [300, 500, 400]
    view = fleet.decodes()[0]
    assert (view.waiting, view.running, view.free_pages, view.free_places) == (0, 0, 100, 100)
    assert fleet.finished_per_s() == 0


def test_requests_end_at_running_over_the_time_that_each_keeps_its_place(fleet: Fleet) -> None:
    """Little: 8 running for 4 s each are 2 a second, 3 for 6 s 0.5."""
    fleet.reported(D1, Load("decode", running=8, place_s=4.0), 1.0)
    fleet.reported(D2, Load("decode", running=3, place_s=6.0), 1.0)
    assert fleet.finished_per_s() == 2.5


def test_who_drains_or_is_not_linked_is_not_chosen_and_the_reason_is_told() -> None:
    up = {P1, D1, D2}
    fleet = Fleet(up.__contains__)
    fleet.registered(RANKS)
    assert [view.incarnation for view in fleet.prefills(0.0)] == [P1] and fleet.missing() == []
    fleet.registered([info(P1, "prefill", draining=True), RANKS[1]])
    assert fleet.prefills(0.0) == [] and fleet.decodes() == []
    assert fleet.missing() == ["prefill-1 is draining; prefill-2 is not linked", "no decode is registered"]


def test_ranks_behind_a_leader_are_not_chosen() -> None:
    fleet = Fleet(lambda incarnation: True)
    fleet.registered([RANKS[0], info(9, "prefill", tp_rank=1, tp_size=2), info(8, "registry")])
    assert [address.incarnation for address in fleet.addresses()] == [P1]


def test_a_process_that_was_started_again_is_a_new_instance(fleet: Fleet) -> None:
    fleet.dispatched(Ask(71, 300), P1, D1)
    fleet.registered([info(11, "prefill"), *RANKS[1:]])
    assert queued(fleet) == [0, 0]
    fleet.opened(71, P1)  # late news of the one that has gone
    fleet.reported(P1, Load("prefill", 500, 1.0), 1.0)
    fleet.over(71, P1, D1, committed=False)
    assert queued(fleet) == [0, 0]


def test_a_new_registry_takes_nobody_away_but_gives_places_to_others(fleet: Fleet) -> None:
    """Its roster is not complete yet: D1's place is another process's now, P1 and D2 have not registered again."""
    fleet.dispatched(Ask(71, 300), P1, D2)
    again = msgspec.structs.replace(info(33, "decode"), instance=RANKS[2].instance)
    fleet.registered([RANKS[1], again], complete=False)
    assert {a.incarnation for a in fleet.addresses()} == {P1, P2, D2, 33}
    assert {view.incarnation: view.queued_tokens for view in fleet.prefills(0.0)} == {P1: 300, P2: 0}
    fleet.registered([RANKS[1]])
    assert {a.incarnation for a in fleet.addresses()} == {P2}


# --- the leader's side ---


class Sent:
    """A network that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Load]] = []

    def send(self, incarnation: int, message: Load) -> bool:
        self.sent.append((incarnation, message))
        return True


def test_a_load_is_told_at_once_then_every_second_and_soon_after_a_change() -> None:
    network, load = Sent(), [Load("prefill", 10, 100.0)]
    reports = LoadReports(network, lambda: load[0])  # type: ignore[arg-type]
    reports.turn(0.0)
    assert network.sent == [], "nobody watches"
    reports.watch(RANKS[0].address)
    assert network.sent == [(P1, load[0])]

    def told(now_s: float) -> int:
        before = len(network.sent)
        reports.turn(now_s)
        return len(network.sent) - before

    assert told(5.0) == 1
    assert [told(5.05), told(5.5), told(5.99), told(6.0), told(6.5)] == [0, 0, 0, 1, 0]
    load[0] = Load("prefill", 10, 120.0)
    assert told(6.55) == 0, "a rate is no change of what there is to do"
    load[0] = Load("prefill", 20, 120.0)
    assert told(6.56) == 1
    load[0] = Load("prefill", 30, 120.0)
    assert [told(6.6), told(6.659), told(6.67)] == [0, 0, 1], "a tenth of a second apart at least"
    reports.watch(RANKS[1].address)
    load[0] = Load("prefill", 40, 120.0)
    assert told(7.0) == 2
    reports.link_lost(RANKS[0].address)
    load[0] = Load("prefill", 50, 120.0)
    assert told(8.0) == 1 and network.sent[-1] == (P2, load[0])


def test_recent_rates() -> None:
    """512 tokens in 1 s and 64 in 0.2 s: 576 / 1.2 a second; things that took 1 s and 0.2 s: 0.6 s each."""
    tokens, things = Recent(2), Recent(2)
    assert (tokens.per_s, things.mean_s) == (0.0, 0.0)
    for amount, duration_s in ((9, 9.0), (512, 1.0), (64, 0.2)):
        tokens.add(amount, duration_s)
        things.add(1, duration_s)
    assert (tokens.per_s, things.mean_s) == (pytest.approx(480), pytest.approx(0.6))
