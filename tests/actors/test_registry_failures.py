"""What keeps an instance from starting is told with what is missing, until it registers (virtual time)."""

from __future__ import annotations

import asyncio

import msgspec

from kvferry.actors.actor import FromPeer
from kvferry.actors.bootstrap.registry import Registry
from kvferry.protocol.messages import Register
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem


def test_failures_to_start_are_part_of_what_is_missing() -> None:
    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            registry = system.processes["registry"].actor
            assert isinstance(registry, Registry)
            system.kill("decode-0")
            await registry.start_failed("decode-0", "MemoryError: no room for the pool")
            await registry.start_failed("decode-0", "MemoryError: no room for the pool")
            await asyncio.sleep(1)
            told = "decode-0 could not start (2 times): MemoryError: no room for the pool"
            assert registry.roster().missing == ("decode: 0 of 1 instances are complete", told)
            assert system.router.roster.missing == registry.roster().missing
            system.spawn("decode", "decode-0")
            await asyncio.sleep(2)
            assert registry.roster().ready and registry.roster().missing == ()

    run(main())


def test_a_rank_that_can_never_register_is_told_with_its_reason() -> None:
    """Its process ends at the refusal and is started again, so nothing else would say why it is missing."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            registry = system.processes["registry"].actor
            assert isinstance(registry, Registry)
            info = registry.table.ranks[("decode-0", 0, 0, 0, 0)]
            system.kill("decode-0")
            await asyncio.sleep(1)
            peer = msgspec.structs.replace(info.address, incarnation=99)
            layout = msgspec.structs.replace(info.layout, head_dim=info.layout.head_dim * 2)
            registry.receive(FromPeer(peer, Register(msgspec.structs.replace(info, address=peer, layout=layout))))
            complete, told = registry.roster().missing
            assert complete == "decode: 0 of 1 instances are complete"
            assert told.startswith("decode-0 could not start (1 times): head_dim of decode-0 is ")

    run(main())
