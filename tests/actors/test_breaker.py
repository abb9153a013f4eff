"""The breaker's table, cell by cell, on a clock of the test's own; what speaks against a pair; Retry-After."""

from __future__ import annotations

import pytest

from kvferry.actors.router.breaker import Breakers, Verdict, verdict
from kvferry.actors.router.retry_after import RetryAfter
from kvferry.protocol.errors import Cause

PAIR = (1, 2)
GOOD, BAD, NOTHING = Verdict.GOOD, Verdict.BAD, Verdict.NOTHING


def breakers() -> Breakers:
    """3 failures in a row; open for 5 s, for 12 s at most."""
    return Breakers(3, 5.0, 12.0)


def room(board: Breakers, what: Verdict, now_s: float, pair: tuple[int, int] = PAIR) -> None:
    """A room that is opened and ends at once."""
    assert pair not in board.blocked(now_s)
    board.ended(pair, board.dispatched(pair), what, now_s)


def test_three_failures_in_a_row_open_it_for_this_pair_only() -> None:
    board = breakers()
    for what in (BAD, BAD, GOOD, BAD, BAD, NOTHING, BAD):  # a success starts the count again, an abort does not
        assert not board.blocked(0)
        room(board, what, 0)
    assert board.blocked(0) == {PAIR} and board.opened == 1
    room(board, GOOD, 0, (1, 3))
    room(board, GOOD, 0, (4, 2))


def opened(board: Breakers, now_s: float = 0.0) -> None:
    for _ in range(3):
        room(board, BAD, now_s)


def test_half_open_lets_one_probe_pass_at_a_time() -> None:
    board = breakers()
    opened(board)
    assert board.blocked(4.99) == {PAIR}
    assert not board.blocked(5.0)
    era = board.dispatched(PAIR)
    assert board.blocked(5.0) == {PAIR}, "a probe is under way"
    board.ended(PAIR, era, NOTHING, 6.0)  # its client went away: nothing is known, the next one probes
    assert not board.blocked(6.0)
    era = board.dispatched(PAIR)
    assert board.blocked(100.0) == {PAIR}
    board.ended(PAIR, era, GOOD, 100.0)
    assert not board.blocked(100.0)
    board.dispatched(PAIR)
    assert not board.blocked(100.0), "closed: many at once"


def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_the_limit() -> None:
    """5, 10, 12 (not 20), 12 s; after a success 5 s again."""
    board = breakers()
    opened(board)
    now_s = 0.0
    for open_s in (5, 10, 12, 12):
        assert board.blocked(now_s + open_s - 0.01) == {PAIR}
        now_s += open_s
        room(board, BAD, now_s)
    assert board.opened == 5
    now_s += 12
    room(board, GOOD, now_s)
    opened(board, now_s)
    assert board.blocked(now_s + 4.99) and not board.blocked(now_s + 5)


def test_rooms_of_an_earlier_era_change_nothing() -> None:
    """Five rooms run when three of them fail. What becomes of the other two says how the pair was."""
    board = breakers()
    eras = [board.dispatched(PAIR) for _ in range(5)]
    for era in eras[:3]:
        board.ended(PAIR, era, BAD, 0)
    board.ended(PAIR, eras[3], GOOD, 1)
    assert board.blocked(4.9) == {PAIR}, "an old success does not close it"
    assert not board.blocked(5.0)
    probe = board.dispatched(PAIR)
    board.ended(PAIR, eras[4], BAD, 5.1)
    assert board.blocked(5.2) == {PAIR}, "nor does an old failure end the probe"
    board.ended(PAIR, probe, GOOD, 5.3)
    assert not board.blocked(5.3) and board.opened == 1


def test_a_leader_that_was_started_again_begins_afresh() -> None:
    board = breakers()
    opened(board)
    board.keep({1, 2, 7})
    assert board.blocked(0) == {PAIR}
    board.keep({7, 2})
    assert not board.blocked(0)
    room(board, BAD, 0, (7, 2))
    assert not board.blocked(0)


def test_what_the_status_shows() -> None:
    board = breakers()
    opened(board)
    room(board, BAD, 0, (5, 6))  # closed: not shown
    shown = {"prefill": "prefill-0", "decode": "0000000000000002", "probing": False}
    assert board.status({1: "prefill-0"}, 2.0) == [shown | {"state": "open", "half_open_in_s": 3.0}]
    assert board.next_probe_s([PAIR], 2.0) == 3.0
    board.blocked(5.0)
    board.dispatched(PAIR)
    assert board.status({1: "prefill-0"}, 6.0) == [
        shown | {"state": "half_open", "probing": True, "half_open_in_s": 0.0}
    ]
    assert board.next_probe_s([PAIR], 6.0) is None


@pytest.mark.parametrize(
    ("cause", "queued", "expected"),
    [
        (None, False, GOOD),
        (Cause("handoff_failed", "a write failed", "prefill"), False, BAD),
        (Cause("handoff_failed", "the room crashed", "router"), False, NOTHING),
        (Cause("peer_lost", "the link ended", "decode", peer="p"), False, BAD),
        (Cause("peer_lost", "the link ended", "prefill", peer="d"), False, BAD),
        (Cause("peer_lost", "the router's link ended", "prefill", peer="p"), False, NOTHING),
        (Cause("peer_lost", "the router's link ended", "decode", peer="d"), False, NOTHING),
        (Cause("peer_lost", "the link ended", "decode", peer="front-0"), False, NOTHING),
        (Cause("deadline_exceeded", "no progress", "prefill", peer="p"), False, BAD),
        (Cause("deadline_exceeded", "waiting for admission", "decode", peer="d"), True, NOTHING),
        (Cause("aborted", "the client has gone", "front"), False, NOTHING),
        (Cause("invalid_request", "too long"), False, NOTHING),
        (Cause("overloaded", "decode holds 256 rooms", "decode"), False, NOTHING),
        (Cause("unavailable", "prefill is draining", "prefill"), False, NOTHING),
    ],
)
def test_what_speaks_against_a_pair(cause: Cause | None, queued: bool, expected: Verdict) -> None:
    assert verdict(cause, "p", "d", queued) is expected


def test_those_who_are_refused_are_given_one_place_after_the_other() -> None:
    """2 places a second: 0.5 s, 1, 1.5, 2 (a second at least); 10 s later those are gone and the next is 0.5 s away."""
    retry = RetryAfter()
    assert [retry.seconds(2.0, 100.0) for _ in range(4)] == [1.0, 1.0, 1.5, 2.0]
    assert retry.seconds(2.0, 110.0) == 1.0
    assert retry.seconds(0.25, 110.0) == pytest.approx(0.5 + 4.0)


def test_retry_after_is_bounded_and_a_second_while_nothing_is_known() -> None:
    retry = RetryAfter()
    assert retry.seconds(0.0, 5.0) == 1.0
    assert [retry.seconds(0.02, 5.0) for _ in range(3)] == [50.0, 60.0, 60.0]
    assert retry.seconds(1000.0, 65.0) == 1.0, "the bound holds for what is given away, too"
