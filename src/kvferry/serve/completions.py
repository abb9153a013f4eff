"""POST /v1/completions: what it takes and the shape of what it gives."""

from __future__ import annotations

from concurrent.futures import Executor

import msgspec

from kvferry.protocol.messages import Token
from kvferry.serve.exchange import Dialect, Prompt
from kvferry.serve.front import Front
from kvferry.serve.logprobs import TextEntries, TextLogprobs
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
    logprobs: TextLogprobs | None = None


class CompletionWriter(AnswerWriter):
    """The stream of a choice: a chunk per token that has something to show; the last one carries the finish_reason."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._prompts_due = [self._prompt_ids(index) for index in range(head.choices)]  # go with the first chunks
        self._entries = [] if head.pieces is None else [TextEntries(head.pieces) for _ in range(head.choices)]

    def whole(self, answers: list[list[Token]], usage: Usage) -> Completion:
        choices = tuple(
            TextChoice(
                "".join(token.text for token in tokens), tokens[-1].finish_reason, self._ids(tokens),
                self._prompt_ids(index), index, self._logprobs(index, tokens),
            )
            for index, tokens in enumerate(answers)
        )  # fmt: skip
        return self._whole(choices, usage)

    def tokens(self, index: int, tokens: list[Token]) -> bytes:
        parts = []
        for token in tokens:
            if token.text or token.finish_reason or self._shows_every_token:
                choice = TextChoice(
                    token.text, token.finish_reason or None, self._ids([token]), self._prompts_due[index], index,
                    self._logprobs(index, [token]),
                )  # fmt: skip
                parts.append(self._chunk(choice))
                self._prompts_due[index] = msgspec.UNSET
        return b"".join(parts)

    def _logprobs(self, index: int, tokens: list[Token]) -> TextLogprobs | None:
        return self._entries[index].of(tokens) if self._entries else None


async def _encode(completion: CompletionRequest, front: Front, executor: Executor) -> list[Prompt]:
    prompts = []
    for field, prompt in completion.prompts():
        if isinstance(prompt, str):
            ids = await encode_text(field, prompt, front.encoder, executor)
        else:
            check_vocabulary(field, prompt, front.info.vocab_size)
            ids = tuple(prompt)
        prompts.append(Prompt(field, ids))
    return prompts


COMPLETIONS = Dialect("cmpl", parse_completion, _encode, CompletionWriter, DEFAULT_MAX_TOKENS)
