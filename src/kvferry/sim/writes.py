"""The checker of the data plane: whose pages each byte leaves and reaches. Whose words they are is in contents.py."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.actors.decode.decode import Decode
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.ranks.rank import Rank
from kvferry.sim.contents import Contents, Entries, entries
from kvferry.sim.findings import Findings
from kvferry.sim.system import SimSystem
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
        read, written = entries(batch, "source", source), entries(batch, "target", target)
        if writer is not None and owner is not None:
            incarnation = writer[0].network.address.incarnation
            ours, theirs = self._held(writer[1], 0), self._held(owner[1], incarnation)
            for kind, item, other in dict.fromkeys(_meeting(read, written)):  # the same ones in every layer
                self._check(kind, item, other, ours, theirs)
        self.copies += 1
        self._copy(batch, source, target)
        self._contents.copied(read, written)

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
        if readers and writers and readers & writers:
            return
        for side, at, rooms in (("source", item, readers), ("target", other, writers)):
            if not rooms:
                self._findings.add(
                    "leased-writes", f"a write touches {kind.value} {at} of its {side}, which no lease covers"
                )
        if readers and writers:
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
            own = {room.room}
            for items, kept in ((holding.pages, held[RegionKind.PAGES]), (holding.rows, held[RegionKind.ROWS])):
                for item in items:
                    kept[item] = kept[item] | own if item in kept else own
        return held


def _items(batch: Spans, side: str, regions: tuple[Region, ...]) -> list[tuple[RegionKind, int]]:
    """The items of one side, in the order of the bytes."""
    found: list[tuple[RegionKind, int]] = []
    for region, first, count in entries(batch, side, regions):
        per_item = max(region.tokens, 1)
        found += [(region.kind, item) for item in range(first // per_item, (first + count - 1) // per_item + 1)]
    return found


def _meeting(source: list[Entries], target: list[Entries]) -> Iterator[tuple[RegionKind, int, int]]:
    """Which item of the source goes into which one of the target: items of the two sides may have other sizes."""
    for (ours, first, count), (theirs, to, _) in zip(source, target, strict=True):
        per_source, per_target = ours.tokens or 1, theirs.tokens or 1
        at = 0
        while at < count:
            yield ours.kind, (first + at) // per_source, (to + at) // per_target
            at += min(per_source - (first + at) % per_source, per_target - (to + at) % per_target)


def _hex(rooms: set[int]) -> str:
    return ", ".join(f"{room:x}" for room in sorted(rooms))
