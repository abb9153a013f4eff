"""The journal: transitions with durations worked out by hand, and a bound on what is kept."""

from __future__ import annotations

import json

import pytest

from kvferry.actors.room.journal import Journal
from kvferry.protocol.kvpoll import KVPoll


def journal(limit: int = 4096) -> Journal:
    return Journal((1 << 63) - 1, 0xBEEF, 0, "prefill-0", "decode-0", "ucx/host", 100, began_s=50.0, limit=limit)


def test_each_transition_has_its_time_and_its_duration() -> None:
    book = journal()
    for at_s, state in ((50.0, KVPoll.BOOTSTRAPPING), (50.25, KVPoll.BOOTSTRAPPING), (50.5, KVPoll.WAITING_FOR_INPUT),
                        (51.5, KVPoll.TRANSFERRING), (54.0, KVPoll.SUCCESS), (60.0, KVPoll.SUCCESS)):  # fmt: skip
        book.poll(at_s, state)
    rows = [(row["state"], row["at_s"], row["duration_s"]) for row in book.as_object(now_s=99.0)["kvpoll"]]
    assert rows == [
        ("BOOTSTRAPPING", 0.0, 0.5), ("WAITING_FOR_INPUT", 0.5, 1.0), ("TRANSFERRING", 1.5, 2.5), ("SUCCESS", 4.0, 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("state", "duration_s"), [(KVPoll.BOOTSTRAPPING, 7.0), (KVPoll.FAILED, 0.0)])
def test_the_last_state_lasts_until_now_unless_it_is_final(state: KVPoll, duration_s: float) -> None:
    book = journal()
    book.poll(50.0, state)
    assert book.as_object(now_s=57.0)["kvpoll"][0]["duration_s"] == duration_s


def test_events_keep_what_says_something() -> None:
    book = journal()
    book.note(50.1234567, "computed", "prefill", chunk=0, tokens=32, kv_bytes=None, cause="", position=-1)
    assert book.as_object(60.0)["events"] == [
        {"at_s": 0.123457, "event": "computed", "leg": "prefill", "detail": {"chunk": 0, "tokens": 32}}
    ]


def test_events_over_the_limit_are_counted_not_kept() -> None:
    book = journal(limit=2)
    for number in range(5):
        book.note(50.0 + number, "queued", "decode", position=number + 1)
    shown = book.as_object(60.0)
    assert [event["detail"]["position"] for event in shown["events"]] == [1, 2] and shown["events_dropped"] == 3


def test_a_room_that_waits_long_keeps_one_line_of_each_stay_in_a_queue() -> None:
    book = journal()
    for second in range(1000):
        book.queued(51.0 + second, "decode", position=1000 - second, offset_s=float(second))
    book.note(2000.0, "admitted", "decode", pages=3)
    book.queued(2001.0, "prefill", position=2, offset_s=0.5)
    book.queued(2002.0, "decode", position=1, offset_s=0.5)
    events = [(e["at_s"], e["event"], e["leg"], e["detail"]) for e in book.as_object(2010.0)["events"]]
    assert events == [
        (1000.0, "queued", "decode", {"position": 1, "offset_s": 999.0}),
        (1950.0, "admitted", "decode", {"pages": 3}),
        (1951.0, "queued", "prefill", {"position": 2, "offset_s": 0.5}),
        (1952.0, "queued", "decode", {"position": 1, "offset_s": 0.5}),
    ]


def test_an_ended_journal_grows_no_older() -> None:
    book = journal()
    book.poll(50.0, KVPoll.BOOTSTRAPPING)
    book.end(53.0)
    assert book.as_object(now_s=99.0)["kvpoll"][0]["duration_s"] == 3.0


def test_the_object_is_json_and_its_ids_are_exact() -> None:
    shown = json.loads(json.dumps(journal().as_object(60.0)))
    assert (shown["room"], shown["request"]) == ("9223372036854775807", "000000000000beef")
    assert (shown["kv_bytes"], shown["outcome"], shown["kvpoll"], shown["events"]) == (0, None, [], [])
