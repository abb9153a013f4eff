"""A process that is replaced behind its address: who it is decides, not where it is or what it is called."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvferry.actors.settings import DecodeSettings, FaultSettings, LinkSettings, PrefillSettings
from kvferry.protocol.errors import PeerError
from kvferry.sim.checkers import Watcher, check_alive
from kvferry.sim.loop import VirtualClock, run
from kvferry.sim.system import SimOptions, SimProcess, SimSystem

PROMPT = tuple(range(300, 400))
OTHER = tuple(range(700, 760))
LINKS = LinkSettings(heartbeat_s=1.0, silence_s=3.0)
SIZES: dict[str, Any] = {
    "prefill": PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=40), "decode": DecodeSettings(pool_pages=40)
}  # fmt: skip


def right(system: SimSystem, prompt: tuple[int, ...], count: int) -> list[int]:
    return list(system.engine("decode-0").expected_tokens(prompt, count))


def all_alive(system: SimSystem) -> None:
    for name, process in system.processes.items():
        check_alive(name, process)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_case_31_the_only_one_is_killed_and_started_again(client_of: Any, wait_until: Any, victim: str) -> None:
    """Case 31: the only prefill (or decode) is killed and another is started under its name and at its address; nobody
    touches the other side. What was in flight fails with an error that names it, what prefill is no longer needed for
    goes on, and within a heartbeat of the new one's start requests are served, with pools of which nothing is missing.
    """

    async def main() -> None:
        async with SimSystem(SimOptions(links=LINKS, faults=FaultSettings(delay_ms=50))) as system:
            client, clock = await client_of(system), VirtualClock()
            survivor = system.processes["decode-0" if victim == "prefill-0" else "prefill-0"]
            address, before = system.processes[victim].address, survivor.address
            running = client.open(OTHER, max_tokens=40)
            streaming = asyncio.create_task(client.collect(running))
            await wait_until(lambda: running.decode is not None)
            moving = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: any(room.sending.handles for room in system.prefill().rooms.values()))
            queued = asyncio.create_task(client.ask(PROMPT[::-1], max_tokens=5))
            await asyncio.sleep(0.002)
            system.kill(victim)
            for task in (moving, queued):
                with pytest.raises(PeerError, match=victim):
                    await task
            if victim == "prefill-0":
                assert [token.token_id for token in await streaming] == right(system, OTHER, 40)
            else:
                with pytest.raises(PeerError, match=victim):
                    await streaming
            new = system.spawn(victim.split("-")[0], victim)
            began_s = clock.now_s()
            assert (new.address.name, new.address.endpoint) == (address.name, address.endpoint)
            assert new.address.incarnation != address.incarnation and survivor.address == before
            await wait_until(lambda: system.router.network.is_up(new.address.incarnation), 1.0)
            assert await client.ask(PROMPT, max_tokens=5) == right(system, PROMPT, 5)
            assert clock.now_s() - began_s < 1.0 + 0.5, "a heartbeat, and the request itself"
            all_alive(system)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def second(system: SimSystem, role: str) -> tuple[SimProcess, SimProcess]:
    """Start another process of the name of one that lives, at another endpoint and with a pool of another size."""
    name = f"{role}-0"
    old = system.processes.pop(name)
    system.processes["old"] = old
    options, opened = system.options, system.network.open
    system.options = replace(options, **{role: SIZES[role]})
    system.network.open = partial(opened, endpoint=f"sim://{name}-new")  # type: ignore[method-assign]
    new = system.spawn(role, name)
    system.options, system.network.open = options, opened  # type: ignore[method-assign]
    return old, new


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_case_32_the_replacement_has_the_same_name_while_the_old_one_still_answers(
    client_of: Any, wait_until: Any, role: str
) -> None:
    """Case 32: the registry has lost the old process, which lives, is linked to everybody else and answers them. The
    new one has its name and other memory. Each room goes on with the process that it was opened with; the new one is
    known as another, with its own descriptor, and gets what is asked from then on; of the old one nothing is kept when
    it has gone. The checker sees every copy land in a page that is leased to its writer.
    """

    async def main() -> None:
        async with SimSystem(SimOptions(links=LINKS, faults=FaultSettings(delay_ms=800))) as system:
            watcher = Watcher(system)
            client = await client_of(system)
            assert await client.ask(PROMPT[:30], max_tokens=2) == right(system, PROMPT[:30], 2)
            moving = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: any(room.sending.handles for room in system.prefill().rooms.values()))
            old, new = second(system, role)
            registry = system.processes["registry"]
            system.network.cut(old.address, registry.address)
            incarnations = {rank.address.incarnation for rank in system.router.roster.ranks}
            assert new.address.incarnation not in incarnations, "the place is the old one's, as long as it is known"

            def known() -> set[int]:
                return {rank.address.incarnation for rank in system.router.roster.ranks if rank.role == role}

            await wait_until(lambda: known() == {new.address.incarnation}, 10)
            assert await moving == right(system, PROMPT, 5), "its room is with the old one, to its end"
            watcher.look()
            at = new.actor
            await wait_until(lambda: system.router.network.is_up(new.address.incarnation), 5)
            assert await client.ask(OTHER, max_tokens=5) == right(system, OTHER, 5)
            assert at.forward.done > 0, "by the new one"  # type: ignore[attr-defined]
            watcher.look()
            ranks = system.prefill()._ranks
            both = {old.address.incarnation, new.address.incarnation}
            if role == "decode":
                assert set(ranks._data_plane._peers) == set(ranks._planner._pairings) == both
            system.network.kill(old.address)
            system.processes.pop("old").task.cancel()
            system.fabric.kill(old.address.incarnation)
            await asyncio.sleep(2)
            if role == "decode":
                assert set(ranks._data_plane._peers) == set(ranks._planner._pairings) == {new.address.incarnation}
            assert await client.ask(PROMPT, max_tokens=5) == right(system, PROMPT, 5)
            watcher.look()
            all_alive(system)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))


def test_case_32_a_destination_of_the_old_memory(client_of: Any, wait_until: Any) -> None:
    """Case 32: a descriptor is bound to the incarnation that gave it. The new decode's word with the old one's memory
    in it is refused before a byte is written.
    """

    async def main() -> None:
        async with SimSystem(SimOptions(links=LINKS)) as system:
            watcher = Watcher(system)
            client = await client_of(system, attempts=1)
            assert await client.ask(PROMPT[:30], max_tokens=2) == right(system, PROMPT[:30], 2)
            writer = system.prefill().network.address.incarnation
            old = system.decode().writers.descriptors([(writer, 0)], {writer: ""})
            assert old is not None
            system.kill("decode-0")
            new = system.spawn("decode", "decode-0")
            await asyncio.sleep(1)
            writers = system.decode().writers
            descriptors = writers.descriptors
            writers.descriptors = lambda pairs, hosts: old  # type: ignore[method-assign]
            copies = watcher.writes.copies
            with pytest.raises(PeerError, match=r"the destination's agent is of process [0-9a-f]{16}, not decode's"):
                await client.ask(PROMPT, max_tokens=5)
            assert watcher.writes.copies == copies
            writers.descriptors = descriptors  # type: ignore[method-assign]
            assert await client.ask(PROMPT, max_tokens=5) == right(system, PROMPT, 5)
            assert new is system.processes["decode-0"]
            all_alive(system)
            assert await system.settle(5), system.counts()

    run(asyncio.wait_for(main(), 120))
