"""Random layouts of both sides against a dense reference: memory as byte arrays, filled and expected token by token.

The reference knows nothing of the plan. What a model keeps of a prompt is a table of random bytes per thing: [heads,
tokens, bytes]. A source rank's memory holds its part of them among noise, a target rank's memory holds other noise,
and after the spans of all pairs of ranks have been carried out as byte copies, exactly the right bytes must have
changed, each once. `KVFERRY_LAYOUT_CASES` says how many cases; a failure names the number of its case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np
import pytest

from kvferry.protocol.rank import Slice
from kvferry.transfer.chunk import Chunk, cp_range
from kvferry.transfer.contract import Region, RegionKind, Segment
from kvferry.transfer.layout import slices_in
from kvferry.transfer.pairing import pair_common
from kvferry.transfer.plan import Held, plan
from kvferry.transfer.ranks import pair_instances, routes
from kvferry.transfer.spans import check_spans

CASES, BLOCKS = int(os.environ.get("KVFERRY_LAYOUT_CASES", "1500")), 10
PAGES, ROWS, RINGS = RegionKind.PAGES, RegionKind.ROWS, RegionKind.RINGS


@dataclass(frozen=True)
class Thing:
    """One part of one layer, as the model has it. `runs`: (heads in all, bytes of one) of each segment of a row, and
    one alone for pages and rings. `grain`: tokens per entry. `pool` names a pool that a side may keep apart.
    """

    kind: RegionKind
    part: str
    layer: int
    runs: tuple[tuple[int, int], ...]
    grain: int = 1
    window: int = 0
    stack: str = ""
    pool: str = ""


@dataclass
class Side:
    """An instance, and what the request holds there."""

    tp: int
    stages: tuple[int, ...]
    cp: int
    page: int
    pool_items: int
    ring_slots: dict[int, int]  # by window
    apart: frozenset[str]  # pools with page numbers of their own
    pages: dict[str, np.ndarray] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    regions: dict[int, tuple[Region, ...]] = field(default_factory=dict)
    memory: dict[int, list[np.ndarray]] = field(default_factory=dict)
    things: dict[int, list[int]] = field(default_factory=dict)  # what each region holds

    def ranks(self) -> Iterator[tuple[int, int, int, int]]:
        """(rank, cp, pp, tp)."""
        pp = len(self.stages)
        for rank in range(self.cp * pp * self.tp):
            yield rank, rank // (pp * self.tp), rank // self.tp % pp, rank % self.tp


@dataclass
class Case:
    things: list[Thing]
    source: Side
    target: Side
    prompt: int
    cuts: list[int]  # the chunks' bounds, from the prefix on
    tables: dict[tuple[int, int], np.ndarray]  # (thing, run) -> [heads or 1, entries (1 for a row), bytes]


# --- cases -------------------------------------------------------------------------------------------------


def deal(heads: int, tp: int, rank: int) -> tuple[int, int, int, int]:
    """(first head, heads, replica, replicas)."""
    if not heads:
        return 0, 0, rank, tp
    holders = [[r for r in range(tp) if h * tp < (r + 1) * heads and r * heads < (h + 1) * tp] for h in range(heads)]
    mine = [h for h in range(heads) if rank in holders[h]]
    return mine[0], len(mine), holders[mine[0]].index(rank), len(holders[mine[0]])


def heads_for(rng: np.random.Generator, *tps: int) -> int:
    fits = [h for h in (1, 2, 3, 4, 6, 8, 12) if all(h % tp == 0 or tp % h == 0 for tp in tps)]
    return int(rng.choice(fits))


def compose(rng: np.random.Generator, total: int, most: int) -> tuple[int, ...]:
    """`total` in up to `most` parts of at least 1."""
    cuts = sorted(rng.choice(total - 1, size=min(int(rng.integers(0, most)), total - 1), replace=False) + 1)
    return tuple(int(part) for part in np.diff([0, *cuts, total]))


def layer_things(rng: np.random.Generator, layer: int, tps: tuple[int, int], sizes: tuple[int, int]) -> list[Thing]:
    width, heads = int(rng.integers(1, 5)), heads_for(rng, *tps)
    kind = rng.choice(["attention", "latent", "sliding", "ring", "state"], p=[0.4, 0.15, 0.15, 0.15, 0.15])
    shared = gcd(*sizes)
    if kind == "attention":
        found = [Thing(PAGES, part, layer, ((heads, width),)) for part in "kv"]
        if rng.random() < 0.3:  # a quantised KV: scales per token and head, or per block of tokens and head
            grain = shared if rng.random() < 0.5 else 1
            found += [Thing(PAGES, part, layer, ((heads, 2),), grain) for part in ("k_scale", "v_scale")]
        return found
    if kind == "latent":
        found = [Thing(PAGES, "latent", layer, ((0, width),))]
        if rng.random() < 0.5:
            grain = int(rng.choice([g for g in (1, 2, 4) if shared % g == 0]))
            found.append(Thing(PAGES, "index", layer, ((0, 2),), grain))
        return found
    window = int(rng.choice([2, 5, 11]))
    if kind == "sliding":
        return [Thing(PAGES, part, layer, ((heads, width),), window=window, pool="swa") for part in "kv"]
    if kind == "ring":
        return [Thing(RINGS, part, layer, ((heads, width),), window=window) for part in "kv"]
    groups, shared_bytes = heads_for(rng, *tps), int(rng.integers(1, 4))
    conv = ((heads, width), (groups, 2), (0, shared_bytes)) if rng.random() < 0.6 else ((heads, width),)
    return [Thing(ROWS, "conv", layer, conv, pool="state"), Thing(ROWS, "ssm", layer, ((heads, 3),), pool="state")]


def make_case(number: int) -> Case:
    rng = np.random.default_rng([20260101, number])
    tps = tuple(int(rng.integers(1, 9)) for _ in range(2))
    sizes = tuple(int(rng.choice([1, 2, 3, 4, 5, 8, 16, 32, 128])) for _ in range(2))
    if rng.random() < 0.4:
        sizes = (sizes[0], sizes[0])
    layers = int(rng.integers(1, 5))
    things = [thing for layer in range(layers) for thing in layer_things(rng, layer, tps, sizes)]
    if rng.random() < 0.25:  # a draft model, whose layers count from 0 as well
        heads = heads_for(rng, *tps)
        things += [Thing(PAGES, part, 0, ((heads, 3),), stack="draft", pool="draft") for part in "kv"]
    things.append(Thing(ROWS, "metadata", -1, ((0, 6),)))
    most = int(rng.choice([6, 24, 70]))
    prompt = int(rng.integers(1, most + 1))
    prefix = int(rng.integers(0, prompt + 1)) if rng.random() < 0.6 else 0
    sides = []
    for at, (tp, size) in enumerate(zip(tps, sizes, strict=True)):
        cp = int(rng.integers(1, 4)) if at == 0 and rng.random() < 0.3 else 1
        stages = compose(rng, layers, 4)
        needed = -(-prompt // size)
        rings = {window: window + int(rng.integers(0, 4)) for window in (2, 5, 11)}
        apart = frozenset(pool for pool in ("swa", "draft") if rng.random() < 0.5)
        side = Side(tp, stages, cp, size, needed + int(rng.integers(0, 4)), rings, apart)
        hold(rng, side, needed)
        sides.append(side)
    whole = range(-(-(prefix + 1) // sizes[1]) * sizes[1], prompt, sizes[1])  # chunks end with a target's page
    cuts = [prefix, *sorted(rng.choice(whole, size=min(2, len(whole)), replace=False).tolist()), prompt]
    tables = {
        (at, run): rng.integers(0, 256, (max(heads, 1), 1 if thing.kind is ROWS else -(-prompt // thing.grain), size))
        for at, thing in enumerate(things)
        for run, (heads, size) in enumerate(thing.runs)
    }
    case = Case(things, *sides, prompt, cuts, {at: table.astype(np.uint8) for at, table in tables.items()})
    for side in sides:
        build(rng, case, side)
    return case


def hold(rng: np.random.Generator, side: Side, needed: int) -> None:
    """Pages in any order, or in one run; a window's own pool has other numbers."""
    for pool in ("", "swa", "draft"):
        pages = rng.permutation(side.pool_items)[:needed]
        side.pages[pool] = np.sort(pages) if rng.random() < 0.4 else pages
    side.slots = {pool: int(rng.integers(0, 3)) for pool in ("metadata", "state", "k", "v")}


# --- memory ------------------------------------------------------------------------------------------------


def region_of(case: Case, side: Side, thing: Thing, tp_rank: int) -> Region:
    dealt = [deal(heads, side.tp, tp_rank) for heads, _ in thing.runs]
    segments = tuple(
        Segment(first, heads, size, replica, replicas)
        for (first, heads, replica, replicas), (_, size) in zip(dealt, thing.runs, strict=True)
    )
    row = sum(max(segment.heads, 1) * segment.head_bytes for segment in segments)
    first, heads, replica, replicas = dealt[0]
    pool = thing.pool if thing.kind is not PAGES or thing.pool in side.apart else ""
    made = Region(
        thing.kind, thing.part, thing.layer, 0, row, 3, first, heads, stack=thing.stack, pool=pool, replica=replica,
        replicas=1 if thing.part == "metadata" else replicas, window=thing.window,
    )  # fmt: skip
    made = made if thing.part != "metadata" else remade(made, replica=0)
    if thing.kind is ROWS:
        return remade(made, segments=segments) if len(segments) > 1 else made
    tokens = side.page if thing.kind is PAGES else side.ring_slots[thing.window]
    items = side.pool_items if thing.kind is PAGES else 3
    return remade(made, tokens=tokens, entry_tokens=thing.grain, item_bytes=row * tokens // thing.grain, items=items)


def remade(region: Region, **changes: object) -> Region:
    return Region(**({name: getattr(region, name) for name in Region.__struct_fields__} | changes))


def things_at(case: Case, side: Side, stage: int) -> list[int]:
    first = sum(side.stages[:stage])
    layers = range(first, first + side.stages[stage])
    last = stage == len(side.stages) - 1
    return [
        at for at, thing in enumerate(case.things)
        if (last if thing.stack else thing.layer in layers or thing.layer < 0)
    ]  # fmt: skip


def build(rng: np.random.Generator, case: Case, side: Side) -> None:
    """Regions in any order, full of noise."""
    for rank, _, stage, tp_rank in side.ranks():
        order = rng.permutation(things_at(case, side, stage)).tolist()
        regions = [region_of(case, side, case.things[at], tp_rank) for at in order]
        side.regions[rank], side.things[rank] = tuple(regions), order
        side.memory[rank] = [rng.integers(0, 256, r.item_bytes * r.items, dtype=np.uint8) for r in regions]


def put(case: Case, side: Side, rank: int, index: int, entry: int, position: int) -> None:
    """Entry `entry` of the thing (a token's, a block of tokens', the row's) where that rank's region has it; of what
    begins with token `position`.
    """
    region, at = side.regions[rank][index], side.things[rank][index]
    if region.kind is PAGES:
        start = int(side.pages[region.pool][position // side.page]) * region.item_bytes
        start += position % side.page // region.entry_tokens * (region.item_bytes * region.entry_tokens // side.page)
    else:
        start = side.slots[region.pool or region.part] * region.item_bytes
        if region.kind is RINGS:
            start += position % region.tokens * (region.item_bytes // region.tokens)
    memory = side.memory[rank][index]
    for number, run in enumerate(region.segments or (region,)):
        heads = case.tables[at, number][run.first_head : run.first_head + (run.heads or 1), entry]
        memory[start : start + heads.size] = heads.reshape(-1)
        start += heads.size


def wanted(case: Case, region: Region, first: int) -> Iterator[tuple[int, int]]:
    """(entry, its first token) of what a target needs of tokens from `first` on."""
    if region.kind is ROWS:
        yield 0, 0
    elif region.kind is RINGS:
        yield from ((token, token) for token in range(max(case.prompt - region.window, 0), case.prompt))
    else:
        if region.window:  # the window's first page, where both sides have it
            start = max(case.prompt - region.window, 0)
            first = max(first, *(start - start % side.page for side in (case.source, case.target)))
        grain = region.entry_tokens
        yield from (
            (e, e * grain) for e in range(-(-case.prompt // grain)) if min((e + 1) * grain, case.prompt) > first
        )


def fill_source(case: Case) -> None:
    """Ranks that share the prompt out have their own tokens, and the state where the prompt ends."""
    side = case.source
    for rank, cp_rank, _, _ in side.ranks():
        first, end = cp_range(case.prompt, side.page, cp_rank, side.cp)
        for index, region in enumerate(side.regions[rank]):
            for entry, token in wanted(case, region, 0):
                if first <= token < end or (region.kind is ROWS and (end == case.prompt or region.part == "metadata")):
                    put(case, side, rank, index, entry, token)


# --- the plan, carried out ---------------------------------------------------------------------------------


def cut_windows(case: Case, side: Side) -> dict[str, np.ndarray]:
    """A window's own pool has no pages before the window: nobody may ask for them."""
    pages = {pool: array.copy() for pool, array in side.pages.items()}
    windows = [thing.window for thing in case.things if thing.pool == "swa"]
    if "swa" in side.apart and windows:
        pages["swa"][: max(case.prompt - max(windows), 0) // side.page] = -1
    return pages


def carry_out(case: Case, ours: int, theirs: int, spans: np.ndarray, written: dict[int, list[np.ndarray]]) -> None:
    check_spans(spans, case.source.regions[ours], case.target.regions[theirs])
    source, target = case.source.memory[ours], case.target.memory[theirs]
    for index, to, start, end, length in spans.tolist():
        target[to][end : end + length] = source[index][start : start + length]
        written[theirs][to][end : end + length] += 1


def check_packed(case: Case, ours: int, theirs: int, spans: np.ndarray) -> None:
    """The same stream at both sides, span by span."""
    source, target = case.source.memory[ours], case.target.memory[theirs]
    for index, to, start, end, length in spans.tolist():
        assert np.array_equal(source[index][start : start + length], target[to][end : end + length])


def places(spans: np.ndarray) -> list[tuple[int, int]]:
    """(target region, target byte) of each byte of the stream."""
    return [(to, end + byte) for _, to, _, end, length in spans.tolist() for byte in range(length)]


def run_case(number: int) -> None:
    case = make_case(number)
    source, target = case.source, case.target
    fill_source(case)
    expected = replace(target, memory={rank: [m.copy() for m in found] for rank, found in target.memory.items()})
    for rank, _, _, _ in target.ranks():
        for index, region in enumerate(target.regions[rank]):
            if region.part != "metadata" or rank == 0:
                for entry, token in wanted(case, region, case.cuts[0]):
                    put(case, expected, rank, index, entry, token)
    written = {rank: [np.zeros(len(m), np.uint8) for m in found] for rank, found in target.memory.items()}
    cp_of = {rank: cp_rank for rank, cp_rank, _, _ in source.ranks()}
    pairings = pair_instances(source.regions, target.regions, cp_of, source.cp)
    source_pages, target_pages = cut_windows(case, source), cut_windows(case, target)
    for (ours, theirs), pairing in pairings.items():
        slots = [dict(side.slots) for side in (source, target)]
        if (ours, theirs) != (0, 0):
            slots[0].pop("metadata")
        own = cp_range(case.prompt, source.page, cp_of[ours], source.cp) if source.cp > 1 else None
        for first, end in zip(case.cuts[:-1], case.cuts[1:], strict=True):
            chunk = Chunk(first, end, case.prompt, own)
            made = plan(pairing, chunk, Held(source_pages, slots[0]), Held(target_pages, slots[1]))
            assert made.estimate.spans == len(made.spans) and made.size_bytes == made.spans["length"].sum()
            carry_out(case, ours, theirs, made.spans, written)
            check_packed(case, ours, theirs, made.spans)
            if number % 10 == 0:  # other source pages: the same bytes in the same order
                other = {pool: source.pool_items - 1 - pages for pool, pages in source.pages.items()}
                again = plan(pairing, chunk, Held(other, slots[0]), Held(target_pages, slots[1]))
                assert places(again.spans) == places(made.spans)
    for rank, found in target.memory.items():
        for index, (region, memory) in enumerate(zip(target.regions[rank], found, strict=True)):
            assert written[rank][index].max(initial=0) <= 1, f"case {number}: rank {rank} {region} written twice"
            assert np.array_equal(memory, expected.memory[rank][index]), f"case {number}: rank {rank} {region}"
    if number % 10 == 1:
        check_routes(case, set(pairings), cp_of)


def check_routes(case: Case, pairs: set[tuple[int, int]], cp_of: dict[int, int]) -> None:
    """By slices alone the same ranks meet as by regions, and others have nothing for each other but the metadata."""
    ours: dict[int, tuple[Slice, ...]] = {
        rank: slices_in(regions, cp_of[rank], case.source.cp, every=True)
        for rank, regions in case.source.regions.items()
    }
    theirs = {rank: slices_in(regions, every=True) for rank, regions in case.target.regions.items()}
    assert {(rank, to) for rank, found in routes(ours, theirs).items() for to in found} == pairs
    for rank, regions in case.source.regions.items():
        for to, others in case.target.regions.items():
            if (rank, to) not in pairs:
                assert {group.terms.part for group in pair_common(regions, others).groups} <= {"metadata"}


@pytest.mark.parametrize("block", range(BLOCKS))
def test_exactly_the_right_bytes_move_and_none_twice(block: int) -> None:
    """Cases 46, 47: replicated heads, and layers of uneven stages."""
    for number in range(block, CASES, BLOCKS):
        run_case(number)
