"""What one source rank sends of a room: its record, and which spans a write has.

A rank writes its part of each page to every target rank that it has something for; the leader also writes the metadata
row, to decode's leader. Not here: when a write is due (protocol.sender), how it is posted
(transfer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.engine.contract import Engine
from kvferry.protocol.messages import Measured
from kvferry.protocol.metadata import Metadata, Placed
from kvferry.protocol.rank import LEADER
from kvferry.transfer.contract import Descriptor, Peer, Spans, WriteHandle
from kvferry.transfer.layout import METADATA
from kvferry.transfer.page_plan import page_blocks
from kvferry.transfer.pairing import Pairing, check_given, pair, pair_common
from kvferry.transfer.plan import plan_pages, plan_row, total_bytes
from kvferry.transfer.row_plan import row_blocks

#: Target rank -> the descriptor by which we write to it.
Targets = Mapping[int, Descriptor]


@dataclass
class Sending:
    """One rank's writes of one room. `owner` is the incarnation of decode's leader; `targets` are the ranks that are
    written to, with their ends of the data plane, once connected; `open` counts writes that have not ended. `placed`
    is what has been flushed, with its digest, by target rank; `measured` is about writes that have ended.
    """

    room: int
    owner: int
    targets: dict[int, Peer] = field(default_factory=dict)
    handles: list[WriteHandle] = field(default_factory=list)
    open: int = 0
    kv_bytes: int = 0
    metadata_bytes: int = 0
    placed: dict[int, list[Placed]] = field(default_factory=dict)
    measured: Measured = field(default_factory=Measured)

    @property
    def backend(self) -> str:
        """By which it writes; "" before its targets are connected."""
        return " and ".join(sorted({peer.descriptor.backend for peer in self.targets.values()}))


@dataclass(frozen=True)
class Part:
    """What of the prompt a write has: its pages number `first` to `first + pages - 1`; with `last` there is no more."""

    chunk: int
    first: int
    pages: int
    last: bool


@dataclass(frozen=True)
class RankWrite:
    """A write to one target rank, and the bytes of each kind in it."""

    target: int
    spans: Spans
    kv_bytes: int
    metadata_bytes: int = 0


class SpanPlanner:
    """Plans the writes of one source rank. Pairings are made once per target process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._regions = engine.regions()
        self._pairings: dict[int, Pairing] = {}  # by the target process's incarnation
        self._of_owner: dict[int, set[int]] = {}  # decode's leader -> the target processes of that instance

    def check(
        self, owner: int, targets: Targets, pages: Sequence[int], slot: int | None = None, alone: bool = False
    ) -> None:
        """Raises TransferError, with the reason, when this rank's part of a prompt can't be written there.

        Pages and slot are the peer's word: they are tried here, so that a bad one fails this room and no more. `slot`
        None: no metadata is written. `alone`: there is one rank on either side, so each must have all.
        """
        pairings, meet = [], pair if alone else pair_common
        for rank, target in targets.items():
            pairing = self._pairings.get(target.incarnation)
            if pairing is None:
                pairing = self._pairings[target.incarnation] = meet(self._regions, target.regions)
                self._of_owner.setdefault(owner, set()).add(target.incarnation)
            pairings.append(pairing)
            page_blocks(pairing, np.arange(len(pages)), _ids(pages))
            if rank == LEADER and slot is not None:
                row_blocks(pairing, METADATA, 0, slot)
        check_given(self._regions, pairings)

    def pages(self, sending: Sending, source: Sequence[int], target: Sequence[int]) -> list[RankWrite]:
        """Write source[i] to target[i] at every target rank; nothing for a rank that gets nothing."""
        writes = []
        for rank, peer in sending.targets.items():
            spans = plan_pages(self._pairings[peer.descriptor.incarnation], _ids(source), _ids(target))
            writes.append(RankWrite(rank, spans, total_bytes(spans)))
        return writes

    def with_row(self, sending: Sending, write: RankWrite, row: int, slot: int, metadata: Metadata) -> RankWrite:
        """The leader's last write to decode's leader: the metadata go with it, in our row `row`."""
        metadata.pack_into(self._engine.metadata_row(row))
        pairing = self._pairings[sending.targets[LEADER].descriptor.incarnation]
        spans = plan_row(pairing, METADATA, row, slot)
        return RankWrite(LEADER, np.concatenate([write.spans, spans]), write.kv_bytes, total_bytes(spans))

    def forget(self, owner: int) -> None:
        """That decode has ended."""
        for incarnation in self._of_owner.pop(owner, ()):
            self._pairings.pop(incarnation, None)


def _ids(pages: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(pages, dtype=np.int64)
