"""A front on fakes, and the same front behind a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from kvferry.actors.ports import LinkHandler
from kvferry.engine.token_pieces import TokenPiece
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Logprobs, Message, Roster, Stop, Token, TokenBatch
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.rank import Layout, RankInfo
from kvferry.protocol.request import RequestSpec
from kvferry.serve.app import build_app
from kvferry.serve.attempts import AttemptPolicy
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo
from kvferry.serve.keys import Keys

LAYOUT = Layout("m", "r", "float32", 16, 30, 3, 64)


def address(name: str, incarnation: int) -> Address:
    return Address(name, f"ipc://{name}", incarnation, "host", 1000 + incarnation)


class FakeNetwork:
    """Records what is sent; a test plays the peers through `handler`."""

    def __init__(self) -> None:
        self.address = address("front", 1)
        self.sent: list[tuple[int, Message]] = []
        self.up: set[int] = set()
        self.handler: LinkHandler | None = None
        self.closed = False

    async def start(self, handler: LinkHandler) -> None:
        self.handler = handler

    def dial(self, address: Address) -> None:
        raise AssertionError("leaders dial the front, never the other way round")

    def send(self, incarnation: int, message: Message) -> bool:
        self.sent.append((incarnation, message))
        return incarnation in self.up

    def is_up(self, incarnation: int) -> bool:
        return incarnation in self.up

    def session_of(self, incarnation: int) -> int:
        return 70 + incarnation if incarnation in self.up else 0

    def drop(self, incarnation: int) -> None:
        self.up.discard(incarnation)

    async def close(self) -> None:
        self.closed = True

    def stops(self) -> list[tuple[int, Stop]]:
        return [(incarnation, message) for incarnation, message in self.sent if isinstance(message, Stop)]


class FakeBackend:
    """`submit` runs `script(spec, attempt)`; by default it waits for `settle`."""

    def __init__(self) -> None:
        self.specs: list[RequestSpec] = []
        self.cancelled = 0
        self.outcomes: dict[int, asyncio.Future[Outcome]] = {}
        self.on_submit: Callable[[RequestSpec], None] | None = None
        self.present = roster()
        self.journals: dict[int, dict[str, Any]] = {}
        self.status_error: Exception | None = None
        self.progresses: list[dict[str, Any]] = []
        self.asked: list[dict[str, int]] = []
        self.state: dict[str, Any] = {
            "instances": [{
                "id": "decode-0", "role": "decode", "incarnation": "7",
                "ranks": [{"rank": 0, "pid": 4321, "host": "h"}], "queues": {"running": 2, "waiting": 1},
                "pages": {"total": 10, "free": 7, "owned": 2, "leased": 1, "cached": 0, "quarantined": 0},
            }],
            "rooms_live": 3, "requests_live": 3,
        }  # fmt: skip

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        self.specs.append(spec)
        future = self.outcomes[spec.request] = asyncio.get_running_loop().create_future()
        if self.on_submit is not None:
            asyncio.get_running_loop().call_soon(self.on_submit, spec)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def roster(self) -> Roster:
        return self.present

    async def status(self) -> dict[str, Any]:
        if self.status_error is not None:
            raise self.status_error
        return self.state

    async def room(self, room: int) -> dict[str, Any] | None:
        return self.journals.get(room)

    async def pools(self) -> dict[str, Any]:
        """The next of `progresses`; the last one stays."""
        return self.progresses.pop(0) if len(self.progresses) > 1 else self.progresses[0]

    async def scale(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        self.asked.append(dict(numbers))
        return await self.pools()


def roster(ready: bool = True, prompt: int = 159, total: int = 160, missing: tuple[str, ...] = ()) -> Roster:
    ranks = (
        RankInfo("prefill-0", "prefill", address("prefill-0", 6), LAYOUT, max_prompt_tokens=prompt),
        RankInfo("decode-0", "decode", address("decode-0", 7), LAYOUT, max_total_tokens=total),
    )
    return Roster(1, ranks if not missing else (), ready, missing)


class TestClock:
    __test__ = False

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError("the front waits for nothing by time")


class SeededRandom:
    def __init__(self) -> None:
        self._random = random.Random(5)

    def bits(self, count: int) -> int:
        return self._random.getrandbits(count)


class WordEncoder:
    """One token per word, whose id is the word's length. The word "refuse" stands for a conversation that the
    template refuses; plain text also gets a special token, id 1, in front."""

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        words = [word for message in messages for word in message["content"].split()]
        if "refuse" in words:
            raise ValueError("roles must alternate")
        return [len(word) for word in words]

    def encode(self, text: str) -> list[int]:
        return [1] + [len(word) for word in text.split()]

    def piece(self, token_id: int) -> TokenPiece:
        """Token 2 is special, 3 and 4 are the two bytes of "é", and every other one is its number in brackets."""
        if token_id == 2:
            return TokenPiece("<end>", None)
        data = {3: b"\xc3", 4: b"\xa9"}.get(token_id, f"[{token_id}]".encode())
        return TokenPiece(data.decode("utf-8", "replace"), data)


class World:
    """The front, and the moves of the peers around it."""

    room = 9_000_000_000_000_000_001

    def __init__(self) -> None:
        self.network, self.backend, self.clock = FakeNetwork(), FakeBackend(), TestClock()
        one = AttemptPolicy(max_attempts=1)
        self.info = FrontInfo("m", 1_700_000_000, 20, max_body_bytes=20_000, vocab_size=1000, attempts=one)
        self.metrics = FrontMetrics()
        self.front = Front(
            self.network, self.backend, WordEncoder(), self.clock, SeededRandom(), self.info, self.metrics
        )
        self.prefill, self.decode = address("prefill-0", 6), address("decode-0", 7)
        self.network.up = {6, 7}
        self.url = ""

    @contextlib.asynccontextmanager
    async def running_front(self) -> AsyncIterator[Front]:
        await self.front.start()
        try:
            yield self.front
        finally:
            await self.front.close()

    def token(self, spec: RequestSpec, index: int, text: str = "", finish: str = "", attempt: int = 0) -> Token:
        return Token(spec.request, attempt, self.room, index, 100 + index, text or f" t{index}", finish)

    def from_prefill(self, *tokens: Token) -> None:
        assert self.front.on_message(self.prefill, TokenBatch("prefill", tokens))

    def from_decode(self, *tokens: Token) -> None:
        assert self.front.on_message(self.decode, TokenBatch("decode", tokens))

    def settle(self, spec: RequestSpec, outcome: Outcome | None = None) -> None:
        """Let the room end: by default committed on (prefill-0, decode-0)."""
        future = self.backend.outcomes[spec.request]
        if not future.done():
            future.set_result(outcome or Outcome(self.room, True, None, self.prefill, self.decode))

    def answer_with(
        self, texts: Sequence[str], finish: str = "stop", logprobs: Sequence[Logprobs] = (), first_id: int = 100
    ) -> None:
        """Every submitted request gets these tokens: index 0 from prefill, then all of them from decode."""

        def play(spec: RequestSpec) -> None:
            last = len(texts) - 1
            tokens = [
                Token(spec.request, 0, self.room, i, first_id + i, text, finish if i == last else "", known)
                for i, (text, known) in enumerate(zip_longest(texts, logprobs))
            ]
            self.from_prefill(tokens[0])
            self.settle(spec)
            for token in tokens:
                self.from_decode(token)

        self.backend.on_submit = play

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop run until `condition` holds; the test's own timeout ends a wait for nothing."""
        while not condition():
            await asyncio.sleep(0.001)


class QuietServer(uvicorn.Server):
    """Leaves the signal handlers of the test process alone."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    async with world.running_front():
        yield world


@contextlib.asynccontextmanager
async def serving(keys: Keys | None = None) -> AsyncIterator[World]:
    """A world's front behind uvicorn on a free loopback port (`world.url`)."""
    world = World()
    app = build_app(world.running_front, keys, "none")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        world.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = QuietServer(uvicorn.Config(app, lifespan="on", log_level="warning", timeout_graceful_shutdown=2))
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        await world.until(lambda: server.started or task.done())
        yield world
        server.should_exit = True
        await task
    assert world.network.closed


@pytest.fixture
async def served() -> AsyncIterator[World]:
    """Open to everybody."""
    async with serving() as world:
        yield world


@pytest.fixture
async def guarded() -> AsyncIterator[World]:
    """Open to those with the API key "s3cret" or "other-key"."""
    async with serving(Keys(["s3cret", "other-key"])) as world:
        yield world


@pytest.fixture
async def client(served: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(served: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
        yield client
