"""The registry's HTTP routes: each status code, who may write, and that a refused write changes nothing.

The registry is the production actor on a network that a test plays; HTTP is real, on a loopback port.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from kvferry.actors.bootstrap.ranks import is_loopback
from kvferry.actors.bootstrap.registry import Registry
from kvferry.actors.bootstrap.room_ranks import RoomRanks
from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import LinkHandler, LostReason
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.network import open_network
from kvferry.cluster.registry_http import HttpRegistry
from kvferry.cluster.registry_routes import MAX_BODY_BYTES
from kvferry.cluster.secret import Secret, registry_token
from kvferry.protocol.address import Address
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.messages import Message, Register

SECRET = Secret(b"r" * 32)
TOKEN = registry_token(SECRET)


class FakeNetwork:
    """Every dial succeeds until a test says otherwise."""

    def __init__(self) -> None:
        self.address = Address("registry", "tcp://127.0.0.1:7000", 1, "host", 1)
        self.dialled: list[Address] = []
        self.handler: LinkHandler | None = None

    async def start(self, handler: LinkHandler) -> None:
        self.handler = handler

    def dial(self, address: Address) -> None:
        self.dialled.append(address)

    def send(self, incarnation: int, message: Message) -> bool:
        return True

    def is_up(self, incarnation: int) -> bool:
        return True

    def drop(self, incarnation: int) -> None: ...

    async def close(self) -> None: ...


class Stage:
    def __init__(self, follow: bool) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.network = FakeNetwork()
        self.registry = HttpRegistry(
            self.network, SystemClock(), 64, "127.0.0.1", self.port, TOKEN, rooms=RoomRanks(follow=follow)
        )
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30.0)
        self.writer = {"Authorization": f"Bearer {TOKEN}"}

    async def put(self, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
        body = {name: value for name, value in (ROUTE | changes).items() if value is not None}
        return await self.http.put("/route", json=body, headers=self.writer if headers is None else headers)

    async def get(self, dp: int, cp: int, tp: int, pp: int, **more: str) -> httpx.Response:
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        return await self.http.get("/route", params=dict(zip(names, (dp, cp, tp, pp), strict=True)) | more)


ROUTE: dict[str, Any] = {
    "instance": "prefill-0", "role": "prefill", "incarnation": "00000000000000aa", "host": "h", "pid": 5,
    "rank_ip": "127.0.0.1", "rank_port": 4000, "attn_tp_size": 1, "attn_tp_rank": 0, "pp_size": 1, "pp_rank": 0,
    "model": "m", "revision": "r", "kv_cache_dtype": "float32", "page_size": 16, "layers": 30, "kv_heads": 4,
    "head_dim": 64, "pages": 640,
}  # fmt: skip


async def running(follow: bool) -> AsyncIterator[Stage]:
    stage = Stage(follow)
    task = asyncio.create_task(stage.registry.run())
    async with asyncio.timeout(30.0):
        while True:
            try:
                assert (await stage.http.get("/health")).text == "OK"
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.01)
    yield stage
    task.cancel()
    await asyncio.wait({task})
    await stage.http.aclose()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async for stage in running(follow=False):
        yield stage


@pytest.fixture
async def following() -> AsyncIterator[Stage]:
    async for stage in running(follow=True):
        yield stage


def table(stage: Stage) -> dict[tuple[Any, ...], tuple[int, str]]:
    ranks = stage.registry.table.ranks
    return {place: (info.address.incarnation, info.address.endpoint) for place, info in ranks.items()}


# --- /route ----------------------------------------------------------------------------------------------------


async def test_a_rank_is_registered_found_and_gone_with_its_link(stage: Stage) -> None:
    assert (await stage.get(-1, -1, -1, -1)).status_code == 503
    answer = await stage.put()
    assert (answer.status_code, answer.text) == (200, "OK")
    assert (await stage.put()).status_code == 200  # once more is fine
    assert table(stage) == {("prefill-0", 0, 0, 0, 0): (0xAA, "tcp://127.0.0.1:4000")}
    assert [address.incarnation for address in stage.network.dialled] == [0xAA, 0xAA]
    assert (await stage.get(0, 0, 0, 0)).json() == {"rank_ip": "127.0.0.1", "rank_port": 4000}
    assert (await stage.get(-1, -1, -1, -1)).json() == {
        "instance": "prefill-0", "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 16,
        "kv_cache_dtype": "float32", "follow_bootstrap_room": False, "decode_allocation_policy": "early",
    }  # fmt: skip
    assert stage.network.handler is not None
    stage.network.handler.on_link_lost(stage.network.dialled[0], LostReason.REFUSED)
    await stage.registry.ranks_of_rooms([])  # a turn later
    assert table(stage) == {} and (await stage.get(0, 0, 0, 0)).status_code == 404


async def test_a_group_is_registered_when_its_last_rank_is(stage: Stage) -> None:
    for tp_rank in range(2):
        answer = await stage.get(-1, -1, -1, -1)
        assert answer.status_code == 503
        assert answer.text == f"Prefill server not fully registered yet ({tp_rank} workers registered)."
        changes = {"attn_tp_rank": tp_rank, "rank_port": 4000 + tp_rank, "incarnation": f"{tp_rank + 2:016x}"}
        assert (await stage.put(**changes, attn_tp_size=2)).status_code == 200
    assert (await stage.get(-1, -1, -1, -1)).json()["attn_tp_size"] == 2
    assert (await stage.get(0, 0, 1, 0)).json()["rank_port"] == 4001
    assert (await stage.get(0, 0, 2, 0)).status_code == 404
    assert (await stage.get(0, 0, 0, 0, instance="prefill-9")).status_code == 404


async def test_stages_may_be_uneven(stage: Stage) -> None:
    refused = await stage.put(pp_size=2, stages=[1, 1])
    assert refused.status_code == 400
    assert "stages are (1, 1); wanted 2" in refused.text
    layers = ROUTE["layers"]
    assert (await stage.put(pp_size=2, stages=[1, layers - 1])).status_code == 200
    (info,) = stage.registry.table.ranks.values()
    assert (info.slice.first_layer, info.slice.layers) == (0, 1)
    for stages in ([0, layers], ["1", layers - 1], 1):
        assert (await stage.put(pp_size=2, stages=stages)).status_code == 400


async def test_dp_is_the_systems_where_that_has_ranks(stage: Stage) -> None:
    assert (await stage.put(system_dp_size=2, system_dp_rank=1, attn_dp_size=4, attn_dp_rank=3)).status_code == 200
    assert list(table(stage)) == [("prefill-0", 1, 0, 0, 0)]


@pytest.mark.parametrize("query", ["", "prefill_dp_rank=0", "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0",
    "prefill_dp_rank=x&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0",
    "prefill_dp_rank=-2&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0",
    "prefill_dp_rank=9999999999&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"])  # fmt: skip
async def test_missing_or_strange_numbers_are_400(query: str, stage: Stage) -> None:
    answer = await stage.http.get(f"/route?{query}")
    assert answer.status_code == 400 and answer.text.startswith("Missing inputs for bootstrap server")


async def test_other_methods_and_paths(stage: Stage) -> None:
    for method in ("POST", "DELETE", "PATCH"):
        answer = await stage.http.request(method, "/route", headers=stage.writer)
        assert (answer.status_code, answer.text) == (405, "Method not allowed")
        assert answer.headers["allow"] == "GET, PUT"
    assert (await stage.http.get("/register_dp_rank")).status_code == 405
    assert (await stage.http.get("/elsewhere")).status_code == 404


# --- who may write ---------------------------------------------------------------------------------------------


async def test_case_13_nobody_else_writes_the_routing_table(stage: Stage) -> None:
    """Case 13: without the token, from outside of the group, over a live rank, against the group's sizes: refused, with
    the status that says why, and every route stays as it was."""
    assert (await stage.put(attn_tp_size=2)).status_code == 200
    before, roster = table(stage), stage.registry.roster()
    tokens: list[dict[str, str]] = [
        {}, {"Authorization": "Bearer"}, {"Authorization": f"Bearer {TOKEN[:-1]}"}, {"Authorization": TOKEN},
        {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"},
    ]  # fmt: skip
    for headers in tokens:
        for changes in ({}, {"rank_port": 6666}, {"attn_tp_rank": 1, "incarnation": "00000000000000bb"}):
            answer = await stage.put(headers, attn_tp_size=2, **changes)
            assert answer.status_code == 401 and "bearer" in answer.headers["www-authenticate"].lower()
            assert TOKEN[:8] not in answer.text
    refused = {
        "another process for a live rank": (409, {"incarnation": "00000000000000bb", "rank_port": 6666}),
        "an address outside of the group": (403, {"rank_ip": "203.0.113.9", "incarnation": "00000000000000bb",
                                                  "attn_tp_rank": 1}),
        "a live rank's own, moved elsewhere": (403, {"rank_ip": "203.0.113.9"}),
        "sizes against the group": (400, {"attn_tp_size": 4, "attn_tp_rank": 1, "incarnation": "00000000000000bb"}),
        "a size that nobody has": (400, {"instance": "prefill-9", "attn_tp_size": 65_535, "attn_tp_rank": 1,
                                         "incarnation": "00000000000000bb"}),
        "a rank outside of its size": (400, {"attn_tp_rank": 2, "incarnation": "00000000000000bb"}),
        "another layout": (400, {"instance": "prefill-9", "head_dim": 32, "incarnation": "00000000000000bb"}),
        "a second place for one process": (400, {"instance": "prefill-9"}),
        "a live rank's own, at another port": (403, {"rank_port": 6666}),
        "the registry itself": (403, {"instance": "prefill-9", "incarnation": f"{1:016x}"}),
    }  # fmt: skip
    for what, (status, changes) in refused.items():
        answer = await stage.put(**({"attn_tp_size": 2} | changes))
        assert (answer.status_code, what) == (status, what), answer.text
    assert table(stage) == before and stage.registry.roster() == roster
    assert stage.registry.counts["registrations refused"] == len(refused)
    assert (await stage.get(0, 0, 0, 0)).json() == {"rank_ip": "127.0.0.1", "rank_port": 4000}


async def test_case_13_over_links_only_members_register_and_only_themselves() -> None:
    """Case 13: a process without the secret gets no link; one with it can't give another address than its own."""
    clock, random, settings = SystemClock(), SystemRandom(), LinkSettings()

    class Told:
        def __init__(self) -> None:
            self.said: list[object] = []

        def on_link_up(self, peer: Address) -> None:
            self.said.append("up")

        def on_message(self, peer: Address, message: Message) -> bool:
            self.said.append(message)
            return True

        def on_link_lost(self, peer: Address, reason: LostReason) -> None:
            self.said.append(reason)

        def on_exited(self, peer: Address) -> None: ...
        def on_failure(self, error: Exception) -> None: ...

    async def joined(name: str, secret: Secret) -> tuple[LinkLayer, Told]:
        network = await open_network(name, "127.0.0.1", settings, clock, random, secret)
        told = Told()
        await network.start(told)
        network.dial(links.address)
        return network, told

    async def said(told: Told, count: int) -> list[object]:
        async with asyncio.timeout(30.0):
            while len(told.said) < count:
                await asyncio.sleep(0.005)
        return told.said

    links = await open_network("registry", "127.0.0.1", settings, clock, random, SECRET)
    registry = Registry(links, clock, 64)
    task = asyncio.create_task(registry.run())
    body = msgspec.json.encode(ROUTE)
    from kvferry.cluster.registry_routes import PutRoute

    info = msgspec.json.decode(body, type=PutRoute).rank()
    stranger, heard = await joined("stranger", Secret(b"x" * 32))
    member, told = await joined("member", SECRET)
    try:
        assert (await said(told, 1)) == ["up"]
        moved = msgspec.structs.replace(member.address, endpoint="tcp://203.0.113.9:1")
        for address in (moved, info.address):
            member.send(links.address.incarnation, Register(msgspec.structs.replace(info, address=address)))
        refusals = (await said(told, 3))[1:]
        assert [getattr(refusal, "reason", "") for refusal in refusals] == ["a process registers itself only"] * 2
        assert registry.table.ranks == {} and registry.counts["registrations for another process"] == 2
        member.send(links.address.incarnation, Register(msgspec.structs.replace(info, address=member.address)))
        await said(told, 4)
        assert [rank.address for rank in registry.table.ranks.values()] == [member.address]
        async with asyncio.timeout(30.0):
            while not links._carrier.counts["handshakes_failed"]:  # type: ignore[attr-defined]
                await asyncio.sleep(0.005)
        assert heard.said == []
    finally:
        await stranger.close()
        await member.close()
        task.cancel()
        await asyncio.wait({task})


# --- dp ranks --------------------------------------------------------------------------------------------------


async def test_a_rooms_rank_is_kept_and_told(stage: Stage) -> None:
    room = 2**63 - 1
    assert (await stage.put(attn_dp_size=2)).status_code == 200

    async def register(**body: Any) -> int:
        answer = await stage.http.post("/register_dp_rank", json=body, headers=stage.writer)
        return answer.status_code

    assert await register(bootstrap_room=room, dp_rank=0) == 200
    assert await register(bootstrap_room=room, dp_rank=0, instance="prefill-0") == 200
    assert await register(bootstrap_room=room, dp_rank=1) == 409
    assert await register(bootstrap_room=5, dp_rank=2) == 409
    assert await register(bootstrap_room=5, dp_rank=1, instance="prefill-9") == 404
    body = {"bootstrap_rooms": [room, 5]}
    assert (await stage.http.post("/query_dp_ranks", json=body)).json() == {str(room): 0}
    unsigned = await stage.http.post("/register_dp_rank", json={"bootstrap_room": 5, "dp_rank": 1})
    assert unsigned.status_code == 401
    assert (await stage.http.post("/query_dp_ranks", json=body)).json() == {str(room): 0}


async def test_who_follows_the_room_takes_no_other_rank(following: Stage) -> None:
    assert (await following.put(attn_dp_size=2)).status_code == 200
    for dp_rank, status in ((1, 200), (0, 409)):
        body = {"bootstrap_room": 7, "dp_rank": dp_rank}
        answer = await following.http.post("/register_dp_rank", json=body, headers=following.writer)
        assert answer.status_code == status
    assert answer.text == "follow_bootstrap_room conflict: room 7 belongs to rank 1, not 0"
    assert (await following.get(-1, -1, -1, -1, instance="prefill-0")).status_code == 503  # one of two ranks


# --- bodies ----------------------------------------------------------------------------------------------------

BAD: dict[str, bytes] = {
    "empty": b"", "no JSON": b"{", "an array": b"[1]", "no UTF-8": b'{"instance": "\xff"}',
    "a pickle": b"\x80\x04\x95.",
    "missing fields": b"{}", "nested without end": b"[" * 50_000,
    "unknown, nested without end": b'{"x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "a room that is no number": b'{"bootstrap_room": "x", "dp_rank": 0}',
    "a negative room": b'{"bootstrap_room": -1, "dp_rank": 0}',
    "a room of 64 bits": b'{"bootstrap_room": 9223372036854775808, "dp_rank": 0}',
    "too many rooms": b'{"bootstrap_rooms": [' + b",".join([b"1"] * 4097) + b"]}",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_a_body_that_is_none_is_400(name: str, stage: Stage) -> None:
    for method, path in (("PUT", "/route"), ("POST", "/register_dp_rank"), ("POST", "/query_dp_ranks")):
        answer = await stage.http.request(method, path, content=BAD[name], headers=stage.writer)
        assert answer.status_code == 400, (path, answer.text)
    assert table(stage) == {} and len(stage.registry.rooms) == 0


@pytest.mark.parametrize(("field", "value"), [("rank_ip", "127.0.0.1\n"), ("rank_ip", ""), ("rank_port", 0),
    ("rank_port", 65_536), ("incarnation", "aa"), ("incarnation", "00000000000000AA"), ("role", "registry"),
    ("attn_tp_size", 10**9), ("attn_tp_size", 0), ("attn_tp_rank", -1), ("instance", "x" * 257), ("model", None),
    ("page_size", 2.5), ("pid", "1")])  # fmt: skip
async def test_a_field_out_of_range_is_400_and_named(field: str, value: Any, stage: Stage) -> None:
    answer = await stage.put(**{field: value})
    assert answer.status_code == 400 and field in answer.text
    assert table(stage) == {}


async def test_a_body_that_is_too_large_is_413(stage: Stage) -> None:
    answer = await stage.http.put("/route", content=b" " * (MAX_BODY_BYTES + 1), headers=stage.writer)
    assert answer.status_code == 413
    assert (await stage.http.get("/health")).status_code == 200


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        registry = HttpRegistry(FakeNetwork(), SystemClock(), 64, "127.0.0.1", port, TOKEN)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await registry.run()


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True),
    ("::ffff:127.0.0.1", True), ("localhost", True), ("10.0.0.1", False), ("::", False), ("node", False)])  # fmt: skip
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
