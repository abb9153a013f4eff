"""The unified actor on virtual time, with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvferry.actors.unified.unified import Unified
from kvferry.engine.contract import EngineLimits, StepPlan
from kvferry.engine.scripted import ScriptedEngine, ScriptedTexts
from kvferry.protocol.address import Address
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.rank import Layout
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.sim.loop import VirtualClock, run

NOBODY = Address("test", "", 0, "", 0)
PROMPT = tuple(range(50, 150))


def cost_s(plan: StepPlan) -> float:
    return 0.01


def make(pages: int = 64, cost: Callable[[StepPlan], float] = cost_s) -> tuple[Unified, ScriptedEngine]:
    layout = Layout("scripted", "1", "float32", 8, layers=2, kv_heads=1, head_dim=4)
    limits = EngineLimits(pages, 8, 4096, 50_000)
    engine = ScriptedEngine(layout, limits, metadata_rows=1, sleep=VirtualClock().sleep, cost_s=cost)
    return Unified(engine, ScriptedTexts(), chunk_tokens=32, batch_tokens=64, max_running=4), engine


async def ask(unified: Unified, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    spec = RequestSpec(1, prompt, Sampling(max_tokens=max_tokens), NOBODY)
    return [token.token_id async for token in unified.generate(spec)]


def test_many_requests_share_steps_and_every_page_returns() -> None:
    async def main() -> None:
        unified, engine = make()
        task = asyncio.create_task(unified.run())
        prompts = [PROMPT[i : i + 10 + 11 * i] for i in range(8)]
        answers = await asyncio.gather(*(ask(unified, prompt, 9) for prompt in prompts))
        assert answers == [list(engine.expected_tokens(prompt, 9)) for prompt in prompts]
        await asyncio.sleep(1)
        assert (await unified.status())["pages"]["free"] == 64
        task.cancel()

    run(main())


@pytest.mark.parametrize("pages", [13, 15, 20])
def test_a_pool_of_one_and_a_half_requests_serves_four(pages: int) -> None:
    """Case 38 in one process: 20 + 80 tokens are 13 pages of 8. All finish, some after a retraction."""

    async def main() -> None:
        unified, engine = make(pages=pages)
        task = asyncio.create_task(unified.run())
        prompts = [PROMPT[i : i + 20] for i in range(5)]
        answers = await asyncio.gather(*(ask(unified, prompt, 80) for prompt in prompts))
        assert answers == [list(engine.expected_tokens(prompt, 80)) for prompt in prompts]
        await asyncio.sleep(1)
        status = await unified.status()
        assert status["pages"]["free"] == pages and status["counts"]["retracted"] > 0
        assert status["queues"] == {"waiting": 0, "running": 0}
        task.cancel()

    run(main())


def test_readers_that_leave_while_their_requests_wait_run_or_are_retracted() -> None:
    async def main() -> None:
        unified, engine = make(pages=15)
        task = asyncio.create_task(unified.run())

        async def leave_after(count: int, prompt: tuple[int, ...]) -> None:
            tokens = unified.generate(RequestSpec(1, prompt, Sampling(max_tokens=80), NOBODY))
            for _ in range(count):
                await anext(tokens)
            await tokens.aclose()  # type: ignore[attr-defined]

        leaving = [asyncio.create_task(leave_after(at, PROMPT[at : at + 20])) for at in (3, 20, 31, 60)]
        waiting = [asyncio.create_task(ask(unified, PROMPT[at : at + 9], 50)) for at in range(4)]
        await asyncio.sleep(0.1)
        waiting[-1].cancel()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert answers[:3] == [list(engine.expected_tokens(PROMPT[at : at + 9], 50)) for at in range(3)]
        await asyncio.gather(*leaving)
        await asyncio.sleep(1)
        assert (await unified.status())["pages"]["free"] == 15
        task.cancel()

    run(main())


def test_a_reader_that_stops_early_frees_its_pages() -> None:
    async def main() -> None:
        unified, _ = make()
        task = asyncio.create_task(unified.run())
        tokens = unified.generate(RequestSpec(1, PROMPT, Sampling(max_tokens=200), NOBODY))
        async for _token in tokens:
            break
        await tokens.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        assert (await unified.status())["pages"]["free"] == 64
        task.cancel()

    run(main())


def test_what_never_fits_is_refused() -> None:
    async def main() -> None:
        unified, _ = make(pages=4)
        with pytest.raises(InvalidRequest, match="100 tokens; prefill takes at most 32"):
            await ask(unified, PROMPT, 5)

    run(main())


@pytest.mark.parametrize("stop", [True, False])
def test_when_the_actor_ends_everyone_is_told(stop: bool) -> None:
    """Requests that run, that wait, that lie in the mailbox, and those that come later."""

    def failing(plan: StepPlan) -> float:
        if plan.step == 3 and not stop:
            raise RuntimeError("the device has failed")
        return 0.01

    async def main() -> None:
        unified, _ = make(cost=failing)
        task = asyncio.create_task(unified.run())
        asks = [asyncio.create_task(ask(unified, PROMPT, 50)) for _ in range(8)]
        await asyncio.sleep(0.02)
        asks.append(asyncio.create_task(ask(unified, PROMPT, 50)))
        if stop:
            await asyncio.sleep(0.005)
            task.cancel()
        for answer in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(answer, RuntimeError)
        with pytest.raises(RuntimeError):
            await ask(unified, PROMPT, 5)
        await asyncio.gather(task, return_exceptions=True)

    run(main())
