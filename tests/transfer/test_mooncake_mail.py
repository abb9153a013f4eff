"""The mailboxes of the `mooncake` backend, written by hand: they need none of its package."""

import sys

import numpy as np
import pytest

from kvferry.transfer.contract import Region, RegionKind, TransferError
from kvferry.transfer.mooncake_agent import areas, load
from kvferry.transfer.mooncake_mail import MAIL_BYTES, SLOTS, Mailbox, letter_bytes, mark, mark_at, slot_at
from kvferry.transfer.names import agent_name

WRITER, OWNER = 0xA, 0xFFFF_FFFF_FFFF_FFFF


class Sender:
    """Writes as the engine would."""

    def __init__(self, box, generation, writer=WRITER):
        self.box, self.generation, self.name, self.sent = box, generation, agent_name(writer, generation), 0

    def put(self, at, data):
        self.box.memory[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def text(self, payload):
        self.put(slot_at(self.sent), letter_bytes(self.name, payload))

    def mark(self):
        self.put(mark_at(self.sent), mark(self.generation, self.sent).to_bytes(8, "little"))
        self.sent += 1

    def send(self, payload):
        self.text(payload)
        self.mark()


@pytest.fixture
def box():
    return Mailbox(OWNER, 3, WRITER)


def taken(box):
    return box.memory[:24].view(np.uint64).tolist()


def test_letters_are_taken_once_and_in_order_and_counted(box):
    sender = Sender(box, 0)
    assert taken(box) == [OWNER, 3, 0] and list(box.take()) == []
    for number in range(3 * SLOTS):
        sender.send(bytes([number]) * number)
        assert list(box.take()) == [(sender.name, bytes([number]) * number)]
    assert taken(box) == [OWNER, 3, 3 * SLOTS] and list(box.take()) == []
    for _ in range(SLOTS):
        sender.send(b"all")
    assert [payload for _, payload in box.take()] == [b"all"] * SLOTS


def test_what_is_not_marked_yet_is_not_there(box):
    sender = Sender(box, 7)
    sender.text(b"first")
    assert list(box.take()) == []
    sender.mark()
    assert [payload for _, payload in box.take()] == [b"first"]


def test_a_new_agent_of_the_writer_begins_again_and_the_old_ones_late_marks_are_nothing(box):
    old, new = Sender(box, 1), Sender(box, 2)
    for _ in range(3):
        old.send(b"old")
    assert len(list(box.take())) == 3
    new.send(b"new")
    assert list(box.take()) == [(new.name, b"new")] and taken(box)[2] == 1
    old.mark()  # of its fourth letter, in a slot that is not used yet
    old.sent = 0
    old.mark()
    assert list(box.take()) == []
    new.send(b"second")
    assert [payload for _, payload in box.take()] == [b"second"]


def test_what_an_old_agent_placed_over_a_letter_is_refused_and_nothing_more_is_taken(box):
    sender = Sender(box, 1)
    sender.send(b"a letter")
    box.memory[slot_at(0) + 20] ^= 1
    with pytest.raises(TransferError, match="not what was sent"):
        list(box.take())
    sender.send(b"another")
    assert list(box.take()) == []


def test_a_length_that_leads_out_of_the_slot_is_refused(box):
    sender = Sender(box, 1)
    sender.text(b"")
    sender.put(slot_at(0) + 4, (2**32 - 1).to_bytes(4, "little"))
    sender.mark()
    with pytest.raises(TransferError, match="4294967295 bytes"):
        list(box.take())


def test_a_letter_of_another_writer_is_refused(box):
    Sender(box, 1, writer=0xB).send(b"hello")
    with pytest.raises(TransferError, match="is for 000000000000000a, not for kvferry-000000000000000b-1"):
        list(box.take())
    assert len(box.memory) == MAIL_BYTES


def test_neighbouring_regions_are_registered_as_one():
    regions = [Region(RegionKind.PAGES, "k", 0, base, 16, items) for base, items in ((4096, 2), (100, 3), (148, 1))]
    assert areas(regions) == [(100, 64), (4096, 32)]


def test_without_its_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferError, match=r"pip install 'kvferry\[mooncake\]'; Debian's libibverbs1"):
        load()
