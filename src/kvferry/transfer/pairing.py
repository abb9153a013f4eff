"""How the regions of a source rank meet those of a target rank. Made once per peer; pure.

Cells of one key are paired as far as both have the same heads. Where the source has replicas, the target's own number
among its replicas says which of them writes (`kvferry.transfer.layout.gives`), so that the work is shared out evenly
and each target has everything once. It takes no knowledge of the other ranks. Which ranks meet at all is in
`kvferry.transfer.ranks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.transfer.blocks import Columns
from kvferry.transfer.contract import SELF_TEST, Region, RegionKind, TransferError
from kvferry.transfer.layout import METADATA, Cell, Cells, Key, cells_of, entries_of, gives, is_opaque


@dataclass(frozen=True)
class Terms:
    """What must be alike in all columns of a group. `*_tokens`: of an item; `*_pool`: whose numbers name its items."""

    kind: RegionKind
    part: str
    source_pool: str
    target_pool: str
    source_tokens: int
    target_tokens: int
    entry_tokens: int
    window: int
    sliced: bool


@dataclass(frozen=True, eq=False)
class Group:
    """Columns that the same entries are copied in. `*_items`: the fewest that one of its regions has; `*_entries`: of
    an item.
    """

    terms: Terms
    columns: Columns
    source_items: int
    target_items: int
    source_entries: int
    target_entries: int

    @property
    def entry_width(self) -> int:
        """Bytes of one entry over all columns."""
        return int(self.columns.width.sum())


@dataclass(frozen=True, eq=False)
class Pairing:
    """What goes from one rank to another, in the order in which it is sent. `rows` by part."""

    pages: tuple[Group, ...]
    rings: tuple[Group, ...]
    rows: Mapping[str, tuple[Group, ...]]

    @property
    def groups(self) -> tuple[Group, ...]:
        return (*self.pages, *self.rings, *(group for groups in self.rows.values() for group in groups))

    def page_size(self, side: str) -> int:
        """Tokens of a page of the main pool at that side ("source" or "target"); 0: none of its pages are paired.

        Raises TransferError where its regions contradict each other: one list can't name pages of two sizes.
        """
        terms = [group.terms for group in self.pages]
        found = {getattr(term, f"{side}_tokens") for term in terms if not getattr(term, f"{side}_pool")}
        if len(found) > 1:
            raise TransferError(f"{side} pages of one pool have {' and '.join(map(str, sorted(found)))} tokens")
        return next(iter(found), 0)

    @property
    def page_bytes(self) -> int:
        """Bytes of one source page in all regions of pages."""
        return sum(group.entry_width * group.source_entries for group in self.pages)


@dataclass(frozen=True)
class _Link:
    """Two cells, and the heads [first, end) that go from one to the other (0, 0: undivided, all of it)."""

    key: Key
    source: Cell
    target: Cell
    first: int
    end: int

    @property
    def source_start(self) -> int:
        return self.source.start + (self.first - self.source.first_head if self.end else 0) * self.source.head_bytes

    @property
    def target_start(self) -> int:
        return self.target.start + (self.first - self.target.first_head if self.end else 0) * self.target.head_bytes

    @property
    def width(self) -> int:
        if is_opaque(self.source.region):
            return self.source.stride
        return max(self.end - self.first, 1) * self.source.head_bytes

    @property
    def sliced(self) -> bool:
        return self.width != self.source.stride or self.width != self.target.stride


def pair(source_regions: Sequence[Region], target_regions: Sequence[Region]) -> Pairing:
    """Pair two ranks that have the same content: what the only ranks of two instances must have.

    Raises TransferError, naming both values, for what one side lacks or has twice, and for what can't be copied: other
    heads, bytes per head, window, entry_tokens.
    """
    source, target = cells_of("source", source_regions), cells_of("target", target_regions)
    for side, here, there in (("target", source, target), ("source", target, source)):
        missing = sorted(here.keys() - there.keys())
        if missing:
            kind = here[missing[0]].region.kind.value
            raise TransferError(
                f"{side} lacks {kind} of {', '.join(map(str, missing[:4]))}: "
                f"source has {len(source)} parts of layers, target {len(target)}"
            )
    for key, cell in source.items():
        ours, theirs = (cell.first_head, cell.heads), (target[key].first_head, target[key].heads)
        _equal(key, "(first_head, heads)", ours, theirs)
    return pair_cells(source, target, replicas=False)


def pair_common(source_regions: Sequence[Region], target_regions: Sequence[Region]) -> Pairing:
    """Pair what a source rank has for a target rank; the rest is for, or from, other ranks.

    Raises TransferError, naming both values, for what a side has twice, and for what can't be copied.
    """
    return pair_cells(cells_of("source", source_regions), cells_of("target", target_regions))


def check_given(source_regions: Sequence[Region], pairings: Sequence[Pairing]) -> None:
    """Raises TransferError, naming the first region that is not given whole to the targets of these pairings, of those
    that no other source rank has. Of the metadata only leaders give any.
    """
    given: dict[int, set[tuple[int, int]]] = {}
    for group in (group for pairing in pairings for group in pairing.groups):
        table = zip(group.columns.source_region, group.columns.source_start, group.columns.width, strict=True)
        for at, start, width in table:
            given.setdefault(int(at), set()).add((int(start), int(width)))
    for at, region in enumerate(source_regions):
        shared = max([region.replicas, *(segment.replicas for segment in region.segments)]) > 1
        if shared or region.part in (METADATA, SELF_TEST):
            continue
        wanted, found = region.item_bytes // entries_of(region), sum(width for _, width in given.get(at, ()))
        if found != wanted:
            raise TransferError(
                f"of the {wanted} bytes that this rank has of {_label(region)} of layer {region.layer} per entry, its "
                f"targets have {found}"
            )


def check_wanted(source: Sequence[Region], rank: int, target: Sequence[Region], *, undivided: bool) -> None:
    """Raises TransferError for what target rank `rank` has of a layer that this source rank has too, and of which it
    has nothing: scales beside pages without, a latent beside K and V, another state. Every rank has its heads of all
    that a layer has, so no other source rank gives it. With `undivided`, also of what is not divided by heads, which
    need not be in every rank.
    """
    ours = cells_of("source", source)
    layers = {(key.stack, key.layer) for key in ours}
    for key, cell in sorted(cells_of("target", target).items()):
        alike = (key.stack, key.layer) in layers and key.part != METADATA and (undivided or cell.heads > 0)
        if alike and key not in ours:
            found = ", ".join(sorted({known.part for known in ours if known[:2] == key[:2]}))
            of = f"{cell.region.kind.value} of {key}"
            raise TransferError(
                f"source lacks {of}, which target rank {rank} has; of that layer the source has {found}"
            )


def pair_cells(source: Cells, target: Cells, *, replicas: bool = True) -> Pairing:
    """As `pair_common`, of cells. Without `replicas` the source gives what it has, whatever its number among them."""
    links: dict[Terms, list[_Link]] = {}
    for key in sorted(source.keys() & target.keys()):
        _check(key, source[key], target[key])
        link = _link(key, source[key], target[key], replicas)
        if link is not None:
            links.setdefault(_terms(link), []).append(link)
    groups = [_group(terms, found) for terms, found in links.items()]
    of_rows = [group for group in groups if group.terms.kind is RegionKind.ROWS]
    return Pairing(
        pages=tuple(group for group in groups if group.terms.kind is RegionKind.PAGES),
        rings=tuple(group for group in groups if group.terms.kind is RegionKind.RINGS),
        rows={
            part: tuple(group for group in of_rows if group.terms.part == part)
            for part in dict.fromkeys(group.terms.part for group in of_rows)
        },
    )


def _check(key: Key, source: Cell, target: Cell) -> None:
    ours, theirs = source.region, target.region
    _equal(key, "kind", ours.kind.value, theirs.kind.value)
    _equal(key, "divided by heads", source.heads > 0, target.heads > 0)
    if is_opaque(ours) or is_opaque(theirs):
        _equal(key, "tokens", ours.tokens, theirs.tokens)
        if (source.first_head, source.heads) == (target.first_head, target.heads):
            _equal(key, "item_bytes", ours.item_bytes, theirs.item_bytes)
    else:
        _equal(key, "bytes per head", source.head_bytes, target.head_bytes)
    if ours.dtype and theirs.dtype:
        _equal(key, "dtype", ours.dtype, theirs.dtype)
    for name in ("entry_tokens", "window"):
        _equal(key, name, getattr(ours, name), getattr(theirs, name))


def _equal(key: Key, name: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise TransferError(f"{key}: {name} is {ours} at the source, {theirs} at the target")


def _link(key: Key, source: Cell, target: Cell, replicas: bool) -> _Link | None:
    if replicas and not gives(source, target):
        return None
    if not source.heads:
        return _Link(key, source, target, 0, 0)
    first = max(source.first_head, target.first_head)
    end = min(source.first_head + source.heads, target.first_head + target.heads)
    if first >= end:
        return None
    ours, theirs = (source.first_head, source.heads), (target.first_head, target.heads)
    if ours != theirs and is_opaque(source.region):
        raise TransferError(f"{key}: heads are {ours} at the source, {theirs} at the target, and tokens is 0 in both")
    return _Link(key, source, target, first, end)


def _terms(link: _Link) -> Terms:
    ours, theirs = link.source.region, link.target.region
    of_pages = ours.kind is RegionKind.PAGES
    return Terms(
        kind=ours.kind,
        part="" if of_pages else _label(ours),
        source_pool=ours.pool if of_pages else ours.pool or _label(ours),
        target_pool=theirs.pool if of_pages else theirs.pool or _label(theirs),
        source_tokens=ours.tokens,
        target_tokens=theirs.tokens,
        entry_tokens=ours.entry_tokens,
        window=ours.window,
        sliced=link.sliced and ours.kind is not RegionKind.ROWS,
    )


def _label(region: Region) -> str:
    return f"{region.stack}/{region.part}" if region.stack else region.part


def _group(terms: Terms, links: list[_Link]) -> Group:
    rows = list(_merged(links) if terms.kind is RegionKind.ROWS else map(_row, links))
    table = np.array(rows, dtype=np.int64).T
    columns = Columns(
        source_region=table[0].astype(np.int32),
        target_region=table[1].astype(np.int32),
        source_start=table[2],
        target_start=table[3],
        source_stride=table[4],
        target_stride=table[5],
        width=table[6],
        sliced=terms.sliced,
    )
    return Group(
        terms,
        columns,
        source_items=min(link.source.region.items for link in links),
        target_items=min(link.target.region.items for link in links),
        source_entries=entries_of(links[0].source.region),
        target_entries=entries_of(links[0].target.region),
    )


def _row(link: _Link) -> list[int]:
    """A line of `Columns`."""
    ours, theirs = link.source, link.target
    return [ours.at, theirs.at, link.source_start, link.target_start, ours.stride, theirs.stride, link.width]


def _merged(links: list[_Link]) -> Iterator[list[int]]:
    """The same lines; segments of a row that follow each other on both sides are one."""
    row: list[int] | None = None
    for link in links:
        following = _row(link)
        if row is not None and row[:2] == following[:2] and all(row[i] + row[6] == following[i] for i in (2, 3)):
            row[6] += following[6]
            continue
        if row is not None:
            yield row
        row = following
    if row is not None:
        yield row
