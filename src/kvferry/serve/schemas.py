"""What a client may send to /v1/chat/completions and /v1/completions, and how a body becomes a request.

Nothing is ignored in silence: a field that does not exist is refused by name, one that exists in OpenAI's API
(or in common extensions of it) but has no effect here is refused by name unless its value asks for nothing.
The one opaque field is `user`: it is accepted, and neither read nor kept.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.errors import InvalidRequest
from kvferry.serve.errors import UnsupportedParameter
from kvferry.serve.strict import Unsupported, convert, decode_object, known_only, short

MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 64

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    def text(self) -> str:
        """The content as one string; parts follow each other with nothing between."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields and ranges that the routes share; None means "not given". Defaults are filled in by `prepare`.

    `return_token_ids` is vLLM's extension: the answer also shows the ids of the prompt and of its own tokens.
    """

    #: The field that holds the prompt, for messages about it.
    prompt_field: ClassVar[str]

    model: Annotated[str, Meta(min_length=1)]
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    max_tokens: TokenCount | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    user: str | None = None

    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def asked_tokens(self) -> tuple[str, int | None]:
        """The limit of the answer's length, and the name that the client gave it by."""
        return "max_tokens", self.max_tokens


class ChatRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: TokenCount | None = None

    def asked_tokens(self) -> tuple[str, int | None]:
        if self.max_tokens is None and self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`prompt`: text, or token ids, which `prepare` holds against the model's vocabulary."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[str, Meta(min_length=1)] | Annotated[list[int], Meta(min_length=1)]


_UNSUPPORTED: Unsupported = {
    "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "ignore_eos": (False,), "logit_bias": ({},),
    "min_p": (0,), "min_tokens": (0,), "presence_penalty": (0,), "prompt_logprobs": (), "repetition_penalty": (1,),
}  # fmt: skip

UNSUPPORTED_IN_CHAT: Unsupported = _UNSUPPORTED | {
    "audio": (), "function_call": ("none",), "functions": ([],), "logprobs": (False,), "metadata": ({},),
    "modalities": (["text"],), "moderation": (), "parallel_tool_calls": (True, False), "prediction": (),
    "prompt_cache_key": (), "prompt_cache_retention": (), "reasoning_effort": (),
    "response_format": ({"type": "text"},), "safety_identifier": (), "service_tier": ("auto", "default"),
    "store": (False,), "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "verbosity": (),
    "web_search_options": (),
}  # fmt: skip

#: Here `logprobs` is a number, and 0 asks for those of the chosen tokens.
UNSUPPORTED_IN_COMPLETION: Unsupported = _UNSUPPORTED | {"logprobs": (), "suffix": ("",)}

#: The same for fields of a message: what OpenAI's own replies carry must be acceptable as history.
UNSUPPORTED_IN_MESSAGE: Unsupported = {
    "annotations": ([],), "audio": (), "function_call": (), "name": (), "reasoning_content": (), "refusal": (),
    "tool_call_id": (), "tool_calls": ([],),
}  # fmt: skip


def parse_chat(body: bytes) -> ChatRequest:
    """The request in `body`. Raises InvalidRequest (or a subclass) that names field, value and limit."""
    fields = known_only(decode_object(body), "", ChatRequest, UNSUPPORTED_IN_CHAT)
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [
            known_only(message, f"messages[{i}].", ChatMessage, UNSUPPORTED_IN_MESSAGE)
            if isinstance(message, dict) else message
            for i, message in enumerate(messages)
        ]  # fmt: skip
    chat = convert(fields, ChatRequest)
    _check_together(chat)
    if None not in (chat.max_tokens, chat.max_completion_tokens) and chat.max_tokens != chat.max_completion_tokens:
        raise InvalidRequest(
            f"max_tokens ({chat.max_tokens}) and max_completion_tokens ({chat.max_completion_tokens}) are two names "
            "of one limit and differ", "max_tokens",
        )  # fmt: skip
    return chat


def parse_completion(body: bytes) -> CompletionRequest:
    """The request in `body`. Raises InvalidRequest (or a subclass) that names field, value and limit."""
    fields = known_only(decode_object(body), "", CompletionRequest, UNSUPPORTED_IN_COMPLETION)
    _check_one_prompt(fields.get("prompt"))
    completion = convert(fields, CompletionRequest)
    _check_together(completion)
    return completion


def _check_one_prompt(prompt: Any) -> None:
    """A list whose first item is itself a prompt is OpenAI's way to ask for several answers."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise UnsupportedParameter(
            f"prompt: not supported yet: one prompt per request; got a list of prompts: {short(prompt)}", "prompt"
        )


def _check_together(request: GenerationRequest) -> None:
    """What one field's own type can't say."""
    if request.n not in (None, 1):
        raise UnsupportedParameter(f"n: {request.n} is not supported; allowed: 1", "n")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
