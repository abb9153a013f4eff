"""Which spans a chunk's write has: the pages that it completed, and at the end the rest and the metadata row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.actors.prefill.room import PrefillRoom
from kvferry.engine.contract import Engine
from kvferry.memory.admission import pages_needed
from kvferry.protocol.messages import Destination
from kvferry.protocol.metadata import Metadata
from kvferry.transfer.contract import Region, Spans, TransferError
from kvferry.transfer.plan import Pairing, pair, plan_pages, plan_row


@dataclass(frozen=True)
class ChunkWrite:
    """One write of a room, and the bytes of each kind in it."""

    spans: Spans
    kv_bytes: int
    metadata_bytes: int


class ChunkWriter:
    """Plans the writes of one prefill rank. Pairings are made once per target process."""

    def __init__(self, engine: Engine, incarnation: int) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._page_size = engine.limits.page_size
        self._regions = engine.regions()
        self._pairings: dict[int, Pairing] = {}  # by the target's incarnation

    def check(self, room: PrefillRoom, destination: Destination, target: tuple[Region, ...]) -> None:
        """Raises TransferError, with the reason, when the room's prompt can't be written there."""
        needed = pages_needed(room.prompt_tokens, self._page_size)
        if len(destination.pages) < needed:
            raise TransferError(f"the destination has {len(destination.pages)} pages; the prompt needs {needed}")
        if destination.prefix_tokens != 0:
            raise TransferError(f"prefix_tokens is {destination.prefix_tokens}; allowed: 0")
        pairing = self._pairings.setdefault(room.peer.incarnation, pair(self._regions, target))
        # Pages and slot are the peer's word: they are tried here, so that a bad one fails this room and no more.
        plan_pages(pairing, np.arange(needed), _ids(destination.pages[:needed]))
        plan_row(pairing, "metadata", 0, destination.metadata_slot)

    def plan(self, room: PrefillRoom, last: bool) -> ChunkWrite:
        """The next write.

        A chunk that is not the last is floored to whole pages: a page that is still being filled is not written.
        """
        assert room.destination is not None and room.holding is not None
        pairing = self._pairings[room.peer.incarnation]
        first = room.posted // self._page_size
        end = pages_needed(room.computed, self._page_size) if last else room.computed // self._page_size
        spans = plan_pages(pairing, _ids(room.holding.pages[first:end]), _ids(room.destination.pages[first:end]))
        kv_bytes = int(spans["length"].sum())
        room.posted = room.computed if last else end * self._page_size
        if not last:
            return ChunkWrite(spans, kv_bytes, 0)
        row = room.holding.rows[0]
        total_bytes = room.kv_bytes + kv_bytes
        metadata = Metadata(
            room.room, self._incarnation, room.prompt_tokens, room.first_token, total_bytes, room.first_logprobs
        )
        metadata.pack_into(self._engine.metadata_row(row))
        row_spans = plan_row(pairing, "metadata", row, room.destination.metadata_slot)
        return ChunkWrite(np.concatenate([spans, row_spans]), kv_bytes, int(row_spans["length"].sum()))

    def forget(self, incarnation: int) -> None:
        """The target process has ended."""
        self._pairings.pop(incarnation, None)


def _ids(pages: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(pages, dtype=np.int64)
