"""POST /v1/chat/completions: what it takes and the shape of what it gives."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Literal

import msgspec

from kvferry.protocol.messages import Token
from kvferry.serve.exchange import Dialect, Prompt
from kvferry.serve.front import Front
from kvferry.serve.logprobs import ChatLogprobs, chat_logprobs
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
    logprobs: ChatLogprobs | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatWriter(AnswerWriter):
    """The stream of a choice: the role first, a chunk per token that has something to show, and the finish_reason.
    vLLM puts the prompt's ids, of which there is one list here, beside the choices, in the first chunk of all."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._begun = [False] * head.choices
        # the prompt's ids, if they were asked for, go into the first chunk
        self._plain_frame, self._frame = self._frame, self._framed(self._prompt_ids())

    def whole(self, answers: list[list[Token]], usage: Usage) -> Completion:
        choices = tuple(
            AnswerChoice(
                AnswerMessage("".join(token.text for token in tokens)), tokens[-1].finish_reason, self._ids(tokens),
                index, self._logprobs(tokens),
            )
            for index, tokens in enumerate(answers)
        )  # fmt: skip
        return self._whole(choices, usage, self._prompt_ids())

    def tokens(self, index: int, tokens: list[Token]) -> bytes:
        parts: list[bytes] = []
        if not self._begun[index]:
            self._begun[index] = True
            role = ChunkChoice(Delta(role="assistant", content=""), token_ids=self._ids([]), index=index)
            parts.append(self._chunk(role))
            self._frame = self._plain_frame
        for token in tokens:
            self._add(parts, index, token)
        return b"".join(parts)

    def _add(self, parts: list[bytes], index: int, token: Token) -> None:
        """The end is a chunk of its own, with no content; what else there is of the token goes with the first chunk it
        makes."""
        ids: TokenIds = msgspec.UNSET
        logprobs = None
        if self._shows_every_token:
            ids, logprobs = self._ids([token]), self._logprobs([token])
        if token.text or (self._shows_every_token and not token.finish_reason):
            parts.append(self._chunk(ChunkChoice(Delta(content=token.text), None, ids, index, logprobs)))
            ids, logprobs = self._ids([]), None
        if token.finish_reason:
            parts.append(self._chunk(ChunkChoice(Delta(), token.finish_reason, ids, index, logprobs)))

    def _logprobs(self, tokens: list[Token]) -> ChatLogprobs | None:
        pieces = self.head.pieces
        return None if pieces is None else chat_logprobs(tokens, pieces)


async def _encode(chat: ChatRequest, front: Front, executor: Executor) -> list[Prompt]:
    return [Prompt(chat.prompt_field, await encode_chat(chat, front.encoder, executor))]


CHAT = Dialect("chatcmpl", parse_chat, _encode, ChatWriter)
