"""POST /v1/chat/completions, as raw ASGI: one send per batch of tokens and nothing between."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from starlette.types import Receive, Scope, Send

from kvferry.obs.wall import unix_s
from kvferry.protocol.errors import KVFerryError
from kvferry.protocol.messages import Token
from kvferry.serve.asgi import SSE_TYPE, ClientGone, Reply, check_content_type, disconnected, read_body
from kvferry.serve.errors import error_body, retry_after_header
from kvferry.serve.front import Front
from kvferry.serve.live import LiveRequest
from kvferry.serve.prepare import check_model, encode_prompt, fit_tokens, sampling_of
from kvferry.serve.replies import (
    AnswerChoice,
    AnswerMessage,
    ChatCompletion,
    ChunkWriter,
    Usage,
    usage_of,
)
from kvferry.serve.schemas import ChatRequest, parse_chat

#: What access logs of web servers write when the client left first.
CLIENT_LEFT = 499

logger = logging.getLogger("kvferry.api")


class ChatEndpoint:
    """The ASGI app of the route. `executor` has one thread, for the tokenizer."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front: Front = scope["app"].state.front
        exchange = ChatExchange(front, self._executor, Reply(send))
        try:
            await exchange.run(scope, receive)
        finally:
            front.metrics.requests.labels(str(exchange.status), exchange.result).inc()


class ChatExchange:
    """One request and its answer. `status` and `result` say how it ended."""

    def __init__(self, front: Front, executor: Executor, reply: Reply) -> None:
        self._front, self._executor, self._reply = front, executor, reply
        self._live: LiveRequest | None = None
        self._writer: ChunkWriter | None = None
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
            chat = parse_chat(body)
            live = self._live = await self._open(chat)
            if chat.stream:
                await self._stream(live, chat)
            else:
                await self._whole(live)
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

    async def _open(self, chat: ChatRequest) -> LiveRequest:
        front = self._front
        check_model(chat, front.info)
        limits = await front.limits.get()
        prompt_ids = await encode_prompt(chat, front.encoder, self._executor)
        max_tokens = fit_tokens(chat, len(prompt_ids), limits, front.info.default_max_tokens)
        live = front.open(prompt_ids, sampling_of(chat, max_tokens, front.random))
        front.metrics.prompt_tokens.inc(len(prompt_ids))
        return live

    async def _stream(self, live: LiveRequest, chat: ChatRequest) -> None:
        """Headers leave only with the first token, so that a request that never starts gets its own status."""
        tokens = await self._take(live)
        info = self._front.info
        writer = ChunkWriter(_identity(live), int(unix_s()), info.model, chat.wants_usage())
        headers = {"cache-control": "no-store", **_room_header(live)}
        await self._reply.start(200, SSE_TYPE, headers)
        self._writer = writer
        await self._reply.write(writer.role() + writer.tokens(tokens))
        while not tokens[-1].finish_reason:
            tokens = await self._take(live)
            await self._reply.write(writer.tokens(tokens))
        await self._reply.write(writer.end(_usage(live)), more=False)

    async def _whole(self, live: LiveRequest) -> None:
        tokens = await self._take(live)
        texts = [token.text for token in tokens]
        while not tokens[-1].finish_reason:
            tokens = await self._take(live)
            texts += [token.text for token in tokens]
        choice = AnswerChoice(AnswerMessage("".join(texts)), tokens[-1].finish_reason)
        answer = ChatCompletion(_identity(live), int(unix_s()), self._front.info.model, (choice,), _usage(live))
        await self._reply.json(200, answer, _room_header(live))

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


def _identity(live: LiveRequest) -> str:
    return f"chatcmpl-{live.spec.request:016x}"  # as journals print it


def _room_header(live: LiveRequest | None) -> dict[str, str]:
    return {"x-kvferry-room": str(live.room)} if live is not None and live.room else {}


def _usage(live: LiveRequest) -> Usage:
    return usage_of(len(live.spec.prompt_ids), live.stream.next_index)
