"""Staging's pure parts: pieces, rings, what is said."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transfer.blocks import Block, Columns, Runs, Side, spans_of
from kvferry.transfer.contract import Descriptor, Region, RegionKind, TransferError
from kvferry.transfer.copying import slice_copier
from kvferry.transfer.spans import total_bytes
from kvferry.transfer.staging.copies import Memory, host_memory
from kvferry.transfer.staging.pieces import check_fits, cut
from kvferry.transfer.staging.ring import Ring
from kvferry.transfer.staging.under_way import UnderWay
from kvferry.transfer.staging.wire import decode, encode, pack, scatter, unpack, unwrap, wrap
from kvferry.transfer.work import check_work


def block_of(random, pairs, runs):
    numbers = random.integers
    columns = Columns(
        numbers(0, 9, pairs).astype(np.int32), numbers(0, 9, pairs).astype(np.int32),
        numbers(0, 64, pairs), numbers(0, 64, pairs), numbers(200, 300, pairs), numbers(200, 300, pairs),
        numbers(1, 100, pairs), True,
    )  # fmt: skip
    return Block(columns, Runs(numbers(0, 99, runs), numbers(0, 99, runs), numbers(1, 20, runs)))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 40), st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=3))
def test_pieces_in_their_order_are_the_blocks(seed, units, shapes):
    random, most = np.random.default_rng(seed), 64 * units
    blocks = tuple(block_of(random, *shape) for shape in shapes)
    pieces = list(cut(blocks, most))
    assert all(0 < piece.size_bytes <= most for piece in pieces)
    assert [piece.size_bytes for piece in pieces] == [total_bytes(Block(p.columns, p.runs).spans()) for p in pieces]
    again = spans_of([Block(piece.columns, piece.runs) for piece in pieces])
    assert np.array_equal(again, spans_of(blocks))


def test_a_slice_that_fits_no_piece_is_refused_with_both_sizes():
    block = block_of(np.random.default_rng(1), 3, 1)
    block.columns.width[:] = (5, 200, 7)
    block.columns.source_region[:] = (1, 4, 2)
    check_fits((block,), 200)
    with pytest.raises(TransferError, match=r"source region 4 has 200 bytes; a staged piece has at most 192"):
        check_fits((block,), 192)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 9))
def test_rooms_that_are_taken_never_overlap_and_come_back_in_any_order(seed, units):
    random, size = np.random.default_rng(seed), 64 * units
    ring, taken, owner = Ring(size), [], np.zeros(size, dtype=bool)
    for _ in range(60):
        want = 64 * int(random.integers(1, units // 2 + 1))
        room = ring.take(want) if random.random() < 0.6 else None
        if room is not None:
            assert room.offset + want <= size and not owner[room.offset : room.offset + want].any()
            owner[room.offset : room.offset + want] = True
            taken.append((room, want))
        elif taken:
            room, want = taken.pop(int(random.integers(len(taken))))
            owner[room.offset : room.offset + want] = False
            ring.give_back(room)
    for room, _ in taken:
        ring.give_back(room)
    assert ring.taken_bytes == 0
    assert ring.take(units // 2 * 64) is not None  # half of it always fits once all is free


def test_a_room_that_is_withdrawn_has_never_been_taken():
    ring = Ring(256)
    first = ring.take(128)
    ring.withdraw(ring.take(128))
    second = ring.take(64)
    assert (first.offset, second.offset, ring.taken_bytes) == (0, 128, 192)
    assert ring.take(128) is None
    ring.give_back(first)
    wrapped = ring.take(128)
    assert (wrapped.offset, ring.taken_bytes) == (0, 256)  # what it skipped at the end counts too


def test_an_empty_ring_begins_at_its_beginning():
    """Its memory is warm there."""
    ring = Ring(256)
    for size in (128, 64, 192):
        room = ring.take(size)
        assert room.offset == 0
        ring.give_back(room)
    first, second = ring.take(64), ring.take(64)
    ring.give_back(first)
    assert (second.offset, ring.take(128).offset, ring.take(64).offset) == (64, 128, 0)


async def test_what_is_under_way_on_other_threads_is_waited_for():
    under_way = UnderWay(asyncio.get_running_loop())
    await under_way.over()  # there is nothing
    under_way.begin()
    under_way.begin()
    waiting = [asyncio.ensure_future(under_way.over()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[2].cancel()
    await asyncio.to_thread(under_way.end)
    await asyncio.sleep(0.01)
    assert under_way and not waiting[0].done()
    await asyncio.to_thread(under_way.end)
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting[:2])
    assert not under_way


@settings(deadline=None)
@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=9))
def test_numbers_are_read_as_they_were_packed(numbers):
    assert unpack(pack(np.array(numbers)), len(numbers)).tolist() == numbers


def test_a_piece_of_many_layers_and_pages_is_said_in_a_few_hundred_bytes():
    pairs, pages = 64, 16
    region = np.arange(pairs, dtype=np.int32)
    same = np.full(pairs, 512)
    columns = Columns(region, region, same * 0, same, same, same * 4, same, True)
    pages_at = np.random.default_rng(0).permutation(4096)[:pages] * 16
    block = Block(columns, Runs(pages_at, pages_at, np.full(pages, 16)))
    (piece,) = cut((block,), 8 << 20)
    message = encode(scatter(piece, 3, 1, 77, 4096))
    assert len(message) < 200
    said = decode(message[1:])
    assert (said.generation, said.session, said.number, said.offset) == (3, 1, 77, 4096)
    assert (said.size_bytes, said.pairs, said.runs) == (64 * 16 * 16 * 512, pairs, pages)
    assert unpack(said.region, pairs).tolist() == region.tolist()
    assert unpack(said.stride, pairs).tolist() == [2048] * pairs
    assert unpack(said.at, pages).tolist() == pages_at.tolist()


@pytest.mark.parametrize("numbers", [(2**62, 1), (0, 2**61), (-5, -(2**62)), b"abc", b"\0" * 12])
def test_numbers_that_are_none_are_refused(numbers):
    with pytest.raises(TransferError):
        unpack(numbers, 5)


@pytest.mark.parametrize("width", [1, 64, 255, 256, 700, 1024, 3000])
def test_our_own_copies_of_slices_are_those_of_numpy(width):
    """Widths below and above what goes past the caches and what is copied at once, at places that no line begins at;
    whole entries, too.
    """
    random = np.random.default_rng(width)
    areas = [np.frombuffer(random.bytes(40 * stride + 8), np.uint8).copy() for stride in (width + 24, width)]
    regions = [Region(RegionKind.ROWS, "x", -1, area.ctypes.data, len(area), 1) for area in areas]
    columns = {"start": np.array([5, 3]), "stride": np.array([width + 24, width]), "width": np.array([width, width])}
    side = Side(region=np.array([0, 1], np.int32), at=np.array([3, 17, 20]), count=np.array([4, 1, 19]), **columns)
    parts = [area[s + stride * e :][:width] for area, s, stride in zip(areas, (5, 3), columns["stride"], strict=True)
             for e in [3, 4, 5, 6, 17, *range(20, 39)]]  # fmt: skip
    wanted, before = np.concatenate(parts), [area.copy() for area in areas]
    memory = host_memory(regions, 1 << 20)
    assert (slice_copier() is None) == (type(memory) is Memory)
    memory.gather(side, 10, len(wanted))
    assert (
        np.array_equal(memory.staging[10 : 10 + len(wanted)], wanted) and not memory.staging[10 + len(wanted) :].any()
    )
    for part in parts:
        part[:] = 0
    assert not all(np.array_equal(*two) for two in zip(areas, before, strict=True))
    memory.scatter(10, len(wanted), side)
    assert all(np.array_equal(*two) for two in zip(areas, before, strict=True))


def test_a_ring_outside_its_region_is_refused():
    staging = Region(RegionKind.ROWS, "staging", -1, 4096, 1000, 1)
    inner = Descriptor("fake", "a", 1, 0, b"inner", (staging, staging))
    outer = wrap(inner, "fake+staging", 1, 64, 872)
    assert unwrap(outer, "fake")[0] == inner and outer.regions == (staging,)
    with pytest.raises(TransferError, match="a ring of 873 bytes behind byte 64 of 1000"):
        unwrap(wrap(inner, "fake+staging", 1, 64, 873), "fake")
    with pytest.raises(TransferError, match="does not decode"):
        unwrap(inner, "fake")


@pytest.mark.parametrize(
    ("field", "value"),
    [("region", -1), ("region", 2), ("start", -1), ("stride", 0), ("width", 0), ("start", 49), ("stride", 2**62)],
)
def test_blocks_outside_a_region_are_refused_whatever_their_numbers(field, value):
    """A region of 100 bytes; entries 1 to 3 of 15 bytes, whose 7 bytes from byte 48 on end with it."""
    area = Region(RegionKind.PAGES, "k", 0, 4096, 100, 1)

    def block(region=0, start=48, stride=15, width=7):
        column = [np.array([value]) for value in (start, stride, width)]
        first, step, length = column
        index = np.array([0], dtype=np.int32), np.array([region], dtype=np.int32)
        columns = Columns(*index, np.array([0]), first, np.array([15]), step, length, True)
        return Block(columns, Runs(np.array([0]), np.array([1]), np.array([3])))

    check_work((block(),), (area,), (area,))
    with pytest.raises(TransferError, match=r"pair 0: (source|target) region"):
        check_work((block(**{field: value}),), (area,), (area,))
