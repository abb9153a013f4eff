"""The registry's four HTTP routes, as plain functions of a request: what is said, to whom, and with which status.

They are those of SGLang's bootstrap server, with its names where it has one. Nothing is kept here: each answer comes
from the registry's own methods. A write needs the bearer token that members of the cluster derive from its secret.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.actors.bootstrap.ranks import group_size, host_of
from kvferry.actors.bootstrap.registry import Registry
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Overloaded
from kvferry.protocol.messages import RegistrationRefused
from kvferry.protocol.rank import Layout, RankInfo

MAX_BODY_BYTES = 64 * 1024
MAX_ROOMS_ASKED = 4096
MAX_STAGES = 4096
GET_ROUTE = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Rank = Annotated[int, Meta(ge=0, le=65_535)]
Size = Annotated[int, Meta(ge=1, le=65_535)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Room = Annotated[int, Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True)
class Request:
    """`remote`: the IP address that it came from; `query`: the last value of each name."""

    method: str
    path: str
    remote: str
    query: Mapping[str, str] = field(default_factory=dict)
    authorization: str = ""
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    content_type: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)


class PutRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its coordinates, where it listens, what it holds. `incarnation`: 16 hexadecimal digits; `host`: the
    kernel and process namespace it lives in, with `pid`, for those on the same one. Other fields are ignored.
    """

    instance: Name
    role: Annotated[str, Meta(pattern=r"^(prefill|decode|unified)\Z")]
    incarnation: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    rank_ip: Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[0-9A-Za-z.:_-]+\Z")]
    rank_port: Annotated[int, Meta(ge=1, le=65_535)]
    host: Annotated[str, Meta(max_length=256)] = ""
    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    attn_tp_size: Size
    attn_tp_rank: Rank
    attn_cp_size: Size = 1
    attn_cp_rank: Rank = 0
    attn_dp_size: Size = 1
    attn_dp_rank: Rank = 0
    system_dp_size: Size = 1
    system_dp_rank: Rank = 0
    pp_size: Size
    pp_rank: Rank
    stages: Annotated[tuple[Size, ...], Meta(max_length=MAX_STAGES)] = ()
    model: Name
    revision: Annotated[str, Meta(max_length=256)]
    kv_cache_dtype: Name
    page_size: Annotated[int, Meta(ge=1, le=65_536)]
    layers: Size
    kv_heads: Size
    head_dim: Size
    decode_allocation_policy: Name = "early"
    pages: Count = 0
    max_prompt_tokens: Count = 0
    max_total_tokens: Count = 0

    def rank(self) -> RankInfo:
        """DP is the attention's where the system has one rank, else the system's, as in SGLang's table."""
        attention = self.system_dp_size == 1
        host = f"[{self.rank_ip}]" if ":" in self.rank_ip else self.rank_ip
        endpoint = f"tcp://{host}:{self.rank_port}"
        layout = Layout(
            self.model, self.revision, self.kv_cache_dtype, self.page_size, self.layers, self.kv_heads, self.head_dim,
            self.decode_allocation_policy,
        )  # fmt: skip
        return RankInfo(
            self.instance, self.role,
            Address(self.instance, endpoint, int(self.incarnation, 16), self.host, self.pid), layout,
            dp_rank=self.attn_dp_rank if attention else self.system_dp_rank,
            dp_size=self.attn_dp_size if attention else self.system_dp_size,
            cp_rank=self.attn_cp_rank, cp_size=self.attn_cp_size, tp_rank=self.attn_tp_rank,
            tp_size=self.attn_tp_size, pp_rank=self.pp_rank, pp_size=self.pp_size, stages=self.stages, pages=self.pages,
            max_prompt_tokens=self.max_prompt_tokens, max_total_tokens=self.max_total_tokens,
        )  # fmt: skip


class RegisterRoom(msgspec.Struct, frozen=True):
    bootstrap_room: Room
    dp_rank: Rank
    instance: Name | None = None


class QueryRooms(msgspec.Struct, frozen=True):
    bootstrap_rooms: Annotated[list[Room], Meta(max_length=MAX_ROOMS_ASKED)]


_put_route = msgspec.json.Decoder(PutRoute)
_register_room = msgspec.json.Decoder(RegisterRoom)
_query_rooms = msgspec.json.Decoder(QueryRooms)


class Routes:
    """`token`: what writers must show."""

    def __init__(self, registry: Registry, token: str) -> None:
        self._registry, self._token = registry, token.encode("ascii")
        self._routes = {
            ("PUT", "/route"): (self._put_route, True),
            ("GET", "/route"): (self._get_route, False),
            ("POST", "/register_dp_rank"): (self._register_dp_rank, True),
            ("POST", "/query_dp_ranks"): (self._query_dp_ranks, False),
            ("GET", "/health"): (self._health, False),
        }

    async def answer(self, request: Request) -> Answer:
        """Raises nothing, whatever the request."""
        found = self._routes.get((request.method, request.path))
        if found is None:
            allowed = sorted(method for method, path in self._routes if path == request.path)
            if allowed:
                return Answer(405, b"Method not allowed", headers={"Allow": ", ".join(allowed)})
            return Answer(404, b"Not found")
        handle, writes = found
        if writes and (refused := self._unauthorized(request.authorization)) is not None:
            return refused
        if len(request.body) > MAX_BODY_BYTES:
            return _text(413, f"the body has {len(request.body)} bytes; the limit is {MAX_BODY_BYTES}")
        try:
            return await handle(request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _text(400, f"the body is not acceptable: {error}")
        except Overloaded as error:
            return _text(503, str(error))

    def _unauthorized(self, authorization: str) -> Answer | None:
        scheme, _, shown = authorization.strip().partition(" ")
        known = hmac.compare_digest(shown.strip().encode("utf-8", "surrogateescape"), self._token)
        if scheme.lower() == "bearer" and known:
            return None
        text = b"a write needs the registry's token, in the header Authorization: Bearer TOKEN"
        return Answer(401, text, headers={"WWW-Authenticate": 'Bearer realm="kvferry registry"'})

    # --- the routes ---

    async def _health(self, _request: Request) -> Answer:
        return _OK

    async def _put_route(self, request: Request) -> Answer:
        refusal = await self._registry.register(_put_route.decode(request.body).rank(), request.remote)
        if isinstance(refusal, RegistrationRefused):
            return _text(409 if refusal.retry else 400, refusal.reason)
        return _OK if refusal is None else _text(403, refusal)

    async def _get_route(self, request: Request) -> Answer:
        numbers = [_number(request.query.get(name)) for name in GET_ROUTE]
        if None in numbers:
            return _text(400, f"Missing inputs for bootstrap server: {', '.join(GET_ROUTE)}, each a whole number.")
        group = self._group(request.query.get("instance"))
        if set(numbers) != {-1}:
            rank = next((info for info in group if _place(info) == tuple(numbers)), None)
            if rank is None:
                return _text(404, f"Bootstrap info not found for {dict(zip(GET_ROUTE, numbers, strict=True))}.")
            port = int(rank.address.endpoint.rpartition(":")[2])
            return _json({"rank_ip": host_of(rank.address), "rank_port": port})
        if not group or len(group) < group_size(group[0]):
            return _text(503, f"Prefill server not fully registered yet ({len(group)} workers registered).")
        return _json(self._info(group[0]))

    async def _register_dp_rank(self, request: Request) -> Answer:
        asked = _register_room.decode(request.body)
        try:
            refusal = await self._registry.register_room(asked.bootstrap_room, asked.dp_rank, asked.instance)
        except LookupError as error:
            return _text(404, str(error))
        return _OK if refusal is None else _text(409, refusal)

    async def _query_dp_ranks(self, request: Request) -> Answer:
        ranks = await self._registry.ranks_of_rooms(_query_rooms.decode(request.body).bootstrap_rooms)
        return _json({str(room): rank for room, rank in ranks.items()})

    # --- what they say ---

    def _group(self, instance: str | None) -> list[RankInfo]:
        """The ranks of `instance`; of none named, the first complete prefill by name, else the first."""
        table = self._registry.table
        if instance is not None:
            return table.members(instance)
        names = sorted({info.instance for info in table.ranks.values() if info.role != "decode"})
        groups = [table.members(name) for name in names]
        complete = [group for group in groups if len(group) >= group_size(group[0])]
        return next(iter(complete or groups), [])

    def _info(self, rank: RankInfo) -> dict[str, Any]:
        return {
            "instance": rank.instance, "attn_tp_size": rank.tp_size, "attn_cp_size": rank.cp_size,
            "dp_size": rank.dp_size, "pp_size": rank.pp_size, "page_size": rank.layout.page_size,
            "kv_cache_dtype": rank.layout.dtype, "follow_bootstrap_room": self._registry.rooms.follow,
            "decode_allocation_policy": rank.layout.policy,
        }  # fmt: skip


_OK = Answer(200, b"OK")


def _text(status: int, text: str) -> Answer:
    return Answer(status, text.encode("utf-8", "replace"))


def _json(value: object) -> Answer:
    return Answer(200, msgspec.json.encode(value), "application/json")


def _place(info: RankInfo) -> tuple[int, int, int, int]:
    return (info.dp_rank, info.cp_rank, info.tp_rank, info.pp_rank)


def _number(text: str | None) -> int | None:
    """-1 or more, of at most nine digits."""
    if text is None or not (text == "-1" or (text.isascii() and text.isdigit() and len(text) < 10)):
        return None
    return int(text)
