"""What the ucx backend asks of NIXL for one target, turn by turn. In NIXL's place stands one whose writes are slow."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.transfer.contract import Descriptor, Region, RegionKind, WriteOutcome, WriteResult
from kvferry.transfer.spans import make_spans
from kvferry.transfer.ucx_agent import transport
from kvferry.transfer.ucx_peer import UcxPeer, UcxWrite

PAGES, PAGE_BYTES = 16, 64
REGIONS = (Region(RegionKind.PAGES, "k", 0, 4096, PAGE_BYTES, PAGES),)


class Slow:
    """Posted writes are under way until `ended` has them."""

    def __init__(self) -> None:
        self.posted: list[int] = []  # descriptors of each
        self.told: list[bytes] = []
        self.ended: set[int] = set()

    def get_xfer_descs(self, rows, kind):
        return rows

    def initialize_xfer(self, kind, source, target, agent):
        self.posted.append(len(source))
        return len(self.posted) - 1

    def check_xfer_state(self, handle):
        return "DONE" if handle in self.ended else "PROC"

    def transfer(self, handle):
        return self.check_xfer_state(handle)

    def release_xfer_handle(self, handle):
        pass

    def send_notif(self, agent, payload):
        self.told.append(payload)


def peer_over(name: str, *, of_device: bool = False) -> tuple[UcxPeer, Slow, Slow]:
    """A peer with room for 16 pages under way, its NIXL for writes and the one for what the target is told."""
    writes, notes = Slow(), Slow()
    agents = [SimpleNamespace(name="ours", generation=1, nixl=nixl, delete=lambda: None) for nixl in (writes, notes)]
    descriptor = Descriptor("ucx", "theirs", 2, 1, b"", REGIONS)
    peer = UcxPeer(
        descriptor, *agents, REGIONS, PAGES * PAGE_BYTES, lambda: 0.0, lambda call: call(), transport(name, of_device)
    )
    return peer, writes, notes


@pytest.mark.parametrize(
    ("name", "of_device", "under_way"),
    [
        ("host", False, [16]),  # to post is to copy: all at once
        ("tcp", False, [4, 4, 4, 4]),
        ("rdma", False, [4, 4, 4, 4]),
        ("rc,ud", False, [4, 4, 4, 4]),
        ("host", True, [4, 4, 4, 4]),  # a device's memory is copied by nobody's system call
    ],
)
def test_several_pieces_are_under_way_where_a_post_does_not_copy(name, of_device, under_way):
    peer, writes, notes = peer_over(name, of_device=of_device)
    ended: list[WriteResult] = []
    at = np.arange(PAGES) * PAGE_BYTES
    peer.write(UcxWrite(make_spans(0, 0, at, at, [PAGE_BYTES] * PAGES), ended.append, 0.0))
    peer.notify(b"written")
    for _ in range(8):
        peer.serve()
    assert writes.posted == under_way and not ended and not notes.told
    writes.ended = set(range(len(under_way)))
    while peer.busy:
        peer.serve()
    assert [(result.outcome, result.size_bytes) for result in ended] == [(WriteOutcome.FLUSHED, PAGES * PAGE_BYTES)]
    assert notes.told == [b"written"]  # only once all of it is there
