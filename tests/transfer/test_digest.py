"""Digests of write lists: equal exactly where the same bytes lie at both sides."""

import asyncio
from functools import partial

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.transfer.contract import SPAN_DTYPE, Region, RegionKind, TransferError, decode_regions, encode_regions
from kvferry.transfer.digest import EMPTY, ThreadDigests, digest_of
from kvferry.transfer.flip import byte_at, flipping
from kvferry.transfer.plan import pair, plan_pages, plan_row
from kvferry.transfer.spans import no_spans, split, total_bytes

SOURCE_PAGES, TARGET_PAGES = [3, 4, 5, 11, 2], [7, 8, 20, 21, 0]


def plan(source, target):
    """Some pages, merged where they can be, and a row behind them."""
    pairing = pair(source.regions, target.regions)
    return np.concatenate([plan_pages(pairing, SOURCE_PAGES, TARGET_PAGES), plan_row(pairing, "metadata", 1, 3)])


def by_hand(memory, pages, row):
    """The bytes in the order of the write: region by region, in each page by page; then the row."""
    parts = [memory.pages(index)[page].tobytes() for index in range(len(memory.arrays) - 1) for page in pages]
    return b"".join(parts) + memory.pages(len(memory.arrays) - 1)[row].tobytes()


def test_the_digest_is_xxh3_of_the_bytes_in_the_order_of_the_list(tools):
    source, target = tools.Memory(1), tools.Memory(2)
    spans = plan(source, target)
    assert digest_of(spans, source.regions, "source") == xxhash.xxh3_64_intdigest(by_hand(source, SOURCE_PAGES, 1))
    assert digest_of(spans, target.regions, "target") == xxhash.xxh3_64_intdigest(by_hand(target, TARGET_PAGES, 3))
    # The reference value of XXH3-64 without seed for no input (xxHash, XXH3_64bits of length 0).
    assert digest_of(no_spans(), source.regions, "source") == EMPTY == 0x2D06800538D394C2


@settings(deadline=None)
@given(limit=st.integers(1, 30_000))
def test_how_spans_are_cut_changes_nothing(limit):
    spans = np.zeros(3, dtype=SPAN_DTYPE)
    data = np.random.default_rng(4).integers(0, 256, 20_000, dtype=np.uint8)
    spans["source_offset"], spans["length"] = [5000, 0, 19_000], [9000, 4096, 1000]
    region = region_of(data)
    assert digest_of(np.concatenate(split(spans, limit)), region, "source") == digest_of(spans, region, "source")


def region_of(data):
    return (Region(RegionKind.PAGES, "k", 0, data.ctypes.data, len(data), 1),)


async def test_digests_are_taken_on_a_thread_in_order(tools):
    source = tools.Memory(1)
    spans = plan(source, source)
    digests = ThreadDigests(source.regions)
    wanted = [digest_of(spans[:count], source.regions, "source") for count in range(len(spans))]
    asked = [digests.of(spans[:count], "source") for count in range(len(spans))]
    assert await asyncio.gather(*asked) == wanted
    await digests.close()
    with pytest.raises(RuntimeError):
        await digests.of(spans, "source")


async def written(make_site, tools, kind):
    """A write that has landed: both memories, the spans, and a function that changes one byte at the target by another
    real write.
    """
    source, target = await make_site(kind, 1, tools.Memory(7)), await make_site(kind, 2, tools.Memory())
    peer = await source.endpoint.connect(await target.endpoint.accept(1))
    spans = plan(source.memory, target.memory)

    write = partial(tools.landed, source, target, peer)
    await write(spans)

    async def flip(at):
        change = flipping(spans, source.memory.regions, at)
        await write(change)

    return source.memory, target.memory, spans, flip


@pytest.mark.parametrize("kind", ["fake", "ucx-host", "ucx-tcp"])
async def test_a_byte_that_changes_at_the_target_changes_the_digest(make_site, tools, kind):
    """At every kind of place: the first and last byte of every span, every byte of the row, and places in between; each
    changed by a real write of the backend.
    """
    source, target, spans, flip = await written(make_site, tools, kind)
    wanted = digest_of(spans, source.regions, "source")
    assert digest_of(spans, target.regions, "target") == wanted
    ends = np.cumsum(spans["length"])
    size = total_bytes(spans)
    places = {0, *(ends[:-1] - 1).tolist(), *ends[:-1].tolist(), *range(size - 64, size)}
    places |= set(np.random.default_rng(3).integers(0, size, 40).tolist())
    before = [array.copy() for array in target.arrays]
    for at in sorted(places):
        await flip(at)
        assert digest_of(spans, target.regions, "target") != wanted, at
        changed = [int((now != was).sum()) for now, was in zip(target.arrays, before, strict=True)]
        assert sum(changed) == 1, "one byte and no other"
        for now, was in zip(target.arrays, before, strict=True):
            now[:] = was
    assert digest_of(spans, target.regions, "target") == wanted


def test_every_single_byte_counts(tools):
    """All bytes of a page and a row, one after the other."""
    memory = tools.Memory(5, pages=4, page_bytes=512)
    spans = plan_row(pair(memory.regions, memory.regions), "metadata", 1, 2)
    spans = np.concatenate([plan_pages(pair(memory.regions, memory.regions), [2], [3])[:1], spans])
    wanted, page, row = digest_of(spans, memory.regions, "target"), memory.pages(0)[3], memory.pages(6)[2]
    for place in (page, row):
        for at in range(len(place)):
            for bit in (1, 128):
                place[at] ^= bit
                assert digest_of(spans, memory.regions, "target") != wanted
                place[at] ^= bit
    assert digest_of(spans, memory.regions, "target") == wanted


def test_bytes_of_a_list_are_found_by_their_number(tools):
    memory = tools.Memory(1)
    spans = plan(memory, memory)
    lengths = spans["length"].tolist()
    assert byte_at(spans, 0) == (0, 0) and byte_at(spans, lengths[0]) == (1, 0)
    assert byte_at(spans, sum(lengths) - 1) == (len(spans) - 1, lengths[-1] - 1)
    for wrong in (-1, sum(lengths)):
        with pytest.raises(IndexError, match=f"byte {wrong} of a write of {sum(lengths)} bytes"):
            byte_at(spans, wrong)


def test_where_all_bytes_are_equal_none_can_be_changed(tools):
    memory = tools.Memory()
    assert flipping(plan(memory, memory), memory.regions, 5) is None


def test_regions_round_trip_and_garbage(tools):
    regions = tools.Memory(1).regions
    assert decode_regions(encode_regions(regions)) == regions
    for data in (b"", b"\xc1", b"\x91\x01"):
        with pytest.raises(TransferError, match="not a list of regions"):
            decode_regions(data)
    with pytest.raises(TransferError, match="region 0 of a source"):
        decode_regions(encode_regions((replace(regions[0], items=2**62),)))
