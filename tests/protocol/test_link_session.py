"""The link session, without a network: its table, its numbers, its timers; then an adversary between two of them."""

from __future__ import annotations

import contextlib
import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol.address import Address
from kvferry.protocol.frames import (
    BATCH_BYTES,
    BATCH_MESSAGES,
    MAX_FRAME_BYTES,
    Ack,
    Bye,
    Data,
    Frame,
    Hello,
    NotMe,
    Welcome,
    decode_frame,
    encode_frame,
)
from kvferry.protocol.link import Answered, Delivered, LinkLimits, LinkSession, Lost, Up
from kvferry.protocol.link_table import TABLE, Ending, LinkEvent, LinkState
from kvferry.protocol.machine import holes
from kvferry.protocol.messages import BadFrame

A = Address("a", "tcp://10.0.0.1:1", 11, "host", 101)
B = Address("b", "tcp://10.0.0.2:2", 22, "host", 202)
LIMITS = LinkLimits(heartbeat_s=1.0, silence_s=10.0, resend_s=0.5, window=8)
S, E = LinkState, LinkEvent

#: One frame (or local call) per event, as A's session 500 meets it.
FRAMES: dict[LinkEvent, Frame] = {
    E.HELLO: Hello(500, B, 11, 1),
    E.LOWER_HELLO: Hello(499, B, 11, 1),
    E.HIGHER_HELLO: Hello(501, B, 11, 1),
    E.WELCOME: Welcome(500, B, 1),
    E.NOT_ME: NotMe(500, 33),
    E.DATA: Data(500, 0, 0, (b"m",)),
    E.ACK: Ack(500, 0),
    E.BYE: Bye(500, "closed"),
    E.STRAY: Data(777, 0, 0, (b"m",)),
}
OVER_FROM_EACH = {E.NOT_ME, E.BYE, E.END}
#: The next state of every cell, by hand.
NEXT = {
    (S.CONNECTING, e): S.OPEN if e in (E.HELLO, E.LOWER_HELLO, E.WELCOME)
    else S.OVER if e in OVER_FROM_EACH else S.CONNECTING for e in E
} | {
    (S.OPEN, e): S.OVER if e in OVER_FROM_EACH | {E.LOWER_HELLO, E.HIGHER_HELLO} else S.OPEN for e in E
} | {(S.OVER, e): S.OVER for e in E}  # fmt: skip


def connecting() -> LinkSession:
    return LinkSession.dial(500, A, B, 1, LIMITS, 0.0)


def opened() -> LinkSession:
    link = connecting()
    link.collect(0.0)
    link.receive(FRAMES[E.WELCOME], 0.0)
    assert link.take_events() == [Up()]
    return link


def over() -> LinkSession:
    link = opened()
    link.end(Ending.CLOSED, 0.0)
    link.take_events()
    link.collect(0.0)
    return link


MAKE = {S.CONNECTING: connecting, S.OPEN: opened, S.OVER: over}


def test_every_cell_of_the_table_is_filled() -> None:
    assert holes(TABLE, LinkState, LinkEvent) == []


@pytest.mark.parametrize("state", LinkState)
@pytest.mark.parametrize("event", LinkEvent)
def test_every_cell_leads_where_the_hand_made_table_says(state: LinkState, event: LinkEvent) -> None:
    link = MAKE[state]()
    if event is E.SEND:
        assert link.send(b"x", 1.0) is (state is not S.OVER)
    elif event is E.END:
        link.end(Ending.CLOSED, 1.0)
    else:
        link.receive(FRAMES[event], 1.0)
    assert link.state is NEXT[state, event]
    lost = [e for e in link.take_events() if isinstance(e, Lost)]
    assert len(lost) == (state is not S.OVER and link.state is S.OVER)
    if state is S.OVER:
        assert link.collect(1.0) == []
        assert link.next_tick_s is None


# --- numbers and acknowledgements --------------------------------------------------------------------------


def test_messages_queued_before_the_welcome_follow_it_in_one_frame() -> None:
    link = connecting()
    assert link.collect(0.0) == [Hello(500, A, 22, 1)]
    assert link.send(b"one", 0.1) and link.send(b"two", 0.1)
    assert link.collect(0.1) == []
    link.receive(Welcome(500, B, 0), 0.2)
    assert link.collect(0.2) == [Data(500, 0, 0, (b"one", b"two"))]


def test_a_batch_is_bounded_in_messages_and_in_bytes() -> None:
    link = LinkSession.dial(500, A, B, 1, LinkLimits(1.0, 10.0, 0.5, window=10_000), 0.0)
    for _ in range(BATCH_MESSAGES + 1):
        link.send(b"m", 0.0)
    for _ in range(3):
        link.send(bytes(BATCH_BYTES // 2), 0.0)
    link.collect(0.0)
    link.receive(Welcome(500, B, 0), 0.0)
    sizes = [[len(p) for p in f.payloads] for f in link.collect(0.0) if isinstance(f, Data)]
    assert sizes == [[1] * BATCH_MESSAGES, [1, BATCH_BYTES // 2], [BATCH_BYTES // 2, BATCH_BYTES // 2]]


def test_repeats_are_delivered_once_and_gaps_are_dropped_and_answered_at_once() -> None:
    link = opened()
    link.receive(Data(500, 0, 0, (b"0", b"1")), 1.0)
    link.receive(Data(500, 0, 0, (b"0", b"1", b"2")), 1.0)
    assert link.take_events() == [Delivered(b"0"), Delivered(b"1"), Delivered(b"2")]
    link.receive(Data(500, 4, 0, (b"4",)), 1.0)
    assert link.take_events() == []
    assert link.collect(1.0) == [Ack(500, 3)]
    link.receive(Data(500, 3, 0, (b"3",)), 1.0)
    assert link.take_events() == [Delivered(b"3")]


def test_an_ack_waits_for_data_to_ride_on_and_not_longer_than_a_quarter_of_the_resend_time() -> None:
    link = opened()
    link.receive(Data(500, 0, 0, (b"0",)), 1.0)
    assert link.collect(1.0) == []
    link.send(b"reply", 1.1)
    assert link.collect(1.1) == [Data(500, 0, 1, (b"reply",))]
    link.receive(Data(500, 1, 1, (b"1",)), 1.5)
    assert link.next_tick_s == 1.625
    link.tick(1.625)
    assert link.collect(1.625) == [Ack(500, 2)]


def test_everything_unacknowledged_is_sent_again_with_doubling_waits() -> None:
    link = opened()
    for payload in (b"0", b"1", b"2"):
        link.send(payload, 1.0)
    link.collect(1.0)
    link.receive(Ack(500, 1), 1.25)  # progress: the wait starts again
    assert link.next_tick_s == 1.75
    sent_at_s = []
    for eighth in range(11, 44):
        now_s = eighth / 8
        link.receive(Ack(500, 1), now_s)  # heard, but no progress
        link.tick(now_s)
        again = [f for f in link.collect(now_s) if isinstance(f, Data)]
        assert again in ([], [Data(500, 1, 0, (b"1", b"2"))])
        sent_at_s += [now_s] * len(again)
    assert sent_at_s == [1.75, 2.75, 4.75]
    link.receive(Ack(500, 3), 6.0)
    assert link.unacked == 0


def test_an_ack_of_what_was_never_queued_changes_nothing() -> None:
    link = opened()
    link.send(b"0", 1.0)
    link.collect(1.0)
    link.receive(Ack(500, 2), 1.0)
    assert link.unacked == 1


def test_more_than_window_messages_unacknowledged_end_the_session() -> None:
    link = opened()
    assert all(link.send(b"m", 1.0) for _ in range(LIMITS.window))
    link.collect(1.0)
    assert link.send(b"m", 1.0) is False
    assert link.take_events() == [Lost(Ending.OVERFLOW)]
    assert link.collect(1.0) == [Bye(500, "overflow")]


def test_closing_sends_what_is_queued_and_then_bye() -> None:
    link = opened()
    link.send(b"last", 1.0)
    link.end(Ending.CLOSED, 1.0)
    assert link.collect(1.0) == [Data(500, 0, 0, (b"last",)), Bye(500, "closed")]


@pytest.mark.parametrize("ending", [Ending.EXITED, Ending.REFUSED, Ending.REPLACED])
def test_nobody_is_told_where_nobody_is_left(ending: Ending) -> None:
    link = opened()
    link.send(b"last", 1.0)
    link.end(ending, 1.0)
    assert link.take_events() == [Lost(ending)]
    assert link.collect(1.0) == []


# --- who answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "ending"),
    [
        (NotMe(500, 33), Ending.REPLACED),
        (NotMe(500, 22), Ending.CLOSED),
        (Welcome(500, Address("b", "tcp://10.0.0.2:2", 33, "host", 303), 0), Ending.REPLACED),
        (Bye(500, "closed"), Ending.CLOSED),
        (Bye(500, "overflow"), Ending.OVERFLOW),
        (Bye(500, "silent"), Ending.SILENT),
        (Bye(500, "a reason of a later version"), Ending.CLOSED),
    ],
)
def test_how_the_peer_ends_it(frame: Frame, ending: Ending) -> None:
    for link in (connecting(), opened()):
        link.take_events()
        link.receive(frame, 1.0)
        assert link.take_events() == [Lost(ending)]
        assert link.collect(1.0) == []


def test_when_both_dial_the_lower_session_wins_and_keeps_what_both_had_queued() -> None:
    ours = LinkSession.dial(7, A, B, 1, LIMITS, 0.0)
    theirs = LinkSession.dial(9, B, A, 1, LIMITS, 0.0)
    ours.send(b"from a", 0.0)
    theirs.send(b"from b", 0.0)
    (hello_a,), (hello_b,) = ours.collect(0.0), theirs.collect(0.0)
    ours.receive(hello_b, 0.1)
    theirs.receive(hello_a, 0.1)
    assert (ours.state, theirs.state, theirs.session) == (S.CONNECTING, S.OPEN, 7)
    for frame in theirs.collect(0.1):
        ours.receive(frame, 0.2)
    for frame in ours.collect(0.2):
        theirs.receive(frame, 0.3)
    assert ours.take_events() == [Up(), Delivered(b"from b")]
    assert theirs.take_events() == [Up(), Delivered(b"from a")]


def test_a_session_is_taken_up_again_on_another_path() -> None:
    link = connecting()
    (hello,) = link.collect(0.0)
    assert isinstance(hello, Hello)
    listener = LinkSession.accept(hello, B, 0, LIMITS, 0.0)
    for frame in listener.collect(0.0):
        link.receive(frame, 0.0)
    link.send(b"lost with the path", 1.0)
    link.collect(1.0)
    link.say_hello(1.1)
    for frame in link.collect(1.1):
        listener.receive(frame, 1.1)
    (welcome,) = listener.collect(1.1)
    assert isinstance(welcome, Welcome)
    link.receive(welcome, 1.2)
    for frame in link.collect(1.2):  # at once, not after resend_s
        listener.receive(frame, 1.2)
    assert listener.take_events() == [Up(), Delivered(b"lost with the path")]


def test_only_an_answer_to_the_latest_question_counts_and_it_counts_once() -> None:
    link = opened()
    link.ask(1.0)
    link.ask(1.0)
    assert link.collect(1.0) == [Ack(500, 0, ask=1), Ack(500, 0, ask=2)]
    link.receive(Ack(500, 0, answer=1), 1.1)
    assert link.take_events() == []
    link.tick(2.0)
    assert Ack(500, 0, ask=2) in link.collect(2.0)  # the question or its answer may be lost
    link.receive(Ack(500, 0, answer=2), 2.1)
    link.receive(Ack(500, 0, answer=2), 2.1)
    assert link.take_events() == [Answered()]
    link.receive(Ack(500, 0, ask=5), 2.2)
    assert link.collect(2.2) == [Ack(500, 0, answer=5)]


# --- silence -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [S.CONNECTING, S.OPEN])
def test_silence_ends_a_session(state: LinkState) -> None:
    link = MAKE[state]()
    link.take_events()
    link.tick(9.9)
    assert link.take_events() == []
    link.tick(10.0)
    assert link.take_events() == [Lost(Ending.SILENT)]
    assert Bye(500, "silent") in link.collect(10.0)


def test_heartbeats_keep_an_idle_session_and_a_stray_frame_does_not() -> None:
    link = opened()
    link.receive(Ack(500, 0), 9.0)
    link.receive(Ack(501, 0), 18.0)
    link.tick(18.9)
    assert link.state is S.OPEN
    assert link.collect(18.9) == [Ack(500, 0)]
    link.tick(19.0)
    assert link.state is S.OVER


def test_hello_is_repeated_until_it_is_answered() -> None:
    link = connecting()
    hellos = 0
    for tenth in range(21):
        link.tick(tenth / 10)
        hellos += len(link.collect(tenth / 10))
    assert hellos == 5  # at 0, 0.5, 1, 1.5 and 2 s


# --- frames ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", FRAMES.values())
def test_frames_survive_the_wire(frame: Frame) -> None:
    assert decode_frame(encode_frame(frame)) == frame


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"not msgpack", b"\x92\xa4data\x05", b"\x92\xa5other\x05", b"\x93\xa3ack\x05\xff", bytes(64)],
    ids=["empty", "reserved byte", "text", "short data", "unknown tag", "negative ack", "zeros"],
)
def test_what_is_no_frame_raises_badframe(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_frame(data)


def test_the_size_limit_holds_both_ways() -> None:
    with pytest.raises(BadFrame, match=str(MAX_FRAME_BYTES)):
        encode_frame(Data(1, 0, 0, (bytes(MAX_FRAME_BYTES),)))
    with pytest.raises(BadFrame, match=str(MAX_FRAME_BYTES)):
        decode_frame(bytes(MAX_FRAME_BYTES + 1))


@given(st.binary(max_size=64))
def test_random_bytes_never_do_more_than_raise_badframe(data: bytes) -> None:
    with contextlib.suppress(BadFrame):
        assert isinstance(decode_frame(data), Frame)


# --- an adversary between two sessions ---------------------------------------------------------------------

FATES = st.lists(
    st.one_of(st.just(()), st.tuples(st.floats(0.0, 3.0)), st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0))),
    max_size=60,
)  # fmt: skip


class Pair:
    """Two ends and a wire that gives each frame the next fate: the delays of its copies (none: it is lost)."""

    def __init__(self, fates: list[tuple[float, ...]], afterwards: tuple[float, ...]) -> None:
        self.fates, self.afterwards = iter(fates), afterwards
        self.now_s, self.order = 0.0, 0
        self.wire: list[tuple[float, int, int, bytes]] = []
        limits = LinkLimits(1.0, 10.0, 0.5, window=1000)
        self.limits = limits
        self.ends: list[LinkSession | None] = [LinkSession.dial(500, A, B, 1, limits, 0.0), None]
        self.got: list[list[bytes]] = [[], []]
        self.lost_at_s: list[float | None] = [None, None]
        self.sent: list[list[bytes]] = [[], []]

    def say(self, end: int) -> None:
        link = self.ends[end]
        payload = b"%d" % len(self.sent[end])
        if link is not None and link.send(payload, self.now_s):
            self.sent[end].append(payload)

    def run_until(self, end_s: float) -> None:
        while self.now_s < end_s:
            while self.wire and self.wire[0][0] <= self.now_s:
                _, _, end, data = heapq.heappop(self.wire)
                self._arrive(end, decode_frame(data))
            for end, link in enumerate(self.ends):
                if link is not None:
                    link.tick(self.now_s)
                    self._settle(end, link)
            self.now_s += 0.05

    def _arrive(self, end: int, frame: Frame) -> None:
        if self.ends[end] is None and isinstance(frame, Hello):
            self.ends[end] = LinkSession.accept(frame, B, 0, self.limits, self.now_s)
        elif (link := self.ends[end]) is not None:
            link.receive(frame, self.now_s)

    def _settle(self, end: int, link: LinkSession) -> None:
        for event in link.take_events():
            if isinstance(event, Delivered):
                assert self.lost_at_s[end] is None
                self.got[end].append(event.payload)
            elif isinstance(event, Lost):
                assert self.lost_at_s[end] is None
                self.lost_at_s[end] = self.now_s
        for frame in link.collect(self.now_s):
            for delay_s in next(self.fates, self.afterwards):
                self.order += 1
                heapq.heappush(self.wire, (self.now_s + delay_s, self.order, 1 - end, encode_frame(frame)))


@settings(max_examples=200, deadline=None)
@given(fates=FATES, talk=st.lists(st.integers(0, 1), min_size=5, max_size=40))
def test_once_and_in_order_or_over_at_both(fates: list[tuple[float, ...]], talk: list[int]) -> None:
    pair = Pair(fates, afterwards=(0.01,))
    for end in talk:
        pair.say(end)
        pair.run_until(pair.now_s + 0.2)
    pair.run_until(pair.now_s + 60.0)
    for end in (0, 1):
        assert pair.got[1 - end] == pair.sent[end][: len(pair.got[1 - end])]
    if pair.lost_at_s == [None, None]:
        assert pair.got == [pair.sent[1], pair.sent[0]]
    elif pair.ends[1] is not None:
        assert None not in pair.lost_at_s


@settings(max_examples=100, deadline=None)
@given(fates=FATES, talk=st.lists(st.integers(0, 1), max_size=20))
def test_when_the_wire_is_cut_both_ends_know_within_the_silence_limit(
    fates: list[tuple[float, ...]], talk: list[int]
) -> None:
    pair = Pair(fates, afterwards=())
    for end in talk:
        pair.say(end)
        pair.run_until(pair.now_s + 0.2)
    last_arrival_s = max((at for at, *_ in pair.wire), default=pair.now_s)
    pair.fates = iter([])
    pair.run_until(max(last_arrival_s, pair.now_s) + 10.2)
    for link, lost_at_s in zip(pair.ends, pair.lost_at_s, strict=True):
        assert link is None or lost_at_s is not None
    for end in (0, 1):
        assert pair.got[1 - end] == pair.sent[end][: len(pair.got[1 - end])]
