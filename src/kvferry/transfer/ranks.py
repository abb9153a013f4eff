"""Which source rank writes to which target rank, where instances have several. Pure.

A rank has slices: layers and heads, and a number among the ranks that have the same ones. What two ranks meet for is in
`kvferry.transfer.pairing`, by the same rule; here it is checked that each target has everything once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.rank import LEADER, Slice
from kvferry.transfer.contract import Region, TransferError
from kvferry.transfer.layout import cells_of, gives, slices_of
from kvferry.transfer.pairing import Pairing, pair_cells

Slices = tuple[Slice, ...]
Routes = dict[int, tuple[int, ...]]
_Ranks = tuple[tuple[int, Slices], ...]
#: Cells that a slice covers, on axes of layers and heads that are cut at every bound of a slice.
_Box = tuple[slice, slice]
#: So that a peer's word costs little: a hundred layers of mixed kinds over hundreds of ranks is far below.
_MOST_CELLS = 1 << 20


def routes(sources: Mapping[int, Slices], targets: Mapping[int, Slices]) -> Routes:
    """Source rank -> the target ranks that it has something for, both ascending; a rank that writes nothing is left
    out. The metadata goes from leader to leader, so these two always meet. A rank that shares prompts out with others
    (CP) is in it, even if a short prompt leaves it nothing to write.

    Raises TransferError, naming layer and heads, for what one side lacks, and what a target rank would get twice; and
    for targets that share prompts out.
    """
    return dict(_routes(tuple(sorted(sources.items())), tuple(sorted(targets.items()))))


@lru_cache(maxsize=256)
def _routes(sources: _Ranks, targets: _Ranks) -> tuple[tuple[int, tuple[int, ...]], ...]:
    pairs = {(LEADER, LEADER)}
    _check_numbers(sources, targets)
    for part in dict.fromkeys(piece.part for _, pieces in (*sources, *targets) for piece in pieces):
        pairs |= _pairs(part, _of(part, sources), _of(part, targets))
    ranks = sorted({source for source, _ in pairs})
    return tuple((rank, tuple(sorted(target for source, target in pairs if source == rank))) for rank in ranks)


def pair_instances(
    sources: Mapping[int, Sequence[Region]],
    targets: Mapping[int, Sequence[Region]],
    cp_ranks: Mapping[int, int] | None = None,
    cp_size: int = 1,
) -> dict[tuple[int, int], Pairing]:
    """All pairs of a source rank and a target rank that meet, by the regions of all ranks. `cp_ranks`: which part of
    each prompt a source rank has, where they are shared out.

    Raises TransferError for what can't be copied, naming both values, and as `routes`.
    """
    parts = cp_ranks or {}
    ours = {rank: cells_of(f"source rank {rank}'s", regions) for rank, regions in sources.items()}
    theirs = {rank: cells_of(f"target rank {rank}'s", regions) for rank, regions in targets.items()}
    ways = routes(
        {rank: slices_of(cells, parts.get(rank, 0), cp_size, every=True) for rank, cells in ours.items()},
        {rank: slices_of(cells, every=True) for rank, cells in theirs.items()},
    )
    return {(source, to): pair_cells(ours[source], theirs[to]) for source, found in ways.items() for to in found}


def _check_numbers(sources: _Ranks, targets: _Ranks) -> None:
    for rank, pieces in (*sources, *targets):
        for piece in pieces:
            if not (0 <= piece.replica < piece.replicas and 0 <= piece.cp_rank < piece.cp_size):
                numbers = f"replica {piece.replica} of {piece.replicas}, cp_rank {piece.cp_rank} of {piece.cp_size}"
                raise TransferError(f"rank {rank} is {numbers}; wanted numbers below their counts")
    for _, pieces in targets:
        for piece in pieces:
            if piece.cp_size != 1:
                raise TransferError(f"cp_size is {piece.cp_size} at the target; allowed: 1")
    sizes = sorted({piece.cp_size for _, pieces in sources for piece in pieces})
    if len(sizes) > 1:
        raise TransferError(f"cp_size is {sizes[0]} at one source rank, {sizes[1]} at another")


def _of(part: str, ranks: _Ranks) -> list[tuple[int, Slice]]:
    return [(rank, piece) for rank, pieces in ranks for piece in pieces if piece.part == part]


def _pairs(part: str, sources: list[tuple[int, Slice]], targets: list[tuple[int, Slice]]) -> set[tuple[int, int]]:
    axes = _Axes(part, [piece for _, piece in sources], [piece for _, piece in targets])
    pairs: set[tuple[int, int]] = set()
    held = axes.empty()
    for _, ours in sources:
        held[axes.box(ours)] += 1
    wanted = axes.empty()
    for target, theirs in targets:
        box = axes.box(theirs)
        wanted[box] += 1
        for cp_rank in range(sources[0][1].cp_size if sources else 1):
            got = axes.empty()
            for source, ours in sources:
                if ours.cp_rank == cp_rank and gives(ours, theirs):
                    here = axes.empty()
                    here[axes.box(ours)] += 1
                    got += here
                    if here[box].any():
                        pairs.add((source, target))
            axes.check("source", got[box] == 0, box, "no {side} rank has {what}, for target rank " + str(target))
            axes.check("source", got[box] > 1, box, "more than one {side} rank has {what}, as the same replica")
    everything = (slice(None), slice(None))
    axes.check("target", (held > 0) & (wanted == 0), everything, "no {side} rank has {what}")
    return pairs


class _Axes:
    """Layers and heads, cut at every bound: what a slice has is a box of whole cells. So their number depends on the
    number of slices, and not on what a peer says of its layers and heads.
    """

    def __init__(self, part: str, sources: Sequence[Slice], targets: Sequence[Slice]) -> None:
        every = [*sources, *targets]
        self._part, self._sides = part, f"(source: {_extent(sources)}; target: {_extent(targets)})"
        divided = {piece.heads > 0 for piece in every}
        if len(divided) > 1:
            raise TransferError(f"{part}: divided by heads in some ranks, not in others {self._sides}")
        self._divided = divided == {True}
        self._layers = sorted({bound for p in every for bound in (p.first_layer, p.first_layer + p.layers)})
        self._heads = sorted({bound for p in every for bound in (p.first_head, p.first_head + max(p.heads, 1))})
        if len(self._layers) * len(self._heads) > _MOST_CELLS:
            raise TransferError(f"{part}: {len(every)} slices with {len(self._layers)} bounds of layers; too many")

    def empty(self) -> NDArray[np.int64]:
        return np.zeros((len(self._layers) - 1, len(self._heads) - 1), dtype=np.int64)

    def box(self, piece: Slice) -> _Box:
        layers, heads = self._layers.index, self._heads.index
        return (
            slice(layers(piece.first_layer), layers(piece.first_layer + piece.layers)),
            slice(heads(piece.first_head), heads(piece.first_head + max(piece.heads, 1))),
        )

    def check(self, side: str, bad: NDArray[np.bool_], box: _Box, text: str) -> None:
        """Raises TransferError for the first bad cell of a box; `text` has places for {side} and {what}."""
        if not bad.any():
            return
        layer, head = (int(at) for at in np.argwhere(bad)[0])
        layer, head = layer + (box[0].start or 0), head + (box[1].start or 0)
        what = f"{self._part} of layer {self._layers[layer]}"
        if self._divided:
            what = f"heads {self._heads[head]} to {self._heads[head + 1] - 1} of {what}"
        raise TransferError(f"{text.format(side=side, what=what)} {self._sides}")


def _extent(pieces: Sequence[Slice]) -> str:
    """What the ranks of a side have in all."""
    if not pieces:
        return "none"
    layers = f"layers {min(p.first_layer for p in pieces)} to {max(p.first_layer + p.layers for p in pieces) - 1}"
    heads = {p.heads > 0 for p in pieces}
    if heads == {False}:
        return f"{layers}, not divided"
    first, end = min(p.first_head for p in pieces), max(p.first_head + p.heads for p in pieces)
    return f"{layers}, heads {first} to {end - 1}" + ("" if heads == {True} else ", some not divided")
