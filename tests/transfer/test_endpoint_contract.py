"""What every endpoint promises, run against each: the contract of kvferry.transfer.contract."""

import numpy as np
import pytest

from kvferry.transfer.contract import TransferError, WriteOutcome, decode_descriptor, encode_descriptor
from kvferry.transfer.page_plan import page_blocks
from kvferry.transfer.plan import pair, plan_pages, plan_row
from kvferry.transfer.spans import make_spans, no_spans

#: Its package is not in the extra `dev`.
MOONCAKE = pytest.param("mooncake-host", marks=pytest.mark.mooncake)
KINDS = ["fake", "faulty", "ucx-host", "ucx-tcp", "ucxx-host", "local"]
KINDS += ["staging-fake", "staging-ucx-host", "staging-ucx-tcp", MOONCAKE]
ROUND = 4 * 1024 * 1024


@pytest.fixture(params=KINDS)
async def ends(request, make_site, tools):
    """(source, target, peer): the source is connected to the target, which expects data."""
    source = await make_site(request.param, 0x51, tools.Memory(seed=1))
    target = await make_site(request.param, 0x52, tools.Memory())
    target.endpoint.expect(+1)
    descriptor = decode_descriptor(encode_descriptor(await target.endpoint.accept(0x51)))
    return source, target, await source.endpoint.connect(descriptor)


def scattered(count=64):
    random = np.random.default_rng(2)
    return random.permutation(80)[:count], random.permutation(80)[:count]


def long_spans(size_bytes, page_bytes=4096, pages=80):
    """The first region's bytes over and over: a write of any length on little memory."""
    return make_spans(0, 0, 0, 0, [page_bytes * pages] * (size_bytes // (page_bytes * pages)))


async def test_scattered_pages_and_a_row_lie_there_when_the_notification_comes(ends, tools):
    source, target, peer = ends
    source_pages, target_pages = scattered()
    pairing = pair(source.memory.regions, target.memory.regions)
    spans = np.concatenate([plan_pages(pairing, source_pages, target_pages), plan_row(pairing, "metadata", 3, 1)])
    seen = []
    target.on_note = lambda: seen.append([array.copy() for array in target.memory.arrays])
    outcome = tools.Outcome()
    handle = source.endpoint.write(peer, spans, outcome)
    result = await outcome
    source.endpoint.notify(peer, b"all of it")
    await tools.soon(lambda: seen)

    assert result.outcome is WriteOutcome.FLUSHED and handle.result is result
    assert result.size_bytes == 64 * 6 * 4096 + 64 and result.wire_s >= 0
    ((agent, payload),) = target.notes
    assert f"{0x51:016x}" in agent and payload == b"all of it"
    for index in range(6):
        expected = np.zeros_like(target.memory.pages(index))
        expected[target_pages] = source.memory.pages(index)[source_pages]
        assert np.array_equal(seen[0][index].reshape(expected.shape), expected)
    assert np.array_equal(seen[0][6].reshape(4, 64)[1], source.memory.arrays[6].reshape(4, 64)[3])
    assert not seen[0][6].reshape(4, 64)[[0, 2, 3]].any()


async def test_the_blocks_of_a_plan_are_written_as_the_spans_that_they_are(ends, tools):
    source, target, peer = ends
    source_pages, target_pages = scattered(9)
    outcome = tools.Outcome()
    blocks = page_blocks(pair(source.memory.regions, target.memory.regions), source_pages, target_pages)
    source.endpoint.write(peer, blocks, outcome)
    result = await outcome
    assert (result.outcome, result.size_bytes) == (WriteOutcome.FLUSHED, 9 * 6 * 4096)
    for index in range(6):
        expected = np.zeros_like(target.memory.pages(index))
        expected[target_pages] = source.memory.pages(index)[source_pages]
        assert np.array_equal(target.memory.pages(index), expected)


async def test_writes_to_one_peer_end_in_order_and_notes_follow_them(ends, tools):
    source, target, peer = ends
    ended = []
    for number in range(12):
        spans = make_spans(0, 0, number * 4096, number * 4096, [4096])
        source.endpoint.write(peer, spans, lambda result, number=number: ended.append((number, result.outcome)))
    await tools.soon(lambda: len(ended) == 12)
    for number in range(5):
        source.endpoint.notify(peer, bytes([number]))
    await tools.soon(lambda: len(target.notes) == 5)
    assert ended == [(number, WriteOutcome.FLUSHED) for number in range(12)]
    assert [payload for _, payload in target.notes] == [bytes([number]) for number in range(5)]


async def test_an_empty_write_ends_flushed(ends, tools):
    source, _, peer = ends
    outcome = tools.Outcome()
    source.endpoint.write(peer, no_spans(), outcome)
    result = await outcome
    assert (result.outcome, result.size_bytes) == (WriteOutcome.FLUSHED, 0)


async def test_on_end_is_not_called_from_within_write_or_cancel(ends, tools):
    source, _, peer = ends
    outcome = tools.Outcome()
    handle = source.endpoint.write(peer, no_spans(), outcome)
    source.endpoint.cancel(handle)
    assert not outcome.future.done() and handle.result is None
    await outcome


async def test_connect_is_idempotent_and_refuses_what_it_can_not_reach(ends):
    source, target, peer = ends
    assert await source.endpoint.connect(await target.endpoint.accept(0x51)) is peer
    with pytest.raises(TransferError):
        await source.endpoint.connect(await source.endpoint.accept(0x51))


async def test_a_span_outside_a_region_posts_nothing(ends, tools):
    source, target, peer = ends
    spans = make_spans([0, 0], [0, 0], [0, 0], [0, 80 * 4096 - 1], [4096, 2])
    with pytest.raises(TransferError, match="span 1"):
        source.endpoint.write(peer, spans, lambda result: pytest.fail("it ended"))
    outcome = tools.Outcome()
    source.endpoint.write(peer, make_spans(1, 1, 0, 0, [1]), outcome)
    await outcome
    assert not target.memory.arrays[0].any()


async def test_cancel_stops_posting_and_what_was_posted_is_flushed(ends, tools):
    source, target, peer = ends
    spans, outcomes = long_spans(64 * ROUND), [tools.Outcome() for _ in range(3)]
    handles = [source.endpoint.write(peer, spans, outcome) for outcome in outcomes]
    source.endpoint.cancel(handles[0])
    source.endpoint.cancel(handles[2])
    first, third = await outcomes[0], await outcomes[2]
    assert first.outcome is WriteOutcome.CANCELLED and first.size_bytes < spans["length"].sum()
    assert (third.outcome, third.size_bytes) == (WriteOutcome.CANCELLED, 0)
    source.endpoint.cancel(handles[1])
    await outcomes[1]
    source.endpoint.cancel(handles[1])  # late news
    after = tools.Outcome()
    source.endpoint.write(peer, make_spans(2, 2, 0, 0, [4096]), after)
    assert (await after).outcome is WriteOutcome.FLUSHED
    assert np.array_equal(target.memory.arrays[2][:4096], source.memory.arrays[2][:4096])


async def test_disconnect_breaks_what_is_unfinished(ends, tools):
    source, target, peer = ends
    outcomes = [tools.Outcome() for _ in range(2)]
    for outcome in outcomes:
        source.endpoint.write(peer, long_spans(64 * ROUND), outcome)
    await source.endpoint.disconnect(peer)
    assert [(await outcome).outcome for outcome in outcomes] == [WriteOutcome.BROKEN] * 2
    late = tools.Outcome()
    source.endpoint.write(peer, long_spans(ROUND), late)
    assert (await late).outcome is WriteOutcome.BROKEN
    again, outcome = await source.endpoint.connect(await target.endpoint.accept(0x51)), tools.Outcome()
    source.endpoint.write(again, long_spans(ROUND), outcome)
    assert (await outcome).outcome is WriteOutcome.FLUSHED


async def test_a_target_that_closes_breaks_the_writes_to_it(ends, tools):
    source, target, peer = ends
    ready = tools.Outcome()
    source.endpoint.write(peer, long_spans(ROUND), ready)
    await ready
    outcome = tools.Outcome()
    source.endpoint.write(peer, long_spans(512 * ROUND), outcome)
    await target.endpoint.close()
    result = await outcome
    assert result.outcome is WriteOutcome.BROKEN and result.error


async def test_close_ends_unfinished_writes_and_refuses_new_ones(ends, tools):
    source, _, peer = ends
    outcomes = [tools.Outcome() for _ in range(2)]
    handles = [source.endpoint.write(peer, long_spans(64 * ROUND), outcome) for outcome in outcomes]
    await source.endpoint.close()
    assert [handle.result.outcome for handle in handles] == [WriteOutcome.BROKEN] * 2
    await source.endpoint.close()  # once more is safe
    with pytest.raises(TransferError, match="closed"):
        source.endpoint.write(peer, no_spans(), tools.Outcome())
    source.endpoint.cancel(handles[0])
    source.endpoint.expect(-1)


async def test_two_sources_write_to_one_target(ends, make_site, request, tools):
    source, target, peer = ends
    kind = request.node.callspec.params["ends"]
    other = await make_site(kind, 0x53, tools.Memory(seed=9))
    second = await other.endpoint.connect(await target.endpoint.accept(0x53))
    outcomes = [tools.Outcome() for _ in range(2)]
    source.endpoint.write(peer, make_spans(0, 0, 0, 0, [40 * 4096]), outcomes[0])
    other.endpoint.write(second, make_spans(0, 0, 0, 40 * 4096, [40 * 4096]), outcomes[1])
    assert [(await outcome).outcome for outcome in outcomes] == [WriteOutcome.FLUSHED] * 2
    source.endpoint.notify(peer, b"1")
    other.endpoint.notify(second, b"2")
    await tools.soon(lambda: len(target.notes) == 2)
    assert [payload for _, payload in sorted(target.notes)] == [b"1", b"2"]
    assert all(f"{number:016x}" in agent for number, (agent, _) in zip((0x51, 0x53), sorted(target.notes), strict=True))
    assert np.array_equal(target.memory.arrays[0][: 40 * 4096], source.memory.arrays[0][: 40 * 4096])
    assert np.array_equal(target.memory.arrays[0][40 * 4096 :], other.memory.arrays[0][: 40 * 4096])


async def test_a_descriptor_of_another_backend_is_refused(make_site, tools):
    fake = await make_site("fake", 1, tools.Memory())
    host = await make_site("ucx-host", 2, tools.Memory())
    tcp = await make_site("ucx-tcp", 3, tools.Memory())
    for here, there, words in (
        (fake, host, "backend is 'ucx' there, 'fake' here"),
        (host, fake, "backend is 'fake' there, 'ucx' here"),
        (host, tcp, "transports are 'tcp' there, 'host' here"),
    ):
        with pytest.raises(TransferError, match=words):
            await here.endpoint.connect(await there.endpoint.accept(1))


async def test_what_is_not_a_descriptor_is_refused():
    with pytest.raises(TransferError, match="not a descriptor"):
        decode_descriptor(b"\x93nope")


async def test_proofs_are_those_of_the_transport(make_site, tools):
    proofs = {}
    kinds = ("ucx-host", "ucx-tcp", "ucxx-host", "ucxx-tcp", "local", "staging-ucx-host", "staging-ucx-tcp")
    for number, kind in enumerate(kinds):
        of = (await (await make_site(kind, number, tools.Memory())).endpoint.accept(9)).proofs
        proofs[kind] = (of.drained, of.exited, of.revoked)
    host, by_the_target = (True, True, False), (True, False, True)
    assert proofs == {
        "ucx-host": host,
        "ucx-tcp": by_the_target,
        "ucxx-host": by_the_target,
        "ucxx-tcp": by_the_target,
        "local": host,
        "staging-ucx-host": host,
        "staging-ucx-tcp": by_the_target,
    }


async def test_each_writer_has_a_descriptor_of_its_own_until_it_is_revoked(ends):
    _, target, _ = ends
    first, other = await target.endpoint.accept(0x51), await target.endpoint.accept(0x53)
    assert first == await target.endpoint.accept(0x51) and first.agent != other.agent
    assert first.incarnation == other.incarnation == 0x52 and first.generation != other.generation
    proof = await target.endpoint.revoke(0x51)
    again = await target.endpoint.accept(0x51)
    assert again.agent not in (first.agent, other.agent)
    if first.proofs.revoked:
        assert (proof.writer, proof.generation) == (0x51, first.generation)
    else:
        assert proof is None
    assert await target.endpoint.accept(0x53) == other
    assert await target.endpoint.revoke(0x54) is None  # it never had one


async def test_revoking_one_writer_breaks_its_writes_and_nobody_elses(ends, make_site, request, tools):
    source, target, peer = ends
    other = await make_site(request.node.callspec.params["ends"], 0x53, tools.Memory(seed=9))
    second = await other.endpoint.connect(await target.endpoint.accept(0x53))
    outcomes = [tools.Outcome() for _ in range(3)]
    source.endpoint.write(peer, long_spans(ROUND), outcomes[0])
    await outcomes[0]
    source.endpoint.write(peer, long_spans(512 * ROUND), outcomes[1])
    other.endpoint.write(second, long_spans(8 * ROUND), outcomes[2])
    await target.endpoint.revoke(0x51)
    broken, right = await outcomes[1], await outcomes[2]
    assert broken.outcome is WriteOutcome.BROKEN and broken.error and right.outcome is WriteOutcome.FLUSHED
    again = tools.Outcome()
    source.endpoint.write(await source.endpoint.connect(await target.endpoint.accept(0x51)), long_spans(ROUND), again)
    assert (await again).outcome is WriteOutcome.FLUSHED
