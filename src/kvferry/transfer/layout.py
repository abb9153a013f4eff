"""What lies where in one rank's regions: each region taken apart into cells, and checked. Pure.

A cell is what one region has of one thing: of a part of a layer, or of one segment of its rows. Two ranks are paired by
cells, so never by the position of a region in a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from kvferry.protocol.rank import Slice
from kvferry.transfer.contract import SELF_TEST, Region, RegionKind, Segment, TransferError

#: Rows of this part go from leader to leader, whatever else the ranks have.
METADATA = "metadata"
#: The parts that a rank's `Slice` describes; all of a layer's are dealt out alike.
_KV = ("k", "v", "latent")


class Key(NamedTuple):
    """What a cell holds; cells of one key are copied to each other. They sort in the order in which they are sent."""

    stack: str
    layer: int
    part: str
    segment: int

    def __str__(self) -> str:
        of = f"{self.stack} " if self.stack else ""
        return f"{self.part} of {of}layer {self.layer}" + (f", segment {self.segment}" if self.segment else "")


class Cell(NamedTuple):
    """An entry has `heads` heads (0: undivided) of `head_bytes` at byte `start`, and `stride` bytes in all."""

    at: int  # number of the region in its rank's list
    region: Region
    first_head: int
    heads: int
    head_bytes: int
    replica: int
    replicas: int
    start: int
    stride: int


#: What a rank has.
Cells = dict[Key, Cell]


def cells_of(side: str, regions: Sequence[Region]) -> Cells:
    """Raises TransferError, naming region, field and values, for one that contradicts itself or repeats another."""
    found: Cells = {}
    for index, region in enumerate(regions):
        if region.part == SELF_TEST:
            continue
        where = f"{side} region {index} ({region.part} of layer {region.layer})"
        start, stride = 0, _entry_bytes(where, region)
        for number, segment in enumerate(_segments_of(where, region, stride)):
            key = Key(region.stack, region.layer, region.part, number)
            if key in found:
                raise TransferError(f"{side} regions {found[key].at} and {index} both hold {region.kind.value} {key}")
            if segment.replica >= segment.replicas:
                raise TransferError(f"{where}: replica is {segment.replica} of {segment.replicas} replicas")
            found[key] = Cell(index, region, *_of(segment), start, stride)
            start += max(segment.heads, 1) * segment.head_bytes
    return found


def _of(segment: Segment) -> tuple[int, int, int, int, int]:
    return segment.first_head, segment.heads, segment.head_bytes, segment.replica, segment.replicas


def is_opaque(region: Region) -> bool:
    """Pages that don't say how many tokens they have: each is one entry, and is not taken apart."""
    return region.kind is RegionKind.PAGES and not region.tokens


def entries_of(region: Region) -> int:
    """Entries of one item; 1 for a row and for an opaque page."""
    return max(region.tokens // region.entry_tokens, 1)


def _entry_bytes(where: str, region: Region) -> int:
    if region.kind is RegionKind.ROWS:
        if region.tokens or region.entry_tokens != 1 or region.window:
            found = f"tokens {region.tokens}, entry_tokens {region.entry_tokens}, window {region.window}"
            raise TransferError(f"{where}: rows have {found}; wanted 0, 1, 0")
        return region.item_bytes
    if region.tokens % region.entry_tokens:
        raise TransferError(f"{where}: tokens is {region.tokens}, and entry_tokens {region.entry_tokens}")
    if region.kind is RegionKind.RINGS and not (0 < region.window <= region.tokens and region.entry_tokens == 1):
        text = f"a ring of {region.tokens} tokens for a window of {region.window}, entry_tokens {region.entry_tokens}"
        raise TransferError(f"{where}: {text}; wanted 0 < window <= tokens, entry_tokens 1")
    entries = entries_of(region)
    if region.item_bytes % entries:
        raise TransferError(f"{where}: item_bytes is {region.item_bytes}; it has {entries} entries")
    return region.item_bytes // entries


def _segments_of(where: str, region: Region, entry_bytes: int) -> Iterable[Segment]:
    if not region.segments:
        heads = max(region.heads, 1)
        if entry_bytes % heads and not is_opaque(region):
            raise TransferError(f"{where}: an entry has {entry_bytes} bytes for {region.heads} heads")
        each = max(entry_bytes // heads, 1)
        return (Segment(region.first_head, region.heads, each, region.replica, region.replicas),)
    if region.kind is not RegionKind.ROWS:
        raise TransferError(f"{where}: {region.kind.value} have no segments")
    total = sum(max(segment.heads, 1) * segment.head_bytes for segment in region.segments)
    if total != region.item_bytes:
        raise TransferError(f"{where}: item_bytes is {region.item_bytes}; its segments have {total}")
    return region.segments


def gives(source: Cell | Slice, target: Cell | Slice) -> bool:
    """Of its replicas, that source is the one that writes to that target: with R replicas at the source and Q at the
    target, target replica q has it from source replica q * R // Q.
    """
    return source.replica == target.replica * source.replicas // target.replicas


@lru_cache(maxsize=64)
def slices_in(
    regions: tuple[Region, ...], cp_rank: int = 0, cp_size: int = 1, *, every: bool = False
) -> tuple[Slice, ...]:
    """What a rank's regions have, layer run by layer run: of the model's KV, or with `every` of each part but the
    metadata, by names of its own. Raises TransferError as `cells_of`.
    """
    return slices_of(cells_of("its", regions), cp_rank, cp_size, every=every)


def slices_of(cells: Cells, cp_rank: int = 0, cp_size: int = 1, *, every: bool = False) -> tuple[Slice, ...]:
    """As `slices_in`, of cells."""
    runs: dict[tuple[str, int, int, int, int], list[tuple[int, int]]] = {}
    for key, cell in sorted(cells.items()):
        kv = key.part in _KV and not key.stack and cell.region.kind is RegionKind.PAGES
        if key.part == METADATA or not (kv or every):
            continue
        name = f"{key.stack}/{key.part}/{key.segment}" if every else "kv"
        layers = runs.setdefault((name, cell.first_head, cell.heads, cell.replica, cell.replicas), [])
        if layers and layers[-1][1] == key.layer:
            layers[-1] = (layers[-1][0], key.layer + 1)
        elif not (layers and layers[-1][1] == key.layer + 1):
            layers.append((key.layer, key.layer + 1))
    return tuple(
        Slice(first, end - first, head, heads, replica, replicas, cp_rank, cp_size, name)
        for (name, head, heads, replica, replicas), layers in sorted(runs.items())
        for first, end in layers
    )
