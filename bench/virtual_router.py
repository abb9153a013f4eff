"""A policy under load in virtual time: the production actors, with engine costs that were measured on a real engine."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clients import first_tokens_s

from kvferry.actors.settings import DecodeSettings, LinkSettings, PrefillSettings, RouterSettings
from kvferry.cluster.config import Config
from kvferry.cluster.roles import load_engine
from kvferry.engine.contract import Engine, StepPlan
from kvferry.engine.contract import Sequence as Fed
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.messages import Roster
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimSystem

PAGE_SIZE = 16
CHUNK_TOKENS, BATCH_TOKENS = 256, 512
PAGES_EACH, LATE, FORWARDS = 80, 1024, 5  # of the measured sequences; a late chunk's start; forwards of each kind
LONG = 10  # a tenth of the prompts is this many times longer


@dataclass(frozen=True)
class Costs:
    """Seconds of a forward: of a prefill step by its tokens, of a decode step by its requests (both interpolated), and
    what each pair of a token and a token before its chunk adds in attention.
    """

    prefill: tuple[tuple[int, float], ...]
    decode: tuple[tuple[int, float], ...]
    attention_s: float

    def __call__(self, plan: StepPlan) -> float:
        tokens = sum(len(fed.token_ids) for fed in plan.sequences)
        if tokens == len(plan.sequences):
            return _interpolated(self.decode, tokens)
        pairs = sum(len(fed.token_ids) * fed.start for fed in plan.sequences)
        return _interpolated(self.prefill, tokens) + pairs * self.attention_s

    def prompt_s(self, tokens: int) -> float:
        """A whole prompt, chunk by chunk and alone."""
        starts = range(0, tokens, CHUNK_TOKENS)
        sizes = [(min(CHUNK_TOKENS, tokens - start), start) for start in starts]
        return sum(_interpolated(self.prefill, size) + size * start * self.attention_s for size, start in sizes)


def _interpolated(points: tuple[tuple[int, float], ...], x: int) -> float:
    """Along straight lines through the points, the first and the last continued."""
    at = next((i for i in range(1, len(points)) if x <= points[i][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(1e-4, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


async def measured_costs() -> Costs:
    """Of the packaged model, on one thread of this machine."""
    _, engine = await asyncio.to_thread(load_engine, Config(), "decode", 16 * PAGES_EACH, 16, 1)
    try:
        prefill = [(size, await _least_s(engine, [_fed(0, size, 0)])) for size in (16, 64, 128, CHUNK_TOKENS)]
        halves = [_fed(0, CHUNK_TOKENS, 0), _fed(1, CHUNK_TOKENS, 0)]
        prefill.append((2 * CHUNK_TOKENS, await _least_s(engine, halves)))
        late_s = await _least_s(engine, [_fed(0, CHUNK_TOKENS, LATE)])
        attention_s = max(0.0, late_s - prefill[3][1]) / (CHUNK_TOKENS * LATE)
        decode = [(n, await _least_s(engine, [_fed(key, 1, 200) for key in range(n)])) for n in (1, 4, 8, 16)]
        return Costs(_rising(prefill), _rising(decode), attention_s)
    finally:
        await engine.close()


def _fed(key: int, tokens: int, start: int) -> Fed:
    """A sequence in pages of its own."""
    pages = range(key * PAGES_EACH, (key + 1) * PAGES_EACH)
    return Fed(key, tuple(range(100, 100 + tokens)), start, tuple(pages), Sampling(1))


def _rising(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """More work takes at least as long: what contradicts that was measured while others had the processor."""
    least = [(size, min(s for _, s in points[at:])) for at, (size, _) in enumerate(points)]
    return tuple(least)


async def _least_s(engine: Engine, fed: list[Fed]) -> float:
    """The least processor time of several: what other processes on the machine take is no cost of the engine's."""
    times = []
    for step in range(FORWARDS):
        began_s = time.process_time()
        await engine.step(StepPlan(step, tuple(fed)))
        times.append(time.process_time() - began_s)
    return min(times)


@dataclass(frozen=True)
class Load:
    """`utilisation` of the prefill instances, by what their prompts cost one by one."""

    requests: int
    prefills: int
    decodes: int
    routers: int = 1
    utilisation: float = 0.75
    short_tokens: tuple[int, int] = (50, 150)
    max_tokens: int = 16

    def prompts(self, seed: int) -> list[int]:
        """Lengths in tokens; one in ten is `LONG` times longer."""
        draw = random.Random(seed)
        return [draw.randint(*self.short_tokens) * (LONG if draw.random() < 0.1 else 1) for _ in range(self.requests)]

    def arrivals_s(self, seed: int, costs: Costs) -> list[float]:
        """Poisson, at the rate that gives the utilisation on average."""
        low, high = self.short_tokens
        mean_s = statistics.fmean(
            0.9 * costs.prompt_s(size) + 0.1 * costs.prompt_s(LONG * size) for size in range(low, high + 1, 5)
        )
        rate = self.utilisation * self.prefills / mean_s
        draw, now_s, times = random.Random(seed + 1), 0.0, []
        for _ in range(self.requests):
            now_s += draw.expovariate(rate)
            times.append(now_s)
        return times


class DirectBackend:
    """`kvferry.serve.gateway.Backend` by calling the simulated routers in turn."""

    def __init__(self, system: SimSystem) -> None:
        self._system, self._turn = system, 0

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        routers = self._system.routers()
        self._turn += 1
        return await routers[self._turn % len(routers)].submit(spec, attempt)

    async def roster(self) -> Roster:
        return self._system.router.roster

    async def status(self) -> dict[str, Any]:
        return {}

    async def room(self, room: int) -> dict[str, Any] | None:
        return None


def ttfts_s(policy: str, load: Load, costs: Costs, seed: int) -> list[float]:
    """Time to first token of each request, in virtual seconds. The same seed gives each policy the same requests."""
    options = SimOptions(
        seed=seed,
        prefill=PrefillSettings(
            instances=load.prefills, chunk_tokens=CHUNK_TOKENS, batch_tokens=BATCH_TOKENS, pool_pages=2048
        ),
        decode=DecodeSettings(instances=load.decodes, pool_pages=2048),
        router=RouterSettings(instances=load.routers, policy=policy, max_requests=4096, queue_limit=4096),
        page_size=PAGE_SIZE,
        cost_s=costs,
    )
    return run(_measured(options, load.prompts(seed), load.arrivals_s(seed, costs), load.max_tokens))


async def _measured(
    options: SimOptions, prompts: Sequence[int], arrivals_s: Sequence[float], max_tokens: int
) -> list[float]:
    async with SimSystem(options) as system:
        clock = VirtualClock()
        network = system.network.open("front-0", LinkSettings())
        front = Front(
            network, DirectBackend(system), lambda _: (), clock, system.network.random, FrontInfo("scripted"),
            FrontMetrics(),
        )  # fmt: skip
        await front.start()
        return await first_tokens_s(front, clock, prompts, arrivals_s, max_tokens)
