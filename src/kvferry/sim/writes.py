"""Checkers of the data plane: whose pages each byte leaves and reaches, and whose words each forward reads."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.actors.decode.decode import Decode
from kvferry.actors.leader import Leader
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.ranks.rank import Rank
from kvferry.engine.contract import Sequence, StepPlan
from kvferry.sim.engine import SimEngine
from kvferry.sim.findings import Findings
from kvferry.sim.system import SimProcess, SimSystem
from kvferry.transfer.contract import Region, RegionKind, Spans
from kvferry.transfer.fake_endpoint import FakeAgent

Items = dict[RegionKind, dict[int, set[int]]]


class Writes:
    """*leased-writes*: between the fabric and its copies. Each byte goes from an item that a room holds at the writer
    for reading, to one that the same room has leased to that writer.
    """

    def __init__(self, system: SimSystem, findings: Findings, contents: Contents) -> None:
        self.copies = self.late = 0
        self._system, self._findings, self._contents = system, findings, contents
        fabric = system.fabric
        self._copy, self._land, self._land_later = fabric.copy, fabric.land, fabric.land_later
        self._flip = fabric.flip
        fabric.flip = self._flipped  # type: ignore[method-assign]
        fabric.copy = self._checked  # type: ignore[method-assign]
        fabric.land = self._landed  # type: ignore[method-assign]
        fabric.land_later = self._left_behind  # type: ignore[method-assign]

    def _checked(self, batch: Spans, source: tuple[Region, ...], target: tuple[Region, ...]) -> None:
        writer, owner = self._ledger_of(source), self._ledger_of(target)
        if writer is not None and owner is not None:
            incarnation = writer[0].network.address.incarnation
            ours, theirs = self._held(writer[1], 0), self._held(owner[1], incarnation)
            for (kind, item), (_, other) in zip(
                _items(batch, "source", source), _items(batch, "target", target), strict=True
            ):
                self._check(kind, item, other, ours, theirs)
        self.copies += 1
        self._copy(batch, source, target)
        self._contents.copied(batch, source, target)

    def _left_behind(self, batch: Spans, source: tuple[Region, ...], agent: str) -> None:
        self._contents.left_behind(batch, source)
        self._land_later(batch, source, agent)

    def _flipped(self, agent: str, region: int, offset: int) -> bool:
        """Memory that changes by itself: what lies there is nobody's words any more."""
        target = self._system.fabric.find(agent)
        if target is not None:
            self._contents.damaged(target.endpoint.regions[region], offset)
        return self._flip(agent, region, offset)

    def _landed(self, batch: Spans, data: list[bytes], target: FakeAgent) -> None:
        """What a writer had left behind: its source is gone, and the pages must be leased to it all the same."""
        regions, owner = target.endpoint.regions, self._ledger_of(target.endpoint.regions)
        if owner is not None:
            held = self._held(owner[1], target.writer)
            for kind, item in _items(batch, "target", regions):
                if not held[kind].get(item):
                    text = f"a late write touches {kind.value} {item} of its target, which no lease covers"
                    self._findings.add("leased-writes", text)
        self.late += 1
        self._land(batch, data, target)
        self._contents.landed(batch, regions)

    def _check(self, kind: RegionKind, item: int, other: int, ours: Items, theirs: Items) -> None:
        readers, writers = ours[kind].get(item), theirs[kind].get(other)
        for side, at, rooms in (("source", item, readers), ("target", other, writers)):
            if not rooms:
                self._findings.add(
                    "leased-writes", f"a write touches {kind.value} {at} of its {side}, which no lease covers"
                )
        if readers and writers and not readers & writers:
            text = f"a write of room {_hex(readers)} touches {kind.value} {other}, leased for room {_hex(writers)}"
            self._findings.add("leased-writes", text)

    def _ledger_of(self, regions: tuple[Region, ...]) -> tuple[Rank, Prefill | Decode] | None:
        """Whose memory it is, and the leader whose ledger says what its pages are. None where it is nobody's: of a
        process that has been killed, and of an instance that ends, since none of its pages is used again.
        """
        for process in self._system.processes.values():
            rank = process.actor
            if isinstance(rank, Rank) and rank.engine.regions()[0].base == regions[0].base:
                leader = self._leader_of(rank)
                return None if leader is None or leader.ending or rank.ending else (rank, leader)
        return None

    def _leader_of(self, rank: Rank) -> Prefill | Decode | None:
        if isinstance(rank, Prefill | Decode):
            return rank
        process, address = self._system.processes.get(rank.info.instance), getattr(rank, "leader", None)
        if process is None or address is None or process.address.incarnation != address.incarnation:
            return None
        return process.actor if isinstance(process.actor, Prefill | Decode) else None

    @staticmethod
    def _held(leader: Prefill | Decode, writer: int) -> Items:
        """Rooms by item under a lease to `writer` (0: under one of our own, for reading)."""
        held: Items = {RegionKind.PAGES: {}, RegionKind.ROWS: {}}
        for room in leader.rooms.values():
            holding = room.holding
            if holding is None or holding.lease is None or writer not in holding.lease.writers.values():
                continue
            for page in holding.pages:
                held[RegionKind.PAGES].setdefault(page, set()).add(room.room)
            for row in holding.rows:
                held[RegionKind.ROWS].setdefault(row, set()).add(room.room)
        return held


def _items(batch: Spans, side: str, regions: tuple[Region, ...]) -> list[tuple[RegionKind, int]]:
    """The items of one side, in the order of the bytes. Both sides have equal items, and spans begin with one."""
    found: list[tuple[RegionKind, int]] = []
    rows = zip(
        batch[f"{side}_region"].tolist(), batch[f"{side}_offset"].tolist(), batch["length"].tolist(), strict=True
    )
    for index, offset, length in rows:
        region = regions[index]
        first, last = offset // region.item_bytes, (offset + length - 1) // region.item_bytes
        found += [(region.kind, item) for item in range(first, last + 1)]
    return found


def _pages(batch: Spans, side: str, regions: tuple[Region, ...]) -> list[tuple[int, int]]:
    """(base of the region, page) of all pages of one side, in the order of the bytes."""
    found: list[tuple[int, int]] = []
    rows = zip(
        batch[f"{side}_region"].tolist(), batch[f"{side}_offset"].tolist(), batch["length"].tolist(), strict=True
    )
    for index, offset, length in rows:
        region = regions[index]
        if region.kind is RegionKind.PAGES:
            first, last = offset // region.item_bytes, (offset + length - 1) // region.item_bytes
            found += [(region.base, page) for page in range(first, last + 1)]
    return found


def _hex(rooms: set[int]) -> str:
    return ", ".join(f"{room:x}" for room in sorted(rooms))


class Stamp(NamedTuple):
    """What a page holds: which room wrote it, as which page of its tokens, in which process."""

    room: int
    page: int
    incarnation: int


class Contents:
    """*page-contents*: what each page of each region holds. Forwards write stamps, copies carry them along, and a
    forward that reads a page finds its own room's (or a sibling's, which has computed the same prompt).
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._stamps: dict[int, dict[int, Stamp]] = {}  # by the region's base
        self._groups: dict[int, int] = {}
        self._left: dict[int, tuple[Spans, list[Stamp | None]]] = {}  # by the identity of what is on its way

    def spawned(self, process: SimProcess) -> None:
        leader = process.actor
        if isinstance(leader, Rank) and isinstance(leader.engine, SimEngine):
            leader.engine.reader = self
            for region in leader.engine.regions():  # where another process's memory may have been
                self._stamps.pop(region.base, None)
        if isinstance(leader, Leader):
            take_in = leader.take_in

            def taken_in(room: object) -> None:
                self._groups[room.room] = room.spec.group  # type: ignore[attr-defined]
                take_in(room)

            leader.take_in = taken_in  # type: ignore[method-assign]

    def written(self, engine: SimEngine, plan: StepPlan) -> None:
        size, regions = engine.limits.page_size, engine.regions()[:-1]
        for sequence in plan.sequences:
            first, last = sequence.start // size, (sequence.position - 1) // size
            for index in range(first, last + 1):
                stamp = Stamp(sequence.key, index, engine.incarnation)
                for region in regions:
                    self._stamps.setdefault(region.base, {})[sequence.pages[index]] = stamp

    def copied(self, batch: Spans, source: tuple[Region, ...], target: tuple[Region, ...]) -> None:
        self._stamp(batch, self._carried(batch, source), target)

    def damaged(self, region: Region, offset: int) -> None:
        if region.kind is RegionKind.PAGES:
            self._stamps.get(region.base, {}).pop(offset // region.item_bytes, None)

    def left_behind(self, batch: Spans, source: tuple[Region, ...]) -> None:
        self._left[id(batch)] = (batch, self._carried(batch, source))

    def landed(self, batch: Spans, target: tuple[Region, ...]) -> None:
        _, carried = self._left.pop(id(batch))
        self._stamp(batch, carried, target)

    def _carried(self, batch: Spans, source: tuple[Region, ...]) -> list[Stamp | None]:
        """The stamps of the pages that a batch reads, in the order of the bytes."""
        return [self._stamps.get(base, {}).get(page) for base, page in _pages(batch, "source", source)]

    def _stamp(self, batch: Spans, carried: list[Stamp | None], target: tuple[Region, ...]) -> None:
        for (base, page), stamp in zip(_pages(batch, "target", target), carried, strict=True):
            if stamp is not None:
                self._stamps.setdefault(base, {})[page] = stamp

    def read(self, engine: SimEngine, sequence: Sequence) -> None:
        size, room = engine.limits.page_size, sequence.key
        for region in engine.regions()[:-1]:
            stamps = self._stamps.get(region.base, {})
            for index in range((sequence.position - 1) // size + 1):
                stamp = stamps.get(sequence.pages[index])
                if stamp is not None and stamp.page == index and self._may_read(room, stamp.room):
                    continue
                text = f"page {sequence.pages[index]} (number {index} of room {room:x}) holds {stamp}"
                self._findings.add("page-contents", f"{text} in {region.part} of layer {region.layer}")

    def _may_read(self, room: int, writer: int) -> bool:
        """Its own, or a sibling's."""
        group = self._groups.get(room, 0)
        return writer == room or (group != 0 and group == self._groups.get(writer))
