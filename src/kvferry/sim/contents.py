"""The checker *page-contents*: whose words each forward reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.actors.leader import Leader
from kvferry.actors.ranks.rank import Rank
from kvferry.engine.contract import Sequence, StepPlan
from kvferry.sim.engine import SimEngine
from kvferry.sim.findings import Findings
from kvferry.sim.system import SimProcess
from kvferry.transfer.contract import Region, RegionKind, Spans

Ints = NDArray[np.int64]


def entries(batch: Spans, side: str, regions: tuple[Region, ...]) -> Iterator[tuple[Region, int, int]]:
    """Of one side of each span: its region, the first entry (token, or row) that it touches there, and how many."""
    names = f"{side}_region", f"{side}_offset", "length"
    for index, offset, length in zip(*(batch[name].tolist() for name in names), strict=True):
        region = regions[index]
        entry_bytes = region.item_bytes // max(region.tokens, 1)
        first = offset // entry_bytes
        yield region, first, (offset + length - 1) // entry_bytes - first + 1


class Stamp(NamedTuple):
    """What a token's place holds: which room wrote it, as which token of its own, in which process."""

    room: int
    token: int
    incarnation: int


#: A place's stamp in an array; room 0: nobody's words.
_STAMP = np.dtype([("room", np.uint64), ("token", np.int64), ("incarnation", np.uint64)])
Stamps = NDArray[np.void]


class Contents:
    """What each token's place in each region holds. Forwards write stamps, copies carry them along, and a forward that
    reads a page finds its own room's (or a sibling's, which has computed the same prompt).
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._of_engine: dict[int, Stamps] = {}  # by the first region's base: [regions, places]
        self._of_region: dict[int, Stamps] = {}  # by the region's base: its row of the above
        self._groups: dict[int, int] = {}
        self._left: dict[int, tuple[Spans, list[Stamps | None]]] = {}  # by the identity of what is on its way

    def spawned(self, process: SimProcess) -> None:
        rank = process.actor
        if isinstance(rank, Rank) and isinstance(rank.engine, SimEngine):
            rank.engine.reader = self
            regions, limits = rank.engine.regions()[:-1], rank.engine.limits
            # Anew: another process's memory may have been there.
            stamps = np.zeros((len(regions), limits.pages * limits.page_size), dtype=_STAMP)
            self._of_engine[regions[0].base] = stamps
            self._of_region |= {region.base: row for region, row in zip(regions, stamps, strict=True)}
        if isinstance(rank, Leader):
            take_in = rank.take_in

            def taken_in(room: object) -> None:
                self._groups[room.room] = room.spec.group  # type: ignore[attr-defined]
                take_in(room)

            rank.take_in = taken_in  # type: ignore[method-assign]

    def written(self, engine: SimEngine, plan: StepPlan) -> None:
        stamps = self._of_engine[engine.regions()[0].base]
        for sequence in plan.sequences:
            tokens = np.arange(sequence.start, sequence.position)
            made = np.empty(tokens.size, dtype=_STAMP)
            made["room"], made["token"], made["incarnation"] = sequence.key, tokens, engine.incarnation
            stamps[:, _places(sequence, tokens, engine.limits.page_size)] = made

    def copied(self, batch: Spans, source: tuple[Region, ...], target: tuple[Region, ...]) -> None:
        self._stamp(batch, self._carried(batch, source), target)

    def damaged(self, region: Region, offset: int) -> None:
        if region.kind is RegionKind.PAGES and region.base in self._of_region:
            self._of_region[region.base][offset * region.tokens // region.item_bytes] = 0

    def left_behind(self, batch: Spans, source: tuple[Region, ...]) -> None:
        self._left[id(batch)] = (batch, [None if s is None else s.copy() for s in self._carried(batch, source)])

    def landed(self, batch: Spans, target: tuple[Region, ...]) -> None:
        _, carried = self._left.pop(id(batch))
        self._stamp(batch, carried, target)

    def _carried(self, batch: Spans, source: tuple[Region, ...]) -> list[Stamps | None]:
        """The stamps that each span of a batch reads; None for rows, and where nobody looks on."""
        return [self._at(*where) for where in entries(batch, "source", source)]

    def _stamp(self, batch: Spans, carried: list[Stamps | None], target: tuple[Region, ...]) -> None:
        for where, stamps in zip(entries(batch, "target", target), carried, strict=True):
            there = self._at(*where)
            if there is not None and stamps is not None:
                there[:] = stamps

    def _at(self, region: Region, first: int, count: int) -> Stamps | None:
        known = self._of_region.get(region.base) if region.kind is RegionKind.PAGES else None
        return None if known is None else known[first : first + count]

    def read(self, engine: SimEngine, sequence: Sequence) -> None:
        regions, tokens = engine.regions()[:-1], np.arange(sequence.position)
        found = self._of_engine[regions[0].base][:, _places(sequence, tokens, engine.limits.page_size)]
        wrong = found["token"] != tokens
        strange = found["room"] != sequence.key
        for room in np.unique(found["room"][strange]).tolist() if strange.any() else ():
            if not self._sibling(sequence.key, room):
                wrong |= found["room"] == room
        if wrong.any():
            at, token = (int(number) for number in np.argwhere(wrong)[0])
            stamp = Stamp(*found[at, token].tolist())
            index = token // engine.limits.page_size
            text = f"page {sequence.pages[index]} (number {index} of room {sequence.key:x}) holds "
            text += f"{stamp if stamp.room else None} at token {token}"
            self._findings.add("page-contents", f"{text} in {regions[at].part} of layer {regions[at].layer}")

    def _sibling(self, room: int, writer: int) -> bool:
        group = self._groups.get(room, 0)
        return group != 0 and group == self._groups.get(writer)


def _places(sequence: Sequence, tokens: Ints, page_size: int) -> Ints:
    """Where those tokens of the sequence lie, in places of its engine's regions."""
    places: Ints = np.asarray(sequence.pages, dtype=np.int64)[tokens // page_size] * page_size + tokens % page_size
    return places
