"""What the API sends: OpenAI's completion objects, whole or as a stream of chunks, and the list of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import msgspec

from kvferry.protocol.messages import Token
from kvferry.serve.errors import ErrorBody
from kvferry.serve.logprobs import Pieces

_encode = msgspec.json.Encoder().encode

_NO_CHOICES = b'"choices":[]'

DONE = b"data: [DONE]\n\n"

#: Token ids where the client asked for them; absent otherwise.
TokenIds = tuple[int, ...] | msgspec.UnsetType


class PromptDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: 0 as long as there is no prefix cache to take any from."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """In tokens. The token that ended an answer (end of sequence, stop token) counts as generated; a prompt counts
    once, however many answers it gets. Generated tokens are of one kind here, so there are no details of them.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


def usage_of(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


class Completion(msgspec.Struct, frozen=True):
    """A whole answer, or one chunk of it. `created` is in seconds since 1970.

    In chunks `usage` is absent unless the client asked for it; then it is null on all of them but the last.
    """

    id: str
    object: str
    created: int
    model: str
    choices: tuple[msgspec.Struct, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET


class Head(msgspec.Struct, frozen=True):
    """What every part of one answer repeats, and what its client wants to see besides the text.

    Choice i answers `prompts[i // samples]`. `pieces` is None where no log-probabilities were asked for.
    """

    id: str
    created: int
    model: str
    prompts: tuple[tuple[int, ...], ...]
    samples: int
    with_usage: bool
    with_token_ids: bool
    pieces: Pieces | None

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.samples


def event(body: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


class AnswerWriter(ABC):
    """Makes the bodies of one answer: `whole` alone, or `parts` as they come, and then `end` (or `error`)."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, head: Head) -> None:
        self.head = head
        # In a stream also those that make no text visible: they have something else to show.
        self._shows_every_token = head.with_token_ids or head.pieces is not None
        self._usage: msgspec.UnsetType | None = None if head.with_usage else msgspec.UNSET
        self._frame = self._framed()

    @abstractmethod
    def whole(self, answers: list[list[Token]], usage: Usage) -> Completion:
        """The answer with these choices; the last token of each carries its finish_reason."""

    @abstractmethod
    def tokens(self, index: int, tokens: list[Token]) -> bytes:
        """The events of some more tokens of one choice, in order; b"" when none of them has anything to show."""

    def parts(self, parts: list[tuple[int, list[Token]]]) -> bytes:
        """The events of some more tokens of several choices."""
        if len(parts) == 1:
            return self.tokens(*parts[0])
        return b"".join([self.tokens(index, tokens) for index, tokens in parts])

    def end(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and the end of the stream."""
        head = self.head
        last = Completion(head.id, self.chunk_object, head.created, head.model, (), usage)
        return (event(last) if head.with_usage else b"") + DONE

    def error(self, body: ErrorBody) -> bytes:
        """The event that ends a stream which can't be finished. No [DONE] follows it."""
        return event(body)

    def _whole(
        self, choices: tuple[msgspec.Struct, ...], usage: Usage, prompt_ids: TokenIds = msgspec.UNSET
    ) -> Completion:
        head = self.head
        return Completion(head.id, self.whole_object, head.created, head.model, choices, usage, prompt_ids)

    def _chunk(self, choice: msgspec.Struct) -> bytes:
        """The event of one choice: most of it is the same in every chunk of an answer."""
        before, after = self._frame
        return before + _encode(choice) + after

    def _framed(self, prompt_ids: TokenIds = msgspec.UNSET) -> tuple[bytes, bytes]:
        """A chunk's event without its choice: what comes before, and behind."""
        head = self.head
        chunk = Completion(head.id, self.chunk_object, head.created, head.model, (), self._usage, prompt_ids)
        before, _, after = event(chunk).partition(_NO_CHOICES)  # in a string its quotes would be escaped
        return before + _NO_CHOICES[:-1], b"]" + after

    def _ids(self, tokens: list[Token]) -> TokenIds:
        return tuple(token.token_id for token in tokens) if self.head.with_token_ids else msgspec.UNSET

    def _prompt_ids(self, index: int = 0) -> TokenIds:
        head = self.head
        return head.prompts[index // head.samples] if head.with_token_ids else msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "kvferry"


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]
    object: Literal["list"] = "list"
