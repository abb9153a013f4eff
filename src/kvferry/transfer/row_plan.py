"""The blocks that copy what exists once per request, at a slot of either side: rows, and rings. Pure numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvferry.transfer.blocks import Block, Ints, Runs
from kvferry.transfer.chunk import Chunk
from kvferry.transfer.contract import TransferError
from kvferry.transfer.layout import METADATA
from kvferry.transfer.pairing import Group, Pairing
from kvferry.transfer.runs import check_items, entry_runs

#: The request's slot by pool: a part's own ("metadata", "conv", ...), where its region names no other.
Slots = Mapping[str, int]


def row_blocks(pairing: Pairing, part: str, source_slot: int, target_slot: int) -> tuple[Block, ...]:
    """Copies of one row of `part`, as far as the two ranks have it in common.

    Raises TransferError for a part that they don't have, and for a slot outside a pool.
    """
    if part not in pairing.rows:
        raise TransferError(f"no rows of part {part!r}; there are {sorted(pairing.rows)}")
    blocks = []
    for group in pairing.rows[part]:
        source, target = (
            _slot("source", source_slot, group.source_items),
            _slot("target", target_slot, group.target_items),
        )
        blocks.append(Block(group.columns, Runs(source, target, np.ones(1, dtype=np.int64))))
    return tuple(blocks)


def state_blocks(pairing: Pairing, chunk: Chunk, source_slots: Slots, target_slots: Slots) -> tuple[Block, ...]:
    """Copies of a request's rows (all but the metadata, which is the leaders' business) and of its rings: nothing
    before the last chunk. Rows come from the source that has the prompt's last token, and ring slots from the one that
    has that position.

    Raises TransferError for a pool that has no slot, and for a slot outside a pool.
    """
    blocks: list[Block] = []
    for group in pairing.rings:
        blocks += _ring(group, chunk, source_slots, target_slots)
    if not (chunk.last and chunk.has_end):
        return tuple(blocks)
    for part, groups in pairing.rows.items():
        if part == METADATA:
            continue
        for group in groups:
            source, target = _slots(group, source_slots, target_slots)
            blocks.append(Block(group.columns, Runs(source, target, np.ones(1, dtype=np.int64))))
    return tuple(blocks)


def _ring(group: Group, chunk: Chunk, source_slots: Slots, target_slots: Slots) -> list[Block]:
    """Position p lies in slot p % tokens of the request's ring, on either side."""
    first, end = chunk.ring_of(group.terms.window)
    if first == end:
        return []
    source, target = _slots(group, source_slots, target_slots)
    sizes = group.terms.source_tokens, group.terms.target_tokens
    # A ring that is run through several times: the same item, again and again.
    rings = [np.repeat(slot, -(-end // size)) for slot, size in zip((source, target), sizes, strict=True)]
    return [Block(group.columns, entry_runs(first, end, rings[0], sizes[0], rings[1], sizes[1]))]


def _slots(group: Group, source_slots: Slots, target_slots: Slots) -> tuple[Ints, Ints]:
    found = []
    for side, slots, pool, limit in (
        ("source", source_slots, group.terms.source_pool, group.source_items),
        ("target", target_slots, group.terms.target_pool, group.target_items),
    ):
        if pool not in slots:
            raise TransferError(f"no {side} slot of pool {pool!r}; there are {sorted(slots)}")
        found.append(_slot(side, slots[pool], limit))
    return found[0], found[1]


def _slot(side: str, slot: int, limit: int) -> Ints:
    array = np.array([slot], dtype=np.int64)
    check_items(side, array, limit, "slot")
    return array
