"""One request to a generating route and its answer, as raw ASGI: one send per batch of tokens and nothing between.

The routes differ in what they take and in the shape of what they give; a `Dialect` holds the difference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from starlette.types import Receive, Scope, Send

from kvferry.obs.wall import unix_s
from kvferry.protocol.errors import KVFerryError
from kvferry.protocol.messages import Token
from kvferry.serve.asgi import SSE_TYPE, ClientGone, Reply, check_content_type, disconnected, read_body
from kvferry.serve.choices import Choices
from kvferry.serve.errors import error_body, retry_after_header
from kvferry.serve.front import Front
from kvferry.serve.prepare import check_model, check_token_ids, fit_tokens, sampling_of
from kvferry.serve.replies import AnswerWriter, Head, usage_of
from kvferry.serve.schemas import GenerationRequest

#: What access logs of web servers write when the client left first.
CLIENT_LEFT = 499

RequestT = TypeVar("RequestT", bound=GenerationRequest)

logger = logging.getLogger("kvferry.api")


class Prompt(NamedTuple):
    """`field` is its place in the body, for messages about it."""

    field: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Dialect(Generic[RequestT]):
    """What one route takes and gives.

    `encode` makes the prompts' ids, on the executor's thread where the tokenizer is needed. Both it and `parse`
    raise InvalidRequest. `default_max_tokens` is None where the configured default holds.
    """

    id_prefix: str
    parse: Callable[[bytes], RequestT]
    encode: Callable[[RequestT, Front, Executor], Awaitable[list[Prompt]]]
    writer: Callable[[Head], AnswerWriter]
    default_max_tokens: int | None = None


class Endpoint(Generic[RequestT]):
    """The ASGI app of a route. `executor` has one thread, for the tokenizer."""

    def __init__(self, dialect: Dialect[RequestT], executor: Executor) -> None:
        self._dialect, self._executor = dialect, executor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front: Front = scope["app"].state.front
        exchange = Exchange(self._dialect, front, self._executor, Reply(send))
        try:
            await exchange.run(scope, receive)
        finally:
            front.metrics.requests.labels(str(exchange.status), exchange.result).inc()


class Exchange(Generic[RequestT]):
    """One request and its answer. `status` and `result` say how it ended."""

    def __init__(self, dialect: Dialect[RequestT], front: Front, executor: Executor, reply: Reply) -> None:
        self._dialect, self._front, self._executor, self._reply = dialect, front, executor, reply
        self._choices = Choices(front)
        self._writer: AnswerWriter | None = None  # of a stream that has begun
        self.status = CLIENT_LEFT
        self.result = "cancelled"

    async def run(self, scope: Scope, receive: Receive) -> None:
        """Answer, or stop as soon as the client leaves, whatever was going on."""
        try:
            check_content_type(scope)
            body = await read_body(scope, receive, self._front.info.max_body_bytes)
        except ClientGone:
            return
        except KVFerryError as error:
            await self._failed(error)
            return
        work = asyncio.ensure_future(self._answer(body))
        watch = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _answer(self, body: bytes) -> None:
        try:
            request = self._dialect.parse(body)
            writer = self._dialect.writer(await self._open(request))
            await (self._stream(writer) if request.stream else self._whole(writer))
            self.status, self.result = self._reply.status, self._choices.finish_reason
        except ClientGone:
            return
        except KVFerryError as error:
            await self._failed(error)
        except Exception as error:
            logger.exception("request failed by an error of our own")
            await self._failed(error)
        finally:
            self._choices.close()

    async def _open(self, request: RequestT) -> Head:
        """Open the requests of all choices, after everything about all of them has been checked."""
        front, dialect, choices = self._front, self._dialect, self._choices
        check_model(request, front.info)
        check_token_ids(request, front.info.vocab_size)
        limits = await front.limits.get()
        prompts = await dialect.encode(request, front, self._executor)
        default = dialect.default_max_tokens or front.info.default_max_tokens
        fitted = [fit_tokens(request, field, len(ids), limits, default) for field, ids in prompts]
        for (_, ids), max_tokens in zip(prompts, fitted, strict=True):
            choices.open(ids, [sampling_of(request, max_tokens, front.random, i) for i in range(request.samples())])
        identity = f"{dialect.id_prefix}-{choices.lives[0].spec.request:016x}"  # as the first journal prints it
        pieces = None if request.top_logprobs_count() is None else front.encoder.piece
        return Head(
            identity, int(unix_s()), front.info.model, tuple(ids for _, ids in prompts), request.samples(),
            request.wants_usage(), bool(request.return_token_ids), pieces,
        )  # fmt: skip

    async def _stream(self, writer: AnswerWriter) -> None:
        """Headers leave only with the first token, so that a request that never starts gets its own status."""
        choices, reply = self._choices, self._reply
        first = writer.parts(await choices.take())
        await reply.start(200, SSE_TYPE, {"cache-control": "no-store", **self._room_header()})
        self._writer = writer
        await reply.write(first)
        while not choices.over:
            await reply.write(writer.parts(await choices.take()))
        await reply.write(writer.end(usage_of(choices.prompt_tokens, choices.completion_tokens)), more=False)

    async def _whole(self, writer: AnswerWriter) -> None:
        choices = self._choices
        answers: list[list[Token]] = [[] for _ in range(writer.head.choices)]
        while not choices.over:
            for index, tokens in await choices.take():
                answers[index] += tokens
        usage = usage_of(choices.prompt_tokens, choices.completion_tokens)
        await self._reply.json(200, writer.whole(answers, usage), self._room_header())

    async def _failed(self, error: Exception) -> None:
        """An error answer, or, once the stream has begun, an error event and the end of the stream."""
        known = error if isinstance(error, KVFerryError) else KVFerryError()
        body = error_body(known)
        self.status, self.result = known.http_status, known.code
        try:
            if self._writer is not None:
                self.status = self._reply.status
                await self._reply.write(self._writer.error(body), more=False)
            elif not self._reply.status:
                await self._reply.json(self.status, body, retry_after_header(known) | self._room_header())
        except ClientGone:
            self.status, self.result = CLIENT_LEFT, "cancelled"

    def _room_header(self) -> dict[str, str]:
        """The rooms that are known when the headers leave: of a stream with several choices those that have begun."""
        rooms = self._choices.rooms
        return {"x-kvferry-room": ", ".join(map(str, rooms))} if rooms else {}
