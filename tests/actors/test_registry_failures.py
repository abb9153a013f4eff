"""What keeps an instance from starting is told with what is missing, until it registers (virtual time)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvferry.actors.actor import FromPeer
from kvferry.actors.bootstrap.registry import Registry
from kvferry.protocol.errors import KVFerryError
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


@pytest.mark.parametrize(("field", "other"), [("dtype", "bfloat16"), ("layers", 4), ("kv_heads", 4), ("head_dim", 8)])
def test_case_44_a_pair_that_does_not_match_serves_nobody(client_of: Any, field: str, other: object) -> None:
    """Case 44: its registration is refused with both values, and requests are refused without a room anywhere."""

    async def main() -> None:
        async with SimSystem(SimOptions()) as system:
            registry = system.processes["registry"].actor
            assert isinstance(registry, Registry)
            info = registry.table.ranks[("decode-0", 0, 0, 0, 0)]
            client = await client_of(system, recovery_s=0.0)
            assert len(await client.ask((1, 2, 3), max_tokens=2)) == 2
            system.kill("decode-0")
            await asyncio.sleep(1)
            layout = msgspec.structs.replace(info.layout, **{field: other})
            peer = msgspec.structs.replace(info.address, incarnation=99)
            registry.receive(FromPeer(peer, Register(msgspec.structs.replace(info, address=peer, layout=layout))))
            ours = getattr(info.layout, field)
            assert f"{field} of decode-0 is {other!r}, but prefill-0 registered with {ours!r}" in str(
                registry.roster().missing
            )
            with pytest.raises(KVFerryError) as refused:
                await client.ask((1, 2, 3), max_tokens=2)
            assert refused.value.code == "unavailable"
            assert "decode: 0 of 1 instances are complete" in str(refused.value)
            assert list(system.router.guests) == [] and not system.prefill().rooms

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
