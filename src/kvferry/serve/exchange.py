"""One request to a generating route and its answer, as raw ASGI: one send per batch of tokens and nothing between.

The routes differ in what they take and in the shape of what they give; a `Dialect` holds the difference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.types import Receive, Scope, Send

from kvferry.obs.wall import unix_s
from kvferry.protocol.errors import KVFerryError
from kvferry.protocol.messages import Token
from kvferry.serve.asgi import SSE_TYPE, ClientGone, Reply, check_content_type, disconnected, read_body
from kvferry.serve.errors import error_body, retry_after_header
from kvferry.serve.front import Front
from kvferry.serve.live import LiveRequest
from kvferry.serve.prepare import check_model, check_vocabulary, fit_tokens, sampling_of
from kvferry.serve.replies import AnswerWriter, Head, Usage, usage_of
from kvferry.serve.schemas import GenerationRequest

#: What access logs of web servers write when the client left first.
CLIENT_LEFT = 499

RequestT = TypeVar("RequestT", bound=GenerationRequest)

logger = logging.getLogger("kvferry.api")


@dataclass(frozen=True)
class Dialect(Generic[RequestT]):
    """What one route takes and gives.

    `encode` makes the prompt's ids, on the executor's thread where the tokenizer is needed. Both it and `parse`
    raise InvalidRequest. `default_max_tokens` is None where the configured default holds.
    """

    id_prefix: str
    parse: Callable[[bytes], RequestT]
    encode: Callable[[RequestT, Front, Executor], Awaitable[tuple[int, ...]]]
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
        self._live: LiveRequest | None = None
        self._writer: AnswerWriter | None = None  # of a stream that has begun
        self._last_token_s = 0.0
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
            live = self._live = await self._open(request)
            answer = self._stream if request.stream else self._whole
            await answer(live, self._dialect.writer(self._head(live, request)))
            self.status, self.result = self._reply.status, live.stream.finish_reason
        except ClientGone:
            return
        except KVFerryError as error:
            await self._failed(error)
        except Exception as error:
            logger.exception("request failed by an error of our own")
            await self._failed(error)
        finally:
            if self._live is not None:
                self._front.close_request(self._live)

    async def _open(self, request: RequestT) -> LiveRequest:
        front, dialect = self._front, self._dialect
        check_model(request, front.info)
        check_vocabulary("stop_token_ids", request.stop_token_ids or (), front.info.vocab_size)
        limits = await front.limits.get()
        prompt_ids = await dialect.encode(request, front, self._executor)
        default = dialect.default_max_tokens or front.info.default_max_tokens
        max_tokens = fit_tokens(request, len(prompt_ids), limits, default)
        live = front.open(prompt_ids, sampling_of(request, max_tokens, front.random))
        front.metrics.prompt_tokens.inc(len(prompt_ids))
        return live

    def _head(self, live: LiveRequest, request: RequestT) -> Head:
        identity = f"{self._dialect.id_prefix}-{live.spec.request:016x}"  # as journals print it
        return Head(
            identity, int(unix_s()), self._front.info.model, live.spec.prompt_ids, request.wants_usage(),
            bool(request.return_token_ids),
        )  # fmt: skip

    async def _stream(self, live: LiveRequest, writer: AnswerWriter) -> None:
        """Headers leave only with the first token, so that a request that never starts gets its own status."""
        tokens = await self._take(live)
        headers = {"cache-control": "no-store", **_room_header(live)}
        await self._reply.start(200, SSE_TYPE, headers)
        self._writer = writer
        await self._reply.write(writer.tokens(tokens))
        while not tokens[-1].finish_reason:
            tokens = await self._take(live)
            await self._reply.write(writer.tokens(tokens))
        await self._reply.write(writer.end(_usage(live)), more=False)

    async def _whole(self, live: LiveRequest, writer: AnswerWriter) -> None:
        tokens = await self._take(live)
        while not tokens[-1].finish_reason:
            tokens += await self._take(live)
        await self._reply.json(200, writer.whole(tokens, _usage(live)), _room_header(live))

    async def _take(self, live: LiveRequest) -> list[Token]:
        """The next tokens, measured."""
        tokens = await live.take()
        metrics, now_s = self._front.metrics, self._front.clock.now_s()
        metrics.generated_tokens.inc(len(tokens))
        later = len(tokens)
        if tokens[0].index == 0:
            metrics.first_token.observe(now_s - live.opened_s)
            self._last_token_s, later = now_s, len(tokens) - 1
        for _ in range(later):
            metrics.inter_token.observe((now_s - self._last_token_s) / later)
        self._last_token_s = now_s
        if tokens[-1].finish_reason:
            metrics.request_time.observe(now_s - live.opened_s)
        return tokens

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
                await self._reply.json(self.status, body, retry_after_header(known) | _room_header(self._live))
        except ClientGone:
            self.status, self.result = CLIENT_LEFT, "cancelled"


def _room_header(live: LiveRequest | None) -> dict[str, str]:
    return {"x-kvferry-room": str(live.room)} if live is not None and live.room else {}


def _usage(live: LiveRequest) -> Usage:
    return usage_of(len(live.spec.prompt_ids), live.stream.next_index)
