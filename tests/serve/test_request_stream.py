"""RequestStream against a list of which indices have been offered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import Token
from kvferry.serve.stream import RequestStream, Verdict


def token(index: int, finish: str = "", attempt: int = 0) -> Token:
    return Token(1, attempt, 2, index, 1000 * attempt + index, f"a{attempt}i{index}", finish)


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """(number of tokens of attempt 1, offers as (attempt, index)): repeated, reordered, older attempts among them."""
    count = draw(st.integers(1, 8))
    offers = st.tuples(st.sampled_from([0, 1, 1, 1]), st.integers(0, count + 1))
    return count, draw(st.lists(offers, max_size=40))


@given(deliveries())
def test_each_index_once_in_order_whatever_comes(case: tuple[int, list[tuple[int, int]]]) -> None:
    count, offers = case
    stream = RequestStream(max_tokens=50)
    stream.begin(1)
    given_out: list[Token] = []
    seen: set[int] = set()
    for attempt, index in offers:
        stream.offer(token(index, "stop" if index == count - 1 else "", attempt))
        given_out += stream.drain()
        if attempt == 1:
            seen.add(index)
        whole = next(i for i in range(count + 3) if i not in seen)  # the first gap
        assert [t.index for t in given_out] == list(range(min(whole, count)))
        assert all(t.attempt == 1 for t in given_out)
        assert stream.over == (whole >= count)
    assert stream.finish_reason == ("stop" if stream.over else "")


def test_verdicts_and_bounds() -> None:
    stream = RequestStream(max_tokens=3)
    assert stream.offer(token(1)) is Verdict.HELD
    assert stream.offer(token(1)) is Verdict.DUPLICATE
    assert stream.offer(token(3)) is Verdict.BEYOND  # max_tokens is 3: indices 0, 1, 2
    assert stream.offer(token(0, attempt=1)) is Verdict.STALE  # nobody opened attempt 1
    assert stream.offer(token(-1)) is Verdict.DUPLICATE
    assert stream.drain() == []
    assert stream.offer(token(0)) is Verdict.TAKEN
    assert [t.index for t in stream.drain()] == [0, 1]
    assert stream.offer(token(2, "length")) is Verdict.TAKEN
    assert stream.over and stream.finish_reason == "length"
    assert stream.offer(token(2, "length")) is Verdict.DUPLICATE
    assert not stream.fail(Cause("peer_lost", "too late"))
    assert stream.cause is None


def test_what_was_in_order_before_a_failure_is_still_given_and_nothing_after() -> None:
    stream = RequestStream(max_tokens=9)
    for index in (0, 1, 3):
        stream.offer(token(index))
    assert stream.fail(Cause("peer_lost", "gone"))
    assert stream.offer(token(2)) is Verdict.BEYOND
    assert [t.index for t in stream.drain()] == [0, 1]
    assert stream.drain() == []


def test_a_later_attempt_goes_on_where_the_earlier_one_stopped() -> None:
    stream = RequestStream(max_tokens=9)
    for index in (0, 1, 4):
        stream.offer(token(index))
    stream.begin(1)
    assert stream.offer(token(2)) is Verdict.STALE
    for index in (3, 2):
        stream.offer(token(index, attempt=1))
    assert [(t.attempt, t.index) for t in stream.drain()] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    with pytest.raises(ValueError, match="attempt 1 can't follow attempt 1"):
        stream.begin(1)
