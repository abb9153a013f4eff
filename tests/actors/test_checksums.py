"""What is transferred is checked where it lies: a byte that has changed there never reaches a client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.actors.prefill.kept import release
from kvferry.actors.settings import DecodeSettings, FaultSettings, LinkSettings, PrefillSettings
from kvferry.obs.rooms import CHECKS_FAILED
from kvferry.protocol.errors import HandoffFailed
from kvferry.protocol.metadata import ROW_BYTES
from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.protocol.receiver import ReceiverState
from kvferry.protocol.request import Sampling
from kvferry.serve.choices import Choices
from kvferry.serve.prepare import sample_seed
from kvferry.sim.checkers import Broken, Watcher, check_idle
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(300, 400))  # 13 pages of 8 tokens, in four chunks
TWO_RANKS = {
    "prefill": PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64, pp=2),
    "decode": DecodeSettings(pool_pages=64, pp=2),
}


class Flip:
    """Changes one byte of one write of a prefill rank, once it lies at its target. `at` counts from the write's first
    byte, or, if negative, from its end.
    """

    def __init__(self, system: SimSystem, name: str = "prefill-0", write: int = 0, at: int = 0, times: int = 1) -> None:
        endpoint = system.processes[name].dressed
        assert endpoint is not None
        self.endpoint, self.write, self.at, self.left = endpoint, write, at, times
        self.writes = 0
        endpoint.flips = self

    def __call__(self, _target: int, size_bytes: int) -> int | None:
        self.writes += 1
        if self.writes <= self.write:
            return None
        self.left -= 1
        if self.left:  # the endpoint forgets it when it has struck
            asyncio.get_running_loop().call_soon(setattr, self.endpoint, "flips", self)
        return self.at % size_bytes


def failed_checks(system: SimSystem) -> int:
    return system.decode().counts[CHECKS_FAILED]


def checking(system: SimSystem) -> bool:
    return any(room.machine.state is ReceiverState.CHECKING for room in system.decode().rooms.values())


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    write=st.integers(0, 3),
    at=st.one_of(st.integers(0, 2**31), st.integers(-ROW_BYTES, -1)),
    policy=st.sampled_from([EARLY, PREFILL_COMPLETE]),
    sizes=st.sampled_from([(8, 8), (8, 24), (32, 12)]),
)
def test_a_byte_that_changes_anywhere_fails_the_attempt_and_no_more(
    client_of: Any, write: int, at: int, policy: str, sizes: tuple[int, int]
) -> None:
    """In any page, part and layer of any chunk, and in the metadata row, which ends the last write; with pages of one
    size and of two.
    """
    options = SimOptions(
        policy=policy,
        prefill=PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=512 // sizes[0], page_size=sizes[0]),
        decode=DecodeSettings(pool_pages=512 // sizes[1], page_size=sizes[1]),
    )

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=2)
            flip = Flip(system, write=0 if policy == PREFILL_COMPLETE else write, at=at)
            answer = await client.ask(PROMPT, max_tokens=5)
            assert answer == list(system.engine().expected_tokens(PROMPT, 5))
            assert flip.left == 0 and failed_checks(system) == 1
            assert await system.settle(5)
            await asyncio.sleep(2)
            check_idle(system)

    run(main())


@pytest.mark.parametrize("target", ["decode-0", "decode-0.1"])
@pytest.mark.parametrize("write", [0, 3])
def test_every_pair_of_ranks_is_checked(client_of: Any, target: str, write: int) -> None:
    """Rank 1 writes to rank 1, whose memory its leader can't see."""
    source = target.replace("decode", "prefill")

    async def main() -> None:
        async with SimSystem(SimOptions(**TWO_RANKS)) as system:
            client = await client_of(system, attempts=2)
            Flip(system, source, write, at=1000)
            answer = await client.ask(PROMPT, max_tokens=5)
            assert answer == list(system.engine().expected_tokens(PROMPT, 5))
            assert failed_checks(system) == 1
            assert await system.settle(5)

    run(main())


def test_the_cause_names_ranks_chunk_and_both_digests(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(SimOptions(**TWO_RANKS)) as system:
            client = await client_of(system)
            Flip(system, "prefill-0.1", write=2)
            wanted = (
                r"chunk 2 \(tokens 64 to 95 of the prompt\) from rank 1 of prefill-0 to rank 1: its digest is "
                r"([0-9a-f]{16}) here, and was (?!\1)[0-9a-f]{16} at its source"
            )
            with pytest.raises(HandoffFailed, match=wanted):
                await client.ask(PROMPT, max_tokens=5)

    run(main())


def test_without_checksums_the_byte_is_read(client_of: Any) -> None:
    """So the tests above show what checksums do, and the simulation's own checker sees what they don't let through."""

    async def main() -> None:
        async with SimSystem(SimOptions(checksum=False)) as system:
            watcher, client = Watcher(system), await client_of(system, attempts=2)
            Flip(system, write=1, at=77)
            answer = await client.ask(PROMPT, max_tokens=5)
            assert answer[1:] != list(system.engine().expected_tokens(PROMPT, 5))[1:] and failed_checks(system) == 0
            with pytest.raises(Broken, match=r"page-contents: page \d+ .* holds None"):
                watcher.look()

    run(main())


def test_chunks_are_checked_while_later_ones_are_computed(client_of: Any, wait_until: Any) -> None:
    """When the last notification comes, only the last chunk is still to be checked."""

    async def main() -> None:
        async with SimSystem(SimOptions(digest_bytes_s=1e6)) as system:
            client = await client_of(system)
            asking = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: checking(system))
            (room,) = system.decode().rooms.values()
            assert [placed.first for placed in room.checks.told.values()] == [0, 32, 64, 96]
            assert room.checks.open == {(0, 0, 96)}
            await asking

    run(main())


SLOW_CHECKS = 1.0


def checks_take(system: SimSystem, duration_s: float) -> None:
    digests: Any = system.decode().digests
    of = digests.of

    async def slowly(spans: Any, side: str) -> int:
        await asyncio.sleep(duration_s)
        taken: int = await of(spans, side)
        return taken

    digests.of = slowly


def test_the_check_of_a_room_that_has_ended_says_nothing_about_the_next(client_of: Any, wait_until: Any) -> None:
    """Its pages are free at once, and another room writes to them while they are still being read."""
    options = SimOptions(decode=DecodeSettings(pool_pages=14))

    async def main() -> None:
        async with SimSystem(options) as system:
            client, decode = await client_of(system), system.decode()
            checks_take(system, SLOW_CHECKS)
            live = client.open(PROMPT, max_tokens=5)
            await wait_until(lambda: checking(system))
            client.front.close_request(live)
            await wait_until(lambda: not decode.rooms)
            assert decode.ledger.counts().free == 14
            other = tuple(range(500, 600))
            assert await client.ask(other, max_tokens=5) == list(system.engine().expected_tokens(other, 5))
            assert decode.counts["checks of rooms that had ended"] >= 1 and failed_checks(system) == 0
            assert await system.settle(5)

    run(main())


def test_prefill_may_die_while_decode_checks(client_of: Any, wait_until: Any) -> None:
    """All is written with the last notification: losing prefill then is no failure."""

    async def main() -> None:
        async with SimSystem(SimOptions(links=LinkSettings(silence_s=2.0))) as system:
            client = await client_of(system)
            checks_take(system, SLOW_CHECKS)
            asking = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: checking(system))
            system.kill("prefill-0")
            assert await asking == list(system.engine().expected_tokens(PROMPT, 5))

    run(main())


def test_a_page_with_two_failed_checks_is_retired(client_of: Any) -> None:
    """It is counted, never handed out again, and what is left of the pool still serves."""
    options = SimOptions(decode=DecodeSettings(pool_pages=3))

    async def main() -> None:
        async with SimSystem(options) as system:
            client, decode = await client_of(system, attempts=3), system.decode()
            engine, short = system.engine(), PROMPT[:7]
            bad = 0

            class BadPage(Flip):
                """Memory that does not keep what is written to one page of one region."""

                def __call__(self, target: int, size_bytes: int) -> int | None:
                    asyncio.get_running_loop().call_soon(setattr, self.endpoint, "flips", self)
                    (room,) = (r for r in decode.rooms.values() if r.machine.state is ReceiverState.RECEIVING)
                    return 3 if room.holding is not None and room.holding.pages[0] == bad else None

            BadPage(system)
            for _ in range(8):
                assert await client.ask(short, max_tokens=1) == list(engine.expected_tokens(short, 1))
                assert await system.settle(5)
            assert failed_checks(system) == 2
            counts = decode.ledger.counts()
            assert (counts.free, counts.retired, counts.total) == (2, 1, 3) and counts.conserved and counts.at_baseline
            assert (await decode.status())["pages"]["retired"] == 1
            assert bad not in decode.ledger._free

    run(main())


def test_a_request_that_the_pool_has_become_too_small_for_ends_with_an_error(client_of: Any) -> None:
    """It needs every page, and one of them is gone: nobody waits for a place that never comes."""
    options = SimOptions(decode=DecodeSettings(pool_pages=4))

    async def main() -> None:
        async with SimSystem(options) as system:
            client, decode = await client_of(system, attempts=2), system.decode()
            holding = decode.ledger.reserve(1, 1)
            assert holding is not None
            decode.ledger.blame(holding.pages)
            decode.ledger.blame(holding.pages)
            release(decode.ledger, holding, decode.forward.done)
            assert decode.ledger.counts().retired == 1
            with pytest.raises(HandoffFailed, match=r"may need 4 pages; 1 of the pool's 4 are retired"):
                await client.ask(PROMPT[:20], max_tokens=12)
            assert await client.ask(PROMPT[:12], max_tokens=8) == list(system.engine().expected_tokens(PROMPT[:12], 8))
            assert await system.settle(5)

    run(main())


def test_writes_that_are_held_are_checked_like_others(client_of: Any) -> None:
    """The configured fault: after so many writes one is followed by another real write, of one byte."""

    async def main() -> None:
        async with SimSystem(SimOptions(faults=FaultSettings(flip_after=1))) as system:
            client = await client_of(system, attempts=2)
            assert await client.ask(PROMPT, max_tokens=5) == list(system.engine().expected_tokens(PROMPT, 5))
            assert failed_checks(system) == 1
            assert await system.settle(5)

    run(main())


def test_what_prefill_kept_of_a_prompt_goes_with_a_failed_check(client_of: Any) -> None:
    """Siblings read pages that one of them has computed. Those still to come compute the prompt again."""
    samplings = [replace(Sampling(6, 0.8), seed=sample_seed(11, i)) for i in range(4)]
    options = SimOptions(decode=DecodeSettings(pool_pages=14, max_running=1))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=2)
            Flip(system, write=3)
            choices = Choices(client.front)
            choices.open(PROMPT, samplings)
            ids: dict[int, list[int]] = {}
            while not choices.over:
                for index, tokens in await choices.take():
                    ids.setdefault(index, []).extend(token.token_id for token in tokens)
            choices.close()
            for index, sampling in enumerate(samplings):
                assert ids[index] == list(system.engine().expected_tokens(PROMPT, 6, sampling))
            assert failed_checks(system) == 1
            assert system.prefill().counts["kept prompts dropped for a failed check"] == 1
            assert await system.settle(20)

    run(main())


def test_the_journal_has_what_a_transfer_took(client_of: Any) -> None:
    """Four chunks of 32, 32, 32 and 4 tokens, in 3 layers with K and V each, and the row, at 1 MB/s; nothing is before
    it in its lane. Pages lie in a row, so a chunk has one descriptor for each layer and part.
    """
    token_bytes = 2 * 4 * 4  # heads, dimensions, bytes
    size_bytes = 100 * token_bytes * 6 + ROW_BYTES

    async def main() -> None:
        async with SimSystem(SimOptions(bandwidth_bytes_s=1e6)) as system:
            client = await client_of(system)
            live = client.open(PROMPT, max_tokens=2)
            await client.collect(live)
            (transfer,) = (await client.journal(live))["transfers"]
            assert transfer["wire_s"] == pytest.approx(size_bytes / 1e6)
            assert {name: transfer[name] for name in ("rank", "backend", "bytes", "wait_s", "descriptors")} == {
                "rank": 0, "backend": "fake", "bytes": size_bytes, "wait_s": 0, "descriptors": 4 * 6 + 1,
            }  # fmt: skip

    run(main())
