"""Which bytes go where: what one source rank writes to one target rank. Pure.

Two ranks are paired once (`pair`, `pair_common`: what they have in common, by what it is and never by its position in
a list); then a chunk of a prompt, with the page numbers and slots of both sides, becomes a `Plan`: blocks of copies in
one order, which both sides find alike, with what they cost. `plan_pages` and `plan_row` give the spans of whole pages
and of a row alone. Which ranks of two instances meet is in `kvferry.transfer.ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from numpy.typing import ArrayLike

from kvferry.transfer.blocks import Block, spans_of
from kvferry.transfer.chunk import Chunk, cp_range
from kvferry.transfer.contract import Spans
from kvferry.transfer.cost import Costs, Estimate, estimate
from kvferry.transfer.layout import METADATA
from kvferry.transfer.page_plan import Pages, page_blocks, token_blocks
from kvferry.transfer.pairing import Pairing, pair, pair_common
from kvferry.transfer.row_plan import Slots, row_blocks, state_blocks
from kvferry.transfer.spans import split, total_bytes

__all__ = [
    "Block", "Chunk", "Costs", "Estimate", "Held", "Pairing", "Plan", "cp_range",
    "pair", "pair_common", "plan", "plan_pages", "plan_row", "split", "total_bytes",
]  # fmt: skip

_DEFAULT_COSTS = Costs()


@dataclass(frozen=True, eq=False)
class Held:
    """What a request holds on one side: its pages by pool, from the prompt's first token on, and its slots by pool."""

    pages: Pages = ()
    slots: Slots = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Plan:
    """`blocks`, in the order of the bytes: the digest of the plan is taken over them in this order. `staged`: its
    slices (`sliced`) are gathered, sent as one and scattered; what is not sliced (`straight`) never is.
    """

    blocks: tuple[Block, ...]
    costs: Costs = _DEFAULT_COSTS

    @cached_property
    def estimate(self) -> Estimate:
        """What it costs, either way."""
        return estimate(self.blocks, self.costs)

    @property
    def staged(self) -> bool:
        return self.estimate.staged

    @property
    def reason(self) -> str:
        """Why it is staged, or not, with the figures."""
        return self.estimate.reason

    @property
    def size_bytes(self) -> int:
        return self.estimate.size_bytes

    @property
    def sliced(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.sliced)

    @property
    def straight(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if not block.sliced)

    @cached_property
    def spans(self) -> Spans:
        """All blocks, each slice a span of its own."""
        return spans_of(self.blocks)


def plan(pairing: Pairing, chunk: Chunk, source: Held, target: Held, costs: Costs = _DEFAULT_COSTS) -> Plan:
    """What a chunk of a prompt has to be written, for one pair of ranks: pages, and with the last chunk rings and rows;
    the metadata too where both sides hold a slot of that name (the leaders do).

    Raises TransferError for page lists and slots that don't fit the chunk or their pools.
    """
    blocks = (
        *token_blocks(pairing, chunk, source.pages, target.pages),
        *state_blocks(pairing, chunk, source.slots, target.slots),
    )
    if chunk.last and METADATA in source.slots and METADATA in target.slots:
        blocks += row_blocks(pairing, METADATA, source.slots[METADATA], target.slots[METADATA])
    return Plan(blocks, costs)


def plan_pages(pairing: Pairing, source_pages: ArrayLike, target_pages: ArrayLike) -> Spans:
    """Spans that copy source_pages[i] to target_pages[i] in every paired region of pages, region by region.

    Pages that follow each other on both sides become one span. Raises TransferError on lists of unequal length, a page
    outside a pool, a target page named twice, and page sizes that differ.
    """
    return spans_of(page_blocks(pairing, source_pages, target_pages))


def plan_row(pairing: Pairing, part: str, source_slot: int, target_slot: int) -> Spans:
    """Spans that copy one row of `part`. Raises TransferError: unknown part, slot."""
    return spans_of(row_blocks(pairing, part, source_slot, target_slot))
