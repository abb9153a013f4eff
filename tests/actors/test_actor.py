"""The base of all actors: what its spawned work and its links come to reaches it, and what it spawned ends with it."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import pytest

from kvferry.actors.actor import Actor, Crash
from kvferry.actors.settings import LinkSettings
from kvferry.sim.loop import run
from kvferry.sim.network import SimNetwork


class Spawner(Actor):
    """Spawns the work that it is posted."""

    def receive(self, item: Any) -> None:
        if asyncio.iscoroutine(item):
            self.spawn(item)
        else:
            super().receive(item)


def spawner(seed: int = 1) -> Spawner:
    links = SimNetwork(seed).open("a", LinkSettings())
    return Spawner(links, links._clock, mailbox=16)


def test_spawned_work_that_fails_is_the_failure_of_its_actor() -> None:
    async def main() -> None:
        actor = spawner()

        async def work() -> None:
            await asyncio.sleep(1)
            raise ArithmeticError("a mistake of the work")

        actor._mailbox.put(work())
        with pytest.raises(ArithmeticError, match="a mistake of the work"):
            await actor.run()

    run(main())


def test_a_failure_of_the_links_is_the_failure_of_their_actor() -> None:
    async def main() -> None:
        actor = spawner()
        actor.on_failure(ArithmeticError("a mistake of the links"))
        with pytest.raises(ArithmeticError, match="a mistake of the links"):
            await actor.run()

    run(main())


def test_an_actor_that_fails_in_the_turn_in_which_it_spawns_leaves_no_work_that_never_began() -> None:
    """As a rank does that looks for the registry and ends with its instance in one tick. Python warns of a coroutine
    that nobody has awaited when it is collected."""
    begun: list[str] = []

    async def main() -> None:
        actor = spawner()

        async def work() -> None:
            begun.append("work")

        actor._mailbox.put(work())
        actor._mailbox.put(Crash(ArithmeticError("a mistake of the actor")))
        with pytest.raises(ArithmeticError):
            await actor.run()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(main())
        gc.collect()
    assert begun == [] and [str(warning.message) for warning in told] == []
