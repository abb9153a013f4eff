"""POST /v1/chat/completions: what it takes and the shape of what it gives."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Literal

import msgspec

from kvferry.protocol.messages import Token
from kvferry.serve.exchange import Dialect
from kvferry.serve.front import Front
from kvferry.serve.prepare import encode_chat
from kvferry.serve.replies import AnswerWriter, Completion, Head, TokenIds, Usage
from kvferry.serve.schemas import ChatRequest, parse_chat


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class AnswerChoice(msgspec.Struct, frozen=True):
    message: AnswerMessage
    finish_reason: str
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: None = None


class ChatWriter(AnswerWriter):
    """The stream: the role first, a chunk per token that has something to show, and the finish_reason."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._begun = False

    def whole(self, tokens: list[Token], usage: Usage) -> Completion:
        message = AnswerMessage("".join(token.text for token in tokens))
        choice = AnswerChoice(message, tokens[-1].finish_reason, self._ids(tokens))
        return self._whole(choice, usage, self._prompt_ids())

    def tokens(self, tokens: list[Token]) -> bytes:
        parts = []
        if not self._begun:
            self._begun = True
            role = ChunkChoice(Delta(role="assistant", content=""), token_ids=self._ids([]))
            parts.append(self._chunk(role, self._prompt_ids()))
        for token in tokens:
            parts += self._token(token)
        return b"".join(parts)

    def _token(self, token: Token) -> list[bytes]:
        """The end is a chunk of its own, with no content; the token's id goes with the first chunk it makes."""
        parts, ids = [], self._ids([token])
        if token.text or (self.head.with_token_ids and not token.finish_reason):
            parts.append(self._chunk(ChunkChoice(Delta(content=token.text), token_ids=ids)))
            ids = self._ids([])
        if token.finish_reason:
            parts.append(self._chunk(ChunkChoice(Delta(), token.finish_reason, ids)))
        return parts


async def _encode(chat: ChatRequest, front: Front, executor: Executor) -> tuple[int, ...]:
    return await encode_chat(chat, front.encoder, executor)


CHAT = Dialect("chatcmpl", parse_chat, _encode, ChatWriter)
