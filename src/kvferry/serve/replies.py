"""What the API sends: OpenAI's `chat.completion`, its chunks, and the list of models."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.protocol.messages import Token
from kvferry.serve.errors import ErrorBody

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct, frozen=True):
    """In tokens. The token that ended the answer (end of sequence, stop token) counts as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class AnswerChoice(msgspec.Struct, frozen=True):
    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    """`created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    choices: tuple[AnswerChoice, ...]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None


class Chunk(msgspec.Struct, frozen=True):
    """`usage` is absent unless the client asked for it; then it is null on all chunks but the last."""

    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


def event(body: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


class ChunkWriter:
    """Makes the events of one stream: the role first, a chunk per token that shows text, the finish_reason, and
    the usage if it was asked for."""

    def __init__(self, identity: str, created: int, model: str, with_usage: bool) -> None:
        self._id, self._created, self._model = identity, created, model
        self._usage: msgspec.UnsetType | None = None if with_usage else msgspec.UNSET
        self._with_usage = with_usage

    def _chunk(self, delta: Delta, finish_reason: str | None = None) -> bytes:
        choices = (ChunkChoice(delta, finish_reason),)
        return event(Chunk(self._id, self._created, self._model, choices, usage=self._usage))

    def role(self) -> bytes:
        return self._chunk(Delta(role="assistant", content=""))

    def tokens(self, tokens: list[Token]) -> bytes:
        """The events of some tokens, in order; b"" when none of them shows text or ends the answer."""
        parts = []
        for token in tokens:
            if token.text:
                parts.append(self._chunk(Delta(content=token.text)))
            if token.finish_reason:
                parts.append(self._chunk(Delta(), token.finish_reason))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        last = b""
        if self._with_usage:
            last = event(Chunk(self._id, self._created, self._model, (), usage=usage))
        return last + DONE

    def error(self, body: ErrorBody) -> bytes:
        """The event that ends a stream which can't be finished. No [DONE] follows it."""
        return event(body)


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "kvferry"


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]
    object: Literal["list"] = "list"
