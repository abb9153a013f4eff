"""Where to post is to copy, over real UCX: large writes are copied by two threads, and every byte gets to its place."""

import asyncio
import threading
import time
from collections import Counter

import numpy as np
import pytest

from kvferry.transfer.contract import Region, RegionKind, TransferError, WriteOutcome
from kvferry.transfer.spans import make_spans
from kvferry.transfer.ucx import UcxEndpoint
from kvferry.transfer.ucx_lane import Lane

PAGES, PAGE_BYTES = 1024, 16 * 1024
BATCH_BYTES = 1 << 20


@pytest.fixture
def posts(monkeypatch):
    """Pieces by the name of the thread that posted them."""
    counted, post = Counter(), Lane.post

    def counting(lane, piece):
        counted[threading.current_thread().name] += 1
        return post(lane, piece)

    monkeypatch.setattr(Lane, "post", counting)
    return counted


def open_endpoint(pool, incarnation, **options):
    region = Region(RegionKind.PAGES, "k", 0, pool.ctypes.data, PAGE_BYTES, PAGES)
    return UcxEndpoint(
        regions=(region,), incarnation=incarnation, on_notify=lambda *_: None, loop=asyncio.get_running_loop(),
        now_s=time.monotonic, host="127.0.0.1", batch_bytes=BATCH_BYTES, **({"transports": "host"} | options),
    )  # fmt: skip


@pytest.fixture
async def pair(request):
    """The source's pages, the target's, the source's endpoint, and the target as its peer."""
    source = np.random.default_rng(1).integers(1, 256, PAGES * PAGE_BYTES, np.uint8)
    target = np.zeros(PAGES * PAGE_BYTES, np.uint8)
    writer, reader = open_endpoint(source, 1, hands=getattr(request, "param", 2)), open_endpoint(target, 2)
    yield source, target, writer, await writer.connect(await reader.accept(1))
    await writer.close()
    await reader.close()


def write(writer, peer, order, part):
    """Pages of `part` go to where `order` has them."""
    ended = asyncio.get_running_loop().create_future()
    at = [np.asarray(pages) * PAGE_BYTES for pages in (part, order[part])]
    handle = writer.write(peer, make_spans(0, 0, *at, [PAGE_BYTES] * len(part)), ended.set_result)
    return handle, ended


@pytest.mark.parametrize(("pair", "threads"), [(2, 2), (1, 1)], indirect=["pair"])
async def test_every_byte_gets_to_its_place(pair, threads, posts):
    source, target, writer, peer = pair
    order = np.random.default_rng(2).permutation(PAGES)
    for _ in range(20):  # the second hand is there once its connection stands
        target[:] = 0
        writes = [write(writer, peer, order, part) for part in np.split(np.arange(PAGES), 8)]
        results = [await ended for _, ended in writes]
        assert [(result.outcome, result.size_bytes) for result in results] == [
            (WriteOutcome.FLUSHED, PAGES * PAGE_BYTES // 8)
        ] * 8
        np.testing.assert_array_equal(
            target.reshape(PAGES, PAGE_BYTES)[order], source.reshape(PAGES, PAGE_BYTES), strict=True
        )
    assert len(posts) == threads


async def test_nothing_is_written_after_the_end_of_a_cancelled_write(pair):
    source, target, writer, peer = pair
    order = np.random.default_rng(3).permutation(PAGES)
    await write(writer, peer, order, np.arange(PAGES))[1]
    for delay_s in np.linspace(0, 0.01, 20):
        target[:] = 0
        handle, ended = write(writer, peer, order, np.arange(PAGES))
        await asyncio.sleep(delay_s)
        writer.cancel(handle)
        result = await ended
        there = target.reshape(PAGES, PAGE_BYTES)[order] == source.reshape(PAGES, PAGE_BYTES)
        assert np.count_nonzero(there.all(axis=1)) * PAGE_BYTES == result.size_bytes
        assert (result.outcome is WriteOutcome.FLUSHED) == (result.size_bytes == PAGES * PAGE_BYTES)


async def test_closing_while_both_copy_ends_every_write(pair):
    _, target, writer, peer = pair
    order = np.random.default_rng(4).permutation(PAGES)
    await write(writer, peer, order, np.arange(PAGES))[1]
    writes = [write(writer, peer, order, np.arange(PAGES)) for _ in range(8)]
    await asyncio.sleep(0.002)
    await writer.close()
    results = [ended.result() for _, ended in writes]
    assert {result.outcome for result in results} <= {WriteOutcome.FLUSHED, WriteOutcome.BROKEN}
    assert results[-1].outcome is WriteOutcome.BROKEN
    target[:] = 0
    await asyncio.sleep(0.05)
    assert not target.any()
    with pytest.raises(TransferError, match="closed"):
        write(writer, peer, order, np.arange(1))


def gathered(writer, peer, gather):
    """The first page, filled by `gather`, goes to the fourth."""
    ended = asyncio.get_running_loop().create_future()
    writer.write_gathered(peer, make_spans(0, 0, 0, 3 * PAGE_BYTES, [PAGE_BYTES]), gather, ended.set_result)
    return ended


async def test_whoever_copies_fills_the_source_first(pair):
    source, target, writer, peer = pair
    threads = []

    def fill():
        threads.append(threading.current_thread())
        source[:PAGE_BYTES] = 77
        return True

    result = await gathered(writer, peer, fill)
    assert (result.outcome, result.size_bytes, result.descriptors) == (WriteOutcome.FLUSHED, PAGE_BYTES, 1)
    assert (target[3 * PAGE_BYTES : 4 * PAGE_BYTES] == 77).all()
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


async def test_what_is_not_filled_is_not_written(pair):
    _, target, writer, peer = pair
    result = await gathered(writer, peer, lambda: False)
    assert (result.outcome, result.size_bytes, result.descriptors) == (WriteOutcome.CANCELLED, 0, None)
    assert not target.any()


async def test_where_a_post_does_not_copy_nothing_can_be_gathered():
    pages = np.zeros(PAGES * PAGE_BYTES, np.uint8)
    writer, reader = open_endpoint(pages, 1, transports="tcp"), open_endpoint(pages, 2, transports="tcp")
    peer = await writer.connect(await reader.accept(1))
    with pytest.raises(TransferError, match="only where a post copies by itself"):
        gathered(writer, peer, lambda: True)
    await writer.close()
    await reader.close()
