"""Engines that can't go on without another rank: links tell whose end it is, and the instance ends as one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.actors.forward import LOST_S, EngineStalled
from kvferry.actors.prefill.follower import PrefillFollower
from kvferry.actors.ranks.ending import RankLost
from kvferry.actors.settings import DecodeSettings, LinkSettings, PrefillSettings
from kvferry.engine.contract import RanksLost, StepPlan, StepResult
from kvferry.protocol.errors import PeerError
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimProcess, SimSystem

PROMPT = tuple(range(300, 400))
OPTIONS = SimOptions(
    prefill=PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64, pp=2),
    decode=DecodeSettings(pool_pages=64, pp=2),
    links=LinkSettings(heartbeat_s=0.5, silence_s=2.0, resend_s=0.25),
)


def together(system: SimSystem, name: str) -> None:
    """From now on a forward of the instance's ranks fails where one of them is missing, as collectives do."""
    here = [process for n, process in system.processes.items() if n.partition(".")[0] == name]
    for process in here:
        process.actor.engine.step = _bound(process.actor.engine.step, system, here)  # type: ignore[attr-defined]


def _bound(step: Any, system: SimSystem, ranks: list[Any]) -> Any:
    async def bound(plan: StepPlan) -> StepResult:
        result: StepResult = await step(plan)
        if not all(rank in system.processes.values() for rank in ranks):
            raise RanksLost("a sum over the ranks of a stage: connection closed by peer")
        return result

    return bound


def lacks(process: SimProcess, why: str) -> None:
    """From now on the engine's forwards fail, as they do where another rank's part does not come in time."""

    async def lost(plan: StepPlan) -> StepResult:
        raise RanksLost(why)

    process.actor.engine.step = lost  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["prefill-0", "prefill-0.1", "decode-0", "decode-0.1"])
def test_a_rank_that_is_killed_under_a_forward(client_of: Any, wait_until: Any, served_again: Any, name: str) -> None:
    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            client, (instance, role) = await client_of(system), (name.partition(".")[0], name.partition("-")[0])
            together(system, instance)
            before = {n: process.address for n, process in system.processes.items()}
            leader = system.processes[instance].actor
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=60))
            await wait_until(lambda: leader.forward.running)  # type: ignore[attr-defined]
            system.kill(name)
            with pytest.raises(PeerError) as got:
                await asked
            assert instance in got.value.cause.text() or f"{before[name].incarnation:016x}" in got.value.cause.text()
            await wait_until(lambda: not {instance, f"{instance}.1"} & system.processes.keys())
            system.spawn(role, name)
            await wait_until(lambda: system.ready)
            after = {n: process.address for n, process in system.processes.items()}
            assert {n for n in before if before[n] != after[n]} == {instance, f"{instance}.1"}
            await served_again(system, client)

    run(main())


def test_a_forward_that_lacks_a_rank_though_all_links_are_up_ends_the_process(client_of: Any, wait_until: Any) -> None:
    """Long before the no-progress limit; the forward's pages can't be proved quiet in any other way."""

    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            client = await client_of(system)
            leader = system.processes["prefill-0"]
            lacks(leader, "rank 1: timed out")
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: leader.actor.forward.running)  # type: ignore[attr-defined]
            started_s = asyncio.get_running_loop().time()
            with pytest.raises(EngineStalled, match="forward 1 can't end: rank 1: timed out"):
                await leader.task
            waited_s = asyncio.get_running_loop().time() - started_s
            assert LOST_S - 1 < waited_s < LOST_S + 2 < OPTIONS.clocks.no_progress_s
            system.kill("prefill-0")
            with pytest.raises(PeerError):
                await asked
            await wait_until(lambda: "prefill-0.1" not in system.processes)

    run(main())


def test_a_follower_whose_engine_lacks_a_rank_waits_for_its_leaders_end(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            client = await client_of(system)
            follower = system.processes["decode-0.1"]
            lacks(follower, "rank 0: timed out")
            asked = asyncio.create_task(client.ask(PROMPT, max_tokens=60))
            await wait_until(lambda: follower.actor.counts["forwards that lack a rank"] == 1)
            assert not follower.task.done()
            system.kill("decode-0")
            with pytest.raises(PeerError):
                await asked
            with pytest.raises(RankLost, match=r"decode-0\.1 has lost its leader"):
                await follower.task

    run(main())


def test_a_rank_that_has_been_started_again_ends_the_instance_that_it_was_a_part_of(wait_until: Any) -> None:
    """Its host says so, if the link to its predecessor has not."""

    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            tasks = [system.processes[name].task for name in ("prefill-0", "prefill-0.1")]
            await system.prefill().replaced(1)
            for task, why in zip(tasks, ("started again", "lost its leader"), strict=True):
                with pytest.raises(RankLost, match=why):
                    await task
            await wait_until(lambda: system.ready)

    run(main())


def test_a_follower_joins_no_other_leader_than_the_one_that_its_engine_is_bound_to(
    monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    """The leader has ended between the two; another one has its name, with an engine of its own."""

    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            old = system.processes["prefill-0"].address
            system.kill("prefill-0")
            await wait_until(lambda: "prefill-0.1" not in system.processes)
            system.spawn("prefill", "prefill-0")
            made = PrefillFollower.__init__

            def bound(self: PrefillFollower, parts: Any) -> None:
                made(self, parts)
                self._bound_to = old

            with monkeypatch.context() as patch:
                patch.setattr(PrefillFollower, "__init__", bound)
                await wait_until(lambda: "prefill-0.1" in system.processes)
                follower = system.processes["prefill-0.1"]
            with pytest.raises(RankLost, match="has lost its leader prefill-0"):
                await follower.task
            assert not follower.actor.joined  # type: ignore[attr-defined]
            await wait_until(lambda: system.ready)

    run(main())
