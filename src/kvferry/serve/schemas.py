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
from kvferry.serve.strict import Unsupported, convert, decode_object, known_only, short, token_biases

MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_SAMPLES = 16
MAX_CHOICES = 64

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
#: How many of the most likely tokens may be asked for with each token.
TopCount = Annotated[int, Meta(ge=0, le=20)]
Text = Annotated[str, Meta(min_length=1)]
TokenIdList = Annotated[list[int], Meta(min_length=1)]
#: A prompt on its own is a list of one; msgspec takes one kind of list per union, so mixtures are refused afterwards.
PromptField = Text | Annotated[list[int | Text | TokenIdList], Meta(min_length=1)]


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

    vLLM's extensions: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, and
    `return_token_ids`, with which the answer also shows the ids of the prompt and of its own tokens. The upper and
    lower limits of `repetition_penalty` keep logits finite.
    """

    #: The field that holds the prompt, for messages about it.
    prompt_field: ClassVar[str]

    model: Annotated[str, Meta(min_length=1)]
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    logit_bias: dict[str, Any] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    user: str | None = None

    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def samples(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    def biases(self) -> tuple[tuple[int, float], ...]:
        """(token id, added value) each. Raises InvalidRequest."""
        return token_biases(self.logit_bias or {})

    def top_logprobs_count(self) -> int | None:
        """How many of the most likely tokens to show with each token; None: no log-probabilities at all."""
        raise NotImplementedError

    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def asked_tokens(self) -> tuple[str, int | None]:
        """The limit of the answer's length, and the name that the client gave it by."""
        return "max_tokens", self.max_tokens


class ChatRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None

    def top_logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def asked_tokens(self) -> tuple[str, int | None]:
        if self.max_tokens is None and self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`prompt`: text, or token ids, which `prepare` holds against the model's vocabulary; or a list of either.

    `logprobs` goes up to 20, as `top_logprobs` in chat (OpenAI's limit here is 5). OpenAI's `best_of` makes more
    answers than it returns; it is accepted where it asks for what `n` asks for.
    """

    prompt_field: ClassVar[str] = "prompt"

    prompt: PromptField
    logprobs: TopCount | None = None
    best_of: int | None = None

    def prompts(self) -> list[tuple[str, str | list[int]]]:
        """Each prompt, with its place in the body for messages about it."""
        if isinstance(self.prompt, str):
            return [("prompt", self.prompt)]
        if isinstance(self.prompt[0], int):
            return [("prompt", self.prompt)]  # type: ignore[list-item]
        return [(f"prompt[{i}]", prompt) for i, prompt in enumerate(self.prompt)]  # type: ignore[misc]

    def top_logprobs_count(self) -> int | None:
        return self.logprobs


_UNSUPPORTED: Unsupported = {
    "add_special_tokens": (), "allowed_token_ids": (), "bad_words": ([],), "echo": (False,),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "priority": (0,), "prompt_logprobs": (),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (), "structured_outputs": (),
    "truncate_prompt_tokens": (), "use_beam_search": (False,),
}  # fmt: skip

UNSUPPORTED_IN_CHAT: Unsupported = _UNSUPPORTED | {
    "add_generation_prompt": (True,), "audio": (), "best_of": (1,), "chat_template": (), "chat_template_kwargs": ({},),
    "continue_final_message": (False,), "function_call": ("none",), "functions": ([],), "metadata": ({},),
    "modalities": (["text"],), "moderation": (), "parallel_tool_calls": (True, False), "prediction": (),
    "prompt_cache_key": (), "prompt_cache_retention": (), "reasoning_effort": (),
    "response_format": ({"type": "text"},), "safety_identifier": (), "service_tier": ("auto", "default"),
    "store": (False,), "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": (), "web_search_options": (),
}  # fmt: skip

UNSUPPORTED_IN_COMPLETION: Unsupported = _UNSUPPORTED | {"suffix": ("",)}

#: OpenAI pads its chunks unless `include_obfuscation` is false; vLLM's `continuous_usage_stats` repeats the usage.
UNSUPPORTED_IN_STREAM_OPTIONS: Unsupported = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}

#: The same for fields of a message: what OpenAI's own replies carry must be acceptable as history.
UNSUPPORTED_IN_MESSAGE: Unsupported = {
    "annotations": ([],), "audio": (), "function_call": (), "name": (), "reasoning_content": (), "refusal": (),
    "tool_call_id": (), "tool_calls": ([],),
}  # fmt: skip


def parse_chat(body: bytes) -> ChatRequest:
    """The request in `body`. Raises InvalidRequest (or a subclass) that names field, value and limit."""
    fields = _known(body, ChatRequest, UNSUPPORTED_IN_CHAT)
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [
            known_only(message, f"messages[{i}].", ChatMessage, UNSUPPORTED_IN_MESSAGE)
            if isinstance(message, dict) else message
            for i, message in enumerate(messages)
        ]  # fmt: skip
    chat = convert(fields, ChatRequest)
    _check_together(chat)
    if chat.top_logprobs and not chat.logprobs:
        raise InvalidRequest(f"top_logprobs ({chat.top_logprobs}) needs logprobs: true", "top_logprobs")
    if None not in (chat.max_tokens, chat.max_completion_tokens) and chat.max_tokens != chat.max_completion_tokens:
        raise InvalidRequest(
            f"max_tokens ({chat.max_tokens}) and max_completion_tokens ({chat.max_completion_tokens}) are two names "
            "of one limit and differ", "max_tokens",
        )  # fmt: skip
    return chat


def parse_completion(body: bytes) -> CompletionRequest:
    """The request in `body`. Raises InvalidRequest (or a subclass) that names field, value and limit."""
    completion = convert(_known(body, CompletionRequest, UNSUPPORTED_IN_COMPLETION), CompletionRequest)
    if isinstance(completion.prompt, list):
        _check_one_kind(completion.prompt)
    _check_together(completion)
    if (best_of := completion.best_of) not in (None, completion.samples()):
        raise UnsupportedParameter(
            f"best_of: {best_of} is not supported with n {completion.samples()}; allowed: the value of n, since every "
            "answer that is made is returned", "best_of",
        )  # fmt: skip
    choices = len(completion.prompts()) * completion.samples()
    if choices > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt: {len(completion.prompts())} prompts with n {completion.samples()} make {choices} answers; the "
            f"limit is {MAX_CHOICES} per request", "prompt",
        )  # fmt: skip
    return completion


def _known(body: bytes, struct: type[GenerationRequest], unsupported: Unsupported) -> dict[str, Any]:
    """The body's fields without those that ask for nothing."""
    fields = known_only(decode_object(body), "", struct, unsupported)
    if isinstance(options := fields.get("stream_options"), dict):
        fields["stream_options"] = known_only(options, "stream_options.", StreamOptions, UNSUPPORTED_IN_STREAM_OPTIONS)
    return fields


def _check_one_kind(items: list[Any]) -> None:
    """Token ids of one prompt, or texts, or lists of token ids."""
    kinds = {int: "a token id", str: "a text", list: "a list of token ids"}
    at = next((i for i, item in enumerate(items) if type(item) is not type(items[0])), None)
    if at is not None:
        raise InvalidRequest(
            f"prompt[{at}]: {short(items[at])} is not acceptable: prompt[0] is {kinds[type(items[0])]}, and all items "
            "must be of one kind", f"prompt[{at}]",
        )  # fmt: skip


def _check_together(request: GenerationRequest) -> None:
    """What one field's own type can't say."""
    request.biases()
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
    name, asked = request.asked_tokens()
    if asked is not None and request.min_tokens is not None and request.min_tokens > asked:
        raise InvalidRequest(f"min_tokens ({request.min_tokens}) is over {name} ({asked})", "min_tokens")
