"""POST /v1/completions: what it takes and the shape of what it gives."""

from __future__ import annotations

from concurrent.futures import Executor

import msgspec

from kvferry.protocol.messages import Token
from kvferry.serve.exchange import Dialect
from kvferry.serve.front import Front
from kvferry.serve.prepare import check_vocabulary, encode_text
from kvferry.serve.replies import AnswerWriter, Completion, Head, TokenIds, Usage
from kvferry.serve.schemas import CompletionRequest, parse_completion

#: OpenAI's default of this route.
DEFAULT_MAX_TOKENS = 16


class TextChoice(msgspec.Struct, frozen=True):
    """Of a whole answer and of a chunk alike. vLLM puts the prompt's ids here, not beside the choices as in chat."""

    text: str
    finish_reason: str | None = None
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: None = None


class CompletionWriter(AnswerWriter):
    """The stream: a chunk per token that has something to show; the last one carries the finish_reason."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._prompt_due = self._prompt_ids()  # goes with the first chunk

    def whole(self, tokens: list[Token], usage: Usage) -> Completion:
        text = "".join(token.text for token in tokens)
        return self._whole(TextChoice(text, tokens[-1].finish_reason, self._ids(tokens), self._prompt_ids()), usage)

    def tokens(self, tokens: list[Token]) -> bytes:
        parts = []
        for token in tokens:
            if token.text or token.finish_reason or self.head.with_token_ids:
                choice = TextChoice(token.text, token.finish_reason or None, self._ids([token]), self._prompt_due)
                parts.append(self._chunk(choice))
                self._prompt_due = msgspec.UNSET
        return b"".join(parts)


async def _encode(completion: CompletionRequest, front: Front, executor: Executor) -> tuple[int, ...]:
    prompt = completion.prompt
    if isinstance(prompt, str):
        return await encode_text(prompt, front.encoder, executor)
    check_vocabulary("prompt", prompt, front.info.vocab_size)
    return tuple(prompt)


COMPLETIONS = Dialect("cmpl", parse_completion, _encode, CompletionWriter, DEFAULT_MAX_TOKENS)
