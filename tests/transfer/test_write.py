"""What every backend says of a write when it ends."""

from kvferry.transfer.contract import WriteOutcome, WriteResult
from kvferry.transfer.spans import make_spans
from kvferry.transfer.write import Write


def ended(write, outcome, now_s):
    later = []
    write.end(outcome, "", now_s, later.append)
    assert write.result is None, "it ends on the loop"
    later.pop()()
    return write.result


def test_it_waited_until_its_first_post_and_was_on_the_wire_from_then_on():
    heard = []
    write = Write(make_spans(0, 0, 0, 0, [4096, 64]), heard.append, called_s=10.0)
    write.first_post_s, write.flushed_bytes, write.descriptors = 12.0, 4160, 2
    result = ended(write, WriteOutcome.FLUSHED, now_s=15.0)
    assert result == WriteResult(WriteOutcome.FLUSHED, 4160, wire_s=3.0, wait_s=2.0, descriptors=2)
    assert heard == [result]


def test_of_what_was_never_posted_there_is_nothing_to_say():
    write = Write(make_spans(0, 0, 0, 0, [4096]), lambda _: None, called_s=10.0)
    result = ended(write, WriteOutcome.CANCELLED, now_s=15.0)
    assert (result.size_bytes, result.wire_s, result.wait_s, result.descriptors) == (0, None, None, None)
