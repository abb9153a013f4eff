"""The blocks that copy pages: of whole pages by a list of each side, or of a prompt's tokens. Pure numpy."""

from __future__ import annotations

from collections.abc import Mapping

from numpy.typing import ArrayLike

from kvferry.transfer.blocks import Block, Ints, Runs
from kvferry.transfer.chunk import Chunk
from kvferry.transfer.contract import TransferError
from kvferry.transfer.pairing import Group, Pairing
from kvferry.transfer.runs import check_items, check_once, entry_runs, item_list, page_runs

#: Page numbers of one prompt from its first page on, by pool; a list alone is the main pool's.
Pages = ArrayLike | Mapping[str, ArrayLike]


def page_blocks(pairing: Pairing, source_pages: ArrayLike, target_pages: ArrayLike) -> tuple[Block, ...]:
    """Copies of source_pages[i] to target_pages[i] in every group of pages, whatever the pool.

    Raises TransferError on lists of unequal length, a page outside a pool, a target page named twice, and where page
    sizes differ.
    """
    source, target = item_list("source", source_pages), item_list("target", target_pages)
    if source.size != target.size:
        raise TransferError(f"{source.size} source pages but {target.size} target pages")
    check_once(target)
    runs, blocks = page_runs(source, target), []
    for group in pairing.pages:
        if group.source_entries != group.target_entries:
            sizes = f"{group.terms.source_tokens} tokens at the source, {group.terms.target_tokens} at the target"
            raise TransferError(f"pages of {sizes}: they are planned by tokens")
        check_items("source", source, group.source_items)
        check_items("target", target, group.target_items)
        size = group.source_entries
        blocks.append(Block(group.columns, Runs(runs.source_at * size, runs.target_at * size, runs.count * size)))
    return tuple(blocks)


def token_blocks(pairing: Pairing, chunk: Chunk, source_pages: Pages, target_pages: Pages) -> tuple[Block, ...]:
    """Copies of a chunk's tokens: token t lies in page pages[t // page_size] of either side. Page numbers that no token
    of the chunk needs may be anything, as -1 for pages before a window.

    Raises TransferError on lists that are too short, a page outside a pool, a target page that is needed twice, and
    for pages that don't say their tokens.
    """
    found: dict[tuple[object, ...], Runs] = {}
    blocks = []
    for group in pairing.pages:
        terms = group.terms
        place = (
            terms.source_pool, terms.target_pool, terms.source_tokens, terms.target_tokens, terms.entry_tokens,
            terms.window, group.source_items, group.target_items,
        )  # fmt: skip
        if place not in found:
            found[place] = _token_runs(group, chunk, source_pages, target_pages)
        if len(found[place]):
            blocks.append(Block(group.columns, found[place]))
    return tuple(blocks)


def _token_runs(group: Group, chunk: Chunk, source_pages: Pages, target_pages: Pages) -> Runs:
    terms = group.terms
    if not (terms.source_tokens and terms.target_tokens):
        raise TransferError("these pages don't say how many tokens they have: tokens is 0")
    first, end = chunk.pages_of(terms.window, terms.source_tokens, terms.target_tokens)
    source = _needed("source", source_pages, terms.source_pool, first, end, terms.source_tokens, group.source_items)
    target = _needed("target", target_pages, terms.target_pool, first, end, terms.target_tokens, group.target_items)
    # An entry of several tokens is copied as a whole when one of them is.
    first, end = first // terms.entry_tokens, -(-end // terms.entry_tokens)
    return entry_runs(first, end, source, group.source_entries, target, group.target_entries)


def _needed(side: str, pages: Pages, pool: str, first: int, end: int, page_size: int, limit: int) -> Ints:
    """The page list of that pool, checked as far as tokens [first, end) need it."""
    if isinstance(pages, Mapping):
        if pool not in pages:
            raise TransferError(f"no {side} pages of pool {pool!r}; there are {sorted(pages)}")
        listed = item_list(side, pages[pool])
    elif pool:
        raise TransferError(f"{side} pages of pool {pool!r} are wanted, beside the main one's")
    else:
        listed = item_list(side, pages)
    if first == end:
        return listed
    used = listed[first // page_size : -(-end // page_size)]
    if len(listed) * page_size < end:
        raise TransferError(f"{len(listed)} {side} pages of {page_size} tokens; {end} tokens need more")
    check_items(side, used, limit)
    if side == "target":
        check_once(used)
    return listed
