"""The registry's memory of rooms' DP ranks: bounded in number and in time; and who tells it (virtual time)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvferry.actors.bootstrap.registry import Registry
from kvferry.actors.bootstrap.room_ranks import RoomRanks
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.settings import PrefillSettings, RouterSettings
from kvferry.protocol.messages import OpenPrefill, Register
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimProcess, SimSystem


def test_a_room_has_one_rank_for_good() -> None:
    ranks = RoomRanks(follow=False)
    assert ranks.refuse(7, 1, 2, 0.0) is None
    ranks.keep(7, 1, 0.0)
    assert ranks.refuse(7, 1, 2, 1.0) is None
    assert ranks.refuse(7, 0, 2, 1.0) == "room 7 is rank 1's already"
    assert ranks.of([7, 8], 1.0) == {7: 1}


@pytest.mark.parametrize(("room", "dp_rank"), [(4, 0), (5, 1), (2**63 - 1, 3)])
def test_where_rooms_follow_their_id_no_other_rank_is_taken(room: int, dp_rank: int) -> None:
    ranks = RoomRanks(follow=True)
    assert ranks.refuse(room, dp_rank, 4, 0.0) is None
    other = (dp_rank + 1) % 4
    refused = ranks.refuse(room, other, 4, 0.0)
    assert refused == f"follow_bootstrap_room conflict: room {room} belongs to rank {dp_rank}, not {other}"


@pytest.mark.parametrize(("room", "dp_rank"), [(-1, 0), (2**63, 0), (0, 2), (0, -1), (0, 10**9)])
def test_numbers_out_of_range_are_refused(room: int, dp_rank: int) -> None:
    assert "allowed" in (RoomRanks(follow=False).refuse(room, dp_rank, 2, 0.0) or "")


def test_it_forgets_by_its_own_clock_and_keeps_so_many() -> None:
    """Three places, ten seconds: of four rooms the oldest goes, and registering again prolongs nothing."""
    ranks = RoomRanks(limit=3, keep_s=10.0, follow=False)
    for room in range(4):
        ranks.keep(room, 0, float(room))
    assert ranks.of([0, 1, 2, 3], 3.0) == {1: 0, 2: 0, 3: 0} and len(ranks) == 3
    ranks.keep(1, 0, 9.0)
    assert ranks.of([1, 2, 3], 11.0) == {2: 0, 3: 0}
    ranks.drop_old(13.0)
    assert len(ranks) == 0


class DpSystem(SimSystem):
    """Its two prefills are DP ranks of one group, `prefill`."""

    def _wanted(self) -> dict[str, int]:
        return {"prefill": 1, "decode": 1}

    def spawn(self, role: str, name: str) -> SimProcess:
        process = super().spawn(role, name)
        if isinstance(process.actor, Prefill):
            place = {"instance": "prefill", "dp_rank": int(name[-1]), "dp_size": 2}
            process.actor.info = msgspec.structs.replace(process.actor.info, **place)
            process.actor.membership.change(Register(process.actor.info))
        return process


def opened_at(system: SimSystem) -> dict[int, int]:
    """Room -> the DP rank that was told to open it, from now on."""
    seen: dict[int, int] = {}
    for number in range(2):
        leader = system.prefill(number)
        handle = leader._on_message[OpenPrefill]

        def opening(router: Any, message: Any, number: int = number, handle: Any = handle) -> None:
            seen[message.room] = number
            handle(router, message)

        leader._on_message[OpenPrefill] = opening
    return seen


@pytest.mark.parametrize("choice", ["load", "follow_bootstrap_room"])
def test_the_router_tells_the_registry_where_nobody_could_know(choice: str, client_of: Any) -> None:
    """With `load` each room's rank is kept, for two minutes; where rooms follow their id there is nothing to keep."""

    async def main() -> None:
        prefill = PrefillSettings(instances=2, chunk_tokens=32, batch_tokens=64, pool_pages=64)
        async with DpSystem(SimOptions(prefill=prefill, router=RouterSettings(dp_choice=choice))) as system:
            used = opened_at(system)
            client = await client_of(system)
            lives = [client.open((1, 2, 3, number), max_tokens=2) for number in range(8)]
            await asyncio.gather(*map(client.collect, lives))
            registry = system.processes["registry"].actor
            assert isinstance(registry, Registry) and registry.rooms.follow == (choice != "load")
            rooms = [live.room for live in lives]
            assert used.keys() == set(rooms) and set(used.values()) == {0, 1}
            expected = used if choice == "load" else {}
            assert await registry.ranks_of_rooms(rooms) == expected
            await asyncio.sleep(121)
            assert len(registry.rooms) == 0 and registry.counts["dp ranks refused"] == 0

    run(main())
