"""The checker *page-contents*: whose words each forward reads."""

from __future__ import annotations

from functools import cache
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


#: A region, an entry in it, and a number of entries from there on.
Entries = tuple[Region, int, int]


def entries(batch: Spans, side: str, regions: tuple[Region, ...]) -> list[Entries]:
    """Of one side of each span: its region, the first entry (token, or row) that it touches there, and how many."""
    names = f"{side}_region", f"{side}_offset", "length"
    found: list[Entries] = []
    for index, offset, length in zip(*(batch[name].tolist() for name in names), strict=True):
        region = regions[index]
        entry_bytes = region.item_bytes // (region.tokens or 1)
        first = offset // entry_bytes
        found.append((region, first, (offset + length - 1) // entry_bytes - first + 1))
    return found


class Stamp(NamedTuple):
    """What a token's place holds: which room wrote it, as which token of its own, in which process."""

    room: int
    token: int
    incarnation: int


#: Ints as numbers, which are compared many at a time: 24 bits for the room (by its number in `Contents`), 24 for the
#: token, 15 for the process (likewise). 0: nobody's words.
_ROOM, _TOKEN, _PROCESS = 39, 15, (1 << 15) - 1
_TOKENS, _ROOMS, _PROCESSES = 1 << (_ROOM - _TOKEN), 1 << (63 - _ROOM), 1 << _TOKEN


class _Numbers(dict[int, int]):
    """Small numbers for large ones, from 1 on, below `limit`; `known` leads back."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit, self.known = limit, [0]

    def __missing__(self, large: int) -> int:
        number = self[large] = len(self.known)
        assert number < self._limit
        self.known.append(large)
        return number


class Contents:
    """What each token's place in each region holds. Forwards write stamps, copies carry them along, and a forward that
    reads a page finds its own room's (or a sibling's, which has computed the same prompt).
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._of_engine: dict[int, Ints] = {}  # by the first region's base: [regions, places]
        self._of_region: dict[int, Ints] = {}  # by the region's base: its row of the above
        self._groups: dict[int, int] = {}
        self._left: dict[int, tuple[Spans, list[Ints | None]]] = {}  # by the identity of what is on its way
        self._rooms, self._processes = _Numbers(_ROOMS), _Numbers(_PROCESSES)
        self._made: dict[int, tuple[StepPlan, Ints, Ints]] = {}  # a forward is written twice; by process

    def spawned(self, process: SimProcess) -> None:
        rank = process.actor
        if isinstance(rank, Rank) and isinstance(rank.engine, SimEngine):
            rank.engine.reader = self
            regions, limits = rank.engine.regions()[:-1], rank.engine.limits
            # Anew: another process's memory may have been there.
            stamps = np.zeros((len(regions), limits.pages * limits.page_size), dtype=np.int64)
            self._of_engine[regions[0].base] = stamps
            self._of_region |= {region.base: row for region, row in zip(regions, stamps, strict=True)}
        if isinstance(rank, Leader):
            take_in = rank.take_in

            def taken_in(room: object) -> None:
                self._groups[room.room] = room.spec.group  # type: ignore[attr-defined]
                take_in(room)

            rank.take_in = taken_in  # type: ignore[method-assign]

    def written(self, engine: SimEngine, plan: StepPlan) -> None:
        made = self._made.get(engine.incarnation)
        if made is None or made[0] is not plan:
            made = self._made[engine.incarnation] = plan, *self._stamps(engine, plan)
        self._of_engine[engine.regions()[0].base][:, made[1]] = made[2]

    def _stamps(self, engine: SimEngine, plan: StepPlan) -> tuple[Ints, Ints]:
        """The places that a forward writes, and what it writes there."""
        size, process = engine.limits.page_size, self._processes[engine.incarnation]
        places: list[int] = []
        stamps: list[int] = []
        for sequence in plan.sequences:
            own = self._rooms[sequence.key] << _ROOM | process
            pages = sequence.pages
            for token in range(sequence.start, sequence.position):
                places.append(pages[token // size] * size + token % size)
                stamps.append(own | token << _TOKEN)
        return np.array(places, dtype=np.int64), np.array(stamps, dtype=np.int64)

    def copied(self, source: list[Entries], target: list[Entries]) -> None:
        """Of each span of a batch, what it reads and what it writes."""
        self._stamp(self._carried(source), target)

    def damaged(self, region: Region, offset: int) -> None:
        if region.kind is RegionKind.PAGES and region.base in self._of_region:
            self._of_region[region.base][offset * region.tokens // region.item_bytes] = 0

    def left_behind(self, batch: Spans, source: tuple[Region, ...]) -> None:
        carried = self._carried(entries(batch, "source", source))
        self._left[id(batch)] = (batch, [None if s is None else s.copy() for s in carried])

    def landed(self, batch: Spans, target: tuple[Region, ...]) -> None:
        _, carried = self._left.pop(id(batch))
        self._stamp(carried, entries(batch, "target", target))

    def _carried(self, source: list[Entries]) -> list[Ints | None]:
        """The stamps that each span reads; None for rows, and where nobody looks on."""
        return [self._at(*where) for where in source]

    def _stamp(self, carried: list[Ints | None], target: list[Entries]) -> None:
        for where, stamps in zip(target, carried, strict=True):
            there = self._at(*where)
            if there is not None and stamps is not None:
                there[:] = stamps

    def _at(self, region: Region, first: int, count: int) -> Ints | None:
        known = self._of_region.get(region.base) if region.kind is RegionKind.PAGES else None
        return None if known is None else known[first : first + count]

    def read(self, engine: SimEngine, sequence: Sequence) -> None:
        size, end, number = engine.limits.page_size, sequence.position, self._rooms[sequence.key]
        assert end <= _TOKENS
        stamps = self._of_engine[engine.regions()[0].base]
        pages = stamps.reshape(len(stamps), -1, size)[:, list(sequence.pages[: -(-end // size)])]
        found = pages.reshape(len(stamps), -1)[:, :end]
        if not ((found | _PROCESS) == _expected(end) + (number << _ROOM)).all():
            self._look(engine, sequence, found)

    def _look(self, engine: SimEngine, sequence: Sequence, found: Ints) -> None:
        """Something is not the room's own: it may be a sibling's."""
        token, rooms = found >> _TOKEN & (_TOKENS - 1), found >> _ROOM
        wrong = token != np.arange(found.shape[1])
        for number in np.unique(rooms).tolist():
            writer = self._rooms.known[number]
            if writer != sequence.key and not self._sibling(sequence.key, writer):
                wrong |= rooms == number
        if wrong.any():
            at, number = (int(index) for index in np.argwhere(wrong)[0])
            self._tell(engine, sequence, at, number, int(found[at, number]))

    def _tell(self, engine: SimEngine, sequence: Sequence, at: int, token: int, found: int) -> None:
        region, index = engine.regions()[at], token // engine.limits.page_size
        room, process = self._rooms.known[found >> _ROOM], self._processes.known[found & _PROCESS]
        stamp = Stamp(room, found >> _TOKEN & (_TOKENS - 1), process)
        text = f"page {sequence.pages[index]} (number {index} of room {sequence.key:x}) holds "
        text += f"{stamp if room else None} at token {token}"
        self._findings.add("page-contents", f"{text} in {region.part} of layer {region.layer}")

    def _sibling(self, room: int, writer: int) -> bool:
        group = self._groups.get(room, 0)
        return group != 0 and group == self._groups.get(writer)


@cache
def _expected(tokens: int) -> Ints:
    """The stamps of a prompt's first tokens, whatever their room, and with any process."""
    return np.arange(tokens, dtype=np.int64) << _TOKEN | _PROCESS
