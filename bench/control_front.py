"""The two ends of the token path: what decode sends with, and a front behind an ingress that costs nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import ray
from control_parts import LAYOUT
from control_station import Meter, Sink, Station, process_meter

from kvferry.actors.outbox import TokenOutbox
from kvferry.actors.ports import Network
from kvferry.cluster.client import RayBackend
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.config import Config
from kvferry.engine.contract import Emission
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Roster, Token
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.rank import RankInfo
from kvferry.protocol.request import RequestSpec
from kvferry.serve.chat import CHAT, ChatWriter
from kvferry.serve.exchange import Endpoint
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo
from kvferry.serve.replies import Head

MODEL = "none"
#: Text of a usual length, so that what is encoded has a usual size.
TEXT = " token"


@dataclass
class Streaming:
    """What the outbox asks of a room."""

    room: int
    attempt: int
    spec: RequestSpec


class Pump(Station, Sink):
    """Stands for router and decode: takes the front's call, and sends a token of every stream at each step, with
    decode's own outbox and links. Nothing else runs in its process."""

    def __init__(self, carrier: str) -> None:
        super().__init__(carrier, [])
        self._rooms: list[Streaming] = []

    async def start(self) -> None:
        self._links: Network = await self.network("decode-0")
        await self._links.start(self)
        self._outbox = TokenOutbox(self._links, "decode")

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        self._links.dial(spec.front)
        while not self._links.is_up(spec.front.incarnation):
            await asyncio.sleep(0.001)
        room = Streaming(SystemRandom().bits(63), attempt, spec)
        self._rooms.append(room)
        return Outcome(room.room, True, None, self._links.address, self._links.address)

    async def run(self, streams: int, tokens: int, step_s: float) -> Meter:
        """Waits for the streams, then `tokens` steps, the last of which ends them."""
        while len(self._rooms) < streams:
            await asyncio.sleep(0.001)
        before = await self.meter()
        for index in range(tokens):
            emission = Emission(TEXT, "length" if index == tokens - 1 else "")
            for room in self._rooms:
                self._outbox.put(room, index, 7, emission, None)  # type: ignore[arg-type]
            self._outbox.flush()
            await asyncio.sleep(step_s)
        spent = (await self.meter()).since(before)
        self._rooms.clear()
        return spent


class Generators:
    """The peer of `Pump`: a Ray streaming generator per request, an item per token."""

    async def start(self) -> None: ...

    async def tokens(self, request: int, count: int) -> Any:
        for index in range(count):
            yield msgspec.msgpack.encode(Token(request, 0, 1, index, 7, TEXT, "length" if index == count - 1 else ""))

    async def meter(self) -> Meter:
        return process_meter()


class PumpBackend:
    """The front's slow path to a pump."""

    def __init__(self, pump: Any) -> None:
        self._pump = pump

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        outcome: Outcome = await self._pump.submit.remote(spec, attempt)
        return outcome

    async def roster(self) -> Roster:
        nobody = Address("", "", 0, "", 0)
        ranks = tuple(
            RankInfo(role, role, nobody, LAYOUT, max_prompt_tokens=8192, max_total_tokens=8192)
            for role in ("prefill", "decode")
        )
        return Roster(1, ranks, True)

    async def status(self) -> dict[str, Any]:
        return {}

    async def room(self, room: int) -> None:
        return None


def no_controller() -> Any:
    """The actors of this bench are placed by nobody."""
    raise ValueError("there is no controller")


class Ids:
    """A tokenizer that costs nothing."""

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return list(range(1000, 1016))

    def encode(self, text: str) -> list[int]:
        return list(range(1000, 1016))


class FrontStation(Station):
    """The production front and its chat route, called as an ASGI server calls it; what it sends is checked and thrown
    away. With a `pump` its calls go there, without one to the router and the registry of the cluster."""

    def __init__(self, carrier: str, pump: Any = None) -> None:
        super().__init__(carrier, [])
        self._pump = pump

    async def start(self) -> None:
        network = await self.network("front")
        backend: Any = PumpBackend(self._pump) if self._pump is not None else RayBackend(no_controller, Config())
        info = FrontInfo(MODEL, 0, 512, vocab_size=50_000)
        self._front = Front(network, backend, Ids(), SystemClock(), SystemRandom(), info, FrontMetrics())
        await self._front.start()
        self._route = Endpoint(CHAT, ThreadPoolExecutor(1))

    async def ask(self, requests: int, at_once: int, max_tokens: int) -> Meter:
        """Streaming chats to their end."""
        before, left = await self.meter(), requests

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self._one(max_tokens)

        await asyncio.gather(*(client() for _ in range(at_once)))
        return (await self.meter()).since(before)

    async def _one(self, max_tokens: int) -> None:
        body = json.dumps({
            "model": MODEL, "stream": True, "temperature": 0, "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": "hello"}],
        }).encode()  # fmt: skip
        scope = {
            "type": "http", "headers": [(b"content-type", b"application/json")],
            "app": SimpleNamespace(state=SimpleNamespace(front=self._front)),
        }  # fmt: skip
        parts = [{"type": "http.request", "body": body, "more_body": False}]
        status, content = 0, 0

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()  # a client that stays
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, content
            status = message.get("status", status)
            data = message.get("body", b"")
            content += data.count(b'"content":"') - data.count(b'"content":""')

        await self._route(scope, receive, send)  # type: ignore[arg-type]
        assert (status, content) == (200, max_tokens), (status, content, max_tokens)

    async def consume(self, generators: Any, streams: int, tokens: int) -> Meter:
        """The same tokens out of a Ray streaming generator per request, encoded by the same writer."""
        before = await self.meter()
        await asyncio.gather(*(self._consume(generators, number, tokens) for number in range(streams)))
        return (await self.meter()).since(before)

    async def _consume(self, generators: Any, request: int, tokens: int) -> None:
        writer = ChatWriter(Head("chatcmpl-x", 0, MODEL, ((),), 1, False, False, None))
        items = generators.tokens.options(num_returns="streaming").remote(request, tokens)
        seen = 0
        async for reference in items:
            token = msgspec.msgpack.decode(await reference, type=Token)
            writer.tokens(0, [token])
            seen += 1
        assert seen == tokens


RemotePump, RemoteGenerators, RemoteFront = ray.remote(Pump), ray.remote(Generators), ray.remote(FrontStation)
