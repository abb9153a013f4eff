"""A policy under a small load on real Ray, with the real model: one cluster, a router actor for each policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from clients import first_tokens_s
from local_ray import local_ray
from msgspec.structs import replace

from kvferry.actors.settings import DecodeSettings, PrefillSettings, RouterSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.config import Config
from kvferry.cluster.hosting import CONCURRENT_CALLS, RemoteHost
from kvferry.cluster.names import NAMESPACE, REGISTRY
from kvferry.cluster.network import open_network
from kvferry.cluster.secret import load_secret, make_secret
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.messages import Roster
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo

START_S = 240.0


class OneRouter:
    """`kvferry.serve.gateway.Backend` that uses the router it was given."""

    def __init__(self, router: Any) -> None:
        self.router = router

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        outcome: Outcome = await self.router.call.remote("submit", spec, attempt)
        return outcome

    async def roster(self) -> Roster:
        raise NotImplementedError("nobody asks here")

    async def status(self) -> dict[str, Any]:
        return {}

    async def room(self, room: int) -> dict[str, Any] | None:
        return None

    async def pools(self) -> dict[str, Any]:
        return {}

    async def scale(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        raise NotImplementedError("the pools are as large as they were made")


@asynccontextmanager
async def cluster(policies: Sequence[str], prefills: int, decodes: int) -> AsyncIterator[dict[str, Any]]:
    """Policy -> router, all of them linked to all instances."""
    config = Config(
        prefill=PrefillSettings(instances=prefills, pool_pages=256), decode=DecodeSettings(instances=decodes)
    )
    make_secret(None)
    with local_ray():
        numbers = {"prefill": prefills, "decode": decodes}
        names = [(role, f"{role}-{i}") for role, number in numbers.items() for i in range(number)]
        registry = _start("registry", REGISTRY, config)
        instances = [_start(role, name, config) for role, name in names]  # they live as long as their handles
        routers = {
            policy: _start("router", f"router-{policy}", replace(config, router=RouterSettings(policy=policy)))
            for policy in policies
        }
        async with asyncio.timeout(START_S):
            for router in routers.values():
                await _linked(router, len(instances))
            await registry.call.remote("want", numbers, [name for _, name in names])
        yield routers


def _start(role: str, name: str, config: Config) -> Any:
    options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": CONCURRENT_CALLS}
    return RemoteHost.options(**options).remote(role, name, config.to_bytes())


async def _linked(router: Any, instances: int) -> None:
    while True:
        status = await router.call.remote("status")
        if sum(instance["report_age_s"] is not None for instance in status["instances"]) == instances:
            return
        await asyncio.sleep(0.5)


async def ttfts_s(router: Any, prompts: Sequence[int], arrivals_s: Sequence[float], max_tokens: int) -> list[float]:
    """Time to first token of each request, in seconds."""
    clock, random = SystemClock(), SystemRandom()
    name = f"front-{random.bits(32):08x}"
    network = await open_network(name, "127.0.0.1", Config().links, clock, random, load_secret(None))
    front = Front(
        network, OneRouter(router), lambda _: (), clock, random, FrontInfo("smollm2-135m"), FrontMetrics()
    )  # fmt: skip
    await front.start()
    try:
        return await first_tokens_s(front, clock, prompts, arrivals_s, max_tokens)
    finally:
        await front.close()
