"""What the ranks of one instance plan to write for a prompt, against a dense array: any page sizes, any slicing.

Each source rank is asked chunk by chunk as its leader would ask it, and its blocks are carried out as byte copies.
What must lie where is known from how the pools are made: token t in page t // size, a rank's heads of its layers.
"""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.actors.decode.checks import OwnDigests
from kvferry.actors.prefill.sending import RankWrite, Sending, WritePlanner
from kvferry.engine.contract import EngineLimits, StepPlan
from kvferry.engine.scripted import ScriptedEngine
from kvferry.protocol.metadata import ROW_BYTES, Introduction, Metadata
from kvferry.protocol.rank import LEADER, Layout, slice_of
from kvferry.transfer.contract import Descriptor, Region, TransferError, encode_regions
from kvferry.transfer.digest import digest_of
from kvferry.transfer.plan import Chunk
from kvferry.transfer.ranks import routes
from kvferry.transfer.work import Work, spans_in

LAYERS, HEADS, WORDS = 3, 4, 2  # words of a head and token: `head_dim` in float32
OWNER = 99


class Sync:
    """`Digests`, without a thread."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self._regions = regions

    async def of(self, work: Work, side: str) -> int:
        return digest_of(spans_in(work), self._regions, side)

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Peer:
    descriptor: Descriptor


class Instance:
    """The ranks of one side: `tp` slices of the heads, `pp` of the layers."""

    def __init__(self, page_size: int, pages: int, tp: int, pp: int, first: int) -> None:
        layout = Layout("scripted", "1", "float32", page_size, layers=LAYERS, kv_heads=HEADS, head_dim=WORDS)
        limits = EngineLimits(pages, page_size, 4096, vocab_size=100)
        self.parts = {
            stage * tp + rank: slice_of(layout, rank, tp, stage, pp) for stage in range(pp) for rank in range(tp)
        }
        self.engines = {
            rank: ScriptedEngine(layout, limits, metadata_rows=4, sleep=asyncio.sleep, cost_s=_nothing, part=part)
            for rank, part in self.parts.items()
        }
        self.descriptors = {
            rank: Descriptor("test", f"rank-{rank}", first + rank, 0, b"", engine.regions())
            for rank, engine in self.engines.items()
        }
        self.page_size = page_size

    def put(self, dense: NDArray[np.uint32], pages: list[int]) -> None:
        """Every rank gets its part of dense [layers, parts, tokens, heads, words]."""
        tokens = np.arange(dense.shape[2])
        where = np.array(pages)[tokens // self.page_size], tokens % self.page_size
        for rank, engine in self.engines.items():
            engine._pool[:, :, where[0], where[1]] = self.part_of(rank, dense)

    def part_of(self, rank: int, dense: NDArray[np.uint32]) -> NDArray[np.uint32]:
        part = self.parts[rank]
        layers = slice(part.first_layer, part.first_layer + part.layers)
        mine = dense[layers, :, :, part.first_head : part.first_head + part.heads]
        return mine.reshape(*mine.shape[:3], -1)


def _nothing(_: StepPlan) -> float:
    return 0.0


def carry_out(write: RankWrite, source: tuple[Region, ...], target: tuple[Region, ...]) -> None:
    for span in spans_in(write.blocks):
        there, here = target[span["target_region"]], source[span["source_region"]]
        ctypes.memmove(there.base + int(span["target_offset"]), here.base + int(span["source_offset"]), span["length"])


@dataclass(frozen=True)
class Case:
    source_size: int
    target_size: int
    tokens: int
    chunk_pages: int  # of the source, in a chunk
    source: tuple[int, int]  # tp, pp
    target: tuple[int, int]
    seed: int = 0


SLICES = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
CASES = st.builds(
    Case, st.integers(1, 40), st.integers(1, 40), st.integers(1, 130), st.integers(1, 4), SLICES, SLICES,
    st.integers(0, 2**32 - 1),
)  # fmt: skip


def page_lists(case: Case, random: np.random.Generator) -> tuple[list[int], list[int], int]:
    """Of both sides, some of them neighbours; and the pages of either pool."""
    wanted = max(-(-case.tokens // size) for size in (case.source_size, case.target_size))
    pool = wanted + 3
    return (
        [int(p) for p in np.roll(np.arange(pool), random.integers(pool))[: -(-case.tokens // case.source_size)]],
        [int(p) for p in random.permutation(pool)[: -(-case.tokens // case.target_size)]],
        pool,
    )


@settings(deadline=None, max_examples=60)
@given(CASES)
@example(Case(16, 64, 100, 2, (1, 1), (1, 1)))
@example(Case(64, 16, 100, 1, (4, 1), (2, 1)))
@example(Case(16, 24, 100, 1, (2, 1), (4, 2)))
@example(Case(24, 16, 3, 1, (1, 2), (8, 1)))
def test_each_token_arrives_once_at_each_rank_and_nothing_else_is_touched(case: Case) -> None:
    """And decode's own digest of each write, by its own pages, is that of what was written."""
    random = np.random.default_rng(case.seed)
    source_pages, target_pages, pool = page_lists(case, random)
    ours = Instance(case.source_size, pool, *case.source, first=1)
    theirs = Instance(case.target_size, pool, *case.target, first=OWNER)
    dense = random.integers(0, 2**32, (LAYERS, 2, case.tokens, HEADS, WORDS), dtype=np.uint32)
    for engine in (*ours.engines.values(), *theirs.engines.values()):
        engine._pool[:] = random.integers(0, 2**32, engine._pool.shape, dtype=np.uint32)
    ours.put(dense, source_pages)
    wanted = {rank: engine._pool.copy() for rank, engine in theirs.engines.items()}
    tokens = np.arange(case.tokens)
    where = np.array(target_pages)[tokens // case.target_size], tokens % case.target_size
    for rank, pool_there in wanted.items():
        pool_there[:, :, where[0], where[1]] = theirs.part_of(rank, dense)
    asyncio.run(_written(case, ours, theirs, source_pages, target_pages))
    for rank, pool_there in wanted.items():
        assert np.array_equal(theirs.engines[rank]._pool, pool_there), f"target rank {rank}"


async def _written(case: Case, ours: Instance, theirs: Instance, source: list[int], target: list[int]) -> None:
    ways = routes({r: (p,) for r, p in ours.parts.items()}, {r: (p,) for r, p in theirs.parts.items()})
    checks = {rank: OwnDigests(engine, Sync(engine.regions())) for rank, engine in theirs.engines.items()}
    sendings = {}
    for rank, to in ways.items():
        planner = WritePlanner(ours.engines[rank])
        targets = {there: theirs.descriptors[there] for there in to}
        planner.check(OWNER, targets, case.tokens, target, 2 if rank == LEADER else None)
        sending = Sending(7, OWNER, targets={there: Peer(descriptor) for there, descriptor in targets.items()})
        sendings[rank] = planner, sending
        for there in to:
            regions = encode_regions(ours.engines[rank].regions())
            checks[there].introduced(Introduction(ours.descriptors[rank].incarnation, regions))
    kv_bytes = 0
    step = case.chunk_pages * case.source_size
    for first in range(0, case.tokens, step):
        chunk = Chunk(first, min(first + step, case.tokens), case.tokens)
        for rank, (planner, sending) in sendings.items():
            rows = (1, 2) if rank == LEADER else None
            if rank == LEADER and chunk.last:
                planner.write_row(1, Metadata(7, 1, case.tokens, 5, 0))
            for write in planner.writes(sending, chunk, source[chunk.pages_in(case.source_size)], target, rows):
                carry_out(write, ours.engines[rank].regions(), theirs.engines[write.target].regions())
                kv_bytes += write.kv_bytes
                has_row = chunk.last and (rank, write.target) == (LEADER, LEADER)
                assert write.metadata_bytes == ROW_BYTES * has_row
                taken = digest_of(spans_in(write.blocks), ours.engines[rank].regions(), "source")
                here = target[chunk.pages_in(case.target_size)]
                found = await checks[write.target].take(
                    ours.descriptors[rank].incarnation, chunk, here, 2 if has_row else None
                )
                assert found == taken
    copies = max(1, case.target[0] // HEADS)
    assert kv_bytes == case.tokens * LAYERS * 2 * HEADS * WORDS * 4 * copies
    assert Metadata.unpack(theirs.engines[LEADER].metadata_row(2)).prompt_tokens == case.tokens


def planner_of(source_size: int, target_size: int) -> tuple[WritePlanner, dict[int, Descriptor], Sending]:
    ours, theirs = Instance(source_size, 64, 1, 1, 1), Instance(target_size, 64, 1, 1, OWNER)
    planner = WritePlanner(ours.engines[LEADER])
    return planner, theirs.descriptors, Sending(7, OWNER, targets={LEADER: Peer(theirs.descriptors[LEADER])})


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        (range(6), "tokens 0 to 100 lie in 7 target pages of 16 tokens; 6 are named"),
        (range(8), "tokens 0 to 100 lie in 7 target pages of 16 tokens; 8 are named"),
        ((), "tokens 0 to 100 lie in 7 target pages of 16 tokens; 0 are named"),
        ((0, 1, 2, 3, 4, 5, 64), "target page 64 is outside 0 .. 63"),
        ((0, 1, 2, 3, 4, 5, 3), "a target page is named twice"),
    ],
)
def test_page_lists_that_do_not_fit_the_prompt_are_refused(pages: Any, words: str) -> None:
    """The prompt has 100 tokens, in pages of 64 here and of 16 there: what fits our own pages doesn't fit theirs."""
    planner, targets, _ = planner_of(64, 16)
    with pytest.raises(TransferError, match=words):
        planner.check(OWNER, targets, 100, pages, 0, alone=True)
    planner.check(OWNER, targets, 100, range(7), 0, alone=True)


def test_a_chunk_with_other_pages_than_its_tokens_need_is_refused() -> None:
    planner, targets, sending = planner_of(16, 64)
    planner.check(OWNER, targets, 100, (3, 1), 0, alone=True)
    chunk = Chunk(32, 64, 100)
    assert [write.kv_bytes for write in planner.writes(sending, chunk, (5, 6), (3, 1))] == [32 * 3 * 2 * 4 * 2 * 4]
    for pages in ((5,), (5, 6, 7)):
        text = f"tokens 32 to 64 lie in 2 source pages of 16 tokens; {len(pages)} are named"
        with pytest.raises(TransferError, match=text):
            planner.writes(sending, chunk, pages, (3, 1))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_target_with_scales_of_pages_that_have_none_here_is_refused(tp: int) -> None:
    """Whenever it is asked, and whether it is a leader that asks or a follower, which writes no metadata."""
    ours, theirs = Instance(16, 8, tp, 1, 1), Instance(16, 8, tp, 1, OWNER)
    for rank, engine in ours.engines.items():
        regions = theirs.descriptors[rank].regions
        scale = msgspec.structs.replace(regions[0], part="k_scale", base=1 << 40)
        target = msgspec.structs.replace(theirs.descriptors[rank], regions=(*regions, scale))
        planner, slot = WritePlanner(engine), 0 if rank == LEADER else None
        for _ in range(2):
            with pytest.raises(TransferError, match=r"source lacks pages of k_scale of layer 0"):
                planner.check(OWNER, {rank: target}, 16, (3,), slot, alone=tp == 1)
        planner.check(OWNER, {rank: theirs.descriptors[rank]}, 16, (3,), slot, alone=tp == 1)


def test_slices_stay_slices() -> None:
    """What the endpoint is given are the plan's blocks: it can stage what is sliced. Whole entries are not."""
    for tp, sliced in ((1, False), (2, True)):
        ours, theirs = Instance(16, 8, tp, 1, 1), Instance(64, 4, 1, 1, OWNER)
        planner = WritePlanner(ours.engines[LEADER])
        planner.check(OWNER, theirs.descriptors, 100, (1, 0), 0)
        sending = Sending(7, OWNER, targets={LEADER: Peer(theirs.descriptors[LEADER])})
        (write,) = planner.writes(sending, Chunk(0, 32, 100), (3, 4), (1, 0))
        assert [block.sliced for block in write.blocks] == [sliced]
        assert write.kv_bytes == sum(block.size_bytes for block in write.blocks) == 32 * 3 * 2 * 4 * 2 * 4 // tp
