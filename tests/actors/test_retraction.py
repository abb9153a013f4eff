"""A decode pool that holds fewer requests than it has let in: retraction, and everything that can go wrong with it.

Requests of 20 + 60 tokens in pages of 8: each comes to 10 pages. The pool has 15.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from kvferry.actors.settings import ClockSettings, DecodeSettings, FaultSettings, LinkSettings, PrefillSettings
from kvferry.protocol.errors import DeadlineExceeded, InvalidRequest, PeerLost
from kvferry.protocol.receiver import ReceiverState
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

MAX_TOKENS = 60
TIGHT = DecodeSettings(pool_pages=15)
PROMPTS = [tuple(range(100 * i, 100 * i + 20)) for i in range(1, 5)]


def tight(**options: Any) -> SimOptions:
    return SimOptions(decode=TIGHT, **options)


def assert_right(system: SimSystem, prompt: tuple[int, ...], max_tokens: int, tokens: list[Any]) -> None:
    """Each token once, in order, with its own text."""
    right = system.engine("prefill-0").expected_tokens(prompt, max_tokens)
    assert [token.index for token in tokens] == list(range(max_tokens))
    assert tuple(token.token_id for token in tokens) == right
    assert "".join(token.text for token in tokens) == "".join(f"<{i}>" for i in right)


def value(counter: Any) -> float:
    found: float = counter._value.get()
    return found


async def all_finish(system: SimSystem, tasks: list[asyncio.Task[Any]]) -> None:
    for prompt, tokens in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
        assert_right(system, prompt, MAX_TOKENS, tokens)
    assert await system.settle(10), system.counts()


def four(client: Any) -> tuple[list[Any], list[asyncio.Task[Any]]]:
    lives = [client.open(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
    return lives, [asyncio.create_task(client.collect(live)) for live in lives]


def test_case_38_four_long_outputs_in_a_pool_of_one_and_a_half(client_of: Any) -> None:
    """Case 38: all finish, some after having been retracted; that counts neither as a failure nor as an attempt: this
    front opens one attempt and no other.
    """

    async def main() -> None:
        async with SimSystem(tight()) as system:
            client = await client_of(system, attempts=1)
            lives, tasks = four(client)
            await all_finish(system, tasks)
            status = await system.decode().status()
            metrics = client.front.metrics
            assert status["counts"]["retracted"] == value(metrics.retractions) > 0
            assert [sample.value for sample in next(iter(metrics.attempts_failed.collect())).samples] == []
            assert sum(live.attempt for live in lives) == status["counts"]["retracted"]
            assert lives[0].attempt == 0, "the oldest is never retracted"
            assert all(live.spec.prefer in (0, system.processes["decode-0"].address.incarnation) for live in lives)
            for live in lives:  # every room ended in success: the last one's journal says so, too
                assert (await client.journal(live))["outcome"] == {"ok": True, "cause": None}
            assert system.router.counts["rooms failed"] == 0

    run(main())


def test_the_whole_pool_for_one_request(client_of: Any) -> None:
    """A need of exactly the pool is served, also beside others; one token more is refused with the numbers."""

    async def main() -> None:
        async with SimSystem(tight(prefill=PrefillSettings(pool_pages=64))) as system:
            client = await client_of(system)
            sizes = [(20, 100), (20, 30), (100, 20), (119, 1), (1, 119)]
            prompts = [tuple(range(1000 * i, 1000 * i + prompt)) for i, (prompt, _) in enumerate(sizes, 1)]
            asked = [client.open(p, max_tokens=size[1]) for p, size in zip(prompts, sizes, strict=True)]
            answers = await asyncio.gather(*map(client.collect, asked))
            for prompt, (_, max_tokens), tokens in zip(prompts, sizes, answers, strict=True):
                assert_right(system, prompt, max_tokens, tokens)
            with pytest.raises(InvalidRequest, match=r"max_tokens 101 = 121 tokens; at most 120 fit"):
                await client.ask(prompts[0], max_tokens=101)
            assert await system.settle(10), system.counts()

    run(main())


@pytest.mark.parametrize("seed", range(12))
def test_any_sizes_at_any_time(client_of: Any, seed: int) -> None:
    """Twenty requests of random sizes, transfers that are held, and clients that leave."""
    random = Random(seed)
    options = tight(
        seed=seed, faults=FaultSettings(delay_ms=random.choice([0, 5, 60])), prefill=PrefillSettings(pool_pages=40)
    )

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)

            async def one(number: int) -> bool:
                prompt = tuple(range(1000 * number, 1000 * number + random.randint(1, 50)))
                max_tokens = random.randint(1, 70)
                await asyncio.sleep(random.uniform(0, 3))
                live = client.open(prompt, max_tokens=max_tokens)
                if random.random() < 0.2:
                    await asyncio.sleep(random.uniform(0, 2))
                    client.front.close_request(live)
                    return False
                assert_right(system, prompt, max_tokens, await client.collect(live))
                return True

            finished = await asyncio.gather(*(one(number) for number in range(1, 21)))
            assert sum(finished) >= 10
            assert await system.settle(10), system.counts()
            assert system.decode().counts["retracted"] > 0

    run(main())


def test_retraction_while_another_request_receives(client_of: Any) -> None:
    """The pages that a peer writes to are nobody else's: the writes land where they should."""

    async def main() -> None:
        async with SimSystem(tight(faults=FaultSettings(delay_ms=700))) as system:
            client = await client_of(system)
            decode = system.decode()
            beside: list[int] = []  # at each retraction: how many others received
            tell = decode._tell_retracted

            def watch(room: Any) -> None:
                beside.append(sum(r.machine.state is ReceiverState.RECEIVING for r in decode.rooms.values()))
                tell(room)

            decode._tell_retracted = watch  # type: ignore[method-assign]
            _, tasks = four(client)
            await asyncio.sleep(1.3)
            more = [client.open(prompt[:9], max_tokens=30) for prompt in PROMPTS]
            answers = await asyncio.gather(*map(client.collect, more))
            for prompt, tokens in zip(PROMPTS, answers, strict=True):
                assert_right(system, prompt[:9], 30, tokens)
            await all_finish(system, tasks)
            assert max(beside) > 0, beside

    run(main())


def test_the_client_leaves_while_its_request_is_being_retracted(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(tight()) as system:
            client = await client_of(system)
            decode = system.decode()
            lives, tasks = four(client)
            await wait_until(lambda: decode.counts["retracted"] > 0)
            await wait_until(lambda: any(live.attempt for live in lives))
            (left,) = [at for at, live in enumerate(lives) if live.attempt]
            tasks[left].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            for at, (prompt, tokens) in enumerate(zip(PROMPTS, answers, strict=True)):
                if at == left:
                    assert isinstance(tokens, asyncio.CancelledError)
                else:
                    assert not isinstance(tokens, BaseException)
                    assert_right(system, prompt, MAX_TOKENS, tokens)
            assert await system.settle(10), system.counts()

    run(main())


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "router-0", "registry"])
@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.004, 0.03, 0.2])
def test_a_process_dies_right_after_a_retraction(client_of: Any, wait_until: Any, victim: str, after_s: float) -> None:
    """Decode, with the tail of tokens on its way; prefill, which must compute the prefix again; and the others. A
    request that was served waits for them, as after any loss.
    """

    async def main() -> None:
        async with SimSystem(tight(faults=FaultSettings(delay_ms=2))) as system:
            client = await client_of(system, attempts=3)
            decode = system.decode()
            _, tasks = four(client)
            await wait_until(lambda: decode.counts["retracted"] > 0)
            await asyncio.sleep(after_s)
            system.kill(victim)
            await asyncio.sleep(6)
            system.spawn(victim.split("-")[0], victim)
            await all_finish(system, tasks)

    run(main())


def test_the_link_that_carries_the_tail_breaks(client_of: Any, wait_until: Any) -> None:
    """Tokens and the word of the retraction may be lost with it; then the loss of the link opens the next attempt."""

    async def main() -> None:
        async with SimSystem(tight()) as system:
            client = await client_of(system, attempts=3)
            decode = system.decode()
            _, tasks = four(client)
            tell = decode._tell_retracted

            def lose(room: Any) -> None:
                tell(room)
                decode._tell_retracted = tell  # type: ignore[method-assign]
                decode.network.drop(client.network.address.incarnation)

            decode._tell_retracted = lose  # type: ignore[method-assign]
            await all_finish(system, tasks)

    run(main())


def test_a_retracted_request_keeps_its_place(client_of: Any) -> None:
    """It comes in before younger ones, those included that were there before its next attempt was opened."""

    async def main() -> None:
        async with SimSystem(tight()) as system:
            client = await client_of(system)
            decode = system.decode()
            lives, tasks = four(client)
            passed = 0
            admit = decode.batch.admit

            def number(room: Any) -> int:
                return [live.spec.request for live in lives].index(room.spec.request)

            def note() -> Any:
                nonlocal passed
                if (room := admit()) is not None:
                    waiting = [number(decode.rooms[other]) for other in decode.waiting]
                    assert all(number(room) < other for other in waiting)
                    passed += room.attempt > 0 and bool(waiting)
                return room

            decode.batch.admit = note  # type: ignore[method-assign]
            await all_finish(system, tasks)
            assert passed > 0

    run(main())


def test_a_retracted_request_waits_as_long_as_it_takes(client_of: Any) -> None:
    """Its client has tokens already: the limit of waiting for admission, 0.5 s here, is for those that have not been
    admitted. An older request takes 1.2 s and more.
    """

    async def main() -> None:
        async with SimSystem(tight(clocks=ClockSettings(admission_wait_s=0.5))) as system:
            client = await client_of(system)
            lives, tasks = four(client)
            await asyncio.sleep(0.4)
            late = client.open(PROMPTS[0], max_tokens=MAX_TOKENS)
            with pytest.raises(DeadlineExceeded, match=r"waiting for admission for 0\.\d s"):
                await client.collect(late)
            await all_finish(system, tasks)
            assert max(live.attempt for live in lives) > 0

    run(main())


def test_quarantined_pages_are_not_counted_on(client_of: Any, wait_until: Any) -> None:
    """A prefill that stands still keeps the pages of its target; those that come later finish in what is left."""
    options = tight(
        prefill=PrefillSettings(instances=2, pool_pages=64), faults=FaultSettings(delay_ms=50),
        links=LinkSettings(silence_s=3.0),
    )  # fmt: skip

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system)
            failing = asyncio.create_task(client.ask(PROMPTS[1], max_tokens=30))

            def writing() -> list[str]:
                prefills = {f"prefill-{i}": system.prefill(i) for i in range(2)}
                return [n for n, p in prefills.items() if any(r.machine.writes_open for r in p.rooms.values())]

            await wait_until(writing)
            (writer,) = writing()
            system.network.stop(system.processes[writer].address)
            with pytest.raises(PeerLost, match=writer):
                await failing
            _, tasks = four(client)
            for prompt, tokens in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
                assert_right(system, prompt, MAX_TOKENS, tokens)
            await asyncio.sleep(1)
            counts = system.counts()["decode-0"]
            assert (counts.quarantined, counts.owned, counts.leased, counts.free) == (3, 0, 0, 12)
            system.network.resume(system.processes[writer].address)
            assert await system.settle(10), system.counts()

    run(main())
