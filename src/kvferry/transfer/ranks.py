"""Which source rank writes to which target rank, where instances have several. Pure.

A rank has *places*: a layer and a range of its KV heads each. Here every place of one side is a place of the other (the
same layers in other stages, the same heads in as many ranks); ranges of heads that only overlap are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvferry.protocol.rank import LEADER, Slice
from kvferry.transfer.contract import Region, RegionKind, TransferError

#: (layer, first head, heads)
Place = tuple[int, int, int]
Places = frozenset[Place]


def places_of(part: Slice) -> Places:
    layers = range(part.first_layer, part.first_layer + part.layers)
    return frozenset((layer, part.first_head, part.heads) for layer in layers)


def places_in(regions: Iterable[Region]) -> Places:
    """Those of a rank's registered pages."""
    pages = (region for region in regions if region.kind is RegionKind.PAGES)
    return frozenset((region.layer, region.first_head, region.heads) for region in pages)


def routes(sources: Mapping[int, Places], targets: Mapping[int, Places]) -> dict[int, tuple[int, ...]]:
    """Source rank -> the target ranks that it has something for, both ascending; a rank that writes nothing is left
    out. The metadata goes from leader to leader, so these two always meet.

    Raises TransferError, naming the first place that only one side has, or that a side has twice.
    """
    givers, takers = _holders("source", sources), _holders("target", targets)
    for side, here, there in (("target", givers, takers), ("source", takers, givers)):
        missing = sorted(here.keys() - there.keys())
        if missing:
            layer, first, heads = missing[0]
            raise TransferError(
                f"no {side} rank has heads {first} to {first + heads - 1} of layer {layer} as one range"
            )
    pairs = {(rank, takers[place]) for place, rank in givers.items()} | {(LEADER, LEADER)}
    return {rank: tuple(sorted(t for s, t in pairs if s == rank)) for rank in sorted({s for s, _ in pairs})}


def _holders(side: str, ranks: Mapping[int, Places]) -> dict[Place, int]:
    holders: dict[Place, int] = {}
    for rank, places in ranks.items():
        for place in places:
            if place in holders:
                raise TransferError(f"{side} ranks {holders[place]} and {rank} both have {place} (layer, head, heads)")
            holders[place] = rank
    return holders
