"""What the ucx backend asks of NIXL for one target, turn by turn. In NIXL's place stands one whose writes are slow."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.transfer.contract import Descriptor, Region, RegionKind, WriteOutcome
from kvferry.transfer.second_hand import SecondHand
from kvferry.transfer.spans import make_spans
from kvferry.transfer.ucx_agent import nixl_errors, transport
from kvferry.transfer.ucx_copying import CopyingPeer, Hand
from kvferry.transfer.ucx_lane import Lane
from kvferry.transfer.ucx_peer import UcxPeer, UcxWrite

PAGES, PAGE_BYTES = 16, 64
REGIONS = (Region(RegionKind.PAGES, "k", 0, 4096, PAGE_BYTES, PAGES),)


PIECE = PAGES * PAGE_BYTES  # bytes of a write to the pages below, and what may be under way
DESCRIPTOR = Descriptor("ucx", "theirs", 2, 1, b"", REGIONS)


class Slow:
    """Posted writes are under way until `ended` has them, or for no time with `at_once`; the read by which a lane sees
    that it stands until `stands`.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.posted: list[int] = []  # descriptors of each
        self.told: list[bytes] = []
        self.ended: set[int] = set()
        self.at_once, self.stands = at_once, True
        self.released: list[object] = []
        self.deleted = False

    def register_memory(self, areas, kind):
        return areas

    def get_xfer_descs(self, rows, kind):
        return rows

    def initialize_xfer(self, kind, source, target, agent):
        if kind == "READ":
            return "read"
        self.posted.append(len(source))
        return len(self.posted) - 1

    def check_xfer_state(self, handle):
        ended = self.stands if handle == "read" else self.at_once or handle in self.ended
        return "DONE" if ended else "PROC"

    def transfer(self, handle):
        return self.check_xfer_state(handle)

    def release_xfer_handle(self, handle):
        self.released.append(handle)

    def send_notif(self, agent, payload):
        self.told.append(payload)


def agent_of(nixl):
    return SimpleNamespace(
        name="ours", generation=1, nixl=nixl, notifications=list, delete=lambda: setattr(nixl, "deleted", True)
    )


def write_of(pages, on_end, first=0):
    at = np.arange(first, first + pages) * PAGE_BYTES
    return UcxWrite(make_spans(0, 0, at, at, [PAGE_BYTES] * pages), on_end, 0.0)


def now(call):
    call()


@pytest.mark.parametrize(
    ("name", "of_device"),
    [("tcp", False), ("rdma", False), ("rc,ud", False), ("host", True)],  # nobody's system call copies a device's
)
def test_several_pieces_are_under_way_where_a_post_does_not_copy(name, of_device):
    nixl, ended = Slow(), []
    peer = UcxPeer(DESCRIPTOR, agent_of(nixl), REGIONS, PIECE, lambda: 0.0, now, transport(name, of_device))
    peer.write(write_of(PAGES, ended.append))
    peer.notify(b"written")
    for _ in range(8):
        peer.serve()
    assert nixl.posted == [4, 4, 4, 4] and not ended and not nixl.told
    nixl.ended = set(range(4))
    while peer.busy:
        peer.serve()
    assert [(result.outcome, result.size_bytes) for result in ended] == [(WriteOutcome.FLUSHED, PIECE)]
    assert nixl.told == [b"written"]  # only once all of it is there


# --- to post is to copy: one hand, or two ---


class Copying:
    """A peer whose turns the test calls; the second hand's thread, with `second`, does what is asked of it only."""

    def __init__(self, *, second=None, lane=True, at_once=False):
        self.first, self.other, self.notes = Slow(at_once=at_once), Slow(at_once=at_once), Slow()
        self.made, self.ended = 0, []
        self._lane = Lane(agent_of(self.other), DESCRIPTOR, REGIONS) if lane else None
        agents = [agent_of(nixl) for nixl in (self.first, self.notes)]
        self.peer = CopyingPeer(
            DESCRIPTOR, *agents, REGIONS, PIECE, lambda: 0.0, now, transport("host"), second, self._make
        )  # fmt: skip

    def _make(self):
        self.made += 1
        return self._lane

    def write(self, pages=PAGES, first=0, gather=None):
        write = write_of(pages, lambda result: self.ended.append((first, result)), first)
        write.gather = gather
        self.peer.write(write)
        return write

    @property
    def ends(self):
        return [(first, result.outcome, result.size_bytes) for first, result in self.ended]


@pytest.fixture
def hand():
    hand = SecondHand("second", lambda: False, lambda: False, 0.001)
    yield hand
    hand.close()


def test_a_hand_goes_on_after_a_turn_that_failed_and_answers_whoever_asks(caplog):
    turns = []

    def turn():
        turns.append(len(turns))
        if len(turns) == 1:
            raise ValueError("of an owner's doing")
        return False

    hand = SecondHand("second", turn, lambda: False, 0.001)
    hand.wake()
    hand.ask(lambda: None)
    with pytest.raises(KeyError):
        hand.ask(lambda: {}["no such"])
    hand.ask(lambda: None)
    hand.close()
    assert len(turns) >= 3 and "a turn failed" in caplog.text


def test_one_hand_posts_all_at_once_and_what_the_target_is_told_goes_by_another_agent():
    at = Copying()
    at.write()
    at.peer.notify(b"written")
    at.peer.serve()
    assert at.first.posted == [PAGES] and at.notes.told == [b"written"] and not at.first.told
    assert not at.ended
    at.first.ended = {0}
    at.peer.serve()
    assert at.ends == [(0, WriteOutcome.FLUSHED, PIECE)] and not at.peer.busy


def test_two_hands_share_a_write(hand):
    at = Copying(second=hand)
    at.write()
    assert at.peer.turn(Hand.SECOND) and at.peer.turn(Hand.DRIVER)
    assert (at.first.posted, at.other.posted, at.made) == ([8], [8], 1)
    assert at.peer.waits(Hand.SECOND) and at.peer.waits(Hand.DRIVER)
    at.first.ended = {0}
    at.peer.turn(Hand.DRIVER)
    assert not at.ended and not at.peer.waits(Hand.DRIVER)
    at.other.ended = {0}
    at.peer.turn(Hand.SECOND)
    assert at.ends == [(0, WriteOutcome.FLUSHED, PIECE)]
    assert (at.ended[0][1].descriptors, at.first.released, at.other.released) == (PAGES, [0], ["read", 0])


def test_writes_end_in_their_order_whoever_copied_them(hand):
    at = Copying(second=hand)
    for first in (0, 8):
        at.write(8, first)
    at.peer.turn(Hand.DRIVER)
    at.peer.turn(Hand.SECOND)
    at.other.ended = {0}  # the later one
    at.peer.turn(Hand.SECOND)
    assert not at.ended
    at.first.ended = {0}
    at.peer.turn(Hand.DRIVER)
    assert at.ends == [(0, WriteOutcome.FLUSHED, PIECE // 2), (8, WriteOutcome.FLUSHED, PIECE // 2)]


def test_a_cancelled_write_ends_once_neither_hand_is_at_it(hand):
    at = Copying(second=hand)
    write = at.write()
    waiting = at.write(8)
    at.peer.turn(Hand.SECOND)
    at.peer.cancel(waiting)
    assert at.ends == [(0, WriteOutcome.CANCELLED, 0)]
    at.peer.cancel(write)
    assert len(at.ends) == 1
    at.other.ended = {0}
    at.peer.turn(Hand.SECOND)
    assert at.ends[1] == (0, WriteOutcome.CANCELLED, PIECE // 2) and not at.first.posted


def test_the_second_lane_counts_once_it_stands(hand):
    """A target that stands still meanwhile holds nothing up."""
    at = Copying(second=hand)
    at.other.stands = False
    at.write()
    assert not at.peer.turn(Hand.SECOND) and at.peer.waits(Hand.SECOND)
    at.first.ended = {0, 1}
    at.peer.turn(Hand.DRIVER), at.peer.turn(Hand.DRIVER)
    assert (at.first.posted, at.other.posted) == ([8, 8], [])
    assert at.ends == [(0, WriteOutcome.FLUSHED, PIECE)]
    at.other.stands = True
    at.write()
    assert at.peer.turn(Hand.SECOND) and at.other.posted == [8] and at.made == 1


@pytest.mark.parametrize("fails", ["when it is made", "when it connects"])
def test_without_a_second_lane_one_hand_copies_all(hand, fails):
    at = Copying(second=hand, lane=fails != "when it is made", at_once=True)
    if fails == "when it connects":
        at.other.check_xfer_state = raising(nixl_errors()[0]("no way"))
    at.write()
    assert not at.peer.turn(Hand.SECOND) and not at.peer.waits(Hand.SECOND)
    while at.peer.busy:
        at.peer.turn(Hand.DRIVER)
    assert not at.peer.turn(Hand.SECOND)
    assert at.ends == [(0, WriteOutcome.FLUSHED, PIECE)] and at.made == 1 and not at.peer.broken
    assert at.other.deleted is (fails == "when it connects")


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_what_fills_the_source_is_called_once_and_first():
    at, events = Copying(at_once=True), []
    at.first.transfer = lambda handle: events.append("posted") or "DONE"
    at.write(gather=lambda: events.append("gathered") or True)
    assert not events  # not by whoever writes
    at.peer.turn(Hand.DRIVER)
    assert events[0] == "gathered" and events.count("gathered") == 1 and "posted" in events
    assert at.ends == [(0, WriteOutcome.FLUSHED, PIECE)]


def test_a_cancel_while_the_source_is_filled_is_not_lost():
    at = Copying(at_once=True)
    at.write(gather=lambda: at.peer.cancel(at.peer._writes[0]) or True)
    at.peer.turn(Hand.DRIVER)
    assert at.ends == [(0, WriteOutcome.CANCELLED, 0)] and not at.first.posted


def test_the_end_of_a_peer_waits_for_a_second_hand_that_is_about_to_make_its_lane():
    """It may have looked whether the peer lives right before: what it makes then must go, too."""
    asked = []

    def ask(call):
        at.peer._opening = at._lane  # as if made in this moment
        asked.append(call())

    at = Copying(second=SimpleNamespace(ask=ask))
    at.write()
    at.peer.destroy("closed")
    assert len(asked) == 1 and at.other.deleted and at.ends == [(0, WriteOutcome.BROKEN, 0)]


def test_a_source_that_is_not_filled_is_not_sent():
    at = Copying(at_once=True)
    at.write(gather=lambda: False)
    at.write(gather=raising(ValueError("of the other's doing")))
    at.peer.turn(Hand.DRIVER)
    assert at.ends == [(0, WriteOutcome.CANCELLED, 0)]
    at.peer.turn(Hand.DRIVER)
    assert not at.first.posted and "ValueError: of the other's doing" in at.peer.broken
    at.peer.destroy("")
    assert at.ends[1] == (0, WriteOutcome.BROKEN, 0)


def test_the_end_of_a_peer_waits_for_the_hand_that_copies(hand):
    """What it copies is read until then."""
    at = Copying(second=hand, at_once=True)
    begun, go_on = threading.Event(), threading.Event()

    def gather():
        begun.set()
        go_on.wait(10)
        return True

    at.write(gather=gather)
    with doing(at.peer.turn, Hand.SECOND):
        begun.wait(10)
        with doing(at.peer.destroy, "closed") as ending:
            ending.join(0.05)
            assert ending.is_alive() and not at.ended
            go_on.set()
    assert at.ends == [(0, WriteOutcome.BROKEN, 0)] and not at.other.posted  # it saw the end before it posted
    assert at.first.deleted and at.notes.deleted
    at.write()
    assert at.ends[1] == (0, WriteOutcome.BROKEN, 0)


@contextmanager
def doing(call, *arguments):
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    yield thread
    thread.join(10)
    assert not thread.is_alive()


def test_a_break_of_either_hand_ends_what_is_under_way_at_both(hand):
    at = Copying(second=hand)
    at.write()
    at.peer.turn(Hand.DRIVER)
    at.peer.turn(Hand.SECOND)
    at.other.check_xfer_state = raising(nixl_errors()[0]("remote disconnected"))
    at.peer.turn(Hand.SECOND)
    assert "remote disconnected" in at.peer.broken and not at.ended
    assert not at.peer.bury() and not at.ended  # the first hand's is not seen to have ended
    at.first.ended = {0}
    while not at.peer.bury():
        pass
    assert at.ends == [(0, WriteOutcome.BROKEN, PIECE // 2)]
    assert at.first.deleted and at.other.deleted and at.notes.deleted
