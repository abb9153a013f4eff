"""Staging end to end: slices of every token arrive where they belong, and what an abort, a death or a revocation in
between does to them.
"""

import asyncio
import threading
import time

import msgspec
import numpy as np
import pytest

from kvferry.protocol.offer import NOTHING_SAID, Offer
from kvferry.transfer.contract import TransferError, WriteOutcome, decode_descriptor, encode_descriptor
from kvferry.transfer.cost import Costs
from kvferry.transfer.fake import HOST, TCP, FakeFabric
from kvferry.transfer.page_plan import page_blocks
from kvferry.transfer.pairing import pair_common
from kvferry.transfer.spans import make_spans
from kvferry.transfer.staging.endpoint import NO_STAGING, StagingSizes, sizes_for
from kvferry.transfer.staging.wire import Scatter, encode

LAYERS, PAGES, TOKENS, HEAD_BYTES = 2, 40, 4, 32  # of `tools.Heads`
SOURCE, TARGET = 0x51, 0x52
STAGED = StagingSizes(piece_bytes=4096, slots=3, ring_bytes=16 * 1024, rings=2)
LAYOUTS = {"4 to 1": ((2, 2), (0, 8)), "1 to 4": ((0, 8), (6, 2))}


class Pair:
    """A source and a target, connected."""

    def __init__(self, source, target, peer):
        self.source, self.target, self.peer = source, target, peer
        self.pairing = pair_common(source.memory.regions, target.memory.regions)

    def blocks(self, of, pages):
        return page_blocks(self.pairing, of, pages)

    def write(self, of, pages, on_end):
        return self.source.endpoint.write(self.peer, self.blocks(of, pages), on_end)

    def right(self, of, pages):
        memory = self.target.memory
        return all(
            np.array_equal(memory.arrays[i], memory.from_heads(i, self.source.memory, pages, of))
            for i in range(2 * LAYERS)
        )


async def connected(source, target):
    target.endpoint.expect(+1)
    return Pair(source, target, await source.endpoint.connect(await target.endpoint.accept(SOURCE)))


@pytest.fixture(params=["staging-fake", "staging-ucx-host", "staging-ucx-tcp"])
async def any_pair(request, make_site, tools):
    async def make(layout, **options):
        here, there = LAYOUTS[layout]
        source = await make_site(request.param, SOURCE, tools.Heads(*here, seed=1), **options)
        return await connected(source, await make_site(request.param, TARGET, tools.Heads(*there), **options))

    return make


@pytest.fixture
async def pair_on(tools, no_survivors):
    """pair_on(proofs, ...): on a fabric of its own, whose target takes part (TCP) or does not."""
    sites = []

    async def make(proofs=TCP, layout="4 to 1", **options):
        loop = asyncio.get_running_loop()
        fabric = FakeFabric(loop=loop, sleep=asyncio.sleep, now_s=time.monotonic, proofs=proofs, late_s=0.02)
        here, there = LAYOUTS[layout]
        for incarnation, memory in ((SOURCE, tools.Heads(*here, seed=1)), (TARGET, tools.Heads(*there))):
            sites.append(await tools.open_staging("fake", fabric, incarnation, memory, **options))
        found = await connected(*sites[-2:])
        found.fabric = fabric
        return found

    yield make
    for site in sites:
        await site.endpoint.close()


def shuffled(seed=3):
    random = np.random.default_rng(seed)
    return random.permutation(PAGES), random.permutation(PAGES)


def slices_bytes(pages, heads=2):
    return pages * 2 * LAYERS * TOKENS * heads * HEAD_BYTES


class Gate:
    """Holds the target's copies until it is opened; `waiting` counts those that have come to it."""

    def __init__(self, site):
        self.memory, self.open, self.waiting = site.endpoint._rings._memory, threading.Event(), 0
        self.scatter, self.memory.scatter = self.memory.scatter, self.held

    def held(self, *args):
        self.waiting += 1
        assert self.open.wait(60)
        self.scatter(*args)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_slice_lies_there_when_the_write_ends(any_pair, layout, tools):
    """40 KiB in pieces of at most 4 KiB; the notification comes behind all of them."""
    pair = await any_pair(layout)
    of, pages = shuffled()
    seen, outcome = [], tools.Outcome()
    pair.target.on_note = lambda: seen.append(pair.right(of, pages))
    handle = pair.write(of, pages, outcome)
    result = await outcome
    assert (result.outcome, result.size_bytes) == (
        WriteOutcome.FLUSHED,
        slices_bytes(PAGES),
    ) and handle.result is result
    assert pair.right(of, pages)
    assert result.descriptors == 12 and result.wait_s >= 0 and result.wire_s > 0  # one of each piece
    pair.source.endpoint.notify(pair.peer, b"all of it")
    await tools.soon(lambda: seen)
    assert seen == [True] and [payload for _, payload in pair.target.notes] == [b"all of it"]
    counts = pair.source.endpoint.counts
    assert counts["staged bytes"] == slices_bytes(PAGES) and counts["pieces staged"] == 12


async def test_staged_and_straight_writes_end_in_order(any_pair, tools):
    pair = await any_pair("4 to 1")
    of, pages = shuffled()
    ended, expected = [], []
    for number in range(12):
        part = slice(3 * number, 3 * number + 3)

        def end(result, number=number):
            ended.append((number, result.outcome))

        if number % 3:
            pair.write(of[part], pages[part], end)
        else:
            spans = np.concatenate([block.spans() for block in pair.blocks(of[part], pages[part])])
            pair.source.endpoint.write(pair.peer, spans, end)
        expected.append((number, WriteOutcome.FLUSHED))
    await tools.soon(lambda: len(ended) == 12)
    assert ended == expected and pair.right(of[:36], pages[:36])
    assert pair.source.endpoint.counts["staged bytes"] == slices_bytes(24)


async def test_what_does_not_pay_goes_straight(any_pair, tools):
    pair = await any_pair("1 to 4", costs=Costs(span_us=0.0))
    of, pages = shuffled()
    outcome = tools.Outcome()
    pair.write(of, pages, outcome)
    result = await outcome
    assert result.size_bytes == slices_bytes(PAGES) and pair.right(of, pages)
    assert not pair.source.endpoint.counts
    # A slice of every token, head by head where the other side has them beside others: 40 pages of 4 tokens, 4 regions.
    assert result.descriptors == 640 and result.wait_s >= 0 and result.wire_s > 0


async def test_what_was_never_posted_took_no_time(any_pair, tools):
    pair = await any_pair("4 to 1")
    of, pages = shuffled()
    outcomes = [tools.Outcome() for _ in range(2)]
    handles = [pair.write(of, pages, outcome) for outcome in outcomes]
    for handle in reversed(handles):
        pair.source.endpoint.cancel(handle)
    for outcome in outcomes:
        result = await outcome
        assert (result.outcome, result.size_bytes) == (WriteOutcome.CANCELLED, 0)
        assert (result.wait_s, result.wire_s, result.descriptors) == (None, None, None)


async def test_a_cancelled_write_ends_when_nothing_of_it_can_come_any_more(any_pair, tools):
    pair = await any_pair("4 to 1")
    of, pages = shuffled()
    gate = Gate(pair.target)
    first, second = tools.Outcome(), tools.Outcome()
    handle, behind = pair.write(of, pages, first), pair.write(of, pages, second)
    await tools.soon(lambda: gate.waiting)
    pair.source.endpoint.cancel(handle)
    pair.source.endpoint.cancel(behind)
    assert (await second).outcome is WriteOutcome.CANCELLED  # nothing of it was begun
    await asyncio.sleep(0.05)
    assert not first.future.done()  # a piece is being scattered
    gate.open.set()
    result = await first
    assert result.outcome is WriteOutcome.CANCELLED and 0 < result.size_bytes < slices_bytes(PAGES)
    landed = sum(int((array != 0).any(axis=-1).sum()) * HEAD_BYTES for array in pair.target.memory.arrays)
    assert landed == result.size_bytes
    for array in pair.target.memory.arrays:
        array[:] = 0
    again = tools.Outcome()
    pair.write(of, pages, again)
    assert (await again).outcome is WriteOutcome.FLUSHED and pair.right(of, pages)


@pytest.mark.parametrize("slots", [6, 1])
async def test_a_piece_that_waits_for_room_keeps_its_place_and_is_counted_once(any_pair, slots, tools):
    """The ring takes 6 of the 10 KiB that a region has; the next one waits until the first has been scattered. With one
    slot, too, which each piece asks for again.
    """
    pair = await any_pair("4 to 1", sizes=StagingSizes(16 * 1024, slots, 64 * 1024, 1))
    gate = Gate(pair.target)
    of, pages = shuffled()
    ended = []
    for number in range(3):
        pair.write(of, pages, lambda result, number=number: ended.append((number, result.outcome)))
    counts = pair.source.endpoint.counts
    await tools.soon(lambda: counts["pieces that waited for room"] and gate.waiting)
    await asyncio.sleep(0.05)
    assert counts["pieces that waited for room"] == 1 and gate.waiting == 1 and not ended
    gate.open.set()
    await tools.soon(lambda: len(ended) == 3)
    assert ended == [(number, WriteOutcome.FLUSHED) for number in range(3)] and pair.right(of, pages)
    assert counts["pieces that waited for room"] <= counts["pieces staged"] == gate.waiting


async def test_a_slice_that_fits_no_piece_fails_with_the_sizes(any_pair, tools):
    pair = await any_pair("4 to 1", sizes=StagingSizes(64, 2, 128, 1))
    outcome = tools.Outcome()
    pair.write(*shuffled(), outcome)  # 64 bytes an entry: just
    assert (await outcome).outcome is WriteOutcome.FLUSHED
    wide = tools.Heads(0, 4, seed=1)
    pair.source.endpoint._regions = wide.regions
    pairing = pair_common(wide.regions, pair.target.memory.regions)
    with pytest.raises(TransferError, match="has 128 bytes; a staged piece has at most 64"):
        pair.source.endpoint.write(pair.peer, page_blocks(pairing, [0], [0]), lambda result: pytest.fail("it ended"))


async def test_disconnect_breaks_what_is_unfinished_and_a_new_connection_is_whole(any_pair, tools):
    pair = await any_pair("4 to 1")
    of, pages = shuffled()
    gate, outcome = Gate(pair.target), tools.Outcome()
    pair.write(of, pages, outcome)
    await tools.soon(lambda: gate.waiting)
    await pair.source.endpoint.disconnect(pair.peer)
    assert (await outcome).outcome is WriteOutcome.BROKEN
    gate.open.set()
    again, late = tools.Outcome(), tools.Outcome()
    pair.write(of, pages, late)
    assert (await late).outcome is WriteOutcome.BROKEN
    pair.peer = await reconnected(pair)
    pair.write(of, pages, again)
    assert (await again).outcome is WriteOutcome.FLUSHED and pair.right(of, pages)


async def test_a_piece_that_can_not_be_gathered_breaks_the_write_and_the_ring_is_as_good_as_before(
    any_pair, tools, monkeypatch
):
    pair = await any_pair("4 to 1")
    of, pages = shuffled()
    memory = pair.source.endpoint._sender._memory
    real, failed, outcome, other = memory.gather, [], tools.Outcome(), tools.Outcome()

    def gather(*piece):
        failed.append(piece)
        if len(failed) == 2:
            raise MemoryError("none left")
        real(*piece)

    monkeypatch.setattr(memory, "gather", gather)
    pair.write(of, pages, outcome)
    result = await outcome
    assert result.outcome is WriteOutcome.BROKEN and "was not gathered: MemoryError: none left" in result.error
    before = pair.source.endpoint.counts["staged bytes"]
    pair.peer = await reconnected(pair)
    pair.write(of, pages, other)
    assert (await other).outcome is WriteOutcome.FLUSHED and pair.right(of, pages)
    assert pair.source.endpoint.counts["staged bytes"] - before == slices_bytes(len(pages))


async def reconnected(pair):
    """On one host the agent that was disconnected takes some turns to end."""
    while True:
        try:
            return await pair.source.endpoint.connect(await pair.target.endpoint.accept(SOURCE))
        except TransferError as error:
            assert "its last writes have not ended" in str(error)
            await asyncio.sleep(0.01)


async def test_a_target_that_closes_while_its_word_is_awaited_breaks_the_write(any_pair, tools):
    """Everything is in the ring, and nothing is posted any more that could fail: the path is tried."""
    pair = await any_pair("4 to 1", sizes=StagingSizes(16 * 1024, 3, 256 * 1024, 1))
    outcome = tools.Outcome()
    pair.target.endpoint._rings.scatter = lambda agent, message: None  # a target that stands still
    pair.write(*shuffled(), outcome)
    await asyncio.sleep(0.3)
    assert not outcome.future.done()
    await pair.target.endpoint.close()
    result = await outcome
    assert result.outcome is WriteOutcome.BROKEN and result.error


async def test_a_target_that_dies_while_its_word_is_awaited_breaks_the_write(pair_on, tools):
    pair = await pair_on()
    outcome = tools.Outcome()
    pair.target.endpoint._rings.scatter = lambda agent, message: None
    pair.write(*shuffled(), outcome)
    await asyncio.sleep(0.05)
    pair.fabric.kill(TARGET)
    assert (await outcome).outcome is WriteOutcome.BROKEN
    assert not any(array.any() for array in pair.target.memory.arrays)


async def test_revoke_waits_for_the_copy_under_way_and_nothing_is_scattered_after_it(any_pair, tools):
    pair = await any_pair("4 to 1")
    gate, outcome = Gate(pair.target), tools.Outcome()
    pair.write(*shuffled(), outcome)
    await tools.soon(lambda: gate.waiting)
    revoked = asyncio.ensure_future(pair.target.endpoint.revoke(SOURCE))
    await asyncio.sleep(0.05)
    assert not revoked.done()
    gate.open.set()
    proof = await revoked
    assert (proof is not None) == pair.peer.descriptor.proofs.revoked
    after = [array.copy() for array in pair.target.memory.arrays]
    assert (await outcome).outcome is WriteOutcome.BROKEN
    await asyncio.sleep(0.1)
    assert gate.waiting == 1
    assert all(np.array_equal(*two) for two in zip(after, pair.target.memory.arrays, strict=True))


async def test_a_late_announcement_after_revoke_is_dropped_and_counted(pair_on, tools):
    """It was on its way when its writer was shut out, and the pages are somebody else's by now."""
    pair = await pair_on()
    held, hear = [], pair.target.inner.on_notify
    pair.target.inner.on_notify = lambda agent, payload: (
        held.append((agent, payload)) if payload[:2] == encode_tag() else hear(agent, payload)
    )
    outcome = tools.Outcome()
    pair.write(*shuffled(), outcome)
    await tools.soon(lambda: held)
    assert await pair.target.endpoint.revoke(SOURCE) is not None
    for agent, payload in held:
        hear(agent, payload)
    assert pair.target.endpoint.counts["late or stray notifications of staging"] == len(held)
    assert (await outcome).outcome is WriteOutcome.BROKEN
    again = await pair.target.endpoint.accept(SOURCE)
    for agent, payload in held:
        hear(agent, payload)
    assert again.generation > pair.peer.descriptor.generation
    await asyncio.sleep(0.05)
    assert not any(array.any() for array in pair.target.memory.arrays)


def encode_tag():
    """How an announcement begins."""
    return encode(Scatter(0, 0, 0, 0, 1, 1, 1, b"", b"", b"", b"", b"", b""))[:2]


async def test_rings_go_to_the_next_writer_only_when_nothing_can_land_in_them(pair_on, tools):
    sizes = StagingSizes(16 * 1024, 2, 64 * 1024, 1)
    of, pages = shuffled()

    async def written(pair):
        outcome = tools.Outcome()
        pair.write(of, pages, outcome)
        assert (await outcome).outcome is WriteOutcome.FLUSHED and pair.right(of, pages)

    pair = await pair_on(sizes=sizes)
    assert pair.target.endpoint.rings == (1, 0), "who has staged nothing has none"
    await written(pair)
    assert pair.target.endpoint.rings == (0, 0)
    await pair.target.endpoint.revoke(SOURCE)
    assert pair.target.endpoint.rings == (1, 0)
    pair = await pair_on(HOST, sizes=sizes)
    await written(pair)
    staged = pair.source.endpoint.counts["pieces staged"]
    await pair.target.endpoint.revoke(SOURCE)
    assert pair.target.endpoint.rings == (0, 1)
    # There is none for this one: its slices go straight, and arrive.
    pair.peer = await pair.source.endpoint.connect(await pair.target.endpoint.accept(SOURCE))
    for array in pair.target.memory.arrays:
        array[:] = 0
    await written(pair)
    await written(pair)
    assert pair.source.endpoint.counts["pieces staged"] == staged
    assert pair.target.endpoint.counts["writers without a ring"] == 1
    await pair.target.endpoint.revoke(SOURCE)
    pair.target.endpoint.writer_exited(SOURCE)
    assert pair.target.endpoint.rings == (1, 0)


async def test_writes_that_wait_for_a_ring_which_does_not_come_go_straight_in_order(pair_on, tools):
    """Also what is cancelled meanwhile ends, and what follows."""
    pair = await pair_on(sizes=StagingSizes(16 * 1024, 2, 64 * 1024, 1))
    pair.target.endpoint._rings._free.clear()
    of, pages = shuffled()
    order, outcomes = [], [tools.Outcome() for _ in range(3)]
    handles = [pair.write(of, pages, lambda result, n=n: (order.append(n), outcomes[n](result))[1]) for n in range(3)]
    pair.source.endpoint.cancel(handles[1])
    results = [await outcome for outcome in outcomes]
    assert [result.outcome for result in results] == [
        WriteOutcome.FLUSHED, WriteOutcome.CANCELLED, WriteOutcome.FLUSHED
    ]  # fmt: skip
    assert order.index(0) < order.index(2) and pair.right(of, pages)
    size = sum(block.size_bytes for block in pair.blocks(of, pages))
    assert [result.size_bytes for result in results] == [size, 0, size]
    assert pair.source.endpoint.counts["pieces staged"] == 0


async def test_a_revoke_that_comes_during_another_answers_behind_it_and_the_ring_is_lent_again(pair_on, tools):
    """The second one is asked when the writer has ended: what the first one waits for must be over, too."""
    pair = await pair_on(HOST)
    of, pages = shuffled()
    outcome, gate = tools.Outcome(), Gate(pair.target)
    pair.write(of, pages, outcome)
    await tools.soon(lambda: gate.waiting)
    first = asyncio.ensure_future(pair.target.endpoint.revoke(SOURCE))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(pair.target.endpoint.revoke(SOURCE))
    done, _ = await asyncio.wait({first, second}, timeout=0.1)
    assert not done
    gate.open.set()
    assert await second is None and first.done()
    pair.target.endpoint.writer_exited(SOURCE)
    assert pair.target.endpoint.rings == (2, 0)


async def test_a_ring_that_late_bytes_may_still_reach_is_not_used_again(pair_on, tools):
    """What was on the wire at a disconnect lands later, in a ring that must not hold another connection's pieces."""
    pair = await pair_on()
    pair.fabric.bandwidth_bytes_s = 1e5  # a piece takes 0.16 s
    of, pages = shuffled()
    outcome, again = tools.Outcome(), tools.Outcome()
    pair.write(of, pages, outcome)
    inner = pair.peer.inner
    await tools.soon(lambda: inner.batch is not None)
    await pair.source.endpoint.disconnect(pair.peer)
    assert (await outcome).outcome is WriteOutcome.BROKEN
    pair.fabric.bandwidth_bytes_s = 1e9
    pair.peer = await pair.source.endpoint.connect(await pair.target.endpoint.accept(SOURCE))
    pair.write(of, pages, again)
    assert (await again).outcome is WriteOutcome.FLUSHED and pair.right(of, pages)
    assert pair.source.endpoint.counts["staged bytes"] == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [({"start": (1 << 40, 0)}, "lies outside"), ({"region": (9, 0)}, "there are 4"), ({"offset": 1 << 20}, "of a ring"),
     ({"size_bytes": 63}, "slices of 64 bytes"), ({"at": b"\0" * 12}, "1 numbers in 12 bytes")],
)  # fmt: skip
async def test_an_announcement_of_what_lies_outside_moves_nothing_and_breaks_its_writer(pair_on, change, says, tools):
    pair = await pair_on()
    of, pages = shuffled()
    ready, outcome = tools.Outcome(), tools.Outcome()
    pair.write(of[:1], pages[:1], ready)
    await ready
    before = [array.copy() for array in pair.target.memory.arrays]
    gate = Gate(pair.target)
    pair.write(of, pages, outcome)
    await tools.soon(lambda: gate.waiting)
    fields = {"offset": 0, "size_bytes": 64, "region": (0, 0), "start": (0, 0), "at": (3, 0)} | change
    number = max(pair.peer._announced)
    bad = Scatter(
        pair.peer.descriptor.generation, pair.peer.session, number, fields["offset"], fields["size_bytes"], 1, 1,
        fields["region"], fields["start"], (256, 0), (64, 0), fields["at"], (1, 0),
    )  # fmt: skip
    pair.source.inner.notify(pair.peer.inner, encode(bad))
    result = await outcome
    assert result.outcome is WriteOutcome.BROKEN and says in result.error
    assert all(np.array_equal(*two) for two in zip(before, pair.target.memory.arrays, strict=True))
    gate.open.set()


@pytest.mark.parametrize("off", ["source", "target"])
@pytest.mark.parametrize("kind", ["staging-fake", "staging-ucx-host"])
async def test_a_pair_of_which_one_end_does_not_stage_sends_slices_one_by_one_and_says_so(make_site, tools, kind, off):
    sizes = {name: NO_STAGING if name == off else STAGED for name in ("source", "target")}
    source = await make_site(kind, SOURCE, tools.Heads(2, 2, seed=1), sizes=sizes["source"])
    target = await make_site(kind, TARGET, tools.Heads(), sizes=sizes["target"])
    descriptor = await target.endpoint.accept(SOURCE)
    pair = await connected(source, target)
    plain = source.inner.backend
    assert descriptor.backend == (plain if off == "target" else f"{plain}+staging")
    assert pair.peer.descriptor.backend == plain
    where = "there" if off == "target" else "at the writer"
    assert pair.peer.descriptor.why == f"slices go one by one: transfer.staging_mib is 0 {where}"
    of, pages = shuffled()
    outcome = tools.Outcome()
    pair.write(of, pages, outcome)
    assert (await outcome).outcome is WriteOutcome.FLUSHED and pair.right(of, pages)
    assert not source.endpoint.counts and not target.endpoint.counts
    assert await source.endpoint.connect(descriptor) is pair.peer
    await source.endpoint.disconnect(pair.peer)


async def test_another_backends_descriptor_is_refused(make_site, tools):
    staging = await make_site("staging-fake", SOURCE, tools.Heads(seed=1))
    other = msgspec.structs.replace(await staging.endpoint.accept(TARGET), backend="local")
    with pytest.raises(TransferError, match=r"backend is 'local' there, 'fake\+staging' here"):
        await staging.endpoint.connect(other)


@pytest.mark.parametrize(
    ("mib", "sizes"),
    [
        (0, NO_STAGING),
        (1, StagingSizes(32 * 1024, 3, 128 * 1024, 7)),
        (128, StagingSizes(4 << 20, 3, 16 << 20, 7)),
        (1024, StagingSizes(4 << 20, 3, 16 << 20, 63)),
    ],
)
def test_sizes_follow_from_the_memory_that_there_is(mib, sizes):
    assert sizes_for(mib << 20) == sizes and sizes.size_bytes <= mib << 20
    assert mib == 0 or sizes.size_bytes > (mib << 20) - sizes.ring_bytes
    sizes.check()


async def test_a_descriptor_says_what_the_one_within_says_of_its_writer(pair_on):
    """Proofs are those of the pair, and the writer's host is known to whom they depend on it."""
    pair = await pair_on(HOST)
    offers, accept = [], pair.target.inner.accept

    async def heard(writer, offer=NOTHING_SAID):
        offers.append(offer)
        return msgspec.structs.replace(await accept(writer, offer), proofs=TCP, why="far", at="there")

    pair.target.inner.accept = heard
    assert (await pair.target.endpoint.accept(SOURCE)).proofs == TCP and offers == [NOTHING_SAID]
    descriptor = decode_descriptor(
        encode_descriptor(await pair.target.endpoint.accept(SOURCE, one := Offer(host="one")))
    )
    assert offers == [NOTHING_SAID, one]
    assert (descriptor.proofs, descriptor.why, descriptor.at) == (TCP, "far; small slices are staged", "there")
    assert pair.peer.descriptor.proofs == pair.peer.inner.descriptor.proofs == HOST


async def test_both_ends_write_to_each_other(pair_on, tools):
    pair = await pair_on(layout="1 to 4")
    of, pages = shuffled()
    there, back = tools.Outcome(), tools.Outcome()
    peer = await pair.target.endpoint.connect(await pair.source.endpoint.accept(TARGET))
    pair.write(of, pages, there)
    assert (await there).outcome is WriteOutcome.FLUSHED
    assert pair.right(of, pages)
    pairing = pair_common(pair.target.memory.regions, pair.source.memory.regions)
    pair.target.endpoint.write(peer, page_blocks(pairing, pages, of), back)
    assert (await back).outcome is WriteOutcome.FLUSHED
    assert pair.right(of, pages)
    spans = make_spans(0, 0, 0, 0, [8])
    last = tools.Outcome()
    pair.source.endpoint.write(pair.peer, spans, last)
    assert (await last).outcome is WriteOutcome.FLUSHED
