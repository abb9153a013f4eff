"""The clocks of a leg: what restarts them, and when each runs out. Times are made up; nothing sleeps."""

from __future__ import annotations

import pytest

from kvferry.protocol.clocks import Clocks, Expiry, Limits, Wait

LIMITS = Limits(admission_s=10.0, prefill_s=20.0, transfer_s=30.0, no_progress_s=5.0)


def busy(clocks: Clocks, start_s: int, end_s: int) -> list[tuple[float, Expiry]]:
    """Progress at every second; what expired, and when."""
    found = []
    for now_s in range(start_s, end_s):
        clocks.progress(float(now_s))
        if expiry := clocks.expired(float(now_s)):
            found.append((float(now_s), expiry))
    return found


@pytest.mark.parametrize(
    ("wait", "limit_s", "name"),
    [
        (Wait.ADMISSION, 10.0, "waiting for admission"),
        (Wait.PREFILL, 20.0, "waiting for prefill"),
        (Wait.TRANSFER, 30.0, "waiting for transfer"),
    ],
)
def test_a_wait_runs_out_at_its_own_limit_whatever_the_progress(wait: Wait, limit_s: float, name: str) -> None:
    clocks = Clocks(LIMITS, 100.0)
    clocks.wait(wait, 100.0)
    (first, *_) = busy(clocks, 100, 100 + int(limit_s) + 1)
    assert first == (100.0 + limit_s, Expiry(name, limit_s, limit_s))


@pytest.mark.parametrize("wait", [None, *Wait])
def test_no_progress_runs_in_every_state(wait: Wait | None) -> None:
    clocks = Clocks(LIMITS, 0.0)
    clocks.wait(wait, 1.0)
    assert clocks.expired(5.9) is None
    assert clocks.expired(6.5) == Expiry("no progress", 5.0, 5.5)


def test_an_expiry_is_reported_once_per_limit() -> None:
    clocks = Clocks(LIMITS, 0.0)
    assert [now_s for now_s in range(1, 17) if clocks.expired(float(now_s))] == [5, 10, 15]


def test_the_same_wait_again_is_progress_but_goes_on() -> None:
    clocks = Clocks(LIMITS, 0.0)
    clocks.wait(Wait.ADMISSION, 0.0)
    clocks.wait(Wait.ADMISSION, 4.0)
    assert clocks.expired(8.9) is None, "4 s + 5 s without progress are not over"
    clocks.progress(9.0)
    assert clocks.expired(10.0) == Expiry("waiting for admission", 10.0, 10.0)


def test_another_wait_starts_from_now() -> None:
    clocks = Clocks(LIMITS, 0.0)
    clocks.wait(Wait.ADMISSION, 0.0)
    clocks.wait(Wait.PREFILL, 9.0)
    assert busy(clocks, 9, 29) == []
    assert busy(clocks, 29, 30) == [(29.0, Expiry("waiting for prefill", 20.0, 20.0))]


@pytest.mark.parametrize(
    ("news", "is_progress"),
    [
        ((3, 7, 0), False),  # nothing has changed
        ((2, 7, 0), True),  # the position fell
        ((4, 7, 0), False),  # it rose
        ((3, 8, 0), True),  # the engine made a step
        ((3, 6, 0), False),  # a counter does not fall
        ((3, 7, 1), True),  # a chunk more is done
        ((4, 8, 0), True),
    ],
)
def test_queued_is_progress_only_if_something_moved(news: tuple[int, int, int], is_progress: bool) -> None:
    clocks = Clocks(LIMITS, 0.0)
    assert clocks.queued("decode", 3, 7, 0, now_s=0.0), "the first news of a leg is news"
    assert clocks.queued("decode", *news, now_s=4.0) is is_progress
    assert (clocks.expired(5.0) is None) is is_progress


def test_legs_queue_each_for_itself() -> None:
    clocks = Clocks(LIMITS, 0.0)
    clocks.queued("decode", 3, 7, 0, now_s=0.0)
    assert clocks.queued("prefill", 3, 7, 0, now_s=1.0)
    assert not clocks.queued("decode", 3, 7, 0, now_s=2.0)


def test_what_is_written_is_progress_after_everything_has_been_computed() -> None:
    """A repeat is none, nor is a chunk that is older than the one before."""
    clocks = Clocks(LIMITS, 0.0)
    clocks.queued("prefill", 0, 0, 4, now_s=0.0)  # chunk 3, the last
    says = [clocks.written("prefill", chunk, now_s=1.0) for chunk in (0, 0, 1, 3, 2)]
    assert says == [True, False, True, True, False]


def test_a_stopped_clock_never_runs_out() -> None:
    clocks = Clocks(LIMITS, 0.0)
    clocks.wait(Wait.TRANSFER, 0.0)
    clocks.stop()
    assert clocks.expired(1e9) is None


@pytest.mark.parametrize("wait", [None, *Wait])
def test_is_due_says_when_expired_would_and_changes_nothing(wait: Wait | None) -> None:
    clocks = Clocks(LIMITS, 0.0)
    clocks.wait(wait, 0.0)
    due = []
    for now_s in range(40):
        if now_s % 4 == 0:
            clocks.progress(float(now_s))
        says = [clocks.is_due(float(now_s)) for _ in range(2)]
        assert says == [clocks.expired(float(now_s)) is not None] * 2
        due += [now_s] * says[0]
    assert due == {None: [], Wait.ADMISSION: [10, 20, 30], Wait.PREFILL: [20], Wait.TRANSFER: [30]}[wait]
    clocks.stop()
    assert not clocks.is_due(1000.0)
