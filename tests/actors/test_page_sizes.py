"""Prefill and decode with pages of two sizes (Case 44 refused them once): chunks begin and end within pages."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvferry.actors.settings import DecodeSettings, FaultSettings, PrefillSettings
from kvferry.memory.ledger import PageLedger
from kvferry.obs.rooms import CHECKS_FAILED
from kvferry.protocol.errors import HandoffFailed
from kvferry.protocol.instance import WriteChunk
from kvferry.protocol.messages import Destination
from kvferry.protocol.metadata import Placed
from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.protocol.receiver import ReceiverState
from kvferry.sim.checkers import Watcher, check_idle
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem
from kvferry.transfer.fake import TCP

PROMPT = tuple(range(300, 400))
SIZES = [(16, 64), (64, 16), (16, 24), (24, 16), (1, 64), (32, 7)]


def sized(prefill: int, decode: int, pool_tokens: int = 512, pp: int = 1, **rest: Any) -> SimOptions:
    """Pages of so many tokens, and chunks of about 32; `pp` stages on both sides."""
    chunk = max(prefill, 32 // prefill * prefill)
    return SimOptions(
        prefill=PrefillSettings(
            page_size=prefill, chunk_tokens=chunk, batch_tokens=2 * chunk, pool_pages=pool_tokens // prefill, pp=pp
        ),
        decode=DecodeSettings(page_size=decode, pool_pages=pool_tokens // decode, pp=pp),
        **rest,
    )


@pytest.mark.parametrize("policy", [EARLY, PREFILL_COMPLETE])
@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_tokens_are_those_of_one_page_size(client_of: Any, prefill: int, decode: int, policy: str) -> None:
    """Several prompts at a time, shorter and longer than a page of either side, up to its end and one beyond."""
    prompts = [PROMPT[i : i + length] for i, length in enumerate((1, 15, 16, 17, 63, 64, 65, 90))]

    async def main() -> None:
        async with SimSystem(sized(prefill, decode, policy=policy)) as system:
            watcher, client = Watcher(system), await client_of(system)
            answers = await asyncio.gather(*(client.ask(prompt, max_tokens=6) for prompt in prompts))
            assert answers == [list(system.engine().expected_tokens(prompt, 6)) for prompt in prompts]
            assert await system.settle(5), system.counts()
            watcher.look()
            assert watcher.writes.copies and system.decode().counts[CHECKS_FAILED] == 0

    run(main())


@pytest.mark.parametrize(
    ("prefill", "decode"), [({"tp": 2}, {"pp": 2}), ({"pp": 3}, {"tp": 2}), ({"tp": 1}, {"tp": 4}), ({"tp": 4}, {})]
)
def test_slices_and_page_sizes_at_once(client_of: Any, prefill: dict[str, int], decode: dict[str, int]) -> None:
    """Case 46, 47: heads and layers cut differently on two sides that have other pages, too."""
    options = sized(16, 24)
    changed = {
        "prefill": msgspec.structs.replace(options.prefill, **prefill),
        "decode": msgspec.structs.replace(options.decode, **decode),
    }

    async def main() -> None:
        async with SimSystem(SimOptions(**changed)) as system:
            watcher, client = Watcher(system), await client_of(system)
            prompts = [PROMPT[i : 90 + i] for i in range(3)]
            answers = await asyncio.gather(*(client.ask(prompt, max_tokens=6) for prompt in prompts))
            assert answers == [list(system.engine().expected_tokens(prompt, 6)) for prompt in prompts]
            assert await system.settle(5)
            watcher.look()

    run(main())


@pytest.mark.parametrize(("prefill", "decode"), [(16, 64), (64, 16), (16, 24), (8, 8)])
def test_what_lies_behind_the_prompt_in_its_last_page_is_not_touched(client_of: Any, prefill: int, decode: int) -> None:
    """100 tokens end within a page of either side. Both pools are full of other words."""

    async def main() -> None:
        async with SimSystem(sized(prefill, decode)) as system:
            client, theirs = await client_of(system), system.engine()
            system.engine("prefill-0")._pool[:] = 0xAAAAAAAA
            theirs._pool[:] = 0x55555555
            assert len(await client.ask(PROMPT, max_tokens=1)) == 1  # decode runs no forward of its own
            assert await system.settle(5)
            untouched = theirs._pool == 0x55555555
            changed = ~untouched.all(axis=(0, 1, 4))  # [pages, tokens of a page]
            assert changed.sum() == len(PROMPT) and not untouched[:, :, changed].any()
            assert not (theirs._pool == 0xAAAAAAAA).any()
            rows = changed[changed.any(axis=1)].sum(axis=1).tolist()
            assert sorted(rows, reverse=True) == [decode] * (100 // decode) + [100 % decode]

    run(main())


def test_the_journal_counts_decodes_pages_and_the_prompts_bytes(client_of: Any) -> None:
    """100 tokens are 7 pages of 16 at prefill, and 2 of 64 at decode."""

    async def main() -> None:
        async with SimSystem(sized(16, 64)) as system:
            client = await client_of(system)
            live = client.open(PROMPT, max_tokens=2)
            await client.collect(live)
            journal = await client.journal(live)
            details = {
                name: [e["detail"] for e in journal["events"] if e["event"] == name] for name in ("admitted", "written")
            }
            assert [detail["pages"] for detail in details["admitted"]] == [2]
            written = [detail["kv_bytes"] for detail in details["written"]]
            per_token = 3 * 2 * 2 * 4 * 4  # layers, K and V, heads, dimensions, bytes
            assert written == [32 * per_token, 32 * per_token, 32 * per_token, 4 * per_token]

    run(main())


@pytest.mark.parametrize(("pages", "named"), [(slice(1), 1), (slice(0), 0), (slice(None), 3)])
def test_a_destination_with_another_number_of_pages_is_refused(client_of: Any, pages: slice, named: int) -> None:
    """Decode's page list must be that of the prompt in decode's pages, not in prefill's: 100 tokens, 2 pages of 64."""

    async def main() -> None:
        async with SimSystem(sized(16, 64)) as system:
            client, prefill = await client_of(system), system.prefill()
            take = prefill._on_message[Destination]

            def other(peer: Any, message: Destination) -> None:
                take(peer, msgspec.structs.replace(message, pages=(*message.pages, 7)[pages]))

            prefill._on_message[Destination] = other
            text = f"tokens 0 to 100 lie in 2 target pages of 64 tokens; {named} are named"
            with pytest.raises(HandoffFailed, match=text):
                await client.ask(PROMPT, max_tokens=2)
            prefill._on_message[Destination] = take
            assert await client.ask(PROMPT, max_tokens=2) == list(system.engine().expected_tokens(PROMPT, 2))
            assert await system.settle(5)
            check_idle(system)

    run(main())


def test_an_order_that_does_not_fit_its_tokens_fails_the_room_and_no_more(client_of: Any) -> None:
    """A follower is told of a chunk with a page too few: it answers, and its next room is served."""

    async def main() -> None:
        async with SimSystem(sized(16, 24, pp=2)) as system:
            client = await client_of(system)
            (follower,) = [f for f in system.followers() if f.role == "prefill"]
            take = follower._on_message[WriteChunk]

            def short(peer: Any, message: WriteChunk) -> None:
                take(peer, msgspec.structs.replace(message, pages=message.pages[:1]))

            follower._on_message[WriteChunk] = short
            with pytest.raises(HandoffFailed, match="tokens 0 to 32 lie in 2 source pages of 16 tokens; 1 are named"):
                await client.ask(PROMPT, max_tokens=2)
            follower._on_message[WriteChunk] = take
            assert await client.ask(PROMPT, max_tokens=2) == list(system.engine().expected_tokens(PROMPT, 2))
            assert await system.settle(5)
            check_idle(system)

    run(main())


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        (Placed(1, 32, 69, False, 1), r"says that it has written Placed\(.*, of a prompt of 100 tokens"),
        (Placed(1, 32, 32, True, 1), r"says that it has written Placed\(.*row=True.*, of a prompt of 100 tokens"),
        (None, "rank 0 has told of 32 tokens that it wrote to rank 0; there are 100"),
    ],
)
def test_what_prefill_says_of_tokens_must_be_the_prompt(client_of: Any, placed: Placed | None, words: str) -> None:
    """More tokens than there are, the row before the end, and a chunk that was never told of."""

    async def main() -> None:
        async with SimSystem(sized(16, 24)) as system:
            client, data_plane = await client_of(system), system.prefill()._ranks._data_plane
            say = data_plane._say

            def other(sending: Any, target: int, told: tuple[Placed, ...], last: bool) -> None:
                kept = tuple(one for one in told if one.first != 32)
                say(sending, target, kept if placed is None else (*kept, placed), last)

            data_plane._say = other
            with pytest.raises(HandoffFailed, match=words):
                await client.ask(PROMPT, max_tokens=2)
            data_plane._say = say
            assert await client.ask(PROMPT, max_tokens=2) == list(system.engine().expected_tokens(PROMPT, 2))
            assert await system.settle(5)

    run(main())


class BadPlace:
    """Memory of one decode rank that does not keep a byte of the first layer's K, in one page: the page's token number
    `token`. Every write to that rank that has it is damaged. `name` is the prefill rank that writes there.
    """

    def __init__(self, system: SimSystem, page: int, token: int, name: str = "prefill-0") -> None:
        self.struck = 0
        dressed: Any = system.processes[name].dressed
        inner_write = dressed.inner.write

        def write(peer: Any, spans: Any, on_end: Any) -> Any:
            def ended(result: Any) -> None:
                region = peer.descriptor.regions[0]
                at = page * region.item_bytes + token * (region.item_bytes // region.tokens)
                hit = (spans["target_region"] == 0) & (spans["target_offset"] <= at)
                if (hit & (at < spans["target_offset"] + spans["length"])).any():
                    self.struck += dressed._flip(peer.descriptor.agent, 0, at)
                on_end(result)

            return inner_write(peer, spans, ended)

        dressed.inner.write = write


@pytest.mark.parametrize("pp", [1, 2])
def test_a_page_that_two_chunks_lie_in_is_retired_when_it_fails_twice(client_of: Any, pp: int) -> None:
    """A pool of three pages of 24 and chunks of 32, so page 1 always has tokens 24 to 31 of the first chunk and 32 to
    47 of the second, which fails; page 2 is in that, too, so nobody knows which of the two is bad. The first chunk
    passes each time, and so does, with two stages, what the other rank has written to both: that clears nobody.
    """
    prompt = PROMPT[:60]

    async def main() -> None:
        async with SimSystem(sized(16, 24, pool_tokens=72, pp=pp)) as system:
            client, ledger = await client_of(system), system.decode().ledger
            place = BadPlace(system, 1, 12, "prefill-0" if pp == 1 else "prefill-0.1")
            for _ in range(2):
                assert not ledger._retired
                with pytest.raises(HandoffFailed, match=r"chunk 1 \(tokens 32 to 59 of the prompt"):
                    await client.ask(prompt, max_tokens=2)
                assert await system.settle(5)
            assert ledger._retired == {1, 2} and place.struck == 2
            counts = ledger.counts()
            assert (counts.free, counts.retired) == (1, 2) and counts.conserved and counts.at_baseline

    run(main())


def test_a_chunk_that_fails_clears_nobody_who_shares_its_page(client_of: Any) -> None:
    """What the ledger is told: of the pages that a passing chunk lies in, only those that it fills."""
    blamed: list[tuple[int, ...]] = []
    cleared: list[int] = []

    async def main() -> None:
        async with SimSystem(sized(16, 24)) as system:
            client, ledger = await client_of(system, attempts=2), system.decode().ledger
            watch(ledger)
            ledger._suspected.update({0: 1, 1: 1, 2: 1, 6: 1, 7: 1, 20: 1})
            BadPlace(system, 1, 12)  # token 36: of the second chunk
            assert await client.ask(PROMPT, max_tokens=2) == list(system.engine().expected_tokens(PROMPT, 2))

    def watch(ledger: PageLedger) -> None:
        blame, clear = ledger.blame, ledger.clear
        ledger.blame = lambda pages: (blamed.append(tuple(pages)), blame(blamed[-1]))[1]  # type: ignore[method-assign]

        def cleared_now(pages: Any) -> None:
            found = tuple(pages)
            cleared.extend(page for page in found if page not in cleared)
            clear(found)

        ledger.clear = cleared_now  # type: ignore[method-assign]

    run(main())
    assert blamed == [(1, 2)], "tokens 32 to 63"
    assert cleared[0] == 0 and 1 not in cleared and 2 not in cleared
    assert cleared == [0, 5, 6, 7, 8, 9], "the first attempt's page 0; all of the second attempt's"


@pytest.mark.parametrize("proofs", ["host", "tcp"])
def test_a_late_write_within_a_page(client_of: Any, wait_until: Any, proofs: str) -> None:
    """A is aborted with its write held, and it lands all the same; B has the same pages afterwards. Nothing of A's
    is read, and no byte lands where A has no lease any more.
    """
    faults = FaultSettings(delay_ms=200, late_after_abort_ms=900)
    rest: dict[str, Any] = {"proofs": TCP} if proofs == "tcp" else {}

    async def main() -> None:
        async with SimSystem(sized(16, 24, pool_tokens=144, faults=faults, **rest)) as system:
            watcher, client = Watcher(system), await client_of(system)
            live = client.open(PROMPT, max_tokens=8)
            await wait_until(lambda: any(room.machine.writes_open for room in system.prefill().rooms.values()))
            (room,) = system.decode().rooms.values()
            client.front.close_request(live)
            await wait_until(lambda: room.machine.state is ReceiverState.RELEASING)
            other = tuple(range(500, 570))
            assert await client.ask(other, max_tokens=8) == list(system.engine().expected_tokens(other, 8))
            assert await system.settle(20), system.counts()
            watcher.look()
            await asyncio.sleep(2)
            check_idle(system)

    run(main())
