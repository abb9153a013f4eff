"""Pools that scale while requests run: who comes, who goes, and that no client notices (virtual time)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.actors.bootstrap.registry import Registry
from kvferry.actors.leader import Leader
from kvferry.actors.settings import (
    DecodeSettings,
    FaultSettings,
    LinkSettings,
    PrefillSettings,
    RouterSettings,
    UnifiedSettings,
)
from kvferry.protocol.errors import InvalidRequest, PeerError, Unavailable
from kvferry.serve.gateway import limits_of
from kvferry.sim.loop import run
from kvferry.sim.system import SimOptions, SimSystem

PROMPT = tuple(range(700, 760))
OPTIONS = SimOptions(decode=DecodeSettings(pool_pages=256), faults=FaultSettings(delay_ms=5), keep=True, drain_s=10.0)
TWO = replace(OPTIONS, decode=DecodeSettings(instances=2))
THREE = replace(OPTIONS, decode=DecodeSettings(pool_pages=256, instances=3))


class Streams:
    """Some requests, and what each must get: what an undisturbed request gets."""

    def __init__(self, system: SimSystem, client: Any, count: int, max_tokens: int, name: str = "decode-0") -> None:
        self.prompts = [PROMPT[i:] for i in range(count)]
        self.right = [system.engine(name).expected_tokens(prompt, max_tokens) for prompt in self.prompts]
        self.lives = [client.open(prompt, max_tokens=max_tokens) for prompt in self.prompts]
        self.tasks = [asyncio.create_task(client.collect(live)) for live in self.lives]

    async def all_are_right(self) -> None:
        for right, tokens in zip(self.right, await asyncio.gather(*self.tasks), strict=True):
            assert [token.index for token in tokens] == list(range(len(right)))
            assert tuple(token.token_id for token in tokens) == tuple(right)
            assert "".join(token.text for token in tokens) == "".join(f"<{i}>" for i in right)


def baseline(row: dict[str, Any], total: int = 256) -> bool:
    zero = {"owned": 0, "leased": 0, "cached": 0, "quarantined": 0, "retired": 0}
    return bool(row["pages"] == {"total": total, "free": total} | zero)


def left(progress: dict[str, Any]) -> list[str]:
    return [row["name"] for row in progress["left"]]


def by_phase(progress: dict[str, Any], role: str) -> dict[str, int]:
    return {name: number for name, number in progress["roles"][role].items() if number}


async def drained_to_one(system: SimSystem, wait_until: Any) -> str:
    """Want one of two decodes; the name of the one that is draining now."""
    system.pools.scale({"decode": 1})
    await wait_until(lambda: system.pools.progress()["roles"]["decode"]["draining"] == 1)
    (victim,) = [member.name for member in system.pools.members.values() if member.going]
    return victim


async def one_of_two_leaves(options: SimOptions, client_of: Any, role: str, at_s: float, pages: int, name: str) -> None:
    """Eight streams, and `at_s` later one instance of `role` less: no token is missing, and no page left behind."""
    async with SimSystem(options) as system:
        client = await client_of(system, attempts=1)
        streams = Streams(system, client, 8, 120, name)
        await asyncio.sleep(at_s)
        progress = await system.scaled(90, **{role: 1})
        (row,) = progress["left"]
        assert progress["done"] and baseline(row, pages), row
        await streams.all_are_right()
        assert await system.settle(10), system.counts()


def test_up_and_down_under_sixteen_streams(client_of: Any) -> None:
    """decode 1 -> 3 -> 1: every stream gets exactly its tokens; the two that leave have every page free."""

    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            client = await client_of(system, attempts=3)
            streams = Streams(system, client, 16, 200)
            await asyncio.sleep(0.5)
            grown = await system.scaled(decode=3)
            assert by_phase(grown, "decode") == {"wanted": 3, "registered": 3}
            assert {p for p in system.processes if p.startswith("decode")} == {"decode-0", "decode-1", "decode-2"}
            more = Streams(system, client, 16, 200)
            await asyncio.sleep(1)
            assert all(system.decode(i).running for i in range(3)), "the new ones serve"
            shrunk = await system.scaled(decode=1)
            assert by_phase(shrunk, "decode") == {"wanted": 1, "registered": 1, "left": 2} and shrunk["done"]
            await streams.all_are_right()
            await more.all_are_right()
            assert all(baseline(row) for row in shrunk["left"]), shrunk
            assert not {name for name in system.processes if name in left(shrunk)}
            registry = system.processes["registry"].actor
            assert isinstance(registry, Registry)
            assert {place[0] for place in registry.table.ranks} == {"prefill-0"} | {
                name for name in system.processes if name.startswith("decode")
            }
            assert registry.roster().ready
            assert await system.settle(10), system.counts()

    run(main())


@pytest.mark.parametrize("drain_s", [0.0, 0.3, 60.0])
@pytest.mark.parametrize("at_s", [0.01, 0.09, 0.4, 1.5])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_leaves_at_any_moment(client_of: Any, role: str, at_s: float, drain_s: float) -> None:
    """Whatever a room's phase, it ends here or goes on elsewhere; what is handed over is no failed attempt."""
    settings = {"decode": DecodeSettings(pool_pages=256, instances=2), "drain_s": drain_s}
    if role == "prefill":
        settings["prefill"] = PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64, instances=2)

    pages = 256 if role == "decode" else 64
    run(one_of_two_leaves(replace(OPTIONS, **settings), client_of, role, at_s, pages, "decode-0"))


def test_a_draining_instance_takes_nothing_and_finishes_what_it_has(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(THREE) as system:
            client = await client_of(system)
            lives = [client.open(PROMPT[i:], max_tokens=100) for i in range(3)]
            tasks = [asyncio.create_task(client.collect(live)) for live in lives]
            await wait_until(lambda: all(system.decode(i).running for i in range(3)))
            system.pools.scale({"decode": 2})
            await wait_until(lambda: bool(system.decode(2).leaving))
            assert [m.name for m in system.pools.members.values() if m.going] == ["decode-2"], "equal loads: the newest"
            rows = {row["name"]: row for row in system.pools.progress()["instances"]}
            await wait_until(lambda: system.pools.members["decode-2"].detail.startswith("1 rooms; hands over in"))
            assert rows["decode-2"]["phase"] == "draining" and not system.pools.progress()["done"]
            await wait_until(lambda: any(rank.draining for rank in system.router.roster.ranks))
            later = [client.open(PROMPT[i:], max_tokens=10) for i in range(6)]
            for live in later:
                await client.collect(live)
                assert live.decode is not None and live.decode.name != "decode-2"
            await asyncio.gather(*tasks)
            assert lives[2].attempt == lives[1].attempt == lives[0].attempt == 0, "nothing was handed over"
            await wait_until(lambda: left(system.pools.progress()) == ["decode-2"])
            assert system.pools.progress()["left"][0]["handed_over"] == 0

    run(main())


def test_a_room_that_was_on_its_way_to_a_leaving_instance_is_refused_and_goes_elsewhere(
    client_of: Any, wait_until: Any
) -> None:
    """The router does not know yet: the refusal costs no attempt, and is not repeated."""

    async def main() -> None:
        async with SimSystem(TWO) as system:
            client = await client_of(system, attempts=1)
            registry = system.processes["registry"].address
            system.network.cut(registry, system.router.network.address)
            await system.decode(0).drain(60.0)
            await wait_until(lambda: bool(system.decode(0).leaving))
            for _ in range(3):
                right = list(system.engine("decode-1").expected_tokens(PROMPT, 5))
                assert await client.ask(PROMPT, max_tokens=5) == right
            assert system.decode(0).counts["rooms refused"] == 1
            assert system.router.roster.ready and not any(rank.draining for rank in system.router.roster.ranks)

    run(main())


def test_after_the_limit_running_requests_are_handed_over_at_once(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(replace(TWO, drain_s=2.0)) as system:
            client = await client_of(system, attempts=1)
            streams = Streams(system, client, 2, 300)
            await asyncio.sleep(1)
            began_s = asyncio.get_running_loop().time()
            progress = await system.scaled(decode=1)
            took_s = asyncio.get_running_loop().time() - began_s
            assert 2.0 < took_s < 4.0, "the limit, and half a second of quiet"
            (row,) = progress["left"]
            assert row["handed_over"] == 1 and baseline(row, 1280)
            await streams.all_are_right()
            assert sorted(live.attempt for live in streams.lives) == [0, 1]
            assert await system.settle(10)

    run(main())


@pytest.mark.parametrize("restarted", [False, True])
def test_kill_9_of_a_draining_instance(client_of: Any, wait_until: Any, restarted: bool) -> None:
    """Its requests go on elsewhere, and it does not come back; not even if Ray is quick to start it again."""

    async def main() -> None:
        async with SimSystem(TWO) as system:
            client = await client_of(system, attempts=3)
            streams = Streams(system, client, 4, 200)
            await asyncio.sleep(0.5)
            victim = await drained_to_one(system, wait_until)
            await asyncio.sleep(0.5)
            system.kill(victim)
            if restarted:
                system.spawn("decode", victim)
            await wait_until(lambda: left(system.pools.progress()) == [victim])
            (row,) = system.pools.progress()["left"]
            assert "before it had drained" in row["detail"] and row["pages"] is None
            await asyncio.sleep(3)
            assert victim not in system.processes and system.pools.progress()["done"]
            await streams.all_are_right()
            assert await system.settle(10)

    run(main())


def test_a_draining_instance_that_does_not_answer_is_ended_after_its_limits(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(TWO) as system:
            client = await client_of(system, attempts=3)
            streams = Streams(system, client, 4, 200)
            await asyncio.sleep(0.5)
            victim = await drained_to_one(system, wait_until)
            await asyncio.sleep(0.5)
            system.network.stop(system.processes[victim].address)
            await wait_until(lambda: system.pools.members[victim].detail == "does not answer")
            await streams.all_are_right()  # the links are silent for 10 s, then the requests go on elsewhere
            await wait_until(lambda: left(system.pools.progress()) == [victim], 60)
            assert system.pools.progress()["done"]

    run(main())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_last_of_a_role_leaves_and_one_comes_back(client_of: Any, wait_until: Any, role: str) -> None:
    """Case 56: 0 is allowed: requests wait for a replacement, or are answered 503 that says so; it recovers by
    itself."""

    async def main() -> None:
        async with SimSystem(replace(OPTIONS, drain_s=1.0)) as system:
            client = await client_of(system, attempts=3)
            streams = Streams(system, client, 4, 150)
            await asyncio.sleep(0.5)
            gone = await system.scaled(**{role: 0})
            assert gone["done"] and left(gone) == [f"{role}-0"]
            told = f"{role}: none is wanted; `kvferry scale {role}=1` asks for one"
            assert system.router.roster.missing == (told,) and not system.router.roster.ready
            with pytest.raises(PeerError, match="none is wanted") as caught:
                await client.ask(PROMPT, max_tokens=5)
            assert caught.value.http_status == 503
            back = await system.scaled(**{role: 1})
            assert back["done"] and f"{role}-1" in system.processes, "names are not used twice"
            if role == "decode":
                streams.right = [system.engine("decode-1").expected_tokens(p, 150) for p in streams.prompts]
            await streams.all_are_right()
            assert await system.settle(10)

    run(main())


def test_nobody_comes_back_for_what_was_handed_over(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(replace(OPTIONS, drain_s=0.0)) as system:
            client = await client_of(system, attempts=3)
            live = client.open(PROMPT, max_tokens=300)
            await live.take()
            await system.scaled(decode=0)
            with pytest.raises(Unavailable, match=r"no pair can serve: decode: none is wanted.*no later attempt"):
                await client.collect(live)

    run(main())


def test_a_client_that_leaves_during_the_drain_is_not_waited_for(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(replace(TWO, drain_s=60.0)) as system:
            client = await client_of(system)
            lives = [client.open(PROMPT[i:], max_tokens=400) for i in range(2)]
            await wait_until(lambda: all(live.stream.next_index > 3 for live in lives))
            await drained_to_one(system, wait_until)
            for live in lives:
                client.front.close_request(live)
            began_s = asyncio.get_running_loop().time()
            await wait_until(lambda: system.pools.progress()["done"])
            assert asyncio.get_running_loop().time() - began_s < 2.0
            (row,) = system.pools.progress()["left"]
            assert baseline(row, 1280) and row["handed_over"] == 0

    run(main())


def test_a_second_drain_keeps_the_earlier_end(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            decode = system.decode()
            await decode.drain(5.0)
            await decode.drain(60.0)
            await wait_until(lambda: bool(decode.leaving))
            assert 4.5 < (await decode.drained())["left_s"] <= 5.0
            await decode.drain(1.0)
            await asyncio.sleep(0.1)
            state = await decode.drained()
            assert state["left_s"] <= 1.0 and state["draining"]

    run(main())


def test_scaling_up_while_another_drains_starts_a_new_one(client_of: Any, wait_until: Any) -> None:
    """Draining is not taken back. With no place left the new one waits for the place of the one that leaves."""

    async def main() -> None:
        options = replace(OPTIONS, decode=DecodeSettings(pool_pages=256, instances=2), slots=3, drain_s=3.0)
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=3)
            streams = Streams(system, client, 8, 300)
            await asyncio.sleep(0.5)
            victim = await drained_to_one(system, wait_until)
            system.pools.scale({"decode": 2})
            await wait_until(lambda: bool(system.pools.progress()["missing"]))
            assert system.pools.progress()["missing"] == [
                "decode: 2 wanted, 1 placed; decode-2 needs 1 slot, there are 3, 3 are taken"
            ]
            await wait_until(lambda: system.pools.progress()["done"])
            assert victim not in system.processes and "decode-2" in system.processes
            assert system.pools.progress()["missing"] == []
            await streams.all_are_right()
            assert await system.settle(10)

    run(main())


def test_what_cannot_be_placed_is_told_and_can_be_taken_back(wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(replace(OPTIONS, slots=3)) as system:
            stuck = await system.scaled(5, decode=4)
            assert not stuck["done"] and by_phase(stuck, "decode") == {"wanted": 4, "placing": 2, "registered": 2}
            why = "needs 1 slot, there are 3, 3 are taken"
            assert stuck["missing"] == [f"decode: 4 wanted, 2 placed; decode-2 {why}; decode-3 {why}"]
            back = await system.scaled(decode=2)
            assert back["done"] and back["missing"] == [] and sorted(left(back)) == ["decode-2", "decode-3"]
            assert {name for name in system.processes if "decode" in name} == {"decode-0", "decode-1"}

    run(main())


def test_one_that_is_still_starting_goes_at_once_and_before_one_that_serves(wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(replace(OPTIONS, start_s=30.0)) as system:
            system.pools.scale({"decode": 2})
            await wait_until(lambda: system.pools.progress()["roles"]["decode"]["starting"] == 1)
            began_s = asyncio.get_running_loop().time()
            progress = await system.scaled(decode=1)
            assert asyncio.get_running_loop().time() - began_s < 1.0 and left(progress) == ["decode-1"]
            await asyncio.sleep(40)
            assert "decode-1" not in system.processes

    run(main())


def test_one_that_crashed_goes_before_one_that_serves(wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(TWO) as system:
            assert (await system.scaled(decode=2))["done"]
            system.kill("decode-0")  # and Ray has not yet started it again
            await wait_until(lambda: not system.pools.progress()["done"])
            progress = await system.scaled(decode=1)
            assert progress["done"] and left(progress) == ["decode-0"] and "decode-1" in system.processes

    run(main())


def test_the_least_loaded_goes(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(THREE) as system:
            client = await client_of(system)
            lives = [client.open(PROMPT[i:], max_tokens=400) for i in range(3)]
            await wait_until(lambda: all(live.decode is not None for live in lives))
            idle = next(live for live in lives if live.decode.name == "decode-1")
            client.front.close_request(idle)
            await wait_until(lambda: not system.decode(1).rooms)
            progress = await system.scaled(decode=2)
            assert left(progress) == ["decode-1"]
            for live in lives:
                client.front.close_request(live)

    run(main())


def test_the_last_of_several_calls_wins(client_of: Any) -> None:
    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            for number in (4, 2, 6, 3):
                system.pools.scale({"decode": number})
                await asyncio.sleep(0.1)
            system.pools.scale({"prefill": 2, "router": 2})
            progress = await system.scaled(decode=2)
            assert progress["done"] and progress["version"] == 6
            assert progress["wanted"] == {"prefill": 2, "decode": 2, "unified": 0, "router": 2}
            roles = [name.split("-")[0] for name in system.processes]
            assert {role: roles.count(role) for role in ("prefill", "decode", "unified", "router")} == progress[
                "wanted"
            ]

    run(main())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({}, "a number for one or more of prefill, decode, unified, router"),
        ([2], "a number for one or more of"),
        ({"decod": 2}, "decod: there is no such role; the roles are prefill, decode, unified, router"),
        ({"decode": 65}, "decode: 65 is not acceptable; allowed: a whole number, at least 0 and at most 64"),
        ({"decode": -1}, "decode: -1 is not"),
        ({"decode": "2"}, "decode: '2' is not"),
        ({"decode": True}, "decode: True is not"),
        ({"decode": 1.0}, "decode: 1.0 is not"),
        ({"router": 0}, "router: 0 is not acceptable; allowed: a whole number, at least 1 and at most 64"),
        ({"prefill": 2, "decode": 99}, "decode: 99"),
        ({"registry": 2}, "registry: there is no such role"),
    ],
)
def test_numbers_that_are_refused_change_nothing(numbers: Any, words: str) -> None:
    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            with pytest.raises(InvalidRequest) as caught:
                system.pools.scale(numbers)
            assert words in str(caught.value)
            assert system.pools.wanted == {"prefill": 1, "decode": 1, "unified": 0, "router": 1}
            assert system.pools.version == 0

    run(main())


def test_a_registry_that_was_started_again_learns_the_present_number(wait_until: Any) -> None:
    """The truth about what is wanted is the keeper's, not the configuration's."""

    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            await system.scaled(decode=2)
            system.kill("registry")
            system.spawn("registry", "registry")
            registry = system.processes["registry"].actor
            assert isinstance(registry, Registry)
            told = "the controller has not yet said how many instances there should be"
            assert not registry.roster().ready and registry.roster().missing == (told,)
            await wait_until(lambda: registry.roster().ready)
            system.kill("decode-0")
            await wait_until(lambda: not registry.roster().ready)
            assert registry.roster().missing == ("decode: 1 of 2 instances are complete",)

    run(main())


def test_the_numbers_outlive_a_keeper_that_a_front_remembers() -> None:
    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            system.pools.restore({"decode": 2}, 7)
            system.pools.restore({"decode": 3}, 7)  # no newer: another front, with the same or older news
            assert system.pools.wanted["decode"] == 2 and system.pools.version == 7
            system.pools.scale({"decode": 1})
            assert system.pools.version == 8

    run(main())


def test_routers_come_and_go_under_load(client_of: Any, wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(replace(OPTIONS, router=RouterSettings(instances=1))) as system:
            client = await client_of(system, attempts=3)
            assert (await system.scaled(router=3))["done"]
            rounds = []
            for number in (1, 2, 1):
                streams = Streams(system, client, 8, 100)
                rounds.append(streams)
                await asyncio.sleep(0.02)
                assert (await system.scaled(router=number))["done"]
            for streams in rounds:
                await streams.all_are_right()
            assert len(system.routers()) == 1
            assert await system.settle(10)

    run(main())


def test_a_prefill_that_leaves_is_a_goodbye(client_of: Any) -> None:
    """Nobody is told of a loss: no page is quarantined at its peers, no attempt fails."""

    async def main() -> None:
        options = replace(
            OPTIONS, prefill=PrefillSettings(chunk_tokens=32, batch_tokens=64, pool_pages=64, instances=2)
        )
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=1)
            streams = Streams(system, client, 8, 60)
            await asyncio.sleep(0.1)
            progress = await system.scaled(prefill=1)
            await streams.all_are_right()
            (row,) = progress["left"]
            assert row["handed_over"] == 0 and all(live.attempt == 0 for live in streams.lives)
            assert await system.settle(5) and system.counts()["decode-0"].quarantined == 0
            assert await client.ask(PROMPT, max_tokens=3)

    run(main())


def test_pages_without_proof_are_told_and_do_not_keep_an_instance_for_ever(client_of: Any, wait_until: Any) -> None:
    """Decode leaves while a cut link keeps prefill's word away: with the process its memory is gone, so nobody can be
    given those pages; what was not proved is reported as it is."""
    options = replace(TWO, links=LinkSettings(silence_s=3.0), drain_s=5.0, faults=FaultSettings(delay_ms=8000))

    async def main() -> None:
        async with SimSystem(options) as system:
            client = await client_of(system, attempts=3)
            right = list(system.engine("decode-1").expected_tokens(PROMPT, 5))
            asking = asyncio.create_task(client.ask(PROMPT, max_tokens=5))
            await wait_until(lambda: any(room.machine.writes_open for room in system.prefill().rooms.values()))
            system.network.cut(system.prefill().network.address, system.decode(0).network.address)
            await system.decode(0).drain(0.0)  # so that it is not chosen again
            await wait_until(lambda: system.counts()["decode-0"].quarantined == 8)
            system.pools.members["decode-0"].going = True  # this one, whatever the loads are
            system.pools.scale({"decode": 1})
            began_s = asyncio.get_running_loop().time()
            await wait_until(lambda: left(system.pools.progress()) == ["decode-0"])
            assert asyncio.get_running_loop().time() - began_s < 11.0
            (row,) = system.pools.progress()["left"]
            assert row["pages"]["quarantined"] == 8 and row["pages"]["leased"] == 0
            assert await asking == right
            assert await system.settle(30), system.counts()

    run(main())


@pytest.mark.parametrize("drain_s", [0.0, 0.3, 60.0])
@pytest.mark.parametrize("at_s", [0.01, 0.09, 0.4])
def test_a_unified_instance_leaves_like_the_others(client_of: Any, at_s: float, drain_s: float) -> None:
    none = {"prefill": PrefillSettings(instances=0), "decode": DecodeSettings(instances=0)}
    options = replace(OPTIONS, unified=UnifiedSettings(instances=2, pool_pages=256), drain_s=drain_s, **none)
    run(one_of_two_leaves(options, client_of, "unified", at_s, 256, "unified-0"))


def test_limits_follow_the_roster() -> None:
    """A smaller instance that drains no longer bounds what a request may ask for."""

    async def main() -> None:
        async with SimSystem(replace(OPTIONS, decode=DecodeSettings(pool_pages=32, instances=2))) as system:
            assert limits_of(system.router.roster).total_tokens == 32 * 8
            system.options = replace(system.options, decode=DecodeSettings(pool_pages=16, instances=2))
            await system.scaled(decode=3)
            await asyncio.sleep(0.5)
            assert limits_of(system.router.roster).total_tokens == 16 * 8
            small = system.processes["decode-2"].actor
            assert isinstance(small, Leader)
            await small.drain(60.0)
            await asyncio.sleep(0.5)
            assert limits_of(system.router.roster).total_tokens == 32 * 8

    run(main())


def test_an_error_in_a_members_life_is_the_keepers_end(wait_until: Any) -> None:
    async def main() -> None:
        async with SimSystem(OPTIONS) as system:
            pools = system.pools
            await asyncio.sleep(1)

            async def start(_role: str, _name: str) -> str | None:
                raise OSError("no more processes")

            pools._hosting.start = start  # type: ignore[method-assign]
            pools.scale({"decode": 2})
            assert system._keeping is not None
            with pytest.raises(OSError, match="no more processes"):
                await system._keeping

    run(main())


@pytest.mark.parametrize("at_s", [0.0, 0.25, 0.5, 0.75])
def test_an_instance_that_has_lost_its_leader_is_started_again(at_s: float) -> None:
    """Its other rank ends with it, is started again by itself and registers: that alone is no instance."""
    options = SimOptions(
        keep=True, decode=DecodeSettings(pool_pages=64, pp=2), prefill=PrefillSettings(pool_pages=64), restart_s=0.1
    )

    async def main() -> None:
        async with SimSystem(options) as system:
            await asyncio.sleep(5 + at_s)
            system.kill("decode-0")
            await asyncio.sleep(10)
            assert {"decode-0", "decode-0.1"} <= system.processes.keys()
            assert system.pools.progress()["done"]

    run(main())
